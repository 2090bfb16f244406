"""What every rpc shares: who calls, what may go wrong, and how it is said."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import grpc

from batond.daemon.errors import BatondError, PermissionDeniedError, UnauthenticatedError
from batond.daemon.front import audit
from batond.daemon.front.identity import require_admin
from batond.daemon.front.local_admin import user_of_peer
from batond.daemon.front.status import to_status
from batond.daemon.telemetry.logging import bind_ids, get_logger
from batond.daemon.telemetry.trace_context import trace_id_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from batond.daemon.front.identity import Identities, LocalAdministrators, Tenant
    from batond.daemon.telemetry.metrics import Metrics

#: Metadata that a gateway puts on each of its calls.
GATEWAY_KEY: Final = "batond-gateway"

_Answer = TypeVar("_Answer")

_log = get_logger(__name__)


class _Stream:
    """An open stream: who opened it, and whether they would be let in now."""

    def __init__(self, tenant: Tenant, admit: Callable[[], Tenant], stay: asyncio.Timeout) -> None:
        self._tenant, self._admit, self._stay = tenant, admit, stay
        self.refusal: BatondError | None = None

    def recheck(self) -> None:
        """End the handler where it stands if its caller is not let in any more."""
        if self.refusal is not None:
            return
        try:
            now = self._admit()
            if now.name != self._tenant.name:
                raise UnauthenticatedError("these credentials name another tenant now", reason="BAD_TOKEN")
        except BatondError as error:
            self.refusal = error
            _log.info("stream_ended", tenant=self._tenant.name, reason=error.reason)
            self._stay.reschedule(asyncio.get_running_loop().time())


class Calls:
    """Wraps handlers: finds the tenant, binds log ids, turns errors into statuses, writes the audit log.

    Args:
        identify: Finds who made a call, by its context: `by_credentials` or `by_user`.
        metrics: Counts refusals.
        traced: Lines of the log name the trace that a call belongs to.
    """

    def __init__(self, identify: Callable[[Any], Tenant], metrics: Metrics, *, traced: bool = False) -> None:
        self._identify = identify
        self._metrics, self._traced = metrics, traced
        self._streams: dict[Any, _Stream] = {}

    async def answer(
        self, method: str, context: Any, handle: Callable[[Tenant], Awaitable[_Answer]]
    ) -> _Answer:
        """Run a handler for the caller's tenant; whatever it raises ends the call with its status."""

        async def identified() -> _Answer:
            return await handle(self._who(method, context))

        return await self._guarded(method, context, identified)

    async def stream(self, method: str, context: Any, handle: Callable[[Tenant], Awaitable[None]]) -> None:
        """As `answer`, for a handler that writes its responses itself; it ends when its caller is refused."""

        async def attended(tenant: Tenant) -> None:
            await self._attend(context, tenant, handle, lambda: self._identify(context))

        with self._metrics.open_streams.track_inprogress():
            await self.answer(method, context, attended)

    async def act(
        self,
        method: str,
        context: Any,
        handle: Callable[[Tenant], Awaitable[_Answer]],
        *,
        target: str | Callable[[str], str] = "",
        reads: bool = False,
    ) -> _Answer:
        """As `answer`, for administrators alone. The audit log says what came of it.

        Args:
            method: Name of the call.
            context: The call's.
            handle: Does it.
            target: Whom or what it is done to; may depend on the caller's tenant, "" if it is not known.
            reads: It changes nothing: only refusals are of interest.
        """

        async def audited() -> _Answer:
            actor = ""

            def record(outcome: str, reason: str = "") -> None:
                named = target if isinstance(target, str) else target(actor)
                audit.record(
                    method, actor=actor, target=named, outcome=outcome, reason=reason, peer=context.peer()
                )

            try:
                tenant = self._who(method, context)
                actor = tenant.name
                require_admin(tenant)
                answer = await handle(tenant)
            except (asyncio.CancelledError, grpc.aio.InternalError):
                # The caller hung up in the middle; what was asked for may have been done.
                if not reads:
                    record("failed", "CANCELLED")
                raise
            except Exception as error:
                if isinstance(error, BatondError):
                    record("refused", error.reason)
                else:
                    record("failed", type(error).__name__)
                raise
            if not reads:
                record("done")
            return answer

        return await self._guarded(method, context, audited)

    async def watch(self, method: str, context: Any, handle: Callable[[Tenant], Awaitable[None]]) -> None:
        """As `act`, for a handler that only reads and writes its responses itself; it ends as in `stream`."""

        def administrator() -> Tenant:
            tenant = self._identify(context)
            require_admin(tenant)
            return tenant

        async def attended(tenant: Tenant) -> None:
            await self._attend(context, tenant, handle, administrator)

        with self._metrics.open_streams.track_inprogress():
            await self.act(method, context, attended, reads=True)

    def recheck(self) -> None:
        """Tenants have changed: end the streams whose callers would not be let in any more."""
        for stream in list(self._streams.values()):
            stream.recheck()

    def expelled(self, context: Any) -> bool:
        """Whether a stream is being ended because its caller is not let in any more."""
        stream = self._streams.get(context)
        return stream is not None and stream.refusal is not None

    async def _attend(
        self,
        context: Any,
        tenant: Tenant,
        handle: Callable[[Tenant], Awaitable[None]],
        admit: Callable[[], Tenant],
    ) -> None:
        try:
            async with asyncio.timeout(None) as stay:
                stream = self._streams[context] = _Stream(tenant, admit, stay)
                await handle(tenant)
        except TimeoutError:
            if stream.refusal is None or not stay.expired():
                raise
            raise stream.refusal from None
        finally:
            self._streams.pop(context, None)

    def _who(self, method: str, context: Any) -> Tenant:
        tenant = self._identify(context)
        bind_ids(rpc=method, tenant=tenant.name)
        if self._traced and (trace_id := trace_id_of(context.invocation_metadata() or ())):
            bind_ids(trace_id=trace_id)
        return tenant

    async def _guarded(self, method: str, context: Any, work: Callable[[], Awaitable[_Answer]]) -> _Answer:
        try:
            return await work()
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                # Nobody cancelled this call: something inside was, and the client would wait for ever.
                await self._refuse(method, context, RuntimeError(f"cancelled inside: {error!r}"))
            raise  # The client is gone, or the server ends: gRPC knows.
        except grpc.aio.InternalError as error:
            # A response could not be written: the client is gone, before gRPC had told the handler.
            raise asyncio.CancelledError from error
        except Exception as error:  # noqa: BLE001 - nothing may leave without a status
            await self._refuse(method, context, error)

    async def _refuse(self, method: str, context: Any, error: Exception) -> NoReturn:
        status = to_status(error)
        self._metrics.rpcs.labels(method, status.code.name).inc()
        await context.abort_with_status(status)
        raise RuntimeError("abort returned")


def by_credentials(identities: Identities) -> Callable[[Any], Tenant]:
    """Who a token or a client certificate says."""

    def identify(context: Any) -> Tenant:
        return identities.identify(context.invocation_metadata(), context.auth_context())

    return identify


def by_user(administrators: LocalAdministrators) -> Callable[[Any], Tenant]:
    """Which user of this host the administrators' socket says; no gateway, which calls for others."""

    def identify(context: Any) -> Tenant:
        if any(key == GATEWAY_KEY for key, _ in context.invocation_metadata() or ()):
            raise PermissionDeniedError(
                "a gateway calls for others: point it at another address than the administrators' socket",
                reason="NOT_FOR_GATEWAYS",
            )
        return administrators.administrator(user_of_peer(context.peer()))

    return identify

"""What every rpc shares: who calls, what may go wrong, and how it is said."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from batond.daemon.front.status import to_status
from batond.daemon.telemetry.logging import bind_ids

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from batond.daemon.front.identity import Identities, Tenant
    from batond.daemon.telemetry.metrics import Metrics

_Answer = TypeVar("_Answer")


class Calls:
    """Wraps handlers: finds the tenant, binds log ids, turns errors into statuses.

    Args:
        identities: Tenants by credentials.
        metrics: Counts refusals.
    """

    def __init__(self, identities: Identities, metrics: Metrics) -> None:
        self._identities = identities
        self._metrics = metrics

    async def answer(
        self, method: str, context: Any, handle: Callable[[Tenant], Awaitable[_Answer]]
    ) -> _Answer:
        """Run a handler for the caller's tenant; whatever it raises ends the call with its status."""
        try:
            tenant = self._identities.identify(context.invocation_metadata())
            bind_ids(rpc=method, tenant=tenant.name)
            return await handle(tenant)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                # Nobody cancelled this call: something inside was, and the client would wait for ever.
                await self._refuse(method, context, RuntimeError(f"cancelled inside: {error!r}"))
            raise  # The client is gone, or the server ends: gRPC knows.
        except Exception as error:  # noqa: BLE001 - nothing may leave without a status
            await self._refuse(method, context, error)

    async def stream(self, method: str, context: Any, handle: Callable[[Tenant], Awaitable[None]]) -> None:
        """As `answer`, for a handler that writes its responses itself."""
        with self._metrics.open_streams.track_inprogress():
            await self.answer(method, context, handle)

    async def _refuse(self, method: str, context: Any, error: Exception) -> NoReturn:
        status = to_status(error)
        self._metrics.rpcs.labels(method, status.code.name).inc()
        await context.abort_with_status(status)
        raise RuntimeError("abort returned")

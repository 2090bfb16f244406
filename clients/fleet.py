"""The channels of a client, one an address, opened when they are needed, behind the face of one channel."""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Any, Final

import grpc

from batond.clients.errors import InvalidRequestError
from batond.clients.transport import ClientTLS, Connection, bearer, connection, is_local
from batond.clients.trip import Rota, Trip, model_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batond.clients.retry import RetryPolicy

#: What a daemon's hint may name: a host and a port, nothing of gRPC's other schemes.
_HOST_PORT: Final = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}")


def open_sync(way: Connection) -> grpc.Channel:
    """Opens a channel for threads."""
    if way.credentials is None:
        return grpc.insecure_channel(way.target, way.options)
    return grpc.secure_channel(way.target, way.credentials, way.options)


def open_async(way: Connection) -> grpc.aio.Channel:
    """Opens a channel for the running event loop."""
    if way.credentials is None:
        return grpc.aio.insecure_channel(way.target, way.options)
    return grpc.aio.secure_channel(way.target, way.credentials, way.options)


class Method:
    """One call of the contract, at any of the addresses."""

    def __init__(self, fleet: Fleet, kind: str, path: str, how: dict[str, Any]) -> None:
        self._fleet, self._kind, self._path, self._how = fleet, kind, path, how
        self._made: dict[int, Any] = {}

    def at(self, place: int) -> Any:
        """Gives what gRPC makes of the call on that address's channel."""
        made = self._made.get(place)
        if made is None:
            make = getattr(self._fleet.channel(place), self._kind)
            made = self._made[place] = make(self._path, **self._how)
        return made


class Fleet:
    """All that a client knows of its daemons. Stubs take it for a channel; their calls are `Method`s.

    Args:
        targets: One address or several; all must be of daemons that share a queue, or serve different models.
        open_channel: Opens the channel of the sync or the asyncio stack.
        token: The tenant's token.
        tls: None is plain text.
        allow_plaintext_token: See `connection`.
        follow_routing: Also go to addresses that only a daemon has named.

    Raises:
        ValueError: The token would cross a network in plain text, there is no address, or `follow_routing`
            without what makes it safe.
    """

    def __init__(
        self,
        targets: str | Sequence[str],
        open_channel: Callable[[Connection], Any],
        *,
        token: str | None,
        tls: ClientTLS | None,
        allow_plaintext_token: bool,
        follow_routing: bool = False,
    ) -> None:
        names = [targets] if isinstance(targets, str) else list(dict.fromkeys(targets))
        if not names:
            raise ValueError("a client needs the address of at least one daemon")
        if follow_routing and (tls is None or (tls.root_ca is None and tls.server_name is None)):
            # A daemon's word would else send the token to any host that can show some certificate.
            raise ValueError(
                "follow_routing needs tls=ClientTLS(root_ca=...) or a server_name: addresses that you did "
                "not give must prove that they are yours before they get the token"
            )
        self._open = open_channel
        self._secrets = {"token": token, "tls": tls, "allow_plaintext_token": allow_plaintext_token}
        self._names = names
        self._ways = [self._way(name) for name in names]
        self._private = bool(tls or allow_plaintext_token or all(is_local(way.target) for way in self._ways))
        self._channels: dict[int, Any] = {}
        self._follows = follow_routing
        self._lock = threading.Lock()
        self._closed = False
        self._rota = Rota(len(names))

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries."""
        return self._ways[0].metadata

    def bearer(self, token: str | None) -> tuple[tuple[str, str], ...]:
        """Gives what a call carries in the name of another tenant.

        Raises:
            ValueError: No header can carry the token, or it would cross a network in plain text.
        """
        if token is not None and not self._private:
            raise ValueError(
                "a token would cross a network in plain text: make the client with tls=ClientTLS(...), or "
                "allow_plaintext_token=True if the way there is protected otherwise"
            )
        return bearer(token)

    def trip(self, policy: RetryPolicy, attempts: int | None = None, request: object = None) -> Trip:
        """Begins a call."""
        return Trip(
            self._rota, policy, attempts or policy.attempts, model=model_of(request), hinted=self._hinted
        )

    def only(self) -> None:
        """Refuses a call that is meant for one daemon by a client of several.

        Raises:
            InvalidRequestError: There are several addresses.
        """
        if len(self._names) > 1:
            raise InvalidRequestError("this call is for one daemon: make a client with its address alone")

    def channel(self, place: int) -> Any:
        """Gives the channel to an address."""
        with self._lock:
            if self._closed:
                raise ValueError("this client is closed")
            found = self._channels.get(place)
            if found is None:
                found = self._channels[place] = self._open(self._ways[place])
            return found

    def closing(self) -> list[Any]:
        """Gives all channels there are, to be closed; no other one will be opened."""
        with self._lock:
            self._closed = True
            return list(self._channels.values())

    def unary_unary(self, path: str, **how: Any) -> Method:
        """See grpc.Channel."""
        return Method(self, "unary_unary", path, how)

    def unary_stream(self, path: str, **how: Any) -> Method:
        """See grpc.Channel."""
        return Method(self, "unary_stream", path, how)

    def stream_unary(self, path: str, **how: Any) -> Method:
        """See grpc.Channel."""
        return Method(self, "stream_unary", path, how)

    def stream_stream(self, path: str, **how: Any) -> Method:
        """See grpc.Channel."""
        return Method(self, "stream_stream", path, how)

    def _way(self, name: str) -> Connection:
        return connection(name, **self._secrets)  # type: ignore[arg-type] # as given

    def _hinted(self, addresses: str) -> list[int]:
        """The numbers of addresses that a daemon named and that may be gone to."""
        found = []
        for name in filter(_HOST_PORT.fullmatch, addresses.split(",")):
            with self._lock:
                if name not in self._names and self._follows:
                    self._names.append(name)
                    self._ways.append(self._way(name))
                    self._rota.add()
                if name in self._names:
                    found.append(self._names.index(name))
        return found

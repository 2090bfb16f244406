"""Who calls the gateway: the bearer token, handed on to the daemon, which alone knows tenants."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from batond.clients.gateway.problems import ApiError

if TYPE_CHECKING:
    from starlette.datastructures import Headers

    from batond.clients.aio import AsyncClient

#: W3C Trace Context, https://www.w3.org/TR/trace-context/#traceparent-header-field-values
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[ -~]{1,200})?")
_SCHEME: Final = "bearer "
#: Goes with every call: a daemon's administrators' socket, which asks for no credentials, refuses it.
MARK: Final = ("batond-gateway", "1")


class Doorkeeper:
    """Gives each request a client that calls in the name of who sent it.

    Args:
        client: The one whose connections all share.
        needs_token: Whether a token must be there.
    """

    def __init__(self, client: AsyncClient, *, needs_token: bool) -> None:
        self._client, self._needs_token = client, needs_token

    def calling(self, headers: Headers) -> AsyncClient:
        """The client of a request, by its headers.

        Raises:
            ApiError: The credentials can't be read, or are missing where the daemon would not miss them.
        """
        token = bearer_of(headers)
        if token is None and self._needs_token:
            raise _unauthenticated("credentials are missing: send the header 'Authorization: Bearer <token>'")
        trace = headers.get("traceparent", "")
        metadata = (MARK, *((("traceparent", trace),) if _TRACEPARENT.fullmatch(trace) else ()))
        try:
            return self._client.calling(token, metadata)
        except ValueError as error:
            raise _unauthenticated(str(error)) from error


def bearer_of(headers: Headers) -> str | None:
    """The token of a request; None if it brings no credentials.

    Raises:
        ApiError: They are of another kind.
    """
    authorization = headers.get("authorization")
    if authorization is None:
        return None
    if authorization[: len(_SCHEME)].lower() != _SCHEME or not authorization[len(_SCHEME) :].strip():
        raise _unauthenticated("the credentials can't be read: send 'Authorization: Bearer <token>'")
    return authorization[len(_SCHEME) :].strip()


def _unauthenticated(message: str) -> ApiError:
    return ApiError(401, message, kind="authentication_error", code="invalid_api_key")

"""The gateway as a Starlette application: routes, life, errors, and the bound on bodies."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
from typing import TYPE_CHECKING, Any, Final, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from batond.clients.aio import AsyncClient
from batond.clients.errors import BatondClientError
from batond.clients.gateway import asked, fields, models
from batond.clients.gateway.access import MARK, Doorkeeper
from batond.clients.gateway.bodies import BodyLimit
from batond.clients.gateway.generation import Generation
from batond.clients.gateway.page import Page
from batond.clients.gateway.problems import ApiError, of_error
from batond.clients.gateway.tokens import TokenTexts
from batond.clients.retry import RetryPolicy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from starlette.requests import Request
    from starlette.routing import BaseRoute

    from batond.clients.gateway.settings import GatewaySettings

#: Callers try again themselves: they are told of a full queue at once, and of a daemon that is away after one
#: more look at all addresses. A stream that broke is taken up with all patience.
RETRY: Final = RetryPolicy(attempts=2, wait_for_quota=False)
_MOST_MODELS: Final = 64

_log = logging.getLogger(__name__)


class Gateway:
    """What the routes share; `request.app.state.gateway`.

    Args:
        settings: As given.
        client: Calls the daemons, in nobody's name.
        each: A client for each single address.

    Attributes:
        settings: As given.
        client: As given.
    """

    def __init__(
        self, settings: GatewaySettings, client: AsyncClient, each: Mapping[str, AsyncClient]
    ) -> None:
        self.settings, self.client = settings, client
        self._each = {
            address: Doorkeeper(one, needs_token=settings.needs_token) for address, one in each.items()
        }
        self._doorkeeper = Doorkeeper(client, needs_token=settings.needs_token)
        self._texts: dict[str, TokenTexts] = {}

    def calling(self, request: Request) -> AsyncClient:
        """A client in the name of who sent the request.

        Raises:
            ApiError: Its credentials can't be read.
        """
        return self._doorkeeper.calling(request.headers)

    def calling_each(self, request: Request) -> dict[str, AsyncClient]:
        """The same for each single daemon, by its address, for calls that are one daemon's affair."""
        return {address: one.calling(request.headers) for address, one in self._each.items()}

    def texts(self, model: str) -> TokenTexts:
        """What a model's tokens stand for."""
        if model not in self._texts and len(self._texts) >= _MOST_MODELS:
            self._texts.clear()  # Names come from callers.
        return self._texts.setdefault(model, TokenTexts())


def gateway_of(request: Request) -> Gateway:
    """The gateway that a request came to."""
    return cast("Gateway", request.app.state.gateway)


def create_app(settings: GatewaySettings, *, extra_routes: Sequence[BaseRoute] = ()) -> Starlette:
    """Make the application; its client is opened and closed by its lifespan.

    Args:
        settings: What to do.
        extra_routes: Further routes; they find the gateway by `gateway_of`.

    Raises:
        ValueError: The addresses of the daemons can't be.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            client, *each = [
                await stack.enter_async_context(open_client(settings, daemons))
                for daemons in (settings.daemons, *((one,) for one in settings.daemons))
            ]
            client = client.calling(None, (MARK,))
            app.state.gateway = Gateway(settings, client, dict(zip(settings.daemons, each, strict=True)))
            yield

    page = Page(settings)
    app = Starlette(
        routes=[
            Route("/healthz", _health),
            Route(asked.CHAT_PATH, _generate, methods=["POST"]),
            Route(asked.COMPLETIONS_PATH, _generate, methods=["POST"]),
            Route("/v1/models", _models),
            Route("/v1/models/{model:path}", _model),
            *page.routes(),
            *extra_routes,
        ],
        middleware=[Middleware(BodyLimit, settings=settings)],
        exception_handlers={
            ApiError: _refused,
            BatondClientError: _failed,
            HTTPException: _http,
            Exception: _unknown,
        },
        lifespan=lifespan,
    )
    app.state.page = page
    return app


def open_client(settings: GatewaySettings, daemons: Sequence[str]) -> AsyncClient:
    """Open a client of some of the daemons.

    Raises:
        ValueError: An address can't be.
    """
    return AsyncClient(
        daemons,
        tls=settings.tls,
        timeout_s=settings.timeout_s,
        retry=RETRY,
        allow_plaintext_token=settings.allow_plaintext_token,
    )


def answer(error: ApiError) -> Response:
    """An error as a response."""
    return JSONResponse(error.body, error.status, error.headers)


async def _generate(request: Request) -> Generation:
    gateway = gateway_of(request)
    client = gateway.calling(request)
    body = fields.read_object(await request.body())
    wanted = asked.read(request.url.path, body, gateway.settings)
    return Generation(
        wanted,
        client,
        gateway.texts(wanted.model),
        tiers=gateway.settings.tiers,
        keepalive_s=gateway.settings.keepalive_s,
    )


async def _models(request: Request) -> Response:
    found = await models.served(list(gateway_of(request).calling_each(request).values()))
    return JSONResponse({"object": "list", "data": found})


async def _model(request: Request) -> Response:
    name = request.path_params["model"]
    for model in await models.served(list(gateway_of(request).calling_each(request).values())):
        if model["id"] == name:
            return JSONResponse(model)
    raise ApiError(404, f"the model {name[:100]!r} is not served here", param="model", code="model_not_found")


async def _health(request: Request) -> Response:
    """Whether a daemon answers: no credentials, no facts."""
    try:
        info = await gateway_of(request).client.server_info()
        state = str(info.state)
    except BatondClientError as error:
        # Who is refused was answered.
        status = of_error(error).status
        state = "ready" if status in {401, 403} else "unavailable"
    return Response(
        json.dumps({"status": state}), 503 if state == "unavailable" else 200, media_type="application/json"
    )


async def _refused(request: Request, error: Exception) -> Response:
    del request
    return answer(cast("ApiError", error))


async def _failed(request: Request, error: Exception) -> Response:
    del request
    return answer(of_error(cast("BatondClientError", error)))


async def _http(request: Request, error: Exception) -> Response:
    raised = cast("HTTPException", error)
    message = f"{request.method} {request.url.path}: {raised.detail}"
    told: dict[str, Any] = ApiError(raised.status_code, message, code="unknown_url").body
    return JSONResponse(told, raised.status_code, raised.headers)


async def _unknown(request: Request, error: Exception) -> Response:
    """A fault of the gateway's own: the caller gets an id, the text goes to the log."""
    error_id = secrets.token_hex(8)
    _log.error("error %s in %s %s", error_id, request.method, request.url.path, exc_info=error)
    message = f"internal error {error_id}: the operator finds it in the gateway's log under this id"
    return answer(ApiError(500, message, kind="server_error", code="internal_error"))

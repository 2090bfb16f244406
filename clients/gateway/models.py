"""`/v1/models`: what the daemons serve."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from batond.clients.errors import BatondClientError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batond.clients.aio import AsyncClient
    from batond.clients.model import ServerInfo


async def served(clients: Sequence[AsyncClient]) -> list[dict[str, Any]]:
    """The models that the daemons of some addresses serve, each once, by name.

    Args:
        clients: One an address, in the caller's name.

    Raises:
        BatondClientError: No daemon answers; what the first said.
    """
    answers = await asyncio.gather(*(client.server_info() for client in clients), return_exceptions=True)
    found: dict[str, dict[str, Any]] = {}
    for answer in answers:
        if isinstance(answer, BaseException):
            if not isinstance(answer, BatondClientError):
                raise answer
        else:
            found.setdefault(answer.model, _shown(answer))
    if not found:
        raise next(one for one in answers if isinstance(one, BatondClientError))
    return [found[name] for name in sorted(found)]


def _shown(info: ServerInfo) -> dict[str, Any]:
    return {
        "id": info.model,
        "object": "model",
        "created": int(info.start_time.timestamp()) if info.start_time else 0,
        "owned_by": "batond",
        # As other engines that serve this API say it.
        "max_model_len": info.max_query_tokens,
    }

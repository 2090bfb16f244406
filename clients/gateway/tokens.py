"""What tokens stand for, which answers with log-probabilities tell: asked of the daemon once a token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batond.clients.aio import AsyncClient
    from batond.clients.model import TokenLogprobs

#: As many tokens a call as a daemon answers.
_A_CALL: Final = 65_536


class TokenTexts:
    """The texts of one model's tokens, as far as they were asked for."""

    def __init__(self) -> None:
        self._known: dict[int, bytes] = {}

    async def learn(self, client: AsyncClient, token_ids: Iterable[int], model: str) -> None:
        """Ask for those that aren't known yet.

        Raises:
            BatondClientError: The daemon does not answer.
        """
        missing = sorted({one for one in token_ids if one not in self._known})
        for start in range(0, len(missing), _A_CALL):
            part = missing[start : start + _A_CALL]
            self._known.update(zip(part, await client.token_texts(part, model=model), strict=True))

    def raw(self, token_id: int) -> bytes | None:
        """The bytes of a token, which may be a part of a character; None if it isn't known."""
        return self._known.get(token_id)

    def shown(self, token_id: int) -> str:
        """The text of a token; parts of characters are shown as U+FFFD."""
        raw = self._known.get(token_id)
        return f"token_id:{token_id}" if raw is None else raw.decode(errors="replace")

    def joined(self, token_ids: Iterable[int]) -> str:
        """The text of some tokens."""
        return b"".join(self._known.get(one, b"") for one in token_ids).decode(errors="replace")


def ids_of(logprobs: Iterable[TokenLogprobs]) -> Iterable[int]:
    """All tokens that log-probabilities name."""
    for one in logprobs:
        yield one.token_id
        for top in one.top:
            yield top.token_id

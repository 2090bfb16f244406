"""The one shape in which all peers are driven, whatever they look like inside.

    submit ──> waiting ──> running (at most `rows`) ──> tokens by `poll`

A peer that is stepped computes a step in each `poll`; one with threads of its own only hands over what has
come. An urgent request is told as such to peers that can make a difference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batond.bench.peers.task import Task


class Session(Protocol):
    """A peer at work with a bound on what runs at once."""

    def submit(self, key: str, prompt: Sequence[int], output_tokens: int, *, urgent: bool = False) -> None:
        """Take a request.

        Args:
            key: Names it; letters and digits.
            prompt: Token ids.
            output_tokens: Tokens it emits, whatever they are: no token ends it.
            urgent: More so than those that are not.
        """

    def poll(self, until_s: float | None = None) -> list[tuple[str, list[int]]]:
        """Get on, and give the new tokens of each request.

        Args:
            until_s: When the next request is due, by `time.perf_counter`: who can tell begins nothing then
                that the request would have to wait for, and nobody waits beyond it for tokens.

        Raises:
            PeerError: It can't get on.
        """

    def close(self) -> None:
        """Give up what is left, and all memory but the model's."""


class Peer(Protocol):
    """An engine with its model loaded.

    Attributes:
        about: Versions and how it was set up, for people.
    """

    about: dict[str, str]

    def open(self, rows: int, *, streamed: bool) -> Session:
        """Begin anew.

        Args:
            rows: At most so many requests run.
            streamed: Tokens are wanted as they come; otherwise all at the end will do.

        Raises:
            PeerError: It can't.
        """

    def close(self) -> None:
        """Give everything back."""


class Adapter(Protocol):
    """Makes a peer: what each adapter module has at its top."""

    def __call__(self, task: Task) -> Peer:
        """Load the model.

        Raises:
            PeerMissingError: There is no such engine here, or it needs another machine.
        """

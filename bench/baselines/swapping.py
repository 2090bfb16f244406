"""What swapping KV to host memory and back costs the batch, reactive and proactive, in virtual time.

    reactive    [ step ][ out ][ in ][ step ]            the batch waits whenever a row changes hands
    proactive   [ step ][ step ][ step ]                 copies run on the link beside the steps:
                 out out  in  in  out                    out while spare room is short, in while it isn't

Proactive is FastServe's (arXiv:2305.05920, on management of the key-value cache): jobs whose turn is last are
offloaded before room is short, jobs whose turn is next are uploaded before they have it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class Swapping(Protocol):
    """Keeps the books of parked KV; times are virtual seconds."""

    def park(self, name: str, nbytes: int, now_s: float) -> float:
        """Seconds that the batch waits until a row's KV is out of it."""

    def resume(self, name: str, now_s: float) -> float:
        """Seconds that the batch waits until parked KV is back in a row."""

    def advance(self, now_s: float, turns: Sequence[str]) -> None:
        """Let the link work until now; `turns` is who is parked, whose turn is next first."""


class Reactive:
    """Copies when a row changes hands.

    Args:
        byte_s: Seconds a byte.
    """

    def __init__(self, byte_s: float) -> None:
        self._byte_s = byte_s
        self._parked: dict[str, int] = {}

    def park(self, name: str, nbytes: int, now_s: float) -> float:
        """As `Swapping.park`."""
        del now_s
        self._parked[name] = nbytes
        return nbytes * self._byte_s

    def resume(self, name: str, now_s: float) -> float:
        """As `Swapping.resume`."""
        del now_s
        return self._parked.pop(name) * self._byte_s

    def advance(self, now_s: float, turns: Sequence[str]) -> None:
        """Nothing runs beside the steps."""


@dataclass(slots=True)
class _Parked:
    nbytes: int
    on_device: bool


class Proactive:
    """Copies ahead, by way of spare room on the device.

    Args:
        byte_s: Seconds a byte on the link, which does one copy at a time.
        spare_bytes: Room on the device for KV without a row; half of it is kept free for the next victims.

    Attributes:
        copies: Begun beside the steps.
    """

    def __init__(self, byte_s: float, spare_bytes: int) -> None:
        self._byte_s, self._spare_bytes = byte_s, spare_bytes
        self._parked: dict[str, _Parked] = {}
        self._link_free_s = 0.0
        self.copies = 0

    @property
    def free_bytes(self) -> int:
        """Spare room that nobody has."""
        return self._spare_bytes - sum(one.nbytes for one in self._parked.values() if one.on_device)

    def park(self, name: str, nbytes: int, now_s: float) -> float:
        """As `Swapping.park`: no wait where there is spare room."""
        del now_s
        fits = nbytes <= self.free_bytes
        self._parked[name] = _Parked(nbytes, on_device=fits)
        return 0.0 if fits else nbytes * self._byte_s

    def resume(self, name: str, now_s: float) -> float:
        """As `Swapping.resume`: no wait for who was brought back before."""
        del now_s
        one = self._parked.pop(name)
        return 0.0 if one.on_device else one.nbytes * self._byte_s

    def advance(self, now_s: float, turns: Sequence[str]) -> None:
        """As `Swapping.advance`."""
        while self._link_free_s < now_s:
            one = self._next(turns)
            if one is None:
                self._link_free_s = now_s
                return
            self.copies += 1
            self._link_free_s += one.nbytes * self._byte_s
            one.on_device = not one.on_device

    def _next(self, turns: Sequence[str]) -> _Parked | None:
        """Whose copy the link begins: out who is last, while room is short, else in who is next."""
        parked = [self._parked[name] for name in turns if name in self._parked]
        if self.free_bytes * 2 < self._spare_bytes:
            return next((one for one in reversed(parked) if one.on_device), None)
        for one in parked:
            if one.on_device:
                continue
            fits = (self.free_bytes - one.nbytes) * 2 >= self._spare_bytes
            return one if fits else None
        return None

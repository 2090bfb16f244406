"""Copies between a KV slice and a reservation of the host pool.

host bytes of a slice     [ tokens: n x record_bytes | state ]      cut at extent and chunk borders
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batond.offload.pool import Reservation
    from batond.offload.slice import KVSlice


class Transfer(Protocol):
    """A copy that was started. Keeps both sides alive until it is over."""

    def done(self) -> bool:
        """Whether it is over, well or not. Never waits, never raises."""

    def wait(self) -> None:
        """Wait until it is over.

        Raises:
            Exception: It did not happen; the source is as it was.
        """


class Copier(Protocol):
    """Starts copies. A call that raises leaves no copy under way."""

    def store(self, kv: KVSlice, reservation: Reservation) -> Transfer:
        """Start copying a slice into as many reserved bytes, after all work queued so far on its device."""

    def load(self, reservation: Reservation, kv: KVSlice) -> Transfer:
        """Start copying reserved bytes into a slice of as many bytes."""


class FinishedTransfer:
    """A copy that was over when its start returned."""

    def done(self) -> bool:
        """Report that it is over."""
        return True

    def wait(self) -> None:
        """Return at once."""


class InlineCopier:
    """Copies before it returns: for CPU, and for tests on any device."""

    def store(self, kv: KVSlice, reservation: Reservation) -> Transfer:
        """Copy a slice into as many reserved bytes.

        Raises:
            ValueError: Sizes differ.
        """
        for device_bytes, host_bytes in matching_pieces(kv, reservation):
            host_bytes.copy_(device_bytes)
        return FinishedTransfer()

    def load(self, reservation: Reservation, kv: KVSlice) -> Transfer:
        """Copy reserved bytes into a slice of as many bytes.

        Raises:
            ValueError: Sizes differ.
        """
        for device_bytes, host_bytes in matching_pieces(kv, reservation):
            device_bytes.copy_(host_bytes)
        return FinishedTransfer()


class StreamTransfer:
    """A copy queued on a CUDA stream.

    Args:
        event: Recorded behind the copy.
        kv: The device side. Held until the copy is over: the caching allocator knows nothing of our streams
            and would give the memory to the next tensor.
    """

    def __init__(self, event: torch.cuda.Event, kv: KVSlice) -> None:
        self._event = event
        self._kv: KVSlice | None = kv

    def done(self) -> bool:
        """Whether the event has happened."""
        try:
            over = bool(self._event.query())  # type: ignore[no-untyped-call]
        except RuntimeError:  # The context is broken: nothing runs any more, and wait() says so.
            over = True
        if over:
            self._kv = None
        return over

    def wait(self) -> None:
        """Wait for the event without holding the interpreter lock; it is rare, so the core may spin.

        A thread that sleeps is woken 0.25 ms late.

        Raises:
            RuntimeError: The CUDA context is broken.
        """
        self._event.synchronize()
        self._kv = None


class StreamCopier:
    """Copies beside the computation: one stream a direction, so that both directions of the bus are used.

    Host memory should be page-locked; where it isn't, CUDA stages the copy and the call may block: slower,
    and as right.

    Args:
        device: The CUDA device of all slices.
    """

    def __init__(self, device: torch.device | str | int) -> None:
        where = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if where.type != "cuda":
            raise ValueError(f"streams are for CUDA devices, not for {where}")
        # "cuda" alone has index None, whatever the annotation says.
        index = torch.cuda.current_device() if getattr(where, "index", None) is None else where.index
        self.device = torch.device("cuda", index)
        self._out = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._in = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def store(self, kv: KVSlice, reservation: Reservation) -> Transfer:
        """Queue the copy of a slice into as many reserved bytes, behind what its producer has queued.

        Raises:
            ValueError: Sizes differ, or the slice is on another device.
            RuntimeError: CUDA refused.
        """
        return self._start(self._out, kv, reservation, to_host=True)

    def load(self, reservation: Reservation, kv: KVSlice) -> Transfer:
        """Queue the copy of reserved bytes into a slice of as many bytes.

        It waits for the current stream too: the allocator may have handed out memory that earlier work on
        that stream still reads.

        Raises:
            ValueError: Sizes differ, or the slice is on another device.
            RuntimeError: CUDA refused.
        """
        return self._start(self._in, kv, reservation, to_host=False)

    def _start(
        self, stream: torch.cuda.Stream, kv: KVSlice, reservation: Reservation, *, to_host: bool
    ) -> Transfer:
        if kv.tokens.device != self.device or kv.state.device != self.device:
            raise ValueError(
                f"the slice is on {kv.tokens.device} and {kv.state.device}, not on {self.device}"
            )
        pieces = list(matching_pieces(kv, reservation))
        stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(stream):
                for device_bytes, host_bytes in pieces:
                    target, source = (host_bytes, device_bytes) if to_host else (device_bytes, host_bytes)
                    target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        except BaseException:
            stream.synchronize()  # What was queued before the failure must not write into memory given back.
            raise
        return StreamTransfer(event, kv)


def copier_for(device: torch.device | str) -> Copier:
    """The copier that suits a device: streams on CUDA, inline copies elsewhere."""
    return StreamCopier(device) if torch.device(device).type == "cuda" else InlineCopier()


def matching_pieces(kv: KVSlice, reservation: Reservation) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cut the slice where the reservation's views end.

    Yields:
        Bytes of the slice and bytes of the pool, both uint8 of the same shape [m], in order.

    Raises:
        ValueError: Sizes differ.
    """
    if kv.nbytes != reservation.nbytes:
        raise ValueError(f"a slice of {kv.nbytes} bytes doesn't match a reservation of {reservation.nbytes}")
    views = iter(reservation.views())
    host = torch.empty(0, dtype=torch.uint8)
    for part in (kv.tokens.view(-1), kv.state.view(-1)):
        rest = part
        while rest.numel():
            if not host.numel():
                host = next(views)
            length = min(rest.numel(), host.numel())
            yield rest[:length], host[:length]
            rest, host = rest[length:], host[length:]

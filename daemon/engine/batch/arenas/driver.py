"""What the card's arena asks of a driver of virtual memory; `cuda_driver.py` answers it, tests fake it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class DriverError(RuntimeError):
    """The driver refused a call, for another reason than that memory is used up."""


class Fence(Protocol):
    """A place in the card's stream of work."""

    def done(self) -> bool:
        """Whether all work before it is done."""

    def wait(self) -> None:
        """Wait until it is; other threads run meanwhile."""


class Driver(Protocol):
    """Address space of a card, and memory that is mapped into it.

    Every method may raise DriverError. All may be called by several threads, one at a time.

    Attributes:
        granularity: What sizes and addresses are multiples of, in bytes.
    """

    granularity: int

    def attach(self) -> None:
        """Let the calling thread use the card."""

    def reserve(self, nbytes: int) -> int:
        """Address space without memory; returns its address."""

    def unreserve(self, address: int, nbytes: int) -> None:
        """Give address space back."""

    def create(self, nbytes: int) -> int:
        """Memory without an address; returns its handle.

        Raises:
            torch.OutOfMemoryError: The card has none left.
        """

    def destroy(self, handle: int) -> None:
        """Give memory back that is mapped nowhere."""

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Put memory behind an address.

        Raises:
            torch.OutOfMemoryError: The card has no room for it in its tables.
        """

    def set_access(self, address: int, nbytes: int) -> None:
        """Let the card read and write what is mapped there: one piece of memory, or several side by side.

        Raises:
            torch.OutOfMemoryError: As for `map`.
        """

    def unmap(self, address: int, nbytes: int) -> None:
        """Take the memory from behind an address; no work on the card may still use it."""

    def fence(self) -> Fence:
        """A fence behind all work given to the card by now that may touch the arena."""

    def tensor(self, address: int, size: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
        """The bytes at an address, as they lie; uint8.

        Args:
            address: Something is mapped there now: torch asks the driver whose it is.
            size: Shape.
            strides: In bytes.
        """

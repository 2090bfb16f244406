"""Whether a host copy still is what was stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batond.offload.checks import Checker
from batond.offload.errors import SliceCorruptError
from batond.offload.header import unseal

if TYPE_CHECKING:
    from batond.offload.checks import Check
    from batond.offload.entries import LoadTicket, Ticket


class Verifier:
    """Computes checksums of slices beside their copies, and compares them.

    Args:
        checksums: Compute and check them; headers are checked always.
    """

    def __init__(self, *, checksums: bool) -> None:
        self._checksums = checksums
        self._checker = Checker()

    def check(self, ticket: Ticket) -> Check:
        """The checksum of what lies in the pool; begun now, if it was not before."""
        if ticket.check is None:
            body = ticket.entry.held().views() if self._checksums else []
            ticket.check = self._checker.begin(ticket.entry.header.encode(), body)
        return ticket.check

    def damage(self, ticket: LoadTicket, layout_hash: str | None) -> str:
        """What is wrong with the host copy; empty if nothing is.

        Args:
            ticket: Of a load.
            layout_hash: What its records should have been written with; None is whatever.
        """
        entry = ticket.entry
        try:
            header, checksum = unseal(bytes(entry.sealed))
        except SliceCorruptError as error:
            return error.message
        if entry.parked is None or header != entry.parked.header:
            return f"header {header} doesn't belong to {entry.header.owner_id}"
        if self._checksums and checksum != self.check(ticket).value():
            return "checksum doesn't match"
        if layout_hash not in {None, header.layout_hash}:
            return f"layout {header.layout_hash} instead of {layout_hash}"
        return ""

    def close(self) -> None:
        """End its threads."""
        self._checker.close()

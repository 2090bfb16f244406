"""The parks of a plan in the making, and what of the host pool they leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batond.daemon.scheduler.plan import ParkMode, ParkOrder

if TYPE_CHECKING:
    from batond.daemon.scheduler.plan import BatchView
    from batond.policies.base import QueryView


class Parks:
    """Orders parks; who doesn't fit into the host pool any more is computed again later (rule 6).

    Args:
        view: Of the step.

    Attributes:
        orders: As they are to be carried out.
    """

    def __init__(self, view: BatchView) -> None:
        self.orders: list[ParkOrder] = []
        self._copies = not view.recompute_only
        self._host_bytes = view.host_free_bytes

    def add(self, victim: QueryView, cause: str, for_query_id: str = "") -> None:
        """Order a park.

        Args:
            victim: Who loses its row, or its slice without one.
            cause: See `ParkOrder`.
            for_query_id: Whose need it is, if anybody's.
        """
        fits = self._copies and victim.park_bytes <= self._host_bytes
        if fits:
            self._host_bytes -= victim.park_bytes
        mode = ParkMode.OFFLOAD if fits else ParkMode.RECOMPUTE
        self.orders.append(ParkOrder(victim.query_id, mode, cause, for_query_id))

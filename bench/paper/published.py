"""What is known of the published evaluation: Cong et al., BATON, arXiv 2410.18701 (October 2024).

Known are ratios of times. The paper's seconds, and everything it says of P&D separation alone, are not known
here, and are left out of the tables rather than worked out from the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SOURCE: Final = "arXiv 2410.18701"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Ratios of one column of a table; None is not known.

    Attributes:
        over_whole: Time of run-to-completion over decoupled ("Benchmark" over "Baton-PD").
        over_inline: Time of inline over decoupled.
    """

    over_whole: float | None = None
    over_inline: float | None = None


#: By table and batch size. Table 1's batch 4 has doubled lengths; its 1.75 is the abstract's, over Orca.
PUBLISHED: Final[dict[tuple[int, int], Published]] = {
    (1, 4): Published(over_whole=1.86, over_inline=1.75),
    (1, 8): Published(over_whole=2.49, over_inline=1.29),
    (2, 2): Published(over_whole=1.94),
    (2, 4): Published(over_whole=1.89),
    (2, 6): Published(over_whole=1.66),
    (2, 8): Published(over_whole=1.61),
    (2, 10): Published(over_whole=1.31),
}

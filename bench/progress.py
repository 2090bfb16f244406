"""What benchmarks show of themselves: how wide their tables are, and how far a long run is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Callable

#: Columns of a terminal that tables may take at least: a cut table helps nobody.
TABLE_WIDTH: Final = 120


def teller() -> Callable[[str], None]:
    """Something that tells on standard error what is being done, and when since now it began."""
    progress, began_s = Console(stderr=True), time.monotonic()

    def tell(what: str) -> None:
        line = f"{time.monotonic() - began_s:6.1f} s  {what}"
        progress.print(line, markup=False, highlight=False, soft_wrap=True)

    return tell

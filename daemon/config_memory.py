"""The configuration of the memory governor: how much of a memory may be used, and by which readings."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import ByteSize, Field, model_validator

from batond.daemon.config_base import Section

#: Two watermarks this close would have the batch park and resume without an end.
LEAST_BAND: Final = 0.01

Part = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


class MemoryConfig(Section):
    """How the batch follows the memory that it lives in: the card's, or on a CPU the host's.

    Attributes:
        governor: `auto` is on where the device is a card, NVML answers and the batch can give memory back;
            `on` demands it, on a CPU too; `off` leaves the batch what it has at the start.
        low_watermark: Part of the memory in use, by whomever, below which the batch may take more.
        high_watermark: Above this it gives back: the least urgent queries are parked.
        critical_watermark: Above this nothing new begins.
        reserve: Kept free for what prompts need: bytes, a size such as `2GiB`, or `auto`, learned from peaks.
        sample_ms: Between two readings.
    """

    governor: Literal["auto", "on", "off"] = "auto"
    low_watermark: Part = 0.87
    high_watermark: Part = 0.92
    critical_watermark: Part = 0.97
    reserve: Literal["auto"] | ByteSize = "auto"
    sample_ms: int = Field(default=50, ge=10, le=1000)

    @model_validator(mode="after")
    def _check_order(self) -> MemoryConfig:
        if not self.low_watermark < self.high_watermark < self.critical_watermark:
            raise ValueError(
                "the watermarks must rise: low_watermark below high_watermark below critical_watermark, not"
                f" {self.low_watermark}, {self.high_watermark}, {self.critical_watermark}"
            )
        if self.high_watermark - self.low_watermark < LEAST_BAND - 1e-9:
            raise ValueError(
                f"high_watermark {self.high_watermark} must be at least {LEAST_BAND} above low_watermark"
                f" {self.low_watermark}, or queries are parked and resumed without an end"
            )
        return self

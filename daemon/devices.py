"""Which device a model is loaded on, asked of torch; and which card "cuda" is."""

from __future__ import annotations

import torch

from batond.daemon.errors import ConfigError


def chosen_device(asked: str) -> str:
    """The device that `model.device` names; `auto` is the first card, or else the CPU.

    Raises:
        ConfigError: Torch sees no such card.
    """
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not asked.startswith("cuda"):
        return asked
    if not torch.cuda.is_available():
        raise ConfigError(f"device {asked} was asked for, but torch sees no CUDA device", device=asked)
    number, count = int(asked.partition(":")[2] or 0), torch.cuda.device_count()
    if number >= count:
        raise ConfigError(
            f"device {asked} was asked for, but torch sees no more than {count} CUDA device(s)",
            device=asked,
        )
    return asked


def numbered(device: torch.device | str) -> torch.device:
    """The device, a card by its number: "cuda" alone is the current card.

    Tensors say where they are by number, some of torch's functions want one, and what the current card is
    depends on the thread. Whoever takes a device in asks once, and hands on what it was told.
    """
    where = torch.device(device)
    index: int | None = where.index  # None of "cuda" and "cpu", whatever the annotation says.
    if where.type != "cuda" or index is not None:
        return where
    return torch.device("cuda", torch.cuda.current_device())

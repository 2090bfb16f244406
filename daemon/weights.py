"""How weights on this machine are named to transformers. Free of torch: the front reads tokenizers only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def pretrained_source(place: Path) -> dict[str, Any]:
    """Arguments for `from_pretrained`: local files alone, and no code that came with them.

    Args:
        place: A folder in Hugging Face's layout, or a `.gguf` file.
    """
    where: dict[str, Any] = {"pretrained_model_name_or_path": place}
    if place.is_file():
        where = {"pretrained_model_name_or_path": place.parent, "gguf_file": place.name}
    return {**where, "local_files_only": True, "trust_remote_code": False}

"""The model's files: there, whole, and of a kind that can be served. No weight is read."""

from __future__ import annotations

import json
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

import psutil

from batond.daemon.config_load import resolve_model_path
from batond.daemon.doctor.report import Finding, Level

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from batond.daemon.config import Settings

CHECK: Final = "model"
GIB: Final = 1 << 30
_AGAIN: Final = "copy or download the model again"
_INDEX: Final = "model.safetensors.index.json"
_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.json")


def look(settings: Settings) -> Iterator[Finding]:
    """The files that `model.path` names.

    Raises:
        ConfigError: There are none.
    """
    place = resolve_model_path(settings.model.path)
    problems = list(_gguf(place) if place.is_file() else _folder(place))
    yield from problems
    if any(one.level is Level.FAULT for one in problems):
        return
    nbytes = sum(file.stat().st_size for file in ([place] if place.is_file() else _weights(place)))
    yield Finding(
        CHECK, Level.OK, f"{settings.model.served_name} at {place}, {nbytes / GIB:.2f} GiB of weights"
    )
    available = psutil.virtual_memory().available
    if nbytes > available and settings.model.device == "cpu":
        yield Finding(
            CHECK,
            Level.WARNING,
            f"the weights have {nbytes / GIB:.1f} GiB, and {available / GIB:.1f} GiB of memory are free",
            "free memory, or serve a smaller model",
        )


def _gguf(place: Path) -> Iterator[Finding]:
    from gguf import GGUFReader  # noqa: PLC0415 - takes a second

    try:
        reader = GGUFReader(place)
    except Exception as error:  # noqa: BLE001 - it raises whatever it stumbles over
        yield Finding(CHECK, Level.FAULT, f"{place} is no whole GGUF file: {error}", _AGAIN)
        return
    ends = [int(tensor.data_offset) + int(tensor.n_bytes) for tensor in reader.tensors]
    if not ends or max(ends) > place.stat().st_size:
        yield Finding(CHECK, Level.FAULT, f"{place} ends before its last tensor does", _AGAIN)


def _folder(place: Path) -> Iterator[Finding]:
    config = _json(place / "config.json")
    if config is None:
        yield Finding(CHECK, Level.FAULT, f"{place} has no config.json that can be read", _AGAIN)
        return
    yield from _kind(config)
    if not any((place / name).exists() for name in _TOKENIZERS):
        yield Finding(CHECK, Level.FAULT, f"{place} has no tokenizer ({' or '.join(_TOKENIZERS)})", _AGAIN)
    files = _weights(place)
    if not files:
        yield Finding(CHECK, Level.FAULT, f"{place} has no weights", _AGAIN)
    for file in files:
        yield from _weight_file(file)


def _kind(config: dict[str, Any]) -> Iterator[Finding]:
    from transformers import CONFIG_MAPPING  # noqa: PLC0415 - as above

    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        version = metadata.version("transformers")
        yield Finding(
            CHECK,
            Level.FAULT,
            f"transformers {version} knows no model of type {kind!r}",
            "serve another model: code that comes with weights is never run",
        )


def _weights(place: Path) -> list[Path]:
    """The files that would be read: those of the index, else all of a kind."""
    index = _json(place / _INDEX)
    if index is not None:
        return [place / name for name in sorted(set(index.get("weight_map", {}).values()))]
    return sorted(place.glob("*.safetensors")) or sorted(place.glob("pytorch_model*.bin"))


def _weight_file(file: Path) -> Iterator[Finding]:
    if not file.exists():
        yield Finding(CHECK, Level.FAULT, f"{file} is missing, which {_INDEX} names", _AGAIN)
        return
    if file.suffix != ".safetensors":
        yield Finding(CHECK, Level.WARNING, f"{file.name} has no header to look at", "prefer .safetensors")
        return
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - brings numpy

    try:
        # It checks the header, and that the file is as long as the header says.
        with safe_open(file, "numpy"):
            pass
    except (SafetensorError, OSError) as error:
        yield Finding(CHECK, Level.FAULT, f"{file} is not whole: {error}", _AGAIN)


def _json(file: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None

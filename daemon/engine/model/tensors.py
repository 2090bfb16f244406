"""Finds the tensors a model's cache holds, wherever its class keeps them, and tells rows from columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from batond.daemon.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers.cache_utils import Cache

#: Layer index of tensors that hang on the cache itself.
WHOLE_CACHE = -1
#: Index of a tensor that is the attribute itself, and not an entry of a container.
NO_INDEX = -1

Path = tuple[int | str, ...]
Index = int | Path


@dataclass(frozen=True, slots=True)
class Place:
    """Where a cache keeps a tensor.

    Attributes:
        layer: Index in `cache.layers`, or WHOLE_CACHE.
        attribute: Name of the attribute that holds it.
        index: NO_INDEX if the attribute is the tensor; else its key, or path of keys, in the containers.
    """

    layer: int
    attribute: str
    index: Index

    def get(self, cache: Cache) -> torch.Tensor:
        """The live tensor."""
        found: Any = getattr(self._owner(cache), self.attribute)
        for key in _keys(self.index):
            found = found[key]
        tensor: torch.Tensor = found
        return tensor

    def set(self, cache: Cache, value: torch.Tensor) -> None:
        """Put another tensor there."""
        keys = _keys(self.index)
        if not keys:
            setattr(self._owner(cache), self.attribute, value)
            return
        container: Any = getattr(self._owner(cache), self.attribute)
        path = [container]
        for key in keys[:-1]:
            path.append(path[-1][key])
        if isinstance(path[-1], tuple):  # Rebuilt, and put into its own container.
            entries = list(path[-1])
            entries[keys[-1]] = value
            path[-2][keys[-2]] = tuple(entries)
        else:
            path[-1][keys[-1]] = value

    def _owner(self, cache: Cache) -> Any:
        return cache if self.layer == WHOLE_CACHE else cache.layers[self.layer]


@dataclass(frozen=True, slots=True)
class Axes:
    """Which axes of a tensor grow with what; None is no axis."""

    row: int | None
    column: int | None


def places(cache: Cache) -> dict[Place, torch.Tensor]:
    """Every tensor the cache holds, without private attributes; a tensor held twice appears once."""
    found: dict[Place, torch.Tensor] = {}
    seen: set[int] = set()
    owners = [(number, layer) for number, layer in enumerate(getattr(cache, "layers", ()))]
    for number, owner in [*owners, (WHOLE_CACHE, cache)]:
        for attribute, value in vars(owner).items():
            if attribute.startswith("_") or attribute == "layers":
                continue
            for path, tensor in _tensors(value):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    found[Place(number, attribute, _index(path))] = tensor
    return found


def axes(place: Place, small: torch.Tensor, large: torch.Tensor, sizes: tuple[int, int, int, int]) -> Axes:
    """Tell a tensor's row and column axis from two forwards.

    Args:
        place: Where it is, for the message.
        small: After a forward of few rows and columns.
        large: After a forward of more of both.
        sizes: Rows of the small and the large forward, then columns of both; all different.

    Raises:
        UnsupportedModelError: It grows with something else.
    """
    rows, more_rows, columns, more_columns = sizes
    row = column = None
    same_rank = small.ndim == large.ndim
    for axis, (before, after) in enumerate(zip(small.shape, large.shape, strict=False)):
        if before == after:
            continue
        if (before, after) == (rows, more_rows) and row is None:
            row = axis
        elif (before, after) == (columns, more_columns) and column is None:
            column = axis
        else:
            same_rank = False
    if not same_rank or (column is not None and row is None):
        raise UnsupportedModelError(
            f"the cache keeps {place.attribute} of layer {place.layer} neither per token nor per row: shape"
            f" {tuple(small.shape)} after {rows} x {columns} tokens, {tuple(large.shape)} after {more_rows} x"
            f" {more_columns}"
        )
    return Axes(row, column)


def _tensors(
    value: Any, path: tuple[int | str, ...] = ()
) -> Iterator[tuple[tuple[int | str, ...], torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from _tensors(entry, (*path, key))
    elif isinstance(value, (list, tuple)):
        for key, entry in enumerate(value):
            yield from _tensors(entry, (*path, key))


def _index(path: Path) -> Index:
    if not path:
        return NO_INDEX
    first = path[0]
    return first if len(path) == 1 and isinstance(first, int) else path


def _keys(index: Index) -> tuple[Any, ...]:
    if isinstance(index, tuple):
        return index
    return () if index == NO_INDEX else (index,)

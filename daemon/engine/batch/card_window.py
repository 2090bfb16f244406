"""The ring as a step on a card sees it: whole, with nothing known on the host of what rows own.

A step of this kind does the same for every cursor and length, reading both on the card; so it can be captured
once and replayed while the ring turns. Models get the ring as it lies, in any order of age; the kernels pick
what a row owns. A mask is not made: it is recognized. Where a model asks for one that shows each row its
newest W tokens, it gets a placeholder that stands for W, and hands it to the attention unread.

The newest column of a layer is written by the attention that reads it first, or else before anything follows.

What the kernels can't do raises UnsupportedModelError at the probe, and the model decodes another way.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from batond.daemon.engine.batch.ring_rule import Ring, Rule
from batond.daemon.engine.model.causal import MODEL_ERRORS
from batond.daemon.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batond.daemon.engine.batch.step_inputs import StepInputs

#: Wider heads don't fit into a multiprocessor's memory beside the loads in flight.
WIDEST_HEAD = 256


class CardView:
    """What card kernels are told of a step, apart from where keys and values lie.

    Args:
        mask_shape: Of the masks that the model is given: rows, 1, new tokens, columns.
        most_tokens: The most a row may ever own.
        device: The card.
        ignored: Arguments that the model passes and its own attention ignores.
    """

    def __init__(
        self,
        mask_shape: tuple[int, int, int, int],
        most_tokens: int,
        device: torch.device,
        *,
        ignored: frozenset[str] = frozenset(),
    ) -> None:
        self.ignored = ignored
        self.device = device
        self._mask_shape, self._most_tokens = mask_shape, most_tokens
        self._windows: dict[int, torch.Tensor] = {}

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of new tokens over what their rows own.

        Args:
            query: Shape [rows, heads, new tokens, dim].
            key: What the cache returned, as [rows, kv heads, columns, dim].
            value: The same, of value dim.
            mask: None, or a placeholder from `mask_for`.
            scale: Factor of the scores.
            softcap: Scores are squashed to (-softcap, softcap).
            sinks: Extra score per head, of heads numbers.

        Returns:
            Shape [rows, new tokens, heads, value dim].

        Raises:
            UnsupportedModelError: The kernel can't do this.
        """
        raise NotImplementedError

    def mask_for(self, mask_function: Callable[..., Any]) -> torch.Tensor | None:
        """What stands for a mask: None where a token sees all that is older, else its window's placeholder.

        Args:
            mask_function: From the model: whether query q sees column k, in order of age.

        Raises:
            UnsupportedModelError: The mask shows something else than the newest tokens.
        """
        window = recognize_window(mask_function, self._most_tokens)
        if window is None:
            return None
        if window not in self._windows:
            one = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
            self._windows[window] = one.expand(self._mask_shape)
        return self._windows[window]

    def rule(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> Rule:
        """How a layer makes scores, in the kernels' terms; arguments as those of `attend`.

        Raises:
            UnsupportedModelError: They know no such way.
        """
        heads = query.shape[1]
        if sinks is not None and sinks.numel() != heads:
            raise UnsupportedModelError("sinks differ by more than the head")
        if heads % key.shape[1] or value.shape[1] != key.shape[1]:
            raise UnsupportedModelError("heads don't share keys and values evenly")
        return Rule(
            scale,
            softcap=softcap,
            sinks=None if sinks is None else sinks.reshape(-1),
            window=self._window_of(mask),
        )

    def _window_of(self, mask: torch.Tensor | None) -> int | None:
        if mask is None:
            return None
        for window, placeholder in self._windows.items():
            if mask.data_ptr() == placeholder.data_ptr() and mask.shape == placeholder.shape:
                return window
        raise UnsupportedModelError("the model makes masks of its own")


class _Unwritten(NamedTuple):
    """A layer's newest column that is not in the ring yet; key and value have shape [rows, heads, dim]."""

    ring: Ring
    key: torch.Tensor
    value: torch.Tensor


class CardWindow(CardView):
    """The first rows of a ring for the card's kernels; the device's counterpart of `RingWindow`.

    Args:
        storage: The ring's records, shape [rows, capacity, record].
        inputs: Lengths and cursor, on the card.
        rows: How many of the first rows a step computes.
        ignored: Arguments that the model passes and its own attention ignores.

    Attributes:
        size: Columns handed to the model: always all.
    """

    def __init__(
        self, storage: torch.Tensor, inputs: StepInputs, rows: int, *, ignored: frozenset[str] = frozenset()
    ) -> None:
        self.size = self.capacity = storage.shape[1]
        super().__init__((rows, 1, 1, self.capacity), self.capacity, storage.device, ignored=ignored)
        self.lengths, self.cursor = inputs.lengths[:rows], inputs.cursor
        self._rows = rows
        self._record_bytes = storage.shape[2]
        self._storage, self._start = storage, storage.data_ptr()
        self._unwritten: _Unwritten | None = None
        self._all_seen = torch.ones(1, 1, dtype=torch.int64, device=storage.device)

    def padding_mask(self) -> torch.Tensor:
        """All ones: what the model knows of padding; int64, shape [rows, capacity]."""
        return self._all_seen.expand(self._rows, self.capacity)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One forward: what no attention wrote is written at its end; a failed one leaves nothing over."""
        try:
            yield
            self._write()
        finally:
            self._unwritten = None

    def update(
        self,
        key_store: torch.Tensor,
        value_store: torch.Tensor,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a layer's newest column, and return the ring as it lies.

        The column is written, for the rows that have a token, by the layer's attention. A model that reads
        the ring itself before that would find an old column there: the proof at load would show it.

        Args:
            key_store: Shape [rows, capacity, heads, key dim].
            value_store: Shape [rows, capacity, heads, value dim].
            key_states: Shape [rows, heads, 1, key dim].
            value_states: Shape [rows, heads, 1, value dim].

        Returns:
            The stores.

        Raises:
            UnsupportedModelError: The kernel can't.
        """
        self._write()
        check_states(key_states, value_states)
        ring = Ring(key_store, value_store, self.lengths, self.cursor, self.capacity)
        self._unwritten = _Unwritten(ring, key_states[:, :, 0], value_states[:, :, 0])
        return key_store, value_store

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of one new token per row over the row's own columns; see `CardView.attend`."""
        kernels = _kernels()
        check_states(query, key, value)
        if not (self._is_whole(key) and self._is_whole(value)):
            raise UnsupportedModelError("attention reads keys or values computed from what the cache keeps")
        rule = self.rule(query, key, value, mask, scale=scale, softcap=softcap, sinks=sinks)
        ring = Ring(key.transpose(1, 2), value.transpose(1, 2), self.lengths, self.cursor, self.capacity)
        new = self._new_of(ring)
        out: torch.Tensor = launched(lambda: kernels.decode_attention(query[:, :, 0], ring, rule, new=new))
        return out[:, None]

    def _new_of(self, ring: Ring) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The newest column of a layer that is attended to, if its attention has to write it."""
        waiting = self._unwritten
        if waiting is None:
            return None
        mine = (ring.key.data_ptr(), ring.value.data_ptr())
        if mine != (waiting.ring.key.data_ptr(), waiting.ring.value.data_ptr()):
            self._write()  # Another layer's.
            return None
        self._unwritten = None
        return waiting.key, waiting.value

    def _write(self) -> None:
        """Write what waits."""
        if self._unwritten is not None:
            ring, key, value = self._unwritten
            launched(lambda: _kernels().write_column(key, value, ring))
            self._unwritten = None

    def _is_whole(self, states: torch.Tensor) -> bool:
        """Whether keys or values, [rows, heads, columns, dim], are all columns of these rows, as they lie."""
        offset, item = states.data_ptr() - self._start, states.element_size()
        return (
            0 <= offset < self._record_bytes
            and states.shape[:1] + states.shape[2:3] == (self._rows, self.capacity)
            and states.stride(2) * item == self._record_bytes
            and (self._rows == 1 or states.stride(0) * item == self._storage.stride(0))
            and states.stride(3) == 1
        )


def check_states(*states: torch.Tensor) -> None:
    """Refuse heads that are too wide for the kernels, and numbers that they don't compute with.

    Raises:
        UnsupportedModelError: Such are there.
    """
    widest, dtypes = max(one.shape[-1] for one in states), {one.dtype for one in states}
    if widest > WIDEST_HEAD:
        raise UnsupportedModelError(f"heads of {widest} are wider than {WIDEST_HEAD}")
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float16, torch.bfloat16}:
        raise UnsupportedModelError(f"numbers of {', '.join(sorted(map(str, dtypes)))} together")


def recognize_window(mask_function: Callable[..., Any], columns: int) -> int | None:
    """The W of a mask that shows each token its newest W columns; None where that is all of them.

    The function is asked, on the host: nothing depends on what it is called or made of.

    Args:
        mask_function: Takes row, head, query and key index; says what is seen.
        columns: The most a row may own.

    Raises:
        UnsupportedModelError: It shows something else, or can't be asked for one row alone.
    """
    # Of two neighbours, a chunk's edge lies behind one at most.
    asked_at = {columns - 1, max(columns - 2, 0), columns // 2}
    found = {_seen(mask_function, newest) for newest in asked_at}
    windows = {seen for seen, asked in found if seen < asked}
    if len(windows) > 1:
        raise UnsupportedModelError("a mask changes with the column")
    if windows and any(asked > min(windows) and seen == asked for seen, asked in found):
        raise UnsupportedModelError("a mask changes with the column")
    return windows.pop() if windows else None


def _seen(mask_function: Callable[..., Any], newest: int) -> tuple[int, int]:
    """How many of the columns 0 .. newest a query at `newest` sees, and how many these are."""
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    columns = torch.arange(newest + 1)
    try:
        shown = mask_function(zero, zero, zero + newest, columns[None, None, None])
        seen = torch.broadcast_to(shown, (1, 1, 1, newest + 1)).flatten()
    except MODEL_ERRORS as error:
        raise UnsupportedModelError(f"a mask can't be asked on the host: {error}") from error
    count = int(seen.sum())
    if not bool(seen[newest + 1 - count :].all()) or not count:
        raise UnsupportedModelError("a mask shows a row other columns than its newest")
    return count, newest + 1


def launched(launch: Callable[[], Any]) -> Any:
    """Launch a kernel; what Triton can't compile is the model's shape, not a fault of the engine.

    Raises:
        UnsupportedModelError: Triton says no, in an error of its own.
    """
    try:
        return launch()
    except MODEL_ERRORS:
        raise
    except Exception as error:  # Triton's own errors share no base class.
        raise UnsupportedModelError(f"{type(error).__name__}: {error}") from error


def _kernels() -> Any:
    from batond.daemon.engine.batch import ranged_decode  # noqa: PLC0415 - there is no Triton without a card

    return ranged_decode

"""An NVML that fails on cue, a clock that is set by hand, and systems made of files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pynvml
import pytest

from batond.daemon.memory.readings import MemoryReading, ReadingLost

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GIB = 1 << 30


@pytest.fixture
def system(tmp_path: Path) -> Callable[[dict[str, str]], Path]:
    """Return a function that writes files below an empty root."""

    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        return tmp_path

    return write


@dataclass
class Card:
    """What the driver knows of a card, or of one of its MIG instances."""

    uuid: str
    total: int = 80 * GIB
    reserved: int = 1 * GIB
    used: int = 9 * GIB
    instances: list[Card | None] = field(default_factory=list)

    @property
    def free(self) -> int:
        return self.total - self.reserved - self.used


@dataclass(frozen=True)
class Info:
    """The driver's structure."""

    total: int
    free: int
    used: int


@dataclass
class FakeNvml:
    """Stands for the module `pynvml` over some cards.

    Attributes:
        cards: All there are.
        failures: By name of a call, what it raises: a code of NVML, or an exception. Taken from at each call.
        versioned: Whether the binding knows versions of the structure at all.
        opened: How often it was opened less how often it was shut.
    """

    cards: list[Card]
    failures: dict[str, list[int | Exception | None]] = field(default_factory=dict)
    versioned: bool = True
    opened: int = 0
    calls: list[str] = field(default_factory=list)

    NVMLError = pynvml.NVMLError

    def __getattr__(self, name: str) -> Any:
        if name == "nvmlMemory_v2" and self.versioned:
            return pynvml.nvmlMemory_v2
        raise AttributeError(name)

    def _call(self, name: str) -> None:
        if self.opened < 1 and name != "nvmlInit":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        self.calls.append(name)
        cues = self.failures.get(name, [])
        cue = cues.pop(0) if cues else None
        if isinstance(cue, Exception):
            raise cue
        if cue is not None:
            raise pynvml.NVMLError(cue)

    def nvmlInit(self) -> None:  # noqa: N802 - the library's name
        self._call("nvmlInit")
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802 - the library's name
        self.opened -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Card:  # noqa: N802 - the library's name
        self._call("nvmlDeviceGetHandleByUUID")
        everything = [one for card in self.cards for one in (card, *card.instances) if one is not None]
        for one in everything:
            if one.uuid == uuid:
                return one
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetMigMode(self, handle: Card) -> list[int]:  # noqa: N802 - the library's name
        self._call("nvmlDeviceGetMigMode")
        if handle.uuid.startswith("MIG-"):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return [int(bool(handle.instances))] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Card) -> int:  # noqa: N802 - the library's name
        return len(handle.instances)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Card, index: int) -> Card:  # noqa: N802 - as above
        instance = handle.instances[index]
        if instance is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return instance

    def nvmlDeviceGetMemoryInfo(self, handle: Card, **version: int) -> Info:  # noqa: N802 - the library's name
        if version and not self.versioned:
            raise TypeError("unexpected keyword argument 'version'")
        self._call("v2" if version else "v1")
        apart = handle.reserved if version else 0
        return Info(handle.total, handle.free, handle.total - handle.free - apart)


@pytest.fixture
def make_nvml() -> Callable[..., FakeNvml]:
    return FakeNvml


@pytest.fixture
def make_card() -> Callable[..., Card]:
    return Card


@dataclass
class Clock:
    """Seconds, moved by hand."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@dataclass
class ScriptedSource:
    """A memory whose use by others the test sets; fails while `broken` says why."""

    clock: Clock
    total_bytes: int = 100 * GIB
    used_bytes: int = 0
    broken: str = ""
    closed: bool = False
    name: str = "a scripted memory"

    def read(self) -> MemoryReading:
        at_s = self.clock()
        if self.broken:
            raise ReadingLost(self.broken)
        return MemoryReading(self.total_bytes, self.total_bytes - self.used_bytes, at_s)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def source(clock: Clock) -> ScriptedSource:
    return ScriptedSource(clock)

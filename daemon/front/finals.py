"""A job's last message holds all its output: made once for all who watch it, however many they are."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from typing import Any

    from batond.daemon.queue import JobRecord
    from batond.v1 import types_pb2


class Finals:
    """Describes jobs that have ended, each once at a time.

    Args:
        show: Describes one.
    """

    def __init__(self, show: Callable[[JobRecord], Coroutine[Any, Any, types_pb2.Job]]) -> None:
        self._show = show
        self._making: dict[tuple[str, str, int], asyncio.Task[types_pb2.Job]] = {}

    def show(self, record: JobRecord) -> Awaitable[types_pb2.Job]:
        """Describe a job; raises what `show` raises. Nobody may change what is returned."""
        name = (record.tenant, record.job_id, record.epoch)
        task = self._making.get(name)
        if task is None:
            task = self._making[name] = asyncio.get_running_loop().create_task(self._show(record))
            task.add_done_callback(lambda _: self._making.pop(name))
        return asyncio.shield(task)  # One watcher may leave, the others still want it.

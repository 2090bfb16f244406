"""A process that takes memory of a card and gives it back as it is told, and computes nothing.

Reads one number a line, the bytes it shall hold, and writes one whenever it holds more or less. It ends with
its input. What the card has no room for it asks for again and again.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time

import torch

PIECE_BYTES = 256 << 20
RETRY_S = 0.005


def main(device: str) -> None:
    """Hold what is asked for."""
    wanted: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    pieces: list[torch.Tensor] = [torch.zeros(1, dtype=torch.uint8, device=device)]  # Makes the context.
    threading.Thread(target=_listen, args=[wanted], daemon=True).start()
    _say(0)
    target, held = 0, 0
    while True:
        with contextlib.suppress(queue.Empty):
            asked = wanted.get() if held == target else wanted.get_nowait()
            if asked is None:
                return
            target = asked
        if held > target:
            while held > target:
                held -= pieces.pop().nbytes
            torch.cuda.empty_cache()
        elif held < target:
            try:
                pieces.append(torch.empty(min(PIECE_BYTES, target - held), dtype=torch.uint8, device=device))
                held += pieces[-1].nbytes
            except torch.OutOfMemoryError:
                time.sleep(RETRY_S)
                continue
        _say(held)


def _listen(wanted: queue.SimpleQueue[int | None]) -> None:
    for line in sys.stdin:
        wanted.put(int(line))
    wanted.put(None)


def _say(held_bytes: int) -> None:
    sys.stdout.write(f"{held_bytes}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])

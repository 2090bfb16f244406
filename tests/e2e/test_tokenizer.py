"""The front reads a folder's tokenizer without torch, which it has no use for; with it where that fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from batond.bench.local_daemon import LocalDaemon

#: What a tokenizer does that turns out to need torch.
NEEDY = """
import sys
from pathlib import Path
from batond.daemon.front import text

plain, tries = text._auto, []

def needy(place):
    import transformers
    transformers.AutoTokenizer
    tries.append(sys.modules.get("torch") is not None)
    if not tries[-1]:
        raise ImportError("this tokenizer needs torch")
    return plain(place)

text._auto = needy
print(text.load_tokenizer(Path(sys.argv[1])).encode_text("ab"), tries)
"""


@pytest.mark.redis
def test_a_folder_is_read_without_torch(daemon: LocalDaemon) -> None:
    """Seconds of the start, and more memory than all the rest of the front."""
    with daemon.client("red") as red:
        assert red.result(red.submit("as text", max_tokens=1).job_id).prompt_tokens == len("as text")
    mapped = Path(f"/proc/{daemon.process.pid}/maps").read_text()
    assert "tokenizers" in mapped
    assert "libtorch" not in mapped


def test_who_needs_torch_gets_it(model_folder: Path) -> None:
    line = [sys.executable, "-c", NEEDY, str(model_folder)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.stdout == "[64, 65] [False, True]\n", done.stderr
    assert "PyTorch was not found" not in done.stderr

"""The front reads a folder's tokenizer without torch (test_service.py), and with it where that fails."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

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


def test_who_needs_torch_gets_it(model_folder: Path) -> None:
    line = [sys.executable, "-c", NEEDY, str(model_folder)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.stdout == "[64, 65] [False, True]\n", done.stderr
    assert "PyTorch was not found" not in done.stderr

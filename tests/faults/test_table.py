"""The table of faults, its page and the tests say the same."""

from __future__ import annotations

import ast
from pathlib import Path

from batond.bench.faults.table import TABLE, page_lines

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "faults.md"
#: Of the harness itself.
TOOLS = {"test_proxy.py", "test_table.py"}


def named_in(path: Path) -> set[str]:
    """The tests of a file, as the table names them, that start daemons."""
    tree = ast.parse(path.read_text())
    functions = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    names = {node.name for node in functions if node.name.startswith("test_")}
    return {f"{path.stem.removeprefix('test_')}::{name}" for name in names}


def test_the_page_shows_the_table() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    assert lines == page_lines()


def test_every_promise_has_tests_and_every_test_a_promise() -> None:
    found: set[str] = set()
    for path in HERE.glob("test_*.py"):
        found |= set() if path.name in TOOLS else named_in(path)
    named = {test for row in TABLE for test in row.tests}
    assert named <= found
    # The soak has tests of its own parts beside the run.
    assert {test for test in found if not test.startswith("chaos::")} <= named

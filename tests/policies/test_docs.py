"""docs/policies.md tells of the policies as they are, and its example can be installed and loaded."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
import tomllib
from ast import literal_eval
from pathlib import Path

import pytest

from batond.policies.registry import check_configured, load_policy, policy_names

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "short-prompts"

USE_IT = """
from importlib.metadata import entry_points

from batond.daemon.scheduler.plan import BatchView
from batond.daemon.scheduler.planner import Planner
from batond.policies.base import Phase, QueryView
from batond.policies.registry import GROUP, load_policy

(point,) = entry_points(group=GROUP, name="short-prompts")
policy = load_policy("short-prompts", tokens_per_s=50.0)
waiting = [
    QueryView(f"{sla}{prompt}", "t", sla, order, True, arrival_s, seq, Phase.WAITING, prompt, 0, 0, 9,
              to_prefill_tokens=prompt)
    for seq, (sla, order, arrival_s, prompt) in enumerate(
        [("batch", 2, 0.0, 10), ("batch", 2, 0.0, 60), ("batch", 2, 0.5, 20), ("urgent", 0, 9.0, 500)]
    )
]
view = BatchView(10.0, 4, tuple(waiting), chunk_tokens=None)
print(point.dist.name, policy.tokens_per_s, *(chunk.query_id for chunk in Planner(policy).plan(view).chunks))
"""


@pytest.fixture(scope="module")
def page() -> str:
    """Give the page."""
    return (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")


def rows(page: str, first_column: str) -> list[list[str]]:
    """Cells of the table whose heading starts with the given columns."""
    table = re.search(rf"^\| {first_column} .*?\n\n", page, flags=re.MULTILINE | re.DOTALL)
    assert table
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[0].splitlines()[2:] if line]


def test_all_policies_are_in_the_table(page: str) -> None:
    named = sorted(re.sub(r"`(\w+)`.*", r"\1", row[0]) for row in rows(page, r"policy \| order"))
    # Others may be installed beside batond.
    own = [name for name in policy_names() if type(load_policy(name)).__module__.startswith("batond.")]
    assert named == own


def test_all_options_are_in_the_table_with_their_defaults(page: str) -> None:
    shown = {
        (name.strip("`"), option.strip("`"), literal_eval(default.strip("`")))
        for name, option, default, _ in rows(page, r"policy \| option")
    }
    real = {
        (name, option, parameter.default)
        for name in {row[0] for row in shown} | {"fcfs"}
        for option, parameter in inspect.signature(type(load_policy(name))).parameters.items()
    }
    assert shown == real


def test_the_example_is_shown_as_it_is(page: str) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    assert block == (EXAMPLE / "batond_short_prompts.py").read_text(encoding="utf-8")
    assert len(re.findall(r"^ *[^\s\"]", block, flags=re.MULTILINE)) <= 20
    options, table = re.findall(r"^```toml\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    check_configured(tomllib.loads(options)["policy_options"])
    assert table in (EXAMPLE / "pyproject.toml").read_text(encoding="utf-8")


def test_the_example_installs_and_loads_through_its_entry_point(tmp_path: Path) -> None:
    """A package of its own, found by name, with an option, under the real planner."""
    assert "short-prompts" not in policy_names()
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(EXAMPLE, source)  # The build leaves files beside the sources.
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
    pip += ["--no-build-isolation", "--no-index", "--target", str(target), str(source)]
    subprocess.run(pip, check=True, capture_output=True)
    env = {**os.environ, "PYTHONPATH": str(target)}
    done = subprocess.run(
        [sys.executable, "-c", USE_IT], capture_output=True, text=True, check=True, env=env, cwd=tmp_path
    )
    said = done.stdout.split()
    assert said == ["batond-short-prompts", "50.0", "urgent500", "batch10", "batch20", "batch60"]

"""The table of metrics is whole and true: against a running daemon, the registry and the engine's source."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.parser import text_string_to_metric_families

from batond.bench.fake_daemon import PROGRAM
from batond.bench.fake_engine import STEP_VARIABLE
from batond.bench.local_daemon import LocalDaemon
from batond.daemon.telemetry.engine_metrics import COUNTER_FAMILIES, ENGINE_COUNTERS
from batond.daemon.telemetry.metrics import Metrics
from batond.daemon.wire.messages import MemorySnapshot, Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Shown only where a governor, or a bound on memory, is.
SOMETIMES = {
    "batond_kv_budget_bytes",
    "batond_memory_size_bytes",
    "batond_memory_free_bytes",
    "batond_memory_own_bytes",
}


@pytest.fixture(scope="module")
def table(root: Path) -> dict[str, tuple[str, str, tuple[str, ...]]]:
    """Gives type, unit and labels of each metric as the page has them."""
    text = (root / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]] for row in text.splitlines() if "| `batond_" in row
    ]
    assert len(rows) > 80
    assert all(len(row) == 6 and row[4] and row[5] for row in rows)
    found = {row[0].strip("`"): (row[1], row[2], tuple(re.findall(r"`(\w+)`", row[3]))) for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.fixture(scope="module")
def registry() -> Metrics:
    """Gives all metrics there can be, an engine's included."""
    metrics = Metrics()
    metrics.engine.snapshot = Snapshot(
        step=1,
        rows=[],
        queries=[],
        columns=0,
        host_pool_used_bytes=0,
        host_pool_bytes=0,
        counters={},
        memory=MemorySnapshot(kv_budget_bytes=0, total_bytes=1),
    )
    return metrics


@pytest.fixture(scope="module")
def scraped() -> Iterator[str]:
    """Gives what a running daemon answers to a scrape, after a job."""
    with tempfile.TemporaryDirectory(prefix="bd-") as name:
        daemon = LocalDaemon(
            Path(name),
            ["red"],
            model={"path": name, "name": "fake"},
            engine={"rows": 2},
            sections={"server": {"metrics_listen": "127.0.0.1:0"}},
            environment={STEP_VARIABLE: "0.001"},
            program=PROGRAM,
        )
        try:
            daemon.wait_ready()
            with daemon.client("red") as client:
                client.generate_text(token_ids=[5, 6], max_tokens=4)
            port = re.search(r'"port": (\d+), "event": "metrics"', daemon.log.read_text())
            assert port
            with urllib.request.urlopen(f"http://127.0.0.1:{port[1]}/metrics", timeout=30) as answer:
                yield answer.read().decode()
        finally:
            daemon.stop()


def shown(name: str, kind: str) -> str:
    """A family's name as Prometheus stores its samples."""
    return f"{name}_total" if kind == "counter" else name


def test_the_table_has_what_a_daemon_shows(
    table: dict[str, tuple[str, str, tuple[str, ...]]], scraped: str
) -> None:
    families = {shown(one.name, one.type): one for one in text_string_to_metric_families(scraped)}
    assert set(families) == set(table) - SOMETIMES
    for name, family in families.items():
        kind, _, labels = table[name]
        assert family.type == kind
        assert {frozenset(sample.labels) - {"le"} for sample in family.samples} <= {frozenset(labels)}
        assert family.documentation


def test_the_table_has_what_the_registry_holds(
    table: dict[str, tuple[str, str, tuple[str, ...]]], registry: Metrics
) -> None:
    families = {shown(one.name, one.type): one for one in registry.registry.collect()}
    assert {name: one.type for name, one in families.items()} == {
        name: kind for name, (kind, _, _) in table.items()
    }
    labels = {
        shown(one._name, one._type): one._labelnames
        for one in vars(registry).values()
        if isinstance(one, MetricWrapperBase)
    }
    assert len(labels) > 20
    assert {name: table[name][2] for name in labels} == labels


def test_units_are_those_of_the_names(table: dict[str, tuple[str, str, tuple[str, ...]]]) -> None:
    for name, (kind, unit, _) in table.items():
        ending = name.removesuffix("_total").rpartition("_")[2]
        assert (unit in {"seconds", "bytes"}) == (ending in {"seconds", "bytes"}), name
        assert unit == ending or ending not in {"seconds", "bytes"}, name
        assert name.endswith("_total") is (kind == "counter"), name
        assert kind != "histogram" or unit == "seconds", name


def test_no_counter_of_the_engine_is_unknown(root: Path) -> None:
    counted: set[str] = set()
    for folder in ("engine", "scheduler"):
        for file in (root / "daemon" / folder).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            counted |= set(re.findall(r'counters\["(\w+)"\]', text))
            counted |= {f"{name}..." for name in re.findall(r'f"(\w+_)\{', text) if name in COUNTER_FAMILIES}
    local = (root / "daemon" / "engine" / "local.py").read_text(encoding="utf-8")
    counted |= set(re.findall(r'"(\w+)": stats\.\w+', local))
    assert counted - {"parks"} == {*ENGINE_COUNTERS, *(f"{prefix}..." for prefix in COUNTER_FAMILIES)}


def test_metrics_in_the_pages_exist(
    table: dict[str, tuple[str, str, tuple[str, ...]]], spans: list[tuple[str, str]]
) -> None:
    named = {
        (page, span)
        for page, span in spans
        if page != "CHANGELOG.md" and re.fullmatch(r"batond_[a-z_]*[a-z]", span)
    }
    assert {span for page, span in named if page == "metrics.md"} == set(table)
    assert not {(page, span) for page, span in named if span not in table}


def test_promtool_finds_nothing(scraped: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not on PATH")
    done = subprocess.run(
        [promtool, "check", "metrics"], input=scraped, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

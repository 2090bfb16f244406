"""Dashboard and alert rules ask for metrics and labels that exist, parse, and do what their tests say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "monitoring"
#: Labels that Prometheus or PromQL adds.
ADDED = {"job", "instance", "le", "__name__"}


@pytest.fixture(scope="module")
def table() -> dict[str, tuple[str, set[str]]]:
    """Gives type and labels of each metric as the page has them; test_metrics.py compares with a daemon."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = [row.split("|")[1:5] for row in text.splitlines() if "| `batond_" in row]
    return {row[0].strip(" `"): (row[1].strip(), set(re.findall(r"`(\w+)`", row[3]))) for row in rows}


@pytest.fixture(scope="module")
def alerts() -> list[dict[str, Any]]:
    """Gives all alert rules."""
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    """Gives the dashboard."""
    found: dict[str, Any] = json.loads((FOLDER / "grafana-dashboard.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def expressions(dashboard: dict[str, Any], alerts: list[dict[str, Any]]) -> dict[str, str]:
    """Gives each PromQL expression by where it stands."""
    asked = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    }
    asked |= {one["name"]: one["expr"] for one in dashboard["annotations"]["list"]}
    return asked | {rule["alert"]: rule["expr"] for rule in alerts}


def named(expression: str) -> Iterator[tuple[str, str]]:
    """Metrics of an expression with what stands in their braces."""
    yield from re.findall(r"\b(batond_[a-z_]+)(?:\{([^}]*)\})?", expression)


def family(name: str) -> str:
    """The table's name of a series."""
    return re.sub(r"_seconds_(bucket|sum|count)$", "_seconds", name)


def test_every_metric_exists_with_its_labels(
    table: dict[str, tuple[str, set[str]]], expressions: dict[str, str]
) -> None:
    assert len(expressions) > 60
    for place, expression in expressions.items():
        used = list(named(expression))
        assert used or "up{" in expression, place
        for name, inside in used:
            assert family(name) in table, (place, name)
            labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inside)) - ADDED
            assert labels <= table[family(name)][1], (place, name)
            kind = table[family(name)][0]
            assert (kind == "histogram") == (family(name) != name), (place, name)


def test_what_is_grouped_by_exists(
    table: dict[str, tuple[str, set[str]]], expressions: dict[str, str]
) -> None:
    for place, expression in expressions.items():
        there = set().union(*(table[family(name)][1] for name, _ in named(expression))) | ADDED
        for names in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expression):
            assert {name.strip() for name in names.split(",")} <= there, place


def test_counters_are_asked_for_their_rate(
    table: dict[str, tuple[str, set[str]]], expressions: dict[str, str]
) -> None:
    for place, expression in expressions.items():
        for name, _ in named(expression):
            if table[family(name)][0] != "gauge":
                assert re.search(rf"(?:rate|increase)\({name}\b", expression), place


def test_the_dashboard_is_laid_out(dashboard: dict[str, Any]) -> None:
    rows = [panel["title"] for panel in dashboard["panels"] if panel["type"] == "row"]
    assert rows == [
        "Promises, by class",
        "Batch",
        "Parks",
        "Memory and governor",
        "Queue",
        "Redis",
        "Engine",
    ]
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
        assert panel["type"] == "row" or panel["description"]
    variables = {one["name"] for one in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z_]+)", json.dumps([panels, dashboard["annotations"]])))
    assert used - {"__rate_interval", "__all"} <= variables
    assert not re.search(r"https?://", json.dumps(dashboard))


def test_every_alert_is_tried_quiet_and_firing(alerts: list[dict[str, Any]]) -> None:
    tests = yaml.safe_load((FOLDER / "alerts_test.yml").read_text(encoding="utf-8"))["tests"]
    tried = [case for test in tests for case in test["alert_rule_test"]]
    fires = {case["alertname"] for case in tried if case["exp_alerts"]}
    quiet = {case["alertname"] for case in tried if not case["exp_alerts"]}
    names = [rule["alert"] for rule in alerts]
    assert len(set(names)) == len(names) > 20
    assert fires == quiet == set(names)
    for rule in alerts:
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert set(rule["annotations"]) == {"summary", "description"}


def test_alerts_are_in_the_page(alerts: list[dict[str, Any]]) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(Batond\w+)` \|", text, flags=re.MULTILINE)) == {
        rule["alert"] for rule in alerts
    }


def promtool(*arguments: str, folder: Path = FOLDER) -> None:
    """Runs promtool, or skips."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not on PATH")
    done = subprocess.run([found, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_rules_and_example() -> None:
    promtool("check", "rules", "alerts.yml")
    promtool("check", "config", "prometheus.yml")


def test_the_rules_do_what_their_tests_say() -> None:
    promtool("test", "rules", "alerts_test.yml")


def test_promtool_parses_the_dashboard(tmp_path: Path, expressions: dict[str, str]) -> None:
    rules = [
        {
            "record": f"r{number}",
            "expr": re.sub(r"\$\w+", "x", expression.replace("$__rate_interval", "5m")),
        }
        for number, expression in enumerate(expressions.values())
    ]
    (tmp_path / "asked.yml").write_text(yaml.safe_dump({"groups": [{"name": "asked", "rules": rules}]}))
    promtool("check", "rules", "asked.yml", folder=tmp_path)

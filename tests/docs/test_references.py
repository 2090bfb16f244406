"""What the pages name exists: links, files, metrics, keys, commands, messages."""

from __future__ import annotations

import ast
import re
import tomllib
from typing import TYPE_CHECKING, Any, get_args

import pytest
from pydantic import BaseModel

from batond.clients.cli import app as batonctl
from batond.daemon.cli import app as batond
from batond.daemon.config import Settings
from batond.daemon.front.server import LIVENESS, READINESS, SATURATION

if TYPE_CHECKING:
    from pathlib import Path

    from typer import Typer

FOLDERS = "bench|clients|daemon|deploy|docs|monitoring|offload|policies|proto|systemd|tests"


def anchors(text: str) -> set[str]:
    """Names of a page's headings as renderers make them."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path, text: str) -> list[str]:
    """Links of a page that lead nowhere in the repository; addresses of the web are not tried."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", target):
            continue
        place, _, anchor = target.partition("#")
        path = (page.parent / place).resolve() if place else page
        if not path.exists() or (anchor and anchor not in anchors(path.read_text(encoding="utf-8"))):
            broken.append(target)
    return broken


def test_links_resolve(pages: dict[Path, str]) -> None:
    assert {path.name: broken_links(path, text) for path, text in pages.items()} == {
        path.name: [] for path in pages
    }


@pytest.mark.parametrize("link", ["[a](nowhere.md)", "[a](#nowhere)", "[a](README.md#nowhere)"])
def test_broken_links_are_found(root: Path, link: str) -> None:
    assert broken_links(root / "README.md", link)


def test_paths_exist(root: Path, spans: list[tuple[str, str]]) -> None:
    paths = {span for _, span in spans if re.fullmatch(rf"(?:{FOLDERS})/[\w./-]*", span)}
    assert len(paths) > 20
    assert not {path for path in paths if not (root / path).exists()}


def test_every_decision_has_its_own_number(root: Path) -> None:
    records = sorted((root / "docs" / "adr").glob("0*.md"))
    numbers = [record.name[:4] for record in records]
    assert numbers == [f"{number:04d}" for number in range(len(records))]
    for record in records:
        assert record.read_text(encoding="utf-8").startswith(f"# {record.name[:4]}: ")


# -- configuration ----------------------------------------------------------------------------------------


def keys() -> dict[str, set[str]]:
    """Keys of every section and of every table in a list."""
    found = {}
    for section, field in Settings.model_fields.items():
        inner = next((arg for arg in get_args(field.annotation) if isinstance(arg, type)), field.annotation)
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found[section] = set(inner.model_fields)
    return found


def test_keys_in_the_pages_exist_and_all_are_documented(pages: dict[Path, str], root: Path) -> None:
    known = keys()
    assert set(known) == set(Settings.model_fields) - {"policy_options"}  # Whose keys are the policies' own.
    pattern = re.compile(rf"`(?:--set )?({'|'.join(known)})\.([a-z_0-9]+)(?:\s?=[^`]*)?`")
    found = {path: set(pattern.findall(text)) for path, text in pages.items()}
    real = {(section, key) for section, names in known.items() for key in names}
    assert {pair for pairs in found.values() for pair in pairs} - real == set()
    assert found[root / "docs" / "operations.md"] == real


def test_defaults_in_the_pages_are_true(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/batond")
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/batond")
    text = (root / "docs" / "operations.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)\.(\w+)` \| `([^`]+)` \|", text, flags=re.MULTILINE)
    lists = {"classes", "tenants"}
    shown: dict[str, dict[str, Any]] = {}
    for section, key, value in rows:
        shown.setdefault(section, {})[key] = tomllib.loads(f"value = {value}")["value"]
    tenant = {"name": "a", "token_sha256": "0" * 64}
    with_tenant = {section: values for section, values in shown.items() if section not in lists}
    with_tenant["tenants"] = [{**tenant, **shown["tenants"]}]
    assert len(rows) > 35
    assert Settings(**with_tenant) == Settings(tenants=[tenant])


def test_environment_variables_name_keys(all_text: str) -> None:
    known = keys()
    named = re.findall(r"\bBATOND_([A-Z]+)__([A-Z_]+)", all_text)
    assert named
    assert all(key.lower() in known[section.lower()] for section, key in named)


def test_health_services_are_the_ones_served(root: Path) -> None:
    text = (root / "docs" / "operations.md").read_text(encoding="utf-8")
    table = re.search(r"^\| service \| .*?\n\n", text, flags=re.MULTILINE | re.DOTALL)
    assert table
    named = re.findall(r"^\| `(\w+)` \|", table[0], flags=re.MULTILINE)
    assert sorted(named) == sorted([LIVENESS, READINESS, SATURATION])


# -- commands and scripts ----------------------------------------------------------------------------------


def commands(program: Typer) -> set[str]:
    """Names of a program's commands, and of its groups of commands."""
    groups = {group.typer_instance.info.name for group in program.registered_groups if group.typer_instance}
    return {name for name in groups if isinstance(name, str)} | {
        command.name or command.callback.__name__
        for command in program.registered_commands
        if command.callback
    }


def test_commands_in_the_pages_exist(all_text: str) -> None:
    named = set(re.findall(r"\bbatonctl ([a-z]+)", all_text)) - {"commands"}
    assert {"generate", "info", "drain"} <= named
    assert named <= commands(batonctl)
    for group in batonctl.registered_groups:
        inner = group.typer_instance
        assert inner is not None
        named = set(re.findall(rf"\bbatonctl {inner.info.name} ([a-z]+)", all_text))
        assert named
        assert named <= commands(inner)
    fenced = "\n".join(re.findall(r"^```\n(.*?)^```$", all_text, flags=re.MULTILINE | re.DOTALL))
    named = {
        *re.findall(r"`batond ([a-z-]+)", all_text),
        *re.findall(r"^batond ([a-z-]+)", fenced, re.MULTILINE),
    }
    assert named == commands(batond)


def test_every_queue_script_is_in_the_table(root: Path) -> None:
    scripts = {file.stem for file in (root / "daemon" / "queue" / "scripts").glob("*.lua")}
    scripts -= {"common", "line", "pace", "moves"}  # What all scripts share.
    text = (root / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = re.search(r"^\| script \| does \|\n(.*?)\n\n", text, flags=re.MULTILINE | re.DOTALL)
    assert table
    first_cells = " ".join(row.split("|")[1] for row in table[1].splitlines())
    assert set(re.findall(r"`(\w+)`", first_cells)) == scripts


def test_messages_in_troubleshooting_are_ours(root: Path) -> None:
    text = (root / "docs" / "operations.md").read_text(encoding="utf-8")
    table = re.search(r"^\| message contains .*?\n\n", text, flags=re.MULTILINE | re.DOTALL)
    assert table
    named = re.findall(r"^\| `([^`]+)` \|", table[0], flags=re.MULTILINE)
    assert len(named) > 15
    said: list[str] = []
    for folder in ("daemon", "policies", "offload"):
        for file in (root / folder).rglob("*.py"):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            said += [
                node.value
                for node in ast.walk(tree)
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            ]
    assert not [message for message in named if not any(message in text for text in said)]

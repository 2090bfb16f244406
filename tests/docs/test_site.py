"""The site is built strictly, fetches nothing from elsewhere, leads nowhere wrong, has the whole contract."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import pytest
from mkdocs.exceptions import PluginError

from batond.v1 import admin_pb2, jobs_pb2, types_pb2

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

#: Attributes by which a page makes a browser fetch something by itself.
FETCHED = {("img", "src"), ("script", "src"), ("iframe", "src"), ("source", "src"), ("link", "href")}


class Page(HTMLParser):
    """What a page is called by, leads to, and fetches."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.fetched: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif tag == "a" and name == "href" and value:
                self.links.add(value)
            elif (tag, name) in FETCHED and value:
                self.fetched.add(value)


@pytest.fixture(scope="module")
def site(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """Builds the site as `make docs` does, and reads all its pages."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "--site-dir", str(out)]
    built = subprocess.run(
        command,
        cwd=root,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return {path: Page(path.read_text(encoding="utf-8")) for path in sorted(out.rglob("*.html"))}


@pytest.fixture(scope="module")
def contract(root: Path) -> ModuleType:
    """Loads the hook that makes the reference, as MkDocs does."""
    path = root / "docs" / "hooks" / "contract.py"
    spec = importlib.util.spec_from_file_location("contract", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["contract"] = module
    spec.loader.exec_module(module)
    return module


def test_every_page_is_on_the_site(site: dict[Path, Page], pages: dict[Path, str]) -> None:
    names = {path.stem for path in site} - {"404"}
    expected = {path.stem for path in pages} - {"README", "CONTRIBUTING", "CHANGELOG", "0000-template"}
    assert names == expected | {"index", "contributing", "changelog", "jobs", "admin", "types"}


def test_nothing_is_fetched_from_elsewhere(site: dict[Path, Page]) -> None:
    fetched = {address for page in site.values() for address in page.fetched}
    assert fetched
    assert not [address for address in fetched if urlsplit(address).netloc]
    folder = min(site, key=lambda path: len(path.parts)).parent
    styles = [path.read_text(encoding="utf-8") for path in folder.rglob("*.css")]
    assert styles
    assert not [text for text in styles if "url(http" in text or "url(//" in text or "@import" in text]


def test_every_link_leads_somewhere(site: dict[Path, Page]) -> None:
    broken = []
    for path, page in site.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or path.name == "404.html":  # That one is served for any address.
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                broken.append(f"{path.name}: {link}")
            elif parts.fragment and target in site:
                anchors = site[target].anchors
                if unquote(parts.fragment) not in anchors:
                    broken.append(f"{path.name}: {link}")
    assert not broken


def test_the_reference_has_all_of_the_contract(site: dict[Path, Page]) -> None:
    by_name = {path.stem: page for path, page in site.items() if path.parent.name == "reference"}
    for name, module in {"jobs": jobs_pb2, "admin": admin_pb2, "types": types_pb2}.items():
        file: Any = module.DESCRIPTOR
        wanted = {*file.message_types_by_name, *file.enum_types_by_name, *file.services_by_name}
        for service in file.services_by_name.values():
            wanted |= {method.name for method in service.methods}
        assert wanted
        assert wanted <= by_name[name].anchors


def test_fields_and_comments_are_in_the_reference(contract: ModuleType, root: Path) -> None:
    page = contract.page(contract.read(root / "proto"), "types")
    assert "| `labels` = 7 | map of `string` to `string` |" in page
    assert "| one of `input` | | The prompt, in one of three forms; exactly one must be set. |" in page
    assert "| `max_tokens` = 1 | optional `int64` | Most tokens to emit, at least 1; unset is 256. |" in page
    assert "| `JOB_STATE_PARKED` = 3 | Lost its row to a more urgent job, or was parked by hand" in page
    assert "repeated [ChatMessage](#ChatMessage)" in page


def test_what_has_no_comment_stops_the_build(contract: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "batond" / "v1"
    folder.mkdir(parents=True)
    for name in ("jobs", "admin", "types"):
        text = 'syntax = "proto3";\npackage batond.v1;\n'
        if name == "types":
            text = f"// Of both.\n{text}// A job.\nmessage Job {{\n  string job_id = 1;\n}}\n"
        (folder / f"{name}.proto").write_text(text, encoding="utf-8")
    read = contract.read(tmp_path)
    with pytest.raises(PluginError, match=r"types\.proto has no comment at \(4, 0, 2, 0\)"):
        contract.page(read, "types")
    (folder / "jobs.proto").write_text("no contract", encoding="utf-8")
    with pytest.raises(PluginError, match="do not compile"):
        contract.read(tmp_path)

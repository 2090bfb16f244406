"""The page's files: its own alone, and headers that keep everything else out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from batond.clients.gateway import GatewaySettings, create_app
from batond.clients.gateway.page.static import Assets

FOLDER = Path(__file__).parents[4] / "clients/gateway/page/assets"
#: Ways of making markup or code of text.
SINKS = re.compile(
    r"\.(inner|outer)HTML\s*\+?=(?!=)|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc"
)


@pytest.fixture(scope="module")
def site() -> TestClient:
    """Answers for the application; the page's files need no daemon."""
    return TestClient(create_app(GatewaySettings()), follow_redirects=False)


def test_every_way_leads_to_the_page(site: TestClient) -> None:
    for path in ("/", "/live"):
        answer = site.get(path)
        assert (answer.status_code, answer.headers["location"]) == (307, "live/")
    assert "<title>batond" in site.get("/live/").text


def test_each_file_has_its_type_and_the_strict_headers(site: TestClient) -> None:
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assert {one.name for one in FOLDER.iterdir()} == Assets().names
    for name in Assets().names:
        answer = site.get(f"/live/{name}")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(kinds[name.rpartition(".")[2]])
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        tag = answer.headers["etag"]
        again = site.get(f"/live/{name}", headers={"if-none-match": tag})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["content-security-policy"] == policy


@pytest.mark.parametrize(
    "name", ["nothing.js", "..%2Froutes.py", "%2e%2e/routes.py", "assets", "main.js%00.html"]
)
def test_nothing_else_is_served(site: TestClient, name: str) -> None:
    assert site.get(f"/live/{name}").status_code == 404


def test_files_name_no_outside_address_and_make_no_markup_of_text() -> None:
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8")
        addresses = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}[^\s\"')]*", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, path.name
        assert not SINKS.search(text), path.name
        assert len(text.splitlines()) < 400, path.name


def test_the_page_runs_nothing_inline(site: TestClient) -> None:
    html = site.get("/live/").text
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son[a-z]+=|\sstyle=|<style", html)
    for name in re.findall(r'(?:src|href)="([^"#]+)"', html):
        assert name in Assets().names

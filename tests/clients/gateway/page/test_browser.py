"""The live page in a real browser, before a real daemon whose engine computes nothing."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from playwright.sync_api import expect

from batond.clients.gateway import GatewaySettings
from batond.clients.gateway.serving import make_server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page, Request, Route

    from batond.bench.local_daemon import LocalDaemon

EVIL = '<img src=x onerror="window.pwned=1">\'"`${alert(1)}</script>\u202eexe.\n\nevent: x'
ROWS = 4


class Visit:
    """A page, and what went on behind it."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url = page, url
        self.requests: list[Request] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.requests.append(request))  # noqa: PLW0108 - Playwright marks handlers
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda line: self._heard(line.type, line.text))
        page.on("dialog", lambda dialog: self.complaints.append(dialog.message))

    def _heard(self, kind: str, text: str) -> None:
        # The browser itself tells of answers such as 401; those are expected.
        if kind in {"error", "warning"} and not text.startswith("Failed to load resource"):
            self.complaints.append(text)

    def log_in(self, token: str) -> None:
        """Goes to the page and gives a token."""
        self.page.goto(f"{self.url}/live/")
        self.page.get_by_label("Token").fill(token)
        self.page.keyboard.press("Enter")

    def look(self, token: str) -> Page:
        """Goes to the page as an administrator."""
        self.log_in(token)
        expect(self.page.locator("#link")).to_have_text("Live")
        return self.page


@pytest.fixture
def visit(browser: Browser, gateway: Any) -> Iterator[Visit]:
    """Opens a page in a profile of its own; afterwards, nothing may have gone wrong or elsewhere."""
    context = browser.new_context(
        viewport={"width": 1280, "height": 900}, color_scheme="light", reduced_motion="reduce"
    )
    context.set_default_timeout(30_000)
    found = Visit(context.new_page(), gateway.url)
    yield found
    context.close()
    assert found.complaints == []
    assert {request.url for request in found.requests if not request.url.startswith(found.url)} == set()


@pytest.fixture
def token(fake: LocalDaemon) -> str:
    """Gives the administrator's token."""
    return fake.tokens["operator"]


def frame(t: float, rows: list[Any], queries: list[Any] = [], **others: Any) -> dict[str, Any]:  # noqa: B006 - read only
    plain = {"time": t, "step": int(t * 10), "rows": rows, "queries": queries, "more": 0, "queued": 0}
    memory = {
        "committed_bytes": 3 << 20,
        "pooled_bytes": 1 << 20,
        "reserved_bytes": 1 << 30,
        "parked_bytes": 512,
        "spilled_bytes": 0,
        "kv_budget_bytes": 8 << 20,
        "row_limit": 3,
        "governor": "shrinking",
        "reason": EVIL,
        "total_bytes": 1 << 34,
        "free_bytes": 1 << 30,
        "own_bytes": 1 << 33,
    }
    pools = {"host_pool_used": 1024, "host_pool": 4096, "counters": {"parks": 2}, "memory": memory}
    return {**plain, **pools, "classes": [], **others}


def query(job: str, tenant: str = "t", sla: str = "batch", **others: Any) -> dict[str, Any]:
    row = {"job": job, "choice": 0, "tenant": tenant, "sla": sla, "cached": 9, "output": 5, "max": 10}
    rowless = {"state": "parked", "prompt": 4, "prefilled": 4, "parks": 1, "bytes": 512, "held": False}
    return {**row, **rowless, **others}


def stream(*events: tuple[str, Any]) -> str:
    return "".join(f"event: {kind}\ndata: {json.dumps(data)}\n\n" for kind, data in events)


def test_the_stream_is_for_administrators(gateway: Any, fake: LocalDaemon) -> None:
    """Neither without a token, nor with one in the address, nor for a tenant; and of daemons there are."""
    with httpx.Client(base_url=f"{gateway.url}/live/api/", trust_env=False, timeout=30) as http:
        admin = {"authorization": f"Bearer {fake.tokens['operator']}"}
        tenant = {"authorization": f"Bearer {fake.tokens['alice']}"}
        assert http.get("events").status_code == 401
        for name in ("token", "access_token", "authorization"):
            assert http.get("events", params={name: fake.tokens["operator"]}).status_code == 401
        refusal = http.get("events", headers=tenant)
        assert (refusal.status_code, refusal.json()["error"]["message"]) == (
            403,
            "tenant alice is no administrator",
        )
        for place in ("1", "-1", "x", "\u0661", "9" * 400):
            assert http.get("events", params={"daemon": place}, headers=admin).status_code == 404
        with http.stream("GET", "events", headers=admin) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["cache-control"] == "no-store"
            kinds = []
            for line in answer.iter_lines():
                kinds += [line.removeprefix("event: ")] if line.startswith("event: ") else []
                if {"hello", "daemon", "batch"} <= set(kinds):
                    break
            assert kinds[0] == "hello"


def test_an_open_page_does_not_keep_the_gateway_from_stopping(fake: LocalDaemon) -> None:
    server = make_server(
        GatewaySettings(daemons=(f"unix:{fake.socket}",)),
        port=0,
        log_level="warning",
        timeout_graceful_shutdown=None,
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        thread.join(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    headers = {"authorization": f"Bearer {fake.tokens['operator']}"}
    with httpx.stream(
        "GET", f"http://127.0.0.1:{port}/live/api/events", headers=headers, timeout=30, trust_env=False
    ) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: hello"
        server.should_exit = True
        assert "event: lost" in list(lines), "it is ended in order, with a word"
    thread.join(60)
    assert not thread.is_alive()


def test_who_may_not_look_is_told_so(visit: Visit, fake: LocalDaemon) -> None:
    visit.log_in("wrong")
    error = visit.page.get_by_role("alert")
    expect(error).to_contain_text("The token is refused")
    visit.log_in(fake.tokens["alice"])
    expect(error).to_contain_text("You may not see the batch: tenant alice is no administrator")
    expect(visit.page.locator("#live")).to_be_hidden()
    assert visit.page.evaluate("sessionStorage.length + localStorage.length") == 0
    visit.log_in("not a header\u20ac")
    expect(error).to_contain_text("no token")


def test_a_park_is_seen(visit: Visit, token: str, fake: LocalDaemon) -> None:
    """Four rows are full, an urgent job comes: the page shows who left which row for whom, and its return."""
    page = visit.look(token)
    with contextlib.ExitStack() as stack:
        alice, bob = (stack.enter_context(fake.client(name)) for name in ("alice", "bob"))
        for place in range(ROWS):
            alice.submit(token_ids=[7 + place], job_id=f"long-{place}", sla_class="batch", max_tokens=100_000)
            stack.callback(alice.cancel, f"long-{place}")
        expect(page.locator("#figures")).to_contain_text(f"{ROWS} of {ROWS}")
        bob.submit(token_ids=[3], job_id="urgent", sla_class="interactive", max_tokens=100_000)
        stack.callback(bob.cancel, "urgent")
        parked = page.locator('#events li[data-kind="park"]').first
        expect(parked).to_contain_text(re.compile(r"long-\d left row \d for urgent \(interactive\)"))
        expect(page.locator("#waiting-table")).to_contain_text("parked")
        job = parked.get_by_role("button").inner_text()
        page.get_by_role("button", name="Table").click()
        expect(page.locator("#parked-table")).to_contain_text(job)
        expect(page.locator("#row-table")).to_contain_text("urgent")
        page.get_by_role("button", name="Lanes").click()
        page.locator("#waiting-table").get_by_role("button", name=job).click()
        expect(page.locator("#followed")).to_have_text(f"Following {job} of alice, batch.")
        assert (
            page.locator("#canvas")
            .get_attribute("aria-label")
            .startswith(f"{ROWS} of {ROWS} rows busy, 1 parked")
        )  # type: ignore[union-attr] - it is there
        page.keyboard.press("Escape")
        for _ in range(4):
            page.get_by_role("button", name="Zoom in").click()
        painted(page, c0=500, c2=2000)
        bob.cancel("urgent")
        expect(page.locator('#events li[data-kind="resume"]').first).to_contain_text(f"{job} is back in row")
    expect(page.locator("#class-table")).to_contain_text("interactive")
    expect(page.locator("#class-table tr", has_text="interactive")).to_contain_text("of 1.00 s")
    assert token not in page.url
    assert not [request.url for request in visit.requests if token in request.url]


def painted(page: Page, **least: int) -> None:
    """Waits until so many pixels of the canvas have the colours."""
    for _ in range(200):
        found = page.evaluate(PAINTED)
        if all(found[name] > pixels for name, pixels in least.items()):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"{found} of {least}")


#: How much of the canvas has the colours of the theme, by their names.
PAINTED = """() => {
    const canvas = document.getElementById("canvas");
    const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    const probe = document.body.appendChild(document.createElement("i"));
    const found = {};
    for (const name of ["c0", "c1", "c2"]) {
        probe.style.color = `var(--${name})`;
        const [r, g, b] = getComputedStyle(probe).color.match(/\\d+/g).map(Number);
        found[name] = 0;
        for (let i = 0; i < data.length; i += 4) {
            if (data[i] === r && data[i + 1] === g && data[i + 2] === b) found[name] += 1;
        }
    }
    probe.remove();
    return found;
}"""


def test_names_are_text_wherever_they_stand(visit: Visit, token: str) -> None:
    """Tenants, jobs, classes, policies, models, reasons and addresses are other people's words."""
    daemon = dict.fromkeys(
        ("daemon_id", "version", "message", "model", "device", "batch_kind", "preemption_mode", "policy"),
        EVIL,
    )
    one, other = query(EVIL, EVIL, EVIL), query(f"{EVIL}2", EVIL, EVIL)
    taker = query("urgent", EVIL, "interactive")
    hello = ("hello", {"daemons": [EVIL, f"{EVIL}2"], "daemon": 0})
    facts = ("daemon", {**daemon, "state": "degraded", "classes": ["interactive", EVIL], "uptime_s": 5})
    body = stream(
        hello,
        facts,
        ("batch", frame(100, [one, other])),
        ("batch", frame(101, [taker, other], [one])),
        ("batch", frame(102, [one, other])),
        ("batch", frame(103, [None, None], [other])),
        ("batch", frame(104, [taker, None])),
        ("batch", frame(105, [taker, None], [one, query("w", EVIL, EVIL, state="waiting")])),
        ("lost", {"message": EVIL}),
    )
    visit.page.route(
        "**/api/events*", lambda route: route.fulfill(content_type="text/event-stream", body=body)
    )
    visit.page.goto(f"{visit.url}/live/")
    page = visit.page
    expect(page.locator("#stale")).to_contain_text("What you see is old")
    expect(page.locator("#events")).to_contain_text(EVIL.split("\n", maxsplit=1)[0])
    for where in ("#waiting-table", "#class-table", "#memory", "#figures", "#served", "#foot", "#legend"):
        expect(page.locator(where)).to_contain_text("<img src=x")
    page.get_by_role("button", name="Tenant").click()
    page.get_by_role("button", name="Table").click()
    expect(page.locator("#parked-table")).to_contain_text("<img src=x")
    page.locator("#parked-table").get_by_role("button").first.click()
    expect(page.locator("#followed")).to_contain_text("<img src=x")
    page.get_by_role("button", name="Lanes").click()
    page.locator("#canvas").hover(position={"x": 1200, "y": 40})
    assert page.evaluate("[window.pwned, document.images.length, document.scripts.length]") == [None, 1, 2]


def test_what_is_old_is_marked_and_the_stream_taken_up_again(visit: Visit, token: str) -> None:
    page, broken = visit.page, True
    body = stream(("hello", {"daemons": ["d"], "daemon": 0}), ("batch", frame(100, [query("a"), None])))

    def answer(route: Route) -> None:
        if broken:
            route.fulfill(content_type="text/event-stream", body=body)
        else:
            route.continue_()

    page.add_init_script(f"sessionStorage.setItem('batond.token', {json.dumps(token)})")
    page.route("**/api/events*", answer)
    page.goto(f"{visit.url}/live/")
    expect(page.locator("#link")).to_contain_text("Stale")
    expect(page.locator("#stale")).to_contain_text("the next attempt is in")
    expect(page.locator("#figures")).to_contain_text("1 of 2", use_inner_text=True)
    broken = False
    page.evaluate("dispatchEvent(new Event('online'))")
    expect(page.locator("#link")).to_have_text("Live")
    expect(page.locator("#stale")).to_be_hidden()
    expect(page.locator("#figures")).to_contain_text(f"0 of {ROWS}", use_inner_text=True)


def test_it_works_with_the_keyboard_alone(visit: Visit, token: str, fake: LocalDaemon) -> None:
    page = visit.look(token)
    press = page.keyboard.press
    here = "document.activeElement.id || document.activeElement.textContent"
    assert page.evaluate(here) == "live", "the focus goes to what came in place of the form"
    page.locator(".skip").focus()
    seen: list[str] = []
    while "timeline" not in seen:
        press("Tab")
        seen.append(page.evaluate(here))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", seen[-1]
        assert len(seen) < 30, "the batch is not reached"
    assert [name for name in seen if name in {"theme", "leave", "pause"}] == ["theme", "leave", "pause"]
    press("Space")
    expect(page.locator("#link")).to_have_text("Paused")
    expect(page.locator("#pause")).to_have_attribute("aria-pressed", "true")
    press("End")
    expect(page.locator("#link")).to_have_text("Live")
    span = page.get_by_label("Time shown")
    press("+")
    expect(span).to_have_text("20 s")
    for _ in range(20):
        press("-")
    expect(span).to_have_text("10 min")
    press("ArrowLeft")
    expect(page.locator("#link")).to_have_text("Paused")
    press("End")
    press("c")
    expect(page.get_by_role("button", name="Tenant")).to_have_attribute("aria-pressed", "true")
    with fake.client("alice") as alice, contextlib.ExitStack() as stack:
        alice.submit(token_ids=[5], job_id="followed", max_tokens=100_000)
        stack.callback(alice.cancel, "followed")
        expect(page.locator("#figures")).to_contain_text(f"1 of {ROWS}")
        press("ArrowDown")
        expect(page.locator("#followed")).to_contain_text("Following followed of alice")
        press("Escape")
        expect(page.locator("#followed")).to_be_empty()
        press("t")
        expect(page.locator("#row-table")).to_contain_text("followed")
        assert page.evaluate(here) == "table-view", "the focus goes along"
    press("t")
    assert page.evaluate(here) == "timeline"
    press("Tab")
    assert page.evaluate(here) != "timeline", "the focus can leave"
    assert page.evaluate(UNNAMED) == 0


#: Controls that a screen reader has no name for.
UNNAMED = """() => [...document.querySelectorAll("button, select, input")]
    .filter((one) => !one.textContent.trim() && !one.ariaLabel && !one.labels?.length).length"""


def test_it_can_be_read_in_both_themes_and_on_a_phone(visit: Visit, token: str) -> None:
    page = visit.look(token)
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    assert page.evaluate(CONTRASTS) == []
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(ground)
    assert dark != light
    assert page.evaluate(CONTRASTS) == []
    page.get_by_role("button", name="Theme").click()
    page.get_by_role("button", name="Theme").click()
    assert page.evaluate(ground) == light, "the switch goes before the system"
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.reload()
    expect(page.locator("#link")).to_have_text("Live")
    assert page.evaluate("document.documentElement.dataset.theme") == "light", "it is remembered"
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_label("Token")).to_be_focused()
    page.reload()
    expect(page.get_by_label("Token")).to_be_visible()


#: Pairs of colours with less than the contrast that WCAG 2.2 wants of text (1.4.3).
CONTRASTS = """() => {
    const probe = document.body.appendChild(document.createElement("i"));
    const light = (name) => {
        probe.style.color = `var(--${name})`;
        const parts = getComputedStyle(probe).color.match(/\\d+/g).slice(0, 3).map((one) => one / 255);
        const [r, g, b] = parts.map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const words = ["ink", "faint", "good", "warn", "bad", "accent"];
    const pairs = words.flatMap((name) => [[name, "card"], [name, "page"]]);
    for (let place = 0; place < 10; place += 1) pairs.push(["on-colour", `c${place}`]);
    pairs.push(["ink", "host"], ["on-colour", "accent"]);
    const bad = pairs.filter(([a, b]) => {
        const [low, high] = [light(a), light(b)].sort((x, y) => x - y);
        return (high + 0.05) / (low + 0.05) < 4.5;
    });
    probe.remove();
    return bad;
}"""

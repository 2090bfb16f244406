"""What holds for every path: health, errors in OpenAI's form, bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from batond.clients.gateway.settings import read_listen, read_tiers

if TYPE_CHECKING:
    import httpx


def test_health_needs_no_credentials(http: httpx.Client) -> None:
    answer = http.get("/healthz", headers={"authorization": ""})
    assert (answer.status_code, answer.json()) == (200, {"status": "ready"})


def test_an_unknown_path_is_told_in_the_apis_own_form(http: httpx.Client) -> None:
    answer = http.get("/v1/nothing")
    assert answer.status_code == 404
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_body_that_is_too_large_is_refused_before_it_is_sent(http: httpx.Client) -> None:
    answer = http.post("/healthz", content=b"x" * ((16 << 20) + 1))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_settings_are_read_or_refused() -> None:
    assert read_listen(":80") == ("127.0.0.1", 80)
    assert read_listen("[::1]:80") == ("::1", 80)
    assert read_tiers(["flex=slow", "auto="])["flex"] == "slow"
    for bad in ("80", "host:99999", "a b:1"):
        with pytest.raises(ValueError, match="not host:port"):
            read_listen(bad)
    with pytest.raises(ValueError, match="tier=class"):
        read_tiers(["flex"])

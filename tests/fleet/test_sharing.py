"""Daemons that share a Redis: jobs are watched anywhere, models are found, daemons know of each other."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from batond.bench.fake_engine import fake_tokens
from batond.bench.local_daemon import OPERATOR
from batond.clients import Chunk
from batond.clients.errors import NotFoundError, PermissionDeniedError
from batond.clients.model import JobState, ServerState

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.clients import JobStream

TOKENS = 120
TIMEOUT_S = 60.0


def tokens_of(stream: JobStream) -> list[int]:
    return [token for event in stream if isinstance(event, Chunk) for token in event.token_ids]


def until(true: Callable[[], bool]) -> None:
    """Waits for what other processes do."""
    end_s = time.monotonic() + TIMEOUT_S
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_a_job_is_watched_at_any_daemon_from_any_index(fleet: Any) -> None:
    """R7, D1: two daemons share four jobs, and each shows all of them."""
    for daemon in fleet.start("m", "m", rows=2):
        daemon.wait_ready()
    wanted = {number: fake_tokens([number, 3], number, TOKENS) for number in range(4)}
    clients = [fleet.client(daemon) for daemon in fleet.daemons]
    for number in wanted:
        clients[0].submit(
            token_ids=[number, 3], seed=number, max_tokens=TOKENS, ignore_eos=True, job_id=f"j{number}"
        )
    for number, tokens in wanted.items():
        for client in clients:
            for index in (0, 1, TOKENS // 2):
                with client.watch(f"j{number}", index) as stream:
                    assert tokens_of(stream) == tokens[index:]
            assert client.get(f"j{number}").state is JobState.SUCCEEDED
    for client in clients:
        client.close()


def test_a_model_is_found_among_daemons_of_several(fleet: Any) -> None:
    """Who serves what is said by the daemon that is asked, and known to clients that have the address."""
    small, large = fleet.start("small", "large")
    options: dict[str, Any] = {"token_ids": [5, 6], "seed": 1, "max_tokens": 4, "ignore_eos": True}
    with fleet.client(small) as near:
        until(lambda: len(near_daemons(fleet, small)) == 2)
        with pytest.raises(NotFoundError) as caught:
            near.submit(model="large", **options)
        error = caught.value
        assert error.reason == "MODEL_NOT_SERVED"
        assert error.details["models"] == "large,small"
        assert error.details["addresses"] == "gpu1.example:7431"
        with pytest.raises(NotFoundError) as caught:
            near.submit(model="none", **options)
        assert caught.value.details["addresses"] == ""
        with pytest.raises(PermissionDeniedError):
            near.daemons()
    for _ in range(4):  # Wherever it begins.
        with fleet.client() as both:
            for model in ("large", "small", "large"):
                job = both.submit(model=model, **options)
                assert both.result(job.job_id, timeout_s=TIMEOUT_S).output_token_ids == tuple(
                    fake_tokens([5, 6], 1, 4)
                )
    assert large.process.poll() is None


def near_daemons(fleet: Any, daemon: Any) -> list[Any]:
    with fleet.client(daemon, tenant=OPERATOR) as operator:
        return list(operator.daemons())


def test_daemons_are_listed_as_long_as_they_run(fleet: Any) -> None:
    first, second = fleet.start("m", "m")
    until(lambda: len(near_daemons(fleet, first)) == 2)
    with fleet.client(first, tenant=OPERATOR) as operator:
        own = operator.server_info().daemon_id
        one, other = operator.daemons()
        assert own in {one.daemon_id, other.daemon_id}
        assert {one.address, other.address} == {"gpu0.example:7431", "gpu1.example:7431"}
        assert {(each.model, each.state, each.rows) for each in (one, other)} == {("m", ServerState.READY, 4)}
        second.stop()
        assert [each.daemon_id for each in operator.daemons()] == [own], "who leaves says so"

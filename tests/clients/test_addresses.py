"""Clients that know several daemons: calls and streams go on at another; the token goes nowhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest

from batond.clients import Chunk, Client, ClientTLS
from batond.clients.errors import InvalidRequestError, NotFoundError, UnavailableError
from batond.clients.fleet import Fleet
from batond.clients.retry import RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CA = b"-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n"


@pytest.fixture
def other(daemon: Any) -> Iterator[Any]:
    """Another daemon that shares the queue of the first."""
    one = type(daemon)()
    one.jobs = daemon.jobs
    one.start()
    yield one
    one.ended.set()
    one.stop()


@pytest.fixture
def both(connect: Callable[..., Any], daemon: Any, other: Any) -> Any:
    """A client of both kinds that knows both and begins at the first."""
    client = connect([daemon.target, other.target])
    begin_at(client, 0)
    return client


def begin_at(client: Any, place: int) -> None:
    fleet: Fleet = getattr(client, "client", client)._fleet
    fleet._rota._current = place


def test_a_call_goes_to_another_address_when_its_daemon_is_gone(
    connect: Callable[..., Any], daemon: Any, other: Any
) -> None:
    """D3, V2."""
    patient = RetryPolicy(attempts=100, base_s=0.1, cap_s=0.1)  # gRPC looks for who came back each second.
    both = connect([daemon.target, other.target], retry=patient)
    begin_at(both, 0)
    job = both.submit("a", job_id="j")
    daemon.stop()
    assert both.get(job.job_id).job_id == "j"
    both.submit("b", job_id="k")
    assert (daemon.names(), other.names()) == (["SubmitJob"], ["GetJob", "SubmitJob"])
    daemon.start()
    other.stop()
    assert both.get("k").job_id == "k", "and back"


def test_a_call_whose_answer_got_lost_is_made_once_more_elsewhere(
    both: Any, daemon: Any, other: Any, fault: Any
) -> None:
    """Q2: the id makes that safe."""
    daemon.faults["SubmitJob"] = [fault(grpc.StatusCode.UNAVAILABLE, after_effect=True)]
    assert both.submit("a", job_id="j").job_id == "j"
    assert (daemon.names(), other.names()) == (["SubmitJob"], ["SubmitJob"])
    assert list(daemon.jobs) == ["j"]


@pytest.mark.parametrize("broken_after", range(9))
def test_a_stream_goes_on_elsewhere_at_its_next_token(
    both: Any, daemon: Any, other: Any, chunks: Any, broken_after: int
) -> None:
    """D3: whenever its daemon dies, each token comes once and the client sees no error."""
    daemon.breaks = [broken_after]
    with both.generate("a", job_id="j") as stream:
        seen = [event for event in stream if isinstance(event, Chunk)]
    assert [token for chunk in seen for token in chunk.token_ids] == [t for ids, _ in chunks for t in ids]
    assert "".join(chunk.text for chunk in seen) == "".join(text for _, text in chunks)
    assert len(other.names()) == 1


def test_a_stream_survives_a_rolling_restart(both: Any, daemon: Any, other: Any, chunks: Any) -> None:
    """V2: both restart, one after the other."""
    daemon.breaks, other.breaks = [3], [4]
    with both.generate("a", job_id="j") as stream:
        tokens = [t for event in stream if isinstance(event, Chunk) for t in event.token_ids]
    assert tokens == [t for ids, _ in chunks for t in ids]
    assert daemon.names() == ["GenerateStream", "WatchJob"]


def test_a_stream_that_was_sent_twice_cancels_its_job_by_a_call(both: Any, other: Any, daemon: Any) -> None:
    """C2: the second daemon found the job there, so it does not end with its stream."""
    daemon.breaks, other.endless = [0], True
    with both.generate("a", job_id="j") as stream:
        next(stream)
    assert other.names()[-1] == "CancelJob"


def test_no_address_answers(connect: Callable[..., Any], daemon: Any, other: Any) -> None:
    client = connect([daemon.target, other.target], retry=RetryPolicy(attempts=2, base_s=0.01))
    daemon.stop()
    other.stop()
    with pytest.raises(UnavailableError):
        client.get("j")


def test_a_job_is_looked_for_at_all_addresses(both: Any, daemon: Any, other: Any) -> None:
    other.jobs = {}
    both.submit("a", job_id="j")
    begin_at(both, 1)
    assert both.get("j").job_id == "j"
    with pytest.raises(NotFoundError):
        both.get("none")
    assert other.names() == ["GetJob", "GetJob"]


def test_a_model_is_asked_for_where_the_hint_says(
    connect: Callable[..., Any], daemon: Any, other: Any, fault: Any
) -> None:
    """Only addresses that the user gave are gone to; who serves the model is remembered."""
    unused = "127.0.0.1:1"
    client = connect([daemon.target, unused, other.target], token="t0ken")
    begin_at(client, 0)
    hint = {"addresses": f"evil.example:7431,unix:/tmp/x,{other.target}"}
    daemon.faults["SubmitJob"] = [
        fault(grpc.StatusCode.NOT_FOUND, reason="MODEL_NOT_SERVED", metadata=hint) for _ in range(2)
    ]
    for number in range(3):
        client.submit("a", model="b", job_id=str(number))
    assert (daemon.names(), len(other.names())) == (["SubmitJob"], 3)
    client.submit("a", job_id="any")
    assert daemon.names() == ["SubmitJob"] * 2 or len(other.names()) == 4


def test_calls_for_one_daemon_want_one_address(both: Any) -> None:
    for call in (
        both.drain,
        lambda: both.set_policy("fair"),
        lambda: both.park("j"),
        lambda: both.resume("j"),
        lambda: next(iter(both.watch_batch())),
    ):
        with pytest.raises(InvalidRequestError, match="one daemon"):
            call()


def fleet(*targets: str, **options: Any) -> Fleet:
    how: dict[str, Any] = {"token": None, "tls": None, "allow_plaintext_token": False, **options}
    return Fleet(targets, lambda _: None, **how)


def test_no_address_gets_the_token_in_plain_text() -> None:
    with pytest.raises(ValueError, match="plain text"):
        Client(["127.0.0.1:1", "host.example:1"], token="t0ken")
    with pytest.raises(ValueError, match="at least one"):
        Client([])


def test_hints_are_followed_only_where_that_was_wanted_and_to_hosts_that_prove_themselves() -> None:
    hint = "a.example:1,b.example:2,unix:/x,dns:///c:1,b.example"
    own = fleet("a.example:1")
    assert own._hinted(hint) == [0]
    for tls in (None, ClientTLS()):
        with pytest.raises(ValueError, match="follow_routing"):
            fleet("a.example:1", tls=tls, follow_routing=True)
    following = fleet("a.example:1", tls=ClientTLS(root_ca=CA), token="t0ken", follow_routing=True)
    assert following._hinted(hint) == [0, 1]
    assert following._hinted("b.example:2") == [1]
    assert following._names == ["a.example:1", "b.example:2"]
    assert following._ways[1].credentials is not None

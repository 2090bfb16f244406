"""Where a call goes next: round the addresses first, then it waits; what the user gave is never left."""

from __future__ import annotations

import pytest

from batond.clients.errors import (
    BatondClientError,
    ClientDeadlineError,
    ExhaustedError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from batond.clients.retry import RetryPolicy
from batond.clients.trip import NOT_SERVED, Rota, Trip, model_of
from batond.v1 import jobs_pb2, types_pb2

POLICY = RetryPolicy(attempts=3, base_s=0.1)
AWAY = UnavailableError("away")
NO_JOB = NotFoundError("no job", reason="NOT_FOUND")


def not_served(*addresses: str) -> NotFoundError:
    return NotFoundError("not here", reason=NOT_SERVED, details={"addresses": ",".join(addresses)})


def travel(trip: Trip, error: BatondClientError, times: int) -> list[int]:
    places = []
    for _ in range(times):
        trip.after(error)
        places.append(trip.place)
    return places


def test_every_address_is_tried_before_the_call_waits() -> None:
    trip = Trip(Rota(3, first=1), POLICY, 3)
    waits = []
    for wanted in (2, 0, 1, 2, 0, 1):
        waits.append(trip.after(AWAY))
        assert trip.place == wanted
    for wanted in (2, 0):
        trip.after(AWAY)
        assert trip.place == wanted
    with pytest.raises(UnavailableError):
        trip.after(AWAY)  # Three rounds are over.
    assert all(wait_s <= 0.1 for wait_s in (*waits[:2], *waits[3:5]))
    assert 0.05 <= waits[2] <= 0.1
    assert 0.1 <= waits[5] <= 0.2


def test_a_daemon_that_says_when_to_come_back_is_not_waited_for_if_there_is_another() -> None:
    """V2: who drains sends its clients on."""
    later = UnavailableError("it stops", reason="STOPPING", retry_after_s=60.0)
    trip = Trip(Rota(2, first=0), POLICY, 3)
    assert trip.after(later) <= POLICY.base_s
    assert trip.place == 1
    assert trip.after(later) == 60.0


def test_progress_begins_a_new_round() -> None:
    trip = Trip(Rota(2, first=0), POLICY, 2)
    for _ in range(10):
        assert trip.after(AWAY) <= POLICY.base_s
        trip.arrived()


def test_later_calls_begin_where_the_last_one_got_to() -> None:
    rota = Rota(3, first=0)
    trip = Trip(rota, POLICY, 3)
    assert travel(trip, AWAY, 2) == [1, 2]
    trip.arrived()
    assert rota.place("") == 2
    slow = Trip(rota, POLICY, 3)
    rota.failed(1, 2)
    assert slow.place == 2, "what fails elsewhere moves nobody who is not there"


def test_what_another_address_can_not_mend_is_raised_at_once() -> None:
    trip = Trip(Rota(3, first=0), POLICY, 3)
    with pytest.raises(InvalidRequestError):
        trip.after(InvalidRequestError("wrong"))
    with pytest.raises(ExhaustedError):
        trip.after(ExhaustedError("full"))
    assert trip.place == 0


def test_a_call_that_is_not_repeated_stays_where_it_is() -> None:
    trip = Trip(Rota(3, first=0), POLICY, 1)
    with pytest.raises(UnavailableError):
        trip.after(AWAY)
    assert (trip.place, trip.untried) == (0, 0)


def test_a_job_is_looked_for_everywhere_before_it_is_not_found() -> None:
    trip = Trip(Rota(3, first=2), POLICY, 3)
    assert travel(trip, NO_JOB, 2) == [0, 1]
    with pytest.raises(NotFoundError):
        trip.after(NO_JOB)


def test_a_job_that_is_unknown_is_not_waited_for_because_an_address_is_away() -> None:
    trip = Trip(Rota(2, first=0), POLICY, 3)
    assert travel(trip, NO_JOB, 1) == [1]
    with pytest.raises(NotFoundError):
        trip.after(AWAY)


def test_a_job_that_was_seen_is_waited_for_where_it_is() -> None:
    """D3: its daemon restarts; the daemon of another model does not know it."""
    trip = Trip(Rota(2, first=0), POLICY, 3)
    trip.arrived()
    assert travel(trip, AWAY, 1) == [1]
    assert trip.after(NO_JOB) > 0
    assert trip.place == 0


def test_a_hint_goes_before_the_ring_and_is_remembered() -> None:
    rota = Rota(4, first=0)
    trip = Trip(rota, POLICY, 3, model="b", hinted=lambda names: [3] if names == "x:1" else [])
    trip.after(not_served("x:1"))
    assert trip.place == 3
    trip.arrived()
    assert rota.place("b") == 3
    assert (rota.place("a"), rota.place("")) == (0, 0)
    rota.failed(3, 1)
    assert rota.place("b") == 0


def test_a_model_whose_daemon_restarts_is_waited_for() -> None:
    trip = Trip(Rota(2, first=0), POLICY, 2, model="b")
    assert trip.after(not_served()) <= POLICY.base_s
    assert trip.after(AWAY) >= POLICY.base_s / 2
    assert trip.place == 0
    trip.after(not_served())
    with pytest.raises(UnavailableError):
        trip.after(AWAY)


def test_a_model_that_nobody_serves_is_said_so() -> None:
    trip = Trip(Rota(2, first=0), POLICY, 2, model="b")
    trip.after(not_served())
    with pytest.raises(NotFoundError):
        trip.after(not_served())


def test_an_address_that_does_not_answer_leaves_time_for_the_others() -> None:
    """D12: a daemon that is frozen."""
    trip = Trip(Rota(3, first=0), POLICY, 3)
    assert trip.timeout_s(30.0) == 10.0
    trip.after(ClientDeadlineError("no answer"))
    assert (trip.place, trip.timeout_s(20.0)) == (1, 10.0)
    trip.after(ClientDeadlineError("no answer"))
    assert (trip.place, trip.timeout_s(10.0)) == (2, 10.0)
    with pytest.raises(ClientDeadlineError):
        trip.after(ClientDeadlineError("no answer"))


def test_clients_begin_at_different_addresses() -> None:
    assert {Rota(3).place("") for _ in range(200)} == {0, 1, 2}


def test_the_model_of_a_request() -> None:
    asked = jobs_pb2.SubmitJobRequest(spec=types_pb2.JobSpec(model="m"))
    assert model_of(asked) == "m"
    assert model_of(jobs_pb2.GetJobRequest()) == ""
    assert model_of(None) == ""

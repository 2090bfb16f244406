"""The queue's order: class, tenant with the smallest weighted counter, arrival."""

from __future__ import annotations

from batond.daemon.queue.limits import TenantLimits
from batond.daemon.simulator.fair_queue import FairQueue, Spent


def fill(queue: FairQueue[str], tenant: str, jobs: int, prompt_tokens: int = 10) -> None:
    for number in range(jobs):
        queue.add("batch", tenant, prompt_tokens, f"{tenant}{number}")


def test_tenants_take_turns_however_many_jobs_they_send() -> None:
    queue: FairQueue[str] = FairQueue()
    fill(queue, "a", 6)
    fill(queue, "b", 3)
    assert list(queue.claim("batch", 6)) == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_a_weight_of_two_gets_twice_as_much() -> None:
    queue: FairQueue[str] = FairQueue({"a": TenantLimits(weight=2.0)})
    fill(queue, "a", 60)
    fill(queue, "b", 60)
    taken = list(queue.claim("batch", 30))
    assert abs(sum(job[0] == "a" for job in taken) - 20) <= 1


def test_output_counts_and_idle_time_gives_no_credit() -> None:
    queue: FairQueue[str] = FairQueue()
    fill(queue, "a", 50)
    fill(queue, "b", 50)
    assert list(queue.claim("batch", 2)) == ["a0", "b0"]
    queue.commit([Spent("batch", "a", 25)], [])
    assert [job[0] for job in queue.claim("batch", 4)] == ["b", "b", "b", "a"]
    fill(queue, "c", 50)  # Was idle; begins where the others are.
    assert sum(job[0] == "c" for job in queue.claim("batch", 12)) <= 5


def test_classes_are_apart_and_an_empty_one_gives_nothing() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.add("interactive", "a", 10, "urgent")
    fill(queue, "a", 1)
    assert not list(queue.claim("standard", 5))
    assert list(queue.claim("interactive", 5)) == ["urgent"]
    assert list(queue.waiting()) == [("batch", "a")]

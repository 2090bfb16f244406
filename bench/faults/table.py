"""The table: a fault, what is promised then, and the tests that would fail if it were not kept.

`docs/faults.md` shows it to operators; a test keeps the page, this table and the tests together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Row:
    """One fault.

    Attributes:
        fault: What goes wrong.
        promise: What holds all the same.
        tests: `file::function` below `tests/faults`, without `test_` and `.py` of the file.
    """

    fault: str
    promise: str
    tests: tuple[str, ...]


TABLE: Final = (
    Row(
        "a daemon is killed between any two of its Redis calls",
        "accepted jobs finish with the tokens of an undisturbed run; none is lost, none runs twice to an end",
        (
            "kill_points::test_a_daemon_killed_at_a_call_loses_and_doubles_nothing",
            "kill_points::test_every_call_of_a_life_is_a_kill_point",
        ),
    ),
    Row(
        "an engine is killed between any two Redis calls of its daemon",
        "the daemon starts another, which goes on from the committed tokens; streams stay open",
        (
            "kill_points::test_an_engine_killed_at_a_call_loses_and_doubles_nothing",
            "daemons::test_a_kill_in_the_middle_of_a_job_loses_and_doubles_no_token",
        ),
    ),
    Row(
        "a daemon is killed in the middle of jobs",
        "another takes them within the lease and about a second; watchers get each index once",
        ("daemons::test_a_kill_in_the_middle_of_a_job_loses_and_doubles_no_token",),
    ),
    Row(
        "a daemon starts while Redis has just come back",
        "it takes nothing from others before they had a lease's time to renew theirs",
        ("daemons::test_a_daemon_that_starts_lets_the_living_renew_first",),
    ),
    Row(
        "a daemon is paused for longer than its lease, and wakes",
        "another has gone on; what the first one writes late is refused",
        ("daemons::test_a_paused_daemon_finds_its_job_taken_and_its_writes_refused",),
    ),
    Row(
        "an engine stands still while its daemon lives",
        "nobody takes its jobs; after `service.frozen_after_s` health and watchdog say so",
        (
            "daemons::test_an_engine_that_stands_still_keeps_its_jobs_as_long_as_its_daemon_lives",
            "daemons::test_a_frozen_engine_is_told_by_health",
        ),
    ),
    Row(
        "many daemons claim from one queue at once",
        "each job is executed once",
        ("daemons::test_each_job_is_executed_once",),
    ),
    Row(
        "a Redis call is delayed, cut off before or after Redis has done it, or never answered",
        "it is made again and does no harm the second time",
        ("redis::test_a_call_that_is_cut_or_lost_is_made_again_and_does_no_harm",),
    ),
    Row(
        "Redis refuses, hangs or is killed, and comes back, also after longer than a lease",
        "generation goes on, what was made is saved afterwards, nothing is delivered twice; health: degraded",
        (
            "redis::test_generation_goes_on_without_redis_and_is_saved_afterwards",
            "redis::test_what_hangs_for_less_than_a_lease_disturbs_nobody",
        ),
    ),
    Row(
        "Redis is killed with jobs in line (`appendfsync always`)",
        "it has all of them when it is back; with `everysec` those of the last second may be missing",
        ("redis::test_a_kill_of_redis_between_jobs_forgets_none",),
    ),
    Row(
        "wall clocks of daemons are wrong by minutes, and jump",
        "no lease is stolen, no job is late, no result expires early: time is the Redis server's",
        (
            "clocks::test_wrong_and_jumping_wall_clocks_change_nothing",
            "clocks::test_the_clock_of_redis_ends_leases_results_and_deadlines",
        ),
    ),
    Row(
        "100,000 jobs have come and gone",
        "after the time to live, keys and memory are what they were before",
        ("clocks::test_keys_and_memory_come_back_after_many_jobs",),
    ),
    Row(
        "somebody pushes rubbish into the queue by hand",
        "it becomes a dead letter, nothing of it is executed, good jobs run, daemons live",
        ("daemons::test_garbage_in_the_queue_harms_no_job_and_no_daemon",),
    ),
    Row(
        "jobs are cancelled at any time, at any daemon",
        "each ends cancelled unless it had ended; rows and leases are free, no other job changes",
        ("clients::test_cancelled_at_any_time_in_any_state",),
    ),
    Row(
        "clients close their streams, do not read them, or hear nothing for long",
        "closed generations end, unread streams cost no memory, silent ones live",
        (
            "clients::test_streams_that_are_closed_leave_nothing_behind",
            "clients::test_who_does_not_read_costs_nobody_anything",
            "clients::test_a_stream_outlives_silence",
        ),
    ),
    Row(
        "all of it at random, for minutes",
        "nothing is lost, doubled, different or left behind",
        ("chaos::test_nothing_is_lost_or_doubled_whatever_dies",),
    ),
)


def page_lines() -> list[str]:
    """The table as it stands on the page."""
    rows = [f"| {row.fault} | {row.promise} |" for row in TABLE]
    return ["| when | then |", "| --- | --- |", *rows]

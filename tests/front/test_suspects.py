"""Who is tried alone after an engine's death, and who is convicted: pure decisions, no engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from batond.daemon.front.suspects import MOST_PROOF_TOKENS, OPEN_TURN_S, PATIENCE_S, PROOF_TOKENS, Suspects

HIGH, LOW = 0, 2


def died_with(*refs: str, urgency: int = LOW) -> dict[str, tuple[int, int]]:
    return dict.fromkeys(refs, (urgency, 1))


def test_nobody_is_suspected_before_an_engine_dies() -> None:
    suspects = Suspects()
    suspects.settle(0.0, others=LOW)
    assert suspects.admits("a")
    assert not suspects.heard("a", 99)
    assert suspects.settle_in_s(0.0) is None


def test_a_death_among_others_charges_nobody_and_makes_suspects() -> None:
    """D8: batch mates are not charged."""
    suspects = Suspects()
    assert suspects.engine_died(died_with("a", "b")) == ""
    assert not suspects.admits("a")
    assert suspects.admits("new")
    suspects.settle(0.0, others=None)
    assert (suspects.alone, suspects.admits("a")) == ("a", True)
    assert not suspects.admits("b")
    assert not suspects.admits("new"), "a mate would blur the evidence"


def test_a_death_alone_convicts() -> None:
    """D8: and only then; the next suspect is tried after it."""
    suspects = Suspects()
    suspects.engine_died(died_with("a", "b"))
    suspects.settle(0.0, others=None)
    assert suspects.engine_died(died_with("a")) == "a"
    assert "a" not in suspects
    suspects.settle(1.0, others=None)
    assert suspects.alone == "b"


def test_being_alone_by_chance_convicts_the_second_time() -> None:
    """An idle daemon's engine may be killed by anything; the job that was in it is a suspect, no more."""
    suspects = Suspects()
    assert suspects.engine_died(died_with("a")) == ""
    suspects.settle(0.0, others=None)
    suspects.heard("a", PROOF_TOKENS)
    suspects.settle(0.0, others=LOW)
    assert suspects.alone == ""
    assert suspects.engine_died(died_with("a")) == "a"


def test_a_death_before_the_suspect_was_begun_convicts_nobody() -> None:
    """The engine died again while it was loading: nothing was in it."""
    suspects = Suspects()
    suspects.engine_died(died_with("a"))
    suspects.settle(0.0, others=None)
    assert suspects.engine_died({}) == ""
    assert "a" in suspects


def test_who_proves_itself_is_believed() -> None:
    suspects = Suspects()
    suspects.engine_died({"a": (LOW, 2)})
    suspects.settle(0.0, others=None)
    assert not suspects.heard("a", 2 * PROOF_TOKENS - 1)
    assert suspects.heard("a", 1)
    assert "a" not in suspects
    suspects.settle(0.0, others=LOW)
    assert (suspects.alone, suspects.admits("a")) == ("", True)


def test_a_late_killer_has_to_prove_more_each_time() -> None:
    """D8: one that strikes after its proof, among others, is alone when it strikes some day."""
    suspects, needed = Suspects(), []
    for _ in range(9):
        suspects.engine_died(died_with("a", "b"))
        for ref in ("a", "b"):
            suspects.settle(0.0, others=None)
            assert suspects.alone == ref
            tokens = 1
            while not suspects.heard(ref, 1):
                tokens += 1
            needed.append(tokens)
        suspects.settle(0.0, others=LOW)
    assert needed[:6] == [16, 16, 32, 32, 64, 64]
    assert max(needed) == MOST_PROOF_TOKENS


def test_urgent_work_waits_for_one_suspect_and_suspects_get_their_turns() -> None:
    """D8: neither starves behind the other."""
    suspects = Suspects()
    suspects.engine_died(died_with("a", "b", "c"))
    now_s, turns = 100.0, []
    for _ in range(5):
        suspects.settle(now_s, others=HIGH)
        turns.append(suspects.alone)
        if suspects.alone:
            suspects.settle(now_s + 1000, others=HIGH)
            assert suspects.alone == turns[-1], "a trial is not cut"
            suspects.heard(suspects.alone, PROOF_TOKENS)
        else:
            assert suspects.settle_in_s(now_s) == OPEN_TURN_S
            suspects.settle(now_s + OPEN_TURN_S / 2, others=HIGH)
            assert suspects.alone == ""
            now_s += OPEN_TURN_S
    assert turns == ["", "a", "", "b", ""]


def test_suspects_are_not_slowed_down_by_those_who_are_no_more_urgent() -> None:
    """D3: after a chance death all streams go on soon, proof by proof; yet nobody waits for ever."""
    suspects = Suspects()
    suspects.engine_died(died_with(*"abcdefgh"))
    now_s, turns = 100.0, ""
    for _ in range(9):
        suspects.settle(now_s, others=LOW)
        turns += suspects.alone or "-"
        suspects.heard(suspects.alone, PROOF_TOKENS)
        now_s += OPEN_TURN_S if not suspects.alone else PATIENCE_S / 4
    assert turns == "abcd-efgh"


def test_the_more_urgent_suspect_goes_first() -> None:
    suspects = Suspects()
    suspects.engine_died({"low": (LOW, 1), "high": (HIGH, 1)})
    suspects.settle(0.0, others=LOW)
    assert suspects.alone == "high"


def test_a_suspect_that_leaves_gives_its_turn_away() -> None:
    suspects = Suspects()
    suspects.engine_died(died_with("a"))
    suspects.settle(0.0, others=None)
    suspects.forget("a")
    suspects.settle(0.0, others=None)
    assert (suspects.alone, len(suspects)) == ("", 0)


@dataclass
class Toy:
    """A job of the toy engine: it ends after `length` tokens, or kills after `strikes` in one engine."""

    length: int
    strikes: int | None
    tokens: int = 0
    here: int = 0
    attempts: int = 0


jobs = st.lists(
    st.tuples(st.integers(1, 80), st.one_of(st.none(), st.none(), st.integers(1, 60))), min_size=1, max_size=8
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(jobs)
def test_killers_are_found_and_innocents_lose_nothing(drawn: list[tuple[int, int | None]]) -> None:
    """D8: whatever jobs and killers there are, early or late: who does not kill ends, and is not charged."""
    held = {f"j{i}": Toy(length, strikes) for i, (length, strikes) in enumerate(drawn)}
    suspects, now_s, deaths = Suspects(), 0.0, Counter[str]()
    while held:
        others = [LOW for ref in held if ref not in suspects]
        suspects.settle(now_s, LOW if others else None)
        now_s += 1.0
        inside = [ref for ref in held if suspects.admits(ref)]
        assert inside, "somebody always runs"
        for ref, job in held.items():
            job.here = job.here if ref in inside else 0
        killed = False
        for ref in inside:
            job = held[ref]
            job.here += 1
            if job.strikes is not None and job.here >= job.strikes:
                killed = True
                continue
            job.tokens += 1
            suspects.heard(ref, 1)
            if job.tokens == job.length:
                del held[ref]
                suspects.forget(ref)
        if not killed:
            continue
        deaths["all"] += 1
        assert deaths["all"] < 200, "it does not go on for ever"
        culprit = suspects.engine_died(died_with(*(ref for ref in inside if ref in held)))
        for job in held.values():
            job.here = 0
        if culprit:
            assert held[culprit].strikes is not None
            held[culprit].attempts += 1
            suspects.accuse(culprit, LOW, deaths=held[culprit].attempts)  # As a later claim does.
            if held[culprit].attempts == 3:
                del held[culprit]
                suspects.forget(culprit)

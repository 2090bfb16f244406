"""What was pushed into Redis by hand, and what is left when everything has expired."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from batond.daemon.errors import ConflictError, NotFoundError
from batond.daemon.queue import JobState, TenantLimits
from batond.daemon.queue.keys import KINDS, Keys, job_ref, lua_prelude, split_ref
from batond.daemon.queue.records import GarbageError, decode_chunk, decode_record, decode_spec

if TYPE_CHECKING:
    from conftest import Queue

# What pickle.dumps gives for an object that runs a command when loaded.
PICKLE = b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R."


@pytest.mark.parametrize("member", [b"no job", PICKLE, b"", b"t/\xff\xfe", b"x" * 100_000])
async def test_rubbish_in_a_queue_becomes_a_dead_letter(queue: Queue, member: bytes) -> None:
    """D13: evidence is kept, nothing runs, the good jobs behind it do."""
    await queue.client.zadd(queue.store.keys.queue("standard"), {member: 0})
    await queue.submit("good")
    assert (await queue.claim_one()).record.job_id == "good"
    (letter,) = await queue.store.dead_letters()
    assert (letter.reason, letter.is_job) == ("GARBAGE", False)
    assert (await queue.store.counts()).totals["garbage"] == 1
    await queue.store.dead_drop(letter.name)
    assert await queue.store.dead_letters() == []


async def fill(queue: Queue, *names: str) -> None:
    """Puts dead letters there, the first of them the oldest; all of them of the last hour."""
    now_s, _ = await queue.client.time()
    scores = {name: now_s * 1000 - len(names) + i for i, name in enumerate(names)}
    await queue.client.zadd(queue.store.keys.dead, scores)
    await queue.client.hset(queue.store.keys.evidence, mapping=dict.fromkeys(names, "{}"))


async def make_garbage(queue: Queue, count: int) -> None:
    """Lets so many letters of garbage be written, one after the other."""
    for i in range(count):
        await queue.client.zadd(queue.store.keys.leases, {f"rubbish{i}": 1})
        await queue.store.reap()


async def test_garbage_is_bounded(queue: Queue) -> None:
    """D13: the oldest of it goes, with its evidence, as more comes; dead jobs stay."""
    keys = queue.store.keys
    await fill(queue, *(f"garbage:{i}" for i in range(3)), "t/job", *(f"garbage:{i}" for i in range(3, 999)))
    await make_garbage(queue, 5)
    assert await queue.client.zcard(keys.dead) == 1001
    assert await queue.client.zcount(keys.dead, "-inf", "+inf") == await queue.client.hlen(keys.evidence)
    assert await queue.client.zrank(keys.dead, "t/job") == 0
    assert await queue.client.zrank(keys.dead, "garbage:3") is None
    assert await queue.client.zrank(keys.dead, "garbage:4") == 1


async def test_many_dead_jobs_do_not_make_a_letter_long(queue: Queue) -> None:
    """D13: no letter looks through all that died before it, which age alone takes away."""
    keys = queue.store.keys
    await fill(queue, "garbage:beyond", *(f"t/{i}" for i in range(1100)))
    await make_garbage(queue, 3)
    assert await queue.client.zcard(keys.dead) == 1104
    assert await queue.client.zrank(keys.dead, "garbage:beyond") == 0, "it was not looked for"


FORGED: dict[str, dict[str, Any]] = {
    "no state": {"state": None},
    "unknown state": {"state": "flying"},
    "epoch": {"epoch": "soon"},
    "infinite epoch": {"epoch": "inf"},
    "no arrival": {"arrival_us": None},
    "nan arrival": {"arrival_us": "nan"},
    "binary state": {"state": PICKLE},
    "negative count": {"output_tokens": "-5"},
    "tokens that are not there": {"output_tokens": "5"},
    "another's name": {"tenant": "u"},
    "binary name": {"tenant": b"\xff"},
    "no body hash": {"body_hash": None},
    "huge number": {"ttl_ms": "9" * 40},
}


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED.keys())
async def test_a_forged_record_becomes_a_dead_letter(queue: Queue, change: dict[str, Any]) -> None:
    """D13: any field of a waiting job's record, written by hand."""
    await queue.submit("bad")
    key = queue.store.keys.job("t/bad")
    for name, value in change.items():
        await (queue.client.hdel(key, name) if value is None else queue.client.hset(key, name, value))
    await queue.submit("good")
    assert [job.record.job_id for job in await queue.claim()] == ["good"]
    (letter,) = await queue.store.dead_letters()
    assert letter.reason in {"GARBAGE", "BAD_RECORD"}
    assert await queue.claim() == []
    assert (await queue.store.counts()).held == 1
    await queue.store.reap()
    await queue.store.list_jobs("t")


@pytest.mark.parametrize(
    "spec", [None, b"", PICKLE, b"{}", b'{"prompt_token_ids":[],"sampling":{},"seed":1}']
)
async def test_an_unreadable_spec_becomes_a_dead_letter(queue: Queue, spec: bytes | None) -> None:
    """D13: the spec is checked after the claim; the claim ends at once."""
    await queue.submit("bad")
    key = queue.store.keys.spec("t/bad")
    await (queue.client.delete(key) if spec is None else queue.client.set(key, spec))
    assert await queue.claim() == []
    record = await queue.store.get("t", "bad")
    assert (record.state, record.error_reason, record.owner) == (JobState.DEAD, "BAD_RECORD", "")
    (letter,) = await queue.store.dead_letters()
    assert letter.name == "t/bad"
    assert "spec" in letter.message
    assert (await queue.store.counts()).held == 0


async def test_keys_of_another_type_are_mended(queue: Queue) -> None:
    """D13: a list where the queue, the leases or a job belong."""
    keys = queue.store.keys
    shared = [f"{keys.base}:{name}" for name in ("classes", "totals", "clock")]
    named = [keys.queue("standard"), keys.leases, keys.job("t/a"), keys.dead, keys.evidence, keys.expiring]
    for key in named + shared:
        await queue.client.rpush(key, PICKLE)
    await queue.store.reap()
    with pytest.raises(NotFoundError):
        await queue.store.cancel("t", "a")
    assert await queue.submit("a")
    job = await queue.claim_one()
    assert await queue.commit(queue.step(job, 0, 1)) == []
    assert len(await queue.store.dead_letters()) >= 2


async def test_somebody_writing_into_an_output_does_not_hurt_its_mates(queue: Queue) -> None:
    """D13: the stream runs ahead of the committed count."""
    await queue.submit("bad")
    await queue.submit("good")
    bad, good = await queue.claim()
    await queue.client.xadd(queue.store.keys.out("t/bad"), {"c": PICKLE}, id="50-1")
    assert await queue.commit(queue.step(bad, 0, 1), queue.step(good, 0, 2)) == ["final"]
    assert await queue.tokens("good") == [2]
    assert (await queue.store.get("t", "bad")).state is JobState.DEAD
    with pytest.raises(NotFoundError):
        await queue.store.read_chunks("t", "bad")


async def test_entries_that_name_a_job_elsewhere_leave_it_alone(queue: Queue) -> None:
    """D13: a running, an ended and a job of another class, pushed into a queue by hand."""
    for job_id, sla_class in (("run", "standard"), ("end", "standard"), ("wait", "batch")):
        await queue.submit(job_id, sla_class=sla_class)
    run = (await queue.store.claim("d1", {"standard": 1}, lease_ms=60_000))[0]
    await queue.store.cancel("t", "end")
    stray = {f"t/{job_id}": 0 for job_id in ("run", "end", "wait")}
    await queue.client.zadd(queue.store.keys.queue("interactive"), stray)
    assert [job.record.job_id for job in await queue.claim()] == ["wait"]
    assert await queue.commit(queue.step(run, 0, 1, state=JobState.SUCCEEDED)) == []
    assert (await queue.store.get("t", "end")).state is JobState.CANCELLED
    assert len(await queue.store.dead_letters()) == 3


async def test_nothing_is_left_when_results_have_expired(queue: Queue) -> None:
    """D10: after the time to live, a sweep brings the keys back to the baseline."""
    await queue.submit("warm-up", ttl_ms=1)
    await queue.store.cancel("t", "warm-up")

    async def sweep(target: int) -> None:
        swept = 0
        async with asyncio.timeout(30):
            while swept < target:
                swept += (await store.reap()).swept

    store = queue.another(dead_ttl_ms=1, max_attempts=1)
    await sweep(1)
    baseline = set(await queue.client.keys("*"))
    ends = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)
    for i in range(60):
        await queue.submit(f"j{i}", tenant=f"t{i % 5}", ttl_ms=1)
        job = (await store.claim("d1", {"standard": 1}, lease_ms=60_000))[0]
        if i % 4 == 3:
            await store.hand_back("d1", job.record.tenant, f"j{i}", 1, charge=True, why="died")
        else:
            await store.commit_step("d1", [queue.step(job, 0, 1, text="x", state=ends[i % 3])])
    await queue.client.zadd(queue.store.keys.queue("batch"), {PICKLE: 0})
    await queue.claim()
    await sweep(61)
    left = set(await queue.client.keys("*"))
    totals = f"{queue.store.keys.base}:totals".encode()
    pace = queue.store.keys.pace("standard")
    assert await queue.client.pttl(pace) > 0, "one a class, and it goes by itself"
    assert left - {totals, pace.encode()} == baseline - {totals}
    assert (await queue.store.list_jobs("t1")).jobs == []


async def test_everything_of_an_ended_job_expires_by_itself(queue: Queue) -> None:
    """D10: also when no daemon is left to sweep."""
    await queue.submit("a", ttl_ms=50_000)
    job = await queue.claim_one()
    await queue.commit(queue.step(job, 0, 1, state=JobState.SUCCEEDED))
    keys = queue.store.keys
    for key in (keys.job("t/a"), keys.spec("t/a"), keys.out("t/a")):
        assert 0 < await queue.client.pttl(key) <= 50_000


async def test_an_expired_id_can_be_used_again(queue: Queue) -> None:
    """D10: and the sweep of the old job does not touch the new one."""
    await queue.submit("a", ttl_ms=1)
    await queue.store.cancel("t", "a")
    async with asyncio.timeout(30):
        while await queue.client.exists(queue.store.keys.job("t/a")):
            pass
    assert await queue.submit("a", body_hash="other")
    assert (await queue.store.reap()).requeued == []
    assert (await queue.claim_one()).record.body_hash == "other"
    assert [job.job_id for job in (await queue.store.list_jobs("t")).jobs] == ["a"]


async def test_every_key_is_in_the_table(queue: Queue) -> None:
    """No key outside keys.py, one hash tag for all: Cluster can run the scripts."""
    await queue.submit("a")
    await queue.submit("b")
    a, b = await queue.claim()
    await queue.commit(queue.step(a, 0, 1, state=JobState.SUCCEEDED), queue.step(b, 0, 1))
    await queue.client.zadd(queue.store.keys.queue("batch"), {"rubbish": 0})
    await queue.claim()
    await queue.submit("c")
    quota = {"u": TenantLimits(running=1, tokens_per_minute=9)}
    for job_id in ("d", "e"):
        await queue.submit(job_id, tenant="u", deadline_in_ms=60_000, sla_class="interactive")
    await queue.store.claim("d1", {"interactive": 2}, lease_ms=60_000, tenants=quota)
    base = queue.store.keys.base + ":"
    types = {kind.suffix: kind.redis_type for kind in KINDS}
    seen = set()
    for raw in await queue.client.keys("*"):
        assert raw.decode().startswith(base)
        name = raw.decode().removeprefix(base)
        suffix = name if name in types else name[: name.index(":") + 1]
        assert (await queue.client.type(raw)).decode() == types[suffix]
        seen.add(suffix)
    assert seen == {suffix for suffix, kind in types.items() if kind != "channel"}


def test_names_have_one_hash_tag_and_can_be_read_back() -> None:
    keys = Keys("org/mo{d}el")
    assert keys.base == "batond:{org/mo%7Bd%7Del}"
    assert keys.base.count("{") == keys.base.count("}") == 1
    assert split_ref(job_ref("a/b", "ü c")) == ("a/b", "ü c")
    assert lua_prelude().count("local ") == len(KINDS)


def test_a_record_ignores_fields_of_later_versions() -> None:
    flat = [b"tenant", b"1", b"job_id", b"2", b"model", b"m", b"sla_class", b"c", b"state", b"queued"]
    flat += [
        b"body_hash",
        b"3",
        b"arrival_us",
        b"4",
        b"ttl_ms",
        b"5",
        b"created_ms",
        b"6",
        b"new",
        b"\xc3\xa9",
    ]
    record = decode_record(flat)
    assert (record.tenant, record.arrival_us, record.body_hash) == ("1", 4, "3")


@pytest.mark.parametrize("clock", ["9" * 40, "9007199254740993", "inf", "nan", "-1", ""])
async def test_an_absurd_clock_does_not_spoil_arrivals(queue: Queue, clock: str) -> None:
    """D13: arrivals beyond what records hold would make garbage of every later job."""
    await queue.client.set(f"{queue.store.keys.base}:clock", clock)
    assert await queue.submit("a")
    assert await queue.submit("b")
    assert [job.record.job_id for job in await queue.claim()] == ["a", "b"]


@pytest.mark.parametrize("score", ["inf", "-inf", "1e308", "-5"])
async def test_absurd_counters_do_not_spoil_turns(queue: Queue, score: str) -> None:
    """D13: floor, account and turn of a class, written by hand."""
    keys = queue.store.keys
    await queue.submit("a")
    await queue.client.set(keys.floor("standard"), score)
    await queue.client.zadd(keys.accounts("standard"), {"t": score})
    await queue.client.zadd(keys.turn("standard"), {"t": score})
    job = await queue.claim_one()
    assert await queue.commit(queue.step(job, 0, 1)) == []
    await queue.submit("b")
    assert (await queue.claim_one()).record.job_id == "b"


async def test_any_key_of_another_type_is_mended_where_it_is_met(queue: Queue) -> None:
    """D13: no script breaks off in the middle, and no plain look is an internal error."""
    keys, store = queue.store.keys, queue.store
    await queue.submit("a")
    job = await queue.claim_one()
    await queue.submit("b")
    named = [
        keys.tenant("t"),
        keys.owner("d1"),
        keys.leases,
        keys.due,
        keys.expiring,
        keys.dead,
        keys.evidence,
    ]
    named += [f"{keys.base}:{name}" for name in ("totals", "classes", "clock", "holds:t")]
    for key in named:
        await queue.client.delete(key)
        await queue.client.rpush(key, PICKLE)
    assert (await store.list_jobs("t")).jobs == []
    with pytest.raises(NotFoundError):
        await store.dead_drop("t/a")
    assert await queue.commit(queue.step(job, 0, 1)) == []
    assert await queue.submit("c")
    await store.counts()
    assert (await store.cancel("t", "b")).state is JobState.CANCELLED
    assert len(await store.dead_letters()) >= 5


async def test_counters_that_are_no_numbers_begin_anew(queue: Queue) -> None:
    """D13: a figure for metrics must not end the daemon, nor a submit."""
    totals = f"{queue.store.keys.base}:totals"
    await queue.client.hset(totals, mapping={"submitted": b"\xff", b"\xfe": "x", "failed": "9" * 30})
    assert (await queue.store.counts()).totals["failed"] == 0
    await queue.submit("a")
    assert (await queue.store.counts()).totals["submitted"] == 1


async def test_an_unreadable_record_is_no_internal_error(queue: Queue) -> None:
    """D13: for whoever submits it again, updates it, or looks at it."""
    await queue.submit("a")
    await queue.client.hset(queue.store.keys.job("t/a"), "ttl_ms", "soon")
    with pytest.raises(ConflictError, match="can't be read"):
        await queue.submit("a")
    with pytest.raises(NotFoundError):
        await queue.store.update("t", "a", present_class="standard", sla_class="batch")
    for key in (queue.store.keys.job("t/a"), queue.store.keys.spec("t/a"), queue.store.keys.out("t/a")):
        await queue.client.delete(key)
        await queue.client.rpush(key, "x")
    for look in (queue.store.get, queue.store.get_spec, queue.store.read_chunks):
        with pytest.raises(NotFoundError):
            await look("t", "a")


@pytest.mark.parametrize("seed", ["-1", "18446744073709551616"])
def test_a_seed_that_the_wire_has_no_room_for_is_garbage(seed: str) -> None:
    """D13: sending it to the engine would end the daemon."""
    with pytest.raises(GarbageError, match="seed"):
        decode_spec(f'{{"prompt_token_ids":[1],"sampling":{{}},"seed":{seed}}}'.encode())


@pytest.mark.parametrize(
    "chunk",
    [
        {"first_index": 1 << 40, "token_ids": []},
        {"first_index": 0, "token_ids": [1 << 32]},
        {"first_index": 0, "token_ids": [1], "choice": 128},
        {"first_index": 0, "token_ids": [1, 2], "logprobs": [[-0.1, []]]},
    ],
)
def test_output_that_no_answer_has_room_for_is_garbage(chunk: dict[str, Any]) -> None:
    """D13: showing it would be an internal error."""
    with pytest.raises(GarbageError, match="output"):
        decode_chunk(msgspec.msgpack.encode(chunk))


@pytest.mark.parametrize("kind", ["turn", "resting"])
async def test_a_tenant_whose_turn_was_taken_away_gets_it_again(queue: Queue, kind: str) -> None:
    """D13: its line stands, and nobody else waits who would bring the class to mind."""
    quota = {"t": TenantLimits(running=1)}
    await queue.submit("run")
    (run,) = await queue.store.claim("d1", {"standard": 2}, lease_ms=60_000, tenants=quota)
    await queue.submit("wait")
    assert await queue.store.claim("d1", {"standard": 2}, lease_ms=60_000, tenants=quota) == []
    assert await queue.client.zcard(queue.store.keys.resting("standard")) == 1
    if kind == "turn":
        await queue.commit(queue.step(run, 0, 1, state=JobState.SUCCEEDED))
    await queue.client.delete(getattr(queue.store.keys, kind)("standard"))
    assert [job.record.job_id for job in await queue.claim()] == ["wait"]

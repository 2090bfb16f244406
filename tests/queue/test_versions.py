"""Daemons of two releases on one queue: what a newer one adds to records is passed over by an older one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from batond.daemon.front.tenant_book import AddedTenant
from batond.daemon.queue import Chunk, JobState
from batond.daemon.queue.records import decode_chunk, decode_spec, encode_chunk

if TYPE_CHECKING:
    from conftest import Queue


async def test_a_job_with_fields_of_a_newer_release_runs(queue: Queue) -> None:
    spec = msgspec.json.decode(msgspec.json.encode(queue.spec()))
    spec |= {"shards": 2}
    spec["sampling"] |= {"mirostat": {"tau": 1}}
    await queue.submit("a", spec_json=msgspec.json.encode(spec))
    await queue.client.hset(queue.store.keys.job("t/a"), "colour", "blue")
    job = await queue.claim_one()
    assert job.spec == queue.spec()
    await queue.commit(queue.step(job, 0, 1, 2))
    assert await queue.client.hget(queue.store.keys.job("t/a"), "colour") == b"blue", "it is kept"
    newer = {"first_index": 2, "token_ids": [3], "text": "c", "entropy": [0.5]}
    await queue.client.xadd(queue.store.keys.out("t/a"), {"c": msgspec.msgpack.encode(newer)}, id="2-2")
    await queue.client.hset(queue.store.keys.job("t/a"), "output_tokens", 3)
    await queue.store.hand_back("d1", "t", "a", job.record.epoch)
    again = await queue.claim_one()
    assert (again.token_ids, again.record.state) == ([1, 2, 3], JobState.CLAIMED)
    assert await queue.tokens("a") == [1, 2, 3]


def test_what_is_read_again_is_what_this_release_knows() -> None:
    known = Chunk(first_index=0, token_ids=[1])
    newer = msgspec.msgpack.decode(encode_chunk(known)) | {"entropy": 1.0}
    assert decode_chunk(msgspec.msgpack.encode(newer)) == known
    assert decode_spec(b'{"prompt_token_ids":[1],"sampling":{},"seed":1,"x":1}').prompt_token_ids == [1]


def test_a_tenant_of_a_newer_release_gets_in() -> None:
    raw = AddedTenant(name="red", token_sha256="0" * 64).model_dump(mode="json") | {"colour": "blue"}
    assert AddedTenant.model_validate_json(msgspec.json.encode(raw)).name == "red"

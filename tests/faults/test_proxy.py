"""The proxy itself: what it names, cuts, drops, delays, stalls and refuses."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeAlias

import pytest
import redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from batond.bench.faults.proxy import Moment, RedisProxy, cut, delay, drop, first, name_call, script_names
from batond.daemon.queue.calls import load_script

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batond.bench.faults.crew import OwnRedis

Store: TypeAlias = "tuple[OwnRedis, RedisProxy]"


@pytest.fixture
def through(store: Store) -> Iterator[redis.Redis]:
    """A client that tries each call once."""
    client = redis.Redis.from_url(store[1].url, socket_timeout=1.0, retry=Retry(NoBackoff(), 0))
    client.ping()
    yield client
    client.close()


def test_names_scripts_by_hash_and_by_text() -> None:
    script = load_script("commit_step")
    assert name_call([b"EVALSHA", script.sha.encode(), b"1", b"k"]) == "commit_step"
    assert name_call([b"eval", script.source.encode(), b"1", b"k"]) == "commit_step"
    assert name_call([b"hgetall", b"k"]) == "HGETALL"
    assert {"claim", "renew", "reap", "submit", "hand_back"} <= set(script_names().values())


def test_passes_pipelines_errors_and_large_values(store: Store, through: redis.Redis) -> None:
    pipe = through.pipeline(transaction=False)
    pipe.set("a", "x" * (1 << 20)).get("a").incr("a").lrange("none", 0, -1).exists("a")
    replies = pipe.execute(raise_on_error=False)
    assert replies[0] is True
    assert replies[1] == b"x" * (1 << 20)
    assert isinstance(replies[2], redis.ResponseError)
    assert replies[3:] == [[], 1]
    assert store[1].trace[-5:] == ["SET", "GET", "INCRBY", "LRANGE", "EXISTS"]


def test_cuts_before_redis_has_it(store: Store, through: redis.Redis) -> None:
    store[1].on("INCRBY", Moment.BEFORE, cut, nth=2)
    assert through.incr("n") == 1
    with pytest.raises(RedisConnectionError):
        through.incr("n")
    assert through.get("n") == b"1"


def test_cuts_after_redis_has_done_it(store: Store, through: redis.Redis) -> None:
    rule = store[1].on("INCRBY", Moment.AFTER, cut)
    with pytest.raises(RedisConnectionError):
        through.incr("n")
    assert rule.met.is_set()
    assert through.get("n") == b"1"


@pytest.mark.parametrize(("moment", "done"), [(Moment.BEFORE, None), (Moment.AFTER, b"1")])
def test_drops_without_a_word(store: Store, through: redis.Redis, moment: Moment, done: bytes | None) -> None:
    store[1].on("INCRBY", moment, drop)
    with pytest.raises(RedisTimeoutError):
        through.incr("n")
    assert through.get("n") == done


def test_delays_every_one(store: Store, through: redis.Redis) -> None:
    store[1].on("PING", Moment.AFTER, delay(0.05), every=True)
    began_s = time.monotonic()
    assert through.ping()
    assert through.ping()
    assert time.monotonic() - began_s > 0.1
    store[1].lift()
    assert through.ping()


def test_stalls_and_goes_on(store: Store, through: redis.Redis) -> None:
    store[1].stall()
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(through.incr, "n")
        with store[0].client() as straight:
            assert straight.get("n") is None
        store[1].go_on()
        assert late.result(5.0) == 1


def test_refuses_and_accepts_again(store: Store, through: redis.Redis) -> None:
    store[1].refuse()
    with pytest.raises(RedisConnectionError):
        through.ping()
    store[1].accept()
    assert through.ping()


def test_passes_messages_on(store: Store, through: redis.Redis) -> None:
    with through.pubsub() as pubsub, store[0].client() as straight:
        pubsub.subscribe("news")
        assert pubsub.get_message(timeout=5.0)["type"] == "subscribe"
        straight.publish("news", "hear")
        assert pubsub.get_message(timeout=5.0)["data"] == b"hear"


def test_does_a_deed_while_the_call_stands_still(store: Store, through: redis.Redis) -> None:
    with store[0].client() as straight:
        seen: list[bytes | None] = []
        store[1].on("INCRBY", Moment.BEFORE, first(lambda: seen.append(straight.get("n"))))
        store[1].on("INCRBY", Moment.AFTER, first(lambda: seen.append(straight.get("n"))))
        with pytest.raises(RedisConnectionError):
            through.incr("n")
        assert seen == [None]  # The cut came first: there was no answer.
        with pytest.raises(RedisConnectionError):
            through.incr("n")
        assert seen == [None, b"1"]


def test_a_killed_server_keeps_what_it_had_answered(store: Store, through: redis.Redis) -> None:
    through.set("n", "5")
    store[0].kill()
    with pytest.raises(RedisConnectionError):
        through.get("n")
    store[0].start()
    assert through.get("n") == b"5"

"""What needs no network: requests, retries, the stream cursor, enum names, imports."""

import random
import subprocess
import sys
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import batond.clients
from batond.clients import (
    BatchSnapshot,
    ChatMessage,
    Chunk,
    ClientTLS,
    FinishReason,
    JobState,
    QueryState,
    RetryPolicy,
    ServerState,
    build,
    convert,
    errors,
)
from batond.clients.cursor import StreamCursor
from batond.clients.errors import BY_STATUS
from batond.clients.retry import Backoff
from batond.v1 import admin_pb2, types_pb2


def test_a_prompt_takes_three_forms() -> None:
    assert build.spec("hello", {}).text.text == "hello"
    turns = [ChatMessage("system", "be short"), {"role": "user", "content": "hi"}]
    chat = build.spec(None, {"messages": turns}).chat
    assert [(turn.role, turn.content) for turn in chat.messages] == [("system", "be short"), ("user", "hi")]
    assert list(build.spec(None, {"token_ids": (5, 17, 3)}).tokens.token_ids) == [5, 17, 3]
    # What is empty is for the daemon to refuse; it must arrive as what it is.
    assert build.spec("", {}).WhichOneof("input") == "text"
    assert build.spec(None, {"token_ids": []}).WhichOneof("input") == "tokens"


@pytest.mark.parametrize(
    ("prompt", "options"),
    [(None, {}), ("a", {"token_ids": [1]}), (None, {"messages": [], "token_ids": []})],
)
def test_exactly_one_form(prompt: str | None, options: Any) -> None:
    with pytest.raises(errors.InvalidRequestError, match="exactly one"):
        build.spec(prompt, options)


def test_only_what_is_given_is_sent() -> None:
    """Q1: zero is sent as zero, and nothing is made up."""
    sampling = build.spec("x", {"max_tokens": 0, "temperature": 0.0}).sampling
    assert sampling.HasField("max_tokens")
    assert sampling.HasField("temperature")
    assert not sampling.HasField("top_p")
    assert not sampling.HasField("seed")
    assert not build.spec("x", {}).HasField("sampling")


def test_all_options_arrive() -> None:
    spec = build.spec(
        "x",
        {
            "model": "m",
            "sla_class": "batch",
            "max_tokens": 1 << 31,
            "temperature": 0.7,
            "top_k": 40,
            "top_p": 0.9,
            "seed": (1 << 64) - 1,
            "ignore_eos": True,
            "stop_token_ids": [7],
            "stop": "\n\n",
            "labels": {"run": "7"},
        },
    )
    assert (spec.model, spec.sla_class, dict(spec.labels)) == ("m", "batch", {"run": "7"})
    sampling = spec.sampling
    assert (sampling.max_tokens, sampling.top_k, sampling.seed) == (1 << 31, 40, (1 << 64) - 1)
    assert (sampling.temperature, sampling.top_p, sampling.ignore_eos) == (0.7, 0.9, True)
    assert (list(sampling.stop_token_ids), list(sampling.stop)) == ([7], ["\n\n"])
    assert list(build.spec("x", {"stop": ["a", "b"]}).sampling.stop) == ["a", "b"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 1.5),
        ("max_tokens", 1 << 80),
        ("temperature", "hot"),
        ("seed", -1),
        ("stop_token_ids", [-1]),
        ("stop", [1]),
        ("stop", 1),
        ("labels", {"a": 1}),
        ("model", 7),
        ("token_ids", [1 << 40]),
        ("token_ids", "abc"),
        ("messages", [{"role": "user"}]),
        ("messages", ["hi"]),
        ("messages", [{"role": "user", "content": 1}]),
    ],
)
def test_what_a_field_cannot_hold_is_refused_by_name(field: str, value: object) -> None:
    """Q1: the caller hears which argument is wrong, and no transport or protobuf error."""
    prompt = None if field in {"token_ids", "messages"} else "x"
    with pytest.raises(errors.InvalidRequestError) as caught:
        build.spec(prompt, {field: value})  # type: ignore[misc]  # wrong on purpose
    assert field in caught.value.fields


def test_half_a_character_is_refused() -> None:
    with pytest.raises(errors.InvalidRequestError, match="prompt"):
        build.spec("\ud83d", {})


def test_a_misspelt_option_is_not_swallowed() -> None:
    with pytest.raises(TypeError, match=r"max_token$"):
        build.spec("x", {"max_token": 4})  # type: ignore[typeddict-unknown-key]  # wrong on purpose


def test_half_a_key_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="both or neither"):
        ClientTLS(certificate=b"PEM")
    assert "SECRET" not in repr(ClientTLS(certificate=b"PEM", key=b"SECRET"))


def test_every_status_is_in_the_table() -> None:
    special = {grpc.StatusCode.OK, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED}
    assert set(BY_STATUS) == set(grpc.StatusCode) - special


def test_waits_grow_are_spread_and_end() -> None:
    policy = RetryPolicy(attempts=8, base_s=0.1, cap_s=1.0)
    unavailable = errors.UnavailableError("away")
    runs = []
    for seed in range(50):
        backoff = Backoff(policy.attempts, policy, random.Random(seed))
        runs.append([backoff.delay_s(unavailable) for _ in range(8)])
    assert all(run[-1] is None for run in runs)
    for attempt, span_s in enumerate([0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]):
        waits = [run[attempt] for run in runs]
        assert all(span_s / 2 <= wait <= span_s for wait in waits)
        assert len(set(waits)) > 40


def test_only_what_may_help_is_repeated() -> None:
    policy = RetryPolicy()
    for kind in {*BY_STATUS.values(), errors.ClientDeadlineError, errors.ServerDeadlineError}:
        delay_s = Backoff(5, policy).delay_s(kind("x"))
        assert (delay_s is not None) == (kind is errors.UnavailableError), kind
    told = errors.ExhaustedError("full", retry_after_s=7.0)
    assert Backoff(5, policy).delay_s(told) == 7.0
    # Another kind of error is not made retryable by a wish to wait.
    assert Backoff(5, policy).delay_s(errors.InvalidRequestError("x", retry_after_s=7.0)) is None


def chunk_event(chunk: Chunk) -> types_pb2.StreamEvent:
    message = types_pb2.TokenChunk(
        first_token_index=chunk.first_token_index, token_ids=chunk.token_ids, text=chunk.text
    )
    return types_pb2.StreamEvent(chunk=message)


@given(
    sizes=st.lists(st.integers(0, 4), max_size=12),
    breaks=st.lists(st.integers(0, 12), max_size=6),
    back=st.integers(0, 6),
)
def test_the_cursor_lets_everything_through_once(sizes: list[int], breaks: list[int], back: int) -> None:
    """R7: whatever breaks, and however far back the daemon starts again: nothing is lost or doubled."""
    chunks, index = [], 0
    for number, size in enumerate(sizes):
        if size or not chunks or chunks[-1].token_ids:  # At most one flush an index.
            chunks.append(Chunk(index, tuple(range(index, index + size)), f"<{number}>"))
            index += size
    cursor = StreamCursor()
    seen: list[Chunk] = []
    for end in [*breaks, len(chunks)]:
        start = 0
        while start < len(chunks) and chunks[start].first_token_index < cursor.next_token_index - back:
            start += 1
        for chunk in chunks[start:end]:
            event = cursor.accept(chunk_event(chunk))
            if event is not None:
                assert isinstance(event, Chunk)
                seen.append(event)
    assert seen == chunks


def test_the_cursor_keeps_choices_apart() -> None:
    """R7: each has its own place; what ends a choice comes once, also after text that was flushed there."""
    cursor = StreamCursor(2, starts={1: 3}, choices=3)
    assert cursor.resume_at() == (2, {0: 2, 1: 3, 2: 2})

    def read(choice: int, first: int, *ids: int, text: str = "", ends: bool = False) -> Any:
        message = types_pb2.TokenChunk(first_token_index=first, token_ids=ids, text=text, choice=choice)
        if ends:
            message.finish_reason = types_pb2.FINISH_REASON_STOP
        message.logprobs.extend(types_pb2.TokenLogprobs(token_id=one, logprob=-one) for one in ids)
        return cursor.accept(types_pb2.StreamEvent(chunk=message))

    rest = read(1, 0, 1, 2, 3, 4, text="abcd")
    assert (rest.first_token_index, rest.token_ids, rest.text) == (3, (4,), "abcd")
    assert [one.logprob for one in rest.logprobs] == [-4.0]
    assert cursor.next_token_indexes == {0: 2, 1: 4, 2: 2}
    assert cursor.next_token_index == 2
    assert read(1, 4, text="!") is not None
    assert read(1, 4, text="!") is None
    assert read(1, 4, ends=True).finish_reason is FinishReason.STOP
    assert read(1, 4, ends=True) is None
    assert read(0, 2, 9, ends=True) is not None
    with pytest.raises(errors.ServerError, match="skipped 1 tokens"):
        read(2, 3, 9)


def test_a_stream_of_one_choice_is_taken_up_by_its_index_alone() -> None:
    cursor = StreamCursor(choices=1)
    cursor.accept(chunk_event(Chunk(0, (1, 2), "ab")))
    assert cursor.resume_at() == (2, {})


@pytest.mark.parametrize(
    ("kind", "contract"),
    [
        (JobState, types_pb2.JobState),
        (FinishReason, types_pb2.FinishReason),
        (ServerState, admin_pb2.ServerState),
        (QueryState, admin_pb2.QueryState),
    ],
)
def test_every_name_of_the_contract_has_its_member(kind: Any, contract: Any) -> None:
    read = {convert._enum(kind, contract.items(), number) for number in contract.values()}
    assert read == set(kind)
    assert convert._enum(kind, contract.items(), 99) is kind.UNKNOWN


def test_every_field_of_the_contract_is_read() -> None:
    """A field added to the contract and forgotten here would be lost without a word."""
    job = {field.name for field in types_pb2.Job.DESCRIPTOR.fields} - {"error", "queue_time"}
    assert job <= set(batond.clients.JobInfo.__slots__)
    snapshot = {field.name for field in admin_pb2.BatchSnapshot.DESCRIPTOR.fields}
    assert snapshot == set(BatchSnapshot.__slots__)
    info = {field.name for field in admin_pb2.GetServerInfoResponse.DESCRIPTOR.fields} - {"uptime"}
    assert info <= set(batond.clients.ServerInfo.__slots__)
    for name, kind in [
        ("RowSnapshot", batond.clients.RowSnapshot),
        ("QuerySnapshot", batond.clients.QuerySnapshot),
        ("MemorySnapshot", batond.clients.MemorySnapshot),
    ]:
        fields = {field.name for field in getattr(admin_pb2, name).DESCRIPTOR.fields}
        assert fields == set(kind.__slots__)


def test_every_exported_name_is_there() -> None:
    for name in batond.clients.__all__:
        assert getattr(batond.clients, name) is not None
    assert set(batond.clients.__all__) <= set(dir(batond.clients))
    with pytest.raises(AttributeError, match="no attribute 'Clyent'"):
        batond.clients.Clyent  # type: ignore[attr-defined]  # noqa: B018 -- wrong on purpose


BARE = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""


def bare(code: str) -> subprocess.CompletedProcess[str]:
    """Runs Python as after a bare install: what the extras bring can't be imported."""
    missing = {"typer", "rich", "click", "torch", "transformers", "msgspec", "redis", "pydantic", "structlog"}
    program = BARE.format(missing=missing) + code
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_a_bare_install_has_the_clients() -> None:
    result = bare(
        "import batond.clients as c\nfor name in c.__all__: getattr(c, name)\n"
        "with c.Client('127.0.0.1:1', timeout_s=1, retry=c.RetryPolicy(attempts=1)) as client:\n"
        "    try: client.get('x')\n"
        "    except c.UnavailableError: print('fine')\n"
    )
    assert result.stdout == "fine\n", result.stderr


def test_a_bare_batonctl_says_what_to_install() -> None:
    # batonctl asks find_spec, which would raise for a module that is blocked the other way.
    result = bare(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name: None if name in {'typer', 'rich'} else find(name)\n"
        "from batond.clients.batonctl import main\nmain()\n"
    )
    assert result.returncode == 2
    assert result.stderr == "batonctl needs typer and rich: pip install 'batond[cli]'\n"
    assert result.stdout == ""

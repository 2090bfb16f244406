"""Classes are capped and only ever lowered; deadlines are read and bounded."""

from __future__ import annotations

from typing import Any

import pytest
import structlog.testing
from google.protobuf import duration_pb2, timestamp_pb2

from batond.daemon.config_tenants import TenantRights
from batond.daemon.errors import InvalidRequestError, PermissionDeniedError
from batond.daemon.front import convert
from batond.daemon.front.identity import tenant_of
from batond.daemon.front.ranks import TimeLimit, choose_class, lower_class, time_limit
from batond.policies.classes import SlaClasses
from batond.v1 import types_pb2

CLASSES = SlaClasses()


def choose(asked: str, **rights: Any) -> str:
    return choose_class(asked, tenant_of("red", TenantRights(**rights), CLASSES), CLASSES)


def test_a_tenant_may_ask_for_less() -> None:
    """V4."""
    assert choose("batch", highest_class="standard") == "batch"
    assert choose("standard", highest_class="standard") == "standard"
    assert choose("", highest_class="batch") == "batch"


def test_a_capped_tenant_is_refused_and_audited() -> None:
    """V4."""
    with structlog.testing.capture_logs() as lines, pytest.raises(PermissionDeniedError) as caught:
        choose("interactive", highest_class="batch")
    assert (caught.value.reason, caught.value.details["allowed"]) == ("CLASS_NOT_ALLOWED", "batch")
    line = lines[0]
    assert (line["action"], line["actor"], line["target"]) == ("UseClass", "red", "interactive")
    assert line["outcome"] == "refused"


@pytest.mark.parametrize(
    ("rights", "served"),
    [
        ({"highest_class": "batch"}, "batch"),
        ({"highest_class": "standard"}, "standard"),
        ({"highest_class": "standard", "default_class": "batch"}, "standard"),
    ],
)
def test_or_lowered_by_configuration(rights: dict[str, Any], served: str) -> None:
    """V4."""
    with structlog.testing.capture_logs() as lines:
        assert choose("interactive", lower_class=True, **rights) == served
    assert lines[0]["outcome"] == "lowered"


def test_nothing_is_ever_raised() -> None:
    with pytest.raises(PermissionDeniedError):
        choose("batch", classes=["interactive"], lower_class=True)


def test_an_unknown_class_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="known are interactive, standard, batch"):
        choose("gold")


@pytest.mark.parametrize(
    ("asked", "present", "reason"),
    [
        ("standard", "batch", "CLASS_RAISED"),
        ("interactive", "standard", "CLASS_RAISED"),
        ("interactive", "interactive", "CLASS_NOT_ALLOWED"),
    ],
)
def test_a_waiting_job_is_not_raised(asked: str, present: str, reason: str) -> None:
    tenant = tenant_of("red", TenantRights(highest_class="standard"), CLASSES)
    with pytest.raises(PermissionDeniedError) as caught:
        lower_class(asked, present, tenant, CLASSES)
    assert caught.value.reason == reason


def test_a_waiting_job_is_lowered() -> None:
    tenant = tenant_of("red", TenantRights(), CLASSES)
    assert lower_class("batch", "interactive", tenant, CLASSES) == "batch"
    assert lower_class("batch", "gone", tenant, CLASSES) == "batch"


def test_limits_are_read() -> None:
    assert time_limit(types_pb2.JobSpec()) == TimeLimit()
    at = types_pb2.JobSpec(deadline=timestamp_pb2.Timestamp(seconds=1_800_000_000, nanos=5_000_000))
    assert time_limit(at) == TimeLimit(deadline_ms=1_800_000_000_005)
    after = types_pb2.JobSpec(timeout=duration_pb2.Duration(seconds=1, nanos=1))
    assert time_limit(after) == TimeLimit(timeout_ms=1001)


def test_the_last_moment_that_can_be_shown_is_a_limit() -> None:
    """The end of the year 9999, as callers write "never"."""
    end = timestamp_pb2.Timestamp(seconds=253_402_300_799, nanos=999_999_000)
    limit = time_limit(types_pb2.JobSpec(deadline=end))
    assert convert.timestamp(limit.deadline_ms).seconds == end.seconds


@pytest.mark.parametrize(
    "fields",
    [
        {"timeout": duration_pb2.Duration()},
        {"timeout": duration_pb2.Duration(seconds=-1)},
        {"timeout": duration_pb2.Duration(seconds=1 << 40)},
        {"deadline": timestamp_pb2.Timestamp()},
        {"deadline": timestamp_pb2.Timestamp(seconds=-5)},
        {"deadline": timestamp_pb2.Timestamp(seconds=1, nanos=-1)},
        # Not in the range of a Timestamp: it could be kept and never be shown again.
        {"deadline": timestamp_pb2.Timestamp(seconds=253_402_300_800)},
        {"deadline": timestamp_pb2.Timestamp(seconds=1 << 40)},
    ],
)
def test_what_is_no_limit_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        time_limit(types_pb2.JobSpec(**fields))
    assert caught.value.reason == "BAD_TIME_LIMIT"


def test_the_earlier_limit_counts() -> None:
    assert TimeLimit().within(None) == TimeLimit()
    assert TimeLimit().within(2.5) == TimeLimit(timeout_ms=2500)
    assert TimeLimit(timeout_ms=1000).within(2.5) == TimeLimit(timeout_ms=1000)
    assert TimeLimit(timeout_ms=9000).within(2.5) == TimeLimit(timeout_ms=2500)
    assert TimeLimit(deadline_ms=7).within(1e300) == TimeLimit(7, 1_000_000_000_000)

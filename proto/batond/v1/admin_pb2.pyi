import datetime

from batond.v1 import types_pb2 as _types_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVER_STATE_UNSPECIFIED: _ClassVar[ServerState]
    SERVER_STATE_LOADING: _ClassVar[ServerState]
    SERVER_STATE_READY: _ClassVar[ServerState]
    SERVER_STATE_DRAINING: _ClassVar[ServerState]
    SERVER_STATE_DEGRADED: _ClassVar[ServerState]

class QueryState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    QUERY_STATE_UNSPECIFIED: _ClassVar[QueryState]
    QUERY_STATE_WAITING: _ClassVar[QueryState]
    QUERY_STATE_PREFILLING: _ClassVar[QueryState]
    QUERY_STATE_READY: _ClassVar[QueryState]
    QUERY_STATE_RUNNING: _ClassVar[QueryState]
    QUERY_STATE_PARKED: _ClassVar[QueryState]

class GovernorState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GOVERNOR_STATE_UNSPECIFIED: _ClassVar[GovernorState]
    GOVERNOR_STATE_OFF: _ClassVar[GovernorState]
    GOVERNOR_STATE_STEADY: _ClassVar[GovernorState]
    GOVERNOR_STATE_SHRINKING: _ClassVar[GovernorState]
    GOVERNOR_STATE_CRITICAL: _ClassVar[GovernorState]
    GOVERNOR_STATE_GROWING: _ClassVar[GovernorState]
    GOVERNOR_STATE_LOST: _ClassVar[GovernorState]
SERVER_STATE_UNSPECIFIED: ServerState
SERVER_STATE_LOADING: ServerState
SERVER_STATE_READY: ServerState
SERVER_STATE_DRAINING: ServerState
SERVER_STATE_DEGRADED: ServerState
QUERY_STATE_UNSPECIFIED: QueryState
QUERY_STATE_WAITING: QueryState
QUERY_STATE_PREFILLING: QueryState
QUERY_STATE_READY: QueryState
QUERY_STATE_RUNNING: QueryState
QUERY_STATE_PARKED: QueryState
GOVERNOR_STATE_UNSPECIFIED: GovernorState
GOVERNOR_STATE_OFF: GovernorState
GOVERNOR_STATE_STEADY: GovernorState
GOVERNOR_STATE_SHRINKING: GovernorState
GOVERNOR_STATE_CRITICAL: GovernorState
GOVERNOR_STATE_GROWING: GovernorState
GOVERNOR_STATE_LOST: GovernorState

class SlaClass(_message.Message):
    __slots__ = ("name", "order", "preemptible")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIBLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    order: int
    preemptible: bool
    def __init__(self, name: _Optional[str] = ..., order: _Optional[int] = ..., preemptible: bool = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "library_versions", "state", "state_message", "model", "device", "rows", "max_query_tokens", "vocab_size", "eos_token_ids", "batch_kind", "batch_reason", "preemption_mode", "policy", "sla_classes", "default_sla_class", "kv_bytes_per_token", "host_pool_bytes", "max_message_bytes", "start_time", "uptime", "tenant", "max_choices", "max_choice_tokens", "daemon_id")
    class LibraryVersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LIBRARY_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STATE_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BATCH_KIND_FIELD_NUMBER: _ClassVar[int]
    BATCH_REASON_FIELD_NUMBER: _ClassVar[int]
    PREEMPTION_MODE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    SLA_CLASSES_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SLA_CLASS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HOST_POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MAX_CHOICES_FIELD_NUMBER: _ClassVar[int]
    MAX_CHOICE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DAEMON_ID_FIELD_NUMBER: _ClassVar[int]
    version: str
    library_versions: _containers.ScalarMap[str, str]
    state: ServerState
    state_message: str
    model: str
    device: str
    rows: int
    max_query_tokens: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    batch_kind: str
    batch_reason: str
    preemption_mode: str
    policy: str
    sla_classes: _containers.RepeatedCompositeFieldContainer[SlaClass]
    default_sla_class: str
    kv_bytes_per_token: int
    host_pool_bytes: int
    max_message_bytes: int
    start_time: _timestamp_pb2.Timestamp
    uptime: _duration_pb2.Duration
    tenant: str
    max_choices: int
    max_choice_tokens: int
    daemon_id: str
    def __init__(self, version: _Optional[str] = ..., library_versions: _Optional[_Mapping[str, str]] = ..., state: _Optional[_Union[ServerState, str]] = ..., state_message: _Optional[str] = ..., model: _Optional[str] = ..., device: _Optional[str] = ..., rows: _Optional[int] = ..., max_query_tokens: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., batch_kind: _Optional[str] = ..., batch_reason: _Optional[str] = ..., preemption_mode: _Optional[str] = ..., policy: _Optional[str] = ..., sla_classes: _Optional[_Iterable[_Union[SlaClass, _Mapping]]] = ..., default_sla_class: _Optional[str] = ..., kv_bytes_per_token: _Optional[int] = ..., host_pool_bytes: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., uptime: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., tenant: _Optional[str] = ..., max_choices: _Optional[int] = ..., max_choice_tokens: _Optional[int] = ..., daemon_id: _Optional[str] = ...) -> None: ...

class ListDaemonsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListDaemonsResponse(_message.Message):
    __slots__ = ("daemons",)
    DAEMONS_FIELD_NUMBER: _ClassVar[int]
    daemons: _containers.RepeatedCompositeFieldContainer[Daemon]
    def __init__(self, daemons: _Optional[_Iterable[_Union[Daemon, _Mapping]]] = ...) -> None: ...

class Daemon(_message.Message):
    __slots__ = ("daemon_id", "model", "address", "state", "rows", "running_jobs", "version", "start_time")
    DAEMON_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_JOBS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    daemon_id: str
    model: str
    address: str
    state: ServerState
    rows: int
    running_jobs: int
    version: str
    start_time: _timestamp_pb2.Timestamp
    def __init__(self, daemon_id: _Optional[str] = ..., model: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[_Union[ServerState, str]] = ..., rows: _Optional[int] = ..., running_jobs: _Optional[int] = ..., version: _Optional[str] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class WatchBatchRequest(_message.Message):
    __slots__ = ("min_interval",)
    MIN_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    min_interval: _duration_pb2.Duration
    def __init__(self, min_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WatchBatchResponse(_message.Message):
    __slots__ = ("snapshot",)
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    snapshot: BatchSnapshot
    def __init__(self, snapshot: _Optional[_Union[BatchSnapshot, _Mapping]] = ...) -> None: ...

class RowSnapshot(_message.Message):
    __slots__ = ("row", "job_id", "tenant", "sla_class", "cached_tokens", "output_tokens", "max_tokens", "choice")
    ROW_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SLA_CLASS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    row: int
    job_id: str
    tenant: str
    sla_class: str
    cached_tokens: int
    output_tokens: int
    max_tokens: int
    choice: int
    def __init__(self, row: _Optional[int] = ..., job_id: _Optional[str] = ..., tenant: _Optional[str] = ..., sla_class: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., choice: _Optional[int] = ...) -> None: ...

class QuerySnapshot(_message.Message):
    __slots__ = ("job_id", "tenant", "sla_class", "state", "prompt_tokens", "prefilled_tokens", "output_tokens", "parks", "parked_bytes", "held", "max_tokens", "choice")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SLA_CLASS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARKS_FIELD_NUMBER: _ClassVar[int]
    PARKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    tenant: str
    sla_class: str
    state: QueryState
    prompt_tokens: int
    prefilled_tokens: int
    output_tokens: int
    parks: int
    parked_bytes: int
    held: bool
    max_tokens: int
    choice: int
    def __init__(self, job_id: _Optional[str] = ..., tenant: _Optional[str] = ..., sla_class: _Optional[str] = ..., state: _Optional[_Union[QueryState, str]] = ..., prompt_tokens: _Optional[int] = ..., prefilled_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., parks: _Optional[int] = ..., parked_bytes: _Optional[int] = ..., held: bool = ..., max_tokens: _Optional[int] = ..., choice: _Optional[int] = ...) -> None: ...

class BatchSnapshot(_message.Message):
    __slots__ = ("step", "time", "rows", "queries", "columns", "host_pool_used_bytes", "host_pool_bytes", "queued_jobs", "counters", "memory", "classes")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    HOST_POOL_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_JOBS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    step: int
    time: _timestamp_pb2.Timestamp
    rows: _containers.RepeatedCompositeFieldContainer[RowSnapshot]
    queries: _containers.RepeatedCompositeFieldContainer[QuerySnapshot]
    columns: int
    host_pool_used_bytes: int
    host_pool_bytes: int
    queued_jobs: int
    counters: _containers.ScalarMap[str, float]
    memory: MemorySnapshot
    classes: _containers.RepeatedCompositeFieldContainer[ClassSnapshot]
    def __init__(self, step: _Optional[int] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., rows: _Optional[_Iterable[_Union[RowSnapshot, _Mapping]]] = ..., queries: _Optional[_Iterable[_Union[QuerySnapshot, _Mapping]]] = ..., columns: _Optional[int] = ..., host_pool_used_bytes: _Optional[int] = ..., host_pool_bytes: _Optional[int] = ..., queued_jobs: _Optional[int] = ..., counters: _Optional[_Mapping[str, float]] = ..., memory: _Optional[_Union[MemorySnapshot, _Mapping]] = ..., classes: _Optional[_Iterable[_Union[ClassSnapshot, _Mapping]]] = ...) -> None: ...

class ClassSnapshot(_message.Message):
    __slots__ = ("sla_class", "first_token", "output_token")
    SLA_CLASS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    sla_class: str
    first_token: RecentTimes
    output_token: RecentTimes
    def __init__(self, sla_class: _Optional[str] = ..., first_token: _Optional[_Union[RecentTimes, _Mapping]] = ..., output_token: _Optional[_Union[RecentTimes, _Mapping]] = ...) -> None: ...

class RecentTimes(_message.Message):
    __slots__ = ("samples", "p50", "p95", "target")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    P50_FIELD_NUMBER: _ClassVar[int]
    P95_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    samples: int
    p50: _duration_pb2.Duration
    p95: _duration_pb2.Duration
    target: _duration_pb2.Duration
    def __init__(self, samples: _Optional[int] = ..., p50: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., p95: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., target: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class MemorySnapshot(_message.Message):
    __slots__ = ("committed_bytes", "pooled_bytes", "reserved_bytes", "parked_bytes", "spilled_bytes", "kv_budget_bytes", "row_limit", "governor", "reason", "total_bytes", "free_bytes", "own_bytes")
    COMMITTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    POOLED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SPILLED_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROW_LIMIT_FIELD_NUMBER: _ClassVar[int]
    GOVERNOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    OWN_BYTES_FIELD_NUMBER: _ClassVar[int]
    committed_bytes: int
    pooled_bytes: int
    reserved_bytes: int
    parked_bytes: int
    spilled_bytes: int
    kv_budget_bytes: int
    row_limit: int
    governor: GovernorState
    reason: str
    total_bytes: int
    free_bytes: int
    own_bytes: int
    def __init__(self, committed_bytes: _Optional[int] = ..., pooled_bytes: _Optional[int] = ..., reserved_bytes: _Optional[int] = ..., parked_bytes: _Optional[int] = ..., spilled_bytes: _Optional[int] = ..., kv_budget_bytes: _Optional[int] = ..., row_limit: _Optional[int] = ..., governor: _Optional[_Union[GovernorState, str]] = ..., reason: _Optional[str] = ..., total_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., own_bytes: _Optional[int] = ...) -> None: ...

class ParkJobRequest(_message.Message):
    __slots__ = ("job_id", "tenant")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    tenant: str
    def __init__(self, job_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class ParkJobResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: _types_pb2.Job
    def __init__(self, job: _Optional[_Union[_types_pb2.Job, _Mapping]] = ...) -> None: ...

class ResumeJobRequest(_message.Message):
    __slots__ = ("job_id", "tenant")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    tenant: str
    def __init__(self, job_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class ResumeJobResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: _types_pb2.Job
    def __init__(self, job: _Optional[_Union[_types_pb2.Job, _Mapping]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout",)
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    timeout: _duration_pb2.Duration
    def __init__(self, timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("running_jobs",)
    RUNNING_JOBS_FIELD_NUMBER: _ClassVar[int]
    running_jobs: int
    def __init__(self, running_jobs: _Optional[int] = ...) -> None: ...

class GetPolicyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPolicyResponse(_message.Message):
    __slots__ = ("policy", "known_policies")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    KNOWN_POLICIES_FIELD_NUMBER: _ClassVar[int]
    policy: str
    known_policies: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, policy: _Optional[str] = ..., known_policies: _Optional[_Iterable[str]] = ...) -> None: ...

class SetPolicyRequest(_message.Message):
    __slots__ = ("policy",)
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: str
    def __init__(self, policy: _Optional[str] = ...) -> None: ...

class SetPolicyResponse(_message.Message):
    __slots__ = ("policy", "previous_policy")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: str
    previous_policy: str
    def __init__(self, policy: _Optional[str] = ..., previous_policy: _Optional[str] = ...) -> None: ...

class TenantLimits(_message.Message):
    __slots__ = ("weight", "sla_classes", "highest_class", "default_class", "lower_class", "max_queued", "max_running", "tokens_per_minute", "longest_prompt_tokens", "admin")
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    SLA_CLASSES_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_CLASS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_CLASS_FIELD_NUMBER: _ClassVar[int]
    LOWER_CLASS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    LONGEST_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADMIN_FIELD_NUMBER: _ClassVar[int]
    weight: float
    sla_classes: _containers.RepeatedScalarFieldContainer[str]
    highest_class: str
    default_class: str
    lower_class: bool
    max_queued: int
    max_running: int
    tokens_per_minute: int
    longest_prompt_tokens: int
    admin: bool
    def __init__(self, weight: _Optional[float] = ..., sla_classes: _Optional[_Iterable[str]] = ..., highest_class: _Optional[str] = ..., default_class: _Optional[str] = ..., lower_class: bool = ..., max_queued: _Optional[int] = ..., max_running: _Optional[int] = ..., tokens_per_minute: _Optional[int] = ..., longest_prompt_tokens: _Optional[int] = ..., admin: bool = ...) -> None: ...

class Tenant(_message.Message):
    __slots__ = ("name", "limits", "disabled", "configured", "token_hint", "certificate_subject", "created_time", "token_time")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    DISABLED_FIELD_NUMBER: _ClassVar[int]
    CONFIGURED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_HINT_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_SUBJECT_FIELD_NUMBER: _ClassVar[int]
    CREATED_TIME_FIELD_NUMBER: _ClassVar[int]
    TOKEN_TIME_FIELD_NUMBER: _ClassVar[int]
    name: str
    limits: TenantLimits
    disabled: bool
    configured: bool
    token_hint: str
    certificate_subject: str
    created_time: _timestamp_pb2.Timestamp
    token_time: _timestamp_pb2.Timestamp
    def __init__(self, name: _Optional[str] = ..., limits: _Optional[_Union[TenantLimits, _Mapping]] = ..., disabled: bool = ..., configured: bool = ..., token_hint: _Optional[str] = ..., certificate_subject: _Optional[str] = ..., created_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., token_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class CreateTenantRequest(_message.Message):
    __slots__ = ("name", "limits", "certificate_subject")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_SUBJECT_FIELD_NUMBER: _ClassVar[int]
    name: str
    limits: TenantLimits
    certificate_subject: str
    def __init__(self, name: _Optional[str] = ..., limits: _Optional[_Union[TenantLimits, _Mapping]] = ..., certificate_subject: _Optional[str] = ...) -> None: ...

class CreateTenantResponse(_message.Message):
    __slots__ = ("tenant", "token")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    tenant: Tenant
    token: str
    def __init__(self, tenant: _Optional[_Union[Tenant, _Mapping]] = ..., token: _Optional[str] = ...) -> None: ...

class UpdateTenantRequest(_message.Message):
    __slots__ = ("name", "limits")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    name: str
    limits: TenantLimits
    def __init__(self, name: _Optional[str] = ..., limits: _Optional[_Union[TenantLimits, _Mapping]] = ...) -> None: ...

class UpdateTenantResponse(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: Tenant
    def __init__(self, tenant: _Optional[_Union[Tenant, _Mapping]] = ...) -> None: ...

class RotateTenantTokenRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RotateTenantTokenResponse(_message.Message):
    __slots__ = ("tenant", "token")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    tenant: Tenant
    token: str
    def __init__(self, tenant: _Optional[_Union[Tenant, _Mapping]] = ..., token: _Optional[str] = ...) -> None: ...

class DisableTenantRequest(_message.Message):
    __slots__ = ("name", "cancel_jobs")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CANCEL_JOBS_FIELD_NUMBER: _ClassVar[int]
    name: str
    cancel_jobs: bool
    def __init__(self, name: _Optional[str] = ..., cancel_jobs: bool = ...) -> None: ...

class DisableTenantResponse(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: Tenant
    def __init__(self, tenant: _Optional[_Union[Tenant, _Mapping]] = ...) -> None: ...

class EnableTenantRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class EnableTenantResponse(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: Tenant
    def __init__(self, tenant: _Optional[_Union[Tenant, _Mapping]] = ...) -> None: ...

class ListTenantsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTenantsResponse(_message.Message):
    __slots__ = ("tenants",)
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[Tenant]
    def __init__(self, tenants: _Optional[_Iterable[_Union[Tenant, _Mapping]]] = ...) -> None: ...

class DeadJob(_message.Message):
    __slots__ = ("name", "tenant", "job_id", "sla_class", "reason", "message", "attempts", "evidence", "died_time", "can_retry", "obstacle")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    SLA_CLASS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    DIED_TIME_FIELD_NUMBER: _ClassVar[int]
    CAN_RETRY_FIELD_NUMBER: _ClassVar[int]
    OBSTACLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    tenant: str
    job_id: str
    sla_class: str
    reason: str
    message: str
    attempts: int
    evidence: _containers.RepeatedScalarFieldContainer[str]
    died_time: _timestamp_pb2.Timestamp
    can_retry: bool
    obstacle: str
    def __init__(self, name: _Optional[str] = ..., tenant: _Optional[str] = ..., job_id: _Optional[str] = ..., sla_class: _Optional[str] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., attempts: _Optional[int] = ..., evidence: _Optional[_Iterable[str]] = ..., died_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., can_retry: bool = ..., obstacle: _Optional[str] = ...) -> None: ...

class ListDeadJobsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListDeadJobsResponse(_message.Message):
    __slots__ = ("dead_jobs", "next_page_token")
    DEAD_JOBS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    dead_jobs: _containers.RepeatedCompositeFieldContainer[DeadJob]
    next_page_token: str
    def __init__(self, dead_jobs: _Optional[_Iterable[_Union[DeadJob, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class RetryDeadJobRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RetryDeadJobResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: _types_pb2.Job
    def __init__(self, job: _Optional[_Union[_types_pb2.Job, _Mapping]] = ...) -> None: ...

class DropDeadJobRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DropDeadJobResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

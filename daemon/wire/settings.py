"""What the engine process is told at its start: one JSON document, read once.

Plain values only: the front resolved paths and sizes, and checked them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from batond.policies.classes import DEFAULT_CLASSES, SlaClass


class MemorySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the memory governor is told; see `daemon/memory/governor.py`.

    Attributes:
        governor: "auto" is on where the device is a card, NVML answers and the batch can give memory back.
        low_watermark: Part of the memory in use, by whomever, below which the batch may take more.
        high_watermark: Above this it gives back.
        critical_watermark: Above this nothing new begins.
        reserve_bytes: Kept free for prompts; -1 learns it from peaks ("auto").
        sample_ms: Between two readings.
    """

    governor: Literal["auto", "on", "off"] = "auto"
    low_watermark: float = 0.87
    high_watermark: float = 0.92
    critical_watermark: float = 0.97
    reserve_bytes: int = -1
    sample_ms: int = 50


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the engine process needs to start.

    Attributes:
        model_path: Local folder, or a `.gguf` file.
        model_name: The served name, reported in Ready.
        dtype: A torch dtype's name, or "auto".
        device: "auto", "cpu", "cuda" or "cuda:N".
        rows: Rows of the batch.
        batch: "auto", "padded" or "ring".
        prefill: "decoupled" or "inline".
        chunk_tokens: Prompt tokens computed between two decode steps; 0 is no bound, "auto" follows the
            inter-token target of the most urgent class that runs.
        max_query_tokens: Limit on prompt + max_tokens; 0 takes the model's own.
        host_pool_bytes: Host RAM for parked KV; -1 lets the engine choose ("auto").
        session_bytes: Part of it and of files for slices of finished turns; -1 is a quarter, 0 is none.
        session_ttl_s: A session unused for so long is dropped.
        spill_dir: Directory for what the host pool can't hold; empty keeps no files.
        spill_bytes: Most bytes of files in it; -1 is half of what its disk has free.
        policy: Name of the policy.
        policy_options: Options of policies by name: of that one, and of those it may be exchanged for.
        quantum_tokens: Tokens decoded between an admission and the next park.
        max_parks: Parks after which a query is not preemptible any more.
        ready_limit: Prefilled queries kept ahead of free rows.
        overcommit: Where KV has a bound, reserve what is expected of a class, not all that is asked for.
        one_at_a_time: Serve a model that no shared batch serves exactly in a batch of one row.
        deterministic: Give a query the same bits whatever the load is.
        kernels: Decode on a card through the ring's own kernels.
        graphs: Capture decode steps and prompts on a card; needs the kernels.
        compiled: Compile the small parts of captured steps.
        overlap: Begin a captured step before the books of the last one are done.
        arena: What the ring's memory is: "auto", "plain" or "elastic".
        threads: CPU threads of torch; 0 keeps torch's choice.
        memory: What the memory governor is told.
        classes: The SLA classes.
    """

    model_path: str
    model_name: str
    dtype: str = "auto"
    device: str = "auto"
    rows: int = 8
    batch: str = "auto"
    prefill: str = "decoupled"
    chunk_tokens: int | Literal["auto"] = "auto"
    max_query_tokens: int = 0
    host_pool_bytes: int = -1
    session_bytes: int = -1
    session_ttl_s: float = 3600.0
    spill_dir: str = ""
    spill_bytes: int = -1
    policy: str = "priority"
    policy_options: dict[str, dict[str, bool | int | float]] = {}
    quantum_tokens: int = 16
    max_parks: int = 8
    ready_limit: int = 1
    overcommit: bool = True
    one_at_a_time: bool = False
    deterministic: bool = False
    kernels: bool = True
    graphs: bool = True
    compiled: bool = True
    overlap: bool = True
    arena: str = "auto"
    threads: int = 0
    memory: MemorySettings = MemorySettings()
    classes: tuple[SlaClass, ...] = DEFAULT_CLASSES

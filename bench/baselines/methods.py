"""The methods, each with its source and with what that source says of it.

Every one runs on the same engine and kernels; what differs is what is set here. What a source has beside its
scheduling (kernels, parallelism, placement over many machines) is not here, and no figure of a source is
expected again: `tests/bench/baselines` holds each method to its source's claim on a small case.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from batond.bench.baselines.groups import arrival_groups, length_groups, response_groups
from batond.policies.fcfs import Fcfs
from batond.policies.mlfq import Mlfq
from batond.policies.priority import Priority

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.bench.baselines.groups import FormGroup
    from batond.policies.base import Policy


class Prompts(enum.Enum):
    """Where and when a newcomer's prompt is computed."""

    IN_STEP = "in step"  # Beside the others' next token, when a row is free: they wait for it.
    AHEAD = "ahead"  # As soon as it has come: its row is taken by a finished slice.
    SECOND_DEVICE = "second device"  # There, as soon as it has come; the slice crosses then.


class Swap(enum.Enum):
    """How KV goes to host memory and comes back."""

    REACTIVE = "reactive"  # When a row changes hands: the batch waits for both copies.
    PROACTIVE = (
        "proactive"  # Before: spare room on the device is kept free, and filled by whose turn is next.
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A way of scheduling.

    Attributes:
        name: On the command line and in tables.
        source: Where it was published.
        claim: What is said of it there, in our words.
        form: Chooses the next batch of those that wait; None lets anybody in at any step.
        prompts: See `Prompts`.
        chunk_tokens: Prompt tokens of a step at most; None is no bound.
        policy: Makes the policy.
        swap: How KV moves where the policy takes rows.
        knows_urgency: Urgent jobs are told to it; to all others a job is a job.
        overlapped: A slice crosses from the second device while its prompt is computed, layer by layer.
    """

    name: str
    source: str
    claim: str
    form: FormGroup | None = None
    prompts: Prompts = Prompts.IN_STEP
    chunk_tokens: int | None = None
    policy: Callable[[], Policy] = Fcfs
    swap: Swap = Swap.REACTIVE
    overlapped: bool = False
    knows_urgency: bool = False


#: Prompt tokens of a step of `sarathi`: between those that its paper takes for tight and for relaxed targets.
SARATHI_TOKENS: Final = 512
_QUANTUM_TOKENS: Final = 4


def _skip_join() -> Policy:
    return Mlfq(quantum_tokens=_QUANTUM_TOKENS, ageing_s=math.inf, preempt_alike=True)


def _naive_mlfq() -> Policy:
    return Mlfq(quantum_tokens=_QUANTUM_TOKENS, prompt_cost=0.0, ageing_s=math.inf, preempt_alike=True)


def _priority() -> Policy:
    return Priority(ageing_s=math.inf)


_FASTSERVE: Final = (
    "Wu et al., Fast Distributed Inference Serving for Large Language Models, arXiv:2305.05920"
)

METHODS: Final = (
    Method(
        name="request-level",
        source="what Yu et al. (OSDI 2022) compare with, as in NVIDIA FasterTransformer",
        claim="a batch runs to its longest output: who is done can't leave, who comes can't join",
        form=arrival_groups,
        prompts=Prompts.AHEAD,
    ),
    Method(
        name="orca",
        source="Yu et al., Orca: A Distributed Serving System for Generative Models, OSDI 2022",
        claim="scheduling by iteration: who is done leaves at once, and a newcomer joins the next iteration",
    ),
    Method(
        name="sarathi",
        source="Agrawal et al., Taming Throughput-Latency Tradeoff with Sarathi-Serve, OSDI 2024",
        claim="prompts in chunks beside the decodes: no decode waits longer than a chunk takes",
        chunk_tokens=SARATHI_TOKENS,
    ),
    Method(
        name="mlfq",
        source=_FASTSERVE,
        claim="what skip-join is compared with: all jobs join the first queue, whatever their prompt",
        policy=_naive_mlfq,
    ),
    Method(
        name="fastserve-reactive",
        source=_FASTSERVE,
        claim="jobs join the queue that their prompt's time fits: less time to completion on average",
        policy=_skip_join,
    ),
    Method(
        name="fastserve",
        source=_FASTSERVE,
        claim="KV is swapped out before its room is needed and in before its turn: the batch doesn't wait",
        policy=_skip_join,
        swap=Swap.PROACTIVE,
    ),
    Method(
        name="distserve",
        source="Zhong et al., DistServe: Disaggregating Prefill and Decoding, OSDI 2024",
        claim="prompts on devices of their own: no decode waits for a prompt, and no prompt for a decode",
        prompts=Prompts.SECOND_DEVICE,
    ),
    Method(
        name="splitwise",
        source="Patel et al., Splitwise: Efficient Generative LLM Inference Using Phase Splitting, ISCA 2024",
        claim="the same, and KV crosses layer by layer while the prompt is computed",
        prompts=Prompts.SECOND_DEVICE,
        overlapped=True,
    ),
    Method(
        name="length-groups",
        source="Fang et al., TurboTransformers: An Efficient GPU Serving System, PPoPP 2021",
        claim="requests are sorted by length and cut into batches of least cost by dynamic programming",
        form=length_groups,
        prompts=Prompts.AHEAD,
    ),
    Method(
        name="response-length",
        source="Zheng et al., Response Length Perception and Sequence Scheduling, NeurIPS 2023",
        claim="batches of similar response lengths waste fewer steps (here the lengths are known)",
        form=response_groups,
        prompts=Prompts.AHEAD,
    ),
    Method(
        name="batond",
        source="this repository: decoupled embedding, chunks, parks beside the decode",
        claim="the same engine as it serves, under the policy priority",
        prompts=Prompts.AHEAD,
        chunk_tokens=SARATHI_TOKENS,
        policy=_priority,
        swap=Swap.PROACTIVE,
        knows_urgency=True,
    ),
)
BY_NAME: Final = {method.name: method for method in METHODS}

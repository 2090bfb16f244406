"""Which of those that wait make the next batch, where batches run as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batond.daemon.simulator.costs import StepCosts


@dataclass(frozen=True, slots=True)
class Job:
    """A request in virtual time.

    Attributes:
        name: Unique.
        at_s: When it arrives.
        prompt_tokens: Of its prompt.
        output_tokens: That it emits.
        urgent: For policies that know classes.
    """

    name: str
    at_s: float
    prompt_tokens: int
    output_tokens: int
    urgent: bool = False


#: Takes those that wait, rows and costs; gives the next batch, which is not empty.
FormGroup: TypeAlias = "Callable[[Sequence[Job], int, StepCosts], list[Job]]"


def arrival_groups(waiting: Sequence[Job], rows: int, costs: StepCosts) -> list[Job]:
    """The first to come."""
    del costs
    return list(waiting[:rows])


def response_groups(waiting: Sequence[Job], rows: int, costs: StepCosts) -> list[Job]:
    """Those with the shortest outputs, as Zheng et al. (2023) group by the response's expected length."""
    del costs
    return sorted(waiting, key=lambda job: job.output_tokens)[:rows]


def length_groups(waiting: Sequence[Job], rows: int, costs: StepCosts) -> list[Job]:
    """The first batch of the cheapest partition of all that wait, shortest first (Fang et al. 2021)."""
    ordered = sorted(waiting, key=lambda job: job.prompt_tokens)
    first, *_ = cheapest_partition(ordered, rows, lambda group: group_s(group, costs))
    return list(first)


def group_s(group: Sequence[Job], costs: StepCosts) -> float:
    """Seconds of a batch that is padded to its longest prompt and runs to its longest output."""
    longest, steps = max(job.prompt_tokens for job in group), max(job.output_tokens for job in group) - 1
    seconds = costs.prompts_s(longest * len(group))
    return seconds + (costs.decode_s(len(group), (longest + 1) * len(group), steps) if steps else 0.0)


def cheapest_partition(
    ordered: Sequence[Job], most: int, cost_s: Callable[[Sequence[Job]], float]
) -> list[Sequence[Job]]:
    """Cut a sorted sequence into neighbours of least cost together, by dynamic programming.

        least[n] = min over the last batch ordered[k:n] of least[k] + cost_s(ordered[k:n])

    Args:
        ordered: By length.
        most: Of a batch.
        cost_s: Of one.
    """
    least, cut_at = [0.0], [0]
    for end in range(1, len(ordered) + 1):
        choices = [
            (least[begin] + cost_s(ordered[begin:end]), begin) for begin in range(max(0, end - most), end)
        ]
        seconds, begin = min(choices)
        least.append(seconds)
        cut_at.append(begin)
    groups: list[Sequence[Job]] = []
    end = len(ordered)
    while end:
        groups.append(ordered[cut_at[end] : end])
        end = cut_at[end]
    return groups[::-1]

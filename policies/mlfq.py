"""Skip-join multi-level feedback queue."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from batond.daemon.errors import ConfigError
from batond.policies.ageing import aged_level, check_ageing

if TYPE_CHECKING:
    from batond.policies.base import QueryView, Rank


class Mlfq:
    """Within a class, who was served least runs first; classes stay in order.

    FastServe (Wu et al. 2023, "Fast Distributed Inference Serving for Large Language Models", section 4.1)
    without knowledge of output lengths. Service is counted in output tokens, a prompt token as `prompt_cost`
    of one. Queue i has a quantum of `quantum_tokens` x 2^i:

        queue    0          1                  2
        quantum  [ q ]      [ 2q      ]        [ 4q                 ]   ...the last has no end

    A query skips the queues whose quantum is smaller than its prompt, joins the first that isn't, and goes
    down one queue each time it has used up a quantum. All of that follows from its prompt and its output so
    far: there is no state that could be lost in an exchange of policies.

    Unlike FastServe's, a newcomer takes a row within its class only if it can't itself come to sink as deep
    as its victim (by `max_tokens`): FastServe would park the first of two equal queries as soon as it has
    used up a quantum. `preempt_alike` turns that off, and the first guarantee with it.

    Guarantees: equals never pre-empt each other. Pre-emption within a class goes from a lower ceiling to a
    higher one, so that a victim never takes its row back from the one it was parked for. (With
    `preempt_alike` it does not before that one has sunk below it.) Starvation: for FastServe's promotion
    stands ageing, one class each `ageing_s`; a newcomer that arrives (k + 1) x ageing_s after a query of
    order k is not sorted before it, see `ageing.worst_first_row_s`.

    Args:
        quantum_tokens: Quantum of the first queue, in output tokens.
        queues: Number of queues.
        prompt_cost: Work of a prompt token, in output tokens.
        ageing_s: Seconds without a row that are worth one class; infinity gives up the bound.
        preempt_alike: Compare present queues alone, as FastServe does.

    Raises:
        ConfigError: A value has no meaning.
    """

    name = "mlfq"
    counts_by_owner = True

    def __init__(
        self,
        quantum_tokens: int = 32,
        queues: int = 6,
        prompt_cost: float = 1 / 16,
        ageing_s: float = 60.0,
        *,
        preempt_alike: bool = False,
    ) -> None:
        for field, value in (("quantum_tokens", quantum_tokens), ("queues", queues)):
            if value < 1:
                raise ConfigError(f"{field} must be at least 1, not {value}", field=field)
        if not prompt_cost >= 0:
            raise ConfigError(f"prompt_cost must not be negative, not {prompt_cost}", field="prompt_cost")
        self.ageing_s = check_ageing(ageing_s)
        self._quanta = tuple(quantum_tokens << queue for queue in range(queues))
        self._prompt_cost = prompt_cost
        self._preempt_alike = preempt_alike

    def queue_of(self, query: QueryView, output_tokens: int | None = None) -> int:
        """Queue a query is in, or would be in after `output_tokens`; 0 is served first."""
        prompt = query.prompt_tokens * self._prompt_cost
        served = prompt + (query.output_tokens if output_tokens is None else output_tokens)
        last = len(self._quanta) - 1
        queue = 0
        while queue < last and self._quanta[queue] < prompt:
            queue += 1
        end = self._quanta[queue]
        while queue < last and end < served:
            queue += 1
            end += self._quanta[queue]
        return queue

    def rank(self, query: QueryView, now_s: float) -> Rank:
        """Order by aged class, then queue, then arrival."""
        level = aged_level(query, now_s, self.ageing_s)
        return (level, self.queue_of(query), query.arrival_s, query.seq)

    def may_preempt(self, newcomer: QueryView, victim: QueryView, now_s: float) -> bool:
        """By class, then by queue, if the newcomer can't come to sink as deep."""
        del now_s
        if not victim.preemptible or newcomer.class_order != victim.class_order:
            return victim.preemptible and newcomer.class_order < victim.class_order
        if self.queue_of(newcomer) >= self.queue_of(victim):
            return False
        return self._preempt_alike or self._ceiling(newcomer) < self._ceiling(victim)

    def victim_bar(self, newcomer: QueryView, class_order: int, now_s: float) -> float | None:
        """By class; within its own one by one."""
        del now_s
        if newcomer.class_order == class_order:
            return None
        return -math.inf if newcomer.class_order < class_order else math.inf

    def line_of(self, query: QueryView) -> tuple[int, int]:
        """One a class and queue joined."""
        return (query.class_order, self.queue_of(query))

    def on_tokens(self, query: QueryView, prompt_tokens: int, output_tokens: int) -> None:
        """Service is read off the query itself."""

    def _ceiling(self, query: QueryView) -> int:
        return self.queue_of(query, query.max_tokens)

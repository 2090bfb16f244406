"""Short prompts first: a policy for batond in a package of its own."""

from batond.policies.base import QueryView, Rank


class ShortPrompts:
    """Within a class the shortest prompt is first; a second of waiting makes up for `tokens_per_s` tokens."""

    name = "short-prompts"

    def __init__(self, tokens_per_s: float = 100.0) -> None:
        self.tokens_per_s = tokens_per_s

    def rank(self, query: QueryView, now_s: float) -> Rank:
        """Who waited longer counts as shorter; all age alike, so `now_s` cancels out of the comparison."""
        return (query.class_order, query.prompt_tokens + self.tokens_per_s * query.arrival_s, query.seq)

    def may_preempt(self, newcomer: QueryView, victim: QueryView, now_s: float) -> bool:
        """By class only: the length of a prompt is worth a place in line, not a running query's row."""
        return victim.preemptible and newcomer.class_order < victim.class_order

    def on_tokens(self, query: QueryView, prompt_tokens: int, output_tokens: int) -> None:
        """Nothing depends on tokens."""

"""Each method of the literature does on a small case what its source says of it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from batond.bench import __main__ as command
from batond.bench.baselines.groups import Job, cheapest_partition, group_s, length_groups
from batond.bench.baselines.methods import BY_NAME, METHODS, SARATHI_TOKENS
from batond.bench.baselines.play import LINK_BYTE_S, Played, Stage, play
from batond.bench.baselines.swapping import Proactive, Reactive
from batond.bench.schedule import list_schedule_steps
from batond.daemon.engine.model.causal import CausalModel
from batond.daemon.simulator.costs import PRESETS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

ROWS = 3
#: A card's costs, prompts ten times as dear: a prompt of 100 tokens is to a step what one of 1000 is there.
COSTS = replace(PRESETS["h100"], prefill_token_s=2e-4)
SARATHI = replace(BY_NAME["sarathi"], chunk_tokens=16)


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
    )
    stage = Stage(CausalModel(LlamaForCausalLM(config).eval(), "cpu"), ROWS, 200)
    yield stage
    stage.close()


def run(stage: Stage, name: str, jobs: Sequence[Job]) -> Played:
    method = SARATHI if name == "sarathi" else BY_NAME[name]
    played = play(stage, method, jobs, COSTS)
    stage.engine.check_integrity()
    assert all(len(one.token_ids) == one.job.output_tokens for one in played.served.values())
    return played


MIXED = (
    Job("long", 0.0, 20, 40),
    Job("short", 0.0, 12, 5),
    Job("middle", 0.0, 30, 12),
    Job("late", 0.05, 100, 6),
    Job("later", 0.1, 10, 9, urgent=True),
    Job("last", 0.15, 10, 25),
)


def test_every_method_gives_every_job_the_same_tokens(stage: Stage) -> None:
    """They schedule one engine: KV that was parked, chunked or computed elsewhere is the same KV."""
    tokens = {}
    for method in METHODS:
        played = run(stage, method.name, MIXED)
        tokens[method.name] = {name: one.token_ids for name, one in played.served.items()}
    assert all(one == tokens["orca"] for one in tokens.values())


def test_orca_lets_who_is_done_leave_and_who_comes_join(stage: Stage) -> None:
    """Yu et al. 2022: finished requests return early, new ones wait for no batch."""
    whole, orca = run(stage, "request-level", MIXED), run(stage, "orca", MIXED)
    assert whole.served["short"].end_s == whole.served["long"].end_s
    assert orca.served["short"].end_s < orca.served["long"].end_s / 3
    # "late" comes in the middle of an iteration, and is in the next one.
    step_s = COSTS.decode_s(ROWS, 200)
    assert orca.served["late"].first_token_s <= COSTS.prompts_s(100) + 2 * step_s
    assert whole.served["late"].came_s[0] > whole.served["long"].end_s
    assert orca.output_rate > 1.2 * whole.output_rate


def test_orca_keeps_rows_busy_as_list_scheduling_does(stage: Stage) -> None:
    """Jobs that are all there need no more iterations than the list schedule of their lengths."""
    jobs = [Job(f"j{number}", 0.0, 8, output) for number, output in enumerate((20, 3, 7, 15, 2, 9, 4))]
    ideal = list_schedule_steps([job.output_tokens - 1 for job in jobs], ROWS)
    assert run(stage, "orca", jobs).steps == ideal
    assert run(stage, "request-level", jobs).steps == (20 - 1) + (15 - 1) + (4 - 1)


def test_sarathi_bounds_what_a_decode_waits_for(stage: Stage) -> None:
    """Agrawal et al. 2024: under Orca a running request stalls for a whole prompt, in chunks never."""
    jobs = (Job("a", 0.0, 8, 40), Job("b", 0.0, 8, 40), Job("long", 0.05, 150, 4))
    orca, sarathi = run(stage, "orca", jobs), run(stage, "sarathi", jobs)
    step_s = COSTS.decode_s(ROWS, 300)
    assert orca.served["a"].worst_gap_s > COSTS.prompts_s(150)
    assert sarathi.served["a"].worst_gap_s <= COSTS.prompts_s(16) + step_s
    # What that costs is the chunks' fixed part, and the newcomer's own first token.
    chunks = -(-150 // 16)
    assert sarathi.seconds <= orca.seconds + chunks * COSTS.prefill_s + step_s
    assert sarathi.served["long"].first_token_s > orca.served["long"].first_token_s
    assert SARATHI_TOKENS == 512


def test_a_second_device_keeps_prompts_out_of_the_decodes(stage: Stage) -> None:
    """DistServe (Zhong et al. 2024): no decode waits for a prompt, no prompt for a decode."""
    jobs = (Job("a", 0.0, 8, 40), Job("b", 0.0, 8, 40), *(Job(f"p{n}", 0.06, 150, 2) for n in range(3)))
    orca, apart = run(stage, "orca", jobs), run(stage, "distserve", jobs)
    alone = run(stage, "distserve", jobs[:2])
    # Not even a step longer than the rows that share it make it.
    assert apart.served["a"].worst_gap_s <= alone.served["a"].worst_gap_s + 2 * COSTS.row_s + 1e-4
    assert orca.served["a"].worst_gap_s > COSTS.prompts_s(150)
    # Their prompts are computed one after the other from their arrival on, whatever is decoded.
    for number in range(3):
        expected_s = COSTS.prompts_s(150) * (number + 1)
        assert apart.served[f"p{number}"].first_token_s == pytest.approx(expected_s)
    assert apart.seconds < orca.seconds


def test_splitwise_hides_all_but_the_last_layer_of_the_transfer(stage: Stage) -> None:
    """Patel et al. 2024: the state crosses while the prompt is computed; what is left is small."""
    slow = replace(COSTS, kv_token_bytes=COSTS.kv_token_bytes * 100)
    job = [Job("only", 0.0, 100, 3)]
    plain = play(stage, BY_NAME["distserve"], job, slow).served["only"]
    hidden = play(stage, BY_NAME["splitwise"], job, slow).served["only"]
    transfer_s = 100 * slow.kv_token_bytes * LINK_BYTE_S
    layers = 2
    assert plain.came_s[0] == hidden.came_s[0]
    assert plain.came_s[1] - hidden.came_s[1] == pytest.approx(transfer_s * (1 - 1 / layers))


LINE = (
    Job("big", 0.0, 100, 50),
    Job("huge", 0.0, 120, 60),
    Job("large", 0.0, 110, 55),
    *(Job(f"s{number}", 0.02 * number, 6, 4) for number in range(1, 9)),
)


def test_fastserve_ends_head_of_line_blocking(stage: Stage) -> None:
    """Wu et al. 2023: preemption by token, less service first, shortens completion on average."""
    orca, fastserve = run(stage, "orca", LINE), run(stage, "fastserve", LINE)
    assert fastserve.parks > 0
    assert fastserve.mean_completion_s < 0.6 * orca.mean_completion_s
    short = [name for name in fastserve.served if name.startswith("s")]
    assert all(fastserve.served[name].completion_s < 0.5 * orca.served[name].completion_s for name in short)


def test_skip_join_spares_short_jobs_the_long_prompts_before_them(stage: Stage) -> None:
    """Wu et al. 2023: a long prompt in the first queue is what naive MLFQ blocks short jobs with."""
    jobs = (
        *(Job(f"long{number}", 0.0, 150, 8) for number in range(4)),
        *(Job(f"s{number}", 0.0, 4, 4) for number in range(6)),
    )
    naive, skipping = run(stage, "mlfq", jobs), run(stage, "fastserve-reactive", jobs)
    assert skipping.mean_completion_s < naive.mean_completion_s
    for name in (f"s{number}" for number in range(6)):
        assert skipping.served[name].first_token_s < naive.served[name].first_token_s


def test_proactive_swaps_leave_the_batch_less_to_wait_for(stage: Stage) -> None:
    """Wu et al. 2023: KV moves before its room is needed and before its turn."""
    reactive, proactive = run(stage, "fastserve-reactive", LINE), run(stage, "fastserve", LINE)
    assert proactive.parks == reactive.parks
    assert reactive.waited_s > 0
    assert proactive.waited_s < 0.5 * reactive.waited_s
    assert proactive.mean_completion_s < reactive.mean_completion_s


def test_the_link_offloads_the_last_turn_and_uploads_the_next() -> None:
    swapping = Proactive(byte_s=0.1, spare_bytes=40)
    assert swapping.park("a", 10, 0.0) == 0.0
    assert swapping.park("b", 10, 0.0) == 0.0
    assert swapping.park("c", 10, 0.0) == 0.0
    assert swapping.free_bytes == 10
    swapping.advance(0.5, ["a", "b", "c"])  # Room is short: whose turn is last goes.
    assert swapping.copies == 1
    assert swapping.free_bytes == 20
    assert swapping.resume("a", 1.0) == 0.0
    swapping.advance(1.5, ["c", "b"])  # There is room to keep and to fill: whose turn is next comes.
    assert swapping.copies == 2
    assert swapping.resume("c", 2.0) == 0.0
    assert swapping.park("d", 50, 2.0) == pytest.approx(5.0)  # Larger than all spare room.
    assert swapping.resume("d", 8.0) == pytest.approx(5.0)
    assert Reactive(0.1).park("a", 10, 0.0) == pytest.approx(1.0)


LENGTHS = (17, 90, 18, 63, 52, 77, 20, 95)


def test_length_groups_cost_the_least_of_all_partitions(stage: Stage) -> None:
    """Fang et al. 2021: dynamic programming gives the best batches of requests of various lengths."""
    jobs = [Job(f"j{number}", 0.0, prompt, 1) for number, prompt in enumerate(LENGTHS)]
    ordered = sorted(jobs, key=lambda job: job.prompt_tokens)

    def cost_s(group: Sequence[Job]) -> float:
        return group_s(group, COSTS)

    best = cheapest_partition(ordered, ROWS, cost_s)
    assert [job for group in best for job in group] == ordered
    least_s = min(sum(map(cost_s, parts)) for parts in _partitions(ordered, ROWS))
    assert sum(map(cost_s, best)) == pytest.approx(least_s)
    assert length_groups(jobs, ROWS, COSTS) == list(best[0])
    grouped, arrived = run(stage, "length-groups", jobs), run(stage, "request-level", jobs)
    assert grouped.seconds == pytest.approx(least_s)
    assert grouped.seconds < arrived.seconds
    assert grouped.seconds < sum(cost_s([job]) for job in jobs)


def _partitions(ordered: Sequence[Job], most: int) -> Iterator[list[Sequence[Job]]]:
    """All ways to cut a sequence into batches."""
    for cuts in range(1 << (len(ordered) - 1)):
        places = [0, *(n + 1 for n in range(len(ordered) - 1) if cuts >> n & 1), len(ordered)]
        parts = [ordered[begin:end] for begin, end in pairwise(places)]
        if all(len(part) <= most for part in parts):
            yield parts


def test_batches_of_like_responses_waste_fewer_steps(stage: Stage) -> None:
    """Zheng et al. 2023: a batch lasts as long as its longest response."""
    outputs = (30, 3, 4, 28, 2, 3, 29, 4, 2)
    jobs = [Job(f"j{number}", 0.0, 6, output) for number, output in enumerate(outputs)]
    grouped, arrived = run(stage, "response-length", jobs), run(stage, "request-level", jobs)
    assert arrived.steps == 29 + 27 + 28
    assert grouped.steps == 2 + 3 + 29
    assert grouped.idle_row_steps < arrived.idle_row_steps / 5
    assert grouped.output_rate > 1.86 * arrived.output_rate


def test_batond_answers_the_urgent_first(stage: Stage) -> None:
    """What none of the others knows: who is urgent."""
    jobs = (*(Job(f"l{n}", 0.0, 10, 60) for n in range(ROWS)), Job("now", 0.1, 12, 3, urgent=True))
    ours, orca = run(stage, "batond", jobs), run(stage, "orca", jobs)
    assert ours.served["now"].completion_s < 0.1 * orca.served["now"].completion_s
    assert ours.seconds < 1.02 * orca.seconds


def test_methods_are_told_apart_and_say_where_they_are_from() -> None:
    assert len(BY_NAME) == len(METHODS)
    assert all(method.source and method.claim for method in METHODS)


def test_the_command_plays_one_workload_under_all_methods(tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    arguments = ["baselines", "--requests", "6", "--rows", "2", "--shorter", "256", "--layers", "1"]
    result = CliRunner().invoke(command.app, [*arguments, "--rate", "20", "--output", str(output)])
    assert result.exit_code == 0, result.output
    figures = {one["method"]: one for one in json.loads(output.read_text())}
    assert list(figures) == list(BY_NAME)
    assert all(name in result.output for name in BY_NAME)
    assert figures["orca"]["seconds"] < figures["request-level"]["seconds"]
    assert "OSDI 2022" in result.output


def test_the_command_refuses_an_unknown_method() -> None:
    result = CliRunner().invoke(command.app, ["baselines", "--method", "orca,magic"])
    assert result.exit_code != 0
    assert "magic" in result.output

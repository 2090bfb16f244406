"""The buffers that a captured step reads."""

from __future__ import annotations

import torch

from batond.daemon.engine.batch.step_inputs import StepInputs
from batond.daemon.engine.batch.token_reader import TokenReader

CPU = torch.device("cpu")


def test_rows_get_token_position_and_length_and_idle_rows_nothing() -> None:
    inputs = StepInputs(3, CPU)
    inputs.fill({2: [7], 0: [9]}, [5, 0, 1], 11)
    assert inputs.token_ids.tolist() == [[9], [0], [7]]
    assert inputs.position_ids.tolist() == [[4], [0], [0]]
    assert inputs.lengths.tolist() == [5, 0, 1]
    assert inputs.cursor.tolist() == [11]


def test_the_next_step_is_written_in_place_and_nothing_of_the_last_remains() -> None:
    inputs = StepInputs(2, CPU)
    views = (inputs.token_ids[:1], inputs.position_ids[:1], inputs.lengths[:1], inputs.cursor)
    inputs.fill({0: [3], 1: [4]}, [8, 2], 1)
    inputs.fill({1: [5]}, [0, 3], 2)
    assert [view.flatten().tolist() for view in views] == [[0], [0], [0], [2]]
    assert (inputs.token_ids.dtype, inputs.lengths.dtype) == (torch.int64, torch.int32)


def test_a_step_that_follows_takes_its_tokens_where_the_last_one_left_them() -> None:
    """What the host doesn't know yet; rows that are idle in the new step get none of it."""
    inputs = StepInputs(4, CPU)
    inputs.fill({0: [3], 1: [4], 2: [5]}, [8, 2, 6, 0], 1)
    inputs.follow([0, 2], torch.tensor([31, 41, 51]), [9, 0, 7, 0], 2)
    assert inputs.token_ids.flatten().tolist() == [31, 0, 51, 0]
    assert inputs.position_ids.flatten().tolist() == [8, 0, 6, 0]
    assert inputs.lengths.tolist() == [9, 0, 7, 0]
    assert inputs.cursor.tolist() == [2]


def test_tokens_are_those_of_the_last_copy_whatever_the_next_step_does_to_them() -> None:
    reader = TokenReader(3, CPU)
    token_ids = torch.tensor([7, 8])
    reader.start(token_ids)
    token_ids.fill_(0)
    assert list(reader.wait()) == [7, 8]

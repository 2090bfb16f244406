"""The buffers that a captured step reads."""

from __future__ import annotations

import torch

from batond.daemon.engine.batch.step_inputs import StepInputs

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

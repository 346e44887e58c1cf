"""Points of a path that are one batch give the gradients of points one by one."""

from functools import partial

import pytest
import torch

from attention_service.core.edits import BoundEdit, apply
from attention_service.core.inspection.loss_path import log_likelihood, path_of, points_at_once


@pytest.mark.parametrize("at_once", [2, 5, 63])
@pytest.mark.parametrize("edited", [False, True])
def test_a_batch_of_points_has_the_gradients_of_each(at_once, edited):
    torch.manual_seed(0)
    context, weight = torch.randn(3, 2, 6, 4, dtype=torch.float64), torch.randn(7, 8, dtype=torch.float64)
    targets = torch.randint(-1, 7, (3, 6))
    calls = []

    def loss(context):
        calls.append(len(context))
        return log_likelihood(context.tanh(), weight, None, targets)

    edits = [BoundEdit("context", heads=(1,), queries=(2,), scale=0.5)] if edited else []
    single, several = (path_of(context, partial(apply, edits, "context"), loss, 64, each) for each in (1, at_once))
    torch.testing.assert_close(several.mean, single.mean)
    torch.testing.assert_close(several.gradient, single.gradient)
    assert [end.shape for end in several.ends] == [(3,), (3,)]
    assert len(calls) == 65 + 2 + -(-63 // at_once)
    assert abs(several.completeness(context)["gap"]).max() < 0.1


def test_points_of_one_batch_hold_no_more_than_a_block():
    assert points_at_once(64, 10) == 63
    assert points_at_once(64, 2**19) == 2
    assert points_at_once(64, 2**30) == 1
    assert points_at_once(1, 10) == 1

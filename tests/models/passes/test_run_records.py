"""The record of a run, of a model that is made so that its shapes and products are known."""

import torch
from torch import nn

from attention_service.models.loaded.matrix_products import products_of
from attention_service.models.passes.run_records import RecordedRuns


class Twice(nn.Module):
    """Calls one matrix twice, and returns a pair."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, scale, *, hidden_states):
        return self.linear(self.linear(hidden_states) * scale), "the rest"


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.twice, self.convolution = Twice(), nn.Conv1d(3, 5, 2)

    def forward(self, x):
        states, _ = self.twice(torch.ones(1), hidden_states=x)
        return self.convolution(states.transpose(1, 2))


def test_a_record_has_each_call_of_the_last_run_with_its_shapes():
    model = Whole()
    run = RecordedRuns(model, lambda arguments, **more: model(**arguments, **more))
    for batch in (7, 2):
        output = run({"x": torch.ones(batch, 4, 3)})
    record = run.last
    assert record.output is output
    assert output.shape == (2, 5, 3)
    assert [call.module for call in record.calls] == [
        model.twice.linear, model.twice.linear, model.twice, model.convolution, model,
    ]  # fmt: skip
    assert record.given(model.twice) == (1,)
    assert record.given(model.convolution) == (2, 3, 4)
    twice = record.calls[2]
    assert [*map(tuple, twice.given)] == [(1,), (2, 4, 3)]
    assert twice.made == (2, 4, 3)


def test_products_are_counted_by_hand():
    model = Whole()
    run = RecordedRuns(model, model)
    run(torch.ones(2, 4, 3))
    linear, convolution = 2 * (3 * 3) * (2 * 4) * 2, 2 * (3 * 2) * 5 * (2 * 3)
    assert products_of(run.last.calls) == {model.twice.linear: linear, model.convolution: convolution}

"""One attention: numbers known by hand and from PyTorch, every tap, queries that may look nowhere."""

import math
from dataclasses import replace

import pytest
import torch

from attention_contract.spec import AttentionSpec, Dot, SlidingWindow
from attention_service.core.attention import attend, trace
from attention_service.core.kernels import KERNELS, Needs, unsuitable
from attention_service.core.problem import Problem, Selection
from attention_service.core.scores import ScaledDot
from attention_service.core.stages import taps_of

KERNEL_NAMES = [entry.name for entry in KERNELS if not unsuitable(entry.name, AttentionSpec(), torch.float64, Needs())]
SCORE_SIDE = ("scores", "capped_scores", "masked_scores", "weights", "lse")
NODES = ("q", "k", "v", "scores", "capped_scores", "masked_scores", "weights", "context")


@pytest.mark.parametrize("kernel", KERNEL_NAMES)
def test_an_example_by_hand(kernel):
    problem = Problem(
        q=torch.tensor([[[[1.0, 0], [0, 1]]]]),
        k=torch.tensor([[[[1.0, 0], [0, 1], [1, 1]]]]),
        v=torch.tensor([[[[1.0, 2], [3, 4], [5, 6]]]]),
        spec=AttentionSpec(score=Dot()),
    )
    attended = attend(problem, SCORE_SIDE, kernel=kernel)
    e = math.e
    weights = torch.tensor([[e, 1, e], [1, e, e]]) / (2 * e + 1)
    assert attended.taps["scores"][0, 0].tolist() == [[1, 0, 1], [0, 1, 1]]
    torch.testing.assert_close(attended.taps["weights"][0, 0], weights)
    torch.testing.assert_close(attended.taps["lse"][0, 0], torch.full((2,), math.log(2 * e + 1)))
    second = (1 + 3 * e + 5 * e) / (2 * e + 1)
    torch.testing.assert_close(attended.context[0, 0], torch.tensor([[3.0, 4.0], [second, second + 1]]))


def test_every_tap_and_node_follows_the_formula(every_spec_or_mask, make_problem, reference):
    spec = every_spec_or_mask
    problem = make_problem(batch=1, spec=spec, key_lengths=torch.tensor([4]))
    zeroed = problem.k.index_fill(2, torch.tensor([4]), 0)
    expected = reference(replace(problem, k=zeroed))  # padding counts as a zero key, whatever it holds
    nodes = trace(problem)
    assert tuple(nodes) == NODES
    assert len({id(node) for node in nodes.values()}) == len(NODES)
    for kernel in KERNEL_NAMES:
        if unsuitable(kernel, spec, torch.float64, Needs()):
            continue
        taps = attend(problem, [tap for tap in SCORE_SIDE if tap in taps_of(spec)], kernel=kernel).taps
        assert ("lse" in taps) == (spec.normalizer.name == "softmax")
        for name, found in taps.items():
            torch.testing.assert_close(found, expected[name], rtol=0, atol=1e-12)
            assert name == "lse" or nodes[name].equal(attend(problem, (name,), kernel="materialized").taps[name])


def test_beside_the_fused_kernel_only_selected_rows_are_computed(make_problem, monkeypatch):
    shapes = []
    original = ScaledDot.scores
    monkeypatch.setattr(
        ScaledDot, "scores", lambda *given: shapes.append([x.shape for x in given[1:3]]) or original(*given)
    )
    problem = make_problem(heads=4, kv_heads=2)
    attend(problem, ("context", "q", "k", "v", "output"))
    assert shapes == []
    attend(problem, ("weights",), Selection(heads=(3,), queries=(1, 2)))
    assert shapes == [[(2, 1, 2, 2), (2, 1, 5, 2)]]


@pytest.mark.parametrize("kernel", KERNEL_NAMES)
def test_a_query_that_may_look_nowhere_gets_zeros(kernel, make_problem):
    blind = SlidingWindow(left=0, right=0)
    problem = make_problem(queries=4, keys=4, spec=AttentionSpec(masks=[blind]), offsets=torch.tensor(2))
    attended = attend(problem, ("weights", "lse"), kernel=kernel)
    assert attended.context[:, :, 2:].count_nonzero() == 0
    assert attended.taps["weights"][:, :, 2:].count_nonzero() == 0
    assert (attended.taps["lse"][:, :, 2:] == -math.inf).all()
    torch.testing.assert_close(attended.context[:, :, :2], problem.v[:, :, 2:].expand(2, 2, 2, 3))
    torch.testing.assert_close(attended.taps["weights"][:, :, :2].sum(-1), torch.ones(2, 2, 2, dtype=torch.float64))

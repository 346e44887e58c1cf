"""Edits: what they touch, what they leave, and what follows from them."""

import math

import pytest
import torch

from attention_contract.spec import AttentionSpec, Causal
from attention_service.core import edits
from attention_service.core.attention import attend, trace
from attention_service.core.edits import AXES, BoundEdit
from attention_service.core.problem import Problem, Selection
from attention_service.core.stages import narrow, stages

TAPS = ("q", "k", "v", "scores", "capped_scores", "masked_scores", "weights", "context")
PICKED = {"heads": (1, 0), "queries": (2,), "keys": (0, 3, 3)}


@pytest.fixture
def problem(make_problem):
    return make_problem(heads=4, kv_heads=2, queries=4, keys=5, key_lengths=torch.tensor([5, 4]))


def region(x, tap):
    """Bool: the part of a tap that PICKED picks, element by element."""
    inside = torch.zeros(x.shape, dtype=torch.bool)
    for index in torch.cartesian_prod(*(torch.arange(size) for size in x.shape)).tolist():
        inside[tuple(index)] = all(index[dim] in PICKED[axis] for axis, dim in AXES[tap].items())
    return inside


@pytest.mark.parametrize("tap", TAPS)
@pytest.mark.parametrize("action", [{"set": 0.25}, {"scale": -2.0}, {"add": torch.tensor(0.75)}], ids=str)
def test_an_edit_touches_its_part_and_nothing_else(tap, action, problem):
    before = attend(problem, TAPS, kernel="materialized").taps
    after = attend(problem, TAPS, edits=[BoundEdit(tap, **PICKED, **action)]).taps
    inside = region(before[tap], tap)
    edited = {"set": torch.full_like(before[tap], 0.25), "scale": -2 * before[tap], "add": before[tap] + 0.75}
    expected = torch.where(inside, edited[next(iter(action))], before[tap])
    if tap == "masked_scores":
        expected[before[tap] == -math.inf] = -math.inf
    assert after[tap].equal(expected)
    assert inside.any()
    for earlier in TAPS[: TAPS.index(tap)]:
        assert after[earlier].equal(before[earlier])
    assert not after["context"].equal(before["context"])


@pytest.mark.sampled
@pytest.mark.parametrize("tap", TAPS)
@pytest.mark.parametrize("action", [{"set": 0.25}, {"scale": -2.0}, {"value": True}, {"add": True}], ids=str)
@pytest.mark.parametrize("selection", [Selection((3, 0), (3, 2)), Selection((2,)), Selection(None, (0, 2))], ids=str)
def test_an_edit_of_the_whole_holds_within_a_selection(tap, action, selection, problem):
    listed = {axis: PICKED[axis][:2] for axis in AXES[tap]}
    shape = [2, *(len(listed[axis]) for axis in AXES[tap])]
    if True in action.values():
        (name,) = action
        action = {name: torch.randn(*shape, *([1] if len(shape) < 4 else []))}
    chosen = [BoundEdit(tap, **listed, **action), BoundEdit("weights", keys=(0,), set=0.0, renormalize=True)]
    whole = dict(stages(problem, TAPS, chosen))
    part = dict(stages(problem, TAPS, chosen, selection))
    for name, x in part.items():
        expected = narrow(whole[name], name, problem, selection)
        torch.testing.assert_close(x, expected, rtol=1e-6, atol=1e-6)


def test_a_value_is_put_in_the_order_of_the_indices():
    x = torch.zeros(2, 4, 3, 5, dtype=torch.bfloat16)
    value = torch.arange(2 * 2 * 1 * 3.0).view(2, 2, 1, 3)
    after = edits.apply([BoundEdit("weights", heads=(3, 1), queries=(2,), keys=(4, 0, 1), value=value)], "weights", x)
    expected = torch.zeros_like(x)
    for b in range(2):
        for h, head in enumerate((3, 1)):
            for j, key in enumerate((4, 0, 1)):
                expected[b, head, 2, key] = value[b, h, 0, j]
    assert after.dtype == x.dtype
    assert after.equal(expected)
    assert x.count_nonzero() == 0


def test_the_output_of_a_module_can_be_edited():
    x = torch.ones(2, 3, 4)
    after = edits.apply([BoundEdit("output", queries=(1,), set=0.0), BoundEdit("q", set=9.0)], "output", x)
    assert after.sum((0, 2)).tolist() == [8, 0, 8]


def test_patching_a_tap_with_its_own_value_changes_nothing(problem):
    before = attend(problem, TAPS, kernel="materialized")
    for tap in TAPS:
        after = attend(problem, edits=[BoundEdit(tap, value=before.taps[tap])])
        assert after.context.equal(before.context)


def test_edits_apply_in_the_order_of_taps_then_as_given(problem):
    chain = [
        BoundEdit("weights", scale=3.0),
        BoundEdit("q", set=0.0),
        BoundEdit("weights", set=1.0),
        BoundEdit("weights", scale=2.0),
    ]
    taps = attend(problem, ("scores", "weights"), edits=chain).taps
    assert taps["scores"].count_nonzero() == 0
    assert (taps["weights"] == 2).all()


def test_knocked_out_weights_can_be_renormalized(problem):
    plain = attend(problem, ("weights",), kernel="materialized").taps["weights"]
    edit = BoundEdit("weights", heads=(2,), queries=(0, 3), keys=(1, 2), set=0.0, renormalize=True)
    after = attend(problem, ("weights",), edits=[edit]).taps["weights"]
    assert after[:, 2, :, 1:3][:, [0, 3]].count_nonzero() == 0
    torch.testing.assert_close(after.sum(-1), torch.ones_like(after[..., 0]))
    rest = torch.ones(2, 4, 4, dtype=torch.bool)
    rest[:, 2, [0, 3]] = False
    assert after[rest].equal(plain[rest])
    kept = plain[:, 2, 0, [0, 3]]
    torch.testing.assert_close(after[:, 2, 0, 0] / after[:, 2, 0, 3], kept[:, 0] / kept[:, 1])


def test_a_row_that_sums_to_zero_stays_zero(problem):
    after = attend(problem, ("weights",), edits=[BoundEdit("weights", queries=(1,), set=0.0, renormalize=True)])
    assert after.taps["weights"][:, :, 1].count_nonzero() == 0
    assert after.context[:, :, 1].count_nonzero() == 0
    assert after.context.isfinite().all()


@pytest.mark.parametrize("tap", ["scores", "capped_scores", "masked_scores"])
@pytest.mark.parametrize("action", [{"set": 50.0}, {"scale": 0.0}], ids=str)
def test_edited_scores_stay_masked(tap, action, make_problem):
    float_mask = torch.zeros(5).index_fill(0, torch.tensor(1), -math.inf)
    problem = make_problem(spec=AttentionSpec(masks=[Causal()]), mask=float_mask, key_lengths=torch.tensor([4, 4]))
    plain = attend(problem, ("masked_scores",), kernel="materialized").taps["masked_scores"]
    forbidden = plain == -math.inf
    after = attend(problem, ("masked_scores", "weights"), edits=[BoundEdit(tap, **action)]).taps
    assert (after["masked_scores"][forbidden] == -math.inf).all()
    assert (after["masked_scores"][~forbidden] > -math.inf).all()
    assert after["weights"][forbidden].count_nonzero() == 0


def test_gradients_pass_by_what_was_edited(problem):
    nodes = trace(problem, [BoundEdit("q", heads=(1, 1), scale=3.0), BoundEdit("weights", heads=(0,), set=0.5)])
    assert not problem.q.requires_grad
    leaf = problem.q.clone().requires_grad_()
    edited = trace(Problem(leaf, problem.k, problem.v), [BoundEdit("q", heads=(1, 1), scale=3.0)])
    at_tap, at_leaf = torch.autograd.grad(edited["context"].pow(2).sum(), [edited["q"], leaf])
    factor = torch.tensor([1.0, 3, 1, 1], dtype=torch.float64).view(1, 4, 1, 1)
    torch.testing.assert_close(at_leaf, at_tap * factor)
    scores, weights = torch.autograd.grad(nodes["context"].pow(2).sum(), [nodes["scores"], nodes["weights"]])
    assert scores[:, 0].count_nonzero() == 0
    assert scores[:, 1:].count_nonzero() > 0
    assert weights[:, 0].count_nonzero() > 0


@pytest.mark.parametrize("kernel", ["blocked", "materialized"])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("action", [{"set": 0.25}, {"value": torch.full((1, 1, 4, 5), 0.5)}], ids=["set", "value"])
def test_padded_keys_get_no_weight_where_edits_leave_them_alone(action, renormalize, kernel, problem):
    """The results are those of the problem without the padded keys."""
    edit = BoundEdit("weights", heads=(1,), **action, renormalize=renormalize, real_keys=True)
    found = attend(problem, ("weights",), edits=[edit], kernel=kernel)
    short = Problem(problem.q[1:], problem.k[1:, :, :4], problem.v[1:, :, :4], problem.spec)
    if edit.value is not None:
        edit = BoundEdit("weights", heads=(1,), value=edit.value[..., :4], renormalize=renormalize)
    expected = attend(short, ("weights",), edits=[edit], kernel=kernel)
    torch.testing.assert_close(found.context[1:], expected.context, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.taps["weights"][1:, :, :, :4], expected.taps["weights"], rtol=0, atol=1e-12)
    assert (found.taps["weights"][1, :, :, 4] == 0).all()
    assert (found.taps["weights"][0, 1] > 0).all()


def test_what_is_added_to_a_score_multiplies_the_odds_of_its_key(problem):
    plain = attend(problem, ("weights",), kernel="materialized").taps["weights"]
    doubled = BoundEdit("scores", heads=(1,), keys=(2,), add=torch.tensor(math.log(2)))
    found = attend(problem, ("weights",), edits=[doubled]).taps["weights"]
    odds = plain[:, 1, :, 2] / (1 - plain[:, 1, :, 2])
    torch.testing.assert_close(found[:, 1, :, 2] / (1 - found[:, 1, :, 2]), 2 * odds)
    assert found[:, 0].equal(plain[:, 0])


def test_what_is_added_to_all_values_is_added_to_every_context(problem):
    plain = attend(problem, (), kernel="materialized").context
    by_head = torch.randn(problem.k.shape[1], 1, problem.v.shape[3])
    found = attend(problem, (), edits=[BoundEdit("v", add=by_head)]).context
    torch.testing.assert_close(found, plain + by_head.repeat_interleave(2, 0))


def test_tensors_are_added_in_the_order_of_the_indices():
    x = torch.arange(2 * 3 * 4.0).view(2, 3, 4)
    add = torch.tensor([[10.0], [20.0]])
    found = edits.apply([BoundEdit("output", queries=(2, 0), add=add)], "output", x)
    assert found.equal(x + torch.tensor([20.0, 0.0, 10.0])[:, None])


@pytest.mark.parametrize("tap", ["output", "v"])
def test_edits_of_later_tokens_are_those_of_the_whole_from_there_on(tap):
    """Passes over three tokens at a time have what one pass over all has."""
    draws = torch.Generator().manual_seed(0)
    x = torch.randn((1, 9, 4) if tap == "output" else (1, 2, 9, 4), generator=draws)
    dim, axis = (1, "queries") if tap == "output" else (2, "keys")
    whole = [
        BoundEdit(tap, add=torch.randn(x.shape[1:], generator=draws)),
        BoundEdit(tap, **{axis: (7, 1, 5)}, scale=3.0),
    ]
    expected = torch.cat([x.narrow(dim, 0, 5), edits.apply(whole, tap, x).narrow(dim, 5, 4)], dim)
    parts = []
    for start in range(0, 9, 3):
        tokens = range(start, start + 3)
        own = edits.narrowed(whole, Selection(queries=tokens), 2, 2, keys=tokens)
        parts.append(edits.apply(edits.begun_at(own, 5, tokens, tokens), tap, x.narrow(dim, start, 3)))
    assert torch.cat(parts, dim).equal(expected)

"""What holds for every method that approximates, whatever its arithmetic."""

from dataclasses import replace

import pytest
import torch
from tests.core.conftest import APPROXIMATIONS
from torch.autograd import gradcheck

from attention_contract import spec
from attention_contract.positions import Alibi, Rope
from attention_service.core.attention import attend
from attention_service.core.edits import BoundEdit
from attention_service.core.methods import METHODS
from attention_service.core.positions import POSITIONS
from attention_service.core.problem import RunningInputs

CAUSAL = {name: described for name, described in APPROXIMATIONS.items() if described.masks}


def with_tensors(problem, tensors):
    """The problem with its differentiable tensors exchanged, in the order of ``tensors_of``."""
    tensors = list(tensors)
    q, k, v = (tensors.pop(0) for _ in range(3))
    learned = {name: tensors.pop(0) for name in problem.learned}
    fields = ("log_gate", "beta", "state", "normalizer")
    filled = {each: tensors.pop(0) for each in fields if getattr(problem.recurrent, each) is not None}
    return replace(problem, q=q, k=k, v=v, learned=learned, recurrent=replace(problem.recurrent, **filled))


def tensors_of(problem):
    given = problem.recurrent
    running = [x for x in (given.log_gate, given.beta, given.state, given.normalizer) if x is not None]
    return [problem.q, problem.k, problem.v, *problem.learned.values(), *running]


def test_gradients_are_those_of_central_differences(every_approximation, make_problem):
    problem = make_problem(spec=every_approximation, queries=5, keys=6, width=3)
    leaves = [x.detach().requires_grad_() for x in tensors_of(problem)]
    assert gradcheck(lambda *tensors: attend(with_tensors(problem, tensors)).context, leaves, fast_mode=True)


def test_grouped_heads_are_repeated_heads(every_approximation, make_problem):
    problem = make_problem(spec=every_approximation, heads=4, kv_heads=2, queries=9, keys=9)
    given = problem.recurrent
    repeated = replace(
        problem,
        k=problem.k.repeat_interleave(2, 1),
        v=problem.v.repeat_interleave(2, 1),
        recurrent=RunningInputs(*(x if x is None else x.repeat_interleave(2, 1) for x in (given.log_gate, given.beta))),
    )
    torch.testing.assert_close(attend(problem).context, attend(repeated).context, rtol=0, atol=1e-12)


def test_padding_is_as_if_it_were_not_there(every_approximation, make_problem):
    problem = make_problem(spec=every_approximation, queries=8, keys=8)
    padded = replace(problem, key_lengths=torch.tensor([5, 8]))
    spoilt = replace(padded, k=padded.k.clone(), v=padded.v.clone())
    spoilt.k[0, :, 5:], spoilt.v[0, :, 5:] = torch.inf, torch.nan
    given = problem.recurrent
    short = replace(
        problem,
        q=problem.q[:1, :, :5],
        k=problem.k[:1, :, :5],
        v=problem.v[:1, :, :5],
        recurrent=RunningInputs(*(x if x is None else x[:1, :, :5] for x in (given.log_gate, given.beta))),
    )
    found = attend(spoilt).context
    torch.testing.assert_close(found[:1, :, :5], attend(short).context, rtol=0, atol=1e-11)
    torch.testing.assert_close(found[1], attend(problem).context[1], rtol=0, atol=1e-11)
    assert found.isfinite().all()


def test_padding_has_no_gradient_and_gives_no_nan(every_approximation, make_problem):
    problem = make_problem(spec=every_approximation, queries=6, keys=6)
    real = torch.tensor([[True, False, True, False, True, True], [False] * 6])
    leaves = [x.detach().clone().requires_grad_() for x in tensors_of(problem)]
    with torch.no_grad():
        leaves[1][1], leaves[2][1] = torch.nan, torch.inf
    context = attend(replace(with_tensors(problem, leaves), key_mask=real)).context
    assert context[1].count_nonzero() == 0  # its queries may look nowhere
    gradients = torch.autograd.grad(context.square().sum() + context.sum(), leaves, allow_unused=True)
    for each in gradients:
        assert each is None or each.isfinite().all()
    q, k, v = gradients[:3]
    assert q[1].count_nonzero() == k[1].count_nonzero() == v[1].count_nonzero() == 0
    hidden = ~real[0]
    assert k[0, :, hidden].count_nonzero() == v[0, :, hidden].count_nonzero() == 0


@pytest.mark.parametrize("described", CAUSAL.values(), ids=CAUSAL)
def test_future_tokens_do_not_matter(described, make_problem):
    problem = make_problem(spec=described, queries=300, keys=300)
    changed = replace(problem, k=problem.k.clone(), v=problem.v.clone())
    changed.k[:, :, 200:] += 3
    changed.v[:, :, 200:] -= 5
    before, after = attend(problem).context, attend(changed).context
    torch.testing.assert_close(before[:, :, :200], after[:, :, :200], rtol=0, atol=1e-10)
    assert (before[:, :, 200:] - after[:, :, 200:]).abs().amax() > 1e-3


@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf])
@pytest.mark.parametrize("described", CAUSAL.values(), ids=CAUSAL)
def test_what_is_not_finite_harms_nobody_before_it(described, spoilt, make_problem):
    problem = make_problem(spec=described, queries=9, keys=9)
    problem = replace(problem, recurrent=replace(problem.recurrent, wanted=True))
    changed = replace(problem, k=problem.k.clone(), v=problem.v.clone())
    changed.k[0, :, 6], changed.v[1, :, 7] = spoilt, spoilt
    before, after = attend(problem), attend(changed, ("k", "context"))
    torch.testing.assert_close(before.context[0, :, :6], after.context[0, :, :6], rtol=0, atol=1e-12)
    torch.testing.assert_close(before.context[1, :, :7], after.context[1, :, :7], rtol=0, atol=1e-12)
    assert after.context[0, :, 6:].isnan().all()
    assert after.context[1, :, 7:].isnan().all()
    assert all(x.isnan().all() for x in after.state.values())
    torch.testing.assert_close(after.taps["k"], changed.k, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_accumulate_in_float32(every_approximation, dtype, make_problem):
    problem = make_problem(spec=every_approximation, queries=300, keys=300, width=4)
    narrow = with_tensors(problem, [x.to(dtype) for x in tensors_of(problem)])
    wide = with_tensors(problem, [x.to(dtype).float() for x in tensors_of(problem)])
    found = attend(narrow).context
    assert found.dtype == dtype
    expected = attend(wide).context
    torch.testing.assert_close(found, expected.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_taps_can_be_edited(every_approximation, make_problem):
    problem = make_problem(spec=every_approximation, queries=6, keys=6)
    edits = [BoundEdit("v", heads=(0,), set=0.0), BoundEdit("context", heads=(1,), scale=2.0)]
    found = attend(problem, edits=edits).context
    expected = attend(replace(problem, v=problem.v.zero_())).context
    expected[:, 1] *= 2
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_nothing_to_look_at_and_nobody_to_look(every_approximation, make_problem):
    for queries, keys in ((4, 0), (0, 4), (1, 1)):
        context = attend(make_problem(spec=every_approximation, queries=queries, keys=keys)).context
        assert context.shape == (2, 2, queries, 3)
        assert context.isfinite().all()
        if not keys:
            assert context.count_nonzero() == 0


def test_what_is_added_to_pairs_is_refused_and_what_turns_them_is_not(every_approximation):
    def refusals(position):
        described = every_approximation.model_copy(update={"position": position})
        return [param for param, _ in METHODS.of(described.method).refuses(described)]

    for entry in POSITIONS:
        needed = {"length": 4} if "length" in entry.schema.get("required", ()) else {}
        position = entry.options(**needed)
        assert refusals(position) == (["spec.position"] if POSITIONS.of(position).biased else [])
    assert refusals(Alibi()) == ["spec.position"]
    assert refusals(Rope()) == []


REFUSED = {
    "masks": {"masks": [spec.Block(size=2)]},
    "two masks": {"masks": [spec.Causal(), spec.SlidingWindow(left=2)]},
    "softcap": {"softcap": 2.0},
    "sigmoid": {"normalizer": spec.Sigmoid()},
    "sinks": {"normalizer": spec.Softmax(sinks=True)},
    "gaussian": {"score": spec.Gaussian()},
    "additive": {"score": spec.Additive()},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True},
}


def test_what_cannot_be_honoured_is_named(every_approximation):
    for more in REFUSED.values():
        described = every_approximation.model_copy(update=more)
        refusals = METHODS.of(described.method).refuses(described)
        assert {param for param, _ in refusals} == {f"spec.{field}" for field in more}
    assert list(METHODS.of(every_approximation.method).refuses(every_approximation)) == []

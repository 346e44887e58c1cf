"""The blocked kernel over many small blocks: the formula's numbers and the stages' gradients, whatever the edges."""

from dataclasses import replace
from zlib import crc32

import pytest
import torch
from tests.core.conftest import SPECS
from torch.autograd import gradcheck

from attention_contract.spec import (
    AnyOf,
    AttentionSpec,
    Entmax15,
    GlobalTokens,
    Sigmoid,
    SlidingWindow,
    Softmax,
    Strided,
)
from attention_service.core.attention import attend
from attention_service.core.kernels import blocked
from attention_service.core.kernels.fused import cpu_blocks
from attention_service.core.kernels.query_blocks import Cut
from attention_service.core.masks import key_spans, rules
from attention_service.core.multihead import learned_of
from attention_service.core.problem import WeightDropout

WINDOW = AttentionSpec(masks=[SlidingWindow(left=3, right=1)])
LONGFORMER = [AnyOf(of=[SlidingWindow(left=3, right=1), GlobalTokens(positions=[1])])]
LENGTHS = torch.tensor([9, 0, 4])
PADDING = torch.rand(3, 11, generator=torch.Generator().manual_seed(2)) > 0.4
NORMAL = torch.randn(3, 2, 10, 11, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
REQUESTS = {
    "alone": {},
    "padding": {"key_mask": PADDING},
    "lengths": {"key_lengths": LENGTHS},
    "bool mask": {"mask": NORMAL > -1},
    "float mask": {"mask": NORMAL.masked_fill(NORMAL > 1.5, -torch.inf)},
    "float mask of keys": {"mask": NORMAL[0, 0, 0]},
    "float mask of queries": {"mask": NORMAL[:, :1, :, :1]},
    "bool mask of queries": {"mask": NORMAL[:1, :, :, :1] > 0},
    "short bool mask": {"mask": NORMAL[0, 0, :, :6] > -1},
    "short float mask": {"mask": NORMAL[:, :, :1, :6], "key_lengths": LENGTHS},
    "past and offsets": {"past": 3, "offsets": torch.tensor([-4, 3, 3])},
    "dropout": {"dropout": WeightDropout(0.4, 7)},
}


SMALL = [Cut(3, 2**10, cell=2), Cut(4, 8, cell=1), Cut(64, 60, cell=3)]


@pytest.fixture(autouse=True)
def small_blocks(request, monkeypatch):
    """Blocks and cells of a few queries and keys: of one size or another, by the name of the test."""
    small = SMALL[crc32(request.node.name.encode()) % len(SMALL)]
    monkeypatch.setattr(blocked, "CUT", small)
    monkeypatch.setattr(cpu_blocks, "CUT", replace(small, shared=True))


def problem_of(make_problem, spec, **more):
    """A problem with learned tensors that are all different."""
    problem = make_problem(batch=3, queries=10, keys=11, spec=spec, **more)
    generator = torch.Generator().manual_seed(4)
    learned = {
        name: torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        for name, tensor in learned_of(spec, problem.widths).items()
    }
    return replace(problem, learned=learned)


def assert_like_the_stages(problem):
    """The context, the log-sum-exp and every gradient."""
    if problem.spec.normalizer.name == "softmax":
        found, expected = (attend(problem, ("lse",), kernel=each).taps["lse"] for each in ("blocked", "materialized"))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)

    def differentiated(kernel):
        leaves = {"q": problem.q, "k": problem.k, "v": problem.v, **problem.learned}
        if problem.mask is not None and problem.mask.is_floating_point():
            leaves["mask"] = problem.mask
        leaves = {name: x.clone().requires_grad_() for name, x in leaves.items()}
        learned = {name: leaves[name] for name in problem.learned}
        parts = {name: x for name, x in leaves.items() if name not in learned}
        context = attend(replace(problem, learned=learned, **parts), kernel=kernel).context
        upstream = torch.randn(context.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        gradients = torch.autograd.grad(
            context, [*leaves.values()], upstream, allow_unused=True, materialize_grads=True
        )
        return {"context": context.detach()} | dict(zip(leaves, gradients, strict=True))

    found, expected = differentiated("blocked"), differentiated("materialized")
    for name, value in expected.items():
        assert found[name].isfinite().all()
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=1e-11, msg=lambda difference, name=name: f"{name}: {difference}"
        )


@pytest.mark.sampled(every_spec_or_mask=24)
def test_every_spec_and_mask_like_the_stages(every_spec_or_mask, make_problem):
    more = {} if every_spec_or_mask.masks else {"mask": NORMAL, "key_lengths": LENGTHS}
    assert_like_the_stages(problem_of(make_problem, every_spec_or_mask, **more))


@pytest.mark.sampled
@pytest.mark.parametrize("turn", range(3), ids=["dense", "window", "longformer"])
@pytest.mark.parametrize("name", REQUESTS)
def test_every_request_like_the_stages(name, turn, make_problem):
    """With each kind of masks and with each normalizer, which go together by turns."""
    normalizer = (Softmax(), Sigmoid(), Entmax15())[([*REQUESTS].index(name) + turn) % 3]
    spec = AttentionSpec(masks=([], WINDOW.masks, LONGFORMER)[turn], normalizer=normalizer)
    assert_like_the_stages(problem_of(make_problem, spec, **REQUESTS[name]))


@pytest.mark.sampled
@pytest.mark.parametrize("normalizer", [Softmax(), Sigmoid(), Entmax15()], ids=lambda each: each.name)
@pytest.mark.parametrize("masks", [LONGFORMER, [Strided(stride=4)], [Strided(stride=6, local=1)]], ids=str)
def test_keys_of_many_spans_like_the_stages(masks, normalizer, make_problem, monkeypatch):
    monkeypatch.setattr(key_spans, "MANY", 1)
    monkeypatch.setattr(rules, "MANY", 1)
    spec = AttentionSpec(masks=masks, normalizer=normalizer)
    problem = problem_of(make_problem, spec, key_lengths=LENGTHS, mask=NORMAL)
    assert_like_the_stages(problem)
    laid = {name: getattr(problem, name).transpose(1, 2).contiguous().transpose(1, 2) for name in "qkv"}
    assert_like_the_stages(replace(problem, **laid))
    assert_like_the_stages(replace(problem, k=problem.k[:, :, :1].expand(problem.k.shape)))


@pytest.mark.sampled(name=1)
@pytest.mark.parametrize("name", ["softcap and temperature", "additive, sparsemax", "relative_bias, sigmoid"])
def test_gradients_by_central_differences(name, make_problem):
    spec = SPECS[name].model_copy(update={"masks": WINDOW.masks})
    problem = make_problem(batch=1, queries=3, keys=4, spec=spec, mask=NORMAL[:1, :, :3, :4])
    names = learned_of(spec, problem.widths)
    learned = [torch.randn(each.shape, dtype=torch.float64).abs() + 0.5 for each in names.values()]

    def context(q, k, v, mask, *learned):
        drawn = dict(zip(names, learned, strict=True))
        return attend(replace(problem, q=q, k=k, v=v, mask=mask, learned=drawn), kernel="blocked").context

    leaves = [x.clone().requires_grad_() for x in (problem.q, problem.k, problem.v, problem.mask, *learned)]
    assert gradcheck(context, leaves)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_half_types_are_summed_in_float32(dtype, make_problem):
    problem = make_problem(queries=10, keys=11, dtype=dtype, spec=WINDOW)
    leaves = [x.requires_grad_() for x in (problem.q, problem.k, problem.v)]
    context = attend(problem, kernel="blocked").context
    gradients = torch.autograd.grad(context.sum(), leaves)
    double = replace(problem, q=problem.q.double(), k=problem.k.double(), v=problem.v.double())
    precise = attend(double, kernel="materialized").context
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(context.double(), precise, rtol=2 * step, atol=2 * step)
    for found, expected in zip(gradients, torch.autograd.grad(precise.sum(), leaves), strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=4 * step, atol=4 * step)


def test_gradients_are_not_differentiated_again(make_problem):
    problem = make_problem(spec=WINDOW)
    problem.q.requires_grad_()
    context = attend(problem, kernel="blocked").context
    (gradient,) = torch.autograd.grad(context.square().sum(), problem.q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()

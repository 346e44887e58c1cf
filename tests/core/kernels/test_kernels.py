"""Every kernel gives the numbers of the formula, or says why it cannot."""

from dataclasses import fields, replace
from itertools import product

import pytest
import torch
from tests.core.conftest import MASKS, SPECS

from attention_contract.spec import (
    AnyOf,
    AttentionSpec,
    Block,
    Causal,
    Documents,
    Entmax15,
    GlobalTokens,
    Sigmoid,
    SlidingWindow,
    Softmax,
    Sparsemax,
)
from attention_service.core.attention import attend
from attention_service.core.kernels import KERNELS, Needs, unsuitable

NAMES = [entry.name for entry in KERNELS if not unsuitable(entry.name, AttentionSpec(), torch.float64, Needs())]
LENGTHS = torch.tensor([4, 0])
PADDING = torch.tensor([[True, False, True, True, True], [False] * 5])
NORMAL = torch.randn(2, 1, 4, 5, generator=torch.Generator().manual_seed(1))
REQUESTS = {
    "alone": {},
    "padding": {"key_mask": PADDING},
    "lengths": {"key_lengths": LENGTHS},
    "padding and lengths": {"key_mask": PADDING, "key_lengths": LENGTHS},
    "bool mask": {"mask": NORMAL > 0},
    "float mask": {"mask": NORMAL},
    "float mask with a blind row": {"mask": torch.zeros(4, 5).index_fill(0, torch.tensor([1]), -torch.inf)},
    "float mask and lengths": {"mask": torch.tensor([0.0, -1e9, 0.5, -torch.inf, 1]), "key_lengths": LENGTHS},
    "short bool mask": {"mask": torch.tensor([[True, True, False, True]])},
    "short float mask": {"mask": torch.tensor([[[0.5, -torch.inf]]])},
    "one column": {"mask": torch.tensor([[True], [False], [True], [True]])},
    "past": {"past": 2},
    "past and offsets": {"past": 2, "offsets": torch.tensor([-4, 3])},
    "one offset": {"offsets": torch.tensor(0)},
}


FEW_MASKS = {
    "dense": [],
    "causal": [Causal()],
    "causal, bottom right": [Causal(align="bottom_right")],
    "several": [Causal(), AnyOf(of=[SlidingWindow(left=1), GlobalTokens(positions=[0, 4])])],
    "blocks": [Block(size=2, neighbours=1), Documents(lengths=[1, 2])],
}


def close(found, expected, tolerance=1e-12):
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def test_every_spec_and_mask(every_spec_or_mask, make_problem, reference):
    problem = make_problem(spec=every_spec_or_mask, mask=NORMAL.double(), key_lengths=LENGTHS)
    for each in (problem, replace(problem, mask=None, key_lengths=None)):
        expected = reference(each)["context"]
        for kernel in NAMES:
            if not unsuitable(kernel, every_spec_or_mask, torch.float64, Needs()):
                close(attend(each, kernel=kernel).context, expected)


@pytest.mark.sampled
@pytest.mark.parametrize("masks", FEW_MASKS.values(), ids=FEW_MASKS)
@pytest.mark.parametrize("more", REQUESTS.values(), ids=REQUESTS)
def test_every_request_and_its_gradients(masks, more, make_problem, reference):
    problem = make_problem(spec=AttentionSpec(masks=masks), **more)
    leaves = [problem.q, problem.k, problem.v]
    if problem.mask is not None and problem.mask.dtype != torch.bool:
        problem = replace(problem, mask=problem.mask.double())
        leaves.append(problem.mask)
    expected = reference(problem)["context"]
    for leaf in leaves:
        leaf.requires_grad_()
    gradients = {}
    for kernel in NAMES:
        context = attend(problem, kernel=kernel).context
        close(context, expected)
        upstream = torch.randn(context.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        gradients[kernel] = torch.autograd.grad(context, leaves, upstream)
    for kernel in NAMES:
        for found, wanted in zip(gradients[kernel], gradients["materialized"], strict=True):
            assert found.isfinite().all()
            close(found, wanted)


@pytest.mark.parametrize(("kv_heads", "queries", "keys"), [(2, 5, 5), (1, 3, 7), (1, 7, 3), (2, 1, 6), (1, 1, 1)])
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_causal_shortcuts(kv_heads, queries, keys, align, make_problem, reference):
    spec = AttentionSpec(masks=[Causal(align=align)])
    problem = make_problem(kv_heads=kv_heads, queries=queries, keys=keys, value_width=4, spec=spec)
    for each in (problem, replace(problem, past=keys - 1), replace(problem, past=1, offsets=torch.tensor([1, 1]))):
        expected = reference(each)["context"]
        for kernel in NAMES:
            close(attend(each, kernel=kernel).context, expected)


@pytest.mark.parametrize("kernel", NAMES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)], ids=str
)
def test_every_dtype(kernel, dtype, tolerance, make_problem, reference):
    for masks in FEW_MASKS.values():
        problem = make_problem(dtype=dtype, spec=AttentionSpec(masks=masks), key_lengths=LENGTHS)
        context = attend(problem, kernel=kernel).context
        assert context.dtype == dtype
        close(context.double(), reference(problem)["context"], tolerance)


@pytest.mark.parametrize("name", SPECS)
def test_every_spec_in_half_types(name, make_problem):
    """Within PyTorch's tolerances for its own attention; of bfloat16, within a rounding of the largest output."""
    for dtype, rtol, atol in ((torch.float16, 1e-3, 1e-3), (torch.bfloat16, 1.6e-2, 8e-3)):
        half = make_problem(dtype=dtype, spec=SPECS[name])
        learned = {name: x.double() for name, x in half.learned.items()}
        exact = replace(half, q=half.q.double(), k=half.k.double(), v=half.v.double(), learned=learned)
        found, expected = (attend(each, kernel="materialized").context for each in (half, exact))
        torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("kernel", NAMES)
def test_a_mask_of_large_numbers_weighs_evenly_and_does_not_blind(kernel, make_problem):
    for dtype in (torch.float16, torch.float32):
        problem = make_problem(dtype=dtype, mask=torch.full((5,), -1e9))
        problem = replace(problem, q=torch.zeros_like(problem.q))
        context = attend(problem, kernel=kernel).context
        mean = problem.v.float().mean(2, keepdim=True).repeat_interleave(2, dim=1).expand_as(context)
        close(context.float(), mean, 2e-3)


@pytest.mark.sampled
@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (3, 0), (0, 0)])
def test_nothing_to_attend(queries, keys, every_mask, make_problem):
    for normalizer in (Sigmoid(), Sparsemax(), Entmax15()):
        problem = make_problem(queries=queries, keys=keys, spec=AttentionSpec(masks=every_mask, normalizer=normalizer))
        for kernel in ("blocked", "materialized"):
            assert attend(problem, kernel=kernel).context.equal(torch.zeros(2, 2, queries, 3, dtype=torch.float64))
    problem = make_problem(queries=queries, keys=keys, spec=AttentionSpec(masks=every_mask))
    for kernel in NAMES:
        attended = attend(problem, ("weights", "lse", "masked_scores"), kernel=kernel)
        assert attended.context.equal(torch.zeros(2, 2, queries, 3, dtype=torch.float64))
        assert attended.taps["weights"].shape == (2, 2, queries, keys)
        assert attended.taps["lse"].equal(torch.full((2, 2, queries), -torch.inf, dtype=torch.float64))


@pytest.mark.parametrize(
    ("kernel", "spec", "dtype", "needs", "reason"),
    [
        ("fused", AttentionSpec(softcap=1.0), torch.float32, {}, "softcap"),
        ("fused", AttentionSpec(normalizer=Sigmoid()), torch.float32, {"edits": True}, "no normalizer sigmoid"),
        ("fused", AttentionSpec(normalizer=Softmax(dtype="float64")), torch.float32, {}, "float64"),
        ("fused", AttentionSpec(normalizer=Softmax(dtype="float16")), torch.float32, {}, "float16"),
        ("fused", AttentionSpec(normalizer=Softmax(dtype="bfloat16")), torch.bfloat16, {}, "bfloat16"),
        ("fused", AttentionSpec(), torch.float32, {"edits": True}, "edits"),
        ("fused", AttentionSpec(), torch.float32, {"taps_gradient": True}, "in memory"),
        ("fused", AttentionSpec(), torch.float32, {"double_backward": True}, "differentiated again"),
        ("fused", AttentionSpec(), torch.float32, {"dropout": True}, "dropout"),
        ("blocked", AttentionSpec(), torch.float32, {"edits": True}, "edits"),
        ("blocked", AttentionSpec(), torch.float32, {"taps_gradient": True}, "one block"),
        ("blocked", AttentionSpec(), torch.float32, {"double_backward": True}, "differentiated again"),
    ],
)
def test_what_a_kernel_cannot_do(kernel, spec, dtype, needs, reason):
    assert reason in unsuitable(kernel, spec, dtype, Needs(**needs))
    assert unsuitable("materialized", spec, dtype, Needs(**needs)) is None


def test_a_kernel_refuses_rather_than_leave_a_part_out(make_problem):
    with pytest.raises(ValueError, match="unsuitable"):
        attend(make_problem(spec=AttentionSpec(softcap=1.0)))


GPU_TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        each
        for each in product(NAMES, GPU_TOLERANCES)
        if not unsuitable(each[0], AttentionSpec(), each[1], Needs(device="cuda"))
    ],
    ids=str,
)
def test_every_mask_on_a_gpu(kernel, dtype, make_problem, reference):
    for masks, more in product(MASKS.values(), REQUESTS.values()):
        problem = make_problem(width=8, value_width=8, dtype=dtype, spec=AttentionSpec(masks=masks), **more)
        moved = {
            each.name: x.cuda()
            for each in fields(problem)
            if isinstance(x := getattr(problem, each.name), torch.Tensor)
        }
        on_gpu = replace(problem, **moved)
        leaves = [x.requires_grad_() for x in (on_gpu.q, on_gpu.k, on_gpu.v)]
        context = attend(on_gpu, kernel=kernel).context
        close(context.double().cpu(), reference(problem)["context"], GPU_TOLERANCES[dtype])
        assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(context.sum(), leaves))

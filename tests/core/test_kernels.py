"""Every kernel gives the numbers of the formula, or says why it cannot."""

from dataclasses import replace

import pytest
import torch

from attention_contract.spec import AttentionSpec, Causal, Softmax
from attention_service.core.attention import attend
from attention_service.core.kernels import KERNELS, unsuitable

NAMES = [entry.name for entry in KERNELS if not unsuitable(entry.name, AttentionSpec(), torch.float64)]
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


@pytest.fixture(params=REQUESTS.values(), ids=REQUESTS)
def request_masks(request):
    return request.param


def test_every_spec_and_mask(every_spec, every_mask, make_problem, reference):
    spec = every_spec.model_copy(update={"masks": every_mask})
    problem = make_problem(spec=spec, mask=NORMAL.double(), key_lengths=LENGTHS)
    for each in (problem, replace(problem, mask=None, key_lengths=None)):
        expected = reference(each)["context"]
        for kernel in NAMES:
            if not unsuitable(kernel, spec, torch.float64):
                torch.testing.assert_close(attend(each, kernel=kernel).context, expected, rtol=0, atol=1e-12)


def test_every_mask_and_request(every_mask, request_masks, make_problem, reference):
    problem = make_problem(spec=AttentionSpec(masks=every_mask), **request_masks)
    expected = reference(problem)["context"]
    for kernel in NAMES:
        torch.testing.assert_close(attend(problem, kernel=kernel).context, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", NAMES)
@pytest.mark.parametrize(("kv_heads", "queries", "keys"), [(2, 5, 5), (1, 3, 7), (1, 7, 3), (2, 1, 6), (1, 1, 1)])
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_causal_shortcuts(kernel, kv_heads, queries, keys, align, make_problem, reference):
    spec = AttentionSpec(masks=[Causal(align=align)])
    problem = make_problem(kv_heads=kv_heads, queries=queries, keys=keys, value_width=4, spec=spec)
    for each in (problem, replace(problem, past=keys - 1), replace(problem, past=1, offsets=torch.tensor([1, 1]))):
        expected = reference(each)["context"]
        torch.testing.assert_close(attend(each, kernel=kernel).context, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", NAMES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)], ids=str
)
def test_every_dtype(kernel, dtype, tolerance, every_mask, make_problem, reference):
    problem = make_problem(dtype=dtype, spec=AttentionSpec(masks=every_mask), key_lengths=LENGTHS)
    context = attend(problem, kernel=kernel).context
    assert context.dtype == dtype
    torch.testing.assert_close(context.double(), reference(problem)["context"], rtol=0, atol=tolerance)


@pytest.mark.parametrize("kernel", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_mask_of_large_numbers_weighs_evenly_and_does_not_blind(kernel, dtype, make_problem):
    problem = make_problem(dtype=dtype, mask=torch.full((5,), -1e9))
    problem = replace(problem, q=torch.zeros_like(problem.q))
    context = attend(problem, kernel=kernel).context
    mean = problem.v.float().mean(2, keepdim=True).repeat_interleave(2, dim=1).expand_as(context)
    torch.testing.assert_close(context.float(), mean, rtol=0, atol=2e-3)


@pytest.mark.parametrize("kernel", NAMES)
@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (3, 0), (0, 0)])
def test_nothing_to_attend(kernel, queries, keys, every_mask, make_problem):
    problem = make_problem(queries=queries, keys=keys, spec=AttentionSpec(masks=every_mask))
    attended = attend(problem, ("weights", "lse", "masked_scores"), kernel=kernel)
    assert attended.context.equal(torch.zeros(2, 2, queries, 3, dtype=torch.float64))
    assert attended.taps["weights"].shape == (2, 2, queries, keys)
    assert attended.taps["lse"].equal(torch.full((2, 2, queries), -torch.inf, dtype=torch.float64))


@pytest.mark.parametrize("kernel", [name for name in NAMES if name != "materialized"])
def test_gradients_are_those_of_the_materialized_kernel(kernel, every_mask, request_masks, make_problem):
    def gradients(name):
        problem = make_problem(spec=AttentionSpec(masks=every_mask), **request_masks)
        leaves = [problem.q, problem.k, problem.v]
        if problem.mask is not None and problem.mask.dtype != torch.bool:
            problem = replace(problem, mask=problem.mask.double())
            leaves.append(problem.mask)
        for leaf in leaves:
            leaf.requires_grad_()
        context = attend(problem, kernel=name).context
        upstream = torch.randn(context.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        return torch.autograd.grad(context, leaves, upstream)

    for found, expected in zip(gradients(kernel), gradients("materialized"), strict=True):
        assert found.isfinite().all()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("spec", "dtype", "needs", "reason"),
    [
        (AttentionSpec(softcap=1.0), torch.float32, {}, "softcap"),
        (AttentionSpec(normalizer=Softmax(dtype="float64")), torch.float32, {}, "float64"),
        (AttentionSpec(normalizer=Softmax(dtype="float16")), torch.float32, {}, "float16"),
        (AttentionSpec(normalizer=Softmax(dtype="bfloat16")), torch.bfloat16, {}, "bfloat16"),
        (AttentionSpec(normalizer=Softmax(dtype="float64")), torch.float16, {}, "float64"),
        (AttentionSpec(), torch.float32, {"edits": True}, "edits"),
        (AttentionSpec(), torch.float32, {"taps_gradient": True}, "in memory"),
        (AttentionSpec(), torch.float32, {"double_backward": True}, "differentiated again"),
    ],
)
def test_what_the_fused_kernel_cannot_do(spec, dtype, needs, reason):
    assert reason in unsuitable("fused", spec, dtype, **needs)
    assert unsuitable("materialized", spec, dtype, **needs) is None


def test_the_fused_kernel_refuses_rather_than_leave_a_part_out(make_problem):
    with pytest.raises(ValueError, match="unsuitable"):
        attend(make_problem(spec=AttentionSpec(softcap=1.0)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_what_the_fused_kernel_can_do(dtype, every_mask):
    assert unsuitable("fused", AttentionSpec(masks=every_mask, normalizer=Softmax(temperature=3.0)), dtype) is None


def test_plain_causal_attention_builds_no_mask(make_problem, monkeypatch):
    def refuse(*_args, **_options):
        raise AssertionError("a mask was built")

    monkeypatch.setattr("attention_service.core.visibility.allowed", refuse)
    attend(make_problem(spec=AttentionSpec(masks=[Causal()])))
    attend(make_problem(queries=5, spec=AttentionSpec(masks=[Causal(align="bottom_right")])))
    with pytest.raises(AssertionError):
        attend(make_problem(spec=AttentionSpec(masks=[Causal(align="bottom_right")])))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kernel", NAMES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)],
    ids=str,
)
def test_every_mask_on_a_gpu(kernel, dtype, tolerance, every_mask, make_problem, reference):
    for more in REQUESTS.values():
        problem = make_problem(width=8, value_width=8, dtype=dtype, spec=AttentionSpec(masks=every_mask), **more)
        moved = {name: x.cuda() for name, x in vars(problem).items() if isinstance(x, torch.Tensor)}
        on_gpu = replace(problem, **moved)
        leaves = [x.requires_grad_() for x in (on_gpu.q, on_gpu.k, on_gpu.v)]
        context = attend(on_gpu, kernel=kernel).context
        torch.testing.assert_close(context.double().cpu(), reference(problem)["context"], rtol=0, atol=tolerance)
        assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(context.sum(), leaves))

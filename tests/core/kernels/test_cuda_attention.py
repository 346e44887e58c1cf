"""The fused kernel on a GPU: the arguments of PyTorch's kernels, by stand-ins with their numbers and their refusals."""

from dataclasses import replace

import pytest
import torch
from tests.core.conftest import MASKS, plain_taps, random_problem
from tests.fake_cuda import attention_kernels

from attention_contract.spec import AttentionSpec, Causal, Cosine, SlidingWindow, Softmax
from attention_service.core.attention import attend
from attention_service.core.kernels import Needs, unsuitable
from attention_service.core.kernels.fused import cuda_attention
from attention_service.core.kernels.fused.kernel import Fused, band_on_gpu
from attention_service.core.problem import Problem

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
SIZES = {
    "square": {"queries": 9, "keys": 9},
    "more keys": {"queries": 4, "keys": 9},
    "more queries": {"queries": 9, "keys": 4},
    "past": {"queries": 3, "keys": 9, "past": 6},
    "last": {"queries": 1, "keys": 9, "past": 8},
}
REQUESTS = {
    "offsets": {"queries": 4, "keys": 9, "offsets": torch.tensor([4, 1])},
    "one offset": {"queries": 4, "keys": 9, "offsets": torch.tensor(2)},
    "padded": {"queries": 9, "keys": 9, "key_lengths": torch.tensor([4, 9])},
    "bool mask": {"queries": 5, "keys": 7, "mask": torch.tensor([True, False, True, True, False, True, True])},
    "float mask": {"queries": 5, "keys": 7, "mask": torch.randn(2, 4, 5, 7)},
}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Names of the kernels that ran."""
    ran = []
    for name in ("flash", "efficient", "cudnn"):

        def call(*args, name=name, **options):
            ran.append(name)
            return getattr(attention_kernels, name)(*args, **options)

        monkeypatch.setattr(cuda_attention, f"_{name}", call)
    return ran


def context(problem: Problem) -> torch.Tensor:
    return attend(problem, kernel=Fused("cuda")).context


def close(found, problem):
    expected = plain_taps(replace(problem, **{name: getattr(problem, name).double() for name in "qkv"}))["context"]
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCES[found.dtype])


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_numbers_of_the_formula(sizes, masks, dtype):
    problem = random_problem(heads=4, kv_heads=2, width=6, dtype=dtype, spec=AttentionSpec(masks=masks), **sizes)
    close(context(problem), problem)


@pytest.mark.sampled
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("masks", ["none", "causal", "several"])
@pytest.mark.parametrize("name", REQUESTS)
def test_masks_of_the_request_for_every_group_of_heads(name, masks, kv_heads):
    """One sequence and two, and both dtypes, by turns."""
    request_, turn = REQUESTS[name], len(name) + len(masks)
    batch, dtype = 1 + turn % 2, (torch.float32, torch.float16)[(turn + kv_heads) // 2 % 2]
    given = {
        name: x[:batch] if isinstance(x, torch.Tensor) and len(x.shape) in {1, 4} and len(x) == 2 else x
        for name, x in request_.items()
    }
    spec = AttentionSpec(masks=MASKS[masks])
    problem = random_problem(batch=batch, heads=4, kv_heads=kv_heads, width=6, dtype=dtype, spec=spec, **given)
    close(context(problem), problem)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("width", [1, 8, 20, 64, 264])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_width_is_laid_out(dtype, width, batch, kernels):
    problem = random_problem(batch=batch, heads=4, kv_heads=2, width=width, value_width=width + 1, dtype=dtype)
    close(context(problem), problem)
    assert kernels == ["flash" if dtype == torch.bfloat16 and width < 256 else "efficient"]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_narrow_heads_whose_numbers_do_not_lie_side_by_side(dtype):
    """Zeros put beside them are laid out as they are: rotated heads of width 2 lie as channels_last images do."""
    problem = random_problem(heads=2, width=2, value_width=2, queries=9, keys=9, dtype=dtype)
    turned = {x: getattr(problem, x).contiguous(memory_format=torch.channels_last) for x in "qkv"}
    assert turned["q"].stride(-1) != 1
    close(context(replace(problem, **turned)), problem)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("masks", ["causal", "causal, bottom right", "sliding_window", "sliding_window, causal"])
def test_bands_are_computed_without_a_mask_in_memory(masks, sizes, kernels):
    problem = random_problem(dtype=torch.bfloat16, spec=AttentionSpec(masks=MASKS[masks]), **sizes)
    assert band_on_gpu(problem) is not None
    close(context(problem), problem)
    assert kernels == ["flash"]


def test_a_past_needs_no_mask_in_float32():
    problem = random_problem(dtype=torch.float32, spec=AttentionSpec(masks=[Causal()]), **SIZES["past"])
    assert band_on_gpu(problem) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
def test_the_gradients_of_the_formula(masks, dtype):
    problem = random_problem(heads=4, kv_heads=2, queries=5, keys=7, dtype=dtype, spec=AttentionSpec(masks=masks))
    found, expected = (
        replace(problem, **{x: getattr(problem, x).clone().requires_grad_() for x in "qkv"}) for _ in "ab"
    )
    upstream = torch.randn(2, 4, 5, 3, dtype=dtype)
    context(found).backward(upstream)
    attend(expected, kernel="materialized").context.backward(upstream)
    for name in "qkv":
        torch.testing.assert_close(
            getattr(found, name).grad, getattr(expected, name).grad, rtol=0, atol=20 * TOLERANCES[dtype]
        )


def test_the_gradient_of_a_mask_that_is_added():
    mask = torch.randn(5, 7)
    given = [mask.clone().requires_grad_() for _ in range(2)]
    problem = random_problem(heads=4, kv_heads=2, queries=5, keys=7, dtype=torch.float32)
    context(replace(problem, mask=given[0])).sum().backward()
    attend(replace(problem, mask=given[1]), kernel="materialized").context.sum().backward()
    torch.testing.assert_close(given[0].grad, given[1].grad, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("queries", "keys"), [(0, 4), (4, 0)])
def test_nothing_to_compute(queries, keys, kernels):
    problem = random_problem(queries=queries, keys=keys, dtype=torch.float32)
    assert torch.equal(context(problem), torch.zeros(2, 2, queries, 3))
    assert not kernels


def test_a_negative_scale_and_a_temperature():
    spec = AttentionSpec(score=Cosine(scale=-3.0), normalizer=Softmax(temperature=2.0), masks=[SlidingWindow(left=2)])
    problem = random_problem(queries=9, keys=9, dtype=torch.float32, spec=spec)
    close(context(problem), problem)


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("mask", [None, torch.randn(7, 1, 5, 5), torch.randn(5, 5)], ids=["none", "own", "one"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_more_sequences_than_a_grid_has_are_launched_in_parts(monkeypatch, kernels, dtype, mask, kv_heads):
    monkeypatch.setattr(cuda_attention, "_MOST_SEQUENCES", 3)
    problem = random_problem(batch=7, heads=4, kv_heads=kv_heads, queries=5, keys=5, dtype=dtype, mask=mask)
    close(context(problem), problem)
    assert len(kernels) == 3


def test_float64_is_refused():
    assert "float64" in (unsuitable("fused", AttentionSpec(), torch.float64, Needs(device="cuda")) or "")
    assert unsuitable("fused", AttentionSpec(), torch.float64, Needs()) is None
    with pytest.raises(ValueError, match="float64"):
        context(random_problem())


def test_before_ampere_bfloat16_is_computed_in_float32(monkeypatch, kernels):
    monkeypatch.setattr(cuda_attention, "generation", lambda: 7)
    problem = random_problem(queries=9, keys=9, dtype=torch.bfloat16, spec=AttentionSpec(masks=[SlidingWindow(left=2)]))
    close(context(problem), problem)
    assert kernels == ["efficient"]


@pytest.mark.sampled(length=2, masks=1)
@pytest.mark.parametrize(
    ("length", "masks", "batch", "kernel"),
    [
        (2047, [Causal()], 1, "flash"),
        (2049, [Causal()], 1, "cudnn"),
        (2049, [], 1, "flash"),
        (2304, [], 1, "cudnn"),
        (2304, [Causal()], 2, "flash"),
        (2304, [Causal(), SlidingWindow(left=3)], 1, "flash"),
    ],
)
def test_cudnn_takes_long_sequences_alone(length, masks, batch, kernel, kernels):
    spec = AttentionSpec(masks=masks)
    problem = random_problem(
        batch=batch, heads=1, queries=length, keys=length, width=8, value_width=8, dtype=torch.bfloat16, spec=spec
    )
    found = context(problem)
    assert kernels == [kernel]
    torch.testing.assert_close(found, attend(problem, kernel="materialized").context, rtol=0, atol=2e-2)


def test_other_generations_take_flash(monkeypatch, kernels):
    monkeypatch.setattr(cuda_attention, "generation", lambda: 8)
    context(
        random_problem(batch=1, queries=2100, keys=2100, dtype=torch.bfloat16, spec=AttentionSpec(masks=[Causal()]))
    )
    assert kernels == ["flash"]


def test_lengths_are_padded_to_few():
    lengths = {cuda_attention.padded(length) for length in range(1024, 2**15)}
    assert len(lengths) <= 8 * 5 + 1
    assert all(length <= cuda_attention.padded(length) <= 1.125 * length for length in range(1024, 2**15))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "masks", [[], [Causal()], [Causal(align="bottom_right")], [Causal(), SlidingWindow(left=30)]], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(100, 100), (20, 100), (1500, 1500)])
def test_the_numbers_of_the_formula_on_a_gpu(queries, keys, dtype, masks, monkeypatch):
    monkeypatch.undo()
    problem = random_problem(
        batch=1,
        heads=4,
        queries=queries,
        keys=keys,
        width=64,
        value_width=64,
        dtype=dtype,
        spec=AttentionSpec(masks=masks),
    )
    on_gpu = replace(problem, **{name: getattr(problem, name).cuda() for name in "qkv"})
    expected = attend(
        replace(problem, **{name: getattr(problem, name).double() for name in "qkv"}), kernel="materialized"
    )
    found = attend(on_gpu, kernel="fused").context.cpu().double()
    torch.testing.assert_close(found, expected.context, rtol=0, atol=2e-2 if dtype.itemsize == 2 else 2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_more_sequences_than_a_grid_has_on_a_gpu(dtype, kv_heads, monkeypatch):
    monkeypatch.undo()
    problem = random_problem(batch=70_000, heads=2, kv_heads=kv_heads, queries=2, keys=3, dtype=dtype)
    on_gpu = replace(problem, **{name: getattr(problem, name).cuda().requires_grad_() for name in "qkv"})
    found = attend(on_gpu, kernel="fused").context
    found.sum().backward()
    assert bool(on_gpu.q.grad.isfinite().all())
    expected = plain_taps(replace(problem, **{name: getattr(problem, name).double() for name in "qkv"}))["context"]
    atol = 5e-2 if dtype.itemsize == 2 else 2e-3
    torch.testing.assert_close(found.detach().cpu().double(), expected, rtol=0, atol=atol)

"""Tensors in any layout, among memory of others, give the numbers of contiguous ones: kernels, specs and masks."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from tests.core.conftest import MASKS, SPECS
from torch import Tensor

from attention_contract.positions import Rope
from attention_contract.spec import AttentionSpec, Causal, SlidingWindow
from attention_service.core import slices
from attention_service.core.attention import attend
from attention_service.core.inputs import make_problem
from attention_service.core.kernels import KERNELS, Needs, unsuitable
from attention_service.core.kernels.fused import cpu_flash, cpu_slices
from attention_service.core.problem import Problem

NAMES = [entry.name for entry in KERNELS if not unsuitable(entry.name, AttentionSpec(), torch.float32, Needs())]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}


def laid_in(x: Tensor, strides: tuple[int, ...], offset: int = 0) -> Tensor:
    """The numbers of x with these strides, NaN all around them."""
    size = offset + 1 + sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True))
    view = torch.full((size + 7,), torch.nan, dtype=x.dtype).as_strided(x.shape, strides, offset)
    return view.copy_(x)


def sliced_columns(x: Tensor) -> Tensor:
    _, heads, rows, columns = x.shape
    return laid_in(x, (heads * rows * columns * 2, rows * columns * 2, columns * 2, 2))


def heads_last(x: Tensor) -> Tensor:
    """As ``torch.cat`` lays out halves that are one wide."""
    _, heads, rows, columns = x.shape
    return laid_in(x, (heads * rows * columns, 1, columns * heads, heads))


def columns_first(x: Tensor) -> Tensor:
    _, heads, rows, columns = x.shape
    return laid_in(x, (heads * rows * columns, rows * columns, 1, rows))


def apart(x: Tensor) -> Tensor:
    """Rows with a gap behind each, from the middle of their memory on."""
    _, heads, rows, columns = x.shape
    row = columns + 3
    return laid_in(x, (heads * rows * row + 5, rows * row, row, 1), offset=11)


def equal_heads(x: Tensor) -> Tensor:
    return apart(x[:, :1]).expand_as(x)


def equal_rows(x: Tensor) -> Tensor:
    return apart(x[:, :, :1]).expand_as(x)


def equal_columns(x: Tensor) -> Tensor:
    return apart(x[..., :1]).expand_as(x)


def overlapping(x: Tensor) -> Tensor:
    """Each row begins one number after the one before it, as windows over a signal do."""
    batch, heads, rows, columns = x.shape
    size = rows + columns - 1
    signal = torch.linspace(-2, 2, batch * heads * size).to(x.dtype)
    return signal.as_strided(x.shape, (heads * size, size, 1, 1))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    each.__name__: each
    for each in (
        sliced_columns, heads_last, columns_first, apart, equal_heads, equal_rows, equal_columns, overlapping,
    )
}  # fmt: skip


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """What is allocated and not filled holds NaN."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def in_slices(monkeypatch) -> None:
    """Calls of a few rows of one head."""
    monkeypatch.setattr(slices, "SLICE_FLOPS", 1.0)
    monkeypatch.setattr(cpu_slices, "LEAST_ROWS", 2)


def differentiated(problem: Problem, kernel: str, upstream: Tensor) -> list[Tensor]:
    """The context and the gradients of q, k and v, which are given as they are laid out."""
    leaves = [x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    q, k, v = leaves
    context = attend(replace(problem, q=q, k=k, v=v), kernel=kernel).context
    return [context, *torch.autograd.grad(context, leaves, upstream)]


def in_float64(problem: Problem, upstream: Tensor) -> list[Tensor]:
    """The same by the formula over contiguous tensors."""

    def plain(x: Tensor) -> Tensor:
        return x.double().contiguous() if x.is_floating_point() else x.contiguous()

    own = {name: plain(x) for name in ("q", "k", "v", "mask") if (x := getattr(problem, name)) is not None}
    learned = {name: plain(x) for name, x in problem.learned.items()}
    return differentiated(replace(problem, **own, learned=learned), "materialized", plain(upstream))


def hold_all_kernels_against_float64(problem: Problem, upstream: Tensor) -> None:
    spec, dtype = problem.spec, problem.q.dtype
    expected = in_float64(problem, upstream)
    for kernel in NAMES:
        if not unsuitable(kernel, spec, dtype, Needs()):
            for found, wanted in zip(differentiated(problem, kernel, upstream), expected, strict=True):
                torch.testing.assert_close(found.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def laid_out(problem: Problem, layout: Callable[[Tensor], Tensor]) -> tuple[Problem, Tensor]:
    upstream = torch.randn(*problem.q.shape[:3], problem.v.shape[3], generator=torch.Generator().manual_seed(9))
    laid = replace(problem, q=layout(problem.q), k=layout(problem.k), v=layout(problem.v))
    return laid, layout(upstream.to(problem.q.dtype))


@pytest.mark.sampled(name=16)  # each entry is held against the stages elsewhere
@pytest.mark.parametrize("name", [*SPECS, *(f"masks: {name}" for name in MASKS)])
def test_every_spec_and_mask_in_every_layout(name, make_problem):
    masks = name.removeprefix("masks: ")
    spec = SPECS[name] if name in SPECS else AttentionSpec(masks=MASKS[masks])
    for layout, width in zip(LAYOUTS.values(), cycle([2, 1, 3]), strict=False):
        given = make_problem(width=width, value_width=width, dtype=torch.float32, spec=spec)
        hold_all_kernels_against_float64(*laid_out(given, layout))


@pytest.mark.sampled
@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_fused_attention_in_slices_in_every_layout(layout, width, dtype, in_slices, make_problem):
    for masks in ([], [Causal()], [SlidingWindow(left=2, right=1)]):
        sizes = {"queries": 6, "keys": 6, "width": width, "value_width": width}
        given = make_problem(dtype=dtype, spec=AttentionSpec(masks=masks), **sizes)
        hold_all_kernels_against_float64(*laid_out(given, LAYOUTS[layout]))


@pytest.mark.sampled
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cut", [True, False], ids=["in slices", "whole"])
def test_masks_of_a_request_in_every_layout(layout, cut, request, make_problem):
    if cut:
        request.getfixturevalue("in_slices")
    given = make_problem(dtype=torch.float32, width=3)
    normal = torch.randn(2, 2, 4, 5, generator=torch.Generator().manual_seed(3))
    added = LAYOUTS[layout](normal)
    for mask in (added, added > 0, added[:1, :1], added[:, :, :1], added[..., :1], added.movedim(3, 2)[..., :4, :]):
        hold_all_kernels_against_float64(*laid_out(replace(given, mask=mask.contiguous()), apart))
        if mask.shape[2:] != (4, 4):
            hold_all_kernels_against_float64(*laid_out(replace(given, mask=mask), apart))


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("heads", [1, 2, 3])
def test_turned_queries_and_keys_of_narrow_heads(heads, width, style, in_slices):
    """Halves that are one wide are put together with the heads last."""
    x = torch.randn(1, 7, 3 * heads * width, generator=torch.Generator().manual_seed(1))
    spec = AttentionSpec(position=Rope(style=style, dim=2), masks=[Causal()])
    three = [part.unflatten(-1, (heads, width)).transpose(1, 2) for part in x.chunk(3, -1)]

    def problem(*by_head: Tensor) -> Problem:
        given = dict(zip(("query", "key", "value"), by_head, strict=True))
        return make_problem(spec, given, {}, lambda q, k, v: (q, k, v), projected=False)

    upstream = torch.randn(1, heads, 7, width, generator=torch.Generator().manual_seed(2))
    rotated, exact = problem(*three), problem(*(part.double() for part in three))
    assert rotated.q.stride(-1) != 1 or (heads, width, style) not in {(2, 2, "half"), (3, 2, "half")}
    expected = differentiated(exact, "materialized", upstream.double())
    for kernel in NAMES:
        for found, wanted in zip(differentiated(rotated, kernel, upstream), expected, strict=True):
            torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [*TOLERANCE, torch.float64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_flash_kernel_reads_rows_as_they_are_laid_out(layout, dtype):
    rng, lay = torch.Generator().manual_seed(0), LAYOUTS[layout]
    for width in (1, 2, 3, 8):
        q, k, v, gradient = (lay(torch.randn(2, 3, size, width, generator=rng).to(dtype)) for size in (3, 5, 5, 3))
        mask = lay(torch.randn(2, 1, 3, 5, generator=rng)).to(dtype)
        exact = [x.double().requires_grad_() for x in (q, k, v)]
        scores = 0.7 * exact[0] @ exact[1].mT + mask.double()
        wanted = scores.softmax(-1) @ exact[2]
        context, sums = cpu_flash.attend(q, k, v, mask, 0.7, causal=False, exact=True)
        found = cpu_flash.differentiate(gradient, (q, k, v), context, sums, mask, 0.7, causal=False)
        gradients = torch.autograd.grad(wanted, exact, gradient.double())
        for one, other in zip((context, sums, *found), (wanted, scores.logsumexp(-1), *gradients), strict=True):
            assert one.dtype == torch.promote_types(dtype, torch.float32)
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


def test_the_flash_kernel_refuses_what_the_public_function_does_not_pass_on_to_it():
    x, mask = torch.ones(1, 2, 3, 4), torch.zeros(1, 1, 3, 3)
    for q, k, v, added, causal in [
        (x, x[..., :3], x, None, False),
        (x, x, x[..., :3], None, False),
        (x, x[:, :, :0], x[:, :, :0], None, False),
        (x[:, :, :0], x, x, None, False),
        (x, x.repeat(1, 2, 1, 1), x.repeat(1, 2, 1, 1), None, False),
        (x, x.double(), x.double(), None, False),
        (x.int(), x.int(), x.int(), None, False),
        (x, x, x, mask, True),
        (x, x, x, mask[0, 0], False),
        (x, x, x, torch.zeros(1, 1, 3, 2), False),
        (x, x, x, mask.clone().requires_grad_(), False),
    ]:
        with pytest.raises(ValueError, match=r"meet|floating|mask"):
            cpu_flash.attend(q, k, v, added, 1.0, causal=causal, exact=False)
    context, sums = cpu_flash.attend(x, x, x, None, 1.0, causal=False, exact=True)
    with pytest.raises(ValueError, match="gradient"):
        cpu_flash.differentiate(x[..., :3], (x, x, x), context, sums, None, 1.0, causal=False)


def test_every_learned_tensor_in_another_layout(every_spec, make_problem):
    given = make_problem(width=2, value_width=2, dtype=torch.float32, spec=every_spec)
    learned = {name: _mirrored(x) for name, x in given.learned.items()}
    hold_all_kernels_against_float64(*laid_out(replace(given, learned=learned), heads_last))


def _mirrored(x: Tensor) -> Tensor:
    """The numbers of x with its first dimension fastest in memory."""
    return x.mT.clone(memory_format=torch.contiguous_format).mT if x.ndim > 1 else x

"""Projections and attention together against torch.nn.MultiheadAttention."""

import numpy as np
import pytest
import torch
from torch.nn import MultiheadAttention

from attention_contract.schemas.modules import ModuleConfig
from attention_contract.spec import AttentionSpec
from attention_service.core.attention import attend
from attention_service.core.kernels import KERNELS, Needs, unsuitable
from attention_service.core.multihead import (
    Sizes,
    initial_parameters,
    joint_projection,
    laid_side_by_side,
    parameter_shapes,
    project,
    project_jointly,
    project_out,
)
from attention_service.core.problem import Problem

BATCH, QUERIES, KEYS, D_MODEL, HEADS = 3, 6, 7, 24, 4
WIDTHS = {"same widths": {}, "own widths": {"kdim": 10, "vdim": 14}, "without biases": {"bias": False}}
DTYPES = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=str)
HERE = [entry.name for entry in KERNELS if not unsuitable(entry.name, AttentionSpec(), torch.float64, Needs())]


def split(module: MultiheadAttention) -> dict[str, torch.Tensor]:
    """The parameters of a MultiheadAttention by our names."""
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    parameters = {f"{name}_proj.weight": weight for name, weight in zip("qkv", weights, strict=True)}
    parameters["o_proj.weight"] = module.out_proj.weight
    if module.in_proj_bias is not None:
        parameters |= {f"{n}_proj.bias": b for n, b in zip("qkv", module.in_proj_bias.chunk(3), strict=True)}
        parameters["o_proj.bias"] = module.out_proj.bias
    return {name: parameter.detach() for name, parameter in parameters.items()}


def sizes_of(module: MultiheadAttention) -> Sizes:
    return Sizes.of(ModuleConfig(d_model=D_MODEL, num_heads=HEADS, key_width=module.kdim, value_width=module.vdim))


def ours(module, inputs, kernel, taps=(), spec=None, **masks):
    """Output and taps of the same module here."""
    parameters, sizes = split(module), sizes_of(module)
    q, k, v = project(parameters, sizes, *inputs)
    attended = attend(Problem(q, k, v, spec or AttentionSpec(), **masks), taps, kernel=kernel)
    return project_out(parameters, attended.context), attended.taps


def masks_of(kind, dtype):
    """The same mask in PyTorch's words (true hides) and in ours (true shows)."""
    generator = torch.Generator().manual_seed(4)
    hidden = torch.rand(QUERIES, KEYS, generator=generator) > 0.6
    hidden[:, 0] = False
    padding = torch.zeros(BATCH, KEYS, dtype=torch.bool)
    padding[1, 4:], padding[2, 1:] = True, True
    added = torch.randn(BATCH, HEADS, QUERIES, KEYS, generator=generator, dtype=dtype)
    match kind:
        case "none":
            return {}, {}
        case "bool":
            return {"attn_mask": hidden}, {"mask": ~hidden}
        case "float by head":
            return {"attn_mask": added.flatten(0, 1)}, {"mask": added}
        case "padding":
            return {"key_padding_mask": padding}, {"key_mask": ~padding}
        case "lengths":
            return {"key_padding_mask": padding}, {"key_lengths": torch.tensor([7, 4, 1])}
        case "bool and padding":
            return {"attn_mask": hidden, "key_padding_mask": padding}, {"mask": ~hidden, "key_mask": ~padding}
    raise AssertionError(kind)


@pytest.fixture(params=WIDTHS.values(), ids=WIDTHS)
def widths(request):
    return request.param


def make(dtype, bias=True, **widths):
    torch.manual_seed(0)
    module = MultiheadAttention(D_MODEL, HEADS, bias=bias, batch_first=True, dtype=dtype, **widths).eval()
    if bias:
        torch.nn.init.normal_(module.in_proj_bias)
        torch.nn.init.normal_(module.out_proj.bias)
    shapes = [(QUERIES, D_MODEL), (KEYS, module.kdim), (KEYS, module.vdim)]
    return module, [torch.randn(BATCH, *shape, dtype=dtype) for shape in shapes]


@pytest.mark.sampled
@DTYPES
@pytest.mark.parametrize("kind", ["none", "bool", "float by head", "padding", "lengths", "bool and padding"])
def test_output_and_weights(kind, widths, dtype, tolerance):
    module, inputs = make(dtype, **widths)
    theirs, mine = masks_of(kind, dtype)
    expected, weights = module(*inputs, **theirs, average_attn_weights=False)
    for kernel in HERE:
        output, taps = ours(module, inputs, kernel, ("weights",), **mine)
        torch.testing.assert_close(output, expected.detach(), rtol=0, atol=tolerance)
        torch.testing.assert_close(taps["weights"], weights.detach(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("kernel", HERE)
def test_gradients_of_inputs_and_parameters(kernel, widths):
    module, inputs = make(torch.float64, **widths)
    leaves = [x.requires_grad_() for x in inputs]
    upstream = torch.randn(BATCH, QUERIES, D_MODEL, dtype=torch.float64)
    theirs, mine = masks_of("bool and padding", torch.float64)
    expected = torch.autograd.grad(module(*leaves, **theirs, need_weights=False)[0], leaves, upstream)
    parameters = {name: parameter.requires_grad_() for name, parameter in split(module).items()}
    q, k, v = project(parameters, sizes_of(module), *leaves)
    output = project_out(parameters, attend(Problem(q, k, v, **mine), kernel=kernel).context)
    found = torch.autograd.grad(output, [*leaves, *parameters.values()], upstream)
    for mine_, theirs_ in zip(found, expected, strict=False):
        torch.testing.assert_close(mine_, theirs_, rtol=0, atol=1e-12)

    module(*inputs, **theirs, need_weights=False)[0].backward(upstream)
    in_proj = [p.grad.flatten() for name, p in module.named_parameters() if name.endswith("proj_weight")]
    mine_ = torch.cat([gradient.flatten() for gradient in found[3:6]])
    torch.testing.assert_close(mine_, torch.cat(in_proj), rtol=0, atol=1e-11)


def test_a_seed_gives_the_same_parameters_in_every_dtype():
    sizes = Sizes.of(ModuleConfig(d_model=12, num_heads=3, num_kv_heads=1, value_dim=5, key_width=7, bias=False))
    wide = initial_parameters(sizes, 3, torch.float64)
    assert {name: tuple(p.shape) for name, p in wide.items()} == parameter_shapes(sizes)
    assert set(wide) == {"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"}
    half = initial_parameters(sizes, 3, torch.bfloat16)
    for name, parameter in wide.items():
        assert half[name].equal(parameter.bfloat16())
        assert float(parameter.abs().max()) <= np.sqrt(6 / sum(parameter.shape))
    assert not wide["q_proj.weight"].equal(initial_parameters(sizes, 4, torch.float64)["q_proj.weight"])


def drawn(**config):
    sizes = Sizes.of(ModuleConfig(d_model=12, num_heads=4, **config))
    parameters = initial_parameters(sizes, 3, torch.float64)
    return sizes, {name: torch.randn_like(value) for name, value in parameters.items()}


@pytest.mark.parametrize("bias", [True, False, {"q_proj": True, "k_proj": False, "v_proj": True, "o_proj": True}])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_projections_side_by_side_are_the_same_and_one(bias, kv_heads):
    torch.manual_seed(0)
    sizes, apart = drawn(bias=bias, num_kv_heads=kv_heads)
    laid = laid_side_by_side(apart, sizes)
    assert all(laid[name].equal(value) for name, value in apart.items())
    joint = joint_projection(laid)
    if not isinstance(bias, bool):  # some have one and some have not: they are not made in one product
        assert joint is None
        return
    assert joint[0].data_ptr() == laid["q_proj.weight"].data_ptr()  # without a copy
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    for mine, other in zip(project_jointly(joint, sizes, x), project(apart, sizes, x, x, x), strict=True):
        assert mine.shape == other.shape
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


def test_what_only_seems_to_lie_side_by_side_is_not_taken_for_one():
    """As parameters do that were read from one file: neighbours, but of other widths, gaps, or another order."""
    whole = torch.randn(200, dtype=torch.float64)

    def at(start, rows, width):
        return whole[start : start + rows * width].view(rows, width)

    def joint(q, k, v):
        return joint_projection(dict(zip(("q_proj.weight", "k_proj.weight", "v_proj.weight"), (q, k, v), strict=True)))

    weight, bias = joint(at(0, 4, 6), at(24, 2, 6), at(36, 2, 6))
    assert weight.equal(whole[:48].view(8, 6))
    assert bias is None
    assert joint(at(0, 4, 6), at(24, 2, 3), at(30, 2, 3)) is None
    assert joint(at(0, 4, 6), at(30, 2, 6), at(42, 2, 6)) is None
    assert joint(at(24, 4, 6), at(0, 4, 6), at(48, 4, 6)) is None
    assert joint(at(0, 4, 6), at(24, 2, 6).clone(), at(36, 2, 6)) is None
    columns = whole[:48].view(6, 8)
    assert joint(columns[:, :4].t(), columns[:, 4:6].t(), columns[:, 6:].t()) is None

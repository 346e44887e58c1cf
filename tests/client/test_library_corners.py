"""Corners in which PyTorch and transformers answer otherwise than one would guess, beside the answers here.

docs/from-others.md has a table of them with the versions. A test that fails after an update shows a line to change.
"""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from attention_client import InvalidRequest
from attention_client.transformers import attach
from tests.client.transformers.families import tiny

pytestmark = pytest.mark.filterwarnings("ignore")
CAUSAL = {"masks": [{"name": "causal"}]}
IDS = torch.tensor([[3, 4, 5, 6, 7]])


def close(found, expected, tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), atol=tolerance, rtol=tolerance)


def qkv(length=6, width=8):
    return torch.randn(3, 1, 2, length, width, generator=torch.Generator().manual_seed(0))


def here(client, q, k, v, **fields):
    return client.attention.forward(q.float().numpy(), k.float().numpy(), v.float().numpy(), **fields).output


def multihead(client, heads):
    """PyTorch's layer, and the name of a module of its parameters."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(12, heads, batch_first=True).eval()
    nn.init.normal_(layer.in_proj_bias)
    nn.init.normal_(layer.out_proj.bias)
    weights, biases = (x.detach().chunk(3) for x in (layer.in_proj_weight, layer.in_proj_bias))
    parameters = {f"{name}_proj.weight": x for name, x in zip("qkv", weights, strict=True)}
    parameters |= {f"{name}_proj.bias": x for name, x in zip("qkv", biases, strict=True)}
    parameters |= {f"o_proj.{name}": x.detach() for name, x in layer.out_proj.named_parameters()}
    client.modules.create(f"corner{heads}", {"d_model": 12, "num_heads": heads}, parameters=parameters)
    return layer, f"corner{heads}"


@pytest.mark.parametrize(("heads", "without_gradients"), [(2, "nan"), (3, "bias")])
def test_a_sequence_of_padding_alone_gives_the_bias(client, heads, without_gradients):
    layer, name = multihead(client, heads)
    x, padding = torch.randn(2, 4, 12), torch.zeros(2, 4, dtype=torch.bool)
    padding[1] = True
    bias = layer.out_proj.bias.detach().expand(4, 12)
    theirs = layer(x, x, x, key_padding_mask=padding, need_weights=False)[0][1]
    close(theirs.detach(), bias)
    with torch.no_grad():
        theirs = layer(x, x, x, key_padding_mask=padding, need_weights=False)[0][1]
    assert bool(theirs.isnan().all()) == (without_gradients == "nan")
    assert layer(x, x, x, key_padding_mask=padding)[0][1].isnan().all()
    close(client.forward(name, x, key_mask=~padding).output[1], bias)
    client.modules.delete(name)


def test_a_mask_beside_a_causal_one_counts_in_every_operation(client):
    layer, name = multihead(client, 2)
    x = torch.randn(1, 4, 12)
    below = torch.ones(4, 4, dtype=torch.bool).tril(-1)  # hides the past: the opposite of a causal mask
    hides = {"attn_mask": below, "is_causal": True}
    expected = layer(x, x, x, attn_mask=below, need_weights=False)[0].detach()
    causal = layer(x, x, x, attn_mask=torch.ones(4, 4, dtype=torch.bool).triu(1), need_weights=False)[0]
    close(layer(x, x, x, **hides)[0].detach(), expected)
    with torch.no_grad():
        close(layer(x, x, x, **hides, need_weights=False)[0], expected)
    close(layer(x, x, x, **hides, need_weights=False)[0].detach(), causal.detach())  # the mask given is replaced
    for kept in (["output"], ["output", "weights"]):
        close(client.forward(name, x, mask=~below, return_=kept).output, expected)
    client.modules.delete(name)


@pytest.mark.parametrize("scale", [0.0, -0.5])
@pytest.mark.parametrize("kernel", ["fused", "blocked", "materialized"])
def test_a_causal_attention_may_have_a_scale_of_zero_or_below(client, scale, kernel):
    q, k, v = qkv()
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    assert scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).isnan().any()
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    spec = CAUSAL | {"score": {"name": "scaled_dot", "scale": scale}}
    close(here(client, q, k, v, spec=spec, kernel=kernel), expected)


def test_a_scale_below_zero_is_wrong_without_nan_in_bfloat16(client):
    q, k, v = qkv(64, 64)
    half = [x.bfloat16() for x in (q, k, v)]
    theirs = scaled_dot_product_attention(*half, is_causal=True, scale=-0.1)
    expected = scaled_dot_product_attention(
        *(x.float() for x in half), attn_mask=torch.ones(64, 64, dtype=torch.bool).tril(), scale=-0.1
    )
    assert theirs.isfinite().all()
    assert (theirs - expected).abs().max() > 1
    spec = CAUSAL | {"score": {"name": "scaled_dot", "scale": -0.1}}
    close(client.attention.forward(*half, spec=spec).output.astype(np.float32), expected, 2e-2)


def test_a_mask_and_a_causal_mask_are_both_obeyed(client):
    q, k, v = qkv()
    mask = torch.rand(6, 6, generator=torch.Generator().manual_seed(3)) < 0.6
    mask.fill_diagonal_(True)
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask.tril())
    close(scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=True), expected)  # of the default backend
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(RuntimeError, match="attn_mask should not be set"):
        scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=True)
    for kernel in ("fused", "blocked", "materialized"):
        close(here(client, q, k, v, spec=CAUSAL, mask=mask.numpy(), kernel=kernel), expected)


def test_a_nan_reaches_no_query_that_may_not_look_at_it(client):
    q, k, v = qkv()
    v[..., -1, :] = float("nan")
    assert scaled_dot_product_attention(q, k, v, is_causal=True).isnan().all()
    for kernel in ("fused", "blocked", "materialized"):
        found = here(client, q, k, v, spec=CAUSAL, kernel=kernel)
        assert np.isnan(found).any(-1)[0, 0].tolist() == [False] * 5 + [True]


def test_a_boolean_mask_of_four_dimensions_hides_in_every_implementation(client):
    window = torch.ones(5, 5, dtype=torch.bool).tril() & ~torch.ones(5, 5, dtype=torch.bool).tril(-2)
    window = window[None, None]
    with torch.no_grad():
        expected = tiny("llama", "sdpa")(IDS, attention_mask=window)[0]
        eager = tiny("llama", "eager")
        assert (eager(IDS, attention_mask=window)[0] - expected).abs().max() > 1  # added as 0 and 1
        for implementation in ("eager", "sdpa"):
            model = tiny("llama", implementation)
            with attach(model, client):
                close(model(IDS, attention_mask=window)[0], expected)


def test_a_mask_of_numbers_for_keys_is_refused(client):
    model = tiny("llama", "sdpa")
    added, kept = torch.tensor([[-1e9, 0.0, 0.0, 0.0, 0.0]]), torch.tensor([[1, 0, 0, 0, 0]])
    with torch.no_grad():
        close(model(IDS, attention_mask=added)[0][:, 0], model(IDS, attention_mask=kept)[0][:, 0])  # the reverse
    q = np.ones((1, 5, 4), np.float32)
    with pytest.raises(InvalidRequest, match="key_mask"):
        client.attention.forward(q, num_heads=1, key_mask=added.numpy())


def test_positions_hide_nothing(client):
    model, positions = tiny("llama", "sdpa"), torch.tensor([[0, 1, 2, 0, 1]])
    with torch.no_grad():
        alone = model(IDS[:, 3:])[0]
        close(model(IDS, position_ids=positions, use_cache=False)[0][:, 3:], alone)  # two documents
        assert (model(IDS, position_ids=positions)[0][:, 3:] - alone).abs().max() > 1  # with the default cache: one
    q = np.random.default_rng(0).normal(size=(1, 1, 5, 4)).astype(np.float32)
    spec = CAUSAL | {"position": {"name": "rope"}}
    found = client.attention.forward(q, spec=spec, positions=positions.numpy(), return_=["weights"])
    assert (found.weights[0, 0] > 0).tolist() == np.tri(5, dtype=bool).tolist()


def test_an_attached_model_keeps_its_masks(client):
    def plain(module, query, key, value, mask, scaling, **_):
        scores = query @ key.transpose(2, 3) * scaling
        scores = scores if mask is None else scores + mask
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    AttentionInterface.register("plain_corner", plain)
    model = tiny("gpt2", "sdpa")
    with torch.no_grad():
        expected = model(IDS)[0]
        model.set_attn_implementation("plain_corner")
        assert (model(IDS)[0] - expected).abs().max() > 1  # no mask of its name, so none at all
        model.set_attn_implementation("sdpa")
        with attach(model, client):
            close(model(IDS)[0], expected)

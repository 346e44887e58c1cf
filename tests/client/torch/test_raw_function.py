"""``remote_attention`` against float64 attention of torch, and its gradients against differences."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.functional import scaled_dot_product_attention

from attention_client.torch import remote_attention
from attention_contract.errors import ShapeMismatch

DOUBLE = torch.float64


def draw(*shape):
    return torch.randn(shape, dtype=DOUBLE, requires_grad=True)


@pytest.fixture
def three():
    return draw(2, 4, 3, 6), draw(2, 2, 5, 6), draw(2, 2, 5, 7)


def test_grouped_heads_and_a_float_mask_are_torchs(client, three):
    mask = draw(2, 1, 3, 5)
    upstream = torch.randn(2, 4, 3, 7, dtype=DOUBLE)
    expected = scaled_dot_product_attention(*three, attn_mask=mask, enable_gqa=True)
    found = remote_attention(*three, mask=mask, client=client)
    torch.testing.assert_close(found, expected)
    at = (*three, mask)
    pairs = zip(torch.autograd.grad(found, at, upstream), torch.autograd.grad(expected, at, upstream), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs)


def test_merged_heads_keep_their_layout(client):
    query, key = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    by_head = remote_attention(
        query.unflatten(2, (2, 4)).transpose(1, 2), key.unflatten(2, (2, 4)).transpose(1, 2), client=client
    )
    merged = remote_attention(query, key, num_heads=2, client=client)
    torch.testing.assert_close(merged, by_head.transpose(1, 2).flatten(2))


CASES = {
    "past and rope": ({"position": {"name": "rope"}, "masks": [{"name": "causal", "align": "bottom_right"}]}, True),
    "sinks and softcap": ({"softcap": 5.0, "normalizer": {"name": "softmax", "sinks": True}}, False),
}


@pytest.mark.sampled(spec=1, past=1)
@pytest.mark.parametrize(("spec", "past"), CASES.values(), ids=CASES)
def test_first_and_second_gradients_of_output_and_taps(client, spec, past):
    """For query, key, value, mask, past and learned parameters."""
    query, key, value = draw(1, 2, 3, 6), draw(1, 2, 3, 6), draw(1, 2, 3, 4)
    named = {"mask": draw(3, 5 if past else 3)}
    if past:
        named |= {"past_key": draw(1, 2, 2, 6), "past_value": draw(1, 2, 2, 4)}
    parameters = {} if past else {"sinks": draw(2)}

    def attended(query, key, value, *others):
        values = iter(others)
        inputs = {name: next(values) for name in named}
        given = {name: next(values) for name in parameters}
        output, taps = remote_attention(
            query, key, value, spec=spec, client=client, taps=["k", "weights"], parameters=given, **inputs
        )
        return output, taps["k"], taps["weights"]

    at = (query, key, value, *named.values(), *parameters.values())
    assert gradcheck(attended, at, fast_mode=True)
    assert gradgradcheck(attended, at, fast_mode=True)


def test_a_state_that_goes_on_has_gradients(client):
    spec = {"method": {"name": "linear", "normalize": False}, "masks": [{"name": "causal"}]}
    query, state = draw(1, 2, 3, 4), draw(1, 2, 4, 4)
    output = remote_attention(query, spec=spec, initial_state=state, client=client)
    (found,) = torch.autograd.grad(output.sum(), state)
    moved = remote_attention(query, spec=spec, initial_state=(state + 1e-5 * torch.ones_like(state)), client=client)
    torch.testing.assert_close(found.sum(), (moved - output).sum() / 1e-5, rtol=1e-4, atol=1e-6)


def test_a_gradient_may_come_from_a_tap_alone(client, three):
    _, taps = remote_attention(*three, taps=["scores"], client=client)
    upstream = torch.randn_like(taps["scores"])
    (found,) = torch.autograd.grad(taps["scores"], three[0], upstream)
    keys = three[1].repeat_interleave(2, 1)
    torch.testing.assert_close(found, upstream @ keys / 6**0.5)


def test_edits_are_part_of_both_passes(client, three):
    edits = [{"tap": "weights", "heads": [1], "set": 0}]
    output = remote_attention(*three, edits=edits, client=client)
    assert output[:, 1].abs().max() == 0
    (found,) = torch.autograd.grad(output.sum(), three[0])
    assert found[:, 1].abs().max() == 0
    assert found[:, 0].abs().max() > 0


def test_what_it_cannot_take_is_refused_by_name(client, sent, three):
    query, *_ = three
    with pytest.raises(ValueError, match="attn_mask: not an input of raw attention"):
        remote_attention(query, attn_mask=query, client=client)
    with pytest.raises(ValueError, match="taps: 'lse' has no gradient"):
        remote_attention(query, taps=["lse"], client=client)
    with pytest.raises(ValueError, match="edits: value and add cannot receive a gradient"):
        remote_attention(query, edits=[{"tap": "q", "value": query}], client=client)
    assert sent == []
    with pytest.raises(ShapeMismatch):
        remote_attention(query, torch.ones(2, 2, 5, 7), client=client)

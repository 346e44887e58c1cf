"""The requests of a training step: a pass that is kept, and what follows if it is not kept any longer."""

import pytest
import torch
from torch import nn

from attention_client.torch import RemoteMultiheadAttention, remote_attention


@pytest.fixture
def module(client):
    return RemoteMultiheadAttention(8, 2, batch_first=True, client=client)


def names(sent):
    return [name for name, _ in sent if name != "create_module"]


def test_a_step_sends_the_tensors_once(module, sent):
    x = torch.randn(1, 3, 8)
    module(x, x, x, need_weights=False)[0].sum().backward()
    assert names(sent) == ["create_pass", "backward"]
    assert sent[-1][1].keys() == {"id", "upstream"}
    assert sent[-2][1]["wrt"] == list(sent[-2][1]["parameters"])


def test_nothing_is_kept_that_needs_no_gradient_or_returns_taps(module, sent, client):
    x = torch.randn(1, 3, 8)
    with torch.no_grad():
        module(x, x, x, need_weights=False)
    remote_attention(x, client=client)
    module(x, x, x)[0].sum().backward()
    edits = [{"tap": "weights", "heads": [0], "set": 0}]
    remote_attention(x.clone().requires_grad_(), edits=edits, client=client).sum().backward()
    expected = ["forward", "raw_forward", "forward", "gradients", "raw_forward", "raw_gradients"]
    assert names(sent) == expected


def test_a_pass_that_is_gone_is_computed_again_with_the_same_gradients(module, sent, client):
    local = nn.MultiheadAttention(8, 2, batch_first=True)
    local.load_state_dict(module.state_dict())
    x = torch.randn(1, 3, 8)
    expected = torch.autograd.grad(local(x, x, x)[0].square().sum(), [*local.parameters()])
    loss = module(x, x, x, need_weights=False)[0].square().sum()
    client.passes.backward(_id_of(loss))  # uses the pass up
    for ours, theirs in zip(torch.autograd.grad(loss, [*module.parameters()]), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert names(sent) == ["create_pass", "backward", "gradients"]


def test_a_second_backward_pass_gives_the_same_gradients(client):
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    loss = remote_attention(x, client=client).square().sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, x), first)


def _id_of(loss):
    """The id of the kept pass, in the graph that leads to a loss."""
    node = loss.grad_fn
    while not hasattr(node, "kept"):
        node = node.next_functions[0][0]
    return node.kept

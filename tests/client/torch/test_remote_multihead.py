"""``RemoteMultiheadAttention`` against ``torch.nn.MultiheadAttention``: numbers, gradients, masks, options."""

import itertools

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

from attention_client.torch import RemoteMultiheadAttention
from attention_contract.errors import ModuleNotFound

B, H, L, S, E = 3, 2, 4, 5, 8
DOUBLE = torch.float64
OPTIONS = [
    {},
    {"batch_first": True},
    {"bias": False},
    {"kdim": 6, "vdim": 5},
    {"add_bias_kv": True},
    {"add_zero_attn": True, "batch_first": True},
    {"add_bias_kv": True, "add_zero_attn": True, "kdim": 6, "vdim": 5, "batch_first": True},
]


def pair(client, **options):
    """A local module and a remote one with the same parameters, none of them zero."""
    local = nn.MultiheadAttention(E, H, **{"dtype": DOUBLE} | options)
    for parameter in local.parameters():
        nn.init.normal_(parameter)
    remote = RemoteMultiheadAttention(E, H, **{"dtype": DOUBLE} | options, client=client)
    remote.load_state_dict(local.state_dict())
    return local, remote


def inputs(local, queries=L, keys=S, batch=B):
    """Query, key and value that need gradients, in the layout of a module; ``batch`` 0 for none."""
    shapes = [(queries, E), (keys, local.kdim), (keys, local.vdim)]
    if batch:
        shapes = [(batch, n, w) if local.batch_first else (n, batch, w) for n, w in shapes]
    return tuple(torch.randn(shape, dtype=DOUBLE, requires_grad=True) for shape in shapes)


def gradients(module, tensors, **arguments):
    """Output, weights, and the gradients of a loss of both with respect to all that need one."""
    output, weights = module(*tensors, **arguments)
    generator = torch.Generator().manual_seed(1)
    loss = (output * torch.randn(output.shape, generator=generator, dtype=output.dtype)).sum()
    if weights is not None:
        loss = loss + (weights * torch.randn(weights.shape, generator=generator, dtype=weights.dtype)).sum()
    at = [
        x for x in (*dict.fromkeys(tensors), *arguments.values(), *module.parameters()) if isinstance(x, torch.Tensor)
    ]
    at = [x for x in at if x.requires_grad]
    return output, weights, *torch.autograd.grad(loss, at)


def assert_same(client, local, remote, tensors, **arguments):
    expected, found = gradients(local, tensors, **arguments), gradients(remote, tensors, **arguments)
    assert len(expected) == len(found)
    for theirs, ours in zip(expected, found, strict=True):
        if theirs is None:
            assert ours is None
        else:
            torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=1e-9)


@pytest.mark.sampled
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("arguments", [{}, {"need_weights": False}, {"average_attn_weights": False}], ids=str)
def test_numbers_and_gradients_are_torchs(client, options, arguments):
    local, remote = pair(client, **options)
    assert_same(client, local, remote, inputs(local), **arguments)


@pytest.mark.parametrize("batch", [0, B])
@pytest.mark.parametrize("weights", [False, True])
def test_self_attention_sends_its_tokens_once(client, sent, batch, weights):
    local, remote = pair(client)
    tokens, *_ = inputs(local, L, L, batch)
    assert_same(client, local, remote, (tokens, tokens, tokens), need_weights=weights)
    assert all({"key", "value"}.isdisjoint(fields) for name, fields in sent if name != "create_module")


def masks(batch, queries=L, keys=S):
    """Of each kind and rank, none of which hides every key of a query."""
    pairs, every = (queries, keys), (max(batch, 1) * H, queries, keys)
    for shape in (pairs, every):
        forbidden = torch.rand(shape) < 0.4
        forbidden[..., 1] = False
        yield forbidden
        yield torch.randn(shape, dtype=DOUBLE, requires_grad=True)


def paddings(batch, keys=S):
    shape = (batch, keys) if batch else (keys,)
    padding = torch.zeros(shape, dtype=torch.bool)
    padding[..., 3:] = True
    return [padding, torch.randn(shape, dtype=DOUBLE, requires_grad=True)]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("options", "batch"), [({}, 0), ({"batch_first": True, "add_bias_kv": True, "add_zero_attn": True}, B)], ids=str
)
def test_every_mask_is_torchs(client, options, batch):
    local, remote = pair(client, **options)
    tensors = inputs(local, batch=batch)
    for mask, padding in itertools.product([None, *masks(batch)], [None, *paddings(batch)]):
        given = {"attn_mask": mask, "key_padding_mask": padding}
        same_kind = mask is None or padding is None or mask.dtype == padding.dtype  # torch warns of others
        if same_kind:
            assert_same(client, local, remote, tensors, **{name: x for name, x in given.items() if x is not None})


def test_a_mask_of_one_kind_beside_a_padding_mask_of_the_other(client):
    _, remote = pair(client)
    tensors = inputs(remote)
    (forbidden, *_), (padding, added) = masks(B), paddings(B)
    output, _ = remote(*tensors, attn_mask=forbidden, key_padding_mask=added)
    floats = torch.zeros(L, S, dtype=DOUBLE).masked_fill(forbidden, -torch.inf)
    torch.testing.assert_close(output, remote(*tensors, attn_mask=floats, key_padding_mask=added)[0])
    output, _ = remote(*tensors, attn_mask=floats, key_padding_mask=padding)
    torch.testing.assert_close(output, remote(*tensors, attn_mask=forbidden, key_padding_mask=padding)[0])


@pytest.mark.sampled
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}], ids=str)
def test_causal_attention_is_torchs(client, sent, weights, padded, options):
    local, remote = pair(client, **options)
    tensors = inputs(local, L, L)
    causal = torch.ones(L, L, dtype=torch.bool).triu(1)
    given = {"need_weights": weights} | ({"key_padding_mask": paddings(B, L)[0]} if padded else {})
    hinted = not options  # torch's hint hides the learned key too
    expected = gradients(local, tensors, attn_mask=causal, is_causal=hinted, **given)
    for arguments in ({"attn_mask": causal, "is_causal": True}, {"attn_mask": causal}, {"is_causal": True}):
        for theirs, ours in zip(expected, gradients(remote, tensors, **arguments, **given), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=1e-9)
    assert "mask" not in sent[-1][1]


@pytest.mark.parametrize("weights", [False, True])
def test_a_query_that_may_look_nowhere_gets_zeros_and_no_gradient(client, weights):
    _, remote = pair(client, bias=False)
    query, key, value = inputs(remote)
    forbidden = torch.zeros(L, S, dtype=torch.bool)
    forbidden[1] = True
    output, shown = remote(query, key, value, attn_mask=forbidden, need_weights=weights)
    output.sum().backward()
    assert output[1].abs().max() == query.grad[1].abs().max() == 0
    assert output[0].abs().min() > 0
    assert query.grad[0].abs().max() > 0
    assert shown is None or (shown[:, 1] == 0).all()


def test_the_state_goes_both_ways(client):
    for options in OPTIONS:
        local, remote = pair(client, **options)
        assert list(local.state_dict()) == list(remote.state_dict())
        local.load_state_dict(remote.state_dict())
        shared = RemoteMultiheadAttention.of(local, client)
        assert [id(x) for x in shared.parameters()] == [id(x) for x in local.parameters()]
        tensors = inputs(local)
        torch.testing.assert_close(shared(*tensors)[0], local(*tensors)[0])


def test_the_first_parameters_are_drawn_as_torch_draws_them(client):
    torch.manual_seed(3)
    local = nn.MultiheadAttention(E, H, add_bias_kv=True)
    torch.manual_seed(3)
    remote = RemoteMultiheadAttention(E, H, add_bias_kv=True, client=client)
    for name, value in local.state_dict().items():
        assert torch.equal(remote.state_dict()[name], value), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_it_computes_in_the_dtype_of_its_parameters(client, dtype):
    local, remote = pair(client)
    tensors = inputs(local)
    remote.to(dtype)
    output, weights = remote(*(x.to(dtype) for x in tensors))
    assert output.dtype == weights.dtype == dtype
    output.sum().backward()
    assert {parameter.grad.dtype for parameter in remote.parameters()} == {dtype}
    tolerance = 30 * torch.finfo(dtype).eps
    torch.testing.assert_close(output.to(DOUBLE), local(*tensors)[0], atol=tolerance * 30, rtol=tolerance)


def test_encoder_layers_leave_the_attention_to_it(client, sent):
    layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True).eval()
    tokens = torch.randn(B, L, E)
    with torch.inference_mode():
        expected = layer(tokens)
        layer.self_attn = RemoteMultiheadAttention.of(layer.self_attn, client)
        torch.testing.assert_close(layer(tokens), expected, atol=1e-5, rtol=1e-5)
    assert [name for name, _ in sent if name != "create_module"] == ["forward"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_refused_with_the_way_out(client, sent):
    layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=True).eval()
    for each in encoder.layers:
        each.self_attn = RemoteMultiheadAttention.of(each.self_attn, client)
    padding = torch.arange(L) >= torch.tensor([[L], [2], [3]])
    with torch.inference_mode(), pytest.raises(ValueError, match="enable_nested_tensor=False"):
        encoder(torch.randn(B, L, E), src_key_padding_mask=padding)
    assert sent == []
    encoder.use_nested_tensor = False
    with torch.inference_mode():
        assert encoder(torch.randn(B, L, E), src_key_padding_mask=padding).shape == (B, L, E)


# ── gradients ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_first_and_second_gradients_are_those_of_differences(client):
    _, remote = pair(client, add_bias_kv=True, kdim=6, vdim=5)
    tensors = inputs(remote, 2, 3, 2)
    mask, padding = (torch.randn(2, 3, dtype=DOUBLE, requires_grad=True) for _ in range(2))

    def attended(query, key, value, mask, padding, *_):
        return remote(query, key, value, attn_mask=mask, key_padding_mask=padding)

    at = (*tensors, mask, padding, *remote.parameters())
    assert gradcheck(attended, at, fast_mode=True)
    assert gradgradcheck(attended, at, fast_mode=True)


def test_only_what_needs_a_gradient_is_requested(client, sent):
    _, remote = pair(client)
    query, key, value = inputs(remote)
    remote.requires_grad_(requires_grad=False)
    remote.out_proj.weight.requires_grad_()
    output, _ = remote(query, key.detach(), value.detach())
    output.sum().backward()
    assert sent[-1][0] == "gradients"
    assert sent[-1][1]["wrt"] == ["query", "o_proj.weight"]


def test_nothing_is_requested_without_gradients(client, sent):
    _, remote = pair(client)
    tensors = inputs(remote)
    with torch.no_grad():
        assert not remote(*tensors)[0].requires_grad
    remote.requires_grad_(requires_grad=False)
    assert not remote(*(x.detach() for x in tensors))[0].requires_grad
    assert "gradients" not in [name for name, _ in sent]


@pytest.mark.parametrize("changed", ["in_proj_weight", "query", "mask"])
def test_a_change_between_forward_and_backward_is_an_error(client, sent, changed):
    _, remote = pair(client)
    query, key, value = inputs(remote)
    mask = torch.zeros(L, S, dtype=DOUBLE)
    output, _ = remote(query, key, value, attn_mask=mask)
    with torch.no_grad():
        {"in_proj_weight": remote.in_proj_weight, "query": query, "mask": mask}[changed].add_(1)
    with pytest.raises(RuntimeError, match=r"modified (by an )?in ?place"):
        output.sum().backward()
    assert "gradients" not in [name for name, _ in sent]


@pytest.mark.slow
def test_dropout_drops_the_same_weights_on_the_way_back(client):
    _, remote = pair(client, dropout=0.5)
    tensors = inputs(remote, 2, 3, 2)

    def attended(*tensors):
        torch.manual_seed(4)
        return remote(*tensors, need_weights=False)[0]

    assert gradcheck(attended, tensors, fast_mode=True)
    assert gradgradcheck(attended, tensors, fast_mode=True)
    first, second = (remote(*tensors)[0] for _ in range(2))
    assert not torch.equal(first, second)
    remote.eval()
    first, second = (remote(*tensors)[0] for _ in range(2))
    assert torch.equal(first, second)


# ── the server's module, and what is refused ─────────────────────────────────────────────────────────────────────────


def test_modules_of_one_config_share_one_on_the_server_that_is_made_again_when_it_is_gone(client):
    local, remote = pair(client)
    _, other = pair(client)
    tensors = inputs(local)
    made = {module.name for module in client.modules.list().modules}
    expected = remote(*tensors)[0]
    other(*tensors)
    names = [module.name for module in client.modules.list().modules]
    (name,) = {each for each in names if each.startswith("torch-")} - made or {remote_name(remote)}
    assert not client.modules.get(name).durable
    client.modules.delete(name)
    with pytest.raises(ModuleNotFound):
        client.modules.get(name)
    assert torch.equal(remote(*tensors)[0], expected)


def remote_name(remote):
    from attention_client.torch.connection import module_name

    return module_name(remote._config(causal=False))


@pytest.mark.parametrize(
    ("arguments", "detail"),
    [
        ({"attn_mask": torch.zeros(L, S, dtype=torch.int64)}, "attn_mask: expected bool"),
        ({"attn_mask": torch.zeros(S, L)}, r"attn_mask: expected shape \[4, 5\] or \[6, 4, 5\], got \[5, 4\]"),
        ({"key_padding_mask": torch.zeros(B, L)}, r"key_padding_mask: expected shape \[3, 5\], got \[3, 4\]"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused_without_a_request(client, sent, arguments, detail):
    _, remote = pair(client)
    with pytest.raises(ValueError, match=detail):
        remote(*inputs(remote), **arguments)
    assert sent == []


def test_inputs_of_different_ranks_are_refused(client, sent):
    _, remote = pair(client)
    query, key, value = inputs(remote)
    with pytest.raises(ValueError, match="of 3 dimensions, or of 2"):
        remote(query[0], key, value)
    assert sent == []

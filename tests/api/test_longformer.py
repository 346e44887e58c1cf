"""Global tokens with projections of their own, against the Longformer of transformers."""

import numpy as np
import pytest
import torch
from transformers.models.longformer.configuration_longformer import LongformerConfig
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

from attention_client import InvalidRequest

WIDTH, HEADS, WINDOW, LENGTH, BATCH = 8, 2, 2, 16, 2
GLOBALS = [0, 5, 6]
WINDOWED = {"name": "sliding_window", "left": WINDOW, "right": WINDOW}


def spec_of(positions, projections="separate"):
    tokens = {"name": "global_tokens", "positions": positions, "projections": projections}
    return {"masks": [{"name": "any", "of": [WINDOWED, tokens]}]}


SPEC = spec_of(GLOBALS)
ROLES = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
ROLES |= {f"{role}_global": name.replace("proj", "global") for role, name in ROLES.items()}


@pytest.fixture(scope="module")
def theirs():
    with pytest.MonkeyPatch.context() as patch:
        # It asks for a softmax in float32, of whatever it computes; in float64 it can be compared more closely.
        softmax = torch.nn.functional.softmax
        patch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim))
        yield made()


def made():
    torch.manual_seed(1)
    config = LongformerConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        attention_window=[2 * WINDOW],
        attention_probs_dropout_prob=0.0,
        num_hidden_layers=1,
    )
    return LongformerSelfAttention(config, layer_id=0).double().eval()


@pytest.fixture(scope="module")
def client(client, theirs):
    state = {name: x.detach() for name, x in theirs.state_dict().items()}
    parameters = {
        f"{ours}.{kind}": state[f"{role}.{kind}"] for role, ours in ROLES.items() for kind in ("weight", "bias")
    }
    parameters |= {"o_proj.weight": torch.eye(WIDTH).double()}
    config = {"d_model": WIDTH, "num_heads": HEADS, "spec": SPEC}
    client.modules.create("longformer", config, parameters=parameters)
    client.modules.create("longformer.own", config | {"spec": spec_of([])}, parameters=parameters)
    return client


def forward(theirs, x, padding=0, globals_of=(GLOBALS,) * BATCH):
    """Their output; the last tokens of the first sequence may be padding."""
    mask = torch.zeros(BATCH, LENGTH)
    for row, positions in zip(mask, globals_of, strict=True):
        row[positions] = 10000
    if padding:
        mask[0, -padding:] = -10000
    arguments = {"is_index_masked": mask < 0, "is_index_global_attn": mask > 0, "is_global_attn": True}
    return theirs(x, attention_mask=mask, **arguments)[0]


def marked(globals_of):
    mask = np.zeros((len(globals_of), LENGTH), bool)
    for row, positions in zip(mask, globals_of, strict=True):
        row[positions] = True
    return mask


FEW, MANY = ([2], [0, 2, 9]), ([0, 5, 6], [3])


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kernel", "own", "padding"),
    [
        ("fused", None, 3), ("fused", FEW, 0), ("materialized", None, 0), ("materialized", MANY, 3),
        ("blocked", None, 3), ("blocked", MANY, 0), (None, FEW, 3),
    ],
)  # fmt: skip
def test_every_kernel_gives_the_numbers_of_transformers(client, theirs, kernel, own, padding):
    """Global tokens are those of the spec, or each sequence has its own."""
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    expected = forward(theirs, x, padding, own or (GLOBALS,) * BATCH)
    upstream = torch.randn_like(expected)
    real = np.ones((BATCH, LENGTH), bool)
    real[0, LENGTH - padding :] = False
    upstream[~torch.tensor(real)] = 0  # the outputs at padding do not matter
    gradients = torch.autograd.grad(expected, [x, *theirs.parameters()], upstream)
    name = "longformer.own" if own else "longformer"
    body = {"key_mask": real, "kernel": kernel} | ({"global_mask": marked(own)} if own else {})
    reply = client.forward(name, x, **body)
    np.testing.assert_allclose(reply.output[real], expected.detach()[real], rtol=0, atol=1e-10)
    found = client.gradients(name, x, upstream=upstream, wrt=["query", "parameters"], **body)
    np.testing.assert_allclose(found.gradients["query"][real], gradients[0][real], rtol=0, atol=1e-10)
    for (theirs_name, _), gradient in zip(theirs.named_parameters(), gradients[1:], strict=True):
        role, _, kind = theirs_name.partition(".")
        ours = found.gradients[f"{ROLES[role]}.{kind}"]
        np.testing.assert_allclose(ours, gradient, rtol=0, atol=1e-10, err_msg=theirs_name)


@pytest.mark.slow
def test_weights_and_gradients_of_taps_follow_the_global_tokens_of_a_request(client):
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    body = {"global_mask": marked(([0, 5, 6], [3]))}
    taps = client.forward("longformer.own", x, **body, return_=["weights"])
    looked = client.weights("longformer.own", x, **body)
    np.testing.assert_allclose(looked.weights, taps.weights, rtol=0, atol=1e-12)
    checked = client.gradients("longformer.own", x, **body, wrt=["scores", "q_global.weight"], check=True)
    assert all(check.passed for check in checked.check.values()), checked.check


PLACES = (([2, 15], [0, 2, 9]), ([], [7]), ([], []))
SPECS = (spec_of([5], "shared"), {"masks": [WINDOWED]}, {})


@pytest.mark.parametrize(
    ("spec", "globals_of", "kernel"),
    [
        (spec, globals_of, ("fused", "blocked", None)[(row + column) % 3])
        for row, spec in enumerate(SPECS)
        for column, globals_of in enumerate(PLACES)
    ],
)
def test_global_tokens_of_a_request_are_a_mask(client, globals_of, spec, kernel):
    rng = np.random.default_rng(1)
    q, k, v, upstream = (rng.standard_normal((BATCH, 2, LENGTH, 4)) for _ in range(4))
    at, marks = np.arange(LENGTH), marked(globals_of)
    allowed = np.abs(at[:, None] - at) <= WINDOW if spec else np.ones((LENGTH, LENGTH), bool)
    always = np.isin(at, [5]) if spec == spec_of([5], "shared") else np.zeros(LENGTH, bool)
    dense = allowed | (marks | always)[:, :, None] | (marks | always)[:, None, :]
    wrt = ["query", "key", "value"]
    expected = client.attention.gradients(q, k, v, mask=dense[:, None], upstream=upstream, wrt=wrt, return_=["output"])
    body = {"spec": spec, "global_mask": marks, "kernel": kernel}
    found = client.attention.gradients(q, k, v, upstream=upstream, wrt=wrt, return_=["output"], **body)
    np.testing.assert_allclose(found.output, expected.output, rtol=0, atol=1e-12)
    for name in wrt:
        np.testing.assert_allclose(found.gradients[name], expected.gradients[name], rtol=0, atol=1e-12)
    output = client.attention.forward(q, k, v, **body).output
    np.testing.assert_allclose(output, expected.output, rtol=0, atol=1e-12)


def test_global_tokens_are_counted_as_offsets_say(client):
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((BATCH, 2, LENGTH, 4)) for _ in range(3))
    body = {"spec": spec_of([], "shared"), "global_mask": marked([[1, 9], [4]])}
    whole = client.attention.forward(q, k, v, **body).output
    rest = client.attention.forward(
        q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], past_key=k[:, :, :3], past_value=v[:, :, :3], **body
    )
    np.testing.assert_allclose(rest.output, whole[:, :, 3:], rtol=0, atol=1e-12)


def test_a_global_mask_that_fits_nothing_is_refused(client):
    x = np.zeros((1, LENGTH, WIDTH))
    causal = {"masks": [{"name": "causal"}], "method": {"name": "linear"}}
    for given in (
        {"global_mask": np.ones((1, LENGTH + 1), bool)},
        {"global_mask": np.ones(LENGTH, bool)},
        {"global_mask": np.ones((1, LENGTH), bool), "spec": causal},
    ):
        with pytest.raises(InvalidRequest) as error:
            client.attention.forward(x, num_heads=HEADS, **given)
        assert error.value.param == "global_mask"


@pytest.mark.slow
def test_taps_are_those_of_the_projections_that_a_query_has(client, theirs):
    x = torch.randn(1, LENGTH, WIDTH, dtype=torch.float64)
    taps = ["q", "k", "scores", "weights", "context", "lse", "output"]
    reply = client.forward("longformer", x, return_=taps)
    for rows, suffix in ((GLOBALS, "_global"), ([1, 2, 3, 15], "")):
        q, k, v = (
            getattr(theirs, f"{role}{suffix}")(x).view(1, LENGTH, HEADS, -1).transpose(1, 2).detach()
            for role in ("query", "key", "value")
        )
        np.testing.assert_allclose(reply.q[:, :, rows], q[:, :, rows], rtol=0, atol=1e-12)
        scores = (q @ k.mT)[:, :, rows] / (WIDTH / HEADS) ** 0.5
        np.testing.assert_allclose(reply.scores[:, :, rows], scores, rtol=0, atol=1e-12)
        np.testing.assert_allclose(reply.weights[:, :, rows] @ v.numpy(), reply.context[:, :, rows], rtol=0, atol=1e-12)
    selected = client.forward("longformer", x, return_=["weights"], select={"queries": [5, 4], "heads": [1]})
    np.testing.assert_allclose(selected.weights, reply.weights[:, 1:, [5, 4]], rtol=0, atol=1e-14)
    checked = client.gradients("longformer", x, wrt=["weights", "q", "k", "scores", "q_global.weight"], check=True)
    assert all(check.passed for check in checked.check.values()), checked.check


def test_rows_of_a_batch_may_stand_at_different_places(client):
    x = np.random.default_rng(0).standard_normal((1, LENGTH, WIDTH))
    both = client.forward("longformer", np.concatenate([x, x]), offsets=[0, 2], return_=["output", "weights"])
    for row, offset in enumerate((0, 2)):
        alone = client.forward("longformer", x, offsets=offset, return_=["output", "weights"])
        np.testing.assert_allclose(both.output[row], alone.output[0], rtol=0, atol=1e-12)
        np.testing.assert_allclose(both.weights[row], alone.weights[0], rtol=0, atol=1e-12)


def test_what_has_no_meaning_is_refused(client):
    x = np.zeros((1, 2, HEADS * 4))
    with pytest.raises(InvalidRequest, match="shared"):
        client.attention.forward(x, num_heads=HEADS, spec=SPEC)
    past = np.zeros((1, HEADS, 3, WIDTH // HEADS))
    with pytest.raises(InvalidRequest, match="the whole sequence"):
        client.forward("longformer", np.zeros((1, 2, WIDTH)), past_key=past, past_value=past)


@pytest.mark.slow
def test_cost_counts_the_projections_and_rows_apart(client):
    shared = {"masks": [{"name": "global_tokens", "positions": GLOBALS}]}
    client.modules.create("longformer.shared", {"d_model": WIDTH, "num_heads": HEADS, "spec": shared}, seed=0)
    apart, together = (
        client.complexity(name, 16, memory_bytes=2**20).costs[0] for name in ("longformer", "longformer.shared")
    )
    assert apart.forward.dense.projections == 2 * together.forward.dense.projections
    extra = apart.forward.dense.values - together.forward.dense.values
    assert extra == 2 * len(GLOBALS) * 16 * WIDTH

"""Every method against an implementation by somebody else, in float64."""

import warnings
from dataclasses import replace

import pytest
import torch
from linformer import LinformerSelfAttention
from transformers import NystromformerConfig
from transformers.models.minimax.configuration_minimax import MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention
from transformers.models.olmo_hybrid import modeling_olmo_hybrid
from transformers.models.qwen3_next import modeling_qwen3_next

from attention_contract import spec
from attention_contract.spec import AttentionSpec
from attention_service.core.attention import attend
from attention_service.core.methods.features import orthogonal_directions
from attention_service.core.problem import Problem, RunningInputs

CAUSAL = [spec.Causal()]


@pytest.fixture(scope="module")
def performer():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it asks for distutils and for an older autocast
        return pytest.importorskip("performer_pytorch.performer_pytorch", reason="needs the extra dev")


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(length=40, width=8, value_width=6, heads=3):
    return (normal(2, heads, length, each, seed=seed) for seed, each in enumerate((width, width, value_width)))


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("features", ["elu", "relu"])
def test_linear_attention_is_performer_pytorchs(performer, features):
    q, k, v = inputs()
    phi = {"elu": lambda x: torch.nn.functional.elu(x) + 1, "relu": torch.relu}[features]
    found = attend(Problem(q, k, v, AttentionSpec(method=spec.Linear(features=features)))).context
    assert_close(found, performer.linear_attention(phi(q), phi(k), v))
    causal = AttentionSpec(method=spec.Linear(features="elu"), masks=CAUSAL)
    if features == "elu":
        expected = performer.causal_linear_attention_noncuda(phi(q), phi(k), v, chunk_size=8, eps=0.0)
        assert_close(attend(Problem(q, k, v, causal)).context, expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [8, 5])
def test_performer_is_performer_pytorchs_with_our_directions(performer, causal, width):
    q, k, v = inputs(width=width)
    directions = orthogonal_directions(16, width, seed=3)
    phi_q, phi_k = (performer.softmax_kernel(x, projection_matrix=directions, is_query=x is q, eps=0.0) for x in (q, k))
    method = spec.Performer(features=16, seed=3)
    found = attend(Problem(q, k, v, AttentionSpec(method=method, masks=CAUSAL if causal else []))).context
    if causal:
        assert_close(found, performer.causal_linear_attention_noncuda(phi_q, phi_k, v, chunk_size=8, eps=0.0))
    else:
        assert_close(found, performer.linear_attention(phi_q, phi_k, v))


def test_directions_are_orthogonal_normal_and_drawn_from_the_seed():
    directions = orthogonal_directions(24, 8, seed=0)
    for block in directions.split(8):
        products = block @ block.T
        assert_close(products, products.diag().diag())
    assert torch.equal(directions, orthogonal_directions(24, 8, seed=0))
    assert not torch.equal(directions, orthogonal_directions(24, 8, seed=1))
    many = orthogonal_directions(40_000, 4, seed=0)
    torch.testing.assert_close(many.T @ many / 40_000, torch.eye(4).double(), rtol=0, atol=0.03)
    torch.testing.assert_close(many.pow(4).mean(0), torch.full((4,), 3.0).double(), rtol=0, atol=0.25)


@pytest.mark.slow
def test_performers_features_are_unbiased_and_their_error_falls_with_the_root_of_their_number():
    q, k = normal(64, 8, seed=0) / 3, normal(64, 8, seed=1) / 3
    exact = (q @ k.T).exp()

    def errors(features, draws):
        for seed in range(draws):
            directions = orthogonal_directions(features, 8, seed)
            phi = [(x @ directions.T - x.square().sum(-1, keepdim=True) / 2).exp() for x in (q, k)]
            yield phi[0] @ phi[1].T / features - exact

    def rms(features):
        return torch.stack([each.square().mean().sqrt() for each in errors(features, 40)]).mean()

    mean = torch.stack(list(errors(16, 2000))).mean(0)
    assert mean.square().mean().sqrt() < 3 * rms(16) / 2000**0.5
    assert rms(16) / rms(256) == pytest.approx(4, rel=0.2)


@pytest.mark.parametrize(("landmarks", "length"), [(4, 32), (8, 32), (16, 16)])
def test_nystrom_is_nystromformers(landmarks, length):
    config = NystromformerConfig(
        hidden_size=24,
        num_attention_heads=3,
        num_landmarks=landmarks,
        segment_means_seq_len=length,
        inv_coeff_init_option=False,
        attention_probs_dropout_prob=0.0,
    )
    layer = NystromformerSelfAttention(config).double().eval()
    layer.conv_kernel_size = None
    layer.init_option = "exact"  # each matrix by its own norm; the other option mixes heads and sequences
    x = normal(2, length, 24)
    q, k, v = (
        project(x).view(2, length, 3, 8).transpose(1, 2).detach() for project in (layer.query, layer.key, layer.value)
    )
    method = spec.Nystrom(landmarks=landmarks)
    found = attend(Problem(q, k, v, AttentionSpec(method=method))).context
    with torch.no_grad():
        (expected,) = layer(x)
    assert_close(found.transpose(1, 2).flatten(2), expected)


@pytest.mark.parametrize("length", [1, 7, 16])
def test_nystrom_is_exact_where_every_token_is_a_landmark(length):
    q, k, v = inputs(length=length)
    described = AttentionSpec(method=spec.Nystrom(landmarks=16))
    problem = Problem(q, k, v, described)
    assert_close(attend(problem).context, attend(replace(problem, spec=AttentionSpec())).context)
    padded = replace(problem, key_lengths=torch.tensor([length, (length + 1) // 2]))
    exact = attend(replace(padded, spec=AttentionSpec())).context
    assert_close(attend(padded).context[0], exact[0])
    real = (length + 1) // 2
    assert_close(attend(padded).context[1, :, :real], exact[1, :, :real])


@pytest.mark.parametrize("length", [48, 30])
@pytest.mark.parametrize("shared", [False, True])
def test_linformer_is_its_port_to_torch(length, shared):
    torch.manual_seed(0)
    layer = LinformerSelfAttention(24, seq_len=48, k=8, heads=3, share_kv=shared).double().eval()
    x = normal(2, length, 24)
    projects = (layer.to_q, layer.to_k, layer.to_k if shared else layer.to_v)
    q, k, v = (project(x).view(2, length, 3, 8).transpose(1, 2).detach() for project in projects)
    learned = {"method.key_projection": layer.proj_k.detach().T}
    if not shared:
        learned["method.value_projection"] = layer.proj_v.detach().T
    described = AttentionSpec(method=spec.Linformer(rank=8, length=48, shared=shared))
    context = attend(Problem(q, k, v, described, learned=learned)).context
    with torch.no_grad():
        expected = layer(x)
        found = layer.to_out(context.transpose(1, 2).flatten(2))
    assert_close(found, expected)


RULES = {
    "recurrent, Qwen3-Next": modeling_qwen3_next.torch_recurrent_gated_delta_rule,
    "chunked, Olmo hybrid": modeling_olmo_hybrid.torch_chunk_gated_delta_rule,
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("state", [False, True])
def test_delta_rules_are_transformers(rule, gated, state, monkeypatch):
    q, k, v = inputs(length=150)
    log_gate = torch.nn.functional.logsigmoid(normal(2, 3, 150, seed=3)) * gated
    beta = normal(2, 3, 150, seed=4).sigmoid()
    initial = normal(2, 3, 8, 6, seed=5) if state else None
    method = spec.Linear(rule="gated_delta" if gated else "delta", scale=8**-0.5)
    running = RunningInputs(log_gate[..., None] if gated else None, beta[..., None], initial, wanted=True)
    found = attend(Problem(q, k, v, AttentionSpec(method=method, masks=CAUSAL), recurrent=running))

    # Theirs computes in float32; in float64, all that is left to differ is the arithmetic.
    monkeypatch.setattr(torch, "float32", torch.float64)
    theirs = [x.transpose(1, 2) for x in (q, k, v, log_gate, beta)]
    context, final = RULES[rule](*theirs, initial_state=initial, output_final_state=True, use_qk_l2norm_in_kernel=True)
    monkeypatch.undo()
    assert_close(found.context, context.transpose(1, 2))
    assert_close(found.state["final_state"], final)


@pytest.mark.parametrize("length", [5, 40])
def test_a_gated_state_is_minimaxs_lightning_attention(length):
    """What decays there at a rate of its own for each head is a gate that is the same at every token."""
    heads, width = 3, 8
    config = MiniMaxConfig(
        hidden_size=24, num_attention_heads=heads, head_dim=width, num_hidden_layers=2, block_size=16,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    theirs = MiniMaxLightningAttention(config, layer_idx=0).double()
    rate = theirs.slope_rate = theirs.get_slope_rate().double()
    theirs.query_decay, theirs.key_decay, theirs.diagonal_decay = theirs.decay_factors(rate)
    seen = {}
    theirs.norm.register_forward_pre_hook(lambda _, given: seen.update(context=given[0]))
    x = normal(2, length, 24)
    with torch.no_grad():
        _, final = theirs(x, position_embeddings=None, attention_mask=None)
        three = theirs.act_fn(theirs.qkv_proj(x)).view(2, length, heads, 3 * width).transpose(1, 2)
    q, k, v = three.split(width, dim=-1)
    running = RunningInputs(-rate.expand(2, -1, length, 1), wanted=True)
    method = spec.Linear(rule="gated", features="identity")
    found = attend(Problem(q, k, v, AttentionSpec(method=method, masks=CAUSAL), recurrent=running))
    assert_close(found.context.transpose(1, 2).flatten(2), seen["context"])
    assert_close(found.state["final_state"], final)

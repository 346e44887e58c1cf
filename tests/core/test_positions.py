"""Position encodings against the libraries that trained models with them, and their laws."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, T5Config, modeling_rope_utils
from transformers.models.bloom import modeling_bloom
from transformers.models.cohere import modeling_cohere
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama
from transformers.models.mpt import modeling_mpt
from transformers.models.t5.modeling_t5 import T5Attention

from attention_contract.positions import (
    Alibi,
    LearnedPosition,
    LinearScaling,
    LongRopeScaling,
    NtkScaling,
    RelativeBias,
    Rope,
    Sinusoidal,
    YarnScaling,
)
from attention_service.core.positions import POSITIONS, HeadSubset, rotary
from attention_service.core.positions.frequencies import frequencies
from attention_service.core.positions.token_positions import places_of

DOUBLE = torch.float64
SHORT, LONG = ([1 + step * c for c in range(16)] for step in (0.05, 1.5))
SCALINGS = {
    "none": {"name": "default"},
    "linear": {"name": "linear", "factor": 3.0},
    "dynamic": {"name": "ntk", "factor": 2.5},
    "llama3": {"name": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "llama3, other bounds": {"name": "llama3", "factor": 2.0, "low_freq_factor": 0.5, "high_freq_factor": 9.0},
    "yarn": {"name": "yarn", "factor": 4.0},
    "yarn, every option": {
        "name": "yarn", "factor": 7.0, "beta_fast": 9.0, "beta_slow": 2.0, "attention_factor": 1.25, "truncate": False
    },
    "yarn, a step": {"name": "yarn", "factor": 2.0, "original_max_position_embeddings": 4},
    "longrope": {"name": "longrope", "factor": 4.0},
    "longrope, attention factor": {"name": "longrope", "factor": 1.0, "attention_factor": 1.5},
}  # fmt: skip
"""Options as Transformers calls them, too."""


def normal(*shape, seed=0, dtype=DOUBLE):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE).to(dtype)


def rotated(rope, x, places):
    """x ``[B, H, L, D]`` turned at places ``[1 or B, L]``."""
    given = places_of(x.shape[2], x.shape[2], positions=places)
    return POSITIONS.of(rope).rotated(x, x, given)[0]


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# ── rope ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("dim", "width", "theta", "reach"),
    [(32, 32, 10_000.0, 7), (32, 32, 500_000.0, 64), (8, 32, 10_000.0, 65), (2, 8, 10_000.0, 300)],
)
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_transformers(name, reach, dim, width, theta, doubled):
    doubled(modeling_rope_utils, modeling_llama)
    options = dict(SCALINGS[name])
    if name == "dynamic" and dim == 2:
        dim = 4  # of 2 it is refused: the exponent is dim / (dim − 2)
    length = options.get("original_max_position_embeddings", 64)
    if options["name"] not in {"default", "linear"}:
        options["original_max_position_embeddings"] = length
    if options["name"] == "longrope":
        options |= {"short_factor": SHORT[: dim // 2], "long_factor": LONG[: dim // 2]}
    scaling = None if name == "none" else options
    kind = {"ntk": "dynamic"}.get(options["name"], options["name"])
    entries = options | {"rope_type": kind, "rope_theta": theta, "partial_rotary_factor": dim / width}
    if kind in {"default", "linear", "dynamic"}:
        entries.pop("original_max_position_embeddings", None)
    config = LlamaConfig(
        hidden_size=4 * width, num_attention_heads=4, head_dim=width, max_position_embeddings=length,
        rope_parameters=entries,
    )  # fmt: skip
    if entries["rope_type"] == "default":
        config.rope_parameters.pop("partial_rotary_factor")
        config.head_dim = dim
        expected, factor = modeling_llama.LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        init = modeling_rope_utils.ROPE_INIT_FUNCTIONS[entries["rope_type"]]
        expected, factor = init(config, torch.device("cpu"), seq_len=reach)
    assert expected.dtype == DOUBLE
    found, scale = frequencies(Rope(theta=theta, scaling=scaling), dim, torch.tensor([[reach]]))
    close(found.flatten(), expected)
    assert scale == pytest.approx(factor, abs=1e-12)


def test_ntk_without_an_original_length_is_as_long_as_the_factor_says():
    at = torch.tensor([[10]])
    found, _ = frequencies(Rope(scaling=NtkScaling(factor=4.0)), 16, at)
    dynamic = NtkScaling(factor=4.0, original_max_position_embeddings=100)
    # s = factor·n/L − (factor − 1) is the factor itself where n/L = (2·factor − 1)/factor.
    close(found, frequencies(Rope(scaling=dynamic), 16, torch.tensor([[175]]))[0])


@pytest.mark.parametrize(
    "scaling",
    [NtkScaling, partial(LongRopeScaling, short_factor=[1.0] * 4, long_factor=LONG[:4], attention_factor=1.0)],
)
def test_a_dynamic_scaling_goes_by_each_sequence_for_itself(scaling):
    longer = {"factor": 2.0, "original_max_position_embeddings": 4}
    rope = Rope(scaling=scaling(**longer))
    x = normal(2, 1, 3, 8)
    places = torch.tensor([[0, 1, 2], [7, 8, 9]])
    both = rotated(rope, x, places)
    close(both[:1], rotated(rope, x[:1], places[:1]))
    close(both[1:], rotated(rope, x[1:], places[1:]))
    close(both[:1], rotated(Rope(), x[:1], places[:1]))
    assert not both[1:].allclose(rotated(Rope(), x[1:], places[1:]))


PLACES = torch.tensor([[0, 1, 5, 100_000], [3, 2, 1, 7]])


def angles(dim, theta=10_000.0):
    return PLACES[..., None].double() * theta ** (-torch.arange(0, dim, 2, dtype=DOUBLE) / dim)


@pytest.mark.parametrize("dim", [8, 4])
def test_neighbours_turn_as_gpt_j_and_cohere_turn_them(dim, doubled):
    doubled(modeling_cohere)
    x = normal(2, 3, 4, 8)
    found = rotated(Rope(style="interleaved", dim=dim), x, PLACES)
    part = x[..., :dim].transpose(1, 2)  # GPT-J has the heads after the tokens
    expected = modeling_gptj.apply_rotary_pos_emb(part, angles(dim).sin(), angles(dim).cos()).transpose(1, 2)
    close(found[..., :dim], expected)
    twice = angles(dim).repeat_interleave(2, -1)
    close(
        found[..., :dim], modeling_cohere.apply_rotary_pos_emb(x[..., :dim], x[..., :dim], twice.cos(), twice.sin())[0]
    )
    assert found[..., dim:].equal(x[..., dim:])


def test_yarn_scales_what_is_turned_and_nothing_else():
    scaling = YarnScaling(factor=4.0, original_max_position_embeddings=64, attention_factor=3.0)
    x = normal(1, 2, 4, 8)
    found = rotated(Rope(dim=4, scaling=scaling), x, torch.zeros(1, 4, dtype=torch.int64))
    close(found, torch.cat([3 * x[..., :4], x[..., 4:]], -1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_far_places_are_angles_all_the_same(dtype):
    """The places are far beyond what float32 can count; what remains is the rounding of the result."""
    x = normal(1, 2, 3, 64, dtype=dtype)
    places = torch.tensor([[2**31 - 3, 2**31 - 2, 2**31 - 1]])
    assert (rotated(Rope(), x, places).double() - rotated(Rope(), x.double(), places)).abs().max() < 8 * torch.finfo(
        dtype
    ).eps


@settings(deadline=None, max_examples=60)
@given(
    st.integers(-1000, 1000), st.integers(-1000, 1000), st.integers(-1000, 1000),
    st.sampled_from(["half", "interleaved"]), st.sampled_from([None, 4, 8]),
    st.sampled_from([None, LinearScaling(factor=2.0), YarnScaling(factor=4.0, original_max_position_embeddings=64)]),
)  # fmt: skip
def test_scores_depend_on_the_distance_alone(p, j, shift, style, dim, scaling):
    rope = Rope(style=style, dim=dim, scaling=scaling)
    q, k = normal(1, 1, 1, 8), normal(1, 1, 1, 8, seed=1)

    def score(p, j):
        return rotated(rope, q, torch.tensor([[p]])) @ rotated(rope, k, torch.tensor([[j]])).mT

    close(score(p, j), score(p + shift, j + shift))


# ── biases ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def bias_of(options, queries, keys, heads, learned=None):
    return POSITIONS.of(options).bias(queries, keys, HeadSubset(heads, None), learned or {}, DOUBLE)


@pytest.mark.parametrize("heads", [1, 3, 8, 12, 71])
def test_slopes_are_those_of_bloom_and_mpt(heads, doubled):
    doubled(modeling_bloom, modeling_mpt)
    keys = torch.arange(5)[None]
    found = bias_of(Alibi(symmetric=False), torch.tensor([[0]]), keys, heads)  # [1, H, 1, K]
    expected = modeling_bloom.build_alibi_tensor(torch.ones(1, 5, dtype=torch.int64), heads, DOUBLE)
    close(found[0], expected)
    last = bias_of(Alibi(symmetric=False), torch.tensor([[4]]), keys, heads)
    close(last[0], modeling_mpt.build_mpt_alibi_tensor(heads, 5))


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (20, 800), (4, 5)])
def test_a_relative_bias_is_that_of_t5(bidirectional, buckets, furthest):
    config = T5Config(
        d_model=8, d_kv=4, num_heads=3, is_decoder=not bidirectional, relative_attention_num_buckets=buckets,
        relative_attention_max_distance=furthest,
    )  # fmt: skip
    layer = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).double()
    table = layer.relative_attention_bias.weight.detach().normal_()
    options = RelativeBias(num_buckets=buckets, max_distance=furthest, bidirectional=bidirectional)
    given = places_of(5, 1000, past=0, offsets=torch.tensor(500))
    found = bias_of(options, given.queries, given.keys, 3, {"relative_bias.weight": table})
    close(found, layer.compute_bias(5, 1000, past_seen_tokens=500).detach())


# ── added to the inputs ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("width", [8, 7, 1])
def test_sines_and_cosines_stand_beside_each_other(width):
    places = torch.tensor([[0, 1, 9999], [-5, 2**40, 3]])
    found = POSITIONS.of(Sinusoidal()).added(torch.zeros(2, 3, width, dtype=DOUBLE), places, {})
    for b, row in enumerate(places.tolist()):
        for i, p in enumerate(row):
            for c in range(width):
                angle = p * 10_000 ** (-(c - c % 2) / width)
                expected = math.cos(angle) if c % 2 else math.sin(angle)
                assert found[b, i, c].item() == pytest.approx(expected, abs=1e-10 if p < 2**40 else 1e-3)


def test_a_table_gives_a_row_for_each_place():
    table = normal(6, 4)
    places = torch.tensor([[5, 0, 3]])
    learned = {"position.weight": table}
    position = POSITIONS.of(LearnedPosition(length=6))
    x = normal(2, 3, 4, seed=1)
    close(position.added(x, places, learned), x + table[[5, 0, 3]])
    by_head = normal(2, 2, 3, 4, seed=2)
    close(position.added(by_head, places, learned), by_head + table[[5, 0, 3]])


# ── places ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_places_count_the_past_and_offsets_move_the_queries_alone():
    plain = places_of(2, 2, past=3)
    assert plain.queries.tolist() == [[3, 4]]
    assert plain.keys.tolist() == [[0, 1, 2, 3, 4]]
    assert plain.new_keys is plain.queries
    assert plain.reach.tolist() == [[5]]
    moved = places_of(2, 2, past=3, offsets=torch.tensor([0, -7, 2**63 - 1]))
    assert moved.queries[:2].tolist() == [[0, 1], [-7, -6]]
    assert moved.keys.tolist() == [[0, 1, 2, 3, 4]]
    assert moved.reach[:2].tolist() == [[5], [5]]
    given = places_of(2, 2, past=1, positions=torch.tensor([[4, 9], [0, 0]]))
    assert given.queries.tolist() == [[4, 9], [0, 0]]
    assert given.keys.tolist() == [[0, 4, 9], [0, 0, 0]]
    assert given.reach.tolist() == [[10], [1]]


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("dim", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("joint", [False, True])
def test_a_gpu_rotates_to_the_same_numbers(monkeypatch, joint, dtype, dim, style):
    """It converts as it computes, and turns queries and keys at once where they lie side by side."""
    together = torch.randn(2, 5, 6, 8, dtype=dtype).transpose(1, 2)
    q, k = together[:, :4], together[:, 4:] if joint else torch.randn(2, 2, 5, 8, dtype=dtype)
    entry = POSITIONS.of(Rope(style=style, dim=dim))
    places = places_of(5, 5, 3)
    expected = entry.rotated(q, k, places)
    monkeypatch.setattr(rotary, "on_gpu", lambda x: True)
    for found, other in zip(entry.rotated(q, k, places), expected, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found, other, rtol=0, atol={8: 1e-15, 4: 1e-6, 2: 2e-2}[dtype.itemsize])

"""Random trees of sessions: every number equals the forward pass over all inputs, uncached and in float64."""

import numpy as np
import pytest
from tests.runtime.sessions.session_tree import EXACT, Tree, create, engine_of, running

from attention_service.core.kv_cache import pages, slab
from attention_service.core.registry import variants

CAUSAL = {"masks": [{"name": "causal"}]}
SCORES = [
    {"name": "dot"}, {"name": "scaled_dot"}, {"name": "bilinear"}, {"name": "additive", "hidden": 3},
    {"name": "gaussian", "sigma": "learned"}, {"name": "cosine", "scale": "learned"},
]  # fmt: skip
NORMALIZERS = [
    {"name": "softmax", "temperature": 0.7}, {"name": "softmax", "sinks": True}, {"name": "sigmoid"},
    {"name": "sparsemax"}, {"name": "entmax15"},
]  # fmt: skip
POSITIONS = [
    {"name": "none"}, {"name": "rope"}, {"name": "rope", "dim": 2, "style": "interleaved"},
    {"name": "alibi"}, {"name": "relative_bias", "num_buckets": 6, "max_distance": 20},
    {"name": "sinusoidal"}, {"name": "learned", "length": 4096},
]  # fmt: skip
WINDOW = {"name": "sliding_window", "left": 5}
MASKS = [
    [{"name": "causal"}], [{"name": "causal"}, WINDOW], [{"name": "sliding_window", "left": 9, "right": 0}], [],
    [{"name": "global_tokens", "positions": [0, 7]}], [{"name": "prefix_lm", "length": 6}],
    [{"name": "causal"}, {"name": "block", "size": 8, "neighbours": 1}],
    [{"name": "causal"}, {"name": "strided", "stride": 3}],
    [{"name": "causal"}, {"name": "fixed", "stride": 4}], [{"name": "random_blocks", "size": 4, "count": 2}],
    [{"name": "causal"}, {"name": "documents", "lengths": [10, 17]}],
    [{"name": "any", "of": [WINDOW, {"name": "global_tokens", "positions": [2]}]}, {"name": "causal"}],
    [{"name": "all", "of": [{"name": "causal"}, WINDOW]}],
]  # fmt: skip
BESIDE = [
    {}, {}, {"softcap": 1.5}, {"qk_norm": {"over": "head"}}, {"add_bias_kv": True, "add_zero_attn": True},
    {"qk_norm": {"over": "all_heads", "unit_offset": True}, "softcap": 3.0},
]  # fmt: skip
SHAPES = [{}, {}, {"num_kv_heads": 4}, {"num_kv_heads": 1, "head_dim": 6, "value_dim": 3}, {"bias": False}]
TYPICAL = [
    CAUSAL,
    CAUSAL | {"position": {"name": "rope"}, "qk_norm": {"over": "head"}},
    CAUSAL | {"position": {"name": "alibi"}},
    CAUSAL | {"position": {"name": "relative_bias", "num_buckets": 8, "max_distance": 30, "bidirectional": False}},
    {"masks": [{"name": "causal"}, WINDOW], "normalizer": {"name": "softmax", "sinks": True}, "softcap": 2.0},
    {"masks": [{"name": "causal"}, {"name": "strided", "stride": 3}], "position": {"name": "learned", "length": 4096}},
]
"""The specs of the fast walks: most attend in place."""


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of a few tokens, and slabs of a few pages, so that short walks cross many."""
    monkeypatch.setattr(slab, "PAGE_TOKENS", 4)
    monkeypatch.setattr(pages, "SLAB_BYTES", 2**16)


def test_every_variant_has_its_turn() -> None:
    named = {
        "score": SCORES,
        "normalizer": NORMALIZERS,
        "position": POSITIONS,
        "mask": [each[-1] for each in MASKS if each],
    }
    named["mask"] = [*named["mask"], {"name": "causal"}, {"name": "any"}]
    for kind, options in named.items():
        assert {each["name"] for each in options} == {entry.name for entry in variants() if entry.kind == kind}


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.slow
async def test_typical_trees(tmp_path, small_pages, dtype: str) -> None:
    specs = TYPICAL if dtype == "float64" else TYPICAL[1:2]
    async with running(tmp_path) as engine:
        for seed, spec in enumerate(specs):
            await create(engine, f"m{seed}", spec, dtype=dtype)
            tree = Tree(engine, f"m{seed}", dtype, np.random.default_rng(seed), longest=4)
            await tree.walk(6)
            await tree.end()


def drawn(rng: np.random.Generator) -> dict:
    """A random spec."""

    def one(options: list) -> dict:
        return options[rng.integers(len(options))]

    plain = rng.random() < 0.5
    spec = {"masks": one(MASKS[:3] if plain else MASKS), "position": one(POSITIONS)} | one(BESIDE)
    if not plain:
        spec |= {"score": one(SCORES), "normalizer": one(NORMALIZERS)}
    return spec


def drawn_dtype(rng: np.random.Generator, spec: dict) -> str:
    """A random dtype. The gradients of sparse weights jump where a weight becomes zero: a narrow dtype sees others."""
    if spec.get("normalizer", {}).get("name") in {"sparsemax", "entmax15"}:
        return "float64"
    return str(rng.choice(["float64", "float64", "float32", "bfloat16"]))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 500, 50))
async def test_random_trees(tmp_path, request: pytest.FixtureRequest, first: int) -> None:
    """Fifty trees, each of another spec, shape and dtype; the server crashes in the middle of each fifth."""
    if first % 100:
        request.getfixturevalue("small_pages")
    engine = engine_of(tmp_path)
    await engine.start()
    for seed in range(first, first + 50):
        rng = np.random.default_rng(seed)
        spec, shape = drawn(rng), SHAPES[rng.integers(len(SHAPES))]
        dtype = drawn_dtype(rng, spec)
        try:
            await create(engine, f"m{seed}", spec, dtype=dtype, **shape)
            tree = Tree(engine, f"m{seed}", dtype, rng, longest=int(rng.choice([12, 90])))
            await tree.walk(14)
            if seed % 5 == 0:
                lost, engine = engine, engine_of(tmp_path)
                await engine.start()
                await tree.crash(engine)
                await lost.stop()
            await tree.walk(8)
            await tree.end()
            for name in tree.name, tree.name + EXACT:
                await engine.modules.delete(name)
        except BaseException as fault:
            fault.add_note(f"tree {seed}: {dtype}, {shape}, {spec}")
            raise
    await engine.stop()

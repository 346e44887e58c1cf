"""Replies of every kind that has a picture, of random numbers."""

import numpy as np

from attention_contract.reply_names import Names
from attention_contract.schemas.analyses.attribution import AttributionReply
from attention_contract.schemas.analyses.circuits import CircuitsReply
from attention_contract.schemas.analyses.effects import Effects, EffectsReply
from attention_contract.schemas.analyses.recording_statistics import RecordingStatistics, StatisticsOfAttention
from attention_contract.schemas.analyses.rollout import RecordingRollout
from attention_contract.schemas.analyses.similarity import ComparedPart, RecordingSimilarity
from attention_contract.schemas.attention import Ran
from attention_contract.schemas.weights import BY_KEY, NEEDS_PAIRS, HeadStatistics, WeightsDifferences, WeightsReply

RAN = Ran(
    kernel="fused", device="cpu", dtype="float32", flops=1, predicted_ms=1, predicted_low_ms=1, predicted_high_ms=1,
    compute_ms=1, cpu_ms=1, queue_ms=0, batch=1, peak_bytes=1,
)  # fmt: skip
ID = "0" * 32


def softmax(*shape, rng, spread=1.0):
    powers = np.exp(rng.normal(size=shape) * spread)
    return (powers / powers.sum(-1, keepdims=True)).astype(np.float32)


def weights(heads, queries, keys=None, *, signed=False):
    """Weights of each head with its statistics but those by key and of pairs; ``signed`` ones are differences."""
    rng = np.random.default_rng(heads)
    given = softmax(heads, queries, keys or queries, rng=rng)
    numbers = {
        name: rng.random(heads) * 10.0 ** rng.integers(-4, 3)
        for name in HeadStatistics.model_fields
        if name not in {"classes", *BY_KEY, *NEEDS_PAIRS}
    }
    statistics = HeadStatistics(**numbers, classes={"separators": rng.random(heads), "punctuation": rng.random(heads)})
    moved = WeightsDifferences(statistics=statistics, weights=given - given.mean(-1, keepdims=True)) if signed else None
    return WeightsReply(statistics=statistics, queries=np.array(queries), weights=given, differences=moved, ran=RAN)


def rollout(tokens=14, layers=12):
    """A rollout through so many layers, with the names of its request."""
    values = softmax(tokens, tokens, rng=np.random.default_rng(1)).astype(float)
    named, words = [f"layers.{at}" for at in range(layers)], [f"token{at}" for at in range(tokens)]
    reply = RecordingRollout(id=ID, layers=named, tokens=words, values=values, ran=RAN)
    return reply, Names("recording 12ab34cd", method="rollout")


def recorded_similarity(layers=6, heads=4):
    """The similarity of every pair of heads of several layers."""
    parts = [
        ComparedPart(layer=f"layers.{layer}", head=f"L{layer}H{head}")
        for layer in range(layers)
        for head in range(heads)
    ]
    values = np.random.default_rng(2).random((len(parts), len(parts)))
    reply = RecordingSimilarity(
        measure="jensen_shannon", values=values, ran=RAN, rows=parts, columns=parts, id=ID, with_=ID, tokens=9,
    )  # fmt: skip
    return reply, Names("recording 12ab34cd")


def recorded_statistics(layers=6, heads=12):
    """Statistics of every head of a recording."""
    rng = np.random.default_rng(3)
    attentions = [
        StatisticsOfAttention(
            name=f"layers.{layer}", heads=[str(head) for head in range(heads)], queries=9,
            statistics=HeadStatistics(
                entropy=rng.random(heads), previous_token=rng.random(heads) / 1e5, own_position=rng.random(heads),
                signed_distance=rng.normal(size=heads),
            ),
        )
        for layer in range(layers)
    ]  # fmt: skip
    return RecordingStatistics(id=ID, attentions=attentions), Names("recording 12ab34cd")


def circuit(values):
    sizes = values.sum(-1)
    return {"singular_values": values, "norm": sizes, "effective_rank": sizes, "stable_rank": sizes}


def circuits(heads=12):
    """Circuits of a module, with parameters and the composition with a later one."""
    rng = np.random.default_rng(4)
    values = np.sort(rng.random((heads, 16)), -1)[:, ::-1]
    spectra = [{"name": f"{name}_proj.weight", "shape": [16, 16]} | circuit(values[0]) for name in "qkvo"]
    reply = CircuitsReply.model_validate(
        {
            "heads": np.arange(heads), "qk": circuit(values), "ov": circuit(values) | {"copying": values[:, 0]},
            "spectra": spectra, "left_out": [], "ran": RAN,
            "composition": {
                "module": "a-later-module", "version": "v", "baseline": 0.5,
                **{part: rng.random((heads, heads)) for part in "qkv"},
            },
        }
    )  # fmt: skip
    return reply, Names("a-module-with-a-name")


def effects(heads=12, keys=13):
    """Effects of a sweep over heads and keys."""
    sizes = np.random.default_rng(5).random((heads, keys))
    swept = {"heads": list(range(heads)), "keys": list(range(keys))}
    return EffectsReply(swept=swept, effects=Effects(norm=sizes, relative=sizes, max=sizes), ran=RAN), Names("module")


def effects_of_heads(heads=12):
    """Effects of a sweep over heads alone."""
    sizes = np.random.default_rng(5).random(heads)
    found = Effects(norm=sizes, relative=sizes, max=sizes)
    return EffectsReply(swept={"heads": list(range(heads))}, effects=found, ran=RAN), Names("module")


def importance(heads=12):
    """One number a head, some of them negative."""
    sizes = np.random.default_rng(6).normal(size=heads)
    return AttributionReply(head_importance=sizes, ran=RAN), Names("module", method="head_importance")

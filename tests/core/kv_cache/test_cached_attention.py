"""Attention in place over runs of a cache gives the numbers of a dense float64 reference."""

import math

import pytest
import torch

from attention_contract.positions import Alibi, RelativeBias
from attention_contract.spec import (
    AttentionSpec,
    Block,
    Causal,
    Cosine,
    Dot,
    Linear,
    ScaledDot,
    Sigmoid,
    SlidingWindow,
    Softmax,
)
from attention_service.core.attention import attend
from attention_service.core.cancellation import Abandoned, Cancellation, cancellable
from attention_service.core.kv_cache import attention
from attention_service.core.kv_cache import runs as runs_module
from attention_service.core.kv_cache.attention import attend_in_place, in_place_fault
from attention_service.core.kv_cache.runs import SlotRun
from attention_service.core.problem import Problem

CAUSAL = AttentionSpec(masks=[Causal()])
SPECS = {
    "causal": CAUSAL,
    "bottom right": AttentionSpec(masks=[Causal(align="bottom_right")]),
    "no mask": AttentionSpec(),
    "dot with temperature": AttentionSpec(masks=[Causal()], score=Dot(), normalizer=Softmax(temperature=3)),
    "negative scale": AttentionSpec(masks=[Causal()], score=ScaledDot(scale=-0.2)),
    "window": AttentionSpec(masks=[SlidingWindow(left=70, right=0)]),
    "causal and two windows": AttentionSpec(masks=[Causal(), SlidingWindow(left=9), SlidingWindow(left=150, right=3)]),
    "window of one": AttentionSpec(masks=[SlidingWindow(left=0, right=0)]),
    "sinks": AttentionSpec(masks=[Causal()], normalizer=Softmax(sinks=True, temperature=2)),
    "softcap": AttentionSpec(masks=[Causal()], softcap=0.7),
    "alibi": AttentionSpec(masks=[Causal()], position=Alibi(), normalizer=Softmax(temperature=0.5)),
    "relative bias": AttentionSpec(masks=[Causal()], position=RelativeBias(bidirectional=False)),
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


class Pages:
    """Slots of a cache and the sequences written into them, by heads."""

    paged = False

    def __init__(self, kv_heads=2, width=16, value_width=16, slots=2048, dtype=torch.float64, seed=0):
        self.rng = torch.Generator().manual_seed(seed)
        self.keys = torch.randn(kv_heads, slots, width, generator=self.rng, dtype=torch.float64).to(dtype)
        self.values = torch.randn(kv_heads, slots, value_width, generator=self.rng, dtype=torch.float64).to(dtype)

    def queries(self, sequences, heads, count):
        """New queries, ``[S, H, Q, D]``."""
        q = torch.randn(sequences, heads, count, self.keys.shape[2], generator=self.rng, dtype=torch.float64)
        return q.to(self.keys.dtype)

    def past(self, *runs):
        """A sequence over these ranges of slots."""
        return [SlotRun(self, start, stop - start) for start, stop in runs]


def dense(q, runs, spec, learned):
    """The same for one sequence by the materialized kernel in float64."""
    keys = torch.cat([run.keys for run in runs], 1).double()
    values = torch.cat([run.values for run in runs], 1).double()
    past = keys.shape[1] - q.shape[1]
    learned = {name: x.double() for name, x in learned.items()}
    problem = Problem(q[None].double(), keys[None], values[None], spec=spec, past=past, learned=learned)
    return attend(problem, kernel="materialized").context[0]


def learned_of(heads):
    rng = torch.Generator().manual_seed(5)
    return {
        "sinks": torch.randn(heads, generator=rng),
        "relative_bias.weight": torch.randn(32, heads, generator=rng),
    }


def check(q, pasts, spec, tolerance):
    learned = learned_of(q.shape[1])
    found = attend_in_place(q, pasts, spec, learned)
    assert found.shape == (*q.shape[:3], pasts[0][0].values.shape[2])
    assert found.dtype == q.dtype
    for context, queries, runs in zip(found, q, pasts, strict=True):
        torch.testing.assert_close(context.double(), dense(queries, runs, spec, learned), rtol=0, atol=tolerance)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("queries", [1, 5])
def test_any_spec_over_several_runs_gives_the_dense_numbers(spec, queries):
    """Runs of uneven lengths, in any order in memory; the new tokens lie in two of them."""
    pages = Pages()
    pasts = [
        pages.past((500, 613), (64, 128), (1000, 1003)),
        pages.past((700, 701), (1500, 1507)),
        pages.past((800, 800 + queries)),
        pages.past((0, 64), (1600, 1730), (1800, 1801), (1900, 1902), (300, 301)),
    ]
    assert in_place_fault(spec, torch.float64) is None
    check(pages.queries(4, 4, queries), pasts, spec, TOLERANCE[torch.float64])


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "value_width"), [(4, 4, 32, 32), (4, 1, 24, 40), (8, 2, 128, 128)]
)
def test_every_dtype_and_grouping_stays_within_its_rounding(dtype, queries, heads, kv_heads, width, value_width):
    pages = Pages(kv_heads, width, value_width, dtype=dtype)
    pasts = [pages.past((3, 515)), pages.past((700, 831), (1024, 1500))]
    check(pages.queries(2, heads, queries), pasts, CAUSAL, TOLERANCE[dtype])


def test_large_scores_in_bfloat16_keep_their_differences():
    """Scores near 100 rounded to bfloat16 would differ by 0.5 at least."""
    pages = Pages(width=64, dtype=torch.bfloat16)
    q = pages.queries(1, 4, 1) * 8
    check(
        q, [pages.past((0, 300))], AttentionSpec(masks=[Causal()], score=Dot(), normalizer=Softmax(temperature=4)), 0.02
    )


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("queries", [1, 3])
def test_forks_of_shared_prefixes_give_the_numbers_of_each_alone(spec, queries):
    """A tree: a parent that goes on in the same run, forks of it at two lengths, a fork of a fork, and a stranger."""
    pages = Pages()
    pasts = [
        pages.past((0, 450)),
        pages.past((0, 320), (512, 530)),
        pages.past((0, 320), (576, 800)),
        pages.past((1200, 1300)),
        pages.past((0, 320), (576, 768), (1024, 1040)),
        pages.past((0, 64), (1088, 1091)),
    ]
    check(pages.queries(6, 4, queries), pasts, spec, TOLERANCE[torch.float64])


@pytest.mark.parametrize("prefix", [64, 127, 128, 192])
@pytest.mark.parametrize("order", [(0, 1, 0), (1, 0, 0), (0, 1, 0, 1), (0, 1, 2, 0)], ids=str)
def test_forks_with_strangers_between_them_each_get_their_own_numbers(prefix, order):
    pages = Pages(dtype=torch.float32)
    pasts = [
        pages.past((256 * origin, 256 * origin + prefix), (768 + 64 * place, 771 + 64 * place))
        for place, origin in enumerate(order)
    ]
    check(pages.queries(len(order), 4, 1), pasts, CAUSAL, TOLERANCE[torch.float32])


def test_forks_read_their_prefix_once(monkeypatch):
    pages = Pages()
    pasts = [pages.past((0, 512), (576 + 64 * i, 580 + 64 * i)) for i in range(8)]
    read = []

    class Watched(SlotRun):
        @property
        def keys(self):
            read.append(self.tokens)
            return super().keys

    monkeypatch.setattr(runs_module, "SlotRun", Watched)
    attend_in_place(pages.queries(8, 4, 1), pasts, CAUSAL, {})
    assert sorted(read) == [4] * 8 + [512]


def test_a_window_reads_no_key_outside_of_it():
    pages = Pages()
    pages.keys[:, :440] = math.nan
    pages.values[:, :440] = math.nan
    pasts = [pages.past((0, 400), (400, 500)), pages.past((300, 480), (600, 610))]
    windowed = AttentionSpec(masks=[SlidingWindow(left=48, right=0)])
    assert attend_in_place(pages.queries(2, 4, 2), pasts, windowed, {}).isfinite().all()


def test_scores_beyond_the_limit_are_computed_a_few_queries_at_a_time(monkeypatch):
    monkeypatch.setattr(attention, "MOST_SCORES", 4 * 2 * 721)
    pages = Pages()
    for spec in (SPECS["causal"], SPECS["window"], SPECS["sinks"]):
        check(pages.queries(1, 4, 5), [pages.past((0, 333), (512, 900))], spec, TOLERANCE[torch.float64])


def test_cancelled_work_stops():
    pages = Pages(dtype=torch.float32)
    cancellation = Cancellation()
    cancellation.cancel()
    for pasts in ([pages.past((0, 999))], [pages.past((0, 400), (1024 + 64 * i, 1030 + 64 * i)) for i in range(2)]):
        with cancellable(cancellation), pytest.raises(Abandoned):
            attend_in_place(pages.queries(len(pasts), 4, 3), pasts, CAUSAL, {})


def test_a_sequence_gets_the_same_bits_whatever_runs_beside_it():
    pages = Pages(dtype=torch.float32)
    q, pasts = pages.queries(4, 4, 1), [pages.past((200 * i, 200 * i + 150)) for i in range(4)]
    alone = attend_in_place(q[3:], pasts[3:], CAUSAL, {})[0]
    assert torch.equal(attend_in_place(q, pasts, CAUSAL, {})[-1], alone)


def test_a_nan_key_reaches_every_later_query_of_its_head_alone():
    pages = Pages(kv_heads=2)
    pages.keys[0, 7, 3] = math.nan
    found = attend_in_place(pages.queries(2, 4, 1), [pages.past((0, 100)), pages.past((200, 300))], CAUSAL, {})
    assert found[0][:2].isnan().all()
    assert found[0][2:].isfinite().all()
    assert found[1].isfinite().all()


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (AttentionSpec(method=Linear()), "method linear"),
        (AttentionSpec(add_zero_attn=True), "keys beside"),
        (AttentionSpec(score=Cosine()), "score cosine"),
        (AttentionSpec(normalizer=Sigmoid()), "normalizer sigmoid"),
        (AttentionSpec(normalizer=Softmax(dtype="float64")), "float64"),
        (AttentionSpec(masks=[Causal(), Block(size=4)]), "masks"),
    ],
)
def test_other_specs_are_refused_with_the_reason(spec, named):
    assert named in (in_place_fault(spec, torch.float32) or "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_in_another_layout_give_the_same_numbers(dtype):
    pages = Pages(dtype=dtype)
    q = pages.queries(2, 4, 3)
    pasts = [pages.past((0, 90)), pages.past((200, 300))]
    expected = attend_in_place(q, pasts, CAUSAL, {})
    for dims in ((0, 3, 2, 1), (3, 2, 1, 0), (1, 0, 2, 3)):
        laid = q.permute(dims).contiguous().permute(tuple(dims.index(each) for each in range(4)))
        torch.testing.assert_close(attend_in_place(laid, pasts, CAUSAL, {}), expected, rtol=0, atol=TOLERANCE[dtype])

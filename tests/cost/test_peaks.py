"""The peak estimates against what PyTorch's profiler sees allocated on the CPU, operators' own buffers included."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
from tests.cost.peaks import DTYPES, Request, Run, peaks

from attention_contract.positions import Alibi, LearnedPosition, QKNorm, RelativeBias, Rope, Sinusoidal
from attention_contract.schemas.modules import Biases
from attention_contract.spec import (
    Additive,
    AnyOf,
    AttentionSpec,
    Bilinear,
    Block,
    Causal,
    Cosine,
    Documents,
    Entmax15,
    FixedStride,
    Gaussian,
    GlobalTokens,
    PrefixLM,
    RandomBlocks,
    Sigmoid,
    SlidingWindow,
    Softmax,
    Sparsemax,
    Strided,
)
from attention_service.core.kernels import unsuitable
from attention_service.core.multihead import Sizes
from attention_service.cost import (
    Workload,
    gradient_peak_bytes,
    gradient_phases,
    input_bytes,
    kv_cache_bytes,
    kv_cache_bytes_per_token,
    memory_phases,
    output_bytes,
    peak_bytes,
)
from attention_service.cost.gradient_memory import names_of
from attention_service.cost.stand_ins import inputs_of, parameters_of

KERNELS = ("fused", "blocked", "materialized")
GRADIENT_TAPS = ("q", "k", "v", "scores", "capped_scores", "masked_scores", "weights", "context")
ALL_TAPS = frozenset({"output", "lse", *GRADIENT_TAPS})
BIASES = Biases(q_proj=True, k_proj=True, v_proj=True, o_proj=True)

CAUSAL = AttentionSpec(masks=[Causal()])
WINDOW = AttentionSpec(masks=[Causal(), SlidingWindow(left=64)])
LONGFORMER = AttentionSpec(masks=[AnyOf(of=[SlidingWindow(left=32, right=32), GlobalTokens(positions=[0, 1])])])
BLOCKS = AttentionSpec(masks=[Block(size=32, neighbours=1), Documents(lengths=[100])])
SPARSE = AttentionSpec(
    masks=[
        AnyOf(of=[PrefixLM(length=9), Strided(stride=16), FixedStride(stride=16), RandomBlocks(size=32, count=2)]),
        Documents(lengths=[100]),
    ]
)
SOFTCAP = AttentionSpec(softcap=30.0)
ENTMAX_WINDOW = WINDOW.model_copy(update={"normalizer": Entmax15()})
NORMALIZERS = {each.name: each for each in (Sigmoid(), Sparsemax(), Entmax15())}


def raw(*, batch=2, queries=512, keys=512, heads=4, kv_heads=4, head_dim=64, value_dim=64, itemsize=4, **more):
    return Workload(batch, queries, keys, heads, kv_heads, head_dim, value_dim, itemsize, threads=1, **more)


def module(width=256, heads=4, kv_heads=4, **more):
    head = width // heads
    sizes = Sizes(width, heads, kv_heads, head, head, width, width, BIASES, more.get("spec", AttentionSpec()))
    more = {"inputs": frozenset({"query"})} | more
    return raw(heads=heads, kv_heads=kv_heads, head_dim=head, value_dim=head, sizes=sizes, **more)


WORKLOADS = {
    "raw": raw(),
    "causal": raw(spec=CAUSAL),
    "window": raw(spec=WINDOW),
    "longformer": raw(spec=LONGFORMER),
    "blocks": raw(spec=BLOCKS),
    "sparse": raw(spec=SPARSE),
    "softcap": raw(spec=SOFTCAP),
    "grouped": raw(kv_heads=1),
    "wide values": raw(value_dim=96),
    "narrow values": raw(value_dim=32),
    "bfloat16": raw(itemsize=2),
    "bfloat16 window": raw(itemsize=2, spec=WINDOW),
    "float64": raw(itemsize=8),
    "padded": raw(padded=True, spec=CAUSAL),
    "offsets": raw(batch=4, spec=WINDOW, batched_offsets=True),
    "mask of keys": raw(request_mask_elements=2 * 512, bool_mask=True),
    "mask of pairs": raw(request_mask_elements=512 * 512, bool_mask=True, spec=WINDOW),
    "bias of pairs": raw(request_mask_elements=512 * 512),
    "bias of heads": raw(request_mask_elements=2 * 4 * 512 * 512),
    "module": module(),
    "module, window": module(spec=WINDOW),
    "module, grouped": module(heads=8, kv_heads=2),
    "module, cross": module(queries=256, keys=2800, inputs=frozenset({"query", "key", "value"})),
    "module, long": module(128, 2, 2, batch=1, queries=1024, keys=1024),
    "module, in slices": module(1024, 8, 8, batch=1, queries=560, keys=560),
    "module, short": module(512, 8, 8, batch=16, queries=64, keys=64),
    "many tiles": raw(batch=1, heads=2, kv_heads=1, queries=2048, keys=2048, spec=WINDOW),
    "many tiles, entmax15": raw(batch=1, heads=1, kv_heads=1, queries=1500, keys=1500, spec=ENTMAX_WINDOW),
    "decode": module(batch=4, queries=1, keys=4000, past=3999, spec=CAUSAL),
    "chunk": module(queries=128, keys=640, past=512, spec=CAUSAL),
}
WORKLOADS |= {name: raw(spec=AttentionSpec(normalizer=each)) for name, each in NORMALIZERS.items()}
WORKLOADS |= {
    "bfloat16 sigmoid": raw(itemsize=2, spec=AttentionSpec(normalizer=NORMALIZERS["sigmoid"])),
    "bfloat16 sparsemax": raw(itemsize=2, spec=AttentionSpec(normalizer=NORMALIZERS["sparsemax"])),
    "float64 entmax15": raw(itemsize=8, spec=AttentionSpec(normalizer=NORMALIZERS["entmax15"])),
    "module, entmax15, window": module(spec=WINDOW.model_copy(update={"normalizer": NORMALIZERS["entmax15"]})),
}
WORKLOADS |= {each.name: raw(spec=AttentionSpec(score=each)) for each in (Bilinear(), Additive(hidden=32), Cosine())}
WORKLOADS |= {
    "gaussian": raw(spec=AttentionSpec(score=Gaussian(sigma="learned")), kv_heads=2),
    "cosine, learned, grouped": raw(spec=AttentionSpec(score=Cosine(scale="learned")), kv_heads=1),
    "module, bilinear": module(spec=AttentionSpec(score=Bilinear())),
    "module, additive, grouped": module(kv_heads=2, spec=AttentionSpec(score=Additive())),
    "bfloat16 gaussian": raw(itemsize=2, spec=AttentionSpec(score=Gaussian())),
    "sinks": raw(spec=AttentionSpec(normalizer=Softmax(sinks=True))),
    "module, sinks, window": module(spec=WINDOW.model_copy(update={"normalizer": Softmax(sinks=True)})),
    "dropout": raw(dropped=True),
    "dropout, long": raw(queries=1024, keys=1024, dropped=True),
    "added keys": raw(keys=514, spec=AttentionSpec(add_bias_kv=True, add_zero_attn=True)),
    "module, added keys": module(keys=513, spec=CAUSAL.model_copy(update={"add_bias_kv": True})),
}
SINES, TABLE, ROPE, ALIBI, BUCKETS = (
    AttentionSpec(position=each)
    for each in (Sinusoidal(), LearnedPosition(length=4096), Rope(), Alibi(), RelativeBias())
)
NORM = AttentionSpec(qk_norm=QKNorm())
TURNED_NORM = AttentionSpec(
    position=Rope(dim=48, style="interleaved"), qk_norm=QKNorm(over="all_heads"), masks=[Causal()]
)
WORKLOADS |= {
    "sinusoidal": raw(spec=SINES),
    "sinusoidal, by sequence": raw(spec=SINES, batched_places=True),
    "module, sinusoidal": module(spec=SINES),
    "module, sinusoidal, cross": module(spec=SINES, queries=64, keys=700, inputs=frozenset({"query", "key", "value"})),
    "bfloat16 sinusoidal": raw(itemsize=2, spec=SINES),
    "learned": raw(spec=TABLE),
    "module, learned": module(spec=TABLE),
    "rope": raw(spec=ROPE),
    "rope, by sequence": raw(spec=ROPE, batched_places=True),
    "rope, grouped": raw(kv_heads=1, spec=ROPE),
    "float64 rope": raw(itemsize=8, spec=ROPE),
    "bfloat16 rope": raw(itemsize=2, spec=ROPE),
    "rope, long": raw(batch=1, heads=1, kv_heads=1, queries=1024, keys=1024, spec=ROPE),
    "module, rope": module(spec=ROPE),
    "module, rope, short": module(512, 8, 8, batch=16, queries=64, keys=64, spec=ROPE),
    "rope, decode": module(batch=4, queries=1, keys=4000, past=3999, spec=ROPE),
    "rope, chunk": module(queries=128, keys=640, past=512, spec=ROPE),
    "norm": raw(spec=NORM),
    "module, norm": module(spec=NORM),
    "bfloat16 norm": raw(itemsize=2, spec=NORM),
    "turned norm": raw(spec=TURNED_NORM),
    "module, turned norm": module(heads=8, kv_heads=2, spec=TURNED_NORM.model_copy(update={"position": Rope()})),
    "bfloat16 turned norm": module(itemsize=2, spec=TURNED_NORM),
    "alibi": raw(spec=ALIBI),
    "alibi, one head": raw(heads=1, kv_heads=1, spec=ALIBI),
    "alibi, by sequence": raw(spec=ALIBI, batched_places=True),
    "alibi, window": raw(spec=WINDOW.model_copy(update={"position": Alibi()})),
    "alibi, softcap": raw(spec=SOFTCAP.model_copy(update={"position": Alibi()})),
    "bfloat16 alibi": raw(itemsize=2, spec=ALIBI),
    "relative_bias": raw(spec=BUCKETS),
    "relative_bias, by sequence": raw(spec=BUCKETS, batched_places=True),
    "module, relative_bias": module(spec=BUCKETS),
    "float64 relative_bias": raw(itemsize=8, spec=BUCKETS),
}
TAPPED = {
    "weights": raw(taps=frozenset({"output", "weights"})),
    "scores": raw(taps=frozenset({"output", "scores"})),
    "all": raw(spec=WINDOW, taps=ALL_TAPS),
    "all in bfloat16": raw(itemsize=2, taps=ALL_TAPS),
    "selected": raw(
        spec=WINDOW, taps=frozenset({"output", "weights", "masked_scores"}), selected_heads=2, selected_queries=32
    ),
    "projections": module(taps=frozenset({"q", "k", "v"}), selected_heads=2),
    "lse": raw(taps=frozenset({"output", "lse"})),
    "all with a bias": raw(spec=ALIBI, taps=ALL_TAPS),
    "selected with a bias": raw(
        spec=BUCKETS, taps=frozenset({"output", "weights", "masked_scores"}), selected_heads=2, selected_queries=32
    ),
}


QUICK = {
    "raw",
    "window",
    "bfloat16",
    "padded",
    "module",
    "module, in slices",
    "decode",
    "entmax15",
    "rope, long",
    "alibi",
    "all",
    "projections",
}
"""A tenth of the workloads, of every kind; the others are a long walk."""


def each(works: Mapping[str, Workload]) -> list[Any]:
    """The names of these workloads, as parameters of a test."""
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in works]


def passes(names: Collection[str]) -> Iterator[tuple[tuple[str, str, str], Run]]:
    """Every pass over these workloads that is measured, by what it is."""
    for name in names:
        request = Request((WORKLOADS | TAPPED)[name])
        for kernel in able(request.work):
            yield ("forward", name, kernel), partial(request.forward, kernel)
            if name in WORKLOADS:
                yield ("backward", name, kernel), partial(request.backward, kernel)
        if name in WORKLOADS:
            yield ("second", name, "materialized"), partial(request.backward, "materialized", twice=True)
            yield ("taps", name, "materialized"), partial(request.backward, "materialized", taps=True)


def able(work: Workload) -> list[str]:
    """The kernels that compute it."""
    return [each for each in KERNELS if not unsuitable(each, work.spec, DTYPES[work.itemsize], dropout=work.dropped)]


Peaks = dict[tuple[str, str, str], int]


@pytest.fixture
def measured(name: str) -> Peaks:
    """The most bytes that each pass held at a time, over this workload and others."""
    return _measured(name in QUICK)


@cache
def _measured(quick: bool) -> Peaks:
    """One profile of all of them: to start one takes long."""
    keys, runs = zip(*passes([name for name in WORKLOADS | TAPPED if (name in QUICK) == quick]), strict=True)
    return dict(zip(keys, peaks(runs), strict=True))


UNDER, OVER = 0.02, 0.05
SLACK = 2**16
"""Bytes that an estimate may be off by whatever the size: indices, flags of rows, the leftovers of a last tile."""


LOOSER = {("sparse", "blocked"): 0.1}
"""Where keys lie in many pieces, the largest tile and what of the masks is remembered are bounded."""


def assert_tight(estimate: int, actual: int, *, under: float = UNDER, over: float = OVER) -> None:
    low, high = (1 - under) * actual - SLACK, (1 + over) * actual + SLACK
    assert low <= estimate <= high, f"{estimate / actual:.3f} of the {actual} bytes measured"


@pytest.mark.parametrize("name", each(WORKLOADS | TAPPED))
def test_forward_peak_is_what_is_allocated(name, measured):
    work = (WORKLOADS | TAPPED)[name]
    for kernel in able(work):
        over = LOOSER.get((name, kernel), OVER)
        assert_tight(peak_bytes(work, kernel), measured["forward", name, kernel], over=over)


@pytest.mark.parametrize("name", each(WORKLOADS))
def test_gradient_peak_is_what_is_allocated(name, measured):
    for kernel in able(WORKLOADS[name]):
        assert_tight(gradient_peak_bytes(WORKLOADS[name], kernel), measured["backward", name, kernel])


@pytest.mark.parametrize("name", each(WORKLOADS))
def test_peak_with_gradients_of_every_tap_is_what_is_allocated(name, measured):
    work = WORKLOADS[name]
    estimate = gradient_peak_bytes(work, "materialized", names_of(work, taps=True))
    assert_tight(estimate, measured["taps", name, "materialized"])


@pytest.mark.parametrize("name", each(WORKLOADS))
def test_peak_of_second_gradients_is_what_is_allocated(name, measured):
    work = WORKLOADS[name]
    estimate = gradient_peak_bytes(work, "materialized", twice=True)
    assert_tight(estimate, measured["second", name, "materialized"])


@pytest.mark.parametrize("name", each(WORKLOADS))
def test_what_does_more_is_never_estimated_to_need_less(name):
    work = WORKLOADS[name]
    for kernel in able(work):
        assert peak_bytes(work, kernel) <= peak_bytes(replace(work, taps=ALL_TAPS), kernel)
        assert peak_bytes(work, kernel) <= gradient_peak_bytes(work, kernel)
    tapped = names_of(work, taps=True)
    plain, checked = (gradient_peak_bytes(work, "materialized", checked=checked) for checked in (False, True))
    assert plain < checked < gradient_peak_bytes(work, "materialized", tapped, checked=True)
    assert plain <= gradient_peak_bytes(work, "materialized", tapped)
    assert peak_bytes(work, "materialized") <= peak_bytes(replace(work, edits=(("weights", "scale"),)), "materialized")


@pytest.mark.parametrize("none", [{"queries": 0}, {"keys": 0, "past": 0}, {"batch": 0}, {"value_dim": 0}], ids=str)
@pytest.mark.parametrize("name", each(WORKLOADS | TAPPED))
def test_nothing_is_counted_too(name, none):
    work = (WORKLOADS | TAPPED)[name]
    for kernel in able(work):
        empty = nothing(work, none)
        assert 0 < peak_bytes(empty, kernel) <= peak_bytes(work, kernel)
        assert gradient_peak_bytes(empty, kernel) > 0
    assert gradient_peak_bytes(empty, "materialized", names_of(empty, taps=True)) > 0


def nothing(work: Workload, none: dict[str, int]) -> Workload:
    """With sizes of 0, whatever goes with them."""
    if "value_dim" in none:
        return work.resized(**none)
    return replace(work, **none | ({"keys": work.extra} if "keys" in none else {}))


@pytest.mark.parametrize("name", each(WORKLOADS | TAPPED))
def test_phases_are_made_of_what_they_name(name):
    work = (WORKLOADS | TAPPED)[name]
    for kernel in able(work):
        for phases in (memory_phases(work, kernel), gradient_phases(work, kernel)):
            assert len({phase.name for phase in phases}) == len(phases)
            assert all(size > 0 for phase in phases for size in phase.tensors.values()), phases
        assert max(phase.bytes for phase in memory_phases(work, kernel)) == peak_bytes(work, kernel) - 4096


LIMIT = 24 * 2**20


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "gradients"])
def test_the_longest_sequence_that_fits_is_the_one_that_the_estimate_allows(kernel, backward):
    """Within 2 %: of the lengths beside the longest by the estimate, the shorter fits and the longer does not."""
    start, needs = raw(batch=1, heads=2, kv_heads=2), gradient_peak_bytes if backward else peak_bytes
    low, high = 64, 2**17
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needs(start.at("length", middle), kernel) <= LIMIT else (low, middle)
    for length, fits in ((int(low * 0.98), True), (int(low * 1.02) + 1, False)):
        request = Request(start.at("length", length))
        run = partial(request.backward if backward else request.forward, kernel)
        assert (measured_peak(run) <= LIMIT) == fits


def measured_peak(run) -> int:
    """The most bytes held at a time by one pass."""
    return peaks([run])[0]


def test_the_fused_peak_grows_with_the_length_and_the_materialized_with_its_square():
    short, long = (module(queries=length, keys=length) for length in (2**14, 2**15))
    # What a slice of a projection takes stays the same.
    assert peak_bytes(long, "fused") / peak_bytes(short, "fused") == pytest.approx(2, rel=0.04)
    assert peak_bytes(long, "materialized") / peak_bytes(short, "materialized") == pytest.approx(4, rel=0.01)


def test_sizes_beyond_any_machine_are_counted_all_the_same():
    length = 2**31
    work = module(queries=length, keys=length, spec=WINDOW)
    assert peak_bytes(work, "materialized") > 12 * work.pairs * work.heads
    assert gradient_peak_bytes(work, "materialized", names_of(work, taps=True), checked=True) > length**2


@pytest.mark.parametrize(
    ("layers", "kv_heads", "published"),
    [(32, 32, 512), (32, 8, 128), (80, 8, 320)],
    ids=["Llama 2 7B", "Llama 3 8B", "Llama 3 70B"],
)
def test_kv_cache_per_token_of_published_models(layers, kv_heads, published):
    """KiB for each token in half precision over all layers, with heads 128 wide."""
    work = raw(heads=64, kv_heads=kv_heads, head_dim=128, value_dim=128, itemsize=2, keys=4096)
    assert layers * kv_cache_bytes_per_token(work) == published * 1024
    assert kv_cache_bytes(work) == work.batch * 4096 * kv_cache_bytes_per_token(work)


@pytest.mark.parametrize("name", each(WORKLOADS))
def test_inputs_and_outputs_are_what_comes_and_goes(name):
    work = WORKLOADS[name]
    sent = inputs_of(work) | ({} if work.sizes else parameters_of(work))
    assert input_bytes(work) == sum(
        x.nbytes for name, x in sent.items() if name not in {"key_mask", "offsets", "positions"}
    )
    answered = Request(work).forward("materialized")
    assert output_bytes(work) == sum(x.nbytes for x in answered.values())


def test_output_counts_the_selected_part_of_the_taps():
    work = raw(taps=frozenset({"output", "weights", "k", "lse"}), kv_heads=2, selected_heads=3, selected_queries=5)
    elements = 2 * 4 * 512 * 64 + 2 * 3 * 5 * 512 + 2 * 3 * 512 * 64 + 2 * 3 * 5
    assert output_bytes(work) == 4 * elements

"""Crossover lengths of two variants of attention, from the service and measured."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from attention_contract.schemas.answers import Crossover
from attention_contract.schemas.attention import KernelName, RawForwardRequest
from attention_contract.schemas.costs.complexity import Alternative, RawComplexityRequest, Shape
from attention_contract.spec import AttentionSpec
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import complexity, forward
from attention_service.runtime.operations.complexity.measured_crossover import CacheFiller, rounds
from attention_service.runtime.operations.complexity.subjects import DeviceMemory
from attention_service.runtime.scheduling.budget import Budget

FREE_BYTES = 2**31
HEADS, WIDTH = 4, 64
ROUNDS = 11
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Variant:
    """One of the compared variants."""

    name: str
    spec: AttentionSpec
    kernel: KernelName | None
    """None for an approximate method."""


def _variant(name: str, kernel: KernelName | None, **spec: object) -> Variant:
    return Variant(name, AttentionSpec.model_validate(spec), kernel)


VARIANTS = (
    _variant("linear", None, method={"name": "linear"}),
    _variant("fused", "fused"),
    _variant("fused, causal", "fused", masks=[{"name": "causal"}]),
    _variant("blocked, window of 512", "blocked", masks=[{"name": "sliding_window", "left": 511, "right": 0}]),
    _variant("blocked, window of 256", "blocked", masks=[{"name": "sliding_window", "left": 255, "right": 0}]),
    _variant("materialized", "materialized"),
    _variant("performer", None, method={"name": "performer", "features": 256}),
    _variant("nystrom", None, method={"name": "nystrom", "landmarks": 128}),
)
"""The compared variants. The first is the request.

It names no kernel, because its kernel would apply to all variants without one.
"""
LENGTHS = 64, 16384
SEARCHED = 1.6, 1.2
"""Factors around which a crossover is searched: first around the predicted one, then around the found one."""


def crossovers(device: Device) -> Iterator[str]:
    """Yield a table of crossover lengths: predicted, found by ``measure``, and measured thoroughly."""
    yield f"Forward, {HEADS} heads of {WIDTH}, float32, with the same clock. For `measure` the server runs both"
    yield "variants. A measured crossover comes from more runs: the line through nine ratios of interleaved medians"
    yield "near the crossover passes 1 there. Before each run other data fills the caches, as between two requests."
    yield ""
    yield "| first | second | measured | predicted | predicted / measured | `measure` | `measure` / measured |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    ratios: dict[str, list[float]] = {"predicted": [], "with `measure`": []}
    by_name = {variant.name: variant for variant in VARIANTS}
    for found in _served(device):
        if found.of != "time" or found.at is None or not LENGTHS[0] <= found.at <= LENGTHS[1]:
            continue
        measured = _measured_crossing(by_name[found.between[0]], by_name[found.between[1]], found.at, device)
        cells = ["none nearby" if measured is None else f"{measured:.0f}"]
        for length, each in zip((found.at, found.measured), ratios.values(), strict=True):
            cells.append("" if length is None else str(length))
            if length is not None and measured is not None:
                each.append(length / measured)
                cells.append(f"{each[-1]:.2f}")
            else:
                cells.append("")
        yield f"| {' | '.join([*found.between, *cells])} |"
    yield ""
    for name, each in ratios.items():
        far = np.abs(np.log(each))
        if each:
            half, most = np.expm1(np.median(far)), np.expm1(far.max())
            yield f"Of {len(each)}, {name}: half within {half:.0%}, all within {most:.0%}."


def _served(device: Device) -> list[Crossover]:
    """Return the crossovers of a server's answer."""
    first, *others = VARIANTS
    compared = [Alternative(label=each.name, spec=each.spec, kernel=each.kernel) for each in others]
    request = RawComplexityRequest(
        shape=Shape(queries=LENGTHS[0]), num_heads=HEADS, head_dim=WIDTH, spec=first.spec, compare=compared
    )
    place = DeviceMemory(device, FREE_BYTES, FREE_BYTES)
    budget = Budget(FREE_BYTES, FREE_BYTES, lambda: 0, 1)

    async def run(work: Callable[[], ResultT]) -> ResultT:
        return work()

    reply = complexity.report(None, request, place)
    reply = asyncio.run(complexity.tried(reply, None, request, place, run, budget))
    names = {"request": first.name}
    return [
        found.model_copy(update={"between": tuple(names.get(label, label) for label in found.between)})
        for found in reply.crossovers
    ]


def _measured_crossing(one: Variant, other: Variant, near: float, device: Device) -> float | None:
    """Return the length where the line through logarithms of time ratios crosses 0."""
    for factor in SEARCHED:
        low, high = max(LENGTHS[0], near / factor), min(LENGTHS[1], near * factor)
        lengths = np.unique(np.round(np.geomspace(low, high, 9))).astype(int)
        slope, level = np.polyfit(np.log(lengths), np.log([_ratio(one, other, int(n), device) for n in lengths]), 1)
        if slope == 0:
            return None
        near = float(np.exp(-level / slope))
        if not low / 1.3 <= near <= high * 1.3:
            return None
    return near


def _ratio(one: Variant, other: Variant, n: int, device: Device) -> float:
    x = np.random.default_rng(n).standard_normal((1, HEADS, n, WIDTH), np.float32)
    jobs = []
    for variant in (one, other):
        request = RawForwardRequest(query=x, key=x, value=x, spec=variant.spec, kernel=variant.kernel)
        jobs.append(forward.prepare(None, request, device, FREE_BYTES))
    filler = CacheFiller(device)
    return float(np.median([first / second for first, second in (rounds(jobs, filler) for _ in range(ROUNDS))]))

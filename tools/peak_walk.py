"""Every registered combination as it is served: what its plan says that it holds, and what it is seen to hold.

``python -m tools.peak_walk`` goes through all of them and prints the distribution of what was planned over what
was held, with the worst; ``--share 0.1`` through a tenth of them, drawn at random. On the CPU, by PyTorch's profiler.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from benchmarks.random_requests import Drawn, Kind, draw, kinds
from benchmarks.random_specs import (
    MASK_OPTIONS,
    METHOD_OPTIONS,
    POSITION_OPTIONS,
    SCORE_OPTIONS,
    Lengths,
    named,
)
from tests.cost.peaks import peaks
from tests.cost.workloads import forward_seen

from attention_contract.base import WireModel
from attention_contract.errors import AttentionError
from attention_contract.schemas.attention import Edit, ForwardRequest, Select
from attention_contract.schemas.costs.accuracy import Computation
from attention_contract.spec import AttentionSpec
from attention_service.core.attention import taps_of
from attention_service.core.masks import MASKS
from attention_service.core.methods import approximation_of
from attention_service.core.normalizers import NORMALIZERS
from attention_service.core.positions import POSITIONS
from attention_service.core.scores import SCORES
from attention_service.cost import Rates, Roofline
from attention_service.modules.resident import Module
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import compute, forward, gradients, hopfield
from attention_service.runtime.operations import weights as inspection
from attention_service.runtime.planning.kernel_choice import least_bytes
from attention_service.runtime.scheduling.jobs import Job

SMALLEST, LARGEST = 2**21, 2**24
"""Bytes of a request, as estimated."""
SLACK = 2**14
"""Bytes that an estimate may be off by whatever the size: indices, flags of rows, what is read of a number."""
DEVICE = Device(torch.device("cpu"), "test", 2**40, Roofline(Rates(1e11, 1e10, 1e-5)))
_TRIES = 60
_AT_ONCE = 40


class Parts(NamedTuple):
    """One of what is registered of each kind; None for no mask."""

    kind: Kind
    score: str
    mask: str | None
    position: str
    normalizer: str


@dataclass(frozen=True)
class Served:
    """A request that was planned."""

    parts: Parts
    job: Job
    request: WireModel
    module: Module | None

    @property
    def described(self) -> str:
        """What it is, without its numbers."""
        facts = {
            name: [*value.shape] if hasattr(value, "shape") else value
            for name, value in vars(self.request).items()
            if value is not None and name not in {"spec", "parameters", "encoding"}
        }
        spec = self.module.config.spec if self.module else getattr(self.request, "spec", AttentionSpec())
        where = "module" if self.module else "raw"
        return f"{where} {self.job.prepared.dtype} {facts} {spec.model_dump(exclude_defaults=True)}"


def combinations(purposes: Sequence[Computation]) -> Iterator[Parts]:
    """All of them, those included that do not go together."""
    every = {
        "score": [entry.name for entry in SCORES],
        "mask": [None, *(entry.name for entry in MASKS)],
        "position": [entry.name for entry in POSITIONS],
        "normalizer": [entry.name for entry in NORMALIZERS],
    }
    for kind in kinds():
        if kind.purpose in purposes and kind.purpose != "hopfield":
            yield from (Parts(kind, *parts) for parts in product(*every.values()))
    if "hopfield" in purposes:
        (retrieval,) = [kind for kind in kinds() if kind.purpose == "hopfield"]
        yield from [Parts(retrieval, "dot", None, "none", "softmax")] * 50


def served(parts: Parts, seed: int = 0) -> Served | None:
    """A request of it, the rest drawn at random; None where the parts do not go together."""
    rng = np.random.default_rng((seed, *"|".join(map(str, parts)).encode()))

    def spec_of(rng: np.random.Generator, lengths: Lengths) -> AttentionSpec:
        return _spec(rng, parts, lengths)

    affordable = partial(needs_between, parts.kind.kernel, SMALLEST, LARGEST)
    for _ in range(_TRIES):
        drawn = draw(rng, parts.kind, affordable, spec_of=spec_of)
        if drawn is None:
            continue
        request = _asking(rng, drawn)
        try:
            return Served(parts, _planned(drawn, request), request, drawn.module)
        except AttentionError:  # what is asked does not go together
            continue
    return None


def needs_between(kernel: str, low: int, high: int, bound: BoundRequest) -> bool:
    """True if a forward pass of this blank request needs about so many bytes."""
    return least_bytes(bound, kernel) < high and low < forward_seen(bound.replaced(threads=1), kernel).peak_bytes < high


def _spec(rng: np.random.Generator, parts: Parts, lengths: Lengths) -> AttentionSpec:
    spec: dict[str, Any] = {
        "score": named(rng, parts.score, SCORE_OPTIONS, lengths),
        "position": named(rng, parts.position, POSITION_OPTIONS, lengths),
        "normalizer": {"name": parts.normalizer},
    }
    if parts.mask is not None:
        spec["masks"] = [named(rng, parts.mask, MASK_OPTIONS, lengths)]
    if parts.kind.kernel in METHOD_OPTIONS:
        spec["method"] = named(rng, parts.kind.kernel, METHOD_OPTIONS, lengths)
    elif parts.normalizer == "softmax" and rng.random() < 0.2:
        spec["softcap"] = 30.0 if parts.kind.kernel != "fused" else None
    if rng.random() < 0.15:
        spec["qk_norm"] = {"over": str(rng.choice(["head", "all_heads"]))}
    return AttentionSpec.model_validate(spec)


def _asking(rng: np.random.Generator, drawn: Drawn) -> WireModel:
    """Its request with more asked of it."""
    request, module = drawn.request, drawn.module
    more: dict[str, Any] = {}
    if drawn.kind.purpose == "hopfield":
        more = {"eps": 1e-3 if rng.random() < 0.3 else None, "return_association": bool(rng.random() < 0.4)}
        return request.model_copy(update=more)
    spec: AttentionSpec = request.spec if module is None else module.config.spec
    exact, batch, queries = approximation_of(spec) is None, len(request.query), request.query.shape[-2]
    heads = request.query.shape[1] if module is None else module.sizes.heads
    if exact and rng.random() < 0.1:
        more["offsets"] = rng.integers(0, 50, batch)
    if drawn.kind.purpose in {"forward", "weights"} and rng.random() < 0.3:
        some = [[*range(int(rng.integers(1, n + 1)))] if rng.random() < 0.6 else None for n in (heads, queries)]
        more["select"] = Select(heads=some[0], queries=some[1])
    if isinstance(request, ForwardRequest):
        known = taps_of(spec)
        if rng.random() < 0.3:
            taps = rng.choice(known, min(int(rng.integers(1, 4)), len(known)), replace=False)
            more["return_"] = ["output", *map(str, taps)]
        if exact and rng.random() < 0.15:
            more |= {"edits": [_edit(rng)], "kernel": None}
            if drawn.kind.purpose == "forward" and rng.random() < 0.5:
                more["compare"] = "unedited"
        if not exact and rng.random() < 0.2:
            more["report_error"] = True
    return request.model_copy(update=more)


def _edit(rng: np.random.Generator) -> Edit:
    tap = str(rng.choice(["q", "k", "v", "scores", "capped_scores", "masked_scores", "weights", "context"]))
    how: dict[str, Any] = {"set": 0.0} if rng.random() < 0.5 else {"scale": 2.0}
    return Edit(tap=tap, heads=[0] if rng.random() < 0.5 else None, **how)  # type: ignore[arg-type]


def _planned(drawn: Drawn, request: Any) -> Job:
    if drawn.kind.purpose == "hopfield":
        return hopfield.prepare(request, DEVICE.exact())
    prepare: Callable[..., Job] = {
        "forward": forward.prepare, "weights": inspection.prepare, "gradients": gradients.prepare
    }[drawn.kind.purpose]  # fmt: skip
    return prepare(drawn.module, request, DEVICE.exact(), 2**40)


@contextmanager
def as_on_a_device() -> Iterator[None]:
    """Tensors are brought there, not shared with the request."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compute, "to_device", lambda x, device, dtype=None: x.to(device, dtype or x.dtype, copy=True))
        yield


def held(every: Sequence[Served]) -> list[int]:
    """The most bytes of each."""
    found: list[int] = []
    with as_on_a_device():
        for start in range(0, len(every), _AT_ONCE):
            found += peaks([each.job.run for each in every[start : start + _AT_ONCE]])
    return found


def off_by(planned: int, actual: int) -> float:
    """How far a plan is from what was held, relative to that, beyond what counts for nothing."""
    beyond = max(abs(planned - actual) - SLACK, 0) / actual
    return beyond if planned > actual else -beyond


class Walked(NamedTuple):
    """What is kept of a request once it was run: all of them at a time are more than there is room for."""

    kind: str
    planned: int
    actual: int
    described: str

    @property
    def ratio(self) -> float:
        return self.planned / self.actual

    @property
    def is_off(self) -> bool:
        return not -0.02 <= off_by(self.planned, self.actual) <= 0.30


def walk(chosen: Sequence[Parts], seed: int) -> Iterator[Walked]:
    """Each of them that can be, in turn."""
    for start in range(0, len(chosen), _AT_ONCE):
        some = [each for parts in chosen[start : start + _AT_ONCE] if (each := served(parts, seed)) is not None]
        for each, actual in zip(some, held(some), strict=True):
            yield Walked(each.parts.kind.name, each.job.plan.peak_bytes, actual, each.described)


def main() -> None:
    """Print the distribution."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worst", type=int, default=2)
    parser.add_argument("--purpose", nargs="*", default=["forward", "weights", "gradients", "hopfield"])
    given = parser.parse_args()
    rng = np.random.default_rng(given.seed)
    chosen = [parts for parts in combinations(given.purpose) if rng.random() < given.share]
    table([*walk(chosen, given.seed)], given.worst)


def table(walked: Sequence[Walked], worst: int) -> None:
    """By pass and kernel: quantiles of planned over held, and how many are further off than −2 or +30 %."""
    rows = defaultdict(list)
    for each in walked:
        rows[each.kind].append(each)
    print("| | requests | least | 5 % | median | 95 % | most | further off than −2 or +30 % |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    bad = []
    for name, row in rows.items():
        off = [each for each in row if each.is_off]
        quantiles = " | ".join(f"{x:.3f}" for x in np.quantile([each.ratio for each in row], [0, 0.05, 0.5, 0.95, 1]))
        print(f"| {name} | {len(row)} | {quantiles} | {len(off)} |")
        bad += sorted(off, key=lambda each: -abs(np.log(each.ratio)))[:worst]
    for each in bad:
        print(f"{each.kind}: {each.ratio:.3f} of {each.actual}: {each.described}"[:900])


if __name__ == "__main__":
    main()

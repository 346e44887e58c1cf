"""Random requests of every supported kind: the data that teach and test a clock."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator

from attention_contract.base import WireModel
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.hopfield import HopfieldRequest
from attention_contract.schemas.attention import ForwardRequest, RawForwardRequest
from attention_contract.schemas.costs.accuracy import Computation
from attention_contract.schemas.gradients import GradientsRequest, RawGradientsRequest
from attention_contract.schemas.modules import ModuleConfig
from attention_contract.schemas.weights import RawWeightsRequest, WeightsRequest
from attention_contract.spec import AttentionSpec
from attention_service.core.kernels import KERNELS, MATERIALIZED, Needs, unsuitable
from attention_service.core.methods import approximation_of, check_spec
from attention_service.core.multihead import Sizes
from attention_service.core.positions import check_position
from attention_service.core.problem import Widths
from attention_service.core.tensors import TORCH_DTYPES
from attention_service.modules.resident import Module, complete
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.planning.blank_requests import new_request
from attention_service.runtime.planning.request_sizes import RequestSizes
from benchmarks.plain_requests import (
    Lengths,
    learned_inputs,
    module_inputs,
    random_module,
    random_tensor,
    raw_inputs,
)
from benchmarks.random_specs import (
    LONGEST,
    SHORTEST,
    approximations,
    between,
    draw_spec,
)

_HEADS = (1, 2, 3, 4, 6, 8, 12, 16)
_WIDTHS = (16, 32, 48, 64, 80, 96, 128)
_DTYPES = ("float32",) * 4 + ("bfloat16",) * 2 + ("float64",)
_SINGLE, _LARGEST_BATCH, _MOST_STEPS = 0.4, 32, 16
_USUAL_HEADS, _USUAL_WIDTHS, _USUAL_BATCH = (4, 8, 12, 16), (64, 64, 128), 8
_TAPS = ("q", "k", "v", "scores", "capped_scores", "masked_scores", "weights", "context", "lse")


class Kind(NamedTuple):
    """A kind of measurement: a purpose, and its kernel (or method)."""

    purpose: Computation
    kernel: str

    @property
    def name(self) -> str:
        """Name of the kind, such as ``forward fused``."""
        return f"{self.purpose} {self.kernel}"


@dataclass(frozen=True)
class Drawn:
    """One request and its module; None for raw attention and for Hopfield retrieval."""

    kind: Kind
    module: Module | None
    request: WireModel


def kinds() -> list[Kind]:
    """Return every kernel that the planner may choose and every method, in every pass that it supports."""
    there = [entry.name for entry in KERNELS if entry.make().automatic] + approximations()
    passes: tuple[Computation, ...] = ("forward", "gradients")
    both = [Kind(purpose, kernel) for purpose in passes for kernel in there]
    return [*both, Kind("weights", MATERIALIZED), Kind("hopfield", MATERIALIZED)]


def draw(
    rng: Generator,
    kind: Kind,
    affordable: Callable[[BoundRequest], bool],
    *,
    usual: bool = False,
    spec_of: Callable[[Generator, Lengths], AttentionSpec] | None = None,
) -> Drawn | None:
    """Draw a request of this kind; None if the drawn combination is invalid, to be drawn again.

    ``affordable`` tests a blank request of its sizes before anything is allocated. ``usual``: draw a common request,
    self-attention in float32 with heads of a usual width and no options. ``spec_of`` draws its spec instead of chance.
    """
    lengths, widths, dtype = _usual_sizes(rng) if usual else _sizes(rng)
    if kind.purpose == "hopfield":
        return _retrieval(rng, kind, lengths, widths, dtype, affordable)
    try:
        spec = draw_spec(rng, kind.kernel, lengths, usual=usual) if spec_of is None else spec_of(rng, lengths)
        check_spec(spec)
        check_position(spec, widths)
        config = _config(rng, widths, dtype, spec) if rng.random() < 0.5 else None
        exact = approximation_of(spec) is None
        if exact and unsuitable(kind.kernel, spec, TORCH_DTYPES[dtype], Needs()) is not None:
            return None
        if not affordable(_blank(lengths, widths, dtype, spec, config)):
            return None
        if config is not None:
            return _of_module(rng, kind, lengths, config, usual=usual)
        return _raw(rng, kind, lengths, widths, dtype, spec, usual=usual)
    except (InvalidRequest, ValueError):  # parts that do not go together
        return None


def _sizes(rng: Generator) -> tuple[Lengths, Widths, str]:
    lengths = _lengths(rng)
    heads = int(rng.choice(_HEADS))
    kv_heads = int(rng.choice([n for n in _HEADS if heads % n == 0])) if rng.random() < 0.3 else heads
    head_dim = int(rng.choice(_WIDTHS))
    value_dim = int(rng.choice(_WIDTHS)) if rng.random() < 0.1 else head_dim
    return lengths, Widths(heads, kv_heads, head_dim, value_dim), str(rng.choice(_DTYPES))


def _usual_sizes(rng: Generator) -> tuple[Lengths, Widths, str]:
    batch = 1 if rng.random() < 0.5 else between(rng, 1, _USUAL_BATCH)
    length = between(rng, SHORTEST, LONGEST)
    heads, width = int(rng.choice(_USUAL_HEADS)), int(rng.choice(_USUAL_WIDTHS))
    return Lengths(batch, length, length, 0), Widths(heads, heads, width, width), "float32"


def _lengths(rng: Generator) -> Lengths:
    """Draw self-attention, cross-attention, a chunk after a past, or one step of a decode."""
    batch = 1 if rng.random() < _SINGLE else between(rng, 1, _LARGEST_BATCH)
    queries = between(rng, SHORTEST, LONGEST)
    others = between(rng, SHORTEST, LONGEST)
    each = [
        Lengths(batch, queries, queries, 0),
        Lengths(batch, queries, others, 0),
        Lengths(batch, queries, queries, others),
        Lengths(batch, 1, 1, others),
    ]
    return each[int(rng.choice(4, p=(0.6, 0.15, 0.1, 0.15)))]


def _blank(
    lengths: Lengths, widths: Widths, dtype: str, spec: AttentionSpec, config: ModuleConfig | None = None
) -> BoundRequest:
    tokens = RequestSizes(lengths.batch, lengths.queries, lengths.new_keys, lengths.past)
    return new_request(spec, widths, dtype, tokens, sizes=None if config is None else Sizes.of(config))


def _config(rng: Generator, widths: Widths, dtype: str, spec: AttentionSpec) -> ModuleConfig:
    return complete(
        ModuleConfig.model_validate(
            {
                "d_model": widths.heads * widths.head_dim,
                "num_heads": widths.heads,
                "num_kv_heads": widths.kv_heads,
                "head_dim": widths.head_dim,
                "value_dim": widths.value_dim,
                "dtype": dtype,
                "spec": spec,
                "bias": bool(rng.random() < 0.5),
            }
        )
    )


def _of_module(rng: Generator, kind: Kind, lengths: Lengths, config: ModuleConfig, *, usual: bool) -> Drawn:
    sizes = Sizes.of(config)
    inputs = module_inputs(rng, lengths, sizes, config.dtype or "float32")
    made = {"forward": ForwardRequest, "gradients": GradientsRequest, "weights": WeightsRequest}[kind.purpose]
    wrt = [*inputs, *(["parameters"] if rng.random() < 0.5 else [])]
    rest = _rest(rng, kind, lengths, sizes.heads, config.spec, wrt, usual=usual)
    return Drawn(kind, random_module(rng, config), made(**inputs, **rest))


def _raw(
    rng: Generator, kind: Kind, lengths: Lengths, widths: Widths, dtype: str, spec: AttentionSpec, *, usual: bool
) -> Drawn:
    inputs = raw_inputs(rng, lengths, widths, dtype)
    learned = learned_inputs(rng, spec, widths, dtype)
    made = {"forward": RawForwardRequest, "gradients": RawGradientsRequest, "weights": RawWeightsRequest}[kind.purpose]
    rest = _rest(rng, kind, lengths, widths.heads, spec, list(inputs), usual=usual)
    return Drawn(kind, None, made(**inputs, **rest, spec=spec, parameters=learned))


def _rest(
    rng: Generator, kind: Kind, lengths: Lengths, heads: int, spec: AttentionSpec, wrt: list[str], *, usual: bool
) -> dict[str, Any]:
    """Draw all fields other than the spec and the tensors of the sequence."""
    exact = approximation_of(spec) is None
    rest: dict[str, Any] = {"kernel": kind.kernel} if exact else {}
    if usual:
        return rest | ({"wrt": wrt} if kind.purpose == "gradients" else {})
    if rng.random() < 0.12:
        rest["key_lengths"] = rng.integers(1, lengths.keys + 1, lengths.batch)
    if exact and rng.random() < 0.1:
        shapes = (
            (lengths.batch, 1, 1, lengths.keys),
            (1, 1, lengths.queries, lengths.keys),
            (lengths.batch, heads, lengths.queries, lengths.keys),
        )
        mask = rng.standard_normal(shapes[int(rng.integers(3))], np.float32)
        rest["mask"] = mask > -1 if rng.random() < 0.5 else mask
    if kind.purpose == "gradients":
        rest["wrt"] = wrt
    elif kind.purpose == "weights":
        rest |= {"return_weights": bool(rng.random() < 0.5), "top_k": int(rng.choice([0, 0, 4]))}
    elif exact and rng.random() < 0.15:
        rest["return"] = ["output", str(rng.choice(_TAPS))]
    if exact and kind.purpose != "weights" and rng.random() < 0.04:
        rest["dropout"] = {"p": 0.1}
    return rest


def _retrieval(
    rng: Generator, kind: Kind, lengths: Lengths, widths: Widths, dtype: str, affordable: Callable[[BoundRequest], bool]
) -> Drawn | None:
    steps = between(rng, 1, _MOST_STEPS)
    alike = Widths(widths.heads, widths.heads, widths.head_dim, widths.head_dim)
    together = Lengths(lengths.batch * steps, lengths.queries, lengths.keys, 0)  # as much work as all steps
    if not affordable(_blank(together, alike, dtype, AttentionSpec())):
        return None
    stored = random_tensor(rng, (lengths.batch, widths.heads, lengths.keys, widths.head_dim), dtype)
    states = random_tensor(rng, (lengths.batch, widths.heads, lengths.queries, widths.head_dim), dtype)
    return Drawn(kind, None, HopfieldRequest(stored=stored, states=states, steps=steps))

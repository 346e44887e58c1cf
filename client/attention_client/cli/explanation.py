"""One query's attention step by step, forward and backward, in numbers that the service computes.

Notation for shapes: B batch, H heads, Lq queries, Lk keys, D head width, Dv value width.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from attention_client.cli.invocation import send
from attention_client.client import Client
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.server import Variant
from attention_contract.spec import AttentionSpec
from attention_contract.tensors import DTYPES

FORWARD: Final = ("q", "k", "scores", "capped_scores", "masked_scores", "weights", "v", "context")
BACKWARD: Final = ("context", "weights", "masked_scores", "capped_scores", "scores", "q", "k", "v")
WITHOUT_PAIRS: Final = ("q", "k", "v", "context")
"""The taps of a method that has no score for each pair."""
_TOLERANCES: Final = {2: 2e-2, 4: 1e-5, 8: 1e-12}
"""The largest error of Σ w v against the context, beside its largest number, by bytes of a number."""


@dataclass(frozen=True)
class Step:
    """One step: its formula, and its numbers for one query of one head."""

    symbol: str
    """The numbers in the field's notation, such as ``w`` or ``∂L/∂w``."""
    tap: str
    formula: str
    values: NDArray[Any]
    """``[Lk]``, ``[Lk, D]`` or ``[D]``."""
    per_key: bool
    """The first dimension counts keys."""


@dataclass(frozen=True)
class Explanation:
    """The steps of one query of one head, and how well they fit together."""

    sequence: int
    head: int
    query: int
    spec: AttentionSpec
    forward: list[Step]
    backward: list[Step]
    notes: list[str] = field(default_factory=list)
    """Facts that a reader needs, such as taps that the method does not have."""
    checks: dict[str, float] = field(default_factory=dict)
    """Errors of identities between the steps, beside the largest number of each."""
    tolerance: float = 1e-5

    @property
    def consistent(self) -> bool:
        """True if every identity holds to within the tolerance."""
        return all(error <= self.tolerance for error in self.checks.values())  # NaN does not pass


def explain(
    client: Client, name: str | None, fields: Mapping[str, Any], *, sequence: int, head: int, query: int
) -> Explanation:
    """Ask the service for the taps and gradients of one query, and put them in order.

    ``upstream`` among the fields is ∂L/∂output; only the query's own row counts, so that every gradient is what this
    query alone contributes. Raises InvalidRequest if there is no such sequence, head or query.
    """
    inputs = {option: value for option, value in fields.items() if option != "upstream"}
    spec = AttentionSpec() if name is None else client.modules.get(name).config.spec
    if name is None and inputs.get("spec") is not None:
        spec = AttentionSpec.model_validate(inputs["spec"])
    exact = spec.method.name == "exact"
    forward_taps = FORWARD if exact else WITHOUT_PAIRS
    backward_taps = tuple(tap for tap in BACKWARD if exact or tap in WITHOUT_PAIRS)

    output = np.asarray(send(client, "forward", name, inputs).output)
    flat = name is not None or inputs.get("num_heads") is not None
    upstream, row = _one_row(output, fields.get("upstream"), flat, sequence, head, query)
    narrowed = inputs | {"return_": [*forward_taps], "select": {"heads": [head], "queries": [query]}}
    reply = send(client, "forward", name, narrowed)
    taps = {tap: _four(getattr(reply, tap)) for tap in forward_taps}  # [B, 1, 1 or Lk, …]
    asked = inputs | {"upstream": upstream, "wrt": [*backward_taps]}
    gradients = {tap: _four(array) for tap, array in send(client, "gradients", name, asked).gradients.items()}

    formulas = Formulas(client.server.variants().variants, spec)
    forward = [
        Step(_SYMBOLS[tap], tap, formulas.of(tap), _tap_row(taps[tap], tap, sequence), tap in _PER_KEY)
        for tap in forward_taps
        if not (tap == "capped_scores" and spec.softcap is None)
    ]
    if exact and spec.score.name == "scaled_dot":
        forward.insert(2, _raw_scores(client, taps, sequence))
    forward.append(Step("o", "output", formulas.output(name, flat), row, False))
    heads, kv_heads = gradients["q"].shape[1], gradients["k"].shape[1]
    at = _index(output, flat, sequence, head, query)
    backward = [Step("∂L/∂o", "output", "given; 0 for the other queries", upstream[at], False)]
    for tap in backward_taps:
        if tap == "capped_scores" and spec.softcap is None:
            continue
        of_keys = tap in {"k", "v"}
        values = gradients[tap][sequence, head // (heads // kv_heads) if of_keys else head]
        values = values if of_keys else values[query]
        backward.append(Step(f"∂L/∂{_SYMBOLS[tap]}", tap, formulas.gradient(tap), values, tap in _PER_KEY))
    notes = _notes(spec, heads, kv_heads, flat)
    width = min(DTYPES[reply.ran.dtype].itemsize, output.dtype.itemsize)  # of the module, and of its replies
    found = Explanation(sequence, head, query, spec, forward, backward, notes, {}, _TOLERANCES[width])
    if exact:
        edited = {edit["tap"] if isinstance(edit, Mapping) else edit.tap for edit in inputs.get("edits") or ()}
        _check(found, edited)
    return found


_SYMBOLS: Final = {"q": "q", "k": "k", "v": "v", "scores": "s", "capped_scores": "c(s)", "masked_scores": "m",
                   "weights": "w", "context": "c"}  # fmt: skip
_PER_KEY: Final = frozenset({"k", "v", "scores", "capped_scores", "masked_scores", "weights"})


def _four(array: Any) -> NDArray[Any]:
    """Add the dimensions of batch and heads if they are missing."""
    found = np.asarray(array)
    return found.reshape((1,) * (4 - found.ndim) + found.shape)


def _tap_row(array: NDArray[Any], tap: str, sequence: int) -> NDArray[Any]:
    found = array[sequence, 0]
    row: NDArray[Any] = found if tap in {"k", "v"} else found[0]
    return row


def _index(output: NDArray[Any], flat: bool, sequence: int, head: int, query: int) -> tuple[int, ...]:
    """Return the index of one query's row in an output of any layout. Raises InvalidRequest if there is none."""
    leading = {"sequence": sequence} if output.ndim == (3 if flat else 4) else {}
    if not flat and output.ndim >= 3:
        leading["head"] = head
    chosen = leading | {"row": query}
    for (option, at), size in zip(chosen.items(), output.shape, strict=False):
        if at >= size:
            raise InvalidRequest(f"{option}: there is no {at}; the output has {size}, from 0", param=option)
    if sequence and "sequence" not in chosen:
        raise InvalidRequest(f"sequence: there is no {sequence}; the inputs are one sequence", param="sequence")
    return tuple(chosen.values())


def _one_row(
    output: NDArray[Any], given: Any, flat: bool, sequence: int, head: int, query: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return ∂L/∂output that is zero but for one query's row, and that row of the output."""
    at = _index(output, flat, sequence, head, query)
    whole = np.ones_like(output) if given is None else np.asarray(given)
    if whole.shape != output.shape:
        raise InvalidRequest(
            f"upstream: expected the output's shape {list(output.shape)}, got {list(whole.shape)}", param="upstream"
        )
    upstream = np.zeros(output.shape, output.dtype)
    upstream[at] = whole[at].astype(output.dtype)
    return upstream, output[at]


def _raw_scores(client: Client, taps: Mapping[str, NDArray[Any]], sequence: int) -> Step:
    """Ask for q·k without the scale: raw attention over the tapped queries and keys."""
    q, k = taps["q"][sequence], taps["k"][sequence]  # [1, 1, D], [1, Lk, D]
    reply = client.attention.forward(q, k, k, spec={"score": {"name": "dot"}}, return_=["scores"])
    return Step("q·k", "raw scores", "q·k_j, before the scale", _four(reply.scores)[0, 0, 0], True)


def _check(found: Explanation, edited: set[str]) -> None:
    """Compare Σ w v with the context, and ∂L/∂c·v and ∂L/∂c w with the gradients of weights and values."""
    at = {step.symbol: step.values.astype(np.float64) for step in (*found.forward, *found.backward)}
    read = at["w"] != 0  # a key without weight may hold anything, NaN included
    if not edited & {"context"}:
        found.checks["Σ_j w_j v_j = c"] = _error(at["w"][read] @ at["v"][read], at["c"])
    if not edited & {"weights", "context", "v"}:
        found.checks["∂L/∂w_j = ∂L/∂c·v_j"] = _error(at["v"][read] @ at["∂L/∂c"], at["∂L/∂w"][read])


def _error(computed: NDArray[Any], expected: NDArray[Any]) -> float:
    """Return the largest error beside the largest number, which counts as 1e-3 at least."""
    if not computed.size:
        return 0.0
    return float(np.abs(computed - expected).max() / max(np.abs(expected).max(), 1e-3))


def _notes(spec: AttentionSpec, heads: int, kv_heads: int, flat: bool) -> list[str]:
    notes = []
    if spec.method.name != "exact":
        notes.append(
            f"method {spec.method.name} has no score and no weight for a pair of a query and a key: "
            "there are q, k, v, the context and the output"
        )
    if flat and kv_heads < heads:
        notes.append(f"∂L/∂k and ∂L/∂v are sums over the {heads // kv_heads} query heads that read this key/value head")
    if spec.position.name in {"rope", "sinusoidal", "learned"}:
        notes.append(f"q and k include the position {spec.position.name}")
    return notes


class Formulas:
    """The formula of each step of a spec, from the server's variants."""

    def __init__(self, variants: list[Variant], spec: AttentionSpec) -> None:
        self._variants: dict[tuple[str, str], Variant] = {(variant.kind, variant.name): variant for variant in variants}
        self._spec = spec

    def _formula(self, kind: str, name: str) -> str:
        variant = self._variants.get((kind, name))
        return "" if variant is None else variant.formula

    def _gradient(self, kind: str, name: str) -> str:
        variant = self._variants.get((kind, name))
        return "" if variant is None else variant.gradient

    def of(self, tap: str) -> str:
        """Return the formula of a tap."""
        spec = self._spec
        position = self._formula("position", spec.position.name)
        biased = spec.position.name in {"alibi", "relative_bias"}
        if tap == "masked_scores":
            masks = "; ".join(f"{mask.name}: {self._formula('mask', mask.name)}" for mask in spec.masks)
            return "; ".join(part for part in (position if biased else "", masks or "no masks in the spec") if part)
        named = {
            "q": f"the query{'' if biased or spec.position.name == 'none' else f': {position}'}",
            "k": f"the keys{'' if biased or spec.position.name == 'none' else f': {position}'}",
            "scores": f"s_j = {self._formula('score', spec.score.name)}",
            "capped_scores": f"{spec.softcap:g} · tanh(s_j / {spec.softcap:g})" if spec.softcap else "",
            "weights": self._formula("normalizer", spec.normalizer.name),
            "v": "the values",
            "context": "c = Σ_j w_j v_j" if spec.method.name == "exact" else self._formula("method", spec.method.name),
        }
        return named[tap]

    def output(self, name: str | None, flat: bool) -> str:
        """Return the formula of the output, which has all heads in one row where ``flat``."""
        contexts = "the contexts of all heads, one after another"
        return f"o = W_o · ({contexts}) + b_o" if name is not None else f"o = {contexts}" if flat else "o = c"

    def gradient(self, tap: str) -> str:
        """Return the formula of ∂L/∂tap."""
        spec = self._spec
        if spec.method.name != "exact":
            return self._gradient("method", spec.method.name) if tap != "context" else "from ∂L/∂o"
        cap = spec.softcap
        named = {
            "context": "from ∂L/∂o, through W_o in a module",
            "weights": "∂w_j = ∂c·v_j",
            "masked_scores": self._gradient("normalizer", spec.normalizer.name),
            "capped_scores": "∂s where looking is allowed, 0 elsewhere",
            "scores": f"∂c(s) · (1 − tanh²(s_j / {cap:g}))" if cap else "∂m where looking is allowed, 0 elsewhere",
            "q": self._gradient("score", spec.score.name),
            "k": self._gradient("score", spec.score.name),
            "v": "∂v_j = w_j ∂c",
        }
        return named[tap]

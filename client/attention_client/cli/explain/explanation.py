"""One query's attention step by step, forward and backward, in numbers that the service computes.

Notation for shapes: B batch, H heads, Lq queries, Lk keys, D head width, Dv value width.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from attention_client.cli.explain import explanation_sentences as sentences
from attention_client.cli.invocation import send
from attention_client.client import Client
from attention_contract.errors import InvalidRequest
from attention_contract.spec import AttentionSpec
from attention_contract.tensors import DTYPES

_SYMBOLS: Final = {
    "q": "q", "k": "k", "scores": "s", "capped_scores": "c(s)", "masked_scores": "m", "weights": "w", "v": "v",
    "context": "c",
}  # fmt: skip
"""The taps in the order of the computation."""
_BACKWARD: Final = ("context", "weights", "masked_scores", "capped_scores", "scores", "q", "k", "v")
_WITHOUT_PAIRS: Final = ("q", "k", "v", "context")
"""The taps of a method that has no score for each pair."""
_PER_KEY: Final = {"k", "v", "raw scores", "scores", "capped_scores", "masked_scores", "weights"}
TOLERANCES: Final = {2: 2e-2, 4: 1e-5, 8: 1e-12}
"""The largest error of Σ w v against the context, beside its largest number, by bytes of a number."""
Array = NDArray[Any]


@dataclass(frozen=True)
class ExplainedStep:
    """One step: its formula, its numbers for one query of one head, and what they mean."""

    symbol: str
    """The numbers in the field's notation, such as ``w`` or ``∂L/∂w``."""
    tap: str
    formula: str
    values: Array
    """``[Lk]``, ``[Lk, D]`` or ``[D]``."""
    sentence: str
    """The meaning of the step, with its largest numbers."""

    @property
    def per_key(self) -> bool:
        """True if the first dimension counts keys."""
        return self.tap in _PER_KEY


@dataclass(frozen=True)
class Explanation:
    """The steps of one query of one head, and how well they fit together."""

    sequence: int
    head: int
    query: int
    spec: AttentionSpec
    forward: list[ExplainedStep]
    backward: list[ExplainedStep]
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
    given = inputs.get("spec") or {}
    spec = AttentionSpec.model_validate(given) if name is None else client.modules.get(name).config.spec
    exact = spec.method.name == "exact"
    taps = [tap for tap in _SYMBOLS if exact or tap in _WITHOUT_PAIRS]
    taps = [tap for tap in taps if tap != "capped_scores" or spec.softcap is not None]

    output = np.asarray(send(client, "forward", name, inputs).output)
    flat = name is not None or inputs.get("num_heads") is not None
    at = _index(output, flat, sequence, head, query)
    upstream = _one_row(output, fields.get("upstream"), at)
    selected = {"return_": taps, "select": {"heads": [head], "queries": [query]}}
    reply = send(client, "forward", name, inputs | selected)
    tapped = {tap: _four(getattr(reply, tap))[sequence, 0] for tap in taps}  # [1 or Lk, …]
    reply = send(client, "gradients", name, inputs | {"upstream": upstream, "wrt": taps})
    gradients = {tap: _four(gradient)[sequence] for tap, gradient in reply.gradients.items()}  # [H, Lq or Lk, …]

    formulas = _Formulas(client, spec)
    steps = formulas.forward()
    rows = {tap: tapped[tap] if tap in {"k", "v"} else tapped[tap][0] for tap in taps}
    forward = [
        ExplainedStep(_SYMBOLS[tap], tap, steps[tap], values, sentences.forward(tap, values, query))
        for tap, values in rows.items()
    ]
    if exact and spec.score.name == "scaled_dot":
        forward.insert(2, _raw_scores(client, tapped, query))
    meant = sentences.output(module=name is not None, flat=flat)
    forward.append(ExplainedStep("o", "output", formulas.output(name, flat), output[at], meant))
    heads, kv_heads = len(gradients["q"]), len(gradients["k"])
    given_row = upstream[at]
    backward = [
        ExplainedStep(
            "∂L/∂o", "output", "given; 0 for the other queries", given_row, sentences.backward("output", given_row)
        )
    ]
    steps = formulas.backward()
    for tap in (tap for tap in _BACKWARD if tap in taps):
        values = gradients[tap][head // (heads // kv_heads)] if tap in {"k", "v"} else gradients[tap][head, query]
        meant = sentences.backward(tap, values)
        backward.append(ExplainedStep(f"∂L/∂{_SYMBOLS[tap]}", tap, steps[tap], values, meant))
    edited = {edit["tap"] if isinstance(edit, Mapping) else edit.tap for edit in inputs.get("edits") or ()}
    checks = _checks({step.symbol: step.values.astype(np.float64) for step in forward + backward}, edited, exact)
    width = min(DTYPES[reply.ran.dtype].itemsize, output.dtype.itemsize)  # of the module, and of its replies
    notes = _notes(spec, heads // kv_heads if flat else 1)
    return Explanation(sequence, head, query, spec, forward, backward, notes, checks, TOLERANCES[width])


def _four(array: Any) -> Array:
    """Add the dimensions of batch and heads if they are missing."""
    whole = np.asarray(array)
    return whole.reshape((1,) * (4 - whole.ndim) + whole.shape)


def _index(output: Array, flat: bool, sequence: int, head: int, query: int) -> tuple[int, ...]:
    """Return the index of one query's row in an output of any layout. Raises InvalidRequest if there is none."""
    chosen = {"sequence": sequence} if output.ndim == (3 if flat else 4) else {}
    if not flat and output.ndim >= 3:
        chosen["head"] = head
    chosen["row"] = query
    for (option, at), size in zip(chosen.items(), output.shape, strict=False):
        if at >= size:
            raise InvalidRequest.at(option, f"there is no {at}; the output has {size}, numbered from 0")
    if sequence and "sequence" not in chosen:
        raise InvalidRequest.at("sequence", f"there is no {sequence}; the inputs are one sequence")
    return tuple(chosen.values())


def _one_row(output: Array, given: Any, at: tuple[int, ...]) -> Array:
    """Return ∂L/∂output that is zero but for one query's row."""
    whole = np.ones_like(output) if given is None else np.asarray(given)
    if whole.shape != output.shape:
        detail = f"expected the output's shape {list(output.shape)}, got {list(whole.shape)}"
        raise InvalidRequest.at("upstream", detail)
    upstream = np.zeros(output.shape, output.dtype)
    upstream[at] = whole[at].astype(output.dtype)
    return upstream


def _raw_scores(client: Client, tapped: Mapping[str, Array], query: int) -> ExplainedStep:
    """Ask for q·k without the scale: raw attention over the tapped queries and keys."""
    q, k = tapped["q"][None], tapped["k"][None]  # [1, 1, D], [1, Lk, D]
    reply = client.attention.forward(q, k, k, spec={"score": {"name": "dot"}}, return_=["scores"])
    values = _four(reply.scores)[0, 0, 0]
    meant = sentences.forward("raw scores", values, query)
    return ExplainedStep("q·k", "raw scores", "q·k_j, before the scale", values, meant)


def _checks(at: Mapping[str, Array], edited: set[str], exact: bool) -> dict[str, float]:
    """Compare Σ w v with the context, and ∂L/∂c·v with the gradient of the weights."""
    if not exact:
        return {}
    read = at["w"] != 0  # a key without weight may hold anything, NaN included
    checks = {}
    if "context" not in edited:
        checks["Σ_j w_j v_j = c"] = _error(at["w"][read] @ at["v"][read], at["c"])
    if not edited & {"weights", "context", "v"}:
        checks["∂L/∂w_j = ∂L/∂c·v_j"] = _error(at["v"][read] @ at["∂L/∂c"], at["∂L/∂w"][read])
    return checks


def _error(computed: Array, expected: Array) -> float:
    """Return the largest error beside the largest number, which counts as 1e-3 at least."""
    if not computed.size:
        return 0.0
    return float(np.abs(computed - expected).max() / max(np.abs(expected).max(), 1e-3))


def _notes(spec: AttentionSpec, sharing: int) -> list[str]:
    """Return what a reader needs to know; ``sharing`` is the query heads of one key/value head."""
    method, position = spec.method.name, spec.position.name
    notes = {
        f"method {method} has no score and no weight for a pair of a query and a key: there are q, k, v, the context "
        "and the output": method != "exact",
        f"∂L/∂k and ∂L/∂v are sums over the {sharing} query heads that read this key/value head": sharing > 1,
        f"q and k include the position {position}": position in {"rope", "sinusoidal", "learned"},
    }
    return [note for note, holds in notes.items() if holds]


class _Formulas:
    """The formula of each step of a spec, from the server's variants."""

    def __init__(self, client: Client, spec: AttentionSpec) -> None:
        self._variants = {(variant.kind, variant.name): variant for variant in client.server.variants().variants}
        self._spec = spec

    def _entry_text(self, kind: Any, name: str, what: str = "formula") -> str:
        """Return the formula or the gradient of a variant; nothing if the server does not have it."""
        return str(getattr(self._variants.get((kind, name)), what, ""))

    def forward(self) -> dict[str, str]:
        """Return the formula of each tap."""
        spec, method = self._spec, self._spec.method.name
        position = self._entry_text("position", spec.position.name)
        biased = spec.position.name in {"alibi", "relative_bias"}
        placed = "" if biased or spec.position.name == "none" else f": {position}"
        masks = "; ".join(f"{mask.name}: {self._entry_text('mask', mask.name)}" for mask in spec.masks)
        masked = (position if biased else "", masks or "no masks in the spec")
        return {
            "q": f"the query{placed}",
            "k": f"the keys{placed}",
            "scores": f"s_j = {self._entry_text('score', spec.score.name)}",
            "capped_scores": f"{spec.softcap:g} · tanh(s_j / {spec.softcap:g})" if spec.softcap else "",
            "masked_scores": "; ".join(part for part in masked if part),
            "weights": self._entry_text("normalizer", spec.normalizer.name),
            "v": "the values",
            "context": "c = Σ_j w_j v_j" if method == "exact" else self._entry_text("method", method),
        }

    def output(self, name: str | None, flat: bool) -> str:
        """Return the formula of the output, which has all heads in one row where ``flat``."""
        contexts = "the contexts of all heads, one after another"
        return f"o = W_o · ({contexts}) + b_o" if name is not None else f"o = {contexts}" if flat else "o = c"

    def backward(self) -> dict[str, str]:
        """Return the formula of ∂L/∂tap of each tap."""
        spec, cap = self._spec, self._spec.softcap
        if spec.method.name != "exact":
            of_method = self._entry_text("method", spec.method.name, "gradient")
            return dict.fromkeys(_WITHOUT_PAIRS, of_method) | {"context": "from ∂L/∂o"}
        of_score = self._entry_text("score", spec.score.name, "gradient")
        return {
            "context": "from ∂L/∂o, through W_o in a module",
            "weights": "∂w_j = ∂c·v_j",
            "masked_scores": self._entry_text("normalizer", spec.normalizer.name, "gradient"),
            "capped_scores": "∂s where looking is allowed, 0 elsewhere",
            "scores": f"∂c(s) · (1 − tanh²(s_j / {cap:g}))" if cap else "∂m where looking is allowed, 0 elsewhere",
            "q": of_score,
            "k": of_score,
            "v": "∂v_j = w_j ∂c",
        }

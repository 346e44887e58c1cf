"""Any reply as tables for people, by the types of its fields.

A list of models becomes a table with a row for each; tensors become one with a row for each tensor, or for each index
where ``_AXES`` names their dimensions; what is left becomes a line, or a table of its own if it is all. ``_COLUMNS``
chooses the columns of models with many fields, and ``_VIEWS`` has the replies that need to be shown in another way.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.text import Text
from rich.tree import Tree

from attention_client.cli.arguments.tensor_arguments import tensors
from attention_client.cli.tables.lens_tables import read_out
from attention_client.cli.tables.model_tables import changed, described, differentiated, looked, predicted
from attention_client.cli.tables.table_output import (
    by_index,
    facts,
    flat,
    line,
    number,
    print_out,
    records,
    scaled,
    table,
)
from attention_contract.base import WireModel
from attention_contract.schemas import weights
from attention_contract.schemas.analyses import circuits
from attention_contract.schemas.analyses.effects import EffectsReply
from attention_contract.schemas.analyses.hopfield import HopfieldReply
from attention_contract.schemas.analyses.lenses import LensInfo, ModelLensReply
from attention_contract.schemas.analyses.model_effects import ModelEffectsReply
from attention_contract.schemas.analyses.probes import ProbeInfo
from attention_contract.schemas.analyses.recording_statistics import RecordingStatistics
from attention_contract.schemas.analyses.rollout import RecordingRollout, RolloutReply
from attention_contract.schemas.analyses.similarity import RecordingSimilarity, SimilarityReply
from attention_contract.schemas.analyses.vectors import VectorInfo
from attention_contract.schemas.answers import Fits
from attention_contract.schemas.attention import Ran
from attention_contract.schemas.checkpoints import CheckpointAttention
from attention_contract.schemas.costs import complexity
from attention_contract.schemas.costs.accuracy import PredictionErrors
from attention_contract.schemas.costs.hardware import HardwareInfo, HardwareList
from attention_contract.schemas.model_requests import ModelForwardReply, ModelGradientsReply, ModelWeightsReply
from attention_contract.schemas.models import ModelInfo, ModelList
from attention_contract.schemas.modules import ModuleInfo, Parameter
from attention_contract.schemas.server import Variant
from attention_contract.schemas.sessions import SessionList
from attention_contract.tensors import dtype_name

NEAREST: Final = 3
"""Similar parts, or inputs, that one row names."""
_COLUMNS: Final = {
    ModuleInfo: "name version device config.dtype config.d_model config.num_heads=heads config.num_kv_heads=kv_heads "
    "parameter_count=parameters bytes",
    ModelInfo: "id state running waiting architecture dtype device bytes max_length refused",
    LensInfo: "id state progress texts skip_first max_tokens layers bytes created",
    ProbeInfo: "id state progress method texts samples positives layer bytes created",
    VectorInfo: "id state progress source method positive negative width bytes created",
    CheckpointAttention: "name config.num_heads config.num_kv_heads config.head_dim config.d_model config.spec missing "
    "problem",
    HardwareInfo: "name memory_bytes=memory bandwidth_gb_s=GB/s link_gb_s=link_GB/s "
    + " ".join(f"tflops.{dtype}={dtype}_TFLOP/s" for dtype in ("float64", "float32", "float16", "bfloat16"))
    + " sources.title=source",
    Variant: "kind name summary cost",
    PredictionErrors: "kernel purpose count median_error mean_error median_absolute_error p95_absolute_error coverage",
    complexity.Cost: "kernel shape.batch shape.queries shape.keys shape.past executed_flops=forward "
    "executed_backward_flops=backward kv_cache_bytes=kv_cache peak_bytes.request=peak predicted.forward.median_ms=ms "
    "predicted.forward.low_ms=from predicted.forward.high_ms=to predicted.gradients.median_ms=gradients_ms "
    "predicted.decode.median_ms=decode_ms",
    Fits: "longest.size=longest longest.kernel longest.bound largest_batch.size=largest_batch "
    "largest_batch.kernel largest_batch.bound",
}
"""The columns of models with many fields."""
_AXES: Final[dict[type, tuple[str, ...]]] = {
    weights.HeadStatistics: ("sequence", "head"),
    weights.TopKeys: ("sequence", "head", "query"),
    circuits.Circuit: ("head",),
    circuits.OutputCircuit: ("head",),
    circuits.Composition: ("head", "later head"),
}
"""The leading dimensions of a model's tensors."""


def show(reply: WireModel) -> None:
    """Print a reply, and at the end what ran."""
    view = next((_VIEWS[kind] for kind in type(reply).__mro__ if kind in _VIEWS), _fields)
    view(reply)
    if isinstance(run := getattr(reply, "ran", None), Ran):
        ran(run)


def ran(run: Ran) -> None:
    """Print one line on what ran."""
    at = f" version {run.version[:12]}" if run.version else ""
    print_out(
        f"{run.kernel} on {run.device} in {run.dtype}{at}: {scaled(run.flops, 'FLOP')}, "
        f"{run.compute_ms:.3g} ms (predicted {run.predicted_ms:.3g}, from {run.predicted_low_ms:.3g} to "
        f"{run.predicted_high_ms:.3g}; queued {run.queue_ms:.3g}), "
        f"up to {scaled(run.peak_bytes, 'B')}, batch of {run.batch}",
        "dim",
    )


def _fields(reply: WireModel, prefix: str = "") -> None:
    """Print the parts of a reply by their types."""
    arrays: dict[str, NDArray[Any]] = {}
    scalars: dict[str, Any] = {}
    parts: dict[str, Callable[[], None]] = {}
    for name, value in reply:
        if value is None or isinstance(value, Ran):
            continue
        if isinstance(value, np.ndarray):
            (scalars if value.ndim < 2 and value.dtype.kind == "i" else arrays)[prefix + name] = value
        elif (part := _part(value, reply, f"{prefix}{name}.")) is not None:
            parts[name] = part
        elif held := tensors(value):
            arrays |= {f"{prefix}{name}.{tap}": array for tap, array in held.items()}
        else:
            scalars[name] = value
    if not arrays and not parts:
        facts(reply)
        return
    table(_tensor_row(name, array) for name, array in arrays.items())
    for name, part in parts.items():
        if len(parts) + bool(arrays) > 1:
            print_out(f"{prefix}{name}".replace("_", " "), "bold")
        part()
    line(flat(scalars))


def _part(value: Any, reply: WireModel, prefix: str) -> Callable[[], None] | None:
    """Return the function that prints a field with a table of its own; None for any other field."""
    if type(value) in _AXES:
        return partial(_indexed, value, reply)
    if isinstance(value, WireModel) and any(type(part_value) in _AXES for _, part_value in value):
        return partial(_fields, value, prefix)
    items = [*value.values()] if isinstance(value, Mapping) else value
    if not (isinstance(items, list) and items and isinstance(items[0], WireModel)):
        return None
    names = [{"of": name} for name in value] if isinstance(value, Mapping) else []
    return partial(records, items, names, _COLUMNS.get(type(items[0]), ""))


def _tensor_row(name: str, array: NDArray[Any]) -> dict[str, str]:
    """Return the shape, the dtype and the statistics of a tensor."""
    finite = array.astype(np.float64)
    finite = finite[np.isfinite(finite)]
    row = {"tensor": name, "shape": str([*array.shape]), "dtype": dtype_name(array)}
    if finite.size:
        statistics = {"mean": finite.mean(), "std": finite.std(), "min": finite.min(), "max": finite.max()}
        row |= {name: number(statistic) for name, statistic in (statistics | {"norm": np.linalg.norm(finite)}).items()}
    return row


def _indexed(part: WireModel, reply: WireModel) -> None:
    """Print a row for each index of a part's tensors, and the rest of it."""
    columns = {name: column for name, column in part if isinstance(column, np.ndarray)}
    if isinstance(part, weights.HeadStatistics):
        columns = {
            f"largest {name}" if name in weights.BY_KEY else name: _of_heads(name, x) for name, x in columns.items()
        }
        columns |= {f"class {name}": x for name, x in (part.classes or {}).items()}
        columns |= {f"pairs {name}": x for name, x in (part.pairs or {}).items()}
    axes: dict[str, Any] = dict.fromkeys(_AXES[type(part)])
    if isinstance(part, weights.TopKeys):
        names = reply.request_names
        axes |= {"head": names.heads, "query": names.row_labels}
        columns = {"key (weight), the largest first": _top(part, names.keys)}
    elif isinstance(reply, circuits.CircuitsReply):
        axes["head"] = reply.heads
    by_index(axes, columns)
    line({name: value for name, value in part if not isinstance(value, np.ndarray | Mapping)})


def _of_heads(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """A statistic with a number for each head; of one by key, the largest."""
    return np.fmax.reduce(array, axis=-1) if name in weights.BY_KEY else array


def _top(top: weights.TopKeys, labels: Sequence[str] | None) -> NDArray[Any]:
    """Return the keys of each query in one text, those without weight left out."""
    texts = np.empty(top.keys.shape[:-1], object)
    for at in np.ndindex(*texts.shape):
        pairs = [(key, weight) for key, weight in zip(top.keys[at], top.weights[at], strict=True) if key >= 0]
        texts[at] = "  ".join(f"{labels[key] if labels else key} ({float(weight):.3f})" for key, weight in pairs)
    return texts


# ── replies with a view of their own ─────────────────────────────────────────────────────────────────────────────────


def _effects(reply: EffectsReply) -> None:
    axes = {"sequence": None} | {
        axis.removesuffix("s").replace("querie", "query"): at for axis, at in reply.swept.items()
    }
    by_index(axes, dict(reply.effects), largest="norm")


def _retrieved(reply: HopfieldReply) -> None:
    columns = {"steps": reply.steps, "energy": reply.energy, "converged": reply.converged, **dict(reply.reached)}
    by_index({"sequence": None, "head": None, "state": None}, columns)


def _values(reply: Parameter) -> None:
    line({"shape": reply.value.shape, "dtype": dtype_name(reply.value)})
    print_out(np.array2string(reply.value.astype(np.float64), precision=4, threshold=200))


def _recorded(reply: RecordingStatistics) -> None:
    table(
        {"layer": attention.name, "head": head}
        | {
            f"largest {name}" if name in weights.BY_KEY else name.replace("_", " "): number(_of_heads(name, x)[at])
            for name, x in tensors(attention.statistics).items()
        }
        for attention in reply.attentions
        for at, head in enumerate(attention.heads)
    )


def _nearest(values: NDArray[Any], names: Sequence[str], own: int | None = None) -> str:
    """Return the names of the largest values of a row; ``own`` is left out."""
    order = [at for at in (-values).argsort(kind="stable") if at != own]
    return "  ".join(f"{names[at]} ({number(abs(values[at]))})" for at in order[:NEAREST])


def _similar(reply: SimilarityReply) -> None:
    """Print the most similar parts of each; of the same parts on both sides, each but itself."""
    meaning, sign = ("divergence in nats", -1) if reply.measure == "jensen_shannon" else ("CKA", 1)
    rows, columns = [[str(at) for at in range(count)] for count in reply.values.shape]
    same = rows == columns and np.allclose(reply.values, reply.values.T, equal_nan=True)
    if isinstance(reply, RecordingSimilarity):
        rows, columns = (
            [f"{part.layer} {part.head or ''}".rstrip() for part in side] for side in (reply.rows, reply.columns)
        )
        same = reply.id == reply.with_
    table(
        {
            "of": row,
            f"most similar ({meaning})": _nearest(
                sign * values, columns, columns.index(row) if same and row in columns else None
            ),
        }
        for row, values in zip(rows, reply.values, strict=True)
    )
    if isinstance(reply, RecordingSimilarity):
        line({"tokens": reply.tokens})


def _traced(reply: RolloutReply) -> None:
    """Print the inputs that each token comes from, the largest value first."""
    recorded = reply if isinstance(reply, RecordingRollout) else None
    tokens = recorded.tokens if recorded else reply.request_names.keys
    named = [f"{at} {tokens[at]}" if tokens else str(at) for at in range(reply.values.shape[1])]
    numbered = recorded is not None or tokens is None
    traced = [named[int(query)] if numbered else query for query in reply.request_names.queries or ()] or named
    table({"token": query, "comes from": _nearest(row, named)} for query, row in zip(traced, reply.values, strict=True))
    if recorded:
        line({"layers": recorded.layers})
        line({f"without {name}": why for name, why in recorded.unseen.items()})


def _costs(reply: complexity.ComplexityReply) -> None:
    """Print a row for each size and alternative, then the growth and the limits of each, and where costs cross."""
    series, sweep = reply.series, reply.request_names.sweep
    if sweep is None or sweep.dimension in {"length", *complexity.Shape.model_fields}:
        sizes: list[dict[str, str]] = [{} for _ in reply.costs]  # the shape has a column for it
    else:
        sizes = [{sweep.dimension.replace("_", " "): str(value)} for value in sweep.values]
    of = [{"of": one.label} if reply.compared else {} for one in series]
    records(
        [one.costs[at] for at in range(len(reply.costs)) for one in series],
        [named | size for size in sizes[: len(reply.costs)] for named in of],
        columns=_COLUMNS[complexity.Cost],
    )
    for one, named in zip(series, of, strict=True):
        line(named | {name: growth for name, growth in one.growth if name != "letters"})
        line(named | {"per": "token"} | dict(one.costs[-1].per_token))
    line({"letters": {letter: meaning for one in series for letter, meaning in one.growth.letters.items()}})
    limits = [(one, named, name, limit) for one, named in zip(series, of, strict=True) for name, limit in one.limits]
    limits = [limit for limit in limits if isinstance(limit[-1], Fits)]
    records(
        [fits for *_, fits in limits],
        [
            named | {"purpose": name, "device": one.device_name, "free": scaled(one.limits.free_bytes, "B")}
            for one, named, name, _ in limits
        ],
        _COLUMNS[Fits],
    )
    line({"projections_crossover": reply.projections_crossover, "omitted": reply.omitted})
    records(reply.crossovers)
    if reply.session is not None:
        _fields(reply.session)


def _sessions(reply: SessionList) -> None:
    """Print the sessions of each module as a tree of forks."""
    trees: dict[str, Tree] = {}
    nodes: dict[str, Tree] = {}
    for session in reply.sessions:  # a parent is older
        above = nodes.get(session.parent or "") or trees.setdefault(
            session.module, Tree(Text(session.module, style="bold"))
        )
        size = f"{session.sequences} × {session.length} tokens" if session.sequences > 1 else f"{session.length} tokens"
        held = "" if session.held == session.length else f", {session.held} held"
        memory = f"{scaled(session.own_bytes, 'B')} own, {scaled(session.shared_bytes, 'B')} shared"
        nodes[session.session] = above.add(
            Text(f"{session.session}  {size}{held}  {memory}{'  pinned' if session.pinned else ''}")
        )
    for tree in trees.values():
        print_out(tree)
    pages = (
        f"{reply.pages} pages of {reply.page_tokens} tokens, {reply.shared_pages} shared; {scaled(reply.bytes, 'B')}"
    )
    print_out(f"{len(reply.sessions)} sessions; {pages}", "dim")


_VIEWS: Final[dict[type, Callable[[Any], None]]] = {
    complexity.ComplexityReply: _costs,
    EffectsReply: _effects,
    HardwareList: lambda reply: records(reply.hardware, columns=_COLUMNS[HardwareInfo]),
    HopfieldReply: _retrieved,
    ModelEffectsReply: changed,
    ModelForwardReply: predicted,
    ModelGradientsReply: differentiated,
    ModelInfo: described,
    ModelLensReply: read_out,
    ModelList: lambda reply: records(reply.data, columns=_COLUMNS[ModelInfo]),
    ModelWeightsReply: looked,
    Parameter: _values,
    RecordingStatistics: _recorded,
    RolloutReply: _traced,
    SessionList: _sessions,
    SimilarityReply: _similar,
}

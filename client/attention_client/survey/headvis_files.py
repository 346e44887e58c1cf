"""A survey as the files that HeadVis reads.

Formats: the docstrings of ``data_pipeline.py`` in https://github.com/anthropics/headvis. Source: Luger et al. 2026,
https://transformer-circuits.pub/2026/headvis.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from attention_client.calls.base import CallOptions
from attention_client.calls.method import Flow
from attention_client.survey.head_survey import HeadSurvey
from attention_client.survey.survey_flow import OnTexts, weights_call
from attention_contract.descriptions import described
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import ModelWeightsReply
from attention_contract.schemas.models import LayerRef
from attention_contract.schemas.weights import HeadStatistics

METRICS: Final = {
    "own_position": "self_attention_score", "previous_token": "prev_token_score", "entropy": "pattern_entropy",
    "mean_distance": "qk_distance", "induction": "induction_score",
}  # fmt: skip
"""HeadVis's names of statistics; others keep their own."""
_BINS: Final = 20
_NAMED_TOKENS: Final = 50
"""Tokens that a table names."""
_DISTANCES: Final = [0, *(2**power for power in range(21))]
"""Bounds of distances in tokens."""


class _Sparse(NamedTuple):
    """The largest weights of one head in one text."""

    text: int
    interval: int
    largest: float
    places: NDArray[np.int64]
    """query · L + key, ascending."""
    weights: NDArray[np.float64]


def exported(
    survey: HeadSurvey,
    folder: Path,
    sizes: tuple[int, int, int],
    threshold: float,
    on_texts: OnTexts | None,
    options: CallOptions,
) -> Flow[Path]:
    """Write the folder; ``sizes``: intervals, samples of each, and weights of each token."""
    intervals, samples, top_k = sizes
    for name, number, least in (("intervals", intervals, 1), ("samples", samples, 1), ("top_k", top_k, 2)):
        if number < least:
            raise InvalidRequest.at(name, f"expected {least} or more, got {number}")
    stack = _stack(survey.heads[0].layer)
    if stack == "cross":
        raise InvalidRequest.at("survey", "HeadVis shows one sequence, but these layers attend from one to another")
    layers = [*dict.fromkeys(surveyed.layer for surveyed in survey.heads if _stack(surveyed.layer) == stack)]
    heads = [at for at, surveyed in enumerate(survey.heads) if surveyed.layer in layers]
    tokens: list[list[str]] = []
    dtype = ""
    largest = np.zeros((len(survey.texts), len(heads)))
    kept: list[list[_Sparse]] = [[] for _ in heads]
    with TemporaryDirectory() as place:  # which texts are chosen is known only once all are read
        for text in range(len(survey.texts)):
            reply = yield weights_call(survey, text, options, layers=layers, top_k=top_k, return_weights=False)
            dtype = reply.ran.dtype
            tokens.append(reply.tokens_of(layers[0])[0].tokens)
            keys, weights = map(np.stack, zip(*_by_head(reply), strict=True))  # [heads, L, k]
            largest[text] = [_largest(*head) for head in zip(keys, weights, strict=True)]
            np.savez(f"{place}/{text}.npz", keys=keys, weights=weights)
            if on_texts is not None:
                on_texts(text + 1, len(survey.texts))
        chosen = [_sampled(column, intervals, samples) for column in largest.T]
        for text in sorted(set().union(*chosen)):
            with np.load(f"{place}/{text}.npz") as top:
                heads_of_text = zip(top["keys"], top["weights"], strict=True)
            for column, (keys, weights) in enumerate(heads_of_text):
                if (interval := chosen[column].get(text)) is not None:
                    most = float(largest[text, column])
                    kept[column].append(_Sparse(text, interval, most, *_coordinates(keys, weights, threshold)))
    numbers = {layer: layer if isinstance(layer, int) else at for at, layer in enumerate(layers)}
    (folder / "heads").mkdir(parents=True, exist_ok=True)
    rows = []
    for column, at in enumerate(heads):
        layer, head = survey.heads[at]
        content = _head_file(survey, at, kept[column], tokens, largest[:, column])
        _write(folder / "heads" / f"L{numbers[layer]}H{head}.json", content)
        means = {METRICS.get(name, name): _finite(survey.means(name)[at]) for name in survey.values}
        rows.append({"layer": numbers[layer], "head": head, **means})
    _write(folder / "scatter_data.json", rows)
    _write(folder / "config.json", _config(survey, rows, numbers, intervals) | _run(tokens, dtype))
    _write(folder / "server_config.json", {})  # without a server, the page reads these files alone
    (folder / "attributions").mkdir(exist_ok=True)
    _write(folder / "attributions" / "manifest.json", {})
    return folder


def _stack(layer: LayerRef) -> str:
    return str(layer).rpartition(".")[0]


def _by_head(reply: ModelWeightsReply) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Yield keys and weights ``[L, k]`` of each head of all layers."""
    for layer in reply.layers:
        if layer.top is not None:
            yield from zip(layer.top.keys, layer.top.weights, strict=True)


def _largest(keys: NDArray[Any], weights: NDArray[Any]) -> float:
    """Return the largest weight, without the first query and the first key, as the page's own maxima are."""
    return float(np.where(keys > 0, weights, 0)[1:].max(initial=0))


def _sampled(largest: NDArray[Any], intervals: int, samples: int) -> dict[int, int]:
    """Return the interval of each chosen text: the largest of the last interval, and random ones of the others."""
    random = np.random.default_rng(0)
    intervals_of_texts: dict[int, int] = {}
    order = np.argsort(largest, kind="stable")
    for interval, members in enumerate(np.array_split(order, intervals), 1):
        if len(members) > samples:
            top = interval == intervals
            members = members[-samples:] if top else random.choice(members, samples, replace=False)  # noqa: PLW2901
        intervals_of_texts |= dict.fromkeys(members.tolist(), interval)
    return intervals_of_texts


def _coordinates(
    keys: NDArray[Any], weights: NDArray[Any], threshold: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the places query · L + key of the weights from a threshold on, ascending, and these weights."""
    shown = (keys >= 0) & (weights >= threshold)
    places = (np.arange(len(keys))[:, None] * len(keys) + keys)[shown]
    order = np.argsort(places)
    return places[order].astype(np.int64), weights[shown][order].astype(np.float64).round(4)


def _head_file(
    survey: HeadSurvey, at: int, passages: Sequence[_Sparse], tokens: Sequence[list[str]], largest: NDArray[Any]
) -> dict[str, Any]:
    """The content of ``heads/L{layer}H{head}.json``."""
    layer, head = survey.heads[at]
    mass: dict[str, Counter[str]] = {"query": Counter(), "key": Counter()}
    distances: NDArray[np.float64] = np.zeros(len(_DISTANCES) - 1)
    for passage in passages:
        words = tokens[passage.text]
        queries, keys = np.divmod(passage.places, len(words))
        distances += np.histogram(np.abs(queries - keys), _DISTANCES, weights=passage.weights)[0]
        for side, places in (("query", queries), ("key", keys)):
            for place, weight in zip(places.tolist(), passage.weights.tolist(), strict=True):
                mass[side][words[place]] += weight
    last = int(np.flatnonzero(distances).max(initial=0)) + 1
    counts, edges = np.histogram(largest, _BINS, (0, 1))
    spread = {
        METRICS.get(name, name): survey.distribution(layer, head, name, bins=_BINS) for name in survey.values
    }  # fmt: skip
    content: dict[str, Any] = {
        "sequences": [
            {
                "sequence_id": passage.text,
                "interval": passage.interval,
                "tokens": tokens[passage.text],
                "attention_indices": passage.places.tolist(),
                "attention_values": passage.weights.tolist(),
                "seq_len": len(tokens[passage.text]),
                "max_activation": round(passage.largest, 4),
            }
            for passage in sorted(passages, key=lambda passage: (-passage.interval, -passage.largest))
        ],
        "qk_distance_histogram": _histogram(_DISTANCES[: last + 1], distances[:last].round(4).tolist()),
        "top_query_tokens": _table(mass["query"]),
        "top_key_tokens": _table(mass["key"]),
        "histogram": _histogram(edges.tolist(), counts.tolist()),
        "statistics": {"texts": len(survey.texts), "mean_max_activation": _finite(largest.mean())}
        | {f"{metric}_deviation": _finite(distribution.deviation) for metric, distribution in spread.items()},
    }
    return content | {
        f"distribution_{metric}": _histogram(distribution.edges, distribution.counts)
        for metric, distribution in spread.items()
    }


def _config(
    survey: HeadSurvey, rows: Sequence[Mapping[str, Any]], numbers: Mapping[LayerRef, int], intervals: int
) -> dict[str, Any]:
    """The content of ``config.json``."""
    names = {METRICS.get(name, name): name for name in survey.values}
    fields = described(HeadStatistics)
    meanings = {
        metric: " ".join(str(fields[name.partition(".")[0]].description).split()) for metric, name in names.items()
    }
    plots = {"histogram": "Largest weight of a text", "qk_distance_histogram": "Q-K distance"}
    plots |= {f"distribution_{metric}": f"{metric} of a text" for metric in names}
    return {
        "model_name": survey.model,
        "heads": [[row["layer"], row["head"]] for row in rows],
        "n_layers": len(numbers),
        "n_heads": max(row["head"] for row in rows) + 1,
        "n_intervals": intervals,
        "metrics": [*names],
        "metric_descriptions": meanings,
        "head_data_pattern": "L{layer}H{head}.json",
        "has_umap": False,
        "umap_heads": [],
        "custom_plots": [{"key": key, "label": label} for key, label in plots.items()],
        "custom_tables": [
            {"key": f"top_{side}_tokens", "label": f"Top {side} tokens"} for side in ("query", "key")
        ],
        "statistics_display": {
            "texts": {"label": "Texts", "format": "default"},
            "mean_max_activation": {"label": "Mean largest weight of a text", "format": "default"},
        }
        | {f"{metric}_deviation": {"label": f"Deviation of {metric}", "format": "default"} for metric in names},
        "layer_names": {str(number): str(layer) for layer, number in numbers.items()},
    }  # fmt: skip


def _run(tokens: Sequence[Sequence[str]], dtype: str) -> dict[str, Any]:
    """The facts of a run that Neuronpedia's readers of such folders need.

    Source: ``load-head-metrics.py`` and ``load-head-sequences.py`` of https://github.com/hijohnnylin/neuronpedia.
    """
    longest = max(map(len, tokens), default=0)
    sizes = {"n_sequences": len(tokens), "seq_len": longest}
    return {"dataset_name": "texts", **sizes, "dtype": dtype, "attn_implementation": "attention-service"}


def _histogram(edges: Sequence[float], values: Sequence[float]) -> dict[str, Any]:
    return {"bin_edges": [round(edge, 6) for edge in edges], "bin_values": [*values]}


def _table(mass: "Counter[str]") -> list[dict[str, Any]]:
    """The tokens with most weight, and their shares of all of it."""
    whole = sum(mass.values()) or 1.0
    return [{"token": token, "weight": round(weight / whole, 4)} for token, weight in mass.most_common(_NAMED_TOKENS)]


def _finite(value: float) -> float | None:
    return round(float(value), 6) if np.isfinite(value) else None


def _write(path: Path, content: Any) -> None:
    path.write_bytes(orjson.dumps(content))

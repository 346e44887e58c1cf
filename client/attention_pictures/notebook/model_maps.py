"""Maps, tables and tokens of what whole models answer, as a notebook shows them. B texts, H heads, T tokens."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from attention_contract.reply_names import head_name, token_name
from attention_contract.schemas.analyses.context import ContextReply
from attention_contract.schemas.analyses.model_effects import ModelEffectsReply
from attention_contract.schemas.analyses.model_paths import PathEnd
from attention_contract.schemas.costs.model_complexity import ModelComplexityReply, PassCost
from attention_contract.schemas.model_requests import (
    LayerWeights,
    ModelForwardReply,
    ModelGradientsReply,
    ModelWeightsReply,
    Prediction,
)
from attention_contract.schemas.prompts import ModelReply
from attention_contract.schemas.text_similarity import TextSimilarityReply
from attention_pictures.context.context_files import context_body
from attention_pictures.context.highlights import chosen_measure, values_of
from attention_pictures.notebook.html_tables import table_html, tokens_html
from attention_pictures.notebook.notebook_maps import MOST_NUMBERS, Maps, html_of, statistic_maps
from attention_pictures.statistic_tables import named

_OF_PAIRS: Final = ("weights", "scores", "capped_scores", "masked_scores")
"""Taps with a number for each query and key."""
_MIB: Final = 1024**2
_BESIDE_TEXT: Final = MOST_NUMBERS * 2 // 3
"""Numbers of the maps that stand beside a thousand tokens or a table."""


def weights_html(reply: ModelWeightsReply) -> str | None:
    """Maps of the weights of all heads; of layers without weights, the statistics by layer and head."""
    maps = list(
        _maps_of_heads(reply, [(layer.layer, _weights_of(layer), layer.implicit is True) for layer in reply.layers])
    )
    if maps:
        return html_of(maps)
    rows = [
        (str(layer.layer), {name: _over_texts(x) for name, x in named(layer.statistics).items()})
        for layer in reply.layers
    ]
    return html_of([*statistic_maps(rows), *_received_maps(reply)])


def _received_maps(reply: ModelWeightsReply) -> list[Maps]:
    """A map of heads × keys for each layer over one text, of what the keys receive; of layers with the same keys."""
    received = [
        (layer.layer, x) for layer in reply.layers if (x := layer.statistics.received) is not None and x.ndim == 2
    ]
    if not received or len({x.shape for _, x in received}) > 1:
        return []
    values = np.stack([x for _, x in received])
    heads, keys = [head_name(None, head) for head in range(values.shape[1])], reply.tokens_of(received[0][0])[1].tokens
    return [Maps(values, [str(layer) for layer, _ in received], heads, keys, "Received by each key", "Layer")]


def forward_html(reply: ModelForwardReply) -> str | None:
    """A table of the predictions, and maps of the taps that have a number for each query and key."""
    names = [name for name in _OF_PAIRS if any(getattr(layer, name) is not None for layer in reply.layers)]
    maps: list[Maps] = []
    for name in names:
        layers = [(layer.layer, getattr(layer, name), name != "weights") for layer in reply.layers]
        maps += _maps_of_heads(reply, layers, title=name.replace("_", " ").capitalize())
    rows = [row for prediction in reply.predictions for row in _likely(reply, prediction)]
    columns = ("text", "position", "token there", "likely", "probability", "logit")
    table = table_html(f"Predictions of {reply.ran.model}", columns, rows) if rows else ""
    answer = "" if reply.answer is None else _answer_html(reply.answer)
    return (table + answer + (html_of(maps, _BESIDE_TEXT) or "")) or None


def gradients_html(reply: ModelGradientsReply) -> str | None:
    """The tokens on the colour of their gradient, a map of layers × heads, and maps of the gradients of pairs."""
    shown = []
    if reply.tokens is not None:
        texts = np.atleast_2d(reply.tokens)
        shown += [
            tokens_html(f"gradient · embedding of each token{_of_text(reply, at)}", reply.labels_of(at).tokens, values)
            for at, values in enumerate(texts)
        ]
    rows = [
        (str(layer.layer), {"mean over texts": _over_texts(layer.heads)})
        for layer in reply.layers
        if layer.heads is not None
    ]
    maps = statistic_maps(rows, "First-order effect of each head: Σ gradient · context", signed=True)
    for name in _OF_PAIRS:
        layers = [(layer.layer, layer.gradients.get(name), True) for layer in reply.layers]
        maps += _maps_of_heads(reply, layers, title=f"Gradients of the {name.replace('_', ' ')}")
    return ("".join(shown) + (html_of(maps, _BESIDE_TEXT) or "")) or None


def effects_html(reply: ModelEffectsReply) -> str | None:
    """Maps of the change by each edit, or along each path: over the last two swept axes."""
    labels = reply.request_names.keys
    axes = [[_swept_name(axis, at, labels) for at in places] for axis, places in reply.swept.items()]
    maps = []
    for name in ("value", "divergence"):
        values: NDArray[Any] | None = getattr(reply.effects, name)
        if values is not None:
            title = "Change of the measured number" if name == "value" else "Divergence of the prediction"
            maps.append(_swept(np.asarray(values), [*reply.swept], axes, title, signed=name == "value"))
    return html_of(maps)


def context_html(reply: ContextReply) -> str | None:
    """The prompt with its sources highlighted, for the first measure that the reply has."""
    return context_body(reply, chosen_measure(reply)) if values_of(reply) else None


def complexity_html(reply: ModelComplexityReply) -> str:
    """A table of the passes and their costs."""
    passes = [(name, cost) for name in type(reply).model_fields if isinstance(cost := getattr(reply, name), PassCost)]
    rows = [
        (name.replace("_", " "), f"{cost.flops:.3g}", f"{cost.bytes / _MIB:.4g}", f"{cost.peak_bytes / _MIB:.4g}",
         f"{cost.predicted_ms:.3g} ({cost.predicted_low_ms:.3g} to {cost.predicted_high_ms:.3g})")
        for name, cost in passes
    ]  # fmt: skip
    caption = f"Cost of {reply.model}: {reply.parameters:,} parameters, {reply.parameter_bytes / _MIB:.4g} MiB"
    return table_html(caption, ("pass", "FLOPs", "MiB moved", "peak MiB", "predicted ms"), rows)


def similarity_html(reply: TextSimilarityReply) -> str:
    """Both texts of each pair, with the tokens on the colour of what they add to the similarity."""
    shown = []
    for pair, (cosine, labels) in enumerate(zip(reply.similarity, reply.labels, strict=True)):
        shown.append(f"<p>Pair {pair}: similarity {cosine:.4g}</p>")
        for side, label in enumerate(labels):
            numbers = [0.0] * len(label.tokens) if reply.tokens is None else reply.tokens[pair][side]
            shown.append(tokens_html("∂cosine/∂embedding · embedding", label.tokens, numbers))
    return "".join(shown)


def _maps_of_heads(
    reply: ModelReply, layers: Iterable[tuple[int | str, NDArray[Any] | None, bool]], title: str = "Attention weights"
) -> Iterable[Maps]:
    """Maps ``[heads of all layers, Lq, Lk]`` of layers with the same queries and keys, text by text."""
    groups: dict[tuple[Any, ...], tuple[list[NDArray[Any]], list[str]]] = {}
    names = reply.request_names
    for layer, values, signed in layers:
        if values is None:
            continue
        several = reply.media_labels_of(layer) is not None or isinstance(reply.labels, list)
        for text, maps in enumerate(values if several else values[None]):
            of = names.of_tokens(*([*side.tokens] for side in reply.tokens_of(layer, text)))
            queries, keys = tuple(of.row_labels or ()), tuple(of.column_labels or ())
            by_head = maps[None] if names.averaged else maps
            heads = ["mean of the heads"] if names.averaged else names.heads or range(len(by_head))
            called = [f"{layer} {at}" if isinstance(at, str) else head_name(layer, at) for at in heads]
            shown, held = groups.setdefault((signed, text, queries, keys, by_head.shape[1:]), ([], []))
            shown.extend(by_head)
            held.extend(called)
    for (signed, text, queries, keys, (rows, columns)), (shown, held) in groups.items():
        pool = 1 if len(queries) <= rows and len(keys) <= columns else names.pool
        sides = _padded(_squares(queries, pool), rows), _padded(_squares(keys, pool), columns)
        about = f"{'Implicit weights' if signed and title == 'Attention weights' else title}{_of_text(reply, text)}"
        yield Maps(np.stack(shown), held, *sides, about, signed=signed)


def _over_texts(values: NDArray[Any]) -> NDArray[np.float64]:
    """The mean ``[H]`` of numbers ``[B, H]``, or ``[H]``, over the texts that have one; NaN where none has."""
    mean: NDArray[np.float64] = np.ma.masked_invalid(np.atleast_2d(values)).mean(0).filled(np.nan)
    return mean


def _swept(values: NDArray[Any], swept: list[str], axes: list[list[str]], title: str, *, signed: bool) -> Maps:
    """Maps over the last two swept axes; those before them, and the texts, are told by the names of the maps."""
    values = values[(None,) * (len(axes) + 1 - values.ndim)]  # [B, *swept]
    if len(axes) == 1:
        swept, axes, values = ["", *swept], [[""], *axes], values[:, None]
    before = list(np.ndindex(*values.shape[:-2]))
    texts = values.shape[0]
    names = [
        ", ".join(([f"text {at[0]}"] if texts > 1 else []) + [f"{swept[i]} {axes[i][j]}" for i, j in enumerate(at[1:])])
        or " × ".join(name for name in swept if name)
        for at in before
    ]
    return Maps(values.reshape(-1, *values.shape[-2:]), names, axes[-2], axes[-1], title, "Map", signed=signed)


def _swept_name(axis: str, place: Any, labels: Sequence[str] | None) -> str:
    if isinstance(place, PathEnd):
        return place.name
    return token_name(place, labels) if axis in {"queries", "keys"} else str(place)


def _likely(reply: ModelForwardReply, prediction: Prediction) -> Iterable[tuple[Any, ...]]:
    tokens = reply.labels_of(prediction.text).tokens
    there = tokens[prediction.position] if prediction.position < len(tokens) else ""
    for top in prediction.top:
        yield prediction.text, prediction.position, there, top.token, float(top.probability), float(top.logit)


def _answer_html(answer: Any) -> str:
    texts = answer if answer and isinstance(answer[0], list) else [answer]
    return "".join(
        tokens_html(
            "log p of each token of the answer", [token.token for token in text], [token.logprob for token in text]
        )
        for text in texts
    )


def _weights_of(layer: LayerWeights) -> NDArray[Any] | None:
    return layer.weights if layer.weights is not None else layer.pooled


def _squares(labels: Sequence[str], by: int) -> Sequence[str]:
    """The labels of pooled weights: the first of each square."""
    return labels if by == 1 else [f"{label} …" for label in labels[::by]]


def _padded(labels: Sequence[str], count: int) -> list[str]:
    """A label for each row or column: the tokens, and nothing for the padding."""
    return [*labels[:count], *("" for _ in range(count - len(labels)))]


def _of_text(reply: ModelReply, text: int) -> str:
    return f", text {text}" if isinstance(reply.labels, list) else ""

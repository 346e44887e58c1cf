"""Tables for people of the keys that the heads of a whole model look at."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attention_client.cli.arguments.tensor_arguments import tensors
from attention_client.cli.tables.block_map import print_map
from attention_client.cli.tables.table_output import by_index, cell, facts, line, number, print_out, table
from attention_contract.reply_names import head_name, token_name
from attention_contract.schemas.analyses.model_effects import ModelEffectsReply
from attention_contract.schemas.analyses.model_paths import PathEnd
from attention_contract.schemas.model_requests import (
    LayerWeights,
    ModelForwardReply,
    ModelGradientsReply,
    ModelWeightsReply,
)
from attention_contract.schemas.models import ModelInfo
from attention_contract.schemas.prompts import ModelRan, ModelReply
from attention_contract.schemas.weights import BY_KEY, TopKeys

_PAIRS: Final = 3
"""Pairs of tokens that one row names."""
_MAX_HEAD_COLUMNS: Final = 6
"""The most heads for which a table has a row for each token and a column for each head."""


class _Top(NamedTuple):
    """The keys that each query of a head looks at most, ``[Lq, k]``; -1 where it may look at fewer."""

    keys: NDArray[Any]
    weights: NDArray[Any]


@dataclass(frozen=True)
class _Head:
    """One head over one text, as a reply tells of it."""

    name: str
    statistics: dict[str, str]
    queries: Sequence[str]
    keys: Sequence[str]
    """The tokens that are its queries and keys."""
    top: _Top | None
    weights: NDArray[Any] | None
    """``[Lq, Lk]``, if the reply has them by head."""

    def largest_weights(self, count: int = _PAIRS) -> str:
        """Name the largest weights of queries that had a choice: the first query of a causal model has none."""
        if self.top is None:
            return ""
        keys, weights = self.top
        firm = [
            (weights[query, 0], query, keys[query, 0])
            for query in range(len(self.queries))
            if (keys[query] >= 0).sum() > 1
        ]
        return "  ".join(
            f"{self.queries[query]} → {self.keys[key]} ({weight:.2f})"
            for weight, query, key in sorted(firm, reverse=True)[:count]
        )

    def keys_of(self, query: int) -> str:
        """Name the keys that one query looks at most."""
        if self.top is None:
            return ""
        return "  ".join(
            f"{self.keys[key]} ({weight:.2f})"
            for key, weight in zip(self.top.keys[query], self.top.weights[query], strict=True)
            if key >= 0
        )


def described(reply: ModelInfo) -> None:
    """Print the attentions of a model, those that are alike as one, then what they can answer, and the model itself."""
    alike = [[*layers] for _, layers in groupby(reply.layers, lambda layer: layer.model_dump(exclude={"layer"}))]
    names = [str(run[0].layer) + (f"–{run[-1].layer}" if len(run) > 1 else "") for run in alike]
    columns = ("kind", "keys", "heads", "kv_heads", "head_dim")
    table(
        {"layers": name} | {column.replace("_", " "): cell(column, getattr(first, column)) for column in columns}
        for name, (first, *_) in zip(names, alike, strict=True)
    )
    for answer in ("taps", "edits", "gradients", "refused"):
        for name, (first, *_) in zip(names, alike, strict=True):
            line({f"{answer} of {name}": getattr(first, answer)})
    for name, (first, *_) in zip(names, alike, strict=True):
        if first.generation is not None:
            line({f"refused in a generation of {name}": first.generation.refused})
    facts(reply, frozenset({"layers"}))


def looked(reply: ModelWeightsReply) -> None:
    """Print a row for each head: its statistics, and the pairs of tokens with its largest weights.

    Of a few heads, print a row for each token too, with the keys that each of them attends to, and before all the maps
    of those whose weights the reply has.
    """
    for text, index in _texts(reply):
        if text is not None:
            print_out(f"text {text}", "bold")
        heads = [*_heads(reply, text, index)]
        few = len(heads) <= _MAX_HEAD_COLUMNS
        rows, columns = reply.request_names.rows, reply.request_names.columns
        for head in heads if few else ():
            if head.weights is not None:
                print_map(head.name, head.weights, head.queries, rows, columns)
        table({"head": head.name} | head.statistics | {"largest weights": head.largest_weights()} for head in heads)
        queries = {tuple(head.queries) for head in heads}
        if few and len(queries) == 1 and all(head.top is not None for head in heads):
            print_out("")
            table(
                {"token": query} | {head.name: head.keys_of(at) for head in heads}
                for at, query in enumerate(next(iter(queries)))
            )
    model_ran(reply.ran)


def largest_weights(reply: ModelWeightsReply, count: int) -> str:
    """Name the pairs of tokens with the largest weights of the one head that a reply about one text has."""
    (head,) = _heads(reply, None, 0)
    return head.largest_weights(count)


def predicted(reply: ModelForwardReply) -> None:
    """Print a row for each prediction: the token, and those that follow it or stand in its place; or the classes."""
    texts = len(reply.labels) if isinstance(reply.labels, list) else 1
    of_texts = reply.predicts == "class" and len(reply.predictions) <= texts

    def token(text: int, position: int) -> str:
        return "" if of_texts else f"{position} {readable(reply.labels_of(text).tokens[position])}"

    table(
        {
            "text": str(prediction.text) if isinstance(reply.labels, list) else "",
            "token": token(prediction.text, prediction.position),
            "probability": "  ".join(
                f"{readable(top.token)} ({top.probability:.3f}{_before(top.unedited_probability)})"
                for top in prediction.top
            ),
            "divergence": "" if prediction.divergence is None else number(prediction.divergence),
        }
        for prediction in reply.predictions
    )
    table(
        {"layer": str(layer.layer), "tensor": name, "shape": str([*array.shape])}
        for layer in reply.layers
        for name, array in tensors(layer).items()
    )
    model_ran(reply.ran)


def differentiated(reply: ModelGradientsReply) -> None:
    """Print what was differentiated, a row for each token with its share, and a row for each layer with its heads'."""
    for text, index in _texts(reply):
        values = {name: getattr(reply, name) for name in ("value", "tokens", "baseline")}
        # A choice of one of several texts is one number.
        own = {name: value if text is None or value is None else value[min(text, len(value) - 1)]
               for name, value in values.items()}  # fmt: skip
        names = reply.token_names
        token = None if names is None else names[min(text or 0, len(names) - 1)]
        fields = {"text": text, "value": number_of(own["value"]), "baseline": number_of(own["baseline"])}
        line(fields if token is None else {"log p of": readable(token)} | fields)
        encoder = reply.encoder_labels
        read = reply.labels_of(index) if encoder is None else encoder[index] if isinstance(encoder, list) else encoder
        shares = [] if own["tokens"] is None else own["tokens"]
        table(
            {"position": str(at), "token": readable(token), "gradient · embedding": number_of(share)}
            for at, (token, share) in enumerate(zip(read.tokens, shares, strict=False))
        )
        table(
            {"layer": str(layer.layer)}
            | {
                head_name(None, at): number_of(gradient)
                for at, gradient in enumerate(layer.heads if text is None else layer.heads[text])
            }
            for layer in reply.layers
            if layer.heads is not None
        )
        if normed := [str(layer.layer) for layer in reply.layers if layer.heads_normed]:
            print_out(
                f"Each head of layer {', '.join(normed)} has a norm behind its context, so its number is 0 up to "
                "rounding, whatever the head does; ask for effects."
            )
    table(
        {"layer": str(layer.layer), "gradient of": name, "shape": str([*array.shape])}
        for layer in reply.layers
        for name, array in layer.gradients.items()
    )
    table(
        {"gradient of": name, "absolute error": number(check.max_absolute_error), "passed": cell("", check.passed)}
        for name, check in (reply.check or {}).items()
    )
    model_ran(reply.ran)


def changed(reply: ModelEffectsReply) -> None:
    """Print what was measured, and a row for each edit or path, those that change the prediction most first."""
    names = reply.token_names
    for text, baseline in enumerate(np.atleast_1d(reply.baseline)):
        token = None if names is None else names[min(text, len(names) - 1)]
        fields = {"text": text if isinstance(reply.labels, list) else None, "baseline": number_of(baseline)}
        line(fields if token is None else {"log p of": readable(token)} | fields)
    singular = {
        "layers": "layer", "heads": "head", "queries": "query", "keys": "key", "scales": "scale", "from": "from",
        "to": "to",
    }  # fmt: skip
    axes: dict[str, Sequence[Any] | None] = {"text": None}
    for axis, indices in reply.swept.items():
        labels = reply.request_names.keys if axis in {"queries", "keys"} else None
        axes[singular[axis]] = [_swept_name(place, labels) for place in indices]
    effects = dict(reply.effects)
    by_index(axes, effects, largest="value" if effects["divergence"] is None else "divergence")
    model_ran(reply.ran)


def _swept_name(place: Any, labels: Sequence[str] | None) -> Any:
    """Return the name of the end of a path, or of labelled tokens; other indices as they are."""
    if isinstance(place, PathEnd):
        return place.name
    return place if labels is None else token_name(place, labels)


def number_of(value: Any) -> str:
    """Format one number of a reply; nothing if it has none."""
    return "" if value is None else number(value)


def model_ran(run: ModelRan) -> None:
    """Print one line on what ran."""
    weights = "" if run.weights == run.dtype else f", {run.weights}"
    loaded = f", loaded in {run.load_ms / 1000:.3g} s" if run.load_ms else ""
    kernels = "".join(f", {kernel}" for kernel in run.kernels)
    print_out(
        f"{run.model} ({run.architecture}) on {run.device} in {run.dtype}{weights}: {run.compute_ms:.3g} ms "
        f"(queued {run.queue_ms:.3g}){loaded}{kernels}",
        "dim",
    )


def readable(token: str) -> str:
    """Return a token without the space before it; of white space, as a program writes it."""
    return cell("token", token.strip()) or repr(token)


def _before(unedited: float | None) -> str:
    return "" if unedited is None else f", unedited {unedited:.3f}"


def _texts(reply: ModelReply) -> Iterator[tuple[int | None, int]]:
    """Yield each text's index in the tensors, None for the only one without a batch dimension, and its number."""
    if not isinstance(reply.labels, list):
        yield None, 0
        return
    yield from ((number, number) for number in range(len(reply.labels)))


def _names(reply: ModelWeightsReply, layer: LayerWeights, text: int) -> tuple[list[str], list[str]]:
    """Return the names of a layer's selected queries, and of all its keys."""
    queries, keys = ([readable(token) for token in side.tokens] for side in reply.tokens_of(layer.layer, text))
    names = reply.request_names.of_tokens(queries, keys)
    return list(names.row_labels or ()), list(names.keys or ())


def _heads(reply: ModelWeightsReply, text: int | None, number: int) -> Iterator[_Head]:
    """Yield each head that is asked for, over the text with this index in the tensors and this number."""
    for layer in reply.layers:
        queries, keys = _names(reply, layer, number)
        at_crop = text is None and reply.media_labels_of(layer.layer) is not None
        index = 0 if at_crop else text  # the first crop or sound, where their layers stand beside those of a text
        every = {name: array if index is None else array[index] for name, array in tensors(layer.statistics).items()}
        count = len(next(iter(every.values()), ()))
        maps = None if layer.weights is None else layer.weights if index is None else layer.weights[index]
        for at, head in enumerate(reply.request_names.heads or range(count)):
            yield _Head(
                name=head_name(layer.layer, head),
                statistics=_statistics(every, keys, head),
                queries=queries,
                keys=keys,
                top=None if layer.top is None else _top(layer.top, index, at),
                weights=None if maps is None or maps.ndim < 3 else maps[at],
            )


def _statistics(every: Mapping[str, NDArray[Any]], keys: Sequence[str], head: int) -> dict[str, str]:
    """The statistics of one head as text; of one by key, the key with the largest number."""
    row = {name.replace("_", " "): number_of(x[head]) for name, x in every.items() if x.ndim == 1}
    for name in BY_KEY & every.keys():
        numbers = np.where(np.isnan(every[name][head]), -np.inf, every[name][head])
        at = int(numbers.argmax())
        row[f"{name} most"] = f"{keys[at]} ({number_of(numbers[at])})"
    return row


def _top(top: TopKeys, text: int | None, head: int) -> _Top:
    keys, weights = (top.keys, top.weights) if text is None else (top.keys[text], top.weights[text])
    return _Top(keys[head], weights[head].astype(np.float64))

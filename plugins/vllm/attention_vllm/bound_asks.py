"""Asks of a known model: layers, heads and edits within its sizes, and the edits as the core makes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.attention import Edit
from attention_service.core.edits import AXES, BoundEdit, axis_of, varies
from attention_service.core.inspection.statistics import DEFAULT_STATISTICS, PAIRS, statistics_of
from attention_service.prompts.named_pairs import TextPairs, text_pairs
from attention_vllm.asks import AttentionAsk, prompt_digest, statistic_names
from attention_vllm.layer_facts import LayerFacts
from attention_vllm.rank_heads import WHOLE, RankHeads, ToldHeads

OUTPUT: Final = "output"
"""The tap behind the last projection of a layer."""
_MAX_TAPPED: Final = 2**26
"""The most numbers of the taps of one text: 256 MiB of float32."""


@dataclass(frozen=True, eq=False)
class BoundAsk:
    """An ask that fits the model."""

    ask: AttentionAsk
    layers: tuple[int, ...]
    """The layers to tell of, in their order; none for an ask that only edits."""
    names: tuple[str, ...]
    """The statistics to tell."""
    edits: Mapping[int, Sequence[BoundEdit]]
    """The edits between the projections of a layer, of the heads of this rank."""
    edited_heads: Mapping[int, Sequence[int]]
    """The heads of this rank that the edits of each layer change."""
    output_edits: Mapping[int, Sequence[BoundEdit]]
    """The edits of ``output``."""
    heads: Mapping[int, ToldHeads]
    """The heads of this rank to tell of, by layer."""
    spans: Mapping[str, Sequence[int]]
    """The tokens of named parts of the prompt."""
    pairs: TextPairs | None
    """The pairs of the text, if they are told of."""
    taps: frozenset[str]
    """The taps to read of all tokens of the prompt, in the layers of ``heads``."""
    settings: str
    """Equal for asks that want the same to be told."""

    def placed(self, layer: int) -> dict[str, Any]:
        """The fields of a layer in a result: its number, and the places of a rank's heads among those of the reply."""
        places = self.heads[layer].places
        return {"layer": layer} if places is None else {"layer": layer, "places": list(places)}

    @property
    def reads_tokens(self) -> bool:
        """True if a statistic compares tokens."""
        options = self.ask.attention.statistic_options
        return bool({"duplicate_token", "induction"} & {*self.names}) or (
            "classes" in self.names and bool(options.token_classes)
        )


@dataclass(frozen=True, eq=False)
class KnownModel:
    """The layers of a model as one worker has them."""

    facts: Mapping[int, LayerFacts]
    share: RankHeads = WHOLE
    """The heads of this worker."""
    outputs: Mapping[int, int] | str = "the outputs of layers were not found"
    """The width of each layer's output, or the reason why these are not edited."""
    device: Any = "cpu"


def bind_ask(ask: AttentionAsk, model: KnownModel, prompt: Sequence[int], most: int) -> BoundAsk:
    """Check an ask against the layers of a model. Raises InvalidRequest that names the field at fault.

    ``prompt``: its tokens; ``most``: the tokens that the text may have in the end.
    """
    wanted, share = ask.attention, model.share
    facts = {layer: share.whole(own) for layer, own in model.facts.items()}
    told = [*facts] if wanted.layers == "all" else [layer for layer in wanted.layers if isinstance(layer, int)]
    for layer in told:
        if layer not in facts:
            raise InvalidRequest.at("attention.layers", f"expected layers among {', '.join(map(str, facts))}")
        _check_indices("attention.heads", wanted.heads, facts[layer].heads, "heads")
    names = statistic_names(wanted, DEFAULT_STATISTICS)
    able = frozenset[str]().union(*(statistics_of(facts[layer].spec) for layer in told))
    if "sink_mass" in names and "sink_mass" not in able:
        index = list(wanted.statistics or ()).index("sink_mass")
        raise InvalidRequest.at(f"attention.statistics.{index}", "sink_mass needs a softmax with learned sinks")
    edits: dict[int, Sequence[BoundEdit]] = {}
    edited_heads: dict[int, Sequence[int]] = {}
    of_outputs: dict[int, Sequence[BoundEdit]] = {}
    for key, stated in wanted.edits.items():
        layer = int(key)
        if layer not in facts:
            raise InvalidRequest.at(f"attention.edits.{key}", f"expected layers among {', '.join(map(str, facts))}")
        for index, edit in enumerate(stated):
            param = f"attention.edits.{key}.{index}"
            _check_edit(edit, facts[layer], most, _output_width(model, layer, edit, param), param)
        inside = [_bound(edit, model.device) for edit in stated if edit.tap != OUTPUT]
        if own := share.own_edits(inside, model.facts[layer]):
            edits[layer] = own
            edited_heads[layer] = _heads_of(own, model.facts[layer])
        if outputs := [_bound(edit, model.device) for edit in stated if edit.tap == OUTPUT]:
            of_outputs[layer] = outputs
    spans = _spans(ask, prompt)
    queries = range(len(prompt) - 1, most - 1)
    pairs = next(iter(text_pairs(wanted.statistic_options, [queries], asked=PAIRS in names)), None)
    silent = not names and not wanted.top_k and not wanted.weights
    layers = () if silent else tuple(told)
    taps = frozenset(ask.taps)
    heads = {layer: share.own_heads(wanted.heads, model.facts[layer]) for layer in (told if taps else layers)}
    _check_taps(model, {layer: facts[layer] for layer in told}, taps, len(prompt))
    settings = wanted.model_dump_json(exclude={"layers", "edits", "from_"}) + repr(spans)
    return BoundAsk(ask, layers, names, edits, edited_heads, of_outputs, heads, spans, pairs, taps, settings)


def _check_taps(model: KnownModel, facts: Mapping[int, LayerFacts], taps: frozenset[str], length: int) -> None:
    """Raise InvalidRequest for taps that are not seen, or of too many numbers."""
    if OUTPUT in taps and isinstance(model.outputs, str):
        raise InvalidRequest.at("return", f"output is not told of here: {model.outputs}")
    counts = {
        "weights": sum(layer.heads for layer in facts.values()) * length**2,
        "context": sum(layer.heads * layer.width for layer in facts.values()) * length,
        OUTPUT: 0 if isinstance(model.outputs, str) else sum(model.outputs[layer] for layer in facts) * length,
    }
    if (count := sum(counts[tap] for tap in taps)) > _MAX_TAPPED:
        raise InvalidRequest.at(
            "return", f"{count} numbers, and {_MAX_TAPPED} are told of at most; name fewer layers, or leave weights out"
        )


def _spans(ask: AttentionAsk, prompt: Sequence[int]) -> dict[str, Sequence[int]]:
    """The tokens of each named part of the prompt. Raises InvalidRequest."""
    tokens: dict[str, Sequence[int]] = {}
    given = ask.attention.statistic_options.spans
    for index, span in enumerate(given):
        param = f"attention.statistic_options.spans.{index}"
        if span.tokens is not None:
            begin, end = span.tokens
            if end > len(prompt):
                raise InvalidRequest.at(
                    f"{param}.tokens", f"the text has {len(prompt)} tokens; expected no more, got {end}"
                )
            tokens[span.name] = range(begin, end)
            continue
        field = "characters" if span.messages is None else "messages"
        known = ask.spans
        if known is None or len(known.tokens) != len(given):
            raise InvalidRequest.at(f"{param}.{field}", "the tokens of this part did not come with the request")
        if known.prompt != prompt_digest(prompt):
            raise InvalidRequest.at(
                f"{param}.{field}", "vLLM writes the prompt by other tokens than its tokenizer and chat template do; "
                "name tokens"
            )  # fmt: skip
        if not known.tokens[index] or max(known.tokens[index]) >= len(prompt):
            raise InvalidRequest.at(f"{param}.{field}", "its tokens are not among those of the prompt")
        tokens[span.name] = known.tokens[index]
    return tokens


def _output_width(model: KnownModel, layer: int, edit: Edit, param: str) -> int:
    """The width of a layer's output; 0 for an edit of another tap. Raises InvalidRequest."""
    if edit.tap != OUTPUT:
        return 0
    if isinstance(model.outputs, str):
        raise InvalidRequest.at(f"{param}.tap", f"output is not edited here: {model.outputs}")
    return model.outputs[layer]


def _check_indices(param: str, indices: Sequence[int] | None, size: int, what: str) -> None:
    if indices is not None and (largest := max(indices)) >= size:
        raise InvalidRequest.at(param, f"{largest} is out of range; there are {size} {what}, numbered from 0")


def _check_edit(edit: Edit, facts: LayerFacts, most: int, output_width: int, param: str) -> None:
    """Raise InvalidRequest for an index that the tap has not, or a tensor that does not fit."""
    heads = facts.kv_heads if edit.tap in ("k", "v") else facts.heads
    sizes = {"heads": heads, "queries": most, "keys": most, "experts": 0}
    for axis, size in sizes.items():
        listed = getattr(edit, axis)
        if axis not in AXES[edit.tap] and listed is not None:
            raise InvalidRequest.at(f"{param}.{axis}", f"{edit.tap} has no {axis}; leave them out")
        _check_indices(f"{param}.{axis}", listed, size, axis)
        if edit.tensor is not None and listed is not None and len(set(listed)) < len(listed):
            raise InvalidRequest.at(
                f"{param}.{axis}",
                "an index is listed twice, so the tensor would have two numbers for it; list each once",
            )
    if facts.window and edit.tap == "weights" and (edit.set or edit.value is not None or edit.add is not None):
        raise InvalidRequest.at(
            f"{param}.tap", "it gives weight to keys, and vLLM gives back the pages behind the window of this layer; "
            "edit scores, or set weights to 0 or scale them"
        )  # fmt: skip
    for name, given in (("value", edit.value), ("add", edit.added)):
        if given is not None:
            width = output_width if edit.tap == OUTPUT else facts.width
            _check_shape(np.shape(given), edit, heads, width, f"{param}.{name}")
    stated: dict[str, Any] = {"set": edit.set, "value": edit.value, "add": edit.added}
    for name, given in stated.items():
        numbers = np.abs(np.asarray(0.0 if given is None else given, np.float64))
        if (numbers[np.isfinite(numbers)] > np.finfo(np.float32).max).any():
            raise InvalidRequest.at(f"{param}.{name}", "it is too large for float32, in which edits are computed")


def _check_shape(shape: tuple[int, ...], edit: Edit, heads: int, width: int, param: str) -> None:
    axes = AXES[edit.tap]
    most = 4 if "heads" in axes else 3
    if len(shape) > most:
        raise InvalidRequest.at(param, f"expected at most {most} dimensions, got {len(shape)}")
    for axis in axes:
        if not varies(shape, edit.tap, axis):
            continue
        listed, size = getattr(edit, axis), shape[axis_of(shape, edit.tap, axis)]
        expected = len(listed) if listed is not None else heads if axis == "heads" else None
        if expected is None:
            raise InvalidRequest.at(param, f"numbers by {axis} need a list of {axis}: the text grows")
        if size != expected:
            raise InvalidRequest.at(param, f"expected {expected} {axis}, or 1; got {size}")
    if "keys" not in axes or edit.tap in ("k", "v"):
        last = shape[-1] if shape else 1
        if last not in (1, width):
            raise InvalidRequest.at(param, f"expected a width of {width}, or 1; got {last}")
    if len(shape) == most and shape[0] != 1:
        raise InvalidRequest.at(param, f"expected one text; got {shape[0]}")


def _bound(edit: Edit, device: Any) -> BoundEdit:
    def tuples(indices: Sequence[int] | None) -> tuple[int, ...] | None:
        return None if indices is None else tuple(indices)

    def tensor(given: Any) -> torch.Tensor | None:
        return None if given is None else torch.as_tensor(np.asarray(given, np.float32)).to(device)

    return BoundEdit(
        edit.tap, tuples(edit.heads), tuples(edit.queries), tuples(edit.keys), edit.set, tensor(edit.value), edit.scale,
        tensor(edit.added), edit.renormalize, real_keys=True,
    )  # fmt: skip


def _heads_of(edits: Sequence[BoundEdit], facts: LayerFacts) -> list[int]:
    """The heads whose context these edits may change."""
    heads: set[int] = set()
    for edit in edits:
        if edit.heads is None:
            return [*range(facts.heads)]
        of_keys = edit.tap in ("k", "v")
        heads |= {head for head in range(facts.heads) if (facts.key_head(head) if of_keys else head) in edit.heads}
    return sorted(heads)

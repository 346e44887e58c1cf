"""Asks of a known model: layers, heads and edits within its sizes, and the edits as the core makes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.attention import Edit
from attention_service.core.edits import AXES, BoundEdit, axis_of, varies
from attention_service.core.inspection.statistics import DEFAULT_STATISTICS, statistics_of
from attention_vllm.asks import AttentionAsk, statistic_names
from attention_vllm.layer_facts import LayerFacts


@dataclass(frozen=True, eq=False)
class BoundAsk:
    """An ask that fits the model."""

    ask: AttentionAsk
    layers: tuple[int, ...]
    """The layers to tell of, in their order; none for an ask that only edits."""
    names: tuple[str, ...]
    """The statistics to tell."""
    edits: Mapping[int, Sequence[BoundEdit]]
    edited_heads: Mapping[int, Sequence[int]]
    """The heads that the edits of each layer change."""
    settings: str
    """Equal for asks that want the same to be told."""

    @property
    def reads_tokens(self) -> bool:
        """True if a statistic compares tokens."""
        options = self.ask.attention.statistic_options
        return bool({"duplicate_token", "induction"} & {*self.names}) or (
            "classes" in self.names and bool(options.token_classes)
        )


def bind_ask(ask: AttentionAsk, facts: Mapping[int, LayerFacts], prompt: int, most: int, device: Any) -> BoundAsk:
    """Check an ask against the layers of a model. Raises InvalidRequest that names the field at fault.

    ``prompt``: the tokens of the prompt; ``most``: the tokens that the text may have in the end.
    """
    wanted = ask.attention
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
    for index, span in enumerate(wanted.statistic_options.spans):
        if span.tokens is not None and span.tokens[1] > prompt:
            raise InvalidRequest.at(
                f"attention.statistic_options.spans.{index}.tokens",
                f"the text has {prompt} tokens; expected no more, got {span.tokens[1]}",
            )
    edits: dict[int, Sequence[BoundEdit]] = {}
    heads: dict[int, Sequence[int]] = {}
    for key, stated in wanted.edits.items():
        layer = int(key)
        if layer not in facts:
            raise InvalidRequest.at(f"attention.edits.{key}", f"expected layers among {', '.join(map(str, facts))}")
        for index, edit in enumerate(stated):
            _check_edit(edit, facts[layer], most, f"attention.edits.{key}.{index}")
        if stated:
            edits[layer] = [_bound(edit, device) for edit in stated]
            heads[layer] = _heads_of(stated, facts[layer])
    silent = not names and not wanted.top_k and not wanted.weights
    settings = wanted.model_dump_json(exclude={"layers", "edits", "from_"})
    return BoundAsk(ask, () if silent else tuple(told), names, edits, heads, settings)


def _check_indices(param: str, indices: Sequence[int] | None, size: int, what: str) -> None:
    if indices is not None and (largest := max(indices)) >= size:
        raise InvalidRequest.at(param, f"{largest} is out of range; there are {size} {what}, numbered from 0")


def _check_edit(edit: Edit, facts: LayerFacts, most: int, param: str) -> None:
    """Raise InvalidRequest for an index beyond the sizes, or a tensor that does not fit."""
    heads = facts.kv_heads if edit.tap in ("k", "v") else facts.heads
    sizes = {"heads": heads, "queries": most, "keys": most}
    for axis in AXES[edit.tap]:
        _check_indices(f"{param}.{axis}", getattr(edit, axis), sizes[axis], axis)
    if facts.window and edit.tap == "weights" and (edit.set or edit.value is not None or edit.add is not None):
        raise InvalidRequest.at(
            f"{param}.tap", "it gives weight to keys, and vLLM gives back the pages behind the window of this layer; "
            "edit scores, or set weights to 0 or scale them"
        )  # fmt: skip
    for name, given in (("value", edit.value), ("add", edit.added)):
        if given is not None:
            _check_shape(np.shape(given), edit, heads, facts.width, f"{param}.{name}")


def _check_shape(shape: tuple[int, ...], edit: Edit, heads: int, width: int, param: str) -> None:
    axes = AXES[edit.tap]
    if len(shape) > 4:
        raise InvalidRequest.at(param, f"expected at most 4 dimensions, got {len(shape)}")
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
    if len(shape) == 4 and shape[0] != 1:
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


def _heads_of(edits: Sequence[Edit], facts: LayerFacts) -> list[int]:
    """The heads whose context these edits may change."""
    heads: set[int] = set()
    for edit in edits:
        if edit.heads is None:
            return [*range(facts.heads)]
        of_keys = edit.tap in ("k", "v")
        heads |= {head for head in range(facts.heads) if (facts.key_head(head) if of_keys else head) in edit.heads}
    return sorted(heads)

"""Paths to the logits, beside passes of transformers whose last states are changed by hooks of plain PyTorch."""

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention_contract.schemas.analyses.model_effects import ModelEffectsRequest
from attention_contract.validation import validate
from attention_service.models.answers.paths.path_effects import EffectsOfPaths
from attention_service.models.costs.answer_parts import at_once
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.attention_places import AttentionPlace
from attention_service.models.passes.module_hooks import first_of, with_first
from tools.models_walk.differences import error
from tools.models_walk.questions.plain_runs import (
    LEAST,
    TEXTS,
    TOKEN,
    eager_logits,
    hooked,
    log_p,
    stream_of,
    texts_of,
)

OTHERS: Final = [[6, 4, 7, 9, 3, 5, 10, 8, 4], [6, 4, 7, 9, 3]]
"""The texts whose states are sent, of as many tokens."""


def paths(model: PreTrainedModel, loaded: LoadedModel) -> float:
    """A path to the logits is the pass whose last states change as what its beginning adds does.

    The embeddings, each head of a layer and its MLP send nothing, or what they make of another text.
    """
    stream = stream_of(loaded)
    place = next((each for each in stream.places.values() if each.mixes == "attention"), None)
    errors = list[float]()
    for of_other in (False, True):
        found = [_asked(loaded, place, ids, other if of_other else None) for ids, other in _texts(loaded)]
        for (ids, other), each in zip(_texts(loaded), found, strict=True):
            before = log_p(eager_logits(model, loaded, ids)[-1])
            changed = _Frozen(model, loaded, _attention(place), ids).changed(other if of_other else None)
            errors.append(error(each, [log_p(x[-1]) - before for x in changed], LEAST))
        if len(found) > 1:
            errors.append(error(_asked(loaded, place, TEXTS, OTHERS if of_other else None), np.stack(found), LEAST))
    return max(errors)


def _texts(loaded: LoadedModel) -> list[tuple[list[int], list[int]]]:
    return [*zip(texts_of(loaded), OTHERS, strict=False)]


def _attention(place: AttentionPlace | None) -> AttentionPlace:
    if place is None:
        raise TypeError("paths of a model without attention")
    return place


def _asked(loaded: LoadedModel, place: AttentionPlace | None, tokens: Any, other: Any) -> np.ndarray:
    """The effects ``[…, senders]`` of the paths to the logits."""
    senders: dict[str, Any] = {"parts": ["embeddings", "heads", "mlps"]}
    senders |= {} if place is None else {"layer": place.key}
    senders |= {} if other is None else {"tokens": other}
    request = {
        "tokens": tokens, "from": senders, "to": {"parts": ["logits"]}, "of": {"position": -1, "token": TOKEN},
    }  # fmt: skip
    run = EffectsOfPaths(loaded, validate(ModelEffectsRequest, request), stream_of(loaded))
    return np.asarray(at_once(run.parts(run.copies)).effects.value, float)[..., 0]


class _Frozen:
    """Passes of transformers over a text in which one component of a layer sends something else to the logits."""

    def __init__(self, model: PreTrainedModel, loaded: LoadedModel, place: AttentionPlace, ids: list[int]) -> None:
        self._model, self._loaded, self._ids = model, loaded, ids
        stream = stream_of(loaded)
        self._branch = branch = stream.branches[place.key]
        if branch.projection is None:
            raise TypeError(branch.without_heads)
        self._heads, self._width = place.widths.heads, place.widths.value_dim
        names = {module: name for name, module in loaded.model.named_modules()}
        self._first, self._layer, self._last, self._source, self._projection = (
            model.get_submodule(names[each])
            for each in (stream.layers[0], place.layer, stream.layers[-1], branch.source, branch.projection)
        )

    @torch.no_grad()
    def changed(self, other: list[int] | None) -> Iterator[np.ndarray]:
        """Yield the logits ``[L, V]`` if the embeddings, each head and the MLP send what they make of another text.

        Nothing without one.
        """
        own = self._states(self._ids)
        sent = {name: torch.zeros_like(x) for name, x in own.items()} if other is None else self._states(other)
        yield self._with_last(sent["embeddings"] - own["embeddings"])
        for head in range(self._heads):
            columns = slice(head * self._width, (head + 1) * self._width)
            heads = own["heads"].clone()
            heads[..., columns] = sent["heads"][..., columns]
            yield self._with_last(self._branch.factor * (self._source_of(heads) - own["source"]))
        beside = [x["made"] - x["layer"] - self._branch.factor * x["source"] for x in (sent, own)]
        yield self._with_last(beside[0] - beside[1])

    def _states(self, ids: list[int]) -> dict[str, Tensor]:
        """The states around the components of a text."""
        states: dict[str, Tensor] = {}

        def given(name: str) -> Callable[..., None]:
            def keep(_: Any, args: Any, options: Any) -> None:
                states[name] = (args[0] if args else options["hidden_states"]).clone()

            return keep

        def made(name: str) -> Callable[..., None]:
            return lambda _, __, output: states.update({name: first_of(output).clone()})

        with hooked(
            self._first.register_forward_pre_hook(given("embeddings"), with_kwargs=True),
            self._layer.register_forward_pre_hook(given("layer"), with_kwargs=True),
            self._layer.register_forward_hook(made("made")),
            self._source.register_forward_hook(made("source")),
            self._projection.register_forward_pre_hook(given("heads"), with_kwargs=True),
        ):
            eager_logits(self._model, self._loaded, ids)
        return states

    def _source_of(self, heads: Tensor) -> Tensor:
        """The states that an attention adds, if the matrix behind its heads is given these."""
        made: list[Tensor] = []
        with hooked(
            self._projection.register_forward_pre_hook(lambda *_: (heads,)),
            self._source.register_forward_hook(lambda _, __, output: made.append(first_of(output).clone())),
        ):
            eager_logits(self._model, self._loaded, self._ids)
        return made[0]

    def _with_last(self, change: Tensor) -> np.ndarray:
        """The logits if the last layer's states have this change."""

        def hook(_: Any, __: Any, output: Any) -> Any:
            return with_first(output, first_of(output) + change)

        with hooked(self._last.register_forward_hook(hook)):
            return eager_logits(self._model, self._loaded, self._ids)

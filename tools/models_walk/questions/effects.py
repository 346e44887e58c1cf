"""Effects of edits, beside the differences of two passes: by hooks of plain PyTorch, or with the same edit."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention_contract.schemas.analyses.model_effects import ModelEffectsRequest
from attention_contract.validation import validate
from attention_service.models.answers.sweeps.swept_effects import EffectsOfSweep
from attention_service.models.costs.answer_parts import at_once
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.attention_places import AttentionPlace
from tools.models_walk.differences import CLOSE, error
from tools.models_walk.questions.plain_runs import (
    LEAST,
    eager_logits,
    hooked,
    known_stream,
    log_p,
    logits_with,
    texts_of,
)


def effects(model: PreTrainedModel, loaded: LoadedModel) -> float:
    """The effect of each head of a sweep is the difference of two passes, alone and in a batch."""
    return max(_error(model, loaded, places) for places in _swept(loaded))


def _swept(loaded: LoadedModel) -> Iterator[Sequence[AttentionPlace]]:
    """Yield the first and the last attention whose context can be changed, and the first layer that mixes otherwise."""
    wanted = "target" if loaded.reader.pairs else "text"
    places = [place for place in loaded.all_places if place.queries == wanted and place.refusal("context") is None]
    attentions = [place for place in places if place.mixes == "attention"]
    others = [place for place in places if place.mixes != "attention"]
    if attentions or not others:  # without any, the question is refused
        yield [*dict.fromkeys([*attentions[:1], *attentions[-1:]])]
    if others:
        yield others[:1]


def _error(model: PreTrainedModel, loaded: LoadedModel, places: Sequence[AttentionPlace]) -> float:
    heads = [*{0, min((place.widths.heads for place in places), default=1) - 1}]
    sweep = {"tap": "context", "over": ["layers", "heads"], "heads": heads, "set": 0}
    request: dict[str, Any] = {
        "layers": [place.key for place in places] or "all", "sweep": sweep, "of": {"position": -1, "token": 7},
    }  # fmt: skip
    texts, swept = texts_of(loaded), [(place, head) for place in places for head in heads]
    found = [_asked(loaded, {"tokens": ids, **request}) for ids in texts]
    errors = list[float]()
    for ids, each in zip(texts, found, strict=True):
        before, effects_found = log_p(eager_logits(model, loaded, ids)[-1]), each.reshape(-1)
        edited = [_without(loaded, ids, *one) for one in swept]
        errors.append(error(effects_found, [value - before for value, _ in edited], LEAST))
        by_hook = [
            None if given is None else _by_hook(model, loaded, ids, *one, given)
            for one, (_, given) in zip(swept, edited, strict=True)
        ]
        known = [value is not None for value in by_hook]
        errors.append(error(effects_found[known], [value - before for value in by_hook if value is not None], LEAST))
    if len(texts) > 1:
        errors.append(error(_asked(loaded, {"tokens": texts, **request}), found, LEAST))
    return max(errors)


def _asked(loaded: LoadedModel, fields: dict[str, Any]) -> np.ndarray:
    run = EffectsOfSweep(loaded, validate(ModelEffectsRequest, fields))
    return np.asarray(at_once(run.parts(max(1, min(3, run.copies)))).effects.value, float)


def _without(loaded: LoadedModel, ids: list[int], place: AttentionPlace, head: int) -> tuple[float, Tensor | None]:
    """The log-probability in a pass of its own without a head, and what the matrix that takes all heads is given."""
    edits = {str(place.key): [{"tap": "context", "heads": [head], "set": 0}]}
    projection, given = _projection(loaded, place), list[Tensor]()
    if projection is None:
        return log_p(logits_with(loaded, ids, edits)[-1]), None
    with hooked(projection.register_forward_pre_hook(lambda _, args: given.append(args[0]))):
        return log_p(logits_with(loaded, ids, edits)[-1]), given[0]


def _projection(loaded: LoadedModel, place: AttentionPlace) -> nn.Module | None:
    stream = known_stream(loaded)
    branch = None if stream is None else stream.branches.get(place.key)
    return None if branch is None or place.mixes != "attention" else branch.projection


def _by_hook(
    model: PreTrainedModel, loaded: LoadedModel, ids: list[int], place: AttentionPlace, head: int, given: Tensor
) -> float | None:
    """The log-probability in transformers with the columns of a head set to zero before the matrix that takes all.

    None if the columns of other heads follow from the head, as behind a norm over all heads.
    """
    names = {module: name for name, module in loaded.model.named_modules()}
    width, matches = place.widths.value_dim, list[bool]()

    def zero(_: Any, args: Any) -> Any:
        changed = args[0].clone()
        changed[..., head * width : (head + 1) * width] = 0
        matches.append(error(changed, given) < CLOSE)
        return (changed, *args[1:])

    projection = model.get_submodule(names[_projection(loaded, place)])
    with hooked(projection.register_forward_pre_hook(zero)):
        value = log_p(eager_logits(model, loaded, ids)[-1])
    return value if all(matches) else None

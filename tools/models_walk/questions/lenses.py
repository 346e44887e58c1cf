"""Readings of states, and parts of logits, beside the logits of transformers."""

import re
from typing import Any, Final

import numpy as np
from transformers import PreTrainedModel

from attention_contract.schemas.analyses.lenses import ModelLensRequest
from attention_service.models.answers.lenses.lens_plan import plan_lens
from attention_service.models.answers.lenses.lens_reply import LensRun
from attention_service.models.loaded.loaded_model import LoadedModel
from tools.models_walk.differences import error
from tools.models_walk.questions.plain_runs import TEXTS, eager_logits, stream_of, texts_of

_CAP: Final = re.compile("soft_?cap")
"""In the names of the entries of configs that cap logits or scores."""


def lens(model: PreTrainedModel, loaded: LoadedModel) -> float:
    """The last layer's reading is the logits, and the parts of a logit add up to it, alone and in a batch."""
    stream = stream_of(loaded)
    positions = [-1] if loaded.reader.pairs else [-3, -1]  # which both texts have
    logits = [eager_logits(model, loaded, ids) for ids in TEXTS]
    targets = [int(each) for each in np.argsort(-logits[0][-1])[:3]]
    own = [each[np.ix_(positions, targets)] for each in logits]  # [P, T]
    last = [*stream.places][-1]
    options: list[dict[str, Any]] = [{"of": ["hidden"], "layers": [last]}]
    if not stream.without_parts:
        options.append({"of": ["output"]})
        heads = all(branch.projection is not None for branch in stream.branches.values())
        options += [{"of": ["heads"]}] if heads else []
    errors = list[float]()
    for fields in options:
        (part,) = fields["of"]
        ask = {"positions": positions, "targets": targets, **fields}
        alone = [_asked(loaded, ids, ask) for ids in TEXTS]
        readings = [_reading(each, part) for each in alone]
        if part != "hidden":
            errors += [error(reading, each.logits) for reading, each in zip(readings, alone, strict=True)]
        if stream.places[last].layer is stream.layers[-1] if part == "hidden" else not _is_capped(loaded):
            errors += map(error, readings, own)
        if len(texts_of(loaded)) > 1:
            errors.append(error(_reading(_asked(loaded, TEXTS, ask), part), readings))
    return max(errors, default=0.0)


def _asked(loaded: LoadedModel, tokens: Any, fields: dict[str, Any]) -> Any:
    request = ModelLensRequest(tokens=tokens, **fields)
    return LensRun(loaded, plan_lens(loaded, request, stream_of(loaded))).reply()


def _reading(reply: Any, part: str) -> np.ndarray:
    """The logits ``[…, P, T]`` of the targets by the last states, or the sum of all parts of them."""
    if part == "hidden":
        return np.asarray(reply.layers[-1].hidden.targets, np.float64)
    rest = reply.rest
    of_layers = [np.asarray(rest.mlps, np.float64).sum(-3)]  # [… N, P, T] to [… P, T]
    if part == "heads":
        of_layers.append(np.asarray(rest.biases, np.float64).sum(-3))
    for layer in reply.layers:
        targets = np.asarray(getattr(layer, part).targets, np.float64)
        of_layers.append(targets.sum(-3) if part == "heads" else targets)
    return np.asarray(sum(of_layers) + np.asarray(rest.embeddings) + np.asarray(rest.others) + rest.unembedding)


def _is_capped(loaded: LoadedModel) -> bool:
    entries = loaded.model.config.get_text_config().to_dict()
    return any(_CAP.search(name) and value is not None for name, value in entries.items())

"""A loaded model in words: the fields that it knows of ModelInfo, and those of replies about an input and a run."""

import time
from typing import Any, Final, get_args

from attention_contract.schemas.attention import EditableTap
from attention_contract.schemas.model_requests import ModelGradient
from attention_contract.schemas.models import LayerGeneration, ModelLayer
from attention_contract.schemas.prompts import ModelRan
from attention_service.core.tensors import torch_dtype_name
from attention_service.models.folders.head_kinds import LISTED_CLASSES, LISTED_TENSORS
from attention_service.models.loaded.adapters import Adapter
from attention_service.models.loaded.checked_request import IMPLICIT, CheckedRequest
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_attentions import not_observed
from attention_service.models.loaded.model_loading import places_of_parts
from attention_service.models.loaded.model_runner import EVERY_TAP
from attention_service.models.passes.attention_pass import AttentionPass
from attention_service.models.passes.attention_places import AttentionPlace
from attention_service.models.passes.module_taps import MODULE_TAPS
from attention_service.models.passes.points import EDITED_EMBEDDINGS, EMBEDDINGS
from attention_transformers.model_layers import LayerKey, other_mixers, type_names

_UNPACKED: Final = "dequantized from "
"""The beginning of what ``ran`` says of the weights of a quantized checkpoint."""
_LEAST_SHARE: Final = 0.5
"""The least share of a model's embeddings that its tokenizer has tokens for; a model pads them to a round number."""


def model_info(loaded: LoadedModel) -> dict[str, Any]:
    """The fields of ``ModelInfo`` that the model itself knows."""
    seen = loaded.places.keys() | loaded.implicit.keys()
    others = {str(number): kind for number, kind in other_mixers(loaded.model).items()}
    others = {number: kind for number, kind in others.items() if number not in seen}
    return {
        "architecture": type(loaded.model).__name__,
        "model_type": loaded.model.config.model_type,
        "takes": loaded.reader.takes,
        "generates": bool(loaded.model.can_generate()),
        "predicts": loaded.head.predicts,
        "classes": [*loaded.head.classes[:LISTED_CLASSES]],
        "dtype": torch_dtype_name(loaded.model.dtype),
        "device": ", ".join(places_of_parts(loaded.model)) or str(loaded.device.torch),
        "bytes": loaded.bytes,
        "max_length": loaded.reader.max_length,
        "left_out": [*loaded.left_out[:LISTED_TENSORS], *_unknown_ends(loaded), *_vocabulary(loaded)],
        "edits": [] if loaded.runner.refuses(EMBEDDINGS, "edit") else [EDITED_EMBEDDINGS],
        "layers": [_described(loaded, place) for place in loaded.all_places],
        "attention": loaded.attention.way if loaded.places else None,
        "without_weights": {key: _no_pairs(kind) for key, kind in others.items()} | loaded.in_parts,
        "unseen": sorted({*others.values()}.union(type_names(not_observed(loaded.model, loaded.all_places)))),
    }


def _described(loaded: LoadedModel, place: AttentionPlace) -> ModelLayer:
    """The sizes of an attention, and what it can answer."""
    widths, refuses = place.widths, loaded.runner.refuses
    reasons = {tap: refuses((place.key, tap), "read") for tap in EVERY_TAP}
    taps = [tap for tap in EVERY_TAP if reasons[tap] is None]
    return ModelLayer(
        layer=place.key,
        kind=place.mixes,
        keys=place.keys_of,
        heads=widths.heads,
        kv_heads=widths.kv_heads,
        head_dim=widths.head_dim if place.taps is None or "v" in place.taps else None,
        taps=taps,
        edits=[tap for tap in get_args(EditableTap) if refuses((place.key, tap), "edit") is None],
        generation=_generation(loaded, place) if loaded.model.can_generate() else None,
        gradients=[tap for tap in taps if tap in get_args(ModelGradient)],
        refused={tap: why for tap, why in reasons.items() if why is not None and tap not in MODULE_TAPS | {"router"}},
    )


def _generation(loaded: LoadedModel, place: AttentionPlace) -> LayerGeneration:
    """The answers of an attention while tokens are generated."""
    refuses = loaded.runner.refuses
    editable = [tap for tap in get_args(EditableTap) if refuses((place.key, tap), "edit") is None]
    reasons = {tap: refuses((place.key, tap), "generate") for tap in editable}
    reasons["attention"] = refuses((place.key, "weights"), "report")
    return LayerGeneration(
        attention=reasons["attention"] is None,
        edits=[tap for tap in editable if reasons[tap] is None],
        refused={name: reason for name, reason in reasons.items() if reason is not None},
    )


def _unknown_ends(loaded: LoadedModel) -> list[str]:
    """The ids that are to end a text and that the model never predicts, with the reason."""
    if not loaded.model.can_generate():
        return []
    known = loaded.reader.predictable
    return [
        f"eos_token_id {token_id} (the model predicts {known} tokens, numbered from 0, so no text ends with it)"
        for token_id in loaded.reader.end_ids(loaded.model) if not 0 <= token_id < known
    ]  # fmt: skip


def _vocabulary(loaded: LoadedModel) -> list[str]:
    """The reason for which a tokenizer is not read, or for which it is hardly that of the model."""
    tokenizer, known, unread = loaded.reader.tokenizer, loaded.reader.vocabulary, loaded.reader.unread
    if tokenizer is None:
        return [] if unread is None else [f"tokenizer ({unread})"]
    if len(tokenizer) >= known * _LEAST_SHARE:
        return []
    return [f"tokenizer ({len(tokenizer)} tokens, and the model has embeddings of {known}: it may be another model's)"]


def unseen_layers(loaded: LoadedModel) -> dict[LayerKey, str]:
    """The layers whose weights no recording holds, as they are not of pairs of tokens, and the reason."""
    kinds = other_mixers(loaded.model)
    others = {number: _no_pairs(kind) for number, kind in kinds.items()}
    others |= {place.key: IMPLICIT for place in loaded.implicit.values() if isinstance(place.key, int)}
    reasons: dict[LayerKey, str] = {key: why for key, why in others.items() if str(key) not in loaded.places}
    for place in loaded.places.values():
        if place.keys_of != "tokens":
            reasons[place.key] = f"its keys are those of {place.keys_of}"
    return reasons


def run_fields(loaded: LoadedModel, checked: CheckedRequest, attention_pass: AttentionPass) -> dict[str, Any]:
    """The fields of a reply that tell of the input and of the run."""
    inputs = checked.inputs
    labels = {"labels": loaded.reader.labels(inputs.predicted)}
    if inputs.target is not None:
        labels["encoder_labels"] = loaded.reader.labels(inputs.text)
    fields: dict[str, Any] = {name: value if inputs.several else value[0] for name, value in labels.items()}
    if inputs.media is not None:
        name = "audio_labels" if loaded.reader.media == "audio" else "image_labels"
        fields[name] = loaded.reader.labels(inputs.media)
    keys = {str(place.key): checked.keys(place) for place in checked.places if place.keys_of != "tokens"}
    cut = {str(place.key) for place in checked.places if place.windows is not None}
    named = {
        key: loaded.reader.labels(stack) for key, stack in keys.items() if key in cut or stack.positions is not None
    }
    if named:
        fields["key_labels"] = {
            key: value if inputs.several or key in cut else value[0] for key, value in named.items()
        }
    return fields | {"ran": model_ran(loaded, attention_pass, checked.adapter)}


def model_ran(loaded: LoadedModel, attention_pass: AttentionPass, adapter: Adapter | None) -> ModelRan:
    """The run of a pass, by the model or by one of its adapters."""
    return ModelRan(
        model=loaded.name,
        architecture=type(loaded.model).__name__,
        device=str(loaded.device.torch),
        dtype=torch_dtype_name(loaded.model.dtype),
        kernels=list(attention_pass.kernels),
        compute_ms=1e3 * (time.perf_counter() - attention_pass.started),
        queue_ms=0.0,
        peak_bytes=0,
        weights=weights_with(loaded, adapter),
    )


def weights_with(loaded: LoadedModel, adapter: Adapter | None) -> str:
    """The numbers of a pass of the model, or of one of its adapters."""
    if adapter is None:
        return loaded.weights
    return f"{loaded.weights if loaded.weights.startswith(_UNPACKED) else 'base'} + adapter {adapter.name}"


def _no_pairs(kind: str) -> str:
    """The reason for which a layer of another kind has no weights."""
    return f"{kind} has no weights of pairs of tokens"

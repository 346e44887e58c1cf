"""The parts of one model type beside its eager self: its pass, weights, gradients, invariants and import."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from tests.models.inputs.images.small_encoders import noise, sent
from transformers import PreTrainedModel

from attention_contract.schemas.attention import Edit
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest
from attention_contract.schemas.modules import ImportModule
from attention_contract.schemas.text_similarity import TextSimilarityRequest
from attention_service.models.answers.embeddings.pair_similarity import pair_similarity_reply, plan_pair_similarity
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_gradients import ModelGradients
from attention_service.models.inputs.images.encoder_inputs import EncoderInputs
from attention_service.models.inputs.images.pair_inputs import PairInputs
from attention_service.models.inputs.sounds.sound_inputs import SoundInputs
from attention_service.models.loaded.checked_request import check_request
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.attention_pass import AttentionPass, LayerTask
from attention_service.models.passes.attention_places import AttentionPlace
from attention_service.modules.checkpoints.import_plan import plan
from attention_transformers.model_layers import LayerKey
from tools.models_walk.differences import CLOSE, error
from tools.models_walk.eager_runs import (
    IDS,
    arguments_of,
    eager_weights,
    input_of,
    result_of,
    returned_weights,
    tensors,
)
from tools.models_walk.found import Found
from tools.models_walk.generated_tokens import generated_tokens, joined_texts
from tools.models_walk.implicit import implicit_error


def _whole(found: Found, model: PreTrainedModel, loaded: LoadedModel) -> None:
    if isinstance(loaded.reader, PairInputs):
        found.whole = _pair_error(model, loaded)
        return
    with torch.no_grad():
        expected = model(**arguments_of(loaded))
        output = loaded.run(
            check_request(loaded, ModelForwardRequest(**input_of(loaded))).inputs.arguments, AttentionPass({})
        )
    name = result_of(expected)
    found.whole = max(map(error, tensors(output[name]), tensors(expected[name])))
    if not found.equal:
        model.set_attn_implementation("sdpa")
        with torch.no_grad():
            own = error(model(**arguments_of(loaded))[name], output[name])
        model.set_attn_implementation("eager")
        if own < CLOSE and found.way == "computed":
            found.reasons["whole"] = (
                f"it differs by {found.whole:.0e} from eager attention, as its own sdpa does in transformers"
            )


def _pair_error(model: PreTrainedModel, loaded: LoadedModel) -> float:
    """The largest difference of the vectors of a text and of an image, and of their cosine."""
    pair: Any = model
    own, named = arguments_of(loaded), [{"tokens": IDS}, {"images": [sent(noise(24, 16))]}]
    texts = {name: x for name, x in own.items() if name in {"input_ids", "attention_mask"}}
    pixels = {name: x for name, x in own.items() if name not in texts and name not in {"return_dict", "use_cache"}}
    with torch.no_grad():
        expected = [pair.get_text_features(**texts), pair.get_image_features(**pixels)]
    vectors = [each.pooler_output[0] for each in expected]
    replies = [forward_reply(loaded, ModelForwardRequest(**given, return_=["pooled"])) for given in named]
    request = TextSimilarityRequest(pairs=[["the cat sat", named[1]["images"][0]]])
    similarity = pair_similarity_reply(loaded, request, plan_pair_similarity(loaded, request)).similarity
    with torch.no_grad():
        ids = check_request(loaded, ModelForwardRequest(text="the cat sat")).inputs.arguments["input_ids"]
        text = pair.get_text_features(ids).pooler_output[0]
    cosine = torch.cosine_similarity(text, vectors[1], dim=0)
    return max(
        abs(similarity[0] - float(cosine)), *(error(x.pooled, own) for x, own in zip(replies, vectors, strict=True))
    )


def _weights(found: Found, model: PreTrainedModel, loaded: LoadedModel) -> None:
    if not loaded.places:
        return
    request = ModelForwardRequest(**input_of(loaded), layers=_attentions(loaded), return_=["weights"])
    if found.way == "observed":
        returned = returned_weights(model, arguments_of(loaded))
        layers = [np.asarray(layer.weights) for layer in forward_reply(loaded, request).layers]
        apart = [[_apart(x, own) for own in returned if _is_over(x, own)] for x in layers]
        if all(apart) and len(returned) < len(layers):
            found.reasons["weights"] = "the model returns those of some layers; others are compared by their products"
            apart = [[_apart(x, own) for x in layers if _is_over(x, own)] for own in returned]
        if all(apart) and apart:
            found.weights = max(map(min, apart))
        else:
            found.reasons["weights"] = "the model returns none; those are compared by their products with the values"
        return
    arguments = arguments_of(loaded)
    run = loaded.reader.module(model, arguments)
    expected = eager_weights(model, arguments, run, of_batches=_has_windows(loaded))
    layers = forward_reply(loaded, request).layers
    pairs = [(np.asarray(layer.weights).reshape(own.shape), own) for layer, own in zip(layers, expected, strict=True)]
    errors = [error(weights, own) for weights, own in pairs]
    if max(errors) > CLOSE:
        shares = [error(weights / weights.sum(-1, keepdims=True), own) for weights, own in pairs]
        if max(shares) < CLOSE:
            found.reasons["weights"] = "eager weights leave the sink out: compared as shares of each row"
            errors = shares
    found.weights = max(errors)


def _is_over(weights: np.ndarray, own: torch.Tensor) -> bool:
    """True if both are of the same pairs, whether or not with a batch of one image."""
    return own.shape[-2:] == weights.shape[-2:] and own.numel() == weights.size


def _apart(weights: np.ndarray, own: torch.Tensor) -> float:
    """The difference of weights from those of a model, or of their means over heads if it returns these (WavLM)."""
    own = own.reshape(weights.shape)
    means = own.shape[0] > 1 and torch.equal(own, own[:1].expand(own.shape))
    return error(np.broadcast_to(weights.mean(0, keepdims=True), weights.shape) if means else weights, own)


def _attentions(loaded: LoadedModel) -> list[LayerKey]:
    """The layers that attend by a normalizer over pairs."""
    return [place.key for place in loaded.places.values()]


def _has_windows(loaded: LoadedModel) -> bool:
    return any(place.windows is not None for place in loaded.places.values())


def _implicit(found: Found, model: PreTrainedModel, loaded: LoadedModel) -> None:
    if loaded.implicit:
        found.implicit = implicit_error(found.kind, model.cpu(), IDS)
        model.to(loaded.device.torch)


def _gradients(found: Found, model: PreTrainedModel, loaded: LoadedModel) -> None:
    if loaded.head.predicts is None or isinstance(loaded.reader, SoundInputs):
        return
    reply = ModelGradients(loaded, ModelGradientsRequest(tokens=IDS, of={"token": 7}, wrt=["embeddings"])).reply()
    reads: Any = model.get_encoder() if loaded.reader.pairs else model
    table: Any = getattr(reads, "get_input_embeddings", model.get_input_embeddings)()
    held: list[torch.Tensor] = []

    def hold(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        if held:
            return None
        held.append(output.detach().requires_grad_())
        return held[0].clone()  # some models scale it in place

    hook = table.register_forward_hook(hold)
    outputs = model(**arguments_of(loaded))
    hook.remove()
    value = outputs.logits[0, -1].float().log_softmax(-1)[7]
    (expected,) = torch.autograd.grad(value, held)
    with torch.no_grad():  # some models keep the state of their last text
        model(**arguments_of(loaded))
    own = expected[:, 0] if loaded.entering.time_first else expected[0]
    found.gradients = error(reply.embeddings, own[: len(IDS)])  # Longformer pads its texts


def _invariants(found: Found, model: PreTrainedModel, loaded: LoadedModel) -> None:
    """Weights times values are the context, rows sum to one less the sink, edits of nothing change nothing, and a text
    of a padded batch gives the numbers that it gives alone.
    """
    taps = ["weights", "v", "context", "masked_scores"]
    if found.way == "observed":
        taps = [tap for tap in taps if all(tap in (place.taps or ()) for place in loaded.places.values())]
    layers, errors = _attentions(loaded), list[float]()
    if layers:
        plain = forward_reply(loaded, ModelForwardRequest(**input_of(loaded), layers=layers, return_=taps))
    for layer, place in zip(plain.layers if layers else (), loaded.places.values(), strict=True):
        weights = np.asarray(layer.weights)
        if "context" in taps:
            values = np.asarray(layer.v)
            repeats = weights.shape[-3] // values.shape[-3]
            errors.append(error(weights @ values.repeat(repeats, -3), layer.context))
        scores = np.asarray(layer.masked_scores) if "masked_scores" in taps else weights
        errors.append(error(weights.sum(-1), _row_sums(scores, place)))
    nothing = [Edit(tap="weights", scale=1.0), Edit(tap="output", scale=1.0)]
    edits = {
        key: [edit for edit in nothing if place.taps is None or edit.tap in place.taps]
        for key, place in (loaded.places or loaded.implicit).items()
    }
    if isinstance(loaded.reader, EncoderInputs | SoundInputs | PairInputs):
        edited = forward_reply(
            loaded, ModelForwardRequest(**input_of(loaded), layers=layers, return_=taps, edits=edits)
        )
        pairs = zip(edited.layers, plain.layers, strict=True)
        found.invariants = max(*errors, *(error(layer.weights, own.weights) for layer, own in pairs))
        return
    errors.append(error(_states(loaded, IDS, edits=edits), _states(loaded, IDS)))
    if loaded.reader.mixes_padding(len(IDS)):
        found.reasons["batch"] = "padding changes its numbers: a batch of texts of unequal lengths is refused"
    else:
        texts = [IDS, IDS[:4]]
        errors += map(error, _states(loaded, texts), [_states(loaded, text) for text in texts])
    found.invariants = max(errors)


def _row_sums(scores: np.ndarray, place: AttentionPlace) -> np.ndarray:
    """Return the sums ``[H, Lq]`` that rows of weights have by the definition of the softmax."""
    if not getattr(place.spec.normalizer, "sinks", False):
        return np.ones(scores.shape[:-1])
    (sink,) = (value for name, value in place.module.named_parameters() if "sink" in name)
    keys = np.exp(scores.astype(np.float64)).sum(-1)
    return keys / (keys + np.exp(sink.detach().cpu().numpy().reshape(-1, 1).astype(np.float64)))


def _states(loaded: LoadedModel, tokens: Any, *, edits: Any = None) -> Any:
    """Return the logits of the real tokens, or the last hidden states, of one text or of each."""
    request = ModelForwardRequest(tokens=tokens, edits=edits or {})
    checked = check_request(loaded, request, lambda _: True)
    every = loaded.places | loaded.implicit
    questions = {place.key: LayerTask(edits=request.edits.get(key, ())) for key, place in every.items()}
    with torch.no_grad():
        output = loaded.run(checked.inputs.arguments, AttentionPass(questions))
    rows = output[result_of(output)]
    mask = None if rows.ndim < 3 else checked.inputs.predicted.mask  # one vector of a text has no padding
    found = [row if mask is None else row[mask[number].to(row.device)] for number, row in enumerate(rows)]
    return found if isinstance(tokens[0], list) else found[0]


def _imported(found: Found, model: PreTrainedModel, loaded: LoadedModel) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder, "net"))
        stacks: tuple[Any, ...] = ("encoder", "decoder") if loaded.reader.pairs else (None,)
        layer = next((int(key) for key in loaded.places if key.isdigit()), 0)  # that attends, of a hybrid
        requests = [ImportModule(checkpoint="net", stack=stack, layer=layer) for stack in stacks]
        families = {plan(Path(folder), request).source.family for request in requests}
        found.family = " ".join(sorted(families))


PARTS: Final[dict[str, Callable[[Found, PreTrainedModel, LoadedModel], None]]] = {
    "whole": _whole, "weights": _weights, "gradients": _gradients, "invariants": _invariants,
    "generate": generated_tokens, "joined": joined_texts, "import": _imported, "implicit": _implicit,
}  # fmt: skip

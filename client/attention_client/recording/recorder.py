"""``record``: one pass of a transformers model over one text, kept as a recording."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from attention_client.array_likes import as_array
from attention_client.recording.recorded import Recording, file_of
from attention_contract.errors import InvalidRequest
from attention_contract.recording_tensors import RecordedStack, place_of
from attention_contract.schemas.attention import Tap
from attention_contract.schemas.recordings import LocalTap
from attention_contract.tensors import Array
from attention_contract.validation import suggestion

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from attention_client.client import Client

_log = logging.getLogger("attention_client")
Named = Iterator[tuple[str, Array]]
"""Tensors with their full names."""


def record(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    text: str,
    *,
    taps: Sequence[Tap] = ("weights",),
    target: str | None = None,
    client: "Client | None" = None,
    checkpoint: str | None = None,
) -> Recording:
    """Record the hidden states and the taps of every layer while a model reads a text, without gradients and dropout.

    With a client, the attention of every layer runs on its server, and ``taps`` may name all but ``lse`` and
    ``output``. Without one, everything runs in the model's own eager attention, and ``taps`` may name ``weights``,
    ``q``, ``k``, ``v`` and ``context``.

    ``checkpoint`` is the model's path in the server's model repository. Its attention layers are then imported, and
    each runs as a module, from the hidden states to its output. Otherwise, or if the server cannot import all of
    them, the server attends with the q, k and v of the model. ``facts.computed`` says which of the two it was.

    ``target`` is the decoder's text, of a model with an encoder and a decoder; by default the decoder reads its start
    token alone. The model is left as it was. Raises InvalidRequest for taps that cannot be recorded, and for a text
    without tokens.
    """
    check_taps(taps, client is not None)
    inputs, tokens = model_inputs(model, tokenizer, text, target)
    versions = {name: metadata.version(name) for name in ("attention-service", "transformers", "torch")}
    computed = "local"
    if client is None:
        states, tensors = _run_here(model, inputs, taps)
        if not tensors:
            raise InvalidRequest.at(
                "model", f"{type(model).__name__} returns no weights with its eager attention; give a client"
            )
    else:
        versions["server"] = client.server.info().version
        computed, states, tensors = _run_on_server(model, inputs, tokens, client, checkpoint, taps)
    tensors |= states
    facts = {
        "model": _model_id(model),
        "text": text,
        "target": target,
        "created": datetime.now(UTC),
        "versions": versions,
        "computed": computed,
        "tokens": tokens,
        "attentions": _attentions(tensors, model.config.get_text_config().num_attention_heads),
        "unseen": _unseen(model, tensors) if "weights" in taps else {},
    }
    return Recording.of(file_of(facts, tensors))


def _run_here(
    model: "PreTrainedModel", inputs: Mapping[str, Any], taps: Sequence[Tap]
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Run the model by its own eager attention. Return the hidden states and the taps."""
    from attention_client.transformers.attached import local_taps  # noqa: PLC0415 - imports torch

    if set(taps) <= {"weights"}:  # of every model that returns them, also of one without the attention interface
        with _eager(model):
            outputs, states = run_model(model, inputs, output_attentions=True)
        return states, dict(_local_weights(model, outputs))
    with local_taps(model) as taps_by_layer:
        _, states = run_model(model, inputs)
    chosen = {
        layer: {tap: layer_taps[tap] for tap in taps if tap in layer_taps}
        for layer, layer_taps in taps_by_layer.items()
    }
    return states, dict(_named_taps(chosen))


def _run_on_server(
    model: "PreTrainedModel",
    inputs: Mapping[str, Any],
    tokens: Mapping[RecordedStack, Sequence[str]],
    client: "Client",
    checkpoint: str | None,
    taps: Sequence[Tap],
) -> tuple[str, dict[str, Array], dict[str, Array]]:
    """Run the model with its attention on the server. Return the kind of attention, the hidden states and the taps."""
    from attention_client.recording.served_modules import NotServedError, serve  # noqa: PLC0415 - imports torch
    from attention_client.transformers import attach  # noqa: PLC0415

    if checkpoint is not None:
        lengths = {len(labels) for labels in tokens.values()}
        try:
            with serve(model, client, checkpoint, taps, lengths) as served:
                _, states = run_model(model, inputs)
                return "modules", states, dict(served.tensors())
        except NotServedError as reason:
            _log.info("attention runs as raw q, k and v: %s", reason)
    with attach(model, client, record=taps) as attached:
        _, states = run_model(model, inputs)
    return "raw", states, dict(_named_taps(attached.recorded))


def check_taps(taps: Sequence[str], remote: bool) -> None:
    """Raise InvalidRequest for taps that cannot be recorded. ``remote``: the attention runs on a server."""
    known = [tap for tap in get_args(Tap) if tap not in {"lse", "output"}] if remote else list(get_args(LocalTap))
    for tap in taps:
        if tap not in known:
            advice = suggestion(tap, known) if remote or tap not in get_args(Tap) else "give a client for other taps"
            raise InvalidRequest.at("taps", f"{tap!r} cannot be recorded; expected {', '.join(known)}; {advice}")


def model_inputs(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", text: str, target: str | None
) -> tuple[dict[str, Any], dict[RecordedStack, list[str]]]:
    """The arguments of the model, and the labels of the tokens."""
    given = dict(tokenizer(text, return_tensors="pt").to(model.device))
    ids = given["input_ids"]
    if ids.shape[-1] == 0:
        raise InvalidRequest.at("text", "the tokenizer returns no tokens for it; give a longer text")
    labels = _labels(tokenizer, ids)
    if not model.config.is_encoder_decoder:
        if target is not None:
            raise InvalidRequest.at("target", "the model has one stack and reads only the text")
        return given, {"layers": labels}
    start = getattr(model.config, "decoder_start_token_id", None)
    start = model.config.pad_token_id if start is None else start
    decoder_ids = ids.new_tensor([[start]])
    if target is not None:
        target_ids = tokenizer(text_target=target, return_tensors="pt").to(model.device)["input_ids"]
        decoder_ids = decoder_ids.new_tensor([[start, *target_ids[0].tolist()]])
    given["decoder_input_ids"] = decoder_ids
    return given, {"encoder": labels, "decoder": _labels(tokenizer, decoder_ids)}


def _labels(tokenizer: "PreTrainedTokenizerBase", ids: Any) -> list[str]:
    return [str(token) for token in tokenizer.convert_ids_to_tokens(ids[0].tolist())]


def run_model(model: "PreTrainedModel", inputs: Mapping[str, Any], **options: Any) -> tuple[Any, dict[str, Array]]:
    """Run the model once without dropout and gradients. Return its outputs, and the hidden states by their names."""
    import torch  # noqa: PLC0415 - the extra transformers brings it

    from attention_client.recording.hidden_states import LayerCalls  # noqa: PLC0415 - imports torch

    training, calls = model.training, LayerCalls()
    model.train(False)
    try:
        with torch.no_grad(), calls.noting(model):
            outputs = model(**inputs, output_hidden_states=True, return_dict=True, **options)
        return outputs, dict(calls.named(outputs))
    finally:
        model.train(training)


@contextmanager
def _eager(model: "PreTrainedModel") -> Iterator[None]:
    """Give the model the implementation that returns weights, until the block ends."""
    former = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        if former is not None:
            model.set_attn_implementation(former)


def _local_weights(model: "PreTrainedModel", outputs: Any) -> Named:
    named = {
        "attentions": "layers.{}.weights",
        "encoder_attentions": "encoder.{}.weights",
        "decoder_attentions": "decoder.{}.weights",
        "cross_attentions": "decoder.{}.cross.weights",
    }
    for field, name in named.items():
        weights_by_layer = getattr(outputs, field, None) or ()
        numbers: Iterable[Any] = range(len(weights_by_layer))
        # Some layers have no attention.
        if field == "attentions" and 0 < len(weights_by_layer) < len(outputs.hidden_states) - 1:
            numbers = _layers_with_attention(model)
        for number, weights in zip(numbers, weights_by_layer, strict=True):
            if weights is not None:
                yield name.format(number), _first(weights)


def _layers_with_attention(model: "PreTrainedModel") -> list[Any]:
    from attention_transformers.model_layers import attention_modules  # noqa: PLC0415 - imports torch

    return sorted(key for module in attention_modules(model) for key in module.keys)


def _named_taps(recorded: Mapping[Any, Mapping[Any, Array]]) -> Named:
    """The taps of every attention. Attentions whose key says neither stack nor number are counted as they come."""
    for count, (layer, taps) in enumerate(recorded.items()):
        kind, _, number = str(layer).rpartition(".")
        name = {"": f"layers.{number}", "cross": f"decoder.{number}.cross"}.get(kind, str(layer))
        for tap, array in taps.items():
            yield (f"{name}.{tap}" if place_of(f"{name}.{tap}") else f"layers.{count}.{tap}"), array[0]


def _first(tensor: Any) -> Array:
    """The only sequence of a batch, with memory of its own."""
    return np.array(as_array(tensor)[0])


def _attentions(tensors: Mapping[str, Array], num_heads: int) -> list[dict[str, Any]]:
    """The name and the head labels of every attention that has a tap, in the order of the layers."""
    heads: dict[str, tuple[Any, int]] = {}
    for name, array in tensors.items():
        place = place_of(name)
        if place is None or place.kind in {"hidden", "embeddings", "final"}:
            continue
        counted = num_heads if place.kind in {"k", "v"} else len(array)
        known = heads.get(place.layer)
        if known is None or place.kind not in {"k", "v"}:
            heads[place.layer] = (place, counted)
    ordered = sorted(
        heads.items(), key=lambda item: (item[1][0].stack != "encoder", item[1][0].number, item[1][0].cross)
    )
    return [
        {"name": name, "heads": [f"L{place.number}H{head}" for head in range(many)]} for name, (place, many) in ordered
    ]


def _unseen(model: "PreTrainedModel", tensors: Mapping[str, Array]) -> dict[str, str]:
    """The layers that mix tokens without weights of pairs, and the reason."""
    from attention_transformers.model_layers import other_mixers  # noqa: PLC0415 - imports torch

    kinds = {f"layers.{number}": kind for number, kind in other_mixers(model).items()}
    return {
        name: f"{kind} has no weights of pairs of tokens"
        for name, kind in kinds.items()
        if f"{name}.weights" not in tensors
    }


def _model_id(model: "PreTrainedModel") -> str:
    """The model's id; of a folder its name alone."""
    name = str(model.config._name_or_path or type(model).__name__)
    return Path(name).resolve().name if Path(name).is_dir() else name

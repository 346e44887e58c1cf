"""A run of a model as a recording: weights, taps and hidden states of its layers, with labels."""

from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from attention_contract.recording_tensors import AXES, place_of
from attention_contract.schemas.models import ModelInput
from attention_contract.schemas.recordings import RecordingFile
from attention_contract.tensors import Array
from attention_contract.validation import validate
from attention_service.runtime.models.attention_places import stack_of
from attention_service.runtime.models.layer_states import LayerStates
from attention_service.runtime.models.model_inputs import InputReader, Inputs
from attention_service.runtime.scheduling.operation import Fields
from attention_transformers.model_layers import LayerKey

_SOFTWARE = ("attention-service", "transformers", "torch")


def recording_of(
    model: str,
    reader: InputReader,
    request: ModelInput,
    inputs: Inputs,
    found: Mapping[LayerKey, Fields],
    states: LayerStates,
) -> RecordingFile:
    """Make the recording of a run over one text. ``found``: the results of the layers, with what is ``whole`` of each.

    Layers of stacks that recordings have no name for, as those of an image, are left out.
    """
    tensors: dict[str, dict[str, Array]] = {"layers": {}, "encoder": {}, "decoder": {}}
    attentions = []
    for key, results in found.items():
        name = layer_name(key)
        if place_of(f"{name}.weights") is None or "whole" not in results:
            continue
        stack, _, rest = name.partition(".")
        taps = {tap: array for tap, array in results.items() if tap in AXES} | results["whole"]
        tensors[stack] |= {f"{rest}.{tap}": array for tap, array in taps.items()}
        number = rest.partition(".")[0]
        heads = len(results["whole"]["weights"])
        attentions.append({"name": name, "heads": [f"L{number}H{head}" for head in range(heads)]})
    for kind, arrays in (("hidden", states.hidden), ("output", states.output)):
        for key, array in arrays.items():
            stack, _, rest = layer_name(key).partition(".")
            if stack in tensors and not (kind == "hidden" and rest.endswith(".cross")):
                tensors[stack][f"{rest}.{kind}"] = array[0]
    for stack, array in states.inputs.items():
        if stack in tensors:
            tensors[stack]["embeddings"] = array[0]
    text = reader.labels(inputs.text)[0].tokens
    tokens = {"layers": text}
    if inputs.target is not None:
        tokens = {"encoder": text, "decoder": reader.labels(inputs.target)[0].tokens}
    facts: dict[str, Any] = {
        "model": model,
        "text": _text(request, reader, text),
        "target": request.target,
        "created": datetime.now(UTC),
        "versions": {name: metadata.version(name) for name in _SOFTWARE},
        "tokens": tokens,
        "attentions": attentions,
    }
    return validate(RecordingFile, facts | tensors)


def layer_name(key: LayerKey) -> str:
    """The name of an attention in a recording: ``layers.3``, ``decoder.3`` or ``decoder.3.cross``."""
    prefix, _, number = str(key).rpartition(".")
    return f"decoder.{number}.cross" if prefix == "cross" else f"{stack_of(key)}.{number}"


def _text(request: ModelInput, reader: InputReader, tokens: list[str]) -> str:
    if isinstance(request.text, str):
        return request.text
    if request.messages is not None:
        return reader.conversation(request.messages)
    return "".join(tokens)

"""A run of a model as a recording: weights, taps and hidden states of its layers, with labels."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from typing import Any, Generic, TypeVar, get_args

import numpy as np
from torch import Tensor

from attention_contract.base import WireModel
from attention_contract.recording_tensors import AXES, RecordedStack, place_of
from attention_contract.schemas.prompts import ModelInput
from attention_contract.schemas.recordings import RecordingFile
from attention_contract.tensors import Array
from attention_contract.validation import validate
from attention_service.core.tensors import to_numpy
from attention_service.models.answers.read_states import entered_by_stack
from attention_service.models.inputs.input_reader import InputReader
from attention_service.models.inputs.input_stacks import Inputs, Stack
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import unseen_layers
from attention_service.models.passes.attention_places import VISION, stack_of
from attention_service.models.passes.points import Point
from attention_service.prompts.conversations import ChatForm
from attention_service.runtime.scheduling.operation import Fields
from attention_transformers.model_layers import LayerKey

_SOFTWARE = ("attention-service", "transformers", "torch")

ReplyT_co = TypeVar("ReplyT_co", bound=WireModel, covariant=True)


@dataclass(frozen=True)
class Recorded(Generic[ReplyT_co]):
    """A reply, and the recording of its run if the request keeps it."""

    reply: ReplyT_co
    recording: RecordingFile | None


def recording_of(
    loaded: LoadedModel,
    request: ModelInput,
    inputs: Inputs,
    by_layer: Mapping[LayerKey, Fields],
    states: Mapping[Point, Tensor],
) -> RecordingFile:
    """Make the recording of a run over one text.

    ``found``: the results of the layers, with what is ``whole`` of each; ``states``: those around the layers.
    The crops of images follow each other as one sequence. Layers of stacks that recordings have no name for are left
    out, and so are taps that recordings have no name for, such as ``mlp``, and those with a dimension of keys of layers
    whose keys are not the tokens of one text.
    """
    reader, unseen = loaded.reader, unseen_layers(loaded)
    tensors: dict[str, dict[str, Array]] = {stack: {} for stack in get_args(RecordedStack)}
    attentions = []
    for key, results in by_layer.items():
        name = layer_name(key)
        if place_of(f"{name}.weights") is None:
            continue
        stack, _, rest = name.partition(".")
        taps = {tap: x for tap, x in results.items() if tap in AXES} | results.get("whole", {})
        if key in unseen:
            taps = {tap: x for tap, x in taps.items() if "keys" not in AXES[tap]}
        if stack == VISION and inputs.media is not None:
            taps = {tap: _joined(tap, array) for tap, array in taps.items()}
        tensors[stack] |= {f"{rest}.{tap}": array for tap, array in taps.items()}
        number = rest.partition(".")[0]
        heads = loaded.places[str(key)].widths.heads
        attentions.append({"name": name, "heads": [f"L{number}H{head}" for head in range(heads)]})
    for (layer, kind), state in states.items():
        if layer is None or kind not in AXES:
            continue
        stack, _, rest = layer_name(layer).partition(".")
        if stack in tensors and not (kind == "hidden" and rest.endswith(".cross")):
            tensors[stack][f"{rest}.{kind}"] = _rows(to_numpy(state))
    for stack, state in entered_by_stack(states).items():
        if stack in tensors and (stack != VISION or tensors[VISION]):
            tensors[stack]["embeddings"] = _rows(to_numpy(state))
    text = reader.labels(inputs.text)[0].tokens
    tokens = {"layers": text}
    if inputs.target is not None:
        tokens = {"encoder": text, "decoder": reader.labels(inputs.target)[0].tokens}
    if tensors[VISION] and inputs.media is None:  # the images alone, of a pair of encoders
        tokens = {VISION: text}
    elif tensors[VISION] and inputs.media is not None:
        tokens[VISION] = [token for crop in reader.labels(inputs.media) for token in crop.tokens]
    facts: dict[str, Any] = {
        "model": loaded.name,
        "text": _text(request, reader, inputs.text),
        "target": request.target,
        "created": datetime.now(UTC),
        "versions": {name: metadata.version(name) for name in _SOFTWARE},
        "tokens": tokens,
        "attentions": attentions,
        "unseen": {layer_name(key): why for key, why in unseen.items()},
    }
    return validate(RecordingFile, facts | tensors)


def _rows(states: Array) -> Array:
    """States ``[B, L, width]``, or ``[B, L, streams, width]`` of hyper-connections, as one row for each token."""
    width = states.shape[-1] if states.ndim < 4 else states.shape[-2] * states.shape[-1]
    return states.reshape(-1, width)


def _joined(tap: str, crops: Array) -> Array:
    """The tap ``[C, H, L, …]`` of crops as that of one sequence ``[H, C·L, …]``, in which a crop sees itself alone."""
    if AXES[tap] != ("heads", "queries", "keys"):
        return np.concatenate([*crops], 1)
    count, heads, length, _ = crops.shape
    whole = np.full((heads, count, length, count, length), 0 if tap == "weights" else -np.inf, crops.dtype)
    for number, crop in enumerate(crops):
        whole[:, number, :, number] = crop
    return whole.reshape(heads, count * length, count * length)


def layer_name(key: LayerKey) -> str:
    """The name of an attention in a recording: ``layers.3``, ``decoder.3``, ``vision.3`` or ``decoder.3.cross``."""
    prefix, _, number = str(key).rpartition(".")
    return f"decoder.{number}.cross" if prefix == "cross" else f"{stack_of(key)}.{number}"


def _text(request: ModelInput, reader: InputReader, stack: Stack) -> str:
    if isinstance(request.text, str):
        return request.text
    if request.messages is not None:
        return reader.conversation(request.messages, ChatForm.of(request)).text
    if stack.names is not None:
        return "".join(stack.names[0])
    return reader.decoder.written(stack.host_ids[0].tolist())

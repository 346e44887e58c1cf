"""Recordings of what a model computed for a text. Hidden states, weights and taps of every layer, with their labels.

A recording is a safetensors file. Its tensors are named ``{layer}.{tap}``, as in ``layers.0.weights``,
``encoder.2.hidden`` or ``decoder.1.cross.q``. ``hidden`` is the state after the layer, before the final norm;
``{stack}.embeddings`` is the input of the first layer, and ``{stack}.final`` the state after the final norm. The
metadata entry ``recording`` holds all else as JSON text.

Shapes, with H heads (of ``k`` and ``v``: key/value heads), Lq queries and Lk keys: ``weights [H, Lq, Lk]``,
``hidden [Lq, d_model]``; the other taps as in ``attention``, without the batch.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar, Final, Literal, get_args

import numpy as np
from pydantic import AwareDatetime, BeforeValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from attention_contract.base import ABSENT, IfRequested, Listed, WireModel, at_fault
from attention_contract.errors import InvalidRequest, Unreadable
from attention_contract.json_reading import from_json
from attention_contract.recording_tensors import (
    AXES,
    Indices,
    RecordedStack,
    Sliceable,
    TensorPlace,
    place_of,
    take,
    take_pooled,
)
from attention_contract.tensors import Array, Encoding, FloatArray, Untyped
from attention_contract.validation import validate

RecordingId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Label = Annotated[str, Field(max_length=1024)]


def _no_number(value: Any) -> Any:
    if isinstance(value, (int, float)):
        raise PydanticCustomError("no_time", "expected a time as in 2026-01-01T00:00:00Z")
    return value


Moment = Annotated[AwareDatetime, BeforeValidator(_no_number)]
"""A time with its zone, as text. Pydantic alone takes a number for seconds since 1970."""
LayerName = Annotated[str, Field(pattern=r"^(layers|encoder|decoder|vision)\.\d{1,4}(\.cross)?$")]


class RecordedAttention(WireModel):
    """One attention of the recorded model."""

    name: LayerName
    heads: Listed[Label] = Field(min_length=1, max_length=65_536)
    """The label of each head, as in ``L0H3``."""


class RecordingFacts(WireModel):
    """The facts of a recording, without its tensors."""

    format: Literal[1] = 1
    model: str = Field(min_length=1, max_length=1024)
    """The model's id: its name or folder, as the tokenizer's and config's users know it."""
    text: str = Field(max_length=1_000_000)
    target: str | None = Field(default=None, max_length=1_000_000)
    """The decoder's text, of a model with an encoder and a decoder."""
    created: Moment
    """The time of the recording."""
    versions: dict[str, Label] = Field(default_factory=dict, max_length=64)
    """Versions of the software used, by name."""
    computed: Literal["local", "raw", "modules"] | None = None
    """The place of the computation: ``local`` in the model itself, ``raw`` on a server from q, k and v, ``modules``
    in modules of a server that were imported from the model's checkpoint. Null for recordings of other origin."""
    tokens: dict[RecordedStack, Listed[Label]] = Field(min_length=1, max_length=3)
    """The tokens of each stack, as labels of queries and keys. Those of ``vision`` are the patches of all images, crop
    after crop, in the order in which the model has them; one crop sees nothing of another."""
    attentions: Listed[RecordedAttention] = Field(default_factory=list, max_length=4096)
    """Every recorded attention, in the order of the layers."""
    unseen: dict[LayerName, Label] = Field(default_factory=dict, max_length=4096)
    """The layers that mix tokens and have no recorded weights, with the reason: linear attention has no weights of
    pairs of tokens, and other layers have keys that are no single tokens. No rollout goes through them."""

    def attention(self, name: str) -> RecordedAttention | None:
        """The attention of this name; None if there is none."""
        return next((attention for attention in self.attentions if attention.name == name), None)


class RecordingFile(RecordingFacts):
    """A whole recording: the facts, and its tensors by the rest of their name behind the stack."""

    file_entry: ClassVar = "recording"
    """The metadata entry of its safetensors file."""

    layers: dict[str, FloatArray] = Field(default_factory=dict)
    """Tensors of a model with one stack, such as ``0.weights``."""
    encoder: dict[str, FloatArray] = Field(default_factory=dict)
    decoder: dict[str, FloatArray] = Field(default_factory=dict)
    vision: dict[str, FloatArray] = Field(default_factory=dict)

    @field_validator("layers", "encoder", "decoder", "vision")
    @classmethod
    def _typed(cls, tensors: dict[str, Array]) -> dict[str, Array]:
        """Numbers that came without a dtype are stored as float32."""
        return {name: np.asarray(x, np.float32) if type(x) is Untyped else x for name, x in tensors.items()}

    @model_validator(mode="after")
    def _tensors_fit_labels(self) -> "RecordingFile":
        check_tensors(self, ((name, array.shape) for name, array in self.tensors()))
        return self

    def tensors(self) -> Iterator[tuple[str, Array]]:
        """Every tensor with its full name."""
        for stack in get_args(RecordedStack):
            held: dict[str, FloatArray] = getattr(self, stack)
            for name, array in held.items():
                yield f"{stack}.{name}", array


LocalTap = Literal["weights", "q", "k", "v", "context"]
"""The taps that are recorded where the whole model runs."""


def check_tensors(facts: RecordingFacts, tensors: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Compare the names and shapes of tensors with the labels. Raises pydantic's error, which names the tensor."""
    heads = {attention.name: len(attention.heads) for attention in facts.attentions}
    tokens = facts.tokens
    for name, shape in tensors:
        place = place_of(name)
        if place is None:
            raise at_fault(
                name,
                "no tensor of a recording has this name; expected {stack}.{layer}.{tap}, as in layers.0.weights, with "
                f"one of {', '.join(AXES)}",
            )
        if place.stack not in tokens or place.key_stack not in tokens:
            raise at_fault(name, f"there are no tokens of the stack {place.key_stack!r}")
        axes = AXES[place.kind]
        if "heads" in axes and place.layer not in heads:
            raise at_fault(name, f"there is no attention {place.layer!r} with labels of its heads")
        expected = {"queries": len(tokens[place.stack]), "keys": len(tokens[place.key_stack])}
        expected["heads"] = heads.get(place.layer, 0)
        fits = len(shape) == len(axes) and all(
            _fits(place.kind, axis, size, expected.get(axis)) for axis, size in zip(axes, shape, strict=True)
        )
        if not fits:
            wanted = ", ".join(f"{expected[axis]} {axis}" if axis in expected else axis for axis in axes)
            raise at_fault(name, f"it has shape {list(shape)}; by the labels expected [{wanted}]")


def read_facts(text: str | None, tensors: Iterable[tuple[str, tuple[int, ...]]]) -> RecordingFacts:
    """Read the metadata entry ``recording`` of a file with tensors of these names and shapes. Raises Unreadable."""
    if text is None:
        raise Unreadable("the safetensors file has no metadata entry 'recording'; expected the file of a recording")
    data = from_json(text.encode(), "the metadata entry 'recording'")
    try:
        facts = validate(
            RecordingFacts, {name: value for name, value in data.items() if name not in get_args(RecordedStack)}
        )
        check_tensors(facts, tensors)
    except InvalidRequest as fault:
        raise Unreadable(f"the metadata entry 'recording' is not valid: {fault.detail}") from None
    except PydanticCustomError as fault:
        raise Unreadable(
            f"a tensor does not fit its labels: {fault.context and fault.context['field']}: {fault}"
        ) from None
    return facts


def _fits(kind: str, axis: str, size: int, expected: int | None) -> bool:
    if expected is None:
        return True
    if kind in {"k", "v"} and axis == "heads":  # key/value heads divide the heads
        return size > 0 and expected % size == 0
    return size == expected


class RecordedTensor(WireModel):
    """One tensor of a recording."""

    name: str
    dtype: str
    shape: list[int]


class RecordingInfo(RecordingFacts):
    """A stored recording."""

    id: RecordingId
    """Content hash of the recording."""
    bytes: int
    """Bytes of its file."""
    tensors: list[RecordedTensor]
    value: IfRequested[FloatArray] = ABSENT
    """The requested tensor, or the requested part of it; null if none was requested."""

    def placed(self, kind: str) -> dict[str, tuple[TensorPlace, tuple[int, ...]]]:
        """The place and the shape of each tensor of one kind, by the name of its attention or stack."""
        placed = ((place_of(tensor.name), tuple(tensor.shape)) for tensor in self.tensors)
        return {place.layer: (place, shape) for place, shape in placed if place is not None and place.kind == kind}


class RecordingSummary(WireModel):
    """A stored recording in a list."""

    id: RecordingId
    model: str
    text: str
    """Its first 200 characters."""
    created: Moment
    tokens: dict[RecordedStack, int]
    """The number of tokens of each stack."""
    layers: int
    """The number of layers, of both stacks."""
    heads: int
    """The most heads of an attention."""
    taps: list[str]
    """The kinds of its tensors: taps, ``hidden``, ``embeddings`` and ``final``."""
    bytes: int


class RecordingList(WireModel):
    """Every stored recording, the newest first."""

    recordings: list[RecordingSummary]
    bytes: int
    """Bytes of all of them on the disk."""
    limit_bytes: int
    """Bytes that the server keeps at most."""
    damaged: list[str] = Field(default_factory=list)
    """Ids of stored files that cannot be read. They can be deleted."""


_CHOSEN: Final = r"^(\d{1,9}(,\d{1,9})*|\d{0,9}:\d{0,9})$"
Chosen = Annotated[str, Field(pattern=_CHOSEN, max_length=8192)]
"""Indices separated by commas, or ``start:stop``."""


class RecordingQuery(WireModel):
    """The part of a recording to read; without a layer and a tensor, only the description."""

    reads_text: ClassVar[bool] = True

    layer: str | None = Field(default=None, max_length=64, examples=["layers.0", "0"])
    """The layer, or the attention of a layer, such as ``decoder.0.cross``. A number stands for ``layers.{number}``."""
    tensor: str | None = Field(default=None, max_length=128, examples=["weights"])
    """With a layer, the tap, or ``hidden``; default: ``weights``. Without one, the full name of a tensor."""
    heads: Chosen | None = Field(default=None, examples=["0,3"])
    """Only these heads: indices separated by commas, or ``start:stop``."""
    queries: Chosen | None = Field(default=None, examples=["0:4"])
    """Only these queries."""
    keys: Chosen | None = None
    """Only these keys."""
    pool: int | None = Field(default=None, ge=2, lt=2**31)
    """With n, return the largest number of each square of n queries and n keys; for weights and scores."""
    encoding: Encoding = "list"
    """The form of tensors in a JSON reply."""

    def tensor_name(self) -> str | None:
        """The full name of the tensor; None if none is asked for."""
        if self.layer is None:
            return self.tensor
        layer = f"layers.{self.layer}" if self.layer.isdecimal() else self.layer
        return f"{layer}.{self.tensor or 'weights'}"

    def indices(self, name: str, shape: tuple[int, ...]) -> tuple[Indices, ...]:
        """The indices to read in each dimension of a tensor. Raises InvalidRequest for those that it does not have."""
        place = place_of(name)
        axes = AXES[place.kind] if place is not None else ()
        chosen = {"heads": self.heads, "queries": self.queries, "keys": self.keys}
        for axis, text in chosen.items():
            if text is not None and axis not in axes:
                raise InvalidRequest.at(axis, f"{name} has no such dimension; its dimensions are {', '.join(axes)}")
        if self.pool is not None and axes != ("heads", "queries", "keys"):
            raise InvalidRequest.at(
                "pool", f"{name} has the dimensions {', '.join(axes)}; weights and scores can be pooled"
            )
        return tuple(_indices(chosen.get(axis), axis, size) for axis, size in zip(axes, shape, strict=True))

    def read(self, part: Sliceable, name: str, shape: tuple[int, ...]) -> Array:
        """Read the part of a tensor from something that has its shape. Raises InvalidRequest."""
        indices = self.indices(name, shape)
        return take(part, indices) if self.pool is None else take_pooled(part, indices, self.pool)


def _indices(text: str | None, axis: str, size: int) -> Indices:
    if text is None:
        return slice(0, size)
    if ":" in text:
        start, _, stop = text.partition(":")
        first, end, _ = slice(int(start or 0), int(stop) if stop else None).indices(size)
        return slice(first, end) if first < end else slice(0, 0)  # safetensors reads no empty range elsewhere
    indices = [int(part) for part in text.split(",")]
    if (largest := max(indices)) >= size:
        raise InvalidRequest.at(axis, f"{largest} is out of range; expected 0 to {size - 1}", size=size, actual=largest)
    return indices


EXAMPLE_RECORDING: dict[str, Any] = {
    "model": "by hand",
    "text": "the cat",
    "created": "2026-01-01T00:00:00Z",
    "tokens": {"layers": ["the", "cat"]},
    "attentions": [{"name": "layers.0", "heads": ["L0H0"]}],
    "layers": {"0.weights": [[[1.0, 0.0], [0.25, 0.75]]]},
}
"""A recording small enough to follow by hand."""

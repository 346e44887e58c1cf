"""The declaration of a form of checkpoint: its files as a model of transformers, with what they do not tell.

Add a form:

1. Write a file of this folder with a function that takes the ``Stored`` files and returns a ``Form``, or None for the
   files of any other. ``Form`` has all that the lists, the imports of layers and the loads of models ask.
2. List it in ``forms/__init__.py``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from attention_contract.errors import InvalidCheckpoint
from attention_service.core.tensors import TORCH_DTYPES
from attention_service.modules.store_files import open_tensors, reason

Input = Literal["text", "text_pair", "messages", "images", "audio", "target"]
Read = Callable[[str], Tensor]
"""Reads a tensor by its name. Raises KeyError if there is none."""
DTYPES: Final = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
"""The wire's names of the floats of safetensors."""


class StoredHeader(NamedTuple):
    """The entry of a tensor in the header of its file."""

    dtype: str
    """The code of safetensors, such as ``F8_E4M3``."""
    shape: tuple[int, ...]


Headers = Mapping[str, StoredHeader]
"""The header of every tensor of a checkpoint, by its name."""


@dataclass(frozen=True)
class Stored:
    """The files of a checkpoint."""

    place: Path
    """Its folder, or the file that it is."""
    config: Mapping[str, Any]
    """config.json; empty where there is none."""
    names: Mapping[str, Path]
    """The file of every tensor; empty of files that are no safetensors."""

    @cached_property
    def headers(self) -> Headers:
        """The dtype and shape of every tensor, as its file has them. Raises InvalidCheckpoint."""
        headers: dict[str, StoredHeader] = {}
        for place in {*self.names.values()}:
            try:
                with open_tensors(place) as file:
                    for name in file.keys():  # noqa: SIM118  # it is no mapping
                        if self.names.get(name) == place:
                            part = file.get_slice(name)
                            headers[name] = StoredHeader(part.get_dtype(), tuple(part.get_shape()))
            except (SafetensorError, OSError) as fault:
                raise unreadable(place, fault) from fault
        return headers

    def read(self, name: str) -> Tensor:
        """A tensor as it is stored. Raises InvalidCheckpoint, and KeyError if there is none."""
        place = self.names[name]
        try:
            with open_tensors(place) as file:
                value: Tensor = file.get_tensor(name)
                return value
        except (SafetensorError, OSError) as fault:
            raise unreadable(place, fault) from fault


class Part(NamedTuple):
    """A tensor of a model, made of tensors of files."""

    names: tuple[str, ...]
    """The tensors that it is made of."""
    make: Callable[..., Tensor] | None = None
    """Makes it of them; None if it is the only one as it is."""
    shape: Callable[[], Sequence[int]] | None = None
    """Finds the shape of a part that is unpacked to float32, without unpacking it. Raises InvalidCheckpoint."""

    def read(self, read: Read) -> Tensor:
        """Read what it is made of, and make it."""
        values = map(read, self.names)
        return next(values) if self.make is None else self.make(*values)

    def header(self, name: str, headers: Headers) -> StoredHeader:
        """The dtype, by the wire's name, and the shape of the tensor of this name.

        Raises InvalidCheckpoint for one that is no float, or that cannot be made of tensors of such shapes.
        """
        if self.shape is not None:
            return StoredHeader("float32", tuple(self.shape()))
        stored = [headers[stored_name] for stored_name in self.names]
        for stored_name, header in zip(self.names, stored, strict=True):
            if header.dtype not in DTYPES:
                raise InvalidCheckpoint(
                    f"{stored_name} has dtype {header.dtype}; expected one of {', '.join(DTYPES)}", param="checkpoint"
                )
        dtype = DTYPES[stored[0].dtype]
        if self.make is None:
            return StoredHeader(dtype, stored[0].shape)
        values = (
            torch.empty(header.shape, dtype=TORCH_DTYPES[DTYPES[header.dtype]], device="meta") for header in stored
        )
        try:
            return StoredHeader(dtype, tuple(self.make(*values).shape))
        except (RuntimeError, ValueError, IndexError, TypeError) as fault:
            shapes = " and ".join(
                f"{stored_name} of shape {[*headers[stored_name].shape]}" for stored_name in self.names
            )
            raise InvalidCheckpoint.at("checkpoint", f"{name} cannot be made of {shapes}") from fault


def whole(name: str) -> Part:
    """A tensor as it is."""
    return Part((name,))


Resizing = Literal["shortest", "longest", "squash"]


@dataclass(frozen=True)
class ImageSteps:
    """The way from an image to pixels."""

    size: tuple[int, int]
    """Height and width of the crop from its middle."""
    scale: tuple[int, int]
    """Height and width to which it is resized before."""
    resizing: Resizing
    """``shortest``: the crop is full, and edges are cut; ``longest``: all is seen, with borders; ``squash``: neither,
    but the shape changes."""
    interpolation: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    border: tuple[int, ...] = (0, 0, 0)
    """The colour of borders."""


@dataclass(frozen=True)
class Facts:
    """Facts of a model by its files."""

    config: Mapping[str, Any]
    """The entries of its config.json in transformers."""
    packed: str | None = None
    """The form of its numbers, such as ``GPTQ int4``, if they are unpacked; None if they are floats."""
    library: str | None = None
    """The library that wrote it, if its config and its names of tensors are not those of transformers."""
    dtype: str | None = None
    """The dtype of its numbers, if its config does not say."""
    bytes: int | None = None
    """Bytes of its numbers in their dtype, if the sizes of its files do not say."""
    takes: tuple[Input, ...] | None = None
    """The inputs that its requests may have, if they do not depend on files beside it."""
    images: ImageSteps | None = None
    """The steps of images, if no file beside it says them."""
    cleans: bool = False
    """True if punctuation is removed from texts, and capitals, before they become tokens."""

    @property
    def stored(self) -> str:
        """The dtype of its numbers; float32 of those that are unpacked, or if nothing says."""
        dtype = self.dtype or str(self.config.get("dtype") or self.config.get("torch_dtype"))
        return dtype if self.packed is None and dtype in DTYPES.values() else "float32"

    def weights(self, dtype: str) -> str:
        """The numbers of a model of it that computes in a dtype, as ``ran`` names them."""
        if self.packed is not None:
            return f"dequantized from {self.packed}"
        return dtype if self.library is None else f"{dtype} of {self.library}"


@dataclass(frozen=True)
class Form:
    """A checkpoint as its form reads it."""

    facts: Facts
    tensors: Mapping[str, Part] = field(default_factory=dict)
    """Its tensors, by their names in transformers."""
    left_out: tuple[str, ...] = ()
    """The tensors and entries of its files that are not read."""
    refusal: str | None = None
    """The reason for which it is no model."""
    layerless: str | None = None
    """The reason for which no layer of it can be imported."""
    check: Callable[[], None] = lambda: None
    """Raises InvalidCheckpoint if a tensor cannot be made of those of the files, by their headers alone."""


class FormReader(NamedTuple):
    """The reader of one form."""

    read: Callable[[Stored], Form | None]
    """Returns what files are in this form; None if they are in another. Raises InvalidCheckpoint."""
    is_at: Callable[[Path], bool] = lambda _: False
    """True for a folder without a config.json that people take for a model of this form."""


def unreadable(file: Path, fault: Exception) -> InvalidCheckpoint:
    """The error for a file that is no safetensors file."""
    return InvalidCheckpoint(f"{file.name} is not a readable safetensors file: {reason(fault)}", param="checkpoint")

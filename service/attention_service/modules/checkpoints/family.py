"""The form of a family: the names of its tensors, and what its config.json says of one attention block.

Add a family:

1. Find the lineage, a file of ``families/``, whose tensors have the same names; or begin a file, and list it in
   ``families/__init__.py``.
2. Give ``blocks``: for each kind of attention block the text before its tensor names, and the piece of a tensor that
   holds each parameter. ``cuts`` has the forms of fused and transposed tensors.
3. Give ``describe``: a function from the entries of config.json and the block to the spec and the head counts. Refuse,
   by ``Entries.must_be``, every entry that changes the numbers and is not expressed.
4. Add a tiny model to ``tests/modules/checkpoints``. A family without one fails a test.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Self

from pydantic import ValidationError

from attention_contract.errors import InvalidCheckpoint
from attention_contract.schemas.modules import Latent, Stack
from attention_contract.spec import AttentionSpec, Causal, SlidingWindow
from attention_service.modules.checkpoints.cuts import Cut, same

Part = Literal["self", "cross"]


@dataclass(frozen=True)
class Piece:
    """The location of a parameter: a tensor of the block, and the cut that takes the parameter out of it."""

    tensor: str
    cut: Cut = same
    layer: int | None = None
    """The layer whose tensor it is; None is the block's own. T5 shares the bias of its layer 0."""


Pieces = Mapping[str, tuple[Piece, ...]]
"""The possible locations of each parameter; the first that exists is taken."""


@dataclass(frozen=True)
class BlockNames:
    """The tensor names of one kind of attention block."""

    prefix: str
    """The text before them, ``{layer}`` for the number of the layer. Any path may stand before it."""
    pieces: Pieces
    part: Part | None = "self"
    """None if the names do not say."""
    stack: Stack | None = None
    """The stack that it belongs to; None takes it from the path before the prefix."""
    unsupported: Mapping[str, str] = field(default_factory=dict)
    """Tensors of a computation that modules do not support, and its name in messages."""

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches the whole text before a tensor name. Groups: ``path``, ``layer`` where there is one."""
        number = re.escape(self.prefix).replace(re.escape("{layer}"), r"(?P<layer>\d{1,9})", 1)
        path = r"(?P<path>(?:.*\.)?)" if "{layer}" in self.prefix else "(?P<path>)"
        return re.compile(path + number)

    @cached_property
    def tensors(self) -> frozenset[str]:
        """The names, inside a block, of every tensor that matters."""
        return frozenset(piece.tensor for places in self.pieces.values() for piece in places) | set(self.unsupported)


@dataclass(frozen=True)
class AttentionDescription:
    """One attention block, described: what it computes, and its heads."""

    spec: AttentionSpec
    heads: int | None
    """None if the checkpoint does not say."""
    kv_heads: int | None = None
    """None takes it from the rows of the tensors, as do the widths."""
    head_dim: int | None = None
    value_dim: int | None = None
    latent: Latent | None = None
    unknown: tuple[str, ...] = ()
    """Fields of the spec that change the numbers and that the checkpoint does not say."""


@dataclass(frozen=True)
class Entries:
    """The entries of config.json that are about one block, and the facts of the block itself."""

    config: Mapping[str, Any]
    layer: int
    part: Part
    stack: str | None
    parameters: frozenset[str]
    """The parameters for which the checkpoint has a tensor."""

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of the entries that is present and not null."""
        return next((self.config[name] for name in names if self.config.get(name) is not None), default)

    def optional_count(self, name: str, default: int | None) -> int | None:
        """A positive integer, or None where the entry is null; the default where it is absent."""
        if name not in self.config:
            return default
        return None if self.config[name] is None else self.count(name)

    def count(self, *names: str, default: int | None = None) -> int:
        """A positive integer. Raises InvalidCheckpoint where there is none and no default."""
        return int(self._checked(names, default, lambda value: type(value) is int and value >= 1, "a positive integer"))

    def known_count(self, *names: str) -> int | None:
        """A positive integer; None where the config has none of the entries, or 0."""
        return None if self.get(*names, default=0) == 0 else self.count(*names)

    def number(self, *names: str, default: float | None = None) -> float:
        """A finite number. Raises InvalidCheckpoint where there is none and no default."""
        return float(self._checked(names, default, is_number, "a number"))

    def object(self, name: str) -> "Entries":
        """The entries of an object in the config; none where there is no such object."""
        entries = self._checked((name,), {}, lambda value: isinstance(value, Mapping), "an object")
        return replace(self, config=entries)

    def flag(self, *names: str, default: bool) -> bool:
        """A boolean. Raises InvalidCheckpoint where the entry is something else."""
        return bool(self._checked(names, default, lambda value: type(value) is bool, "true or false"))

    def _checked(self, names: tuple[str, ...], default: Any, fits: Callable[[Any], bool], expected: str) -> Any:
        value = self.get(*names, default=default)
        if not fits(value):
            stated = next((name for name in names if self.config.get(name) is not None), names[0])
            raise InvalidCheckpoint(
                f"config.json says {stated} {str(value)[:80]!r}; expected {expected}", param="checkpoint", entry=stated
            )
        return value

    def must_be(self, name: str, *values: Any) -> Self:
        """Raise InvalidCheckpoint unless the entry is absent or one of the values."""
        value = self.get(name)
        if value is not None and value not in values:
            raise self.unsupported(name, f"expected {' or '.join(map(repr, values))}")
        return self

    def unsupported(self, name: str, advice: str) -> InvalidCheckpoint:
        """The error for an entry that asks for a computation that modules do not have."""
        return InvalidCheckpoint(
            f"config.json says {name} {str(self.get(name))[:80]!r}, which is not supported; {advice}",
            param="checkpoint",
            entry=name,
        )

    def of_layer(self, name: str) -> Any:
        """The element of a list with one element a layer; None where there is no list."""
        values = self.get(name)
        if values is None:
            return None
        if not isinstance(values, list) or self.layer >= len(values):
            raise self.unsupported(name, f"expected a list with an element for layer {self.layer}")
        return values[self.layer]


@dataclass(frozen=True)
class Family:
    """A family of checkpoints whose attention is found and described in one way."""

    name: str
    model_types: frozenset[str]
    """The ``model_type`` values of config.json that compute this attention; empty if names alone tell the family."""
    blocks: tuple[BlockNames, ...]
    describe: Callable[[Entries], AttentionDescription]
    without_config: bool = False
    """True if the tensor names identify the family where config.json states no model_type."""
    own_causal_mask: bool = False
    """True if its class makes the causal mask itself, and not the function of transformers that reads ``is_causal``."""


def described(family: Family, entries: Entries) -> AttentionDescription:
    """Describe a block. Raises InvalidCheckpoint where an entry has a value that no spec can have."""
    entries.must_be("per_layer_config", {})  # entries of single layers, which transformers has for every class
    try:
        attention = family.describe(entries)
        if family.own_causal_mask or entries.flag("is_causal", default=not _is_null(entries, "is_causal")):
            return attention
        return replace(attention, spec=_bidirectional(attention.spec))
    except ValidationError as fault:
        first = fault.errors()[0]
        place = ".".join(map(str, first["loc"])) or fault.title
        raise InvalidCheckpoint(
            f"config.json asks for an attention that no spec states: {place}: {first['msg']}", param="checkpoint"
        ) from None
    except (TypeError, ValueError, ArithmeticError, LookupError) as fault:  # an entry that no such model has
        raise InvalidCheckpoint(
            f"config.json has entries that no {family.name} has: {str(fault)[:200]}", param="checkpoint"
        ) from None


def is_number(value: Any) -> bool:
    """True for a finite number."""
    return type(value) in {int, float} and math.isfinite(value)


def _is_null(entries: Entries, name: str) -> bool:
    return name in entries.config and entries.config[name] is None


def _bidirectional(spec: AttentionSpec) -> AttentionSpec:
    """The spec of a causal block whose config says ``is_causal: false``; others are as they were.

    Source: ``create_causal_mask`` and ``create_sliding_window_causal_mask`` of ``transformers.masking_utils``, whose
    windows count the query's own key if they are causal, and do not if they are not.
    """
    if not any(isinstance(mask, Causal) for mask in spec.masks):
        return spec
    masks = [
        SlidingWindow(left=mask.left + 1, right=mask.left + 1)
        if isinstance(mask, SlidingWindow) and mask.left is not None
        else mask
        for mask in spec.masks
        if not isinstance(mask, Causal)
    ]
    return spec.model_copy(update={"masks": masks})


def linear(**modules: str) -> Pieces:
    """Weight and bias of projections that are linear layers of their own: ``q_proj="self.query"``."""
    return {
        f"{projection}.{kind}": (Piece(f"{module}.{kind}"),)
        for projection, module in modules.items()
        for kind in ("weight", "bias")
    }


def fused(module: str, out: str, cut: Callable[[str], Cut]) -> Pieces:
    """Weight and bias of q, k and v in the tensors of one linear layer, cut by role, and an output projection."""
    return {
        f"{role}_proj.{kind}": (Piece(f"{module}.{kind}", cut(role)),) for role in "qkv" for kind in ("weight", "bias")
    } | dict(linear(o_proj=out))


def one(**tensors: str) -> Pieces:
    """Parameters that are tensors of their own; ``__`` in a keyword stands for a dot: ``q_norm__weight=…``."""
    return {name.replace("__", "."): (Piece(tensor),) for name, tensor in tensors.items()}

"""The declaration of a form: the tensors that a quantized weight is made of, and the check that a file has them."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, NamedTuple

from torch import Tensor

from attention_contract.errors import InvalidCheckpoint
from attention_service.modules.checkpoints.forms.form import (
    Facts,
    Form,
    Headers,
    Part,
    Read,
    Stored,
    StoredHeader,
    whole,
)

WORDS: Final = frozenset({"I32", "U32"})
"""Dtypes of words of several numbers."""
FP8: Final = frozenset({"F8_E4M3", "F8_E5M2"})
FLOATS: Final = frozenset({"F16", "BF16", "F32", "F64"})
SCALES: Final = FLOATS | {"F8_E8M0"}
"""Dtypes of scales; the last is a power of two."""
_ROUNDING: Final = frozenset(
    {"input_scale", "input_zero_point", "input_global_scale", "activation_scale", "output_scale"}
)
"""Tensors of a module by which activations are rounded, which happens nowhere here."""
_UNSAID: Final = frozenset({"weight_format"})
"""Tensors of a module that say nothing of its numbers."""
ANY_RANK: Final = (0, 1, 2)


class StoredPart(NamedTuple):
    """A tensor of a module that its weight is made of."""

    name: str
    """The end of its name, behind that of the module."""
    dtypes: frozenset[str]
    """The codes that it may have."""
    ranks: tuple[int, ...] = (2,)
    """Numbers of dimensions that it may have."""
    required: bool = True
    """True if the weight would be another without it."""
    most: int | None = None
    """The most numbers that it may have."""


@dataclass(frozen=True)
class QuantizedForm:
    """A way of storing weights."""

    label: str
    """The words of replies, such as ``GPTQ int4``."""
    parts: tuple[StoredPart, ...]
    """The tensors of a module that its weight is made of, first the one without which it is not stored so."""
    unpack: Callable[[str, Read], Tensor]
    """Returns the float32 weight of a module, by its prefix."""
    shape: Callable[[str, Headers, Read], Sequence[int]]
    """Returns the shape of the same, ``[rows, columns]``; of AWQ and GPTQ with the numbers that fill the last words."""
    needs: Callable[[str, Headers], Iterable[str]] = lambda _prefix, _headers: ()
    """Returns the names of further parts without which the weight of a module would be another."""

    @property
    def main(self) -> str:
        """The part without which a weight is not stored so, such as ``qweight``."""
        return self.parts[0].name

    def form(self, stored: Stored, left_out: Sequence[str]) -> Form:
        """The form of files: one weight in the place of the parts that it is unpacked from. ``left_out``: of others."""
        weights = self.weights(stored.headers)
        hidden = self.hidden(weights)
        plain = {name: whole(name) for name in stored.names if name not in hidden}
        tensors = plain | {name: self._weight(prefix, stored) for name, prefix in weights.items()}
        kinds = Counter(name.rpartition(".")[2] for name in stored.names if name in hidden)
        rounding = [
            f"{kind} of {kinds[kind]} modules (activations are not rounded here)"
            for kind in sorted(_ROUNDING & {*kinds})
        ]
        facts = Facts(stored.config, packed=self.label)
        return Form(facts, tensors, (*left_out, *rounding), check=lambda: self.check_all(stored.headers))

    def _weight(self, prefix: str, stored: Stored) -> Part:
        names = tuple(name for part in self.parts if (name := prefix + part.name) in stored.headers)

        def made(*values: Tensor) -> Tensor:
            return self.unpack(prefix, dict(zip(names, values, strict=True)).__getitem__)

        def shape() -> Sequence[int]:
            self.check(prefix, stored.headers)
            return self.shape(prefix, stored.headers, stored.read)

        return Part(names, made, shape)

    def weights(self, headers: Headers) -> dict[str, str]:
        """The weights that are stored so among tensors with these headers, and the prefix of the module of each.

        A tensor called ``weight`` is, if other parts are beside it or its numbers are such as have a scale.
        """
        prefix_by_weight = {}
        main, *others = self.parts
        for name, header in headers.items():
            prefix = name.removesuffix(main.name)
            if prefix == name or prefix[-1:] not in {"", "."}:
                continue
            beside = any(prefix + other.name in headers for other in others)
            if beside or main.name != "weight" or header.dtype in main.dtypes:
                prefix_by_weight[f"{prefix}weight"] = prefix
        return prefix_by_weight

    def hidden(self, weights: Mapping[str, str]) -> set[str]:
        """The tensors that belong to weights that are stored so, by what ``weights`` returns."""
        names = {part.name for part in self.parts} | _ROUNDING | _UNSAID
        return {prefix + name for prefix in weights.values() for name in names}

    def check(self, prefix: str, headers: Headers) -> None:
        """Raise InvalidCheckpoint for a weight that lacks a part, or has one of a dtype or shape that no such part has.

        What is checked here is in headers, so that nothing is read or unpacked before.
        """
        needed = {prefix + part.name for part in self.parts if part.required} | set(self.needs(prefix, headers))
        if missing := sorted(needed - headers.keys()):
            raise InvalidCheckpoint.at(
                "checkpoint",
                f"{prefix}{self.main} is stored as {self.label}, and {' and '.join(missing)} without which its numbers "
                "are others, is missing: take the whole checkpoint again, or the one before quantization",
                missing=missing,
            )
        for part in self.parts:
            if (header := headers.get(prefix + part.name)) is not None:
                _check_part(prefix, part, header)

    def check_all(self, headers: Headers) -> None:
        """Raise InvalidCheckpoint unless each weight that is stored so has its parts, and each FP8 tensor a scale."""
        weights = self.weights(headers)
        for prefix in weights.values():
            self.check(prefix, headers)
        taken = self.hidden(weights)
        bare = next((name for name, header in headers.items() if header.dtype in FP8 and name not in taken), None)
        if bare is not None:
            raise InvalidCheckpoint.at(
                "checkpoint",
                f"{bare} is stored as {headers[bare].dtype}, and {self.label} has no scale for a tensor of this name; "
                "take the checkpoint before quantization",
                tensor=bare,
            )


def _check_part(prefix: str, part: StoredPart, header: StoredHeader) -> None:
    expected = None
    if header.dtype not in part.dtypes:
        expected = f"dtype {header.dtype}; expected {' or '.join(sorted(part.dtypes))}"
    elif len(header.shape) not in part.ranks:
        expected = f"shape {[*header.shape]}; expected {' or '.join(map(str, part.ranks))} dimensions"
    elif 0 in header.shape:
        expected = f"shape {[*header.shape]}, which has no number"
    elif part.most is not None and prod(header.shape) > part.most:
        expected = f"{prod(header.shape)} numbers; expected at most {part.most}"
    if expected is not None:
        raise InvalidCheckpoint.at("checkpoint", f"{prefix}{part.name} has {expected}", tensor=prefix + part.name)


def stored_shape(main: str) -> Callable[[str, Headers, Read], Sequence[int]]:
    """The shape of a weight whose numbers are one tensor of the same shape."""
    return lambda prefix, headers, _: headers[prefix + main].shape


def is_size(value: object) -> bool:
    """True for a whole number above zero."""
    return type(value) is int and value > 0

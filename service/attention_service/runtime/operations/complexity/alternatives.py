"""Alternatives to a request: their labels in the reply, and the request fields of their errors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.costs.complexity import Alternative
from attention_contract.spec import AttentionSpec

WIDTHS: Final = ("d_model", "num_heads", "num_kv_heads", "head_dim", "value_dim")
"""Fields of a config that an alternative can change."""
MOST_WORDS: Final = 80
"""Maximum characters of a label in words."""

_BEHIND: Final[dict[str, tuple[str, ...]]] = {
    "kernel": ("spec", "dtype", "hardware"),
    "hardware": ("dtype",),
    "return": ("spec",),
    "spec": WIDTHS,
    "config": ("spec", *WIDTHS),
    "shape": ("spec.position.length", "spec.method.length", "spec", *WIDTHS),
}
"""Fields of an alternative that can cause an error in a field of the request, by that field."""


@dataclass(frozen=True)
class Given:
    """One alternative, and its place in the request."""

    index: int
    other: Alternative

    def blamed(self, fault: InvalidRequest, when: str = "") -> InvalidRequest:
        """Return the same error for the alternative's field; ``when``: the size, in words."""
        if (fault.param or "").startswith("sweep"):
            return fault
        named = f"compare.{self.index}"
        if (field := self._at_fault(fault.param)) is not None:
            named += f".{field}"
        return renamed(fault, named, when)

    def _at_fault(self, param: str | None) -> str | None:
        top = "" if param is None else param.partition(".")[0]
        if self._says(top):
            return param
        return next(filter(self._says, _BEHIND.get(top, (*WIDTHS, "spec"))), None)

    def _says(self, field: str) -> bool:
        """True if the alternative sets this field, which may be nested."""
        value: Any = self.other
        for name in field.split("."):
            value = getattr(value, "return_" if name == "return" else name, None)
        return value is not None


def renamed(fault: InvalidRequest, param: str, when: str = "") -> InvalidRequest:
    """Return the same error for another field."""
    detail = fault.detail.removeprefix(f"{fault.param}: ")
    return type(fault)(f"{param}: {when}{detail}", param=param, **fault.facts)


def labels(alternatives: Sequence[Alternative]) -> list[str]:
    """Return each alternative's own label, or a description of it, numbered if ambiguous.

    Raises InvalidRequest for a repeated label.
    """
    taken = ["request"]
    for index, other in enumerate(alternatives):
        if other.label in taken:
            param = f"compare.{index}.label"
            raise InvalidRequest.at(param, f"{other.label!r} is used twice; give each alternative its own label")
        taken += [] if other.label is None else [other.label]
    names = []
    for index, other in enumerate(alternatives):
        label = stem = other.label or _clipped(words(other)) or f"alternative {index + 1}"
        number = index + 1
        while other.label is None and label in taken:
            label, number = f"{stem} ({number})", number + 1
        taken.append(label)
        names.append(label)
    return names


def words(other: Alternative) -> str:
    """Describe an alternative in words."""
    fields = other.model_dump(exclude={"label", "spec", "return_"}, exclude_none=True)
    parts = [f"{name} {value}" if isinstance(value, int) else str(value) for name, value in fields.items()]
    parts += [] if other.spec is None else _spec_words(other.spec)
    parts += [] if other.return_ is None else [f"returning {', '.join(other.return_)}"]
    return ", ".join(parts)


def _spec_words(spec: AttentionSpec) -> list[str]:
    """Describe the parts that are not the default, each with its changed options."""
    masks = [_text_of(mask) for mask in spec.masks]
    return masks + [_option(name, value) for name, value in _changed(spec) if name != "masks"] or ["plain spec"]


def _changed(part: BaseModel) -> Iterator[tuple[str, Any]]:
    """Yield the fields that are not the default."""
    for name, field in type(part).model_fields.items():
        value = getattr(part, name)
        if name != "name" and value != field.get_default(call_default_factory=True):
            yield name, value


def _option(name: str, value: Any) -> str:
    """Return a part's own name if it has one; otherwise the field's name and the value."""
    if isinstance(value, BaseModel):
        return _text_of(value, name)
    return name if value is True else f"{name} {_text_of(value)}"


def _text_of(value: Any, called: str = "") -> str:
    if isinstance(value, BaseModel):
        options = ", ".join(_option(*change) for change in _changed(value))
        return getattr(value, "name", called) + (f" ({options})" if options else "")
    if isinstance(value, list):
        return " or ".join(map(_text_of, value))
    return f"{value:.16g}" if isinstance(value, float) else str(value)


def _clipped(text: str) -> str:
    return text if len(text) <= MOST_WORDS else f"{text[: MOST_WORDS - 1]}…"

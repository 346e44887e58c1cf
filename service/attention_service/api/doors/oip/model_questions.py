"""The models of the protocol: a module, its other questions, and raw attention; and an envelope as their request.

The inputs of a model are the tensor fields of the native request, dotted when nested (``parameters.q_proj.weight``).
Its outputs are the tensors of the native reply (``output``, ``statistics.entropy``, ``gradients.query``). All other
fields of the request are parameters of the envelope, as JSON text if they are no plain values.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Final, Literal, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from attention_contract import operations
from attention_contract.base import WireModel
from attention_contract.errors import InvalidRequest, ModuleNotFound, Unreadable
from attention_contract.json_reading import check_text, json_value, measure_text, tensor_fields, tensor_maps
from attention_contract.operations import Operation
from attention_contract.schemas.attention import Taps
from attention_contract.tensor_files import place_tensor
from attention_contract.tensors import Array
from attention_contract.validation import clip, fields_of, members_of, suggestion, validate

RAW: Final = "_attention"
"""The model that is raw attention; no module's name begins with an underscore."""
QUESTIONS: Final[Mapping[str, tuple[Operation[Any], Operation[Any]]]] = MappingProxyType(
    {
        "": (operations.forward, operations.raw_forward),
        "weights": (operations.weights, operations.raw_weights),
        "gradients": (operations.gradients, operations.raw_gradients),
    }
)
"""The operation about a module, and the one about raw attention, by the text behind the colon of a model's name."""
VERSION: Final = "1"
"""The version of every model. Clients expect a number, so the content hash stands in the reply's parameters."""
_DIFFERENCES: Final = "differences."
_TAPS: Final = frozenset(Taps.model_fields)
_NEEDED: Final = {
    "differences.": "compare", "present_": "past_key", "dropout_mask": "dropout", "top.": "top_k", "pooled": "pool",
    "hessian_products.": "directions",
}  # fmt: skip
"""The field of a request without which there is no such output, by the beginning of its name."""
_LONG_TEXT: Final = 2**16
"""Bytes of JSON text whose values are counted before it is parsed."""


@dataclass(frozen=True)
class Model:
    """A model that a path names."""

    name: str
    """The name in the path."""
    module: str | None
    """The module's name; None for raw attention."""
    question: str
    operation: Operation[Any]

    @property
    def request(self) -> type[WireModel]:
        """The native request."""
        return cast("type[WireModel]", self.operation.request)

    @property
    def reply(self) -> type[WireModel]:
        """The native reply."""
        return cast("type[WireModel]", self.operation.reply)


def model_of(name: str) -> Model:
    """The model of a name. Raises ModuleNotFound for a question that there is not."""
    module, colon, question = name.partition(":")
    if question not in QUESTIONS or (colon and not question):
        raise unknown(name)
    of_module, raw = QUESTIONS[question]
    return Model(name, None, question, raw) if module == RAW else Model(name, module, question, of_module)


def models_of(module: str) -> list[Model]:
    """The models that a module is, or raw attention."""
    return [model_of(f"{module}:{question}" if question else module) for question in QUESTIONS]


def unknown(name: str, version: str | None = None) -> ModuleNotFound:
    """The refusal of a model that there is not, in the words that clients look for."""
    of_version = "" if version is None else f" version {clip(version)}"
    return ModuleNotFound(f"Request for unknown model: '{name}'{of_version} is not found", param="name")


def pin_of(version: str | None, model: Model) -> str | None:
    """The content hash that a version pins; None for ``1`` and for none. Raises ModuleNotFound for another number."""
    if version in {None, "", VERSION}:
        return None
    if version.isdecimal() or model.module is None:
        raise unknown(model.name, version)
    return version


# ── an envelope as a request ─────────────────────────────────────────────────────────────────────────────────────────


def request_of(
    model: Model, options: Mapping[str, Any], wanted: Iterable[str], inputs: Mapping[str, Array]
) -> WireModel:
    """The native request of an envelope's parameters, requested outputs and inputs.

    Raises InvalidRequest or InvalidTensor, which name the field at fault.
    """
    kind, data = model.request, {}
    for name, value in options.items():
        data[name] = _option(kind, name, value)
    names = list(wanted)
    _check_outputs(model.reply, names, {*data, *(name.partition(".")[0] for name in inputs)})
    for field, requested in _requested_by_outputs(kind, names).items():
        stated = data.setdefault(field, requested)
        if isinstance(stated, list) and "parameters" not in stated:  # which stands for every parameter
            data[field] = [*stated, *(statistic for statistic in requested if statistic not in stated)]
    for name, array in inputs.items():
        place_tensor(data, name, array, kind)
    return validate(kind, data, by_name=False)


def _option(kind: type[WireModel], name: str, value: Any) -> Any:
    """The value of a field that is no tensor: text is JSON unless the field is text itself."""
    place, known = f"parameters.{clip(name)}", _options(kind)
    if name not in known:
        advice = "it is an input" if name in fields_of(kind) and name != "encoding" else suggestion(name, known)
        raise InvalidRequest.at(place, f"there is no such parameter; {advice}")
    if not isinstance(value, str | int | float):
        raise InvalidRequest.at(place, "expected text, a number, true or false; write lists and objects as JSON text")
    if not isinstance(value, str) or known[name]:
        return value
    encoded = value.encode()
    if len(encoded) > _LONG_TEXT:
        check_text(measure_text(encoded))
    try:
        return json_value(encoded, "the text")
    except Unreadable as fault:
        raise InvalidRequest.at(place, fault.detail) from None


@cache
def _options(kind: type[BaseModel]) -> Mapping[str, bool]:
    """The fields of a request that are no tensors, and whether each is text."""
    inputs = tensor_fields(kind) | tensor_maps(kind) | {"encoding"}  # the envelope says how each tensor travels
    return {
        name: any(map(_is_text, members_of(field))) for name, field in fields_of(kind).items() if name not in inputs
    }


def _is_text(kind: Any) -> bool:
    return kind is str or (get_origin(kind) is Literal and isinstance(get_args(kind)[0], str))


def _requested_by_outputs(kind: type[WireModel], names: list[str]) -> dict[str, Any]:
    """The fields of a request that ask for the requested outputs."""
    fields = _options(kind)
    requested: dict[str, Any] = {}
    for name in names:
        plain = name.removeprefix(_DIFFERENCES)
        first, _, rest = plain.partition(".")
        if plain in _TAPS and "return" in fields:
            requested.setdefault("return", {})[plain] = True
        elif first == "gradients" and "wrt" in fields:
            requested.setdefault("wrt", {})[rest] = True
        elif first == "statistics" and "statistics" in fields:
            requested.setdefault("statistics", {})[rest.partition(".")[0]] = True
    lists: dict[str, Any] = {field: [*values] for field, values in requested.items()}
    if names and "return_weights" in fields:
        lists["return_weights"] = any(name.removeprefix(_DIFFERENCES) == "weights" for name in names)
    return lists


def _check_outputs(reply: type[WireModel], names: list[str], sent: set[str]) -> None:
    """Raise InvalidRequest for an output that no reply of this kind has, or none to a request with these fields."""
    known = tensor_names(reply)
    for index, name in enumerate(names):
        place = f"outputs.{index}.name"
        if name == "gradients.parameters":
            raise InvalidRequest.at(place, "it stands for several; name each, as in 'gradients.q_proj.weight'")
        if name not in known and not any(prefix.endswith(".") and name.startswith(prefix) for prefix in known):
            raise InvalidRequest.at(place, f"there is no output {clip(name)!r}; {suggestion(name, known)}")
        need = next((field for start, field in _NEEDED.items() if name.startswith(start)), None)
        if need is not None and need not in sent:
            raise InvalidRequest.at(place, f"the output {clip(name)!r} comes with {need}; send it too")


@cache
def tensor_names(kind: type[BaseModel]) -> Mapping[str, FieldInfo]:
    """The tensors of a request or reply, by dotted name; the name of a mapping of names to tensors ends in a dot."""
    fields: dict[str, FieldInfo] = {}
    for own, field in kind.model_fields.items():
        name = field.alias or own
        if name in tensor_fields(kind) or name in tensor_maps(kind):
            fields[f"{name}." if name in tensor_maps(kind) else name] = field
        for member in members_of(field.annotation):
            if isinstance(member, type) and issubclass(member, BaseModel):
                fields |= {f"{name}.{inner}": nested for inner, nested in tensor_names(member).items()}
    return MappingProxyType(fields)

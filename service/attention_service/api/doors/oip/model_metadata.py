"""The metadata and the configuration of a model, from the fields of its request and its reply."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, get_args

from pydantic.fields import FieldInfo

from attention_contract.schemas.attention import output_only
from attention_contract.tensors import Kind, TensorField
from attention_service.api.doors.oip.inference_envelope import DATATYPES
from attention_service.api.doors.oip.model_questions import VERSION, Model, tensor_names
from attention_service.core.inspection.statistics import DEFAULT_STATISTICS
from attention_service.core.multihead import Sizes, parameter_shapes
from attention_service.modules.resident import Module

PLATFORM: Final = "attention_service"
_SHAPE: Final = re.compile(r"``\[([^\]]*)\]``")
_ANY_DTYPE: Final = "FP32"
"""The datatype that raw attention states; it takes every floating one."""
_DTYPES: Final[Mapping[Kind, str]] = {"bool": "BOOL", "mask": "BOOL", "int": "INT64"}
_SHAPES: Final = {"upstream": "B, Lq, d_model", "statistics": "B, H"}
"""Shapes that a class or another field states, by the first part of the name."""
_RAW_SHAPES: Final = {"query": "B, H, Lq, D", "key": "B, Hkv, Lk, D", "value": "B, Hkv, Lk, Dv"}
_BY_DEFAULT: Final[Mapping[str, Sequence[str]]] = {
    "": output_only(),
    "weights": [*(f"statistics.{name}" for name in DEFAULT_STATISTICS), "queries", "weights"],
    "gradients": [*output_only(), "gradients.query"],
}
"""The outputs of a request that asks for none by name."""


def metadata(model: Model, module: Module | None) -> dict[str, Any]:
    """The inputs that a request must have, and the outputs that it has if it names none."""
    inputs, outputs = _inputs(model, module), _outputs(model, module)
    required = {name for name, field in tensor_names(model.request).items() if field.is_required()}
    return {
        "name": model.name,
        "versions": [VERSION],
        "platform": PLATFORM,
        "inputs": [_tensor(name, *inputs[name]) for name in inputs if name in required],
        "outputs": [_tensor(name, *outputs[name]) for name in _BY_DEFAULT[model.question]],
    }


def configuration(model: Model, module: Module | None) -> dict[str, Any]:
    """Every input and output that has a fixed name, in the form of Triton's ModelConfig."""
    required = {name for name, field in tensor_names(model.request).items() if field.is_required()}
    facts = {} if module is None else {"version": module.version, "config": module.config.model_dump_json()}
    return {
        "name": model.name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "max_batch_size": 0,
        "input": [
            _config_tensor(name, *tensor) | ({} if name in required else {"optional": True})
            for name, tensor in _inputs(model, module).items()
        ],
        "output": [_config_tensor(name, *tensor) for name, tensor in _outputs(model, module).items()],
        "parameters": {name: {"string_value": fact} for name, fact in facts.items()},
    }


def _tensor(name: str, datatype: str, shape: list[int]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape}


def _config_tensor(name: str, datatype: str, shape: list[int]) -> dict[str, Any]:
    return {"name": name, "data_type": f"TYPE_{datatype}", "dims": shape}


def _inputs(model: Model, module: Module | None) -> dict[str, tuple[str, list[int]]]:
    return dict(_described(tensor_names(model.request), "parameters.", module))


def _outputs(model: Model, module: Module | None) -> dict[str, tuple[str, list[int]]]:
    outputs = dict(_described(tensor_names(model.reply), "gradients.", module))
    if model.question == "gradients":
        inputs = _inputs(model, module)
        outputs |= {f"gradients.{name}": inputs[name] for name in ("query", "key", "value")}
    return outputs


def _described(
    fields: Mapping[str, FieldInfo], by_parameter: str, module: Module | None
) -> Iterator[tuple[str, tuple[str, list[int]]]]:
    """Yield the datatype and shape of each tensor, and of one for each parameter where a mapping is by parameter."""
    sizes = None if module is None else module.sizes
    own = _ANY_DTYPE if module is None else DATATYPES[module.config.dtype or "float32"]
    for name, field in fields.items():
        if not name.endswith("."):
            yield name, (_DTYPES.get(_kind(field), own), _shape(name, field, sizes))
        elif name == by_parameter and sizes is not None:
            for parameter, shape in parameter_shapes(sizes).items():
                yield f"{name}{parameter}", (own, list(shape))


def _kind(field: FieldInfo) -> Kind:
    """The kind of a tensor's field."""
    metadata = [
        *field.metadata,
        *(annotation for member in get_args(field.annotation) for annotation in get_args(member)),
    ]
    return next(annotation.kind for annotation in metadata if isinstance(annotation, TensorField))


def _shape(name: str, field: FieldInfo, sizes: Sizes | None) -> list[int]:
    """The shape that a field's description states: sizes of the module, and −1 for those of a request."""
    stated = _SHAPES.get(name.removeprefix("differences.").partition(".")[0]) or _RAW_SHAPES.get(
        name if sizes is None else ""
    )
    if stated is None:
        match = _SHAPE.search(field.description or "")
        stated = "" if match is None else match[1]
    known = {} if sizes is None else {
        "d_model": sizes.d_model, "key_width": sizes.key_width, "value_width": sizes.value_width, "H": sizes.heads,
        "Hkv": sizes.kv_heads, "D": sizes.head_dim, "Dv": sizes.value_dim,
    }  # fmt: skip
    return [known.get(size.strip(), -1) for size in stated.split(",")]

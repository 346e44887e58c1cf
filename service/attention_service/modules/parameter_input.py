"""Parameters of a request: the config that they imply, and their values in the module's dtype."""

from collections.abc import Mapping

import torch
from torch import Tensor

from attention_contract.errors import InvalidRequest, InvalidTensor
from attention_contract.schemas.modules import CreateModule, ModuleConfig
from attention_contract.spec import AttentionSpec
from attention_contract.tensors import FLOATS, Array, FloatName, TensorFault, Untyped, cast, dtype_name
from attention_service.core.methods import check_spec
from attention_service.core.tensors import to_torch
from attention_service.modules.resident import biases_in, check_shapes, complete


def config_of(request: CreateModule) -> ModuleConfig:
    """Return the complete config of the requested module; its parameters decide the biases and dtype that are open.

    Raises InvalidRequest or ShapeMismatch where the given parameters are not those of the config.
    """
    check_spec(request.config.spec, "config.spec")
    check_widths(request.config.spec, request.config.d_model, request.config.key_width or request.config.d_model)
    given = request.parameters
    if given is None:
        return complete(request.config)
    config = complete(
        request.config.model_copy(
            update={
                "bias": biases_in(given) if request.config.bias is None else request.config.bias,
                "dtype": request.config.dtype or _common_dtype(given),
            }
        )
    )
    check_shapes(config, {name: value.shape for name, value in given.items()})
    return config


def check_widths(spec: AttentionSpec, d_model: int, key_width: int) -> None:
    """Raise InvalidRequest where gates are to be learned from tokens of another width than theirs."""
    method = spec.method
    if method.name == "linear" and method.rule != "sum" and key_width != d_model:
        raise InvalidRequest.at(
            "config.key_width",
            f"rule {method.rule} makes its gates from the keys' tokens, so their width {key_width} must be d_model, "
            f"{d_model}",
        )


def _common_dtype(given: Mapping[str, Array]) -> FloatName:
    """The dtype that all parameters state; float32 where none states any."""
    stated = {name: dtype_name(value) for name, value in given.items() if not isinstance(value, Untyped)}
    dtypes = sorted(set(stated.values()))
    if len(dtypes) > 1:
        first = {dtype: next(name for name in stated if stated[name] == dtype) for dtype in dtypes}
        raise InvalidRequest(
            f"the parameters differ in dtype: {', '.join(f'{first[dtype][:80]} is {dtype}' for dtype in dtypes)}; "
            "send them in one, or give config.dtype",
            param="config.dtype",
            dtypes=dtypes,
        )
    chosen: FloatName = "float32"
    for name in FLOATS & set(dtypes):
        chosen = name  # type: ignore[assignment]  # a member of FLOATS is a FloatName
    return chosen


def to_parameters(given: Mapping[str, Array], dtype: FloatName) -> dict[str, Tensor]:
    """Own copies of the given arrays, on the host, contiguous, in the dtype.

    Raises InvalidTensor where a finite number would become infinite.
    """
    parameters: dict[str, Tensor] = {}
    for name, value in given.items():
        try:
            converted = cast(value, dtype)
        except TensorFault as fault:
            raise InvalidTensor(f"{name}: {fault.message}", param=f"parameters.{name}", **fault.facts) from None
        parameters[name] = to_torch(converted).clone(memory_format=torch.contiguous_format)
    return parameters

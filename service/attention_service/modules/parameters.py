"""Reading parameters: statistics, single heads and slices."""

import math
import re
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from attention_contract.errors import InvalidRequest, ParameterNotFound
from attention_contract.schemas.modules import ParameterInfo, ParameterList, ParameterQuery
from attention_service.core.multihead import Sizes
from attention_service.core.tensors import torch_dtype_name
from attention_service.modules.resident import Module

_CHUNK: Final = 2**20
_ITEM: Final = re.compile(r"(?P<index>[+-]?\d+)|(?P<start>[+-]?\d+)?:(?P<stop>[+-]?\d+)?(?::(?P<step>[+-]?\d+)?)?")


def describe(module: Module) -> ParameterList:
    """Name, shape and statistics of every parameter."""
    return ParameterList(
        name=module.name,
        version=module.version,
        parameters=[_describe(name, value) for name, value in module.parameters.items()],
    )


def _describe(name: str, value: Tensor) -> ParameterInfo:
    """Statistics in float64 of what is finite, chunk by chunk, so that no copy of the whole is made."""

    def chunks() -> Iterator[Tensor]:
        for chunk in torch.split(value.reshape(-1), _CHUNK):
            yield chunk[chunk.isfinite()].double()

    count = sum(chunk.numel() for chunk in chunks())
    mean = sum(float(chunk.sum()) for chunk in chunks()) / count if count else math.nan
    squares = sum(float((chunk - mean).square().sum()) for chunk in chunks()) / count if count else math.nan
    extremes = [chunk.aminmax() for chunk in chunks() if chunk.numel()]
    return ParameterInfo(
        name=name,
        shape=list(value.shape),
        dtype=torch_dtype_name(value.dtype),
        bytes=value.nbytes,
        mean=mean,
        std=math.sqrt(squares),
        min=min((float(least) for least, _ in extremes), default=math.nan),
        max=max((float(most) for _, most in extremes), default=math.nan),
        norm=math.hypot(*(float(torch.linalg.vector_norm(chunk)) for chunk in chunks())) if count else math.nan,
        non_finite=value.numel() - count,
    )


def read(module: Module, parameter: str, query: ParameterQuery) -> Tensor:
    """One parameter, one head of it, or a slice: a view on the device.

    Raises ParameterNotFound, VersionMismatch, and InvalidRequest for a head or slice that it does not have.
    """
    module.check_version(query.version)
    value = module.parameters.get(parameter)
    if value is None:
        names = list(module.parameters)
        raise ParameterNotFound(
            f"module {module.name!r} has no parameter {parameter[:80]!r}; it has {', '.join(names)}",
            param="parameter",
            names=names,
        )
    if query.head is not None:
        value = _head(value, parameter, query.head, module.sizes)
    return value if query.slice is None else value[_slices(query.slice, value.shape)]


def _head(value: Tensor, parameter: str, head: int, sizes: Sizes) -> Tensor:
    query, stored = (sizes.heads, "query"), (sizes.kv_heads, "key/value")
    heads_along = {
        f"{role}_proj.{kind}": (0, *(query if role == "q" else stored)) for role in "qkv" for kind in ("weight", "bias")
    } | {"o_proj.weight": (1, *query), "bias_k": (0, *stored), "bias_v": (0, *stored)}
    by_query_head = {name: role.heads for name, role in sizes.learned.items() if role.heads is not None}
    heads_along |= {name: (dimension, *query) for name, dimension in by_query_head.items()}
    if parameter not in heads_along:
        raise InvalidRequest(
            f"{parameter} does not consist of heads; leave head out, or read one of {', '.join(heads_along)}",
            param="head",
        )
    dimension, heads, kind = heads_along[parameter]
    if head >= heads:
        raise InvalidRequest(
            f"head is {head}, but {parameter} has {heads} {kind} heads; expected 0 to {heads - 1}",
            param="head",
            heads=heads,
            actual=head,
        )
    width = value.shape[dimension] // heads
    return value.narrow(dimension, head * width, width)


def _slices(text: str, shape: torch.Size) -> tuple[int | slice, ...]:
    """Parse a slice as in numpy's basic indexing, but without negative steps. Raises InvalidRequest."""
    items = [item.strip() for item in text.split(",")]
    if len(items) > len(shape):
        raise InvalidRequest(
            f"the slice {text!r} has {len(items)} items, but there are {len(shape)} dimensions, {list(shape)}",
            param="slice",
            expected=len(shape),
            actual=len(items),
        )
    return tuple(_item(item, place, size) for place, (item, size) in enumerate(zip(items, shape, strict=False)))


def _item(item: str, place: int, size: int) -> int | slice:
    match = _ITEM.fullmatch(item)
    if match is None:
        raise InvalidRequest(
            f"item {place} of the slice is {item!r}; expected an index or start:stop:step (: for everything)",
            param="slice",
        )
    if match["index"] is not None:
        index = int(match["index"])
        if not -size <= index < size:
            raise InvalidRequest(
                f"item {place} of the slice is index {index}, out of range for size {size}", param="slice", size=size
            )
        return index
    start, stop, step = (int(part) if part is not None else None for part in match.group("start", "stop", "step"))
    if step is not None and step < 1:
        raise InvalidRequest(
            f"item {place} of the slice has step {step}; expected 1 or more: reverse the answer instead", param="slice"
        )
    first, end, stride = slice(start, stop, step).indices(size)
    return slice(first, end, min(stride, size))  # torch's own strides overflow

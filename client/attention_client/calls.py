"""Every call of the service, validated and without I/O: what ``Client`` and ``AsyncClient`` are made from.

Arguments are the fields of the contract's request models. Where a field is a model (config, spec, shape, …), a plain
dict does as well; where it is a tensor, see ``TensorLike``. Each function raises InvalidRequest or InvalidTensor
where the service would refuse the request whatever the module.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, TypeVar, Unpack

from attention_client import options as o
from attention_client.arrays import TensorLike, plain
from attention_contract import operations
from attention_contract.base import WireModel
from attention_contract.errors import InvalidRequest
from attention_contract.operations import Operation
from attention_contract.schemas.accuracy import AccuracyReply
from attention_contract.schemas.answers import Picture
from attention_contract.schemas.attention import ForwardReply
from attention_contract.schemas.complexity import ComplexityReply, Shape, Sweep
from attention_contract.schemas.gradients import GradientsReply
from attention_contract.schemas.hardware import HardwareList
from attention_contract.schemas.hopfield import HopfieldReply
from attention_contract.schemas.modules import ModuleConfig, ModuleInfo, ModuleList, Parameter, ParameterList
from attention_contract.schemas.server import Health, ServerInfo, VariantList
from attention_contract.schemas.weights import WeightsReply
from attention_contract.validation import validate

ReplyT = TypeVar("ReplyT", bound=WireModel | None)


@dataclass(frozen=True)
class Call(Generic[ReplyT]):
    """One call, ready to be sent any number of times."""

    operation: Operation[ReplyT]
    path: Mapping[str, str] = field(default_factory=dict)
    request: WireModel | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    patient: bool = True
    """Worth repeating while the server is busy. False for a question about how the server is right now."""


def _call(operation: Operation[ReplyT], path: Mapping[str, str], given: Mapping[str, Any]) -> Call[ReplyT]:
    """The call whose request holds what was given; what is None is left to its default."""
    assert operation.request is not None  # noqa: S101
    fields = {name: plain(value) for name, value in given.items() if value is not None}
    return Call(operation, _path(path), validate(operation.request, fields))


def _path(path: Mapping[str, str]) -> Mapping[str, str]:
    for param, value in path.items():
        if not isinstance(value, str) or value in {"", ".", ".."}:
            raise InvalidRequest(f"{param}: expected a name, got {value!r}", param=param)
    return path


# ── the server ───────────────────────────────────────────────────────────────────────────────────────────────────────


def server_info() -> Call[ServerInfo]:
    """Version, device, dtypes, limits and memory of the server."""
    return Call(operations.server_info)


def list_variants() -> Call[VariantList]:
    """Every registered score, mask, position, normalizer, method and kernel."""
    return Call(operations.list_variants)


def health_live() -> Call[Health]:
    """Whether the process answers."""
    return Call(operations.health_live, patient=False)


def health_ready() -> Call[Health]:
    """Whether every module is resident and work is taken. Raises Loading or Draining where not, without retrying."""
    return Call(operations.health_ready, patient=False)


# ── modules ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def list_modules() -> Call[ModuleList]:
    """Every resident module."""
    return Call(operations.list_modules)


def create_module(
    name: str,
    config: ModuleConfig | Mapping[str, Any],
    *,
    seed: int | None = None,
    parameters: Mapping[str, TensorLike] | None = None,
) -> Call[ModuleInfo]:
    """Make a module from a seed or from its parameters. Raises ModuleExists where a different one has the name."""
    given = {"name": name, "config": config, "seed": seed, "parameters": parameters}
    return _call(operations.create_module, {}, given)


def import_module(
    checkpoint: str,
    *,
    layer: int = 0,
    name: str | None = None,
    part: Literal["self", "cross"] = "self",
    stack: Literal["encoder", "decoder"] | None = None,
    num_heads: int | None = None,
) -> Call[ModuleInfo]:
    """Make a module from one attention layer of a checkpoint in the server's model repository."""
    given = {"checkpoint": checkpoint, "layer": layer, "name": name, "part": part}
    return _call(operations.import_module, {}, given | {"stack": stack, "num_heads": num_heads})


def get_module(name: str) -> Call[ModuleInfo]:
    """Config, version, device and bytes of one module."""
    return Call(operations.get_module, _path({"name": name}))


def delete_module(name: str, version: str | None = None) -> Call[None]:
    """Remove a module; with a version, only if it is still at that version."""
    headers = {} if version is None else {"If-Match": f'"{version}"'}
    return Call(operations.delete_module, _path({"name": name}), headers=headers)


def list_parameters(name: str) -> Call[ParameterList]:
    """Names, shapes and statistics of a module's parameters."""
    return Call(operations.list_parameters, _path({"name": name}))


def get_parameter(
    name: str,
    parameter: str,
    *,
    head: int | None = None,
    slice: str | None = None,  # noqa: A002
    version: str | None = None,
) -> Call[Parameter]:
    """One parameter, the part of one head, or a slice such as ``"0:4,:8"``."""
    path = {"name": name, "parameter": parameter}
    return _call(operations.get_parameter, path, {"head": head, "slice": slice, "version": version})


def replace_parameters(
    name: str, parameters: Mapping[str, TensorLike], *, version: str | None = None
) -> Call[ModuleInfo]:
    """Replace all parameters of a module, or none; with a version, only if it is still at that version."""
    return _call(operations.replace_parameters, {"name": name}, {"parameters": parameters, "version": version})


# ── what a module computes ───────────────────────────────────────────────────────────────────────────────────────────


def forward(
    name: str,
    query: TensorLike,
    key: TensorLike | None = None,
    value: TensorLike | None = None,
    **options: Unpack[o.ForwardOptions],
) -> Call[ForwardReply]:
    """The output of a module and the taps named in ``return_``.

    query ``[B, Lq, d_model]``; key and value ``[B, Lk, width]``, by default the query. B may be missing.
    """
    return _call(operations.forward, {"name": name}, {"query": query, "key": key, "value": value, **options})


def weights(
    name: str,
    query: TensorLike,
    key: TensorLike | None = None,
    value: TensorLike | None = None,
    **options: Unpack[o.WeightsOptions],
) -> Call[WeightsReply]:
    """What each head of a module looks at: statistics, the ``top_k`` keys, and the weights themselves."""
    return _call(operations.weights, {"name": name}, {"query": query, "key": key, "value": value, **options})


def gradients(
    name: str,
    query: TensorLike,
    key: TensorLike | None = None,
    value: TensorLike | None = None,
    **options: Unpack[o.GradientsOptions],
) -> Call[GradientsReply]:
    """Exact gradients with respect to the inputs, taps and parameters named in ``wrt``."""
    return _call(operations.gradients, {"name": name}, {"query": query, "key": key, "value": value, **options})


def complexity(
    name: str,
    shape: Shape | Mapping[str, int] | int,
    sweep: Sweep | Mapping[str, Any] | Sequence[int] | None = None,
    **options: Unpack[o.CostOptions],
) -> Call[ComplexityReply]:
    """What a module costs at a shape (a number is its queries) or over a sweep (a list varies the length)."""
    return _call(operations.complexity, {"name": name}, {**_sizes(shape, sweep), **options})


def complexity_picture(
    name: str,
    shape: Shape | Mapping[str, int] | int,
    sweep: Sweep | Mapping[str, Any] | Sequence[int] | None = None,
    *,
    media_type: Literal["image/svg+xml", "image/png"] = "image/svg+xml",
    **options: Unpack[o.CostOptions],
) -> Call[Picture]:
    """Costs as ``complexity`` has them, drawn: time and peak memory along the sweep, or up to the shape's length.

    Raises NotAcceptable where the server has nothing to draw with.
    """
    return _drawn(operations.complexity, {"name": name}, {**_sizes(shape, sweep), **options}, media_type)


def _drawn(
    operation: Operation[Any], path: Mapping[str, str], given: Mapping[str, Any], media_type: str
) -> Call[Picture]:
    """The call whose reply is asked for as a picture."""
    call = _call(operation, path, given)
    return Call(replace(operation, reply=Picture), call.path, call.request, {"Accept": media_type})


def _sizes(
    shape: Shape | Mapping[str, int] | int, sweep: Sweep | Mapping[str, Any] | Sequence[int] | None
) -> dict[str, Any]:
    if isinstance(shape, int):
        shape = {"queries": shape}
    if sweep is not None and not isinstance(sweep, Sweep | Mapping):
        sweep = {"values": list(sweep)}
    return {"shape": shape, "sweep": sweep}


# ── raw attention ────────────────────────────────────────────────────────────────────────────────────────────────────


def raw_forward(
    query: TensorLike,
    key: TensorLike | None = None,
    value: TensorLike | None = None,
    **options: Unpack[o.RawForwardOptions],
) -> Call[ForwardReply]:
    """Attention over raw q, k and v, as the ``spec`` says.

    query ``[B, H, Lq, D]``, key ``[B, Hkv, Lk, D]``, value ``[B, Hkv, Lk, Dv]``; or ``[B, L, H·D]`` with ``num_heads``.
    The key is by default the query, and the value the key.
    """
    return _call(operations.raw_forward, {}, {"query": query, "key": key, "value": value, **options})


def raw_weights(
    query: TensorLike,
    key: TensorLike | None = None,
    value: TensorLike | None = None,
    **options: Unpack[o.RawWeightsOptions],
) -> Call[WeightsReply]:
    """What each head of a raw attention looks at; the shapes are those of ``raw_forward``."""
    return _call(operations.raw_weights, {}, {"query": query, "key": key, "value": value, **options})


def raw_gradients(
    query: TensorLike,
    key: TensorLike | None = None,
    value: TensorLike | None = None,
    **options: Unpack[o.RawGradientsOptions],
) -> Call[GradientsReply]:
    """Exact gradients of a raw attention; the shapes are those of ``raw_forward``."""
    return _call(operations.raw_gradients, {}, {"query": query, "key": key, "value": value, **options})


def raw_complexity(
    shape: Shape | Mapping[str, int] | int,
    sweep: Sweep | Mapping[str, Any] | Sequence[int] | None = None,
    *,
    num_heads: int,
    head_dim: int,
    **options: Unpack[o.RawCostOptions],
) -> Call[ComplexityReply]:
    """What a raw attention costs: no projections."""
    sizes = {"num_heads": num_heads, "head_dim": head_dim}
    return _call(operations.raw_complexity, {}, {**_sizes(shape, sweep), **sizes, **options})


def accuracy() -> Call[AccuracyReply]:
    """How far predicted times were from measured ones, by kernel and purpose."""
    return Call(operations.accuracy)


def raw_complexity_picture(
    shape: Shape | Mapping[str, int] | int,
    sweep: Sweep | Mapping[str, Any] | Sequence[int] | None = None,
    *,
    num_heads: int,
    head_dim: int,
    media_type: Literal["image/svg+xml", "image/png"] = "image/svg+xml",
    **options: Unpack[o.RawCostOptions],
) -> Call[Picture]:
    """Costs as ``raw_complexity`` has them, drawn as ``complexity_picture`` draws them."""
    sizes = {"num_heads": num_heads, "head_dim": head_dim}
    return _drawn(operations.raw_complexity, {}, {**_sizes(shape, sweep), **sizes, **options}, media_type)


# ── hardware ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def list_hardware() -> Call[HardwareList]:
    """Devices that ``hardware`` may name in a question about costs, as their makers describe them."""
    return Call(operations.list_hardware)


# ── Hopfield ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def hopfield_retrieve(
    stored: TensorLike, states: TensorLike, **options: Unpack[o.HopfieldOptions]
) -> Call[HopfieldReply]:
    """Let states fall to stored patterns: ``steps`` updates, or as many as it takes until one is below ``eps``.

    stored ``[B, H, N, D]``, states ``[B, H, S, D]``; or ``[B, L, H·D]`` with ``num_heads``.
    """
    return _call(operations.hopfield_retrieve, {}, {"stored": stored, "states": states, **options})

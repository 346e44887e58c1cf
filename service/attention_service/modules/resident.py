"""One resident module: immutable, complete, and named by the hash of its content."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention_contract.errors import InvalidRequest, ShapeMismatch, VersionMismatch
from attention_contract.schemas.modules import Biases, ModuleConfig, ModuleInfo, Source
from attention_service.core.multihead import (
    Joint,
    Sizes,
    joint_projection,
    laid_side_by_side,
    largest_finite,
    parameter_shapes,
)
from attention_service.core.positions import check_position
from attention_service.core.tensors import TORCH_DTYPES, to_numpy, torch_dtype_name

VERSION_DIGITS = 32


@dataclass(frozen=True, eq=False)
class Module:
    """A module at one version. A change of its parameters makes another object."""

    name: str
    config: ModuleConfig
    """With every default filled in."""
    sizes: Sizes
    parameters: Mapping[str, Tensor] = field(repr=False)
    """On one device, in the module's dtype, laid out as ``laid_side_by_side`` says, without gradients; in the order of
    the computation."""
    version: str
    source: Source | None = None
    durable: bool = True
    """True if the store holds it too."""

    @classmethod
    def of(
        cls,
        name: str,
        config: ModuleConfig,
        parameters: Mapping[str, Tensor],
        source: Source | None = None,
        version: str | None = None,
        *,
        durable: bool = True,
    ) -> "Module":
        """A module of a complete config and parameters on the host; without a version, it is computed from them."""
        sizes = Sizes.of(config)
        ordered = {parameter: parameters[parameter] for parameter in parameter_shapes(sizes)}
        version = version or content_version(config.model_dump(mode="json"), ordered)
        return cls(name, config, sizes, MappingProxyType(ordered), version, source, durable)

    def on(self, device: torch.device) -> "Module":
        """The same module on a device, laid out for computing."""
        moved = {name: value.to(device) for name, value in self.parameters.items()}
        return replace(self, parameters=MappingProxyType(laid_side_by_side(moved, self.sizes)))

    @cached_property
    def device(self) -> torch.device:
        """The device of its parameters."""
        return self.parameters["q_proj.weight"].device

    @cached_property
    def bytes(self) -> int:
        """Bytes of its parameters on the device."""
        return sum(value.nbytes for value in self.parameters.values())

    @cached_property
    def config_json(self) -> str:
        """The config as canonical JSON: equal for modules that differ in their parameters alone."""
        return _canonical(self.config.model_dump(mode="json")).decode()

    @cached_property
    def joint(self) -> Joint | None:
        """Its projections of the inputs as one, where they lie side by side."""
        return None if self.sizes.latent is not None else joint_projection(self.parameters)

    @cached_property
    def largest_finite(self) -> float:
        """The largest Σ x² of a request's inputs for which every key and value is finite; −1 if none is known."""
        return -1.0 if self.sizes.latent is not None else largest_finite(self.parameters)

    @cached_property
    def parameter_count(self) -> int:
        """The number of elements of all parameters."""
        return sum(value.numel() for value in self.parameters.values())

    def check_version(self, expected: str | None) -> None:
        """Raise VersionMismatch where a pin is given and is not this version."""
        if expected is not None and expected != self.version:
            raise VersionMismatch(
                f"module {self.name!r} is at version {self.version}, not at {expected[:64]!r}; "
                "read it again and pin its current version, or pin none",
                param="version",
                expected=expected[:64],
                actual=self.version,
            )

    def info(self) -> ModuleInfo:
        """Return the module's description on the wire."""
        return ModuleInfo(
            name=self.name,
            config=self.config,
            version=self.version,
            device=str(self.device),
            parameter_count=self.parameter_count,
            bytes=self.bytes,
            durable=self.durable,
            source=self.source,
        )


def content_version(config: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> str:
    """The version of a content: a hash of its config, and of the name, dtype, shape and bytes of each parameter.

    ``config`` is the JSON value of a complete config. Bytes are little-endian and row-major, so that the version does
    not depend on the machine or the device; nothing is copied for a contiguous tensor on the host.
    """
    content = hashlib.sha256(_canonical(config))
    for name in sorted(parameters):
        value = parameters[name]
        content.update(_canonical([name, torch_dtype_name(value.dtype), list(value.shape)]))
        array = to_numpy(value.contiguous()).reshape(-1)
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        content.update(little.view(np.uint8).data)
    return content.hexdigest()[:VERSION_DIGITS]


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"


def complete(config: ModuleConfig) -> ModuleConfig:
    """The config with every default filled in: float32, biases on all projections, and the widths.

    Raises InvalidRequest for a spec that these widths have no room for.
    """
    sizes = Sizes.of(config)
    check_position(config.spec, sizes.widths, sizes.inputs, "config.spec")
    listed = (sizes.biases.q_proj, sizes.biases.k_proj, sizes.biases.v_proj, sizes.biases.o_proj)
    return config.model_copy(
        update={
            "num_kv_heads": sizes.kv_heads,
            "head_dim": sizes.head_dim,
            "value_dim": sizes.value_dim,
            "key_width": sizes.key_width,
            "value_width": sizes.value_width,
            "bias": listed[0] if len(set(listed)) == 1 else sizes.biases,
            "dtype": config.dtype or "float32",
        }
    )


def biases_in(names: Mapping[str, Any]) -> Biases:
    """The biases that a set of parameters has."""
    return Biases(**{name: f"{name}.bias" in names for name in Biases.model_fields})


def parameter_bytes(config: ModuleConfig) -> int:
    """Bytes that the parameters of a complete config take."""
    item = TORCH_DTYPES[config.dtype or "float32"].itemsize
    return item * sum(math.prod(shape) for shape in parameter_shapes(Sizes.of(config)).values())


def making_bytes(config: ModuleConfig) -> int:
    """Bytes that making a module of a complete config takes at its peak: more than its parameters, for a while.

    Weights are drawn, or cast and copied, one after the other; the largest is held in float32 and in its dtype besides.
    Then the projections of the inputs are put side by side.
    """
    item = TORCH_DTYPES[config.dtype or "float32"].itemsize
    sizes = {name: math.prod(shape) for name, shape in parameter_shapes(Sizes.of(config)).items()}
    together = sum(sizes[f"{role}_proj.weight"] for role in "qkv")
    return parameter_bytes(config) + max(max(sizes.values()) * (4 if item == 4 else 4 + item), together * item)


def check_shapes(config: ModuleConfig, given: Mapping[str, tuple[int, ...]]) -> None:
    """Raise InvalidRequest unless exactly the config's parameters are given, ShapeMismatch unless in its shapes."""
    expected = parameter_shapes(Sizes.of(config))
    missing = [name for name in expected if name not in given]
    unexpected = sorted(set(given) - set(expected))
    if missing or unexpected:
        faults = [f"{', '.join(missing)} missing"] if missing else []
        faults += [f"{', '.join(_short(unexpected))} not known"] if unexpected else []
        raise InvalidRequest(
            f"the parameters are not those of the config: {'; '.join(faults)}; expected {', '.join(expected)}",
            param="parameters",
            missing=missing,
            unexpected=_short(unexpected),
            expected=list(expected),
        )
    for name, shape in expected.items():
        if given[name] != shape:
            raise ShapeMismatch(
                f"{name} has shape {list(given[name])}; the config asks for {list(shape)}",
                param=f"parameters.{name}",
                expected=list(shape),
                actual=list(given[name]),
            )


def _short(names: list[str]) -> list[str]:
    """A list of names from a request, of a length fit for an error."""
    return [name[:80] for name in names[:10]] + (["…"] if len(names) > 10 else [])

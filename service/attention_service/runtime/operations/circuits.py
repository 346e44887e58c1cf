"""Circuits of a module: its projections and parameters decomposed, one request planned and run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.circuits import CircuitsRequest
from attention_service.core.cancellation import checkpoint
from attention_service.core.inspection import circuits
from attention_service.core.inspection.circuits import Factors, Writers
from attention_service.core.masks.global_projections import has_separate
from attention_service.core.multihead import Parameters, Sizes
from attention_service.core.tensors import is_finite
from attention_service.cost import CircuitWork, parameter_matrices, spectrum_flops
from attention_service.modules.resident import Module
from attention_service.runtime.binding.selection import check_indices
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations.analysis.base import analysis_job
from attention_service.runtime.planning.plan import Plan
from attention_service.runtime.scheduling.jobs import Job
from attention_service.runtime.scheduling.operation import Results

LAPACK: Final = "lapack"
"""The kernel that a reply names."""
MAX_SPECTRUM_FLOPS: Final = 5e11
"""The most FLOPs of one singular value decomposition, which nothing can stop: about a minute on one core."""


@dataclass(frozen=True, eq=False)
class BoundCircuits:
    """One request about the circuits of a module, checked."""

    module: Module
    heads: tuple[int, ...]
    request: CircuitsRequest
    later: Module | None = None
    learned: Mapping[str, Any] = field(default_factory=dict)
    """None: the module's own parameters are used."""

    def results(self, device: torch.device) -> Results:
        """Decompose head by head, then parameter by parameter. Raises InvalidRequest for NaN, infinity and overflow."""
        module, sizes, parts = self.module, self.module.sizes, self.request.parts
        _check_finite(module, "name")
        fields: Results = {"heads": torch.tensor(self.heads), "left_out": left_out(module)}
        try:
            if "qk" in parts:
                fields["qk"] = _circuit(self, circuits.qk_factors)
            if "ov" in parts:
                fields["ov"] = _circuit(self, circuits.ov_factors, copied=sizes.value_width == sizes.d_model)
            if "spectra" in parts:
                fields["spectra"] = [_spectrum(name, value, self) for name, value in module.parameters.items()]
            if self.later is not None:
                _check_finite(self.later, "with")
                fields["composition"] = _composition(self, self.later)
        except OverflowError as fault:
            raise InvalidRequest.at("name", "products of the parameters overflow float64; scale them down") from fault
        return fields


def prepare(module: Module, later: Module | None, request: CircuitsRequest, device: Device) -> Job:
    """Bind and plan one request. Raises an InvalidRequest that names the field at fault."""
    bound = _bind(module, later, request)
    read = None if later is None else later.sizes
    work = CircuitWork(module.sizes, len(bound.heads), frozenset(request.parts), request.vectors, read)
    plan = Plan(LAPACK, work.flops, work.peak_bytes, device.clock.rated(work.seconds))
    return analysis_job(bound, "circuits", plan, device, module)


def _bind(module: Module, later: Module | None, request: CircuitsRequest) -> BoundCircuits:
    sizes = module.sizes
    check_indices("heads", request.heads, sizes.heads, "heads")
    for param, side in (("parts", module), ("with", later)):
        if (
            side is not None
            and side.sizes.latent is not None
            and (later is not None or {"qk", "ov"} & {*request.parts})
        ):
            raise InvalidRequest.at(
                param,
                f"queries, keys and values of module {side.name!r} are computed from normed latents, so it has no W_QK "
                "and no W_OV; ask for the part spectra of a module by itself",
            )
    if "qk" in request.parts and not circuits.has_qk(sizes.spec):
        raise InvalidRequest.at(
            "parts",
            f"the score {sizes.spec.score.name} of module {module.name!r} is not bilinear in queries and keys, so it "
            "has no W_QK; ask for the parts ov and spectra",
        )
    if "spectra" in request.parts:
        _check_spectra(module)
    if request.with_version is not None and later is None:
        raise InvalidRequest.at(
            "with_version", "it is the version of the module in with, which is missing; send with, or leave it out"
        )
    if later is not None and not _readers(sizes, later.sizes):
        widths = later.sizes.inputs
        raise InvalidRequest.at(
            "with",
            f"heads of module {module.name!r} write {sizes.d_model} numbers a token, and module {later.name!r} reads "
            f"queries, keys and values of {widths[0]}, {widths[1]} and {widths[2]}; name a module of that width",
            expected=sizes.d_model,
            actual=list(widths),
        )
    heads = range(sizes.heads) if request.heads is None else request.heads
    return BoundCircuits(module, tuple(heads), request, later)


def _check_spectra(module: Module) -> None:
    for name, value, (_, rows, columns) in zip(
        module.parameters, module.parameters.values(), parameter_matrices(module.sizes), strict=True
    ):
        if spectrum_flops(rows, columns) > MAX_SPECTRUM_FLOPS:
            raise InvalidRequest.at(
                "parts",
                f"{name} {list(value.shape)} is too large for a singular value decomposition; ask for the parts qk "
                "and ov, which are thin",
                limit=int(MAX_SPECTRUM_FLOPS),
                actual=spectrum_flops(rows, columns),
            )


def _readers(writer: Sizes, reader: Sizes) -> list[str]:
    """The composition scores that these widths and the later module's score allow."""
    product = circuits.has_qk(reader.spec)
    allowed = dict(zip("qkv", (product, product, True), strict=True))
    fits = zip("qkv", reader.inputs, strict=True)
    return [role for role, width in fits if width == writer.d_model and allowed[role]]


def _check_finite(module: Module, param: str) -> None:
    for name, value in module.parameters.items():
        checkpoint()
        if not is_finite(value):
            raise InvalidRequest.at(
                param, f"{name} of module {module.name!r} has NaN or infinity, and no singular values; replace it"
            )


def _circuit(
    bound: BoundCircuits, factors: Callable[[Parameters, Sizes, int], Factors], *, copied: bool = False
) -> Results:
    """The circuits that these factors make, stacked over the heads. ``copied``: with copying scores."""
    module, request = bound.module, bound.request
    by_head: list[Results] = []
    for head in bound.heads:
        checkpoint()
        matrices = factors(module.parameters, module.sizes, head)
        values, left, right = circuits.decompose(matrices, vectors=request.vectors)
        result = _measures(values, request.top)
        if left is not None and right is not None:
            result |= {"left": left[: request.top], "right": right[: request.top]}
        if copied:
            result["copying"] = circuits.copying(matrices)
        by_head.append(result)
    return {name: torch.stack([of_head[name] for of_head in by_head]) for name in by_head[0]}


def _measures(values: Tensor, top: int | None) -> Results:
    return {
        "singular_values": values[..., :top],
        "norm": circuits.norm(values),
        "effective_rank": circuits.effective_rank(values),
        "stable_rank": circuits.stable_rank(values),
    }


def _spectrum(name: str, value: Tensor, bound: BoundCircuits) -> Results:
    checkpoint()
    measures = _measures(circuits.spectrum(value), bound.request.top or bound.module.sizes.head_dim)
    return {"name": name, "shape": list(value.shape)} | measures


def _composition(bound: BoundCircuits, later: Module) -> Results:
    """The scores ``[H, L]`` that are defined, head by head of the later module."""
    module, roles = bound.module, _readers(bound.module.sizes, later.sizes)
    writers = Writers([circuits.ov_factors(module.parameters, module.sizes, head) for head in bound.heads])
    scores: dict[str, list[Tensor]] = {role: [] for role in roles}
    for head in range(later.sizes.heads):
        checkpoint()
        if {"q", "k"} & {*roles}:
            qk = circuits.qk_factors(later.parameters, later.sizes, head)
        for role in roles:
            if role == "v":
                reader = circuits.ov_factors(later.parameters, later.sizes, head)
            else:
                reader = qk.transposed if role == "q" else qk
            scores[role].append(writers.composition(reader))
    stacked = {role: torch.stack(by_layer, 1) for role, by_layer in scores.items()}
    about = {"module": later.name, "version": later.version, "baseline": module.sizes.d_model**-0.5}
    return stacked | about


def left_out(module: Module) -> list[str]:
    """The parts of a module that act on queries, keys, values or scores and are in no circuit."""
    spec = module.config.spec
    parts = {
        f"position {spec.position.name}": spec.position.name != "none",
        "qk_norm": spec.qk_norm is not None,
        "softcap": spec.softcap is not None,
        f"method {spec.method.name}": spec.method.name != "exact",
        "add_bias_kv": spec.add_bias_kv,
        "global projections": has_separate(spec.masks),
    }
    biases = [name for name in module.parameters if name.endswith("_proj.bias")]
    return [*(name for name, there in parts.items() if there), *biases]

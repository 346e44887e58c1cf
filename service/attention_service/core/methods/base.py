"""Protocol of methods: what exact attention, which kernels compute, and each approximation have in common."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from attention_contract.errors import InvalidRequest
from attention_contract.spec import AttentionSpec
from attention_service.core.problem import Learned, Widths
from attention_service.core.registry import Registry

Refusal = tuple[str, str]
"""The invalid field, and the reason."""


@dataclass(frozen=True)
class MethodFlops:
    """FLOPs of one pass: products with queries and keys, products with values, and elementwise work."""

    scores: int
    values: int
    elementwise: int


@dataclass(frozen=True)
class MethodCost:
    """Cost of an approximation, in place of scores, normalizer and values."""

    forward: MethodFlops
    backward: MethodFlops
    steps: int = 0
    """Number of steps of the forward pass, each of which has a start."""
    projections: int = 0
    """FLOPs of products with a module's learned tensors other than the projections, forward."""


class Method(Protocol):
    """A computation of the context."""

    def taps(self, spec: AttentionSpec) -> tuple[str, ...]:
        """Return the taps of the method in order, without ``output``."""

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """Return the learned tensors by name."""

    def refuses(self, spec: AttentionSpec) -> Iterator[Refusal]:
        """Yield the parts of the spec that the method cannot honour."""


METHODS = Registry[Method]("method")


def check_spec(spec: AttentionSpec, field: str = "spec") -> None:
    """Raise InvalidRequest, naming the field below ``field``, for a spec whose method cannot honour the rest of it."""
    for param, reason in METHODS.of(spec.method).refuses(spec):
        named = field + param.removeprefix("spec")
        raise InvalidRequest.at(named, f"method {spec.method.name}: {reason}")

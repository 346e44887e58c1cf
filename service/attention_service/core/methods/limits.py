"""Validation of a spec against its method."""

from attention_contract.errors import InvalidRequest
from attention_contract.spec import AttentionSpec
from attention_service.core.methods.base import METHODS


def check_spec(spec: AttentionSpec, field: str = "spec") -> None:
    """Raise InvalidRequest, naming the field below ``field``, for a spec whose method cannot honour the rest of it."""
    for param, reason in METHODS.of(spec.method).refuses(spec):
        named = field + param.removeprefix("spec")
        raise InvalidRequest.at(named, f"method {spec.method.name}: {reason}")

"""The wire contract of the attention service: spec, operations, schemas, tensors and errors. No I/O, no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attention_contract.spec import AttentionSpec

__all__ = ["AttentionSpec"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # the command's --version needs no spec
        return getattr(import_module("attention_contract.spec"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

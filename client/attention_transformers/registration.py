"""Attention functions in the registries of ``transformers``, each under a name that no other has."""

from collections.abc import Callable
from itertools import count
from typing import Any, Final

from transformers import AttentionInterface, AttentionMaskInterface

_numbers: Final = count()


def register_function(function: Callable[..., Any], mask_function: Callable[..., Any], kind: str = "service") -> str:
    """Register an attention function and what makes its masks. Returns the name of this implementation.

    Of the kind ``flash``, packed sequences come whole, with ``cu_seq_lens_q``; else each by itself.
    """
    name = f"attention_{kind}_{next(_numbers)}"
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, mask_function)
    return name


def forget_function(name: str) -> None:
    """Take an implementation out again. A model that still has its name cannot run any more."""
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(name, None)

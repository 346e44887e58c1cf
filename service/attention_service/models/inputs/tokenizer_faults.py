"""Faults of a checkpoint's tokenizer when it reads a text: the package tokenizers raises any class, and its panics."""

from collections.abc import Iterator
from contextlib import contextmanager

from attention_contract.errors import AttentionError, InvalidRequest

_MAX_REASON = 200


def is_fault(fault: BaseException) -> bool:
    """True for an Exception, and for a panic of a package in Rust, which is none: for all but what ends a program."""
    return isinstance(fault, Exception) or type(fault).__module__ == "pyo3_runtime"


@contextmanager
def tokenizer_faults(param: str) -> Iterator[None]:
    """Raise InvalidRequest for whatever the tokenizer raises in a block. ``param``: the field with the text."""
    try:
        yield
    except AttentionError:
        raise
    except BaseException as fault:
        if not is_fault(fault):
            raise
        reason = f"{type(fault).__name__}: {' '.join(str(fault).split())}"[:_MAX_REASON]
        raise InvalidRequest.at(
            param, f"the checkpoint's tokenizer cannot read it ({reason}); send tokens, or correct its files"
        ) from fault

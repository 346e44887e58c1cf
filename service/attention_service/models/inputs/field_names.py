"""The names of fields in refusals, for requests that are read by way of another one."""

from collections.abc import Iterator
from contextlib import contextmanager

from attention_contract.errors import InvalidRequest


@contextmanager
def fields_named(**names: str) -> Iterator[None]:
    """Rename the fields at fault in refusals, as in ``messages="input"``."""
    try:
        yield
    except InvalidRequest as fault:
        first, dot, rest = (fault.param or "").partition(".")
        if first not in names:
            raise
        param = f"{names[first]}{dot}{rest}"
        raise InvalidRequest(
            fault.detail.replace(f"{first}{dot}{rest}", param, 1), param=param, **fault.facts
        ) from None

"""The names of fields in refusals, for requests that are read by way of another one."""

from collections.abc import Iterator
from contextlib import contextmanager

from attention_contract.errors import InvalidRequest


@contextmanager
def fields_named(**names: str) -> Iterator[None]:
    """Rename the fields at fault in refusals, as in ``messages="input"``, with what is in them."""
    try:
        yield
    except InvalidRequest as fault:
        given = fault.param or ""
        field = given if given in names else given.partition(".")[0]
        if field not in names:
            raise
        param = names[field] + given.removeprefix(field)
        raise InvalidRequest(fault.detail.replace(given, param, 1), param=param, **fault.facts) from None

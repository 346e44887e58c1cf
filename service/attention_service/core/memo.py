"""Memoization of functions on their first argument."""

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, TypeVar, cast

FindT = TypeVar("FindT", bound=Callable[..., Any])


def once(find: FindT) -> FindT:
    """Cache a function's result in its first argument, an immutable object.

    A plan and a report of costs ask for the same many times. For small results that are never changed; the other
    arguments must be hashable.
    """

    @wraps(find)
    def found(subject: Any, *args: Hashable, **kwargs: Hashable) -> Any:
        kept: dict[Hashable, Any] = subject.__dict__.setdefault("_found", {})
        asked = (find, args, *kwargs.items())
        if asked not in kept:
            kept[asked] = find(subject, *args, **kwargs)
        return kept[asked]

    return cast("FindT", found)

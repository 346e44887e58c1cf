"""The next call to make after an error, in words for an agent."""

import re
from collections.abc import Mapping
from typing import Final

from attention_contract.errors import (
    AttentionError,
    CallerLimit,
    Forbidden,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    ModuleNotFound,
    NotAcceptable,
    Overloaded,
    TooLarge,
    Unauthorized,
    Unavailable,
)

_ADVICE: Final[tuple[tuple[type[AttentionError], str], ...]] = (
    (
        Forbidden,
        "No call of this tool can succeed with this key: go on with tools that need another scope (estimate_cost needs "
        "infer or inspect, all others infer), or ask the operator for a key: attention keys create NAME --scope infer",
    ),
    (Unauthorized, "Ask the operator of the server for an API key, and connect with it"),
    (ModelNotFound, "Call open_input with a model that the server has"),
    (ModuleNotFound, "Call estimate_cost with attention, its num_heads and head_dim, in place of module"),
    (CallerLimit, "Wait {seconds:g} s, and make the same call again, and fewer of them"),
    (Overloaded, "Wait {seconds:g} s, and make the same call again"),
    (Unavailable, "Wait {seconds:g} s, and make the same call again"),
    (TooLarge, "Call estimate_cost for the longest text that fits, and open_input with a shorter one"),
    (NotAcceptable, "Make the same call without picture"),
    (InternalError, "Make the same call once more; if it fails again, tell the operator the request id"),
    (InvalidRequest, "Correct the argument and make the same call again"),
)
"""The advice for each class of errors; the first that fits counts."""


_NEXT_CALL: Final = re.compile(r"\b[Cc]all [a-z]+_[a-z_]+")
"""A detail that says the next call itself."""


def explanation(error: AttentionError, arguments_of: Mapping[str, str]) -> str:
    """Return what went wrong and the next call to make.

    ``arguments_of``: the argument of the tool that became each field of its requests, without indices.
    """
    advice = next((text for kind, text in _ADVICE if isinstance(error, kind)), "Correct the call and make it again")
    detail = error.detail.rstrip(".")
    if (param := error.param) is not None and detail.startswith(param):
        named = re.sub(r"(\.\d+)+(?=\.|$)", "", param)  # without indices and layers
        detail = arguments_of.get(named, param) + detail.removeprefix(param)
    identity = f" (request {error.request_id})" if isinstance(error, InternalError) and error.request_id else ""
    wrong = f"{detail}{identity}"
    wrong += "" if wrong.endswith("?") else "."
    if _NEXT_CALL.search(detail):
        return wrong
    seconds = error.facts.get("retry_after") or error.retry_after or 1
    return f"{wrong} {advice.format(seconds=seconds)}."

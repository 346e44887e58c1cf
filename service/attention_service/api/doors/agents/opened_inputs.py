"""The inputs that callers opened: texts and images for a model, kept under a short handle.

An agent names a handle in every further call, so that a text or an image goes through its context once. Handles live in
the memory of this process and count in its budget, the least recently used go first, and an input that is opened again
has its handle again.
"""

import sys
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, Any, Final

from pydantic import Field

from attention_contract.errors import InvalidRequest
from attention_contract.wire import to_json
from attention_service.runtime.scheduling.budget import Budget

MAX_BYTES: Final = 2**26
"""Bytes of all inputs together, but no more than ``SHARE`` allows."""
SHARE: Final = 1 / 16
"""The largest part of the memory budget that all inputs have together."""
SHARE_OF_ONE: Final = 1 / 4
"""The largest part of these bytes that the inputs of one caller have."""
InputHandle = Annotated[str, Field(pattern=r"^in_[0-9a-f]{12}$", examples=["in_3f9a1c52d07b"])]


@dataclass(frozen=True)
class OpenedInput:
    """One input of a model."""

    model: str
    fields: dict[str, Any]
    """The fields of a request that are the input: text, target, images."""
    tokens: list[str]
    ids: list[int]
    predicts: str | None
    """The kind of prediction of the model: next, own, class, or none."""
    size: int
    """Bytes that it holds, about."""


def listing(predicts: str | None, count: int) -> dict[str, int]:
    """The field of a request that lists so many predictions; none of a model that predicts nothing."""
    return {} if predicts is None else {"top_k": count}


class OpenedInputs:
    """All inputs that are open, of every caller. Used from the event loop only."""

    def __init__(self, budget: Budget) -> None:
        """``budget``: that of the host's memory."""
        self._budget = budget
        self._most = min(MAX_BYTES, int(SHARE * budget.total))
        self._inputs: OrderedDict[tuple[str, str], OpenedInput] = OrderedDict()

    def keep(
        self,
        owner: str,
        model: str,
        fields: dict[str, Any],
        tokens: list[str],
        ids: list[int],
        predicts: str | None = None,
    ) -> str:
        """Keep an input of a caller, and return its handle."""
        text = to_json({"model": model, "fields": fields})
        handle = f"in_{sha256(text).hexdigest()[:12]}"
        size = len(text) + sum(map(sys.getsizeof, tokens)) + 36 * len(ids)
        self._drop((owner, handle))
        self._inputs[owner, handle] = OpenedInput(model, fields, tokens, ids, predicts, size)
        self._budget.inputs += size
        self._evict(int(SHARE_OF_ONE * self._most), [key for key in self._inputs if key[0] == owner])
        self._evict(self._most, list(self._inputs))
        return handle

    def find(self, owner: str, handle: str, argument: str = "input") -> OpenedInput:
        """Return an input of a caller. Raises InvalidRequest, which names the argument, if it is not open."""
        opened = self._inputs.get((owner, handle))
        if opened is None:
            raise InvalidRequest.at(
                argument,
                f"there is no open input {handle!r}: it was opened by another key or in another process, or made room "
                "for others. Call open_input with its text or image; the same input gets the same handle",
            )
        self._inputs.move_to_end((owner, handle))
        return opened

    def _evict(self, most: int, keys: list[tuple[str, str]]) -> None:
        """Drop the first of these inputs until they hold no more than so many bytes; the last stays."""
        held = sum(self._inputs[key].size for key in keys)
        for key in keys[:-1]:
            if held <= most:
                return
            held -= self._inputs[key].size
            self._drop(key)

    def _drop(self, key: tuple[str, str]) -> None:
        """Drop an input, if it is open, and give its memory back."""
        if (dropped := self._inputs.pop(key, None)) is not None:
            self._budget.inputs -= dropped.size
            self._budget.wake()

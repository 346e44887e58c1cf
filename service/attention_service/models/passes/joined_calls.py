"""Modules that call their attention function several times over the same queries and keys, each with other values.

Differential attention does so: its values are halves of those of two heads. The calls are one attention whose values
lie side by side. All values are collected before the module runs, by a run in which the function returns zeros.
Source: Ye et al. 2024, Differential Transformer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attention_service.models.passes.module_hooks import noting_calls


class JoinedCalls:
    """The calls of the attention function by each module of a model."""

    def __init__(self) -> None:
        self.active = False
        """True while calls are counted, and for a model with modules that call several times."""
        self._counts: dict[nn.Module, int] = {}
        self._counting = False
        self._last: tuple[Tensor, Tensor] | None = None
        self._collected: list[Tensor] | None = None
        self._values: dict[nn.Module, Tensor] = {}
        self._contexts: dict[nn.Module, list[Tensor]] = {}

    def count(self, module: nn.Module) -> int:
        """The calls that are one attention: one of most modules."""
        return self._counts.get(module, 1)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the calls of each module that follow each other over the same tensors, until the block ends."""
        self._counting = self.active = True
        try:
            yield
        finally:
            self._counting, self._last, self.active = False, None, bool(self._counts)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Join the calls of modules with several, until the block ends."""
        try:
            with noting_calls(self._counts, self._collect):
                yield
        finally:
            self._values.clear()
            self._contexts.clear()

    def _collect(self, module: nn.Module, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        self._collected = []
        try:
            module.forward(*args, **options)
            self._values[module] = torch.cat(self._collected, -1)
        finally:
            self._collected = None

    def output(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attend: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """The output ``[B, Q, H, V]`` of a call. ``attend`` returns that of values, those of all calls side by side.

        The first call computes the outputs of all, and keeps the others for theirs.
        """
        if self._collected is not None:
            self._collected.append(value)
            batch, heads, queries, _ = query.shape
            return query.new_zeros(batch, queries, heads, value.shape[3])
        if waiting := self._contexts.get(module):
            return waiting.pop(0)
        if self._counting:
            if self._last is not None and self._last[0] is query and self._last[1] is key:
                self._counts[module] = self.count(module) + 1
            self._last = query, key
        context, width = attend(self._values.pop(module, value)), value.shape[3]
        if context.shape[3] == width:
            return context
        first, *others = (chunk.contiguous() for chunk in torch.tensor_split(context, context.shape[3] // width, -1))
        self._contexts[module] = others
        return first

"""The last queries of rows in several layers, whose weights are computed at once.

A pass over few tokens is short, and the core takes nearly as long for one layer as for six. Notation as in
``page_layouts`` and ``layer_facts``; L layers.
"""

from collections.abc import Hashable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from attention_service.core.stages import stages
from attention_vllm.asked_requests import AskedRequest, KernelCall
from attention_vllm.kernel_trial import departures
from attention_vllm.layer_facts import LayerFacts
from attention_vllm.pass_rows import PassRow

_MOST_NUMBERS: Final = 2**21
"""The keys of layers that are computed at once: 8 MiB of float32."""


class LastQuery(NamedTuple):
    """The last query of a request's row."""

    asked: AskedRequest
    row: PassRow
    told: bool
    """True if it chooses a token that was not told of."""


class LastQueries:
    """The last queries of the same rows in layers alike, with copies of all that a later layer may write over."""

    def __init__(self, first: KernelCall, facts: LayerFacts, queries: Sequence[LastQuery], layers: int) -> None:
        """``first``: the first layer; ``layers``: those of the model."""
        self.facts, self.queries = facts, queries
        self.layers: list[int] = []
        self.compared = not queries[0].asked.checked
        """True if the kernel's outputs are compared with weights times values."""
        rows = [query.row for query in queries]
        self._layout, device = first.layout, first.query.device
        self._longest = max(row.length for row in rows)
        self._tokens = min(first.cache.shape[2], self._longest)
        self._table = first.pages_of(rows)
        self._places = torch.tensor([row.stop - 1 for row in rows], device=device)
        self._lengths = torch.tensor([row.length for row in rows], device=device)
        pages = self._layout.key_pages(first.cache, self._tokens)
        size = self._table.numel() * pages[0].numel()
        self._most = max(1, min(layers, _MOST_NUMBERS // size))
        self._keys = pages.new_empty(self._most, self._table.numel(), *pages.shape[1:])
        self._q = first.query.new_empty(self._most, len(rows), *first.query.shape[1:])
        if self.compared:
            values = self._layout.value_pages(first.cache, self._tokens)
            self._values = values.new_empty(self._most, self._table.numel(), *values.shape[1:])
            self._outputs = first.output.new_empty(self._most, len(rows), *first.output.shape[1:])

    @staticmethod
    def kind(call: KernelCall, facts: LayerFacts, queries: Sequence[LastQuery]) -> Hashable:
        """Equal for layers that are computed at once."""
        rows = tuple((query.row.at, query.told) for query in queries)
        return rows, facts.kind, id(call.metadata), call.cache.shape, call.cache.dtype

    def add(self, call: KernelCall) -> None:
        """Take a layer."""
        at, pages = len(self.layers), self._table.flatten()
        torch.index_select(self._layout.key_pages(call.cache, self._tokens), 0, pages, out=self._keys[at])
        torch.index_select(call.query, 0, self._places, out=self._q[at])
        if self.compared:
            torch.index_select(self._layout.value_pages(call.cache, self._tokens), 0, pages, out=self._values[at])
            torch.index_select(call.output, 0, self._places, out=self._outputs[at])
        self.layers.append(call.layer)

    @property
    def full(self) -> bool:
        """True if no further layer can be taken."""
        return len(self.layers) == self._most

    def weights(self) -> tuple[Tensor, list[str | None]]:
        """Return the weights ``[L, R, H, K]``, and how the kernel's output departs in each layer and row, in order."""
        layers = len(self.layers)
        keys = self._layout.keys(self._by_row(self._keys))[:, :, : self._longest]
        q, lengths = self._q[:layers].flatten(0, 1)[:, :, None], self._lengths.repeat(layers)  # q [L·R, H, 1, D]
        if not self.compared:
            problem = self.facts.problem(q, keys, None, lengths - 1)
            return self._by_layer(dict(stages(problem, ("weights",)))["weights"]), []
        values = self._layout.values(self._by_row(self._values))[:, :, : self._longest]
        taps = dict(stages(self.facts.problem(q, keys, values, lengths - 1, lengths), ("weights", "context")))
        outputs = self._outputs[:layers].flatten(0, 1)[:, :, None]
        return self._by_layer(taps["weights"]), departures(taps["context"], outputs)

    def _by_row(self, pages: Tensor) -> Tensor:
        """The pages of each row and layer ``[L·R, M, …]``."""
        layers = len(self.layers)
        return pages[:layers].view(layers * len(self._table), self._table.shape[1], *pages.shape[2:])

    def _by_layer(self, weights: Tensor) -> Tensor:
        return weights.view(len(self.layers), len(self.queries), *weights.shape[1:])[..., 0, :]

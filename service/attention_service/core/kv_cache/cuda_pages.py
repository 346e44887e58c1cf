"""Steps on a CUDA device: FlashAttention-2 reads the pages of many sequences by a block table, in one call a slab.

It is called as PyTorch's own operation: ``torch.nn.attention.varlen`` would load PyTorch's compiler and launch one more
kernel. Keys are split among thread blocks, without which few sequences would leave most of a GPU idle: where the kernel
takes the heads of a group together, into as many parts whatever runs beside a sequence, which so gets the same bits.
Otherwise it puts the parts together for one sequence alone, and several are not split.

Source: Kwon et al. 2023, section 4; Dao 2023 (FlashAttention-2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from attention_service.core.kernels.fused.cuda_attention import flash_width
from attention_service.core.kv_cache.runs import SlotRun, Slots
from attention_service.core.kv_cache.slab import GPU_PAGE_TOKENS as PAGE
from attention_service.core.tensors import to_device

_HALF = (torch.float16, torch.bfloat16)
_WIDEST = 256
"""The widest head that it takes."""
_SPLITS = 16
"""Parts of the keys of one query. Of more queries, so many fewer."""


@dataclass(slots=True)
class Table:
    """The pages of one sequence, all in one slab."""

    slab: Slots
    pages: Sequence[int]
    tokens: int


def tables_of(q: Tensor, pasts: Sequence[Sequence[SlotRun[Slots]]]) -> list[Table | None]:
    """Return the block table of each sequence of queries ``[..., D]``; None for one that the kernel does not take."""
    taken: dict[Slots, bool] = {}
    tables: list[Table | None] = []
    for runs in pasts:
        slab = runs[0].slab
        if slab not in taken:
            taken[slab] = _takes(slab, q.shape[-1])
        tables.append(_table_of(slab, runs) if taken[slab] else None)
    return tables


def _takes(slab: Slots, width: int) -> bool:
    widths = {width, slab.keys.shape[2], slab.values.shape[2]}
    return slab.paged and slab.keys.dtype in _HALF and len(widths) == 1 and not width % 8 and width <= _WIDEST


def _table_of(slab: Slots, runs: Sequence[SlotRun[Slots]]) -> Table | None:
    pages, tokens, last = list[int](), 0, len(runs) - 1
    for index, run in enumerate(runs):
        first, rest = divmod(run.start, PAGE)
        if rest or run.slab is not slab or (index < last and run.tokens % PAGE):
            return None
        pages += range(first, first - (-run.tokens // PAGE))
        tokens += run.tokens
    return Table(slab, pages, tokens)


def attend_by_pages(q: Tensor, tables: Sequence[Table], scale: float, left: int | None) -> Tensor:
    """Attend causally from the last places of each sequence, ``[S, H, Q, D]``, to its pages; return ``[S, H, Q, D]``.

    ``left``: keys before its own that a query sees; None for all.
    """
    by_slab: dict[Slots, list[int]] = {}
    for index, table in enumerate(tables):
        by_slab.setdefault(table.slab, []).append(index)
    order = [index for members in by_slab.values() for index in members]
    calls = [_Call.of(slab, [tables[index] for index in members], q.shape[2]) for slab, members in by_slab.items()]
    numbers = [*(part for call in calls for part in call.numbers)]
    if len(calls) > 1:
        numbers += [np.array(order), np.argsort(order)]
    host = torch.from_numpy(np.concatenate([part.ravel() for part in numbers]).astype(np.int32))
    parts = to_device(host, q.device).split_with_sizes([part.size for part in numbers])
    rows = q.transpose(1, 2)  # [S, Q, H, D]
    if len(calls) == 1:
        return calls[0].run(rows, parts, scale, left).transpose(1, 2)
    sorted_rows = rows.index_select(0, parts[-2]).split_with_sizes([call.sequences for call in calls])
    contexts = [
        call.run(own, parts[4 * index : 4 * index + 4], scale, left)
        for index, (call, own) in enumerate(zip(calls, sorted_rows, strict=True))
    ]
    return torch.cat(contexts).index_select(0, parts[-1]).transpose(1, 2)


@dataclass(frozen=True)
class _Call:
    """One call of the kernel: sequences of one slab."""

    slab: Slots
    queries: int
    longest: int
    numbers: tuple[np.ndarray, ...]
    """Borders of the sequences among the queries and among the keys, their lengths, and the block table."""

    @classmethod
    def of(cls, slab: Slots, tables: Sequence[Table], queries: int) -> "_Call":
        lengths = [table.tokens for table in tables]
        block_table = np.zeros((len(tables), max(len(table.pages) for table in tables)), np.int32)
        for row, table in zip(block_table, tables, strict=True):
            row[: len(table.pages)] = table.pages
        borders = np.arange(len(tables) + 1) * queries, np.array([0, *accumulate(lengths)])
        return cls(slab, queries, max(lengths), (*borders, np.array(lengths), block_table))

    @property
    def sequences(self) -> int:
        return len(self.numbers[3])

    def run(self, rows: Tensor, numbers: Sequence[Tensor], scale: float, left: int | None) -> Tensor:
        """Return the contexts ``[S, Q, H, D]`` of queries of that shape."""
        whole = left is None or left >= self.longest - 1
        causal = whole and self.queries > 1
        # Without a border on the right the kernel reads each key once for the heads of a group; one query needs none.
        right = -1 if whole and self.queries == 1 else 0
        by_query, by_key, lengths, block_table, *_ = numbers
        together = right == -1 and rows.shape[2] > self.slab.keys.shape[0]
        splits = _splits(self.queries) if together or self.sequences == 1 else 1
        context, *_ = torch.ops.aten._flash_attention_forward(
            rows.flatten(0, 1), _pages_of(self.slab.keys), _pages_of(self.slab.values),
            by_query, by_key, self.queries, self.longest, 0.0, causal, False,
            scale=scale, window_size_left=-1 if whole else left, window_size_right=right,
            seqused_k=lengths, block_table=block_table.view(self.sequences, -1), num_splits=splits,
        )  # fmt: skip
        contexts: Tensor = context.view(rows.shape)
        return contexts


def workspace_bytes(sequences: int, heads: int, queries: int, width: int) -> int:
    """Return the bytes of the contexts and sums of all parts, in float32."""
    splits = _splits(queries)
    return 4 * splits * sequences * heads * queries * (flash_width(width) + 1) if splits > 1 else 0


def _splits(queries: int) -> int:
    return max(_SPLITS // queries, 1)


def _pages_of(slots: Tensor) -> Tensor:
    """Return slots ``[Hkv, slots, D]`` that lie token after token as pages, ``[pages, PAGE, Hkv, D]``."""
    by_token = slots.transpose(0, 1)
    return by_token.view(-1, PAGE, *by_token.shape[1:])

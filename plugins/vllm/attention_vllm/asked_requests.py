"""Requests that ask for attention, and the layers of a pass as a worker meets them. No vLLM in here."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from attention_vllm.bound_asks import OUTPUT, BoundAsk
from attention_vllm.page_layouts import PageLayout
from attention_vllm.pass_rows import PassRow


@dataclass(eq=False)
class KernelCall:
    """One attention layer of a pass, after vLLM's kernel."""

    layer: int
    layout: PageLayout
    query: Tensor
    """``[T, H, D]`` of all tokens of the pass."""
    cache: Tensor
    metadata: Any
    output: Tensor
    """``[T, H, D]``, which edits change."""
    refused: str | None = None
    """The reason why this layer is not told of."""

    def keys_and_values(self, row: PassRow) -> tuple[Tensor, Tensor]:
        """The keys and values ``[Hkv, K, D]`` of a row."""
        pages = self.pages_of([row])[0]
        values = self.layout.value_pages(self.cache, self.cache.shape[2]).index_select(0, pages)
        return self.keys(row), self.layout.values(values[None])[0, :, : row.length]

    def keys(self, row: PassRow) -> Tensor:
        """The keys ``[Hkv, K, D]`` of a row."""
        pages = self.pages_of([row])[0]
        keys = self.layout.key_pages(self.cache, self.cache.shape[2]).index_select(0, pages)
        return self.layout.keys(keys[None])[0, :, : row.length]

    def pages_of(self, rows: Sequence[PassRow]) -> Tensor:
        """The pages of rows ``[R, M]``, up to the last of the longest one."""
        pages = -(-max(row.length for row in rows) // self.cache.shape[2])
        table: Tensor = self.metadata.block_table[[row.at for row in rows], :pages]
        return table


@dataclass(eq=False)
class AskedRequest:
    """A request that asks."""

    name: str
    bound: BoundAsk
    prompt: int
    """The tokens of its prompt."""
    sent: int = 0
    """The last position that was told of: a request that was preempted is computed again."""
    checked: bool = False
    """True once the kernel's output was compared with weights · V in its first pass."""
    outputs_seen: set[int] = field(default_factory=set)
    """The layers of the pass whose outputs were seen."""
    tapped: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The taps of the tokens of the pass, by layer."""

    @cached_property
    def outputs(self) -> frozenset[int]:
        """The layers whose outputs are edited or read."""
        read = self.bound.heads if OUTPUT in self.bound.taps else ()
        return frozenset({*self.bound.output_edits, *read})

    @cached_property
    def layers(self) -> frozenset[int]:
        """The layers that the request tells of, or edits."""
        return frozenset({*self.bound.heads, *self.bound.edits, *self.bound.output_edits})

    @cached_property
    def only_tells(self) -> bool:
        """True if nothing is edited, and no tap read."""
        return not (self.bound.edits or self.bound.output_edits or self.bound.taps)

    @property
    def begin(self) -> int:
        """The first token that edits change."""
        return self.prompt if self.bound.ask.attention.from_ == "answer" else 0

    def chooses(self, row: PassRow) -> bool:
        """True if the last query of a row chooses a token that was not told of: not in the middle of a prompt."""
        return row.length >= self.prompt and row.length > self.sent

"""The past of a sequence in the pages of a cache, and its tensors: gathered from the pages, and written to them."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from attention_service.core.kv_cache.runs import SlotRun, after, first_of, merged
from attention_service.core.kv_cache.slab import Slab
from attention_service.core.tensors import to_device

_TOKENS_OF = attrgetter("tokens")
_BY_SLICES = 16
"""From this many new tokens of a sequence on, they are copied by slices rather than slot by slot."""

Span = SlotRun[Slab]
"""Adjacent slots of one slab."""


@dataclass(frozen=True, slots=True)
class Cached:
    """The past of one sequence, and the slots for its new tokens: all that a pass needs to know of it."""

    past: tuple[Span, ...]
    new: tuple[Span, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens of the past."""
        return sum(map(_TOKENS_OF, self.past))

    def part(self, start: int, stop: int) -> "Cached":
        """The new tokens from ``start`` to before ``stop``; those before them are part of the past."""
        past, spans = self.tokens, merged((*self.past, *self.new))
        return Cached(tuple(first_of(spans, past + start)), tuple(after(first_of(spans, past + stop), past + start)))

    def runs(self, hidden: int = 0) -> list[Span]:
        """The past, but for its first ``hidden`` tokens, and the new tokens, in runs as long as possible."""
        all_runs = merged((*self.past, *self.new))
        return after(all_runs, hidden) if hidden else all_runs

    def gathered(self) -> tuple[Tensor, Tensor] | None:
        """Keys ``[Hkv, P, D]`` and values ``[Hkv, P, Dv]`` of the past; copied unless they lie in one run."""
        if not self.past:
            return None
        if len(self.past) == 1:
            return self.past[0].keys, self.past[0].values
        return torch.cat([span.keys for span in self.past], 1), torch.cat([span.values for span in self.past], 1)

    def write(self, keys: Tensor, values: Tensor) -> None:
        """Put the new tokens' keys ``[Hkv, tokens, D]`` and values into their slots."""
        start = 0
        for span in self.new:
            stop = start + span.tokens
            span.keys.copy_(keys[:, start:stop])
            span.values.copy_(values[:, start:stop])
            start = stop


def gathered(
    rows: Sequence[Cached],
    key_shape: Sequence[int],
    value_shape: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """``past_key [B, Hkv, P, D]`` and ``past_value [B, Hkv, P, Dv]``.

    A single sequence in one run is not copied; callers must not change the tensors.
    """
    parts = [row.gathered() for row in rows]
    pasts = [part for part in parts if part is not None]
    if not pasts:
        shapes = {"past_key": key_shape, "past_value": value_shape}
        return {name: torch.empty(*shape, dtype=dtype, device=device) for name, shape in shapes.items()}
    if len(pasts) == 1:
        key, value = pasts[0][0][None], pasts[0][1][None]
    else:
        key, value = torch.stack([part[0] for part in pasts]), torch.stack([part[1] for part in pasts])
    return {"past_key": key.to(dtype), "past_value": value.to(dtype)}


def write(rows: Sequence[Cached], keys: Tensor, values: Tensor) -> None:
    """Put the new tokens' keys ``[B, Hkv, tokens, D]`` and values ``[B, Hkv, tokens, Dv]`` into their slots."""
    count = keys.shape[2]
    if len(rows) == 1 or count >= _BY_SLICES:
        for row, key, value in zip(rows, keys, values, strict=True):
            row.write(key, value)
        return
    by_slab: dict[Slab, list[tuple[int, Span]]] = {}  # new tokens by their number, and their slots
    for index, row in enumerate(rows):
        token = index * count
        for span in row.new:
            by_slab.setdefault(span.slab, []).append((token, span))
            token += span.tokens
    flat = [x.transpose(0, 1).flatten(1, 2) for x in (keys, values)]
    for slab, spans in by_slab.items():
        mapping = [[slot for _, span in spans for slot in range(span.start, span.stop)]]
        if len(by_slab) > 1:
            mapping.append([number for token, span in spans for number in range(token, token + span.tokens)])
        slots, *chosen = to_device(torch.tensor(mapping), keys.device)
        for into, x in zip((slab.keys, slab.values), flat, strict=True):
            into.index_copy_(1, slots, x.index_select(1, chosen[0]) if chosen else x)

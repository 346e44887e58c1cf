"""Attention as a running state: a matrix that sums up the keys and values so far, and that each query reads.

With features φ, S_j = S_{j−1} + φ(k_j) v_jᵀ is a matrix of fixed size, so that time and memory grow with the length
and not with its square. The sequence is taken in chunks: inside one, queries meet keys pair by pair; between them, the
state is carried. What autograd keeps is a few tensors of each chunk and the states between them.

Notation beside that of ``core.problem``: F features, W width of what is written (V, and 1 more for the normalizer),
c tokens of a chunk, G = H / Hkv query heads to each state.
Source: Katharopoulos et al. 2020, eqs. 10-12; in chunks: Yang et al. 2024, section 2.2.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import log
from typing import Protocol

import torch
from torch import Tensor

from attention_service.core.cancellation import checked, checkpoint
from attention_service.core.tensors import product

CHUNK = 128
"""Tokens in which queries meet keys pair by pair, with one gate a token or none."""
FINE_CHUNK = 16
"""The same with a gate for each feature: pairs are then computed feature by feature."""
BLOCK = 1024
"""Tokens processed together that only write to the state, or only read it."""


class Features(Protocol):
    """φ: the features of queries and keys."""

    def queries(self, x: Tensor) -> Tensor:
        """``[..., L, D]`` to ``[..., L, F]``."""

    def keys(self, x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the features, and the logarithm ``[B, Hkv, 1, 1]`` of a factor divided out of them; None for 1.

        real: bool ``[B, 1, L, 1]``; the others have zeros.
        """


@dataclass(frozen=True)
class WrittenTokens:
    """The keys' side of some tokens, which updates the state."""

    k: Tensor
    """``[B, Hkv, L, D]``"""
    v: Tensor
    """``[B, Hkv, L, V]``"""
    real: Tensor | None = None
    """Bool ``[B, 1, L, 1]``: the others neither write nor fade."""
    log_gate: Tensor | None = None
    """``[B, Hkv, L, 1 or F]``, at most 0: the logarithm of what remains of the state at a token."""
    beta: Tensor | None = None
    """``[B, Hkv, L, 1]``: the share of the retrieved value that a token's write replaces; None for additive writes."""

    def split(self, *sizes: int) -> "list[WrittenTokens]":
        """Cut along the tokens, in one node of the graph: each slice's backward pass would take the whole length."""
        return self._parts([x if x is None else torch.split(x, list(sizes), 2) for x in self._fields])

    def chunks(self, size: int) -> "list[WrittenTokens]":
        """Cut into chunks of this size."""
        if not self.length:
            return []
        return self._parts([x if x is None else torch.split(x, size, 2) for x in self._fields])

    @property
    def length(self) -> int:
        """Number of tokens, L."""
        return self.k.shape[2]

    @property
    def _fields(self) -> tuple[Tensor | None, ...]:
        return (self.k, self.v, self.real, self.log_gate, self.beta)

    @staticmethod
    def _parts(columns: "list[tuple[Tensor, ...] | None]") -> "list[WrittenTokens]":
        assert columns[0] is not None  # noqa: S101 - k always is
        count = len(columns[0])
        rows = zip(*(column if column is not None else (None,) * count for column in columns), strict=True)
        return [WrittenTokens(k, v, *rest) for k, v, *rest in rows]


@dataclass(frozen=True)
class State:
    """The running state."""

    value: Tensor
    """``[B, Hkv, F, W]``, times exp(−log_factor)."""
    log_factor: Tensor | None = None
    """``[B, Hkv, 1, 1]``"""


@dataclass(frozen=True)
class TokenSegments:
    """Numbers of tokens by kind, in the order of time; query i reads the state after key i + reach."""

    blind: int
    """Queries before the first key."""
    early: int
    """Keys up to the first query's."""
    paired: int
    """Steps of one query and one key each."""
    late: int
    """Queries after the last key."""
    rest: int
    """Keys after the last query, which no query reads."""

    @classmethod
    def of(cls, queries: int, keys: int, reach: int) -> "TokenSegments":
        """Split the tokens. For a reach of K − 1 or more, every query sees every key."""
        blind = min(max(-reach, 0), queries)
        early = min(max(reach, 0), keys) if reach < keys - 1 else keys
        paired = min(queries - blind, keys - early)
        return cls(blind, early, paired, queries - blind - paired, keys - early - paired)


@dataclass(frozen=True)
class StateRule:
    """One rule of writing and reading the state."""

    features: Features
    normalize: bool
    """Divide by Σ φ(q)·φ(k): a column of ones is written beside the values."""
    chunk: int = CHUNK
    block: int = BLOCK

    def attend(
        self, q: Tensor, tokens: WrittenTokens, reach: int, state: Tensor | None = None, *, want_state: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return context ``[B, H, Q, V]`` in the dtype of the values, and the state after the last key if wanted.

        state ``[B, Hkv, F, W]``: the initial state. Computed in float32 or wider.
        """
        dtype = torch.promote_types(tokens.v.dtype, torch.float32)
        parts = TokenSegments.of(q.shape[2], tokens.length, reach)
        blind, paired, late = torch.split(q, [parts.blind, parts.paired, parts.late], 2)
        early, side, rest = tokens.split(parts.early, parts.paired, parts.rest)
        carried = None if state is None else State(state.to(dtype))
        contexts = list(self._read(blind, carried, tokens))
        carried = self._write(carried, early)
        chunks = side.chunks(self._chunk(side))
        for index, (qs, tokens_of_chunk) in enumerate(
            zip(torch.split(paired, self._chunk(side), 2), chunks, strict=False)
        ):
            last = index == len(chunks) - 1 and not (parts.late or want_state)
            retrieved, carried = self._step(qs, tokens_of_chunk, carried, read=True, write=not last)
            contexts.append(self._normalized(retrieved).to(tokens.v.dtype))
            del retrieved  # as large as the context of a chunk, and no longer needed
        if want_state:
            carried = self._write(carried, rest)
        contexts += self._read(late, carried, tokens)
        whole = torch.cat(contexts, 2) if contexts else tokens.v.new_zeros(*q.shape[:3], tokens.v.shape[3])
        return whole, carried.value if want_state and carried is not None else None

    def _chunk(self, tokens: WrittenTokens) -> int:
        fine = tokens.log_gate is not None and tokens.log_gate.shape[3] > 1
        return min(self.chunk, FINE_CHUNK) if fine else self.chunk

    def _read(self, q: Tensor, state: State | None, tokens: WrittenTokens) -> Iterator[Tensor]:
        """Yield the retrieved values of queries that read the same state; zeros if the state is empty."""
        if not q.shape[2]:
            return
        if state is None:
            yield tokens.v.new_zeros(*q.shape[:3], tokens.v.shape[3])
            return
        for block in torch.split(q, self.block, 2):
            checkpoint()
            retrieved = product(self.features.queries(block.to(state.value.dtype)), state.value)
            yield self._normalized(retrieved).to(tokens.v.dtype)

    def _write(self, state: State | None, tokens: WrittenTokens) -> State | None:
        """Return the state after these keys."""
        for block in tokens.chunks(self.block if tokens.beta is None else self._chunk(tokens)):
            _, state = self._step(None, block, state, read=False, write=True)
        return state

    def _step(
        self, q: Tensor | None, tokens: WrittenTokens, state: State | None, *, read: bool, write: bool
    ) -> tuple[Tensor, State | None]:
        """Process one chunk: return the retrieved values ``[B, H, c, W]`` of its queries, and the state after it."""
        checkpoint()
        dtype = torch.promote_types(tokens.v.dtype, torch.float32)
        k, log_factor = self.features.keys(tokens.k.to(dtype), tokens.real)  # [B, Hkv, c, F]
        state, factor = _aligned(state, log_factor)
        k = k if factor is None else k * factor
        v = self._written(tokens.v.to(dtype))  # [B, Hkv, c, W]
        faded = None if tokens.log_gate is None else tokens.log_gate.to(dtype).cumsum(2)  # [B, Hkv, c, 1 or F]
        if tokens.beta is not None:
            v = _replaced(k, v, tokens.beta.to(dtype), faded, state)
        retrieved = k.new_zeros(())
        if read and q is not None:
            retrieved = _found(self.features.queries(q.to(dtype)), k, v, faded, state)
        if not write:
            return retrieved, None
        if faded is None:
            added = k.mT @ v
            value = added if state is None else state.value + added
        else:
            remains = faded[:, :, -1:]  # [B, Hkv, 1, 1 or F]
            added = (k * _left(remains - faded)).mT @ v
            value = added if state is None else state.value * _left(remains).mT + added
        return retrieved, State(checked(value), state.log_factor if state is not None else log_factor)

    def _written(self, v: Tensor) -> Tensor:
        return torch.cat([v, v.new_ones(*v.shape[:3], 1)], 3) if self.normalize else v

    def _normalized(self, retrieved: Tensor) -> Tensor:
        """Divide by the last column; zeros where it is 0, since nothing was retrieved then."""
        if not self.normalize:
            return retrieved
        total = retrieved[..., -1:]
        return retrieved[..., :-1] / total.masked_fill(total == 0, 1)


def _aligned(state: State | None, log_factor: Tensor | None) -> tuple[State | None, Tensor | None]:
    """Return state and new keys with the larger of their factors divided out of both, and the scale of the keys."""
    if log_factor is None or state is None or state.log_factor is None:
        return state, None
    larger = torch.maximum(state.log_factor, log_factor)
    return State(state.value * (state.log_factor - larger).exp(), larger), (log_factor - larger).exp()


def _found(q: Tensor, k: Tensor, v: Tensor, faded: Tensor | None, state: State | None) -> Tensor:
    """Return ``[B, H, c, W]``: values retrieved from the state before and from the chunk's keys so far."""
    batch, heads, length, width = q.shape
    kv_heads = k.shape[1]
    grouped = q.view(batch, kv_heads, heads // kv_heads, length, width)
    if faded is None:
        pairs = product(q, k.mT).tril()  # [B, H, c, c]
    elif faded.shape[3] == 1:
        inner = product(q, k.mT).view(batch, kv_heads, heads // kv_heads, length, length)
        pairs = (inner * _fading(faded)[:, :, None]).view(batch, heads, length, length)
    else:
        pairs = _pairs_by_feature(grouped, k, faded).view(batch, heads, length, length)
    retrieved = product(pairs, v)
    if state is None:
        return retrieved
    if faded is not None:
        q = (grouped * _left(faded)[:, :, None]).view_as(q)
    return retrieved + product(q, state.value)


def _fading(faded: Tensor) -> Tensor:
    """Return ``[B, Hkv, c, c]``: the share at token i of a write at token j ≤ i; 0 for j > i."""
    return _left((faded - faded.mT).masked_fill(_ahead(faded), -torch.inf))


def _left(exponents: Tensor) -> Tensor:
    """Compute exp, and 0 below the root of the smallest normal number (10⁻¹⁹ in float32).

    Products of two such numbers would be subnormal, and a CPU multiplies those a hundred times slower.
    """
    return exponents.masked_fill(exponents < log(torch.finfo(exponents.dtype).tiny) / 2, -torch.inf).exp()


def _ahead(faded: Tensor) -> Tensor:
    """Return bool ``[c, c]``: token j comes after token i."""
    index = torch.arange(faded.shape[2], device=faded.device)
    return index > index[:, None]


def _pairs_by_feature(q: Tensor, k: Tensor, faded: Tensor) -> Tensor:
    """Σ_f q_if k_jf exp(faded_if − faded_jf) for j ≤ i: ``[B, Hkv, G, c, c]``.

    Not as a product of two factors: exp(−faded) has no bound.
    """
    ahead = _ahead(faded)[..., None]
    left = _left((faded[:, :, :, None] - faded[:, :, None]).masked_fill(ahead, -torch.inf))  # [B, Hkv, c, c, F]
    pairs: Tensor = (q[:, :, :, :, None] * (k[:, :, None] * left)[:, :, None]).sum(-1)
    return pairs


def _replaced(k: Tensor, v: Tensor, beta: Tensor, faded: Tensor | None, state: State | None) -> Tensor:
    """Return the writes of the delta rule for a chunk at once: ``u_i = β_i (v_i − the value read by k_i)``.

    Each depends on the earlier writes of the chunk, which makes a triangular system.
    Source: Yang et al. 2024 (parallelizing DeltaNet), section 3.2; with gates: Yang et al. 2025, section 3.3.
    """
    if faded is not None and faded.shape[3] != 1:
        overlap = _pairs_by_feature(k[:, :, None], k, faded).squeeze(2)
    else:
        overlap = k @ k.mT  # [B, Hkv, c, c]
        overlap = overlap if faded is None else overlap * _fading(faded)
    if state is not None:
        reading = k if faded is None else k * _left(faded)
        v = v - reading @ state.value
    # Of the matrix, only what lies below the diagonal is read; on it are ones.
    written: Tensor = torch.linalg.solve_triangular(beta * overlap, beta * v, upper=False, unitriangular=True)
    return written

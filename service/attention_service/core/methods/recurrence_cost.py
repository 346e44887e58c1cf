"""Cost of a running state, by the sizes of its chunks."""

from dataclasses import dataclass

from attention_service.core.kernels.extent import Extent
from attention_service.core.masks.rules import causal_offset
from attention_service.core.methods.base import MethodCost, MethodFlops
from attention_service.core.methods.recurrence import BLOCK, CHUNK, FINE_CHUNK, TokenSegments


def segments_of(x: Extent) -> TokenSegments:
    """Split the tokens of a request, at the offset P."""
    reach = causal_offset(x.spec.masks, x.queries, x.keys, x.past)
    return TokenSegments.of(x.queries, x.keys, x.queries + x.keys if reach is None else reach + x.past)


@dataclass(frozen=True)
class FeatureCost:
    """Cost of features."""

    count: int
    """Number of features, F."""
    key_flops: int
    """Elementwise FLOPs per element of a key's features."""
    query_flops: int
    projected: bool = False
    """True if features are products with F directions."""


@dataclass(frozen=True)
class _ChunkCounts:
    """Numbers of chunks of paired tokens, and of chunks that read and write a state."""

    segments: TokenSegments
    chunk: int
    full: int
    """Chunks of that many tokens."""
    remainder: int
    """Tokens of the last, shorter one."""
    reads: bool
    """True if the first chunk reads a state."""
    writes: bool
    """True if the last chunk writes a state."""

    @classmethod
    def of(cls, x: Extent) -> "_ChunkCounts":
        segments = segments_of(x)
        chunk = FINE_CHUNK if x.fine_gate else CHUNK
        full, remainder = divmod(segments.paired, chunk)
        wanted = "return_state" in x.sent
        return cls(
            segments, chunk, full, remainder,
            reads="initial_state" in x.sent or segments.early > 0,
            writes=wanted or segments.late > 0,
        )  # fmt: skip

    @property
    def squares(self) -> int:
        """Σ c² over the chunks."""
        return self.full * self.chunk**2 + self.remainder**2

    @property
    def last(self) -> int:
        """Tokens of the last chunk."""
        return self.remainder or min(self.chunk, self.segments.paired)

    @property
    def first(self) -> int:
        """Tokens of the first chunk."""
        return min(self.chunk, self.segments.paired)

    @property
    def reading(self) -> int:
        """Paired tokens whose chunk reads a state."""
        return self.segments.paired - (0 if self.reads else self.first)

    @property
    def writing(self) -> int:
        """Paired tokens whose chunk writes a state."""
        return self.segments.paired - (0 if self.writes else self.last)

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return self.full + (self.remainder > 0)


def running_cost(
    x: Extent, features: FeatureCost, *, normalize: bool, gated: bool = False, delta: bool = False
) -> MethodCost:
    """Count products of features chunk by chunk, and the reads and writes of the state between them.

    Elementwise: the features; for each pair in a chunk 1 (zero ahead), with a gate 3 (subtract, exp, multiply), with
    one for each feature 4 for each feature (subtract, exp, multiply, multiply and add); 2 for each feature of a token
    and of the state that fades; c² W for the triangular system of a delta rule; 1 for each number added to the state,
    and for each one divided. Backward twice that.
    """
    parts = _ChunkCounts.of(x)
    s, width, wide = parts.segments, features.count, x.value_dim + normalize
    kv, group = x.batch * x.kv_heads, x.heads // x.kv_heads
    return_rest = s.rest if "return_state" in x.sent else 0
    written = s.early + return_rest
    state_first = "initial_state" in x.sent
    read_late = s.late if state_first or x.keys else 0
    read_blind = s.blind if state_first else 0
    tokens_read = parts.reading + read_late + read_blind
    keys_used = written + s.paired
    queries_used = s.paired + read_late + read_blind

    pair_products = 0 if x.fine_gate else 2 * group * parts.squares * width
    value_products = 2 * group * parts.squares * wide + 2 * group * tokens_read * width * wide
    value_products += 2 * (written + parts.writing) * width * wide
    solving = overlaps = 0
    if delta:
        overlaps = parts.squares + _squares(s.early, parts.chunk) + _squares(return_rest, parts.chunk)
        pair_products += 0 if x.fine_gate else 2 * overlaps * width
        unread = 0 if state_first else min(parts.chunk, s.early or s.paired or return_rest)
        value_products += 2 * (keys_used - unread) * width * wide
        solving = overlaps * wide
    drawn = 2 * x.head_dim * width * (keys_used + group * queries_used) if features.projected else 0

    pairs = group * parts.squares + (overlaps if x.fine_gate else 0)
    elementwise = width * (keys_used * features.key_flops + group * queries_used * features.query_flops)
    elementwise += (4 * width if x.fine_gate else 3 if gated else 1) * pairs + solving
    elementwise += 2 * width * (keys_used + group * queries_used) if gated else 0
    elementwise += group * queries_used * wide * normalize
    forward = MethodFlops(kv * (pair_products + drawn), kv * value_products, kv * elementwise)
    backward = MethodFlops(
        kv * (2 * pair_products + drawn),
        kv * (2 * value_products + 2 * solving),
        kv * 2 * elementwise,
    )
    steps = parts.chunks + -(-written // BLOCK) + -(-(read_late + read_blind) // BLOCK)
    return MethodCost(forward, backward, steps=steps)


def _squares(tokens: int, chunk: int) -> int:
    full, remainder = divmod(tokens, chunk)
    return full * chunk**2 + remainder**2

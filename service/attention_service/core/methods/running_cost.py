"""What a running state costs: the sizes of its chunks, and what is held of each."""

from dataclasses import dataclass

from attention_service.core.methods.base import Extent, MethodCost, PassCost
from attention_service.core.methods.running import BLOCK, CHUNK, FINE_CHUNK, Segments


@dataclass(frozen=True)
class FeatureCost:
    """What features cost."""

    count: int
    """F"""
    key_flops: int
    """Elementwise, for each element of a key's features."""
    query_flops: int
    projected: bool = False
    """Whether they are products with F directions."""
    made: bool = True
    """Whether they are other tensors than the queries and keys themselves."""

    @property
    def held(self) -> int:
        """How many tensors of their size are held while they are made."""
        return 3 if self.projected else 2 if self.made else 1


@dataclass(frozen=True)
class _Parts:
    """How many chunks of paired tokens there are, and how many of them find and leave a state."""

    segments: Segments
    chunk: int
    full: int
    """Chunks of that many tokens."""
    remainder: int
    """Tokens of the last, shorter one."""
    found: bool
    """Whether the first chunk finds a state."""
    wanted: bool
    """Whether the last one leaves one."""

    @classmethod
    def of(cls, x: Extent) -> "_Parts":
        segments = Segments.of(x.queries, x.keys, x.reach)
        chunk = FINE_CHUNK if x.fine_gate else CHUNK
        full, remainder = divmod(segments.paired, chunk)
        wanted = "return_state" in x.sent
        return cls(
            segments, chunk, full, remainder,
            found="initial_state" in x.sent or segments.early > 0,
            wanted=wanted or segments.late > 0,
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
        """Paired tokens that find a state."""
        return self.segments.paired - (0 if self.found else self.first)

    @property
    def writing(self) -> int:
        """Paired tokens that leave one."""
        return self.segments.paired - (0 if self.wanted else self.last)

    @property
    def chunks(self) -> int:
        """How many there are."""
        return self.full + (self.remainder > 0)


def running_cost(
    x: Extent, features: FeatureCost, *, normalize: bool, gated: bool = False, delta: bool = False
) -> MethodCost:
    """Products of features, chunk by chunk, and what is read from and written to the state between them.

    Elementwise: the features; for each pair in a chunk 1 (zero ahead), with a gate 3 (subtract, exp, multiply), with
    one for each feature 4 for each feature (subtract, exp, multiply, multiply and add); 2 for each feature of a token
    and of the state that fades; c² W for the triangular system of a delta rule; 1 for each number added to the state,
    and for each one divided. Backward twice that.
    """
    parts = _Parts.of(x)
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
    solving = 0
    if delta:
        overlaps = parts.squares + _squares(s.early) + _squares(return_rest)
        pair_products += 2 * overlaps * width
        unread = 0 if state_first else min(CHUNK, s.early or s.paired or return_rest)
        value_products += 2 * (keys_used - unread) * width * wide
        solving = overlaps * wide
    drawn = 2 * x.head_dim * width * (keys_used + group * queries_used) if features.projected else 0

    pairs = group * parts.squares
    elementwise = width * (keys_used * features.key_flops + group * queries_used * features.query_flops)
    elementwise += (4 * width if x.fine_gate else 3 if gated else 1) * pairs + solving
    elementwise += 2 * width * (keys_used + group * queries_used) if gated else 0
    elementwise += group * queries_used * wide * normalize
    forward = PassCost(kv * (pair_products + drawn), kv * value_products, kv * elementwise)
    backward = PassCost(
        kv * (2 * pair_products + drawn),
        kv * (2 * value_products + 2 * solving),
        kv * 2 * elementwise,
    )
    held = _held(x, parts, features, wide, gated=gated, delta=delta)
    kept = _kept(x, parts, features, wide, normalize=normalize, gated=gated, delta=delta)
    state_traffic = (parts.chunks + written // BLOCK + queries_used // BLOCK) * width * wide
    # Of pairs, what is made and read in each operation: a product and its half that is kept; how far they fade.
    per_pair = 4 * group + (12 + 6 * group) * (width if x.fine_gate else 1) * gated + 8 * delta
    per_token = 8 * width * (keys_used + group * queries_used) + 6 * group * queries_used * wide
    moved = kv * x.accumulated * (per_pair * parts.squares + per_token + 3 * state_traffic)
    steps = parts.chunks + -(-written // BLOCK) + -(-(read_late + read_blind) // BLOCK)
    return MethodCost(forward, backward, held, max(held, kept), moved, steps)


def _squares(tokens: int) -> int:
    full, remainder = divmod(tokens, CHUNK)
    return full * CHUNK**2 + remainder**2


def _held(x: Extent, parts: _Parts, features: FeatureCost, wide: int, *, gated: bool, delta: bool) -> int:
    """The context twice, where its parts are put together; or while a chunk or block is at work.

    In a chunk: the features and what is written, then two tensors of pairs or three of what is found. All parts of the
    context but the last are there by then.
    """
    s, f, c = parts.segments, features.count, parts.last
    group, a, kv = x.heads // x.kv_heads, x.accumulated, x.batch * x.kv_heads
    keys_widened = x.head_dim + x.value_dim if a != x.itemsize else 0
    queries_widened = x.head_dim if a != x.itemsize else 0
    drawn = 2 * x.head_dim if features.projected else 0
    state = f * wide if parts.found or parts.wanted or parts.chunks > 1 else 0
    pairs = max(2 * group + 2 * gated, (group + 2) * gated, (2 + gated) * delta) * c * c + 2 * delta * c * wide
    if x.fine_gate:
        pairs += max(3, 2 + group) * c * c * f
    inner = max(
        (features.held - 1) * group * c * f,
        pairs + group * c * (f if gated else 0),
        group * c * (c + 3 * wide),
        (2 * f * wide if parts.wanted else 0) + group * c * wide,
    )
    stepping = c * (f * (1 + group + x.padded) + wide + keys_widened + group * queries_widened)
    stepping = kv * a * (stepping + inner + 2 * state) if c else 0
    of_key = max(f * (features.held + x.padded) + drawn, f * (1 + gated * (3 if x.fine_gate else 1)) + wide)
    of_key += keys_widened + (2 * wide + CHUNK * (2 + gated) if delta else 0)
    early, rest = (
        kv * a * (min(CHUNK if delta else BLOCK, tokens) * of_key + 2 * f * wide) for tokens in (s.early, s.rest)
    )
    block = min(BLOCK, s.late)
    reading = (
        kv * a * (block * group * (max(f * features.held + drawn, f + wide, 2 * wide) + queries_widened) + f * wide)
    )
    before_late = x.context * (x.queries - min(block, x.queries)) // max(x.queries, 1)
    before_last = x.context * (parts.segments.blind + s.paired - c) // max(x.queries, 1)
    peaks = [2 * x.context, early if s.early else 0, before_last + stepping, before_late + reading if block else 0]
    if s.rest and "return_state" in x.sent:
        peaks.append(x.context + rest)
    return max(_given(x, features, gated=gated, delta=delta) + max(peaks), _drawing(x, features))


def _drawing(x: Extent, features: FeatureCost) -> int:
    """While directions are drawn, in float64: normal numbers, both factors of them, and others for the lengths."""
    squares = -(-features.count // x.head_dim)
    return 5 * 8 * squares * x.head_dim**2 if features.projected else 0


def _given(x: Extent, features: FeatureCost, *, gated: bool, delta: bool) -> int:
    """Beside q, k and v throughout: copies without padding, logarithms of gates, directions, a wanted state."""
    kv, a = x.batch * x.kv_heads, x.accumulated
    padding = kv * x.keys * (x.head_dim + x.value_dim) * x.itemsize if x.padded else 0
    gates = kv * x.keys * a * (gated * (features.count if x.fine_gate else 1) + delta) * (2 if x.padded else 1)
    directions = features.count * x.head_dim * a if features.projected else 0
    states = kv * a * features.count * (x.value_dim + 1) * len(x.sent & {"initial_state", "return_state"})
    return padding + gates + directions + states


def _kept(
    x: Extent, parts: _Parts, features: FeatureCost, wide: int, *, normalize: bool, gated: bool, delta: bool
) -> int:
    """What autograd keeps of every chunk, the states between them, and the gradients.

    Of a token its features (more where they are drawn or fade), what is written and what is found; of a chunk its pairs
    (with what they fade by, and their triangular system) and the state that it finds.
    """
    s, f, c = parts.segments, features.count, parts.last
    group, a, kv = x.heads // x.kv_heads, x.accumulated, x.batch * x.kv_heads
    used = s.early + s.paired + (s.rest if "return_state" in x.sent else 0)
    asked = s.paired + s.late
    drawn = x.head_dim if features.projected else 0
    cast = x.head_dim if a != x.itemsize else 0
    rescaled = f * max(0, used - max(c, min(BLOCK, s.early))) if features.projected else 0
    of_key = f * (features.made + gated) + drawn + cast + wide * (3 if delta else 1)
    of_query = f * (features.made + gated) + drawn + cast + (wide + 1 if normalize else 0)
    pairs = parts.squares * (group * (2 if gated and not x.fine_gate else 1) + gated)
    if x.fine_gate:
        pairs += 2 * parts.squares * f
    if delta:
        pairs += (2 + 2 * gated) * (parts.squares + _squares(s.early))
    states = (parts.chunks + -(-s.early // (CHUNK if delta else BLOCK))) * f * wide * (1 + features.projected + gated)
    kept = kv * a * (used * of_key + rescaled + group * asked * of_query + pairs + states)
    kept += _given(x, features, gated=gated, delta=delta)
    gradients = kv * (x.keys * (x.head_dim + x.value_dim) + group * x.queries * x.head_dim) * x.itemsize
    found = (4 if normalize else 2) * wide + (x.value_dim if cast else 0)
    pairs_back = max(2 * group, (2 * group + 2) * gated, (2 + 2 * gated) * delta) * c * c
    stepping = pairs_back + group * c * (wide + f)
    if x.fine_gate:
        stepping += (2 + 2 * group) * c * c * f
    reading = max(c, min(BLOCK, s.late)) * group * max(found, f * 2 if features.projected else wide + f)
    writing = min(BLOCK, s.early) * max(f * (1 + gated + features.projected), f + wide)
    working = kv * a * (max(reading, stepping) + 2 * f * wide)
    # By the time that the keys before the first query are reached, what was kept of all others is gone.
    first = kv * a * (s.early * of_key + writing) + _given(x, features, gated=gated, delta=delta) + gradients
    return x.context + max(kept + working, first, 2 * gradients)

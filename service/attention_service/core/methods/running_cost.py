"""What a running state costs: the sizes of its chunks, and what is held of each."""

from dataclasses import dataclass, replace

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
    held = _held(x, parts, features, wide, normalize=normalize, gated=gated, delta=delta)
    backward_peak, kept = _kept(x, parts, features, wide, normalize=normalize, gated=gated, delta=delta)
    steps = parts.chunks + -(-written // BLOCK) + -(-(read_late + read_blind) // BLOCK)
    copies = kv * x.keys * (x.head_dim + x.value_dim) * x.itemsize
    closing = x.context + (copies if x.padded and features.projected else 0)
    return MethodCost(
        forward,
        backward,
        held,
        backward_peak,
        kept,
        _keeps(x, features, normalize=normalize, delta=delta),
        closing,
        steps,
    )


def _keeps(x: Extent, features: FeatureCost, *, normalize: bool, delta: bool) -> frozenset[str]:
    """Queries and keys that features are made of, and values where nothing is written beside them."""
    if x.accumulated != x.itemsize or x.padded or (x.apart and not features.made):
        return frozenset()
    made = frozenset() if features.projected else frozenset({"q", "k"})
    return made if normalize or delta else made | {"v"}


def _squares(tokens: int) -> int:
    full, remainder = divmod(tokens, CHUNK)
    return full * CHUNK**2 + remainder**2


def _held(
    x: Extent, parts: _Parts, features: FeatureCost, wide: int, *, normalize: bool, gated: bool, delta: bool
) -> int:
    """The context twice, where its parts are put together; or while a chunk or block is at work.

    In a chunk: the features and what is written, then two tensors of pairs or three of what is found. All parts of the
    context but the last are there by then.
    """
    s, f, c = parts.segments, features.count, parts.last
    group, a, kv = x.heads // x.kv_heads, x.accumulated, x.batch * x.kv_heads
    cast = a != x.itemsize
    of_k, of_v = cast * x.head_dim, cast * x.value_dim
    made = f if features.made or cast else 0
    written = wide if normalize or cast or delta else 0
    # Of a token: its features while they are made; then those of a key, and what is written.
    making = f * features.held if features.made else 0
    key = max(making, features.projected * (2 * f + x.head_dim)) + of_k
    state = f * wide if parts.found or parts.wanted or parts.chunks > 1 else 0
    fading = 3 * gated * c * c + x.fine_gate * max(3, 2 + group) * c * c * f
    side = c * (made + written)
    inner = max(
        c * key,
        c * (made + of_v + written),
        delta * (c * (made + of_v + 2 * wide) + c * c * (2 + gated)),
        delta * (c * (made + wide) + c * c + fading),
        side + group * c * key,
        side + group * c * made + group * c * c * (1 if gated else 2) + fading,
        side + group * c * (made + (f + made if gated else 0)) + group * c * 2 * wide,
        side + group * c * (made + gated * f + c * (1 + gated) + 3 * wide) + f * wide * parts.wanted,
    )
    stepping = kv * a * (inner + 2 * state) if c else 0
    block_key = max(key, made + of_v + written, made * (1 + gated * (3 if x.fine_gate else 1)) + written)
    block_key += 2 * wide + CHUNK * (2 + 2 * gated) if delta else 0
    early, rest = (
        kv * a * (min(CHUNK if delta else BLOCK, tokens) * block_key + 2 * f * wide) for tokens in (s.early, s.rest)
    )
    block = min(BLOCK, s.late)
    reading = kv * a * (block * group * max(key, made + of_k + wide, 2 * wide) + f * wide)
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
) -> tuple[int, int]:
    """The peak of the backward pass; what autograd keeps of every chunk, and the states between them.

    Of a token its features (more where they are drawn or fade), what is written and what is found; of a chunk its pairs
    (with what they fade by, and their triangular system) and the state that it finds.
    """
    s, f, c = parts.segments, features.count, parts.last
    group, a, kv = x.heads // x.kv_heads, x.accumulated, x.batch * x.kv_heads
    used = s.early + s.paired + (s.rest if "return_state" in x.sent else 0)
    asked = s.paired + s.late
    cast = a != x.itemsize
    made = f if features.made or cast else 0
    of_real = f if x.padded else made
    told = x.head_dim if features.projected or (features.made and (cast or x.padded)) else 0
    rescaled = f * max(0, used - max(c, min(BLOCK, s.early))) if features.projected else 0
    written = wide if normalize or cast or x.padded else 0
    of_key = (
        of_real
        + gated * (1 + delta) * f
        + told
        + x.padded * delta * x.value_dim
        + (2 * wide if delta else 0)
        + (written if normalize or not delta else 0)
    )
    of_query = made + gated * f + (told if features.projected or cast else 0) + (wide + 1 if normalize else 0)
    # Laid out for each product: keys for pairs and for the state, values where nothing was written beside them.
    copied = f * ((0 if features.made else 1) + 1 + 3 * delta) + (0 if normalize or delta else 2 * wide)
    apart = x.apart and not features.projected  # those are made by a product, one head after the other
    laid = apart * s.paired * copied
    if apart or (group > 1 and not made):  # queries for pairs and for the state
        laid += s.paired * group * (f if features.made or cast else 2 * f)
    laid -= c * gated * f * (1 + 2 * group)  # neither reads a state nor leaves one: the first and last chunk
    flags = parts.squares * (f if x.fine_gate else 1) * gated * (1 + delta) // a
    pairs = parts.squares * (group * (2 if gated and not x.fine_gate else 1) + gated) + flags
    if x.fine_gate:
        pairs += 2 * parts.squares * f
    if delta:
        pairs += (2 + 2 * gated) * (parts.squares + _squares(s.early))
    states = (parts.chunks + -(-s.early // (CHUNK if delta else BLOCK))) * f * wide
    given = _given(replace(x, padded=False), features, gated=gated, delta=delta)
    given += kv * x.keys * x.itemsize * x.padded * (gated + delta)
    kept = kv * a * (used * of_key + rescaled + group * asked * of_query + pairs + states + laid) + given
    of_q, of_k, of_v = group * x.queries * x.head_dim, x.keys * x.head_dim, x.keys * x.value_dim
    end = kv * x.itemsize * (of_q + of_k + of_v + max(of_k, of_v)) + given
    found = (4 if normalize else 1) * x.value_dim + (x.value_dim if cast else 0)
    pairs_back = max(group, 2 * group * gated, (1 + gated) * delta) * c * c
    stepping = pairs_back + group * c * (wide + f)
    if x.fine_gate:
        stepping += (2 + 2 * group) * c * c * f
    block = max(c, min(BLOCK, s.late))
    at_once = x.flowing if s.paired or s.late > BLOCK else 0
    featuring = (2 * f if features.projected else wide + f) - (wide if normalize else 0)
    reading = max(kv * a * block * group * found + x.flowing, kv * a * block * group * featuring + at_once)
    working = max(reading, kv * a * stepping + at_once) + kv * a * 2 * f * wide
    # By the time that the keys before the first query are reached, what was kept of all others is gone.
    back = max(2 * f + wide if features.projected else 0, (1 + gated) * f + wide)
    first = kv * a * (s.early * of_key + min(BLOCK, s.early) * back + 2 * f * wide) + given + kv * x.itemsize * of_q
    return max(kept + working, first, end), kept

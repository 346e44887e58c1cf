"""A method that approximates on sketches: what it is given beside q, k and v, and its own steps."""

from attention_service.core import steps
from attention_service.core.methods import Given
from attention_service.core.tape import ROWS, SPLIT, Sketch, Tape
from attention_service.cost.approximate import approximated, reach_in
from attention_service.cost.sketched import Sketched, looked_through, parameters_of, real_keys, without_padding
from attention_service.cost.workload import Workload


def approximate(tape: Tape, given: Sketched) -> Sketch:
    """The context."""
    work, method = given.work, approximated(given.work)
    if method is None:
        raise ValueError("exact attention is counted by its kernels")
    log_gate, beta = gates(tape, given)
    if work.spec.masks:
        looked_through(tape, given.work, given.k, given.v)
    clean = without_padding(tape, given)
    a = max(work.itemsize, 4)
    lead = work.batch, work.kv_heads, work.head_dim
    shapes = {"initial_state": (*lead, work.value_dim), "initial_normalizer": lead}
    before = {name: tape.leaf(shape, a) for name, shape in shapes.items() if name in work.sent}
    return method.sketched(
        tape,
        Given(
            clean.q, clean.k, clean.v, work.spec, given.learned, reach_in(work), work.past, real_keys(tape, work),
            log_gate, beta, before.get("initial_state"), before.get("initial_normalizer"), work.sent,
        ),
    )  # fmt: skip


def whole(tape: Tape, work: Workload) -> Sketched:
    """Queries, keys and values as if they had come by head."""
    e, batch = work.itemsize, work.batch
    q = tape.leaf((batch, work.heads, work.queries, work.head_dim), e)
    k = tape.leaf((batch, work.kv_heads, work.keys, work.head_dim), e)
    v = tape.leaf((batch, work.kv_heads, work.keys, work.value_dim), e)
    tokens = k if work.sizes is None else tape.leaf((batch, work.new_keys, work.sizes.d_model), e)
    return Sketched(work, q, k, v, parameters_of(tape, work).learned, tokens)


def gates(tape: Tape, given: Sketched) -> tuple[Sketch | None, Sketch | None]:
    """The logarithm of the gate, and β: of a module made from the tokens of its keys, of raw attention sent."""
    work, a = given.work, max(given.work.itemsize, 4)
    learned = given.learned
    log_gate = beta = None
    if "method.gate.weight" in learned:
        log_gate = _log_sigmoid(tape, _rates(tape, given, "gate"))
    elif "gate" in work.sent:
        width = work.head_dim if work.fine_gate else 1
        sent = tape.leaf((work.batch, work.kv_heads, work.new_keys, width), work.itemsize)
        log_gate = steps.quotient(tape, steps.clamped(tape, steps.cast(tape, sent, a)))
    if "method.beta.weight" in learned:
        beta = steps.saved(tape, _rates(tape, given, "beta"))
    elif "beta" in work.sent:
        sent = tape.leaf((work.batch, work.kv_heads, work.new_keys, 1), work.itemsize)
        beta = steps.cast(tape, sent, a)
    return log_gate, beta


def _rates(tape: Tape, given: Sketched, name: str) -> Sketch:
    weight, bias = (given.learned[f"method.{name}.{part}"] for part in ("weight", "bias"))
    rows = steps.linear(tape, given.tokens, weight, bias)
    batch, length, heads = rows.dims
    made = Sketch((batch, heads, length, 1), rows.itemsize, SPLIT, tracked=rows.tracked)

    def step() -> None:
        if made.gradient_lies == ROWS and min(batch, heads, length) > 1:
            tape.does(made.returned, made.bytes)
        tape.give(rows, rows.size)

    if made.tracked:
        tape.later(made, step)
    return steps.cast(tape, made, max(made.itemsize, 4))


def _log_sigmoid(tape: Tape, x: Sketch) -> Sketch:
    """The logarithm of σ(x), and what is kept of it for the way back."""
    y = steps.like(x)
    tape.does(x.bytes, 2 * y.bytes, 2 * y.size)

    def step() -> None:
        tape.does(y.returned + x.bytes + y.bytes, x.bytes)
        tape.give(x, x.size)

    return tape.later(y, step) if y.tracked else y

"""Peak memory of a Hopfield retrieval, by phase: what came, the results, and a block of states as it falls."""

from attention_service.core.cost.factors_memory import Rows
from attention_service.core.cost.pairs import masks_of
from attention_service.core.cost.phases import Ledger, Phase, peak_of
from attention_service.core.cost.retrieval import Retrieval
from attention_service.core.cost.stages_memory import stages


def retrieval_peak_bytes(r: Retrieval) -> int:
    """The most that is held at a time."""
    return peak_of(retrieval_phases(r))


def retrieval_phases(r: Retrieval) -> tuple[Phase, ...]:
    """What is held in each phase, by tensor."""
    ledger = Ledger()
    _load(ledger, r)
    each = r.batch * r.heads * r.states
    association = r.pairs * r.itemsize if r.association else 0
    # States, energies, five numbers in the dtype of the states, two in int64.
    ledger.hold(results=each * ((r.width + r.steps + 6) * r.itemsize + 16) + association)
    _fall(ledger, r)
    ledger.drop("states", "patterns")
    if r.output_width is not None:
        turned = each * r.width * r.itemsize if r.batch > 1 else 0
        matrix = r.heads * r.output_width * r.width * r.itemsize
        ledger.phase("project out", matrix=matrix, projected=turned, output=each * r.output_width * r.itemsize)
    return ledger.phases


def _load(ledger: Ledger, r: Retrieval) -> None:
    """States and patterns as they came, without padding, and projected one after the other."""
    e, inner = r.itemsize, r.heads * r.width
    came = {
        "states": r.batch * r.states * (inner if r.state_width is None else r.state_width) * e,
        "patterns": r.batch * r.patterns * (inner if r.stored_width is None else r.stored_width) * e,
    }
    ledger.hold(**came)
    ledger.phase("inputs", without_padding=came["patterns"] if r.masked else 0)
    for name, count, width in (("states", r.states, r.state_width), ("patterns", r.patterns, r.stored_width)):
        if width is not None:
            made = r.batch * count * inner * e
            ledger.phase("project", matrix=inner * width * e, projected=made)
            ledger.drop(name)
            ledger.hold(**{name: made})


def _fall(ledger: Ledger, r: Retrieval) -> None:
    """One block of states, update by update, and what is found of them at the end."""
    e, work = r.itemsize, r.work(r.rows)
    block = r.batch * r.heads * r.rows
    lying = r.merged and r.heads > 1 and r.batch > 1 and not r.masked
    stored = r.batch * r.heads * r.patterns * r.width * e
    held = dict(ledger.held)
    ledger.hold(state=block * (r.width * e + 1), weights_before=block * r.patterns * e)
    ledger.phase("begin")
    # Of the states that still fall a copy, where there are others, and all of them multiplied by beta.
    ledger.hold(queries=block * r.width * e * (2 if r.settles and r.steps > 1 else 1))
    falling = dict(ledger.held)
    for taps in (frozenset({"masked_scores", "weights", "context"}), frozenset({"lse"})):
        ledger.held = dict(falling)
        if "lse" in taps and not r.settles:  # what they fell from last
            ledger.hold(state=block * r.width * e)
        ledger.phase("scores", laid_out=stored if lying else 0, scores=block * r.patterns * e)
        stages(ledger, work, Rows(r.heads, r.rows), masks_of(work), taps)
        if "context" in taps:
            ledger.phase("update", laid_out=stored if lying else 0)
            ledger.phase("update", difference=block * r.width * e)
    ledger.held = dict(falling)
    ledger.drop("queries")
    ledger.phase("describe", entropy=block * r.patterns * e, nearest=2 * block * r.width * e)
    ledger.held = held

"""Computed results as tables for people."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from attention_client.cli.display import new_table, number, print_out, scaled, tensors
from attention_client.cli.tensor_arguments import tensors as tensors_of
from attention_contract.schemas.accuracy import AccuracyReply
from attention_contract.schemas.attention import ApproximationError, ForwardReply, Ran
from attention_contract.schemas.effects import EffectsReply
from attention_contract.schemas.gradients import GradientsReply
from attention_contract.schemas.hopfield import HopfieldReply
from attention_contract.schemas.weights import HeadStatistics, TopKeys, WeightsReply
from attention_contract.tensors import dtype_name

_ONE_OF = {"heads": "head", "queries": "query", "keys": "key"}
MAX_ROWS = 64
"""Rows that the tables of top keys and of states show; --json and -o give all."""


def ran(reply: Ran) -> None:
    """Print one line on what ran."""
    at = f" version {reply.version[:12]}" if reply.version else ""
    print_out(
        Text(
            f"{reply.kernel} on {reply.device} in {reply.dtype}{at}: {scaled(reply.flops, 'FLOP')}, "
            f"{reply.compute_ms:.3g} ms (predicted {reply.predicted_ms:.3g}, from {reply.predicted_low_ms:.3g} to "
            f"{reply.predicted_high_ms:.3g}; queued {reply.queue_ms:.3g}), "
            f"up to {scaled(reply.peak_bytes, 'B')}, batch of {reply.batch}",
            style="dim",
        )
    )


def forward(reply: ForwardReply) -> None:
    """Print one row for each tensor, and the error of an approximate method."""
    tensors(tensors_of(reply))
    if reply.error is not None:
        error(reply.error)
    ran(reply.ran)


def weights(reply: WeightsReply, chosen: list[int] | None, rows: list[int] | None) -> None:
    """Print the statistics of each head, their differences and the top keys, of the chosen heads and queries."""
    heads(reply.statistics, chosen)
    if reply.differences is not None:
        heads(reply.differences.statistics, chosen)
    if reply.top is not None:
        top_keys(reply.top, chosen, rows)
    ran(reply.ran)


def error(reply: ApproximationError) -> None:
    """Print one line on the distance of a method from exact attention."""
    kl = "" if reply.mean_kl is None else f", mean KL {reply.mean_kl:.3g} nats"
    print_out(Text(f"from exact attention: at most {reply.max:.3g}, root mean square {reply.rms:.3g}{kl}"))


def _batched(array: NDArray[Any], rank: int) -> NDArray[Any]:
    """Add the batch dimension if the reply has none."""
    return array if array.ndim == rank else array[None]


def heads(statistics: HeadStatistics, chosen: list[int] | None) -> None:
    """Print the statistics of each head; entropy in nats, distance in tokens."""
    found = {name: getattr(statistics, name) for name in HeadStatistics.model_fields if name != "classes"}
    found |= {f"class {name}": share for name, share in (statistics.classes or {}).items()}
    values = {name: _batched(value, 2) for name, value in found.items() if value is not None}  # [B, H] each
    table = new_table("sequence", "head", *(name.replace("_", " ") for name in values), left=0)
    columns = list(values.values())
    if not columns:
        return
    for sequence, head in np.ndindex(columns[0].shape[:2]):
        if not chosen or head in chosen:
            table.add_row(str(sequence), str(head), *(number(column[sequence, head]) for column in columns))
    print_out(table)


def top_keys(top: TopKeys, chosen: list[int] | None, rows: list[int] | None) -> None:
    """Print the most attended keys of each query, each with its weight."""
    keys, weights = _batched(top.keys, 4), _batched(top.weights, 4)  # [B, H, Lq, k]
    table = new_table("sequence", "head", "query", "key (weight), the largest first", left=0)
    table.columns[-1].justify = "left"
    lines = list(np.ndindex(keys.shape[:3]))
    for sequence, head, query in lines[:MAX_ROWS]:
        pairs = zip(keys[sequence, head, query], weights[sequence, head, query], strict=True)
        named = (str(sequence), str(chosen[head] if chosen else head), str(rows[query] if rows else query))
        table.add_row(*named, "  ".join(f"{key} ({float(weight):.3f})" for key, weight in pairs if key >= 0))
    print_out(table)
    _more(len(lines))


def effects(reply: EffectsReply) -> None:
    """Print one row for each edit of a sweep, the largest effect of a sequence first."""
    axes = list(reply.swept)
    found = {name: getattr(reply.effects, name) for name in type(reply.effects).model_fields}
    columns = {name: _batched(x, 1 + len(axes)) for name, x in found.items() if x is not None}  # [B, *swept]
    table = new_table("sequence", *(_ONE_OF[axis] for axis in axes), *columns, left=0)
    norms = columns["norm"]
    lines = sorted(np.ndindex(norms.shape), key=lambda at: (at[0], -norms[at]))
    for at in lines[:MAX_ROWS]:
        named = (reply.swept[axis][place] for axis, place in zip(axes, at[1:], strict=True))
        table.add_row(str(at[0]), *map(str, named), *(number(column[at]) for column in columns.values()))
    print_out(table)
    _more(len(lines))
    ran(reply.ran)


def _more(rows: int) -> None:
    if rows > MAX_ROWS:
        print_out(Text(f"… and {rows - MAX_ROWS} more rows; --json and -o give all of them", style="dim"))


def retrieved(reply: HopfieldReply) -> None:
    """Print one row for each state: its energy, its pattern and its kind."""
    reached = reply.reached
    table = new_table(
        "sequence", "head", "state", "steps", "energy before", "after", "pattern", "weight", "distance", "mixture of",
        "", left=0,
    )  # fmt: skip
    table.columns[-1].justify = "left"
    shape = (1,) * (3 - reply.steps.ndim) + reply.steps.shape  # a missing batch or head dimension stands for one
    numbers = [x.reshape(shape) for x in (reached.weight, reached.distance, reached.mixed)]
    steps, pattern, single = (x.reshape(shape) for x in (reply.steps, reached.pattern, reached.single))
    energy = reply.energy.reshape(*shape, -1)
    settled = None if reply.converged is None else reply.converged.reshape(shape)
    lines = list(np.ndindex(*shape))
    for at in lines[:MAX_ROWS]:
        weight, distance, mixed = (number(x[at]) for x in numbers)
        what = "one pattern" if single[at] else "metastable"
        what += "" if settled is None or settled[at] else ", still falling"
        fell = (number(energy[at][0]), number(energy[at][-1]))
        table.add_row(*map(str, at), str(steps[at]), *fell, str(pattern[at]), weight, distance, mixed, what)
    print_out(table)
    _more(len(lines))
    ran(reply.ran)


def gradients(reply: GradientsReply) -> None:
    """Print one row for each gradient, with its check if there is one."""
    checks = reply.check or {}
    extra = ("relative error", "absolute error", "elements", "check") if checks else ()
    table = new_table("∂L/∂", "shape", "dtype", "norm", "largest", *extra, left=3)
    for name, array in reply.gradients.items():
        wide = array.astype(np.float64)
        row = [number(np.linalg.norm(wide)), number(np.abs(wide).max(initial=0.0))]
        if name in checks:
            check = checks[name]
            errors = (number(check.max_relative_error), number(check.max_absolute_error), str(check.elements))
            row += [*errors, "passed" if check.passed else "[red]failed[/red]"]
        table.add_row(name, str(list(array.shape)), dtype_name(array), *row)
    print_out(table)
    if reply.hessian_products is not None:
        print_out("Hessian-vector products")
        tensors(reply.hessian_products)
    ran(reply.ran)


def accuracy(reply: AccuracyReply) -> None:
    """Print one row for each kernel and purpose; errors are measured over predicted time, less 1."""
    table = new_table(
        "kernel", "purpose", "requests", "median error", "mean", "median size", "95 % within", "in the interval", left=2
    )
    for row in reply.predictions:
        errors = (row.median_error, row.mean_error)
        sizes = (row.median_absolute_error, row.p95_absolute_error, row.coverage)
        shares = (*(f"{value:+.1%}" for value in errors), *(f"{value:.1%}" for value in sizes))
        table.add_row(row.kernel, row.purpose, str(row.count), *shares)
    print_out(table)
    basis = {"calibrated": "runs of each kernel", "rates": "rates of the device", "datasheet": "its maker's figures"}
    again = " again" if reply.basis == "calibrated" else ""
    now = f"; it is being measured{again} now" if reply.recalibrating else ""
    print_out(Text(f"{reply.device}: predicted from {basis[reply.basis]}{now}", style="dim"))

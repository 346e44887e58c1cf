"""Predicted costs as tables for people."""

from collections.abc import Sequence

from rich.text import Text

from attention_client.cli.display import new_table, number, print_out, scaled
from attention_contract.schemas.answers import CostLimits, Crossover, Fits, Largest
from attention_contract.schemas.complexity import Compared, ComplexityReply, Cost, Growth, Shape, Sweep
from attention_contract.schemas.hardware import HardwareList
from attention_contract.schemas.session_costs import SessionCost

_UNITS = {"time": "is faster", "peak_bytes": "needs less memory", "flops": "takes fewer FLOPs"}
_SAME = {"time": "take the same time", "peak_bytes": "need the same memory", "flops": "take the same FLOPs"}


def costs(reply: ComplexityReply, sweep: Sweep | None) -> None:
    """Print one row for each shape and alternative; then the growth, the limits and the crossovers."""
    compared = bool(reply.compared)
    shown = reply.series
    beside = _beside_shapes(sweep)
    table = new_table(
        *(["of"] if compared else []), "kernel", *beside, "batch", "queries", "keys", "past", "forward FLOP",
        "backward FLOP", "kv cache", "peak", "ms", "nine of ten", left=1 + compared,
    )  # fmt: skip
    for at in range(len(reply.costs)):
        for one in shown:
            cost, sizes = one.costs[at], [str(values[at]) for values in beside.values()]
            table.add_row(*([one.label] if compared else []), cost.kernel, *sizes, *_row(cost))
    print_out(table)
    for one in shown:
        label = f"{one.label}: " if compared else ""
        print_out(Text(label + _growth(one, len(reply.costs)), style="dim"))
        print_out(Text(label + _last(one.costs[-1]), style="dim"))
    letters = {letter: meaning for one in shown for letter, meaning in one.growth.letters.items()}
    print_out(Text("; ".join(f"{letter}: {meaning}" for letter, meaning in letters.items()), style="dim"))
    _limits(shown)
    if reply.session is not None:
        _session(reply.session)
    if reply.projections_crossover is not None:
        print_out(f"attention outweighs the projections from {reply.projections_crossover} tokens on")
    for crossover in reply.crossovers:
        print_out(_crossover(crossover))


def _beside_shapes(sweep: Sweep | None) -> dict[str, list[int]]:
    """Return the size that a sweep varies, unless it is one of the shape's own, which have columns anyway."""
    if sweep is None or sweep.dimension in {"length", *Shape.model_fields}:
        return {}
    return {sweep.dimension.replace("_", " "): sweep.values}


def _row(cost: Cost) -> list[str]:
    shape, forward = cost.shape, cost.predicted.forward
    sizes = (shape.batch, shape.queries, shape.keys or shape.queries, shape.past)
    flops = (cost.executed_flops, cost.executed_backward_flops)
    memory = (cost.kv_cache_bytes, cost.peak_bytes.request)
    return [
        *map(str, sizes),
        *("" if value is None else scaled(value) for value in flops),
        *(scaled(value, "B") for value in memory),
        number(cost.predicted_ms),
        f"{number(forward.low_ms)} to {number(forward.high_ms)}",
    ]


def _growth(one: Compared, shapes: int) -> str:
    growth: Growth = one.growth
    orders = f"time {growth.time_order}, memory {growth.memory_order}"
    orders += f"; {scaled(one.parameter_count)} parameters" if one.parameter_count else ""
    if shapes == 1:
        return orders
    found = (
        ("FLOPs grow", growth.flops_exponent),
        ("time", growth.time_exponent),
        ("peak memory", growth.peak_bytes_exponent),
    )
    size = growth.dimension
    grown = ", ".join(f"{what} as {size}^{exponent:.2f}" for what, exponent in found if exponent is not None)
    return f"with {size}: {grown}; {orders}"


def _last(cost: Cost) -> str:
    """Return a line on the cost of a token in the last row, of a decode step and of gradients."""
    token, predicted = cost.per_token, cost.predicted
    told = [
        f"a token of the last row: {scaled(token.flops, 'FLOP')}, {number(token.predicted_ms)} ms, "
        f"{scaled(token.kv_cache_bytes, 'B')} of kv cache"
    ]
    told += [] if predicted.decode is None else [f"a decode step there {number(predicted.decode.median_ms)} ms"]
    told += [] if predicted.gradients is None else [f"gradients {number(predicted.gradients.median_ms)} ms"]
    return "; ".join(told)


def _session(cost: SessionCost) -> None:
    """Print one row for each past of a priced session, then the bytes of a token and the longest past."""
    table = new_table("a session's past", "held", "pages", "ms a step", "nine of ten")
    for step in cost.steps:
        time = step.predicted
        span = f"{number(time.low_ms)} to {number(time.high_ms)}"
        table.add_row(str(step.past), str(step.held), scaled(step.bytes, "B"), number(time.median_ms), span)
    print_out(table)
    longest = "any length fits" if cost.longest is None else f"at most {cost.longest} tokens fit"
    free = scaled(cost.free_bytes, "B")
    print_out(f"a token takes {scaled(cost.token_bytes, 'B')}, in pages of {cost.page_tokens}; {longest} in {free}")


def _limits(shown: Sequence[Compared]) -> None:
    table = new_table("what fits", "free", "longest", "with", "largest batch", "with", left=1)
    for one in shown:
        limits: CostLimits = one.limits
        for name, fits in (("forward", limits.forward), ("gradients", limits.gradients)):
            if fits is not None:
                label = f"{one.label}, {name}" if len(shown) > 1 else name
                table.add_row(f"{label} ({one.device_name})", scaled(limits.free_bytes, "B"), *_fits(fits))
    print_out(table)


def _fits(fits: Fits) -> list[str]:
    return [*_largest(fits.longest), *_largest(fits.largest_batch)]


def _largest(found: Largest) -> tuple[str, str]:
    bound = {"memory": "", "spec": " (the spec has room for)", "shape": " (the largest there is)"}[found.bound]
    return f"{found.size}{bound}", found.kernel or ""


def _crossover(found: Crossover) -> str:
    """Return a sentence on the size from which one alternative costs less."""
    first, last = found.searched
    if found.cheaper is None:
        one, other = found.between
        return f"{one} and {other} {_SAME[found.of]} at {found.dimension} {last}"
    other = found.between[int(found.between[0] == found.cheaper)]
    does = f"{found.cheaper} {_UNITS[found.of]} than {other}"
    if found.at is None:
        return f"{does} at every {found.dimension} from {first} to {last}"
    told = f"{does} from {found.dimension} {found.at} on"
    if found.of != "time":
        return told
    low = "any" if found.low is None else str(found.low)
    sure = f"only beyond {last}" if found.high is None else f"from {found.high}"
    ran = "" if found.measured is None else f"; when run, from {found.measured}"
    return f"{told}: perhaps from {low}, surely {sure}{ran}"


def hardware(reply: HardwareList) -> None:
    """Print one row for each device, with the source of its figures."""
    dtypes = ("float64", "float32", "float16", "bfloat16")
    table = new_table("hardware", "memory", "GB/s", "link GB/s", *(f"{dtype} TFLOP/s" for dtype in dtypes), "source")
    table.columns[-1].justify = "left"
    for one in reply.hardware:
        rates = [number(one.tflops[dtype]) if dtype in one.tflops else "" for dtype in dtypes]
        sizes = (scaled(one.memory_bytes, "B"), number(one.bandwidth_gb_s), number(one.link_gb_s))
        table.add_row(one.name, *sizes, *rates, Text("; ".join(source.title for source in one.sources)))
    print_out(table)

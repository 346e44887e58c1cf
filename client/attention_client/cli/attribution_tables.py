"""Attributions as tables for people."""

import numpy as np
from rich.text import Text

from attention_client.cli import result_tables
from attention_client.cli.display import new_table, number, print_out
from attention_contract.schemas.attribution import AttributionReply, Attributions


def attributions(reply: AttributionReply) -> None:
    """Print one row for each result, the accuracy of the path, and the differences if there are any."""
    _tensors(reply, "attribution")
    if (found := reply.completeness) is not None:
        gap, whole = np.abs(found.gap).max(initial=0.0), np.abs(found.expected).max(initial=0.0)
        print_out(Text(f"integrated: the sum misses L(A) − L(0) by at most {number(gap)}, of at most {number(whole)}"))
    if reply.differences is not None:
        _tensors(reply.differences, "difference")
    result_tables.ran(reply.ran)


def _tensors(found: Attributions, title: str) -> None:
    table = new_table(title, "shape", "sum", "smallest", "largest", "at", left=1)
    for name in Attributions.model_fields:
        array = getattr(found, name)
        if array is None or not array.size:
            continue
        wide = array.astype(np.float64)
        at = ", ".join(str(index) for index in np.unravel_index(np.abs(wide).argmax(), wide.shape))
        table.add_row(
            name, str(list(array.shape)), number(wide.sum()), number(wide.min()), number(wide.max()), f"[{at}]"
        )
    print_out(table)

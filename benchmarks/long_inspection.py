"""Statistics of the weights of long sequences: memory beyond the inputs, and time.

``python -m benchmarks.long_inspection --quick`` prints a table; ``--output FILE`` writes it.
"""

import resource
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import torch

from attention_contract.schemas.weights import RawWeightsRequest
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import weights
from benchmarks.page import parser, publish
from benchmarks.tables import short, table

TEXT = """One request for the five default statistics of raw self-attention, float32, head width 64, without the
weights. Each length runs in a process of its own with one thread. `planned` is the memory of tensors that the request
is admitted for beyond its inputs. `held` is the growth of the process's largest resident size while it runs, with what
PyTorch loads at its first product and what the allocator keeps. All weights of one head together would take `weights of
a head`."""
HEADS, WIDTH = 12, 64
LENGTHS, QUICK = (4096, 8192, 16384, 32768), (1024, 2048)
_MIB = 2**20


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__, 1).parse_args()
    lengths = QUICK if options.quick else LENGTHS
    publish("Statistics of long sequences", TEXT, lines(lengths), options.output, ("torch",))


def lines(lengths: Sequence[int], heads: int = HEADS) -> Iterator[str]:
    """One row for each length."""
    head = ["keys × heads", "planned MiB", "held MiB", "weights of a head MiB", "predicted s", "s"]
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as one_each:
        yield table(head, one_each.map(row, lengths, [heads] * len(lengths)))


def row(length: int, heads: int) -> tuple[str, ...]:
    """Measure one length in this process, which nothing large ran in before."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal((1, heads, length, WIDTH), dtype=np.float32) for _ in range(3)]
    query, key, value = inputs
    request = RawWeightsRequest(query=query, key=key, value=value, return_weights=False)
    job = weights.prepare(None, request, Device.open("cpu", 1), 2**40)
    before = _largest()
    started = time.perf_counter()
    job.run()
    took = time.perf_counter() - started
    planned = job.plan.peak_bytes - sum(array.nbytes for array in inputs)
    sizes = (short(size / _MIB) for size in (planned, _largest() - before, 4 * length**2))
    return f"{length:,} × {heads}", *sizes, short(job.plan.predicted.median), short(took)


def _largest() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()

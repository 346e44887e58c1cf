"""Graphs on a GPU that is not there: nothing in a captured pass waits for it, or copies from or to the host."""

import numpy as np
import pytest

from attention_contract.schemas.attention import ForwardRequest
from attention_service.runtime.device import cuda_graphs
from attention_service.runtime.device.cuda_graphs import OFTEN, Graphs
from attention_service.runtime.operations import forward
from tests.runtime.operations.test_graphs import SPECS

ANY = 2**40


class Capturing:
    """Runs a pass once, as a stream does that is captured."""

    def __init__(self):
        self.counts = None

    def __call__(self, run, inputs):
        self.counts.capturing = True
        try:
            outputs = run(inputs)
        finally:
            self.counts.capturing = False
        return lambda: outputs


CASES = {name: (more, "bfloat16") for name, more in SPECS.items()} | {
    "float32": (next(iter(SPECS.values())), "float32")
}


@pytest.mark.parametrize(("more", "dtype"), CASES.values(), ids=CASES)
@pytest.mark.slow
def test_a_pass_that_is_captured_does_nothing_illegal_and_is_replayed_by_few_calls(cuda, monkeypatch, more, dtype):
    seconds = iter(range(9))
    monkeypatch.setattr(cuda_graphs, "_seconds", lambda _: next(seconds))
    capture = Capturing()
    device, module = cuda.device(graphs=Graphs(capture)), cuda.module(dtype, d_model=64, num_heads=4, **more)
    job = forward.prepare(module, ForwardRequest(query=np.zeros((3, 10, 64), np.float32)), device, ANY)
    for _ in range(OFTEN):
        cuda.run(job, device)
    with cuda.counted() as capture.counts:
        device.graphs.capture_next(ANY)
    assert (len(device.graphs), capture.counts.illegal, capture.counts.mixed) == (1, [], [])
    fields, counts = cuda.run(job, device)
    assert fields["output"].shape == (3, 10, 64)
    assert device.graphs.replays == 1
    assert not counts.launches, "all is in the graph, copies too"
    assert not counts.uploads
    assert not counts.downloads
    assert not counts.mixed

"""Graphs of a device: which are captured, kept and dropped; and on a GPU, the numbers of the pass without one."""

import gc
import time

import numpy as np
import pytest
import torch

from attention_contract.schemas.attention import ForwardRequest
from attention_contract.schemas.modules import ModuleConfig
from attention_service.core.multihead import Sizes, initial_parameters
from attention_service.modules.resident import Module, complete
from attention_service.runtime.binding.module_binding import bind
from attention_service.runtime.device.cuda_graphs import MOST, OFTEN, Graphs
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import cuda_graph_forward, forward
from attention_service.runtime.scheduling.operation import execute


def module(seed=0, **more):
    config = complete(ModuleConfig(d_model=32, num_heads=4, **more))
    return Module.of("m", config, initial_parameters(Sizes.of(config), seed, torch.float32))


def doubled(tensors):
    return (2 * tensors["query"],)


class Recorder:
    """Captures as a GPU does: what is replayed reads the inputs that it was given, and is quicker."""

    def __init__(self, *, fails=False):
        self.captures = self.replays = 0
        self.fails = fails

    def __call__(self, run, inputs):
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captures += 1

        def replay():
            self.replays += 1
            return (inputs["query"] * 2,)

        return replay


def slow(tensors):
    time.sleep(1e-3)
    return doubled(tensors)


def ask(graphs, of, times=1, length=3, need=100, run=slow, key="k"):
    for value in range(times):
        x = torch.full((length,), float(value))
        assert torch.equal(graphs.run(of, key, need, run, {"query": x})[0], 2 * x)


def test_what_comes_often_is_captured_once_and_replayed_on_what_came():
    recorder = Recorder()
    graphs, of = Graphs(recorder), module()
    ask(graphs, of, OFTEN - 1)
    assert recorder.captures == 0
    ask(graphs, of, 5)
    assert (recorder.captures, len(graphs), graphs.bytes) == (1, 1, 100)
    ask(graphs, of, OFTEN - 1, length=4)
    ask(graphs, of, OFTEN - 1, key="another")
    assert recorder.captures == 1, "of each shape and key by itself"


def test_a_replaced_module_takes_its_graphs_with_it():
    recorder = Recorder()
    graphs, of = Graphs(recorder), module()
    ask(graphs, of, OFTEN)
    assert len(graphs) == 1
    del of
    gc.collect()
    assert len(graphs) == 0
    ask(graphs, module(1), OFTEN - 1)
    assert recorder.captures == 1


def test_what_can_not_be_captured_runs_as_before():
    graphs, of = Graphs(Recorder(fails=True)), module()
    ask(graphs, of, 3 * OFTEN)
    assert len(graphs) == 0


def test_what_is_no_faster_is_not_kept():
    def capture(run, inputs):
        return lambda: slow(inputs)

    graphs, of = Graphs(capture), module()
    ask(graphs, of, 2 * OFTEN, run=doubled)
    assert len(graphs) == 0


def test_they_stay_within_their_room_and_number():
    of = module()
    graphs = Graphs(Recorder(), room=250)
    for key in range(4):
        ask(graphs, of, OFTEN, key=key)
    assert (len(graphs), graphs.bytes) == (2, 200)
    ask(graphs, of, OFTEN, key="large", need=251)
    assert (len(graphs), graphs.bytes) == (2, 200)
    many = Graphs(Recorder())
    for key in range(MOST + 2):
        ask(many, of, OFTEN, key=key, need=0)
    assert len(many) == MOST
    none = Graphs(Recorder(), room=0)
    ask(none, of, 2 * OFTEN, need=1)
    assert len(none) == 0


X = np.random.default_rng(0).standard_normal((2, 5, 32)).astype(np.float32)


@pytest.mark.parametrize(
    ("more", "taken"),
    [
        ({}, True),
        ({"key": X, "value": X}, True),
        ({"return_": ["output", "weights"]}, False),
        ({"key_lengths": np.array([3, 5])}, False),
        ({"mask": np.ones((5, 5), dtype=bool)}, False),
        ({"edits": [{"tap": "weights", "heads": [0], "set": 0}]}, False),
        ({"dropout": {"p": 0.5, "seed": 1}}, False),
    ],
)
def test_plain_passes_are_taken(more, taken):
    request = ForwardRequest.model_validate({"query": X} | {name.removesuffix("_"): x for name, x in more.items()})
    bound = bind(module(), request)
    assert cuda_graph_forward.takes(bound, request, "fused") == taken
    assert not cuda_graph_forward.takes(bound, request, "materialized")


@pytest.mark.parametrize("wrong", [None, np.nan], ids=str)
def test_the_numbers_of_the_pass_without_a_graph(wrong):
    """On a CPU nothing is captured, and the same function runs."""
    device = Device.open("cpu")
    of, x = module(spec={"masks": [{"name": "causal"}]}), X.copy()
    if wrong is not None:
        x[1, 3] = wrong
    request = ForwardRequest(query=x)
    expected = forward.prepare(of, request, device, 2**40).run()["output"]
    bound = bind(of, request)
    for _ in range(OFTEN + 2):
        found = execute(cuda_graph_forward.Graphed(bound, "fused", 100, device), device.torch)["output"]
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [{}, {"masks": [{"name": "causal"}]}], ids=["dense", "causal"])
def test_graphs_on_a_gpu_give_the_numbers_of_each_request(spec):
    device, of = Device.open("cuda"), module(spec=spec).on(torch.device("cuda"))
    plain = module(spec=spec)
    for seed in range(OFTEN + 4):
        x = np.random.default_rng(seed).standard_normal((2, 5, 32)).astype(np.float32)
        found = forward.prepare(of, ForwardRequest(query=x), device, 2**40).run()["output"]
        expected = forward.prepare(plain, ForwardRequest(query=x), Device.open("cpu"), 2**40).run()["output"]
        np.testing.assert_allclose(found, expected, atol=1e-3)
    x[0, 2] = np.nan  # looked at closer, as without a graph
    found = forward.prepare(of, ForwardRequest(query=x), device, 2**40).run()["output"]
    assert np.isfinite(found[1]).all()
    assert np.isnan(found[0, 2]).all()

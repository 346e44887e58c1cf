"""Graphs of a device: which are captured, kept and dropped; the numbers of padded passes; and the same on a GPU."""

import asyncio
import gc
import random
import time
from itertools import cycle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.stand_in_gpu import stand_in_gpu

from attention_contract.schemas.attention import ForwardRequest
from attention_contract.schemas.modules import CreateModule, ModuleConfig
from attention_service.core.multihead import Sizes, initial_parameters
from attention_service.engine import Engine
from attention_service.engine_settings import EngineSettings
from attention_service.modules.resident import Module, complete
from attention_service.runtime.binding.module_binding import bind
from attention_service.runtime.device import cuda_graphs
from attention_service.runtime.device.cuda_graphs import IDLE, MOST, OFTEN, Captures, Graphs, Recipe
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import cuda_graph_forward, forward
from attention_service.runtime.operations.cuda_graph_forward import MOST_TOKENS, PaddedSizes
from attention_service.runtime.scheduling.operation import execute

ANY = 2**40


def module(seed=0, **more):
    config = complete(ModuleConfig(d_model=32, num_heads=4, **more))
    return Module.of("m", config, initial_parameters(Sizes.of(config), seed, torch.float32))


class Doubled(Recipe):
    """A pass that doubles its input, and needs some bytes."""

    def __init__(self, need=100):
        self.needed = need

    def inputs(self):
        return {"query": torch.zeros(3)}

    def run(self, module, tensors):
        time.sleep(1e-3)
        return (2 * tensors["query"],)

    def need(self, module):
        return self.needed


class Recorder:
    """Captures as a GPU does: what is replayed reads the inputs that it was given, and is quicker."""

    def __init__(self, *, fails=False):
        self.captures = 0
        self.fails = fails

    def __call__(self, run, inputs):
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captures += 1
        return lambda: tuple(2 * x for x in inputs.values())


class Replaying:
    """Captures nothing: a replay runs the pass. Every one is said to be quicker than the pass."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(cuda_graphs, "_seconds", lambda run: 0.0 if hasattr(run, "__name__") else 1.0)  # or partial

    def __call__(self, run, inputs):
        def replay():
            return run(inputs)

        return replay


@pytest.fixture
def quicker(monkeypatch):
    """Every replay is said to be quicker than the pass; nothing runs."""
    seconds = iter(range(10**9))
    monkeypatch.setattr(cuda_graphs, "_seconds", lambda _: next(seconds))


def ask(graphs, of, times=1, key="k", need=100, *, captures=True, spare=ANY):
    """Ask for a pass; capture what is wanted between the passes."""
    graph = None
    for value in range(times):
        graph = graphs.find(of, key, lambda: Doubled(need))
        if graph is not None:
            x = torch.full((3,), float(value))
            assert torch.equal(graph.replay({"query": x})[0], 2 * x)
        if captures:
            graphs.capture_next(spare)
    return graph


def test_what_comes_often_is_captured_between_passes_and_replayed_on_what_came():
    graphs, of = Graphs(Recorder()), module()
    ask(graphs, of, OFTEN - 1)
    assert not graphs.are_wanted
    assert ask(graphs, of, captures=False) is None
    assert (graphs.captures, graphs.are_wanted) == (0, True), "never within a request"
    graphs.capture_next(ANY)
    assert (graphs.captures, len(graphs), graphs.bytes, graphs.are_wanted) == (1, 1, 100, False)
    assert ask(graphs, of, 5) is not None
    assert graphs.replays == 5
    ask(graphs, of, OFTEN - 1, key="another")
    assert graphs.captures == 1, "of each key by itself"


def test_a_replaced_module_takes_its_graphs_with_it_and_is_not_kept_by_those_that_wait():
    graphs, of = Graphs(Recorder()), module()
    ask(graphs, of, OFTEN)
    ask(graphs, of, OFTEN, key="waits", captures=False)
    assert (len(graphs), graphs.are_wanted) == (1, True)
    gc.disable()
    try:
        del of
    finally:
        gc.enable()
    assert (len(graphs), graphs.bytes) == (0, 0)
    graphs.capture_next(ANY)
    assert (graphs.captures, graphs.are_wanted) == (1, False)


def test_what_can_not_be_captured_runs_as_before():
    graphs, of = Graphs(Recorder(fails=True)), module()
    assert ask(graphs, of, 5 * OFTEN) is None
    assert (graphs.captures, len(graphs)) == (1, 0)


def test_what_is_no_faster_is_not_kept(monkeypatch):
    graphs, of = Graphs(Recorder()), module()
    monkeypatch.setattr(cuda_graphs, "_seconds", lambda _: 1.0)
    assert ask(graphs, of, 5 * OFTEN) is None
    assert (graphs.captures, len(graphs)) == (1, 0)


def test_they_stay_within_their_limit_and_what_is_free(quicker):
    of = module()
    graphs = Graphs(Recorder(), limit=250)
    for key in range(4):
        ask(graphs, of, OFTEN, key=key)
    assert (len(graphs), graphs.bytes) == (2, 200)
    ask(graphs, of, OFTEN, key="large", need=251)
    assert (len(graphs), graphs.bytes) == (2, 200)
    none = Graphs(Recorder(), limit=0)
    assert ask(none, of, 2 * OFTEN, need=1) is None
    assert not none.are_wanted
    busy = Graphs(Recorder())
    ask(busy, of, OFTEN, spare=99)
    assert (busy.captures, busy.are_wanted) == (0, False), "the budget has less than it needs"
    assert ask(busy, of, OFTEN + 1) is not None


def test_a_graph_that_is_used_gives_its_place_to_no_other(quicker):
    of, graphs = module(), Graphs(Recorder())
    for key in range(MOST + 2):
        ask(graphs, of, OFTEN, key=key)
    assert (len(graphs), graphs.captures) == (MOST, MOST)
    ask(graphs, of, IDLE, key=0)
    ask(graphs, of, OFTEN, key="new")
    assert (len(graphs), graphs.captures) == (MOST, MOST + 1)
    assert ask(graphs, of, key=0) is not None
    assert ask(graphs, of, key=1) is None, "the one that was used longest ago"


@pytest.mark.parametrize("keys", [16, 64, 80, 128, 512])
def test_many_keys_are_not_captured_again_and_again(quicker, keys):
    rng, of, graphs = random.Random(0), module(), Graphs(Recorder())
    for _ in range(40_000):
        if graphs.find(of, rng.randrange(keys), Doubled) is None:
            graphs.capture_next(ANY)
    assert graphs.captures <= min(keys, MOST) + 4


SHAPES = [*range(1, 129)]


@pytest.mark.slow
def test_128_lengths_are_few_buckets_and_as_many_captures(monkeypatch):
    rng, of = random.Random(0), module()
    with stand_in_gpu(monkeypatch) as device:
        device.graphs = Graphs(Replaying(monkeypatch))
        jobs = {
            n: forward.prepare(of, ForwardRequest(query=np.zeros((1, n, 32), np.float32)), device, ANY) for n in SHAPES
        }
        for _ in range(2000):
            jobs[rng.choice(SHAPES)].run()
            device.graphs.capture_next(ANY)
        assert {PaddedSizes.of(1, n).length for n in SHAPES} == {16, 32, 64, 128}
        assert device.graphs.captures == len(device.graphs) == 4
        assert device.graphs.replays > 1900


X = np.random.default_rng(0).standard_normal((3, 5, 32)).astype(np.float32)


@pytest.mark.parametrize(
    ("more", "taken"),
    [
        ({}, True),
        ({"key": X, "value": X}, False),
        ({"return_": ["output", "weights"]}, False),
        ({"key_lengths": np.array([3, 5, 1])}, False),
        ({"mask": np.ones((5, 5), dtype=bool)}, False),
        ({"edits": [{"tap": "weights", "heads": [0], "set": 0}]}, False),
        ({"dropout": {"p": 0.5, "seed": 1}}, False),
        ({"query": np.zeros((1, MOST_TOKENS, 32), np.float32)}, True),
        ({"query": np.zeros((3, MOST_TOKENS // 2, 32), np.float32)}, False),
    ],
)
def test_plain_passes_are_taken(more, taken):
    request = ForwardRequest.model_validate({"query": X} | {name.removesuffix("_"): x for name, x in more.items()})
    bound = bind(module(), request)
    assert cuda_graph_forward.takes(bound, request, "fused") == taken
    assert not cuda_graph_forward.takes(bound, request, "materialized")


@pytest.mark.parametrize(
    ("spec", "taken"),
    [
        ({"masks": [{"name": "sliding_window", "left": 3}]}, True),
        ({"masks": [{"name": "documents", "lengths": [2, 3]}]}, False),
        ({"masks": [{"name": "any", "of": [{"name": "causal"}, {"name": "global_tokens", "positions": [0]}]}]}, False),
        ({"position": {"name": "learned", "length": 16}}, True),
        ({"position": {"name": "learned", "length": 15}}, False),
        ({"position": {"name": "rope", "scaling": {"name": "ntk", "factor": 4}}}, True),
        (
            {
                "position": {
                    "name": "rope",
                    "scaling": {"name": "ntk", "factor": 4, "original_max_position_embeddings": 3},
                }
            },
            False,
        ),
    ],
)
def test_specs_that_say_the_same_whatever_follows_are_taken(spec, taken):
    request = ForwardRequest(query=X)
    assert cuda_graph_forward.takes(bind(module(spec=spec), request), request, "fused") == taken


SPECS = {
    "dense": {},
    "causal": {"spec": {"masks": [{"name": "causal"}]}},
    "bottom_right": {"spec": {"masks": [{"name": "causal", "align": "bottom_right"}]}},
    "window": {"spec": {"masks": [{"name": "sliding_window", "left": 2, "right": 1}]}},
    "causal window": {"spec": {"masks": [{"name": "causal"}, {"name": "sliding_window", "left": 2}]}},
    "rope": {"spec": {"position": {"name": "rope"}}},
    "learned": {"spec": {"position": {"name": "learned", "length": 16}}},
    "added": {"spec": {"add_bias_kv": True, "add_zero_attn": True}},
    "grouped": {"num_kv_heads": 2, "spec": {"masks": [{"name": "causal"}]}},
    "normed": {"spec": {"qk_norm": {}}},
}


def graphs_of(monkeypatch, device, of, query):
    """Replies of passes one after the other, of which the last ones are replayed."""
    device.graphs = Graphs(Replaying(monkeypatch))
    job = forward.prepare(of, ForwardRequest(query=query), device, ANY)
    for _ in range(OFTEN):
        job.run()
    device.graphs.capture_next(ANY)
    return job


@pytest.mark.sampled(more=4)
@pytest.mark.parametrize(
    ("more", "shape"), [*zip(SPECS.values(), cycle([(3, 5, 32), (16, 32)]), strict=False)], ids=[*SPECS]
)
def test_a_padded_pass_gives_the_numbers_of_the_request(monkeypatch, more, shape):
    """Also those of a token that is not a number."""
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    of = module(**more)
    expected = forward.prepare(of, ForwardRequest(query=x), Device.open("cpu"), ANY).run()["output"]
    with stand_in_gpu(monkeypatch) as device:
        job = graphs_of(monkeypatch, device, of, x)
        np.testing.assert_allclose(job.run()["output"], expected, atol=1e-5)
        assert device.graphs.replays == 1
        bad = x.copy()
        bad[..., 3, 0] = np.nan
        expected = forward.prepare(of, ForwardRequest(query=bad), Device.open("cpu"), ANY).run()["output"]
        found = forward.prepare(of, ForwardRequest(query=bad), device, ANY).run()["output"]
        assert device.graphs.replays == 2
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_what_a_graph_holds_is_planned_for_its_padded_sizes(monkeypatch):
    """A joint pass of 20 sequences is one of 32, and is counted as such."""
    of, x = module(), np.zeros((20, 10, 32), np.float32)
    with stand_in_gpu(monkeypatch) as device:
        graphs_of(monkeypatch, device, of, x)
        padded = forward.prepare(of, ForwardRequest(query=np.zeros((32, 16, 32), np.float32)), device, ANY)
        inputs = 32 * 16 * 32 * 4
        assert padded.plan.peak_bytes <= device.graphs.bytes <= 2 * padded.plan.peak_bytes + 2 * inputs
        one = forward.prepare(of, ForwardRequest(query=np.zeros((1, 10, 32), np.float32)), device, ANY)
        assert device.graphs.bytes > 8 * one.plan.peak_bytes / 2


async def test_the_lane_captures_when_it_is_idle(tmp_path, monkeypatch):
    with stand_in_gpu(monkeypatch) as device:
        device.graphs = graphs = Graphs(Replaying(monkeypatch))
        engine = Engine(tmp_path, device, EngineSettings(learns_times=False))
        await engine.start()
        await engine.modules.create(CreateModule(name="m", config=ModuleConfig(d_model=32, num_heads=4)))
        query = np.random.default_rng(0).standard_normal((1, 5, 32)).astype(np.float32)
        first = (await engine.forward("m", ForwardRequest(query=query))).output
        for _ in range(OFTEN):
            await engine.forward("m", ForwardRequest(query=query))
        for _ in range(500):
            if len(graphs):
                break
            await asyncio.sleep(0.01)
        assert graphs.captures == 1
        before = graphs.replays
        np.testing.assert_allclose((await engine.forward("m", ForwardRequest(query=query))).output, first, atol=1e-5)
        assert graphs.replays == before + 1
        assert engine.budget.total - engine.budget.available >= graphs.bytes > 0
        await engine.stop()


class Streams:
    """As much of ``torch.cuda`` as a capture calls, with what it was asked for in order."""

    def __init__(self, monkeypatch):
        self.calls, self.made, self.pools = [], [], []
        waits = lambda: self.calls.append("waits")  # noqa: E731
        self.current = SimpleNamespace(name="lane", wait_stream=lambda other: None, synchronize=waits)
        for name in ("graph_pool_handle", "current_stream", "set_stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Stream", self.stream)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", self.graph)
        for name in ("synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: self.calls.append(name))

    def stream(self):
        self.made.append("stream")
        return SimpleNamespace(name="capture", wait_stream=lambda other: None, synchronize=lambda: None)

    def graph_pool_handle(self):
        self.pools.append("pool")
        return len(self.pools)

    def current_stream(self):
        return self.current

    def set_stream(self, stream):
        self.current = stream

    def graph(self):
        def begin(*, pool, capture_error_mode):
            self.calls.append(("begin", self.current.name, pool, capture_error_mode))

        return SimpleNamespace(
            capture_begin=begin,
            capture_end=lambda: self.calls.append("end"),
            replay=lambda: self.calls.append("replay"),
        )


def test_captures_share_a_stream_and_a_pool_and_wait_for_nobody(monkeypatch):
    cuda, capture = Streams(monkeypatch), Captures()
    replays = [capture(lambda tensors: (tensors["x"],), {"x": torch.ones(1)}) for _ in range(3)]
    assert (len(cuda.made), len(cuda.pools)) == (1, 1)
    assert cuda.calls == [("begin", "capture", 1, "thread_local"), "end"] * 3
    assert cuda.current.name == "lane"
    assert torch.equal(replays[0]()[0], torch.ones(1))
    assert cuda.calls[-2:] == ["replay", "waits"]


@pytest.mark.parametrize("fails_at", [1, 4], ids=["warming up", "captured"])
def test_a_capture_that_fails_ends_and_leaves_the_lane_on_its_own_stream(monkeypatch, fails_at):
    cuda, count = Streams(monkeypatch), iter(range(1, 9))

    def run(tensors):
        if next(count) == fails_at:
            raise RuntimeError("operation not permitted when stream is capturing")
        return (tensors["x"],)

    with pytest.raises(RuntimeError, match="not permitted"):
        Captures()(run, {"x": torch.ones(1)})
    assert cuda.current.name == "lane"
    assert cuda.calls.count("end") == sum(call[0] == "begin" for call in cuda.calls) == (fails_at == 4)


@pytest.mark.gpu
@pytest.mark.parametrize("more", SPECS.values(), ids=SPECS)
def test_graphs_on_a_gpu_give_the_numbers_of_each_request(more):
    device, of = Device.open("cuda"), module(**more).on(torch.device("cuda"))
    plain = module(**more)
    for seed in range(OFTEN + 4):
        x = np.random.default_rng(seed).standard_normal((2, 5, 32)).astype(np.float32)
        found = forward.prepare(of, ForwardRequest(query=x), device, ANY).run()["output"]
        expected = forward.prepare(plain, ForwardRequest(query=x), Device.open("cpu"), ANY).run()["output"]
        np.testing.assert_allclose(found, expected, atol=1e-3)
        device.graphs.capture_next(ANY)
    assert device.graphs.captures == 1
    x[0, 2] = np.nan  # looked at closer, as without a graph
    found = forward.prepare(of, ForwardRequest(query=x), device, ANY).run()["output"]
    assert np.isfinite(found[1]).all()
    assert np.isnan(found[0, 2]).all()


def test_the_operation_is_a_graph_only_once_there_is_one(monkeypatch):
    of = module()
    with stand_in_gpu(monkeypatch) as device:
        job = graphs_of(monkeypatch, device, of, X)
        operation = job.prepared.operation(job.bound)
        assert isinstance(operation, cuda_graph_forward.GraphedForward)
        assert execute(operation, device.torch)["output"].shape == X.shape
        del of

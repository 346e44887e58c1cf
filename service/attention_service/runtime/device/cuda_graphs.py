"""CUDA graphs: a pass that is computed again and again for one module and shape is launched as a whole.

A small forward pass takes the host longer to launch, operation by operation, than the GPU to do. Its graph is captured
once its key (module, shape, kernel) has come often enough and the device has nothing else to do, kept if it is then
faster, and replayed on tensors that stay where they are: the copies from and to the host's memory are part of it. It
goes when its module does: a replaced module's parameters are other tensors. All graphs share one pool of memory, since
one is replayed at a time.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from attention_service.modules.resident import Module

log = logging.getLogger(__name__)
Tensors = Mapping[str, Tensor]
Run = Callable[[Tensors], tuple[Tensor, ...]]
"""Maps tensors of the host to tensors of the host, both pinned, without a host synchronization."""
Replay = Callable[[], tuple[Tensor, ...]]
"""Replays, and waits for the results."""
Capture = Callable[[Run, Tensors], Replay]

OFTEN = 8
"""A key is captured when it has come so often."""
MOST = 64
"""Maximum number of graphs."""
IDLE = 10_000
"""A graph gives its place to another if so many passes of any key went by since it was replayed."""
MOST_BYTES = 2**28
"""Bytes that all of them may hold, by the estimates of what they compute."""
_KEYS = 4096
_AHEAD = 8
"""Keys that wait for their capture, at most."""
_RUNS = 5


class Recipe(ABC):
    """The means to capture a pass. It keeps no module and no request alive."""

    @abstractmethod
    def inputs(self) -> dict[str, Tensor]:
        """Make input tensors in pinned memory of the host, with any numbers."""

    @abstractmethod
    def run(self, module: Module, tensors: Tensors) -> tuple[Tensor, ...]:
        """Copy the inputs to the device, compute the pass, and copy its results to the same pinned memory each time.

        The host waits for nothing.
        """

    @abstractmethod
    def need(self, module: Module) -> int:
        """The bytes that the pass holds at its peak, by its plan."""


@dataclass(eq=False)
class CapturedGraph:
    """One captured pass."""

    inputs: dict[str, Tensor]
    _replay: Replay
    need: int
    used: int = 0
    """The number of the pass that replayed it last."""

    def replay(self, tensors: Tensors) -> tuple[Tensor, ...]:
        """The results on the host for these tensors of the host, of the shapes of ``inputs``.

        The next replay overwrites them.
        """
        for name, x in tensors.items():
            self.inputs[name].copy_(x)
        return self._replay()


@dataclass(frozen=True)
class _Wanted:
    key: Hashable
    module: "ref[Module]"
    recipe: Recipe


class Graphs:
    """The graphs of one device. Used from the thread of its short work only."""

    def __init__(self, capture: Capture | None = None, limit: int = MOST_BYTES) -> None:
        """``limit``: the bytes that all may hold; 0 for no graphs."""
        self._capture = capture or Captures()
        self.limit = limit
        self.bytes = 0
        """The estimated bytes that all graphs hold."""
        self.captures = 0
        """Captures that were made since the start, those that were not kept too."""
        self.replays = 0
        self._passes = 0
        self._kept: dict[Hashable, tuple[Any, CapturedGraph]] = {}
        """Graphs with weak references to their modules: a graph keeps no module alive."""
        self._seen: OrderedDict[Hashable, int] = OrderedDict()
        self._refused: OrderedDict[Hashable, None] = OrderedDict()
        self._wanted: dict[Hashable, _Wanted] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def are_wanted(self) -> bool:
        """True if a pass waits for its capture."""
        return bool(self._wanted)

    def find(self, module: Module, key: Hashable, recipe: Callable[[], Recipe]) -> CapturedGraph | None:
        """The graph of a pass; None if there is none. A key that comes often is captured by ``capture_next``.

        key: the shape and whatever else tells passes of a module apart.
        """
        whole = id(module), key
        self._passes += 1
        owner, graph = self._kept.get(whole, (None, None))
        if graph is not None and owner is not None and owner() is module:  # not another one at the same address
            graph.used = self._passes
            self.replays += 1
            return graph
        if self._is_due(whole) and len(self._wanted) < _AHEAD:
            self._wanted[whole] = _Wanted(whole, ref(module), recipe())
        return None

    def _is_due(self, key: Hashable) -> bool:
        """True if the key came often enough, and no capture of it failed."""
        if not self.limit or key in self._refused or key in self._wanted:
            return False
        self._seen[key] = self._seen.pop(key, 0) + 1
        if len(self._seen) > _KEYS:
            self._seen.popitem(last=False)
        return self._seen[key] >= OFTEN

    def capture_next(self, spare: int) -> None:
        """Capture a pass that is wanted, if it needs at most ``spare`` bytes; for a moment without other work."""
        if not self._wanted:
            return
        wanted = self._wanted.pop(next(iter(self._wanted)))
        self._seen.pop(wanted.key, None)
        module = wanted.module()
        if module is None:
            return
        need = wanted.recipe.need(module)
        if need > self.limit:
            self._refuse(wanted.key)
        elif need <= spare and self._makes_space(need):
            self._make(wanted, module, need)

    def _makes_space(self, need: int) -> bool:
        """Drop graphs that are no longer used until there is a place and room for another. False if all are used."""
        while self._kept and (len(self._kept) >= MOST or self.bytes + need > self.limit):
            oldest = min(list(self._kept.items()), key=lambda kept: kept[1][1].used)
            if self._passes - oldest[1][1].used < IDLE:
                return False
            self._forget(oldest[0])
        return True

    def _make(self, wanted: _Wanted, module: Module, need: int) -> None:
        """Keep a graph if it is faster than the pass it stands for; remember the key where there is none."""
        run = partial(wanted.recipe.run, module)
        self.captures += 1
        try:
            inputs = wanted.recipe.inputs()
            replay = self._capture(run, inputs)
            faster = _seconds(replay) < _seconds(partial(run, inputs))
        except RuntimeError as fault:  # something in it waits for the device, or copies from the host
            log.info("a pass could not be captured: %s", fault)
            faster = False
        if not faster:
            self._refuse(wanted.key)
            return
        key = wanted.key
        self._kept[key] = ref(module, lambda _: self._forget(key)), CapturedGraph(inputs, replay, need, self._passes)
        self._count()

    def _refuse(self, key: Hashable) -> None:
        self._refused[key] = None
        if len(self._refused) > _KEYS:
            self._refused.popitem(last=False)

    def _forget(self, key: Hashable) -> None:
        self._kept.pop(key, None)
        self._count()

    def _count(self) -> None:
        self.bytes = sum(graph.need for _, graph in list(self._kept.values()))  # a module may go on any thread


class Captures:
    """Captures passes of the current device: on one stream, into one pool of memory."""

    def __init__(self) -> None:
        self._stream: Any = None
        self._pool: Any = None

    def __call__(self, run: Run, inputs: Tensors) -> Replay:
        """The pass as a graph. Raises RuntimeError where it can't be captured; the current stream is then as before.

        ``torch.cuda.graph`` would wait for the whole device, and give back the memory that is kept for other passes.
        """
        if self._stream is None:
            self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)
        graph = torch.cuda.CUDAGraph()
        try:
            torch.cuda.set_stream(self._stream)
            for _ in range(3):  # libraries set themselves up
                run(inputs)
            self._stream.synchronize()
            # Other threads may ask the device for memory meanwhile, as for a module that is being made.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = run(inputs)
            finally:
                graph.capture_end()
        finally:
            torch.cuda.set_stream(here)
            here.wait_stream(self._stream)

        def replay() -> tuple[Tensor, ...]:
            graph.replay()
            torch.cuda.current_stream().synchronize()
            return outputs

        return replay


def _seconds(run: Callable[[], object]) -> float:
    """The quickest of some runs, waited for."""
    times = []
    for _ in range(_RUNS):
        started = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        times.append(time.perf_counter() - started)
    return min(times)

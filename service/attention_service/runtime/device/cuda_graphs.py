"""CUDA graphs: what is computed again and again for one module and shape is launched as a whole.

A small forward pass takes the host longer to launch, operation by operation, than the GPU to do. A graph is captured
once a key (module, shapes, dtype, kernel) has come often enough, kept if it is then faster, and replayed on tensors
that stay where they are. It goes when its module does: a replaced module's parameters are other tensors.
"""

import logging
import time
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
"""Maps device tensors to device tensors without a host synchronization."""
Replay = Callable[[], tuple[Tensor, ...]]
Capture = Callable[[Run, Tensors], Replay]

OFTEN = 8
"""A key is captured when it has come so often."""
MOST = 64
"""Maximum number of graphs; the least recently used are dropped."""
ROOM = 2**28
"""Bytes that all of them may hold, by the estimates of what they compute."""
_KEYS = 4096
_RUNS = 5


@dataclass(frozen=True)
class _Kept:
    inputs: dict[str, Tensor]
    replay: Replay
    module: Any
    """A weak reference: a graph keeps no module alive."""
    need: int


class Graphs:
    """The graphs of one device. Used from the device's thread only."""

    def __init__(self, capture: Capture | None = None, room: int = ROOM) -> None:
        """``room``: the bytes that all may hold; 0 for no graphs."""
        self._capture = capture or captured
        self._room = room
        self.bytes = 0
        """The estimated bytes that all graphs hold."""
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()
        self._seen: OrderedDict[Hashable, int] = OrderedDict()
        self._refused: OrderedDict[Hashable, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def run(self, module: Module, key: Hashable, need: int, run: Run, tensors: Tensors) -> tuple[Tensor, ...]:
        """The result of ``run`` on these tensors, by its graph if there is one. The next call overwrites it.

        key: what tells passes of a module apart beside the tensors' shapes; need: the bytes that one holds at its peak.
        """
        whole = (id(module), key, tuple((name, tuple(x.shape), x.dtype) for name, x in tensors.items()))
        kept = self._kept.get(whole)
        if kept is not None and kept.module() is not module:  # another one at the same address
            self._forget(whole)
            kept = None
        if kept is None and self._due(whole, need):
            kept = self._made(whole, module, need, run, tensors)
        if kept is None:
            return run(tensors)
        self._kept.move_to_end(whole)
        _put(kept.inputs, tensors)
        return kept.replay()

    def _due(self, key: Hashable, need: int) -> bool:
        """True if the key came often enough, has room, and no capture of it failed."""
        if need > self._room or key in self._refused:
            return False
        self._seen[key] = self._seen.pop(key, 0) + 1
        if len(self._seen) > _KEYS:
            self._seen.popitem(last=False)
        return self._seen[key] >= OFTEN

    def _made(self, key: Hashable, module: Module, need: int, run: Run, tensors: Tensors) -> _Kept | None:
        """A graph that is faster than the pass it stands for; None where there can't be one, which is remembered."""
        self._seen.pop(key, None)
        while self._kept and (len(self._kept) >= MOST or self.bytes + need > self._room):
            self._forget(next(iter(self._kept)))
        inputs = {name: x.clone() for name, x in tensors.items()}
        try:
            replay = self._capture(run, inputs)
            faster = _seconds(replay) < _seconds(partial(run, inputs))
        except RuntimeError as fault:  # something in it waits for the device, or copies from the host
            log.info("a pass could not be captured: %s", fault)
            faster = False
        if not faster:
            self._refused[key] = None
            if len(self._refused) > _KEYS:
                self._refused.popitem(last=False)
            return None
        kept = _Kept(inputs, replay, ref(module, lambda _: self._forget(key)), need)
        self._kept[key] = kept
        self._count()
        return kept

    def _forget(self, key: Hashable) -> None:
        self._kept.pop(key, None)
        self._count()

    def _count(self) -> None:
        self.bytes = sum(kept.need for kept in list(self._kept.values()))  # a module may go meanwhile, on any thread


def captured(run: Run, inputs: Tensors) -> Replay:
    """The pass as a graph of the current device. Raises RuntimeError where it can't be captured."""
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # libraries set themselves up, and what is timed once is timed
        for _ in range(3):
            run(inputs)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    # Other threads may ask the device for memory meanwhile, as for a module that is being made.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = run(inputs)

    def replay() -> tuple[Tensor, ...]:
        graph.replay()
        return outputs

    return replay


def _put(inputs: dict[str, Tensor], tensors: Tensors) -> None:
    for name, x in tensors.items():
        inputs[name].copy_(x, non_blocking=True)


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

"""The engine of one device: it binds, plans and runs requests, and keeps the modules.

A request's life is a straight line: ``prepare`` (shapes, kernel, cost) → ``execution`` (the memory budget, a batch, the
device) → the reply. The first is quick and runs where it is called; nothing is allocated before the second.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from attention_contract.base import valid
from attention_contract.errors import (
    Draining,
    Loading,
    ModuleNotFound,
    StoreFull,
    Stuck,
    TooLong,
    Unavailable,
    VersionMismatch,
)
from attention_contract.request_options import Outline
from attention_contract.schemas.accuracy import AccuracyReply
from attention_contract.schemas.attention import AttentionInputs, ForwardReply, ForwardRequest, Ran
from attention_contract.schemas.attribution import AttributionReply, AttributionRequest
from attention_contract.schemas.backward_passes import BackwardRequest, PassReply, PassRequest
from attention_contract.schemas.checkpoints import CheckpointList, CheckpointReply, FetchCheckpoint
from attention_contract.schemas.circuits import CircuitsReply, CircuitsRequest
from attention_contract.schemas.complexity import ComplexityReply, ComplexityRequest
from attention_contract.schemas.effects import EffectsReply, EffectsRequest
from attention_contract.schemas.gradients import GradientsReply, GradientsRequest
from attention_contract.schemas.hopfield import HopfieldReply, HopfieldRequest
from attention_contract.schemas.modules import (
    CreateModule,
    ImportModule,
    ModuleInfo,
    ModuleList,
    Parameter,
    ParameterList,
    ParameterQuery,
    ReplaceParameters,
)
from attention_contract.schemas.recording_statistics import RecordingStatistics, RecordingStatisticsRequest
from attention_contract.schemas.recordings import (
    RecordingFile,
    RecordingInfo,
    RecordingList,
    RecordingQuery,
    RecordText,
)
from attention_contract.schemas.rollout import RecordingRollout, RecordingRolloutRequest, RolloutReply, RolloutRequest
from attention_contract.schemas.server import Health
from attention_contract.schemas.similarity import (
    RecordingSimilarity,
    RecordingSimilarityRequest,
    SimilarityReply,
    SimilarityRequest,
)
from attention_contract.schemas.text_predictions import PredictText, TextPredictions
from attention_contract.schemas.weights import WeightsReply, WeightsRequest
from attention_service.core.cancellation import Cancellation, cancellable
from attention_service.core.tensors import to_numpy
from attention_service.modules import parameters
from attention_service.modules.checkpoints import catalogue, hub
from attention_service.modules.library import Library
from attention_service.modules.recording_store import RecordingStore
from attention_service.modules.resident import Module, making_bytes
from attention_service.runtime.binding.bound_request import reads_shapes_only
from attention_service.runtime.callers import caller
from attention_service.runtime.device.torch_device import BUDGET_SHARE, Device, give_back_freed_memory, warm_up
from attention_service.runtime.kept_passes import KeptPasses
from attention_service.runtime.operations import (
    attribution,
    circuits,
    complexity,
    effects,
    forward,
    gradients,
    hopfield,
    kept_backward,
    recorded_statistics,
    rollout,
    similarity,
)
from attention_service.runtime.operations import weights as inspection
from attention_service.runtime.operations.complexity.subjects import Place
from attention_service.runtime.planning.learned_factors import LearnedFactors
from attention_service.runtime.planning.prediction_accuracy import Accuracy
from attention_service.runtime.planning.quickness import quickly_planned
from attention_service.runtime.request_timing import note_run
from attention_service.runtime.scheduling.budget import Budget
from attention_service.runtime.scheduling.entrance import Entrance
from attention_service.runtime.scheduling.execution import Execution
from attention_service.runtime.scheduling.jobs import Job
from attention_service.runtime.scheduling.observation_buffer import Later
from attention_service.runtime.scheduling.operation import Fields
from attention_service.runtime.scheduling.pass_execution import Observation, ran_of
from attention_service.runtime.scheduling.watchdog import PATIENCE_S, Watchdog
from attention_service.runtime.sessions.live_sessions import Sessions
from attention_service.runtime.sessions.step import Host
from attention_service.runtime.text_recording import TextRecorder, needed_bytes

RequestT = TypeVar("RequestT", bound=AttentionInputs)
ResultT = TypeVar("ResultT")
State = Literal["loading", "ready", "draining"]
log = logging.getLogger(__name__)

_COUNTING_SHARE = 0.8
"""Share of the time before a deadline in which costs are counted; the rest is for the answer."""
FOLLOW_S = 0.4
"""Seconds between two looks at the store for the changes of other servers."""


class Engine:
    """Answers questions about resident modules and raw attention on one device."""

    def __init__(
        self,
        root: Path,
        device: Device,
        memory_budget: int | None = None,
        max_queue: int = 256,
        recordings_limit: int = 2**33,
        session_ttl_s: float = 600.0,
        session_share: float = 0.5,
        session_pinned_share: float = 0.5,
        max_modules: int = 1024,
        max_predicted_s: float | None = None,
        max_sessions: int = 4096,
        stuck_s: float = PATIENCE_S,
        *,
        learns_times: bool = True,
    ) -> None:
        self.device = device
        self.library = Library(root, device.torch)
        self.recordings = RecordingStore(root, recordings_limit)
        self._root = root
        self._max_modules = max_modules
        self._max_predicted_s = max_predicted_s
        self._makers: dict[str, str] = {}
        """The caller who made each module since the start."""
        budget = memory_budget if memory_budget is not None else int(BUDGET_SHARE * device.free_bytes())
        self.library.limit = budget
        self.budget = Budget(budget, device.total_bytes, self._resident_bytes, max_queue)
        self.entrance = Entrance(self.budget)
        """Before it requests wait with their bodies unread."""
        self._recorder = TextRecorder(root, self.budget.holding)
        self.passes = KeptPasses(self.budget)
        """Forward passes that wait for their backward pass."""
        self.state: State = "loading"
        self.failure: str | None = None
        """The error that kept the store from being loaded at all."""
        self.accuracy = Accuracy()
        self.factors = LearnedFactors(device.clock) if learns_times else None
        """Corrects predicted times by those of what ran; None to leave them as they are."""
        self._judged = device.clock
        """The clock whose predictions ``accuracy`` is about."""
        self._seen = Later(self._keep)
        self._watchdog = Watchdog(stuck_s)
        self.execution = Execution(device, self.budget, self._seen.note, self._watchdog)
        self._files = ThreadPoolExecutor(2, thread_name_prefix="attention-store")
        self._following = ThreadPoolExecutor(1, thread_name_prefix="attention-following")
        self._followed: asyncio.Task[None] | None = None
        self._admission: Future[None] | None = None
        """The wait for memory of a module that another server stored."""
        room = int(session_share * budget)
        host = Host(self.budget, self.module, self._planned, self._run, self.check_ready, self._in_thread)
        self.sessions = Sessions(host, session_ttl_s, room, int(session_pinned_share * room), max_sessions)
        """Pasts that stay on the server."""
        # One thread of its own: a long sweep keeps nobody waiting but another sweep.
        self._counting = ThreadPoolExecutor(1, thread_name_prefix="attention-complexity")
        self._planning = ThreadPoolExecutor(1, thread_name_prefix="attention-planning")

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Load every module of the store and warm the device's thread up; then the engine is ready."""
        try:
            _report(await self._in_thread(self.library.load))
            await self._in_thread(self.recordings.clean)
            if self.factors is not None:
                learned = await self._in_thread(partial(self.factors.load, self._root, self.device))
                self.device.clock = learned or self.device.clock
            await self.execution.warm_up(partial(warm_up, self.device))
            await self.execution.measure()
            await self._in_thread(give_back_freed_memory)
        except Exception as fault:
            self.failure = type(fault).__name__
            raise
        self.library.admitted = partial(self._admitted, asyncio.get_running_loop())
        self._followed = asyncio.create_task(self._follow())
        if self.state == "loading":
            self.state = "ready"

    async def _follow(self) -> None:
        """Take over what other servers on the same folder change in the store, as it changes."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            before = self.library.resident_bytes
            try:
                _report(await self._in_thread(self.library.follow, self._following))
            except Exception:  # the next round may succeed
                log.exception("the store could not be followed")
            if self.library.resident_bytes < before:
                self.budget.wake()

    @contextmanager
    def _admitted(self, loop: asyncio.AbstractEventLoop, need: int) -> Iterator[None]:
        """Hold memory for a module, in the thread that follows the store. It waits in turn with the requests."""
        if not need:
            yield
            return
        self._admission = asyncio.run_coroutine_threadsafe(self.budget.acquire(need), loop)
        self._admission.result()
        try:
            yield
        finally:
            loop.call_soon_threadsafe(self.budget.release, need)

    def drain(self) -> None:
        """Take no new work; what is in flight goes on."""
        self.state = "draining"

    async def stop(self) -> None:
        """Drain, wait for what is in flight, and let the threads go."""
        self.drain()
        self.sessions.registry.stop()
        self.passes.clear()
        if self._followed is not None:
            self._followed.cancel()
        if self._admission is not None:
            self._admission.cancel()
        await self.execution.stop()
        self.settle()
        for threads in (self._files, self._following, self._counting, self._planning):
            await asyncio.to_thread(partial(threads.shutdown, cancel_futures=True))

    def check_live(self) -> None:
        """Raise Stuck if the device is lost, or if a thread that plans or computes makes no progress."""
        if self.device.lost is not None:
            raise Stuck(f"the device computes nothing any more ({self.device.lost}); restart the server")
        self._watchdog.check()

    def health(self, status: Literal["live", "ready"]) -> Health:
        """The answer of a health check that found nothing wrong."""
        library = self.library
        return Health(status=status, modules=len(library.list()), modules_left_out=library.left_out)

    def check_ready(self) -> None:
        """Raise Loading, Draining or Stuck unless work is taken."""
        if self.device.lost is not None:
            self.check_live()
        if self.failure is not None:
            raise Unavailable(f"the store could not be loaded ({self.failure}); the server's log has the cause")
        if self.state == "loading":
            raise Loading("the modules of the store are still being loaded; try again in a moment")
        if self.state == "draining":
            raise Draining("the server is stopping; try another, or this one once it is back")

    def _resident_bytes(self) -> int:
        """Bytes of modules, of sessions and the modules that only they keep, and of captured graphs."""
        of_sessions = self.sessions.registry.modules
        kept = sum(module.bytes for module in of_sessions if not self.library.holds(module)) if of_sessions else 0
        sessions = self.sessions.pool.held + self.sessions.registry.reply_bytes
        return self.library.resident_bytes + kept + sessions + self.device.graphs.bytes

    # ── modules ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def create(self, request: CreateModule) -> ModuleInfo:
        """Make a module resident, and durable unless the request says otherwise."""
        return await self._add(request, partial(self.library.create, request))

    async def import_checkpoint(self, request: ImportModule) -> ModuleInfo:
        """Make a module of one layer of a checkpoint."""
        return await self._add(request, partial(self.library.import_checkpoint, request))

    async def checkpoints(self) -> CheckpointList:
        """Every checkpoint of the model repository, by its headers."""
        return await self._in_thread(partial(catalogue.listed, self.library.root))

    async def checkpoint(self, path: str) -> CheckpointReply:
        """One checkpoint. Raises CheckpointNotFound and InvalidCheckpoint."""
        return await self._in_thread(partial(catalogue.described, self.library.root, path))

    async def fetch_checkpoint(self, request: FetchCheckpoint) -> CheckpointReply:
        """Fetch a checkpoint from the hub. Raises CheckpointNotFound, Unavailable and InvalidRequest."""
        await self._in_thread(partial(hub.fetch, self.library.root, request.repository, request.revision))
        return await self.checkpoint(request.repository)

    async def _add(self, request: CreateModule | ImportModule, add: Callable[[], tuple[Module, bool]]) -> ModuleInfo:
        self.check_ready()
        self._check_count(request.name)
        asks = caller.get()
        made = sum(
            self._makers.get(each.name) == asks.name for each in self.library.list() if each.name != request.name
        )
        asks.check("modules", made + 1, f"{made} resident modules are yours; delete one first")
        need = await self._in_thread(partial(self.library.estimate, request))
        self.budget.check(need, "making the module needs {need} bytes", "Make a smaller one: its config sets its size")
        await self.budget.acquire(need)
        module, is_new = await self._holding(need, add)
        if is_new:
            self._makers[module.name] = asks.name
        return module.info()

    def _check_count(self, name: str | None) -> None:
        names = [module.name for module in self.library.list()]
        if len(names) >= self._max_modules and name not in names:
            raise StoreFull(
                f"the server has {len(names)} modules; max_modules allows {self._max_modules}. Delete one first",
                limit=self._max_modules,
                actual=len(names) + 1,
            )

    def module(self, name: str, version: str | None = None) -> Module:
        """A resident module. Raises ModuleNotFound, or VersionMismatch where it is no longer at the version."""
        self.check_ready()
        return self.library.get(name, version)

    def modules(self) -> ModuleList:
        """Every resident module."""
        self.check_ready()
        return ModuleList(modules=[module.info() for module in self.library.list()], bytes=self.library.resident_bytes)

    async def delete(self, name: str, version: str | None = None) -> None:
        """Remove a module from the device and the store."""
        self.check_ready()
        await self._in_thread(partial(self.library.delete, name, version))
        self._makers.pop(name, None)
        self.passes.drop_of(name)
        self.budget.wake()

    async def replace(self, name: str, request: ReplaceParameters) -> ModuleInfo:
        """Replace all parameters of a module, or none."""
        need = making_bytes(self.module(name).config)  # its pin is checked with the write
        replace = partial(self.library.replace, name, request.parameters, request.version)
        await self.budget.acquire(need)
        info = (await self._holding(need, replace)).info()
        self.passes.drop_of(name)
        return info

    async def parameters(self, name: str, version: str | None = None) -> ParameterList:
        """Names, shapes and statistics of a module's parameters."""
        return await self._in_thread(partial(parameters.describe, self.module(name, version)))

    async def parameter(self, name: str, parameter: str, query: ParameterQuery) -> Parameter:
        """One parameter, or a part of it."""
        module = self.module(name, query.version)
        value = await self._in_thread(lambda: to_numpy(parameters.read(module, parameter, query)))
        return Parameter(name=parameter, version=module.version, value=value)

    # ── recordings ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def add_recording(self, recording: RecordingFile) -> RecordingInfo:
        """Store a recording durably. The same content is stored once."""
        self.check_ready()
        check = partial(caller.get().check, "recordings_bytes")
        return await self._in_thread(partial(self.recordings.add, recording, _owner(), check))

    async def record_text(self, request: RecordText, deadline: float | None = None) -> RecordingInfo:
        """Record a text's way through a checkpoint, and store it."""
        self.check_ready()
        need = await self._in_thread(partial(needed_bytes, self.library.root, request))
        self.budget.check(need, "recording this text takes up to {need} bytes", "Send a shorter text")
        return await self.add_recording(await self._recorder.record(request, need, deadline))

    async def predict_text(self, request: PredictText, deadline: float | None = None) -> TextPredictions:
        """Tokens that a checkpoint predicts, unedited and edited."""
        self.check_ready()
        need = await self._in_thread(partial(needed_bytes, self.library.root, request))
        self.budget.check(need, "running this text takes up to {need} bytes", "Send a shorter text")
        return await self._recorder.predict(request, need, deadline)

    async def list_recordings(self) -> RecordingList:
        """Every stored recording of the caller."""
        return await self._in_thread(partial(self.recordings.listing, _owner()))

    async def recording(self, recording: str, query: RecordingQuery) -> RecordingInfo:
        """The description of a recording, with the part of a tensor that the query names."""
        owner = _owner()
        need = await self._in_thread(partial(self.recordings.part_bytes, recording, query, owner))
        self.budget.check(need, "reading this part takes {need} bytes", "Read fewer heads, queries or keys at a time")
        await self.budget.acquire(need)
        return await self._holding(need, partial(self.recordings.get, recording, query, owner))

    async def recording_statistics(self, recording: str, request: RecordingStatisticsRequest) -> RecordingStatistics:
        """Statistics of the recorded weights, by layer and head."""
        owner = _owner()
        info = await self._in_thread(partial(self.recordings.get, recording, RecordingQuery(), owner))
        need = recorded_statistics.held_bytes(info, request)
        self.budget.check(need, "these statistics take {need} bytes", "Ask for layers with fewer keys")
        await self.budget.acquire(need)
        return await self._holding(
            need, partial(recorded_statistics.statistics_of, self.recordings, recording, request, owner)
        )

    async def recording_similarity(
        self, recording: str, request: RecordingSimilarityRequest, deadline: float | None = None
    ) -> RecordingSimilarity:
        """The similarity of every pair of recorded heads or layers."""
        self.check_ready()
        prepare = partial(similarity.prepare_recorded, self.recordings, recording, request, _owner(), self.device)
        fields, ran = await self._run(await self._in_thread(prepare), deadline)
        return RecordingSimilarity(**fields, ran=ran)

    async def recording_rollout(
        self, recording: str, request: RecordingRolloutRequest, deadline: float | None = None
    ) -> RecordingRollout:
        """Rollout or flow of the recorded weights."""
        self.check_ready()
        prepare = partial(rollout.prepare_recorded, self.recordings, recording, request, _owner(), self.device)
        fields, ran = await self._run(await self._in_thread(prepare), deadline)
        return RecordingRollout(**fields, ran=ran)

    async def recording_path(self, recording: str) -> Path:
        """The file of a recording."""
        return await self._in_thread(partial(self.recordings.path, recording, _owner()))

    async def delete_recording(self, recording: str) -> None:
        """Remove a recording from the store."""
        self.check_ready()
        await self._in_thread(partial(self.recordings.delete, recording, _owner()))

    # ── the four questions ───────────────────────────────────────────────────────────────────────────────────────────

    async def forward(
        self,
        name: str | None,
        request: ForwardRequest,
        deadline: float | None = None,
        outline: Outline | None = None,
    ) -> ForwardReply:
        """The output of a module (of raw attention, where there is no name), and any taps."""
        job = await self._prepared(forward.prepare, self._target(name, request), request, outline)
        fields, ran = await self._run(job, deadline)
        return valid(ForwardReply, fields | {"ran": ran})

    async def weights(
        self,
        name: str | None,
        request: WeightsRequest,
        deadline: float | None = None,
        outline: Outline | None = None,
    ) -> WeightsReply:
        """Statistics of the weights of each head, top keys, and the weights themselves."""
        job = await self._prepared(inspection.prepare, self._target(name, request), request, outline)
        fields, ran = await self._run(job, deadline)
        return WeightsReply(**fields, ran=ran)

    async def attribution(
        self, name: str | None, request: AttributionRequest, deadline: float | None = None
    ) -> AttributionReply:
        """The share of each weight and each head in a number that depends on the output."""
        job = await self._planned(attribution.prepare, self._target(name, request), request)
        fields, ran = await self._run(job, deadline)
        return AttributionReply(**fields, ran=ran)

    async def gradients(
        self,
        name: str | None,
        request: GradientsRequest,
        deadline: float | None = None,
        outline: Outline | None = None,
    ) -> GradientsReply:
        """Exact gradients with respect to inputs, taps and parameters."""
        job = await self._prepared(gradients.prepare, self._target(name, request), request, outline)
        fields, ran = await self._run(job, deadline)
        return GradientsReply(**fields, ran=ran)

    async def effects(self, name: str | None, request: EffectsRequest, deadline: float | None = None) -> EffectsReply:
        """The change of the output by each edit of a sweep."""
        job = await self._planned(effects.prepare, self._target(name, request), request)
        fields, ran = await self._run(job, deadline)
        return EffectsReply(**fields, ran=ran)

    async def create_pass(self, name: str | None, request: PassRequest, deadline: float | None = None) -> PassReply:
        """The output of a module or of raw attention, kept for its backward pass while there is room."""
        job = await self._planned(kept_backward.prepare, self._target(name, request), request)
        fields, ran = await self._run(job, deadline)
        return PassReply(id=self.passes.keep(fields["kept"]), output=fields["output"], ran=ran)

    async def backward(self, kept: str, request: BackwardRequest, deadline: float | None = None) -> GradientsReply:
        """Exact gradients of a kept pass, which is used up. Raises PassNotFound."""
        self.check_ready()
        job = kept_backward.prepare_backward(self.passes.get(kept), request, self.device)
        self.passes.drop(kept)  # the job takes its memory over
        fields, ran = await self._run(job, deadline)
        return GradientsReply(**fields, ran=ran)

    async def complexity(
        self, name: str | None, request: ComplexityRequest, deadline: float | None = None
    ) -> ComplexityReply:
        """The cost of a shape, or of a sweep of shapes; before a deadline, as much of it as can be counted."""
        now = time.monotonic()
        until = math.inf if deadline is None else now + _COUNTING_SHARE * (deadline - now)
        module, room = self._target(name, request), self.budget.capacity
        free = min(self.budget.available, room)
        place = Place(replace(self.device), room, free, min(free, self.sessions.free_bytes))
        reply = await self._in_thread(partial(complexity.report, module, request, place, until), self._counting)
        if not (request.measure and reply.crossovers):
            return reply
        return await complexity.tried(reply, module, request, place, self.execution.call, self.budget)

    def accuracy_report(self) -> AccuracyReply:
        """The errors of past predictions."""
        self.check_ready()
        self.settle()
        self._judge()
        return AccuracyReply(
            device=self.device.name,
            basis=self.device.clock.basis,
            calibrated_at=None if self.factors is None else self.factors.changed_at,
            recalibrations=0 if self.factors is None else self.factors.changes,
            predictions=self.accuracy.report(),
        )

    async def retrieve(self, request: HopfieldRequest, deadline: float | None = None) -> HopfieldReply:
        """Let states fall to stored patterns."""
        self.check_ready()
        fields, ran = await self._run(hopfield.prepare(request, self.device, self.budget.capacity), deadline)
        return HopfieldReply(**fields, ran=ran)

    async def circuits(self, name: str, request: CircuitsRequest, deadline: float | None = None) -> CircuitsReply:
        """The circuits of a module's heads, alone or composed with those of a later module."""
        module, later = self.module(name, request.version), None
        if request.with_ is not None:
            try:
                later = self.library.get(request.with_, request.with_version)
            except (ModuleNotFound, VersionMismatch) as fault:
                fault.param = "with" if isinstance(fault, ModuleNotFound) else "with_version"
                raise
        fields, ran = await self._run(circuits.prepare(module, later, request, self.device), deadline)
        return CircuitsReply(**fields, ran=ran)

    async def similarity(self, request: SimilarityRequest, deadline: float | None = None) -> SimilarityReply:
        """The similarity of every pair of heads whose weights or features are sent."""
        self.check_ready()
        fields, ran = await self._run(similarity.prepare(request, self.device), deadline)
        return SimilarityReply(**fields, ran=ran)

    async def rollout(self, request: RolloutRequest, deadline: float | None = None) -> RolloutReply:
        """Rollout or flow of the weights that are sent."""
        self.check_ready()
        fields, ran = await self._run(rollout.prepare(request, self.device), deadline)
        return RolloutReply(**fields, ran=ran)

    def _target(self, name: str | None, request: AttentionInputs | ComplexityRequest) -> Module | None:
        self.check_ready()
        return None if name is None else self.library.get(name, request.version)

    async def _prepared(
        self,
        prepare: "Callable[[Module | None, RequestT, Device, int], Job]",
        module: Module | None,
        request: RequestT,
        outline: Outline | None,
    ) -> Job:
        """A request as a job, bound and planned.

        Jobs are remembered by outline: few different ones come often, and of large requests planning is a small part.
        """
        if outline is None or not reads_shapes_only(outline):
            return await self._planned(prepare, module, request)
        room, plans, clock = self.budget.capacity, self.device.plans, self.device.clock
        key = prepare, None if module is None else module.config_json, outline, room.bit_length()
        job: Job | None = plans.find(clock, key)
        if job is None or job.plan.peak_bytes > room:
            job = await self._planned(prepare, module, outline.blank())
            plans.keep(clock, key, job.without_module())
        return job.with_arrays(module, request, outline)

    async def _planned(
        self, prepare: "Callable[[Module | None, RequestT, Device, int], Job]", module: Module | None, request: RequestT
    ) -> Job:
        """Bind and plan here if that is quick, otherwise beside the event loop."""
        make = partial(prepare, module, request, self.device, self.budget.capacity)
        if quickly_planned(module, request):
            return make()
        return await self._in_thread(make, self._planning, "planning")

    async def _run(self, job: Job, deadline: float | None) -> tuple[Fields, Ran]:
        """Have a job run, if it can begin by then, and say what ran."""
        predicted, most = job.prepared.plan.predicted.median, self._max_predicted_s
        if most is not None and predicted > most:
            raise TooLong(
                f"the request is predicted to compute for {predicted:.3g} s; max_predicted_s allows {most:g}. Ask for "
                "less at a time; /complexity tells the time of a shape beforehand",
                limit_s=most,
                predicted_s=predicted,
            )
        came = time.monotonic()
        ended = await self.execution.run(job, deadline)
        ran = ran_of(job, ended, self.device)
        note_run(came, ran)
        return ended.fields, ran

    def settle(self) -> None:
        """See to what was noted of runs and waits to be counted."""
        self._seen.settle()

    def _keep(self, runs: list[Observation]) -> None:
        """Remember how predictions fared, and predict by what ran from now on if that differs."""
        self._judge()
        for observation in runs:
            if observation.clock is not self._judged:  # another was set since
                continue
            run = observation.run
            self.accuracy.record(run)
            if self.factors is not None and observation.alone and observation.prepared.watched:
                self.factors.see(run, observation.prepared.dtype, observation.at)
        if self.factors is not None and (clock := self.factors.changed(time.monotonic())) is not None:
            self.device.clock = clock
            with suppress(RuntimeError):  # the engine has stopped
                self._files.submit(self.factors.save, self._root, self.device)

    def _judge(self) -> None:
        """Begin anew where the device has another clock now."""
        if self.device.clock is not self._judged:
            self._judged = self.device.clock
            self.accuracy.restart()

    async def _holding(self, need: int, work: Callable[[], ResultT]) -> ResultT:
        """Run work on the store, and give back the bytes that it was admitted for when it ends.

        Work whose caller went away may be running already. It stops at its next checkpoint and frees its memory then.
        """
        cancellation = Cancellation()

        def cancellable_work() -> ResultT:
            with cancellable(cancellation):
                return work()

        try:
            future = self._files.submit(cancellable_work)
        except RuntimeError:
            self.budget.release(need)
            raise Draining("the server is stopping; try another, or this one once it is back") from None
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self.budget.release, need))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            cancellation.cancel()
            raise

    async def _in_thread(
        self, work: Callable[[], ResultT], threads: ThreadPoolExecutor | None = None, watched: str | None = None
    ) -> ResultT:
        """Run work beside the event loop; it stops at its next checkpoint if the caller is cancelled.

        ``watched``: the name under which the watchdog watches it.
        """
        cancellation = Cancellation()

        def cancellable_work() -> ResultT:
            watching = nullcontext() if watched is None else self._watchdog.watching(watched, cancellation)
            with cancellable(cancellation), watching:
                return work()

        try:
            of_request = partial(copy_context().run, cancellable_work)  # log lines name the request
            return await asyncio.get_running_loop().run_in_executor(threads or self._files, of_request)
        except asyncio.CancelledError:
            cancellation.cancel()
            raise


def _report(problems: Iterable[str]) -> None:
    for problem in problems:
        log.warning("a module was left out: %s", problem)


def _owner() -> str | None:
    """The owner of the recordings that the caller may use; None for all of them."""
    asks = caller.get()
    return None if asks.manages else asks.name

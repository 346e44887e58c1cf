"""The engine of one device: its life, and the questions about modules and raw attention.

Each question takes the same line: its module is found, it is bound and planned (``RequestRunner.planned``), and run
(``Executor.run``). Nothing is allocated for it before that. What else the engine can do are services that hang on it.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from attention_contract.base import valid
from attention_contract.schemas.attention import AttentionInputs, ForwardReply, ForwardRequest
from attention_contract.schemas.costs.accuracy import AccuracyReply
from attention_contract.schemas.costs.complexity import ComplexityReply, ComplexityRequest
from attention_contract.schemas.gradients import BackwardRequest, GradientsReply, PassReply, PassRequest
from attention_contract.schemas.server import Health
from attention_service.engine_settings import EngineSettings
from attention_service.models.server.fit_services import FitServices
from attention_service.models.server.model_service import ModelService
from attention_service.modules import store_files
from attention_service.modules.checkpoints import hub
from attention_service.modules.fitted_store import FittedStores
from attention_service.modules.library import Library
from attention_service.modules.recording_store import RecordingStore
from attention_service.modules.resident import Module
from attention_service.runtime.device.freed_memory import give_back_freed_memory
from attention_service.runtime.device.torch_device import Device, host_bytes, warm_up
from attention_service.runtime.operations import complexity, forward, kept_backward
from attention_service.runtime.operations.complexity.subjects import DeviceMemory
from attention_service.runtime.operations.questions import QUESTIONS
from attention_service.runtime.scheduling.budget import OF_HOST, Budget
from attention_service.runtime.scheduling.entrance import Entrance
from attention_service.runtime.scheduling.executor import Executor
from attention_service.runtime.scheduling.prediction_watch import PredictionWatch
from attention_service.runtime.scheduling.request_runner import RequestRunner, State
from attention_service.runtime.scheduling.watchdog import Watchdog
from attention_service.runtime.services.analysis_service import AnalysisService
from attention_service.runtime.services.kept_passes import KeptPasses
from attention_service.runtime.services.module_service import ModuleService
from attention_service.runtime.services.recording_service import RecordingService
from attention_service.runtime.services.store_follower import StoreFollower, report
from attention_service.runtime.sessions.live_sessions import LiveSessions

log = logging.getLogger(__name__)

_COUNTING_SHARE = 0.8
"""Share of the time before a deadline in which costs are counted; the rest is for the answer."""


class Engine:
    """Answers questions about resident modules and raw attention on one device."""

    def __init__(self, root: Path, device: Device, settings: EngineSettings | None = None) -> None:
        settings = settings or EngineSettings()
        self.device = device
        self.library = Library(root, device.torch)
        siblings = settings.replicas > 1
        self.library.limit = budget = settings.budget_on(device)
        self.budget = Budget(budget, device.total_bytes, self._resident_bytes, settings.max_queue)
        self.host = self.budget
        """The budget of the host's memory: one of its own beside a GPU."""
        if device.is_cuda:
            self.host = Budget(settings.budget_of_host(), host_bytes(), self._host_bytes, settings.max_queue, OF_HOST)
        self.entrance = Entrance(self.budget)
        """Before it requests wait with their bodies unread."""
        self.passes = KeptPasses(self.budget)
        """Forward passes that wait for their backward pass."""
        watchdog = Watchdog(settings.stuck_s)
        files = ThreadPoolExecutor(2, thread_name_prefix="attention-store")
        self.predictions = PredictionWatch(device, root, files, learns=settings.learns_times)
        self.executor = Executor(
            device, self.budget, self.predictions.see, watchdog, settings.max_predicted_s,
            self.host if device.is_cuda else None,
        )  # fmt: skip
        self.runner = RequestRunner(self.executor, self.budget, watchdog, files, self.host)
        self.modules = ModuleService(
            self.library, self.runner, self.passes, settings.max_modules, settings.hub_limit, siblings=siblings
        )
        self._recordings = RecordingStore(root, settings.recordings_limit)
        self.recordings = RecordingService(self._recordings, self.runner)
        self._fitted = FittedStores(root, settings.recordings_limit)
        self.models = ModelService(
            root, self.runner, self.recordings, settings.model_idle_s, settings.stuck_s, siblings=siblings,
            spare=settings.spare_model_process, devices=settings.model_devices, prefixes=settings.prefixes,
            fitted=self._fitted,
        )  # fmt: skip
        """Whole models, each in a process of its own."""
        self.fits = FitServices(self._fitted, self.models, self.runner)
        self.analyses = AnalysisService(self.library, self.runner)
        page_bytes = int(settings.session_share * budget)
        self.sessions = LiveSessions(
            self.library, self.runner, settings.session_ttl_s, page_bytes,
            int(settings.session_pinned_share * page_bytes), settings.max_sessions, siblings=siblings,
        )  # fmt: skip
        """Pasts that stay on the server."""
        # Threads of their own: a long sweep keeps nobody waiting but another sweep.
        self._counting = ThreadPoolExecutor(1, thread_name_prefix="attention-complexity")
        self._follower = StoreFollower(self.library, self.budget, self.runner)

    @property
    def state(self) -> State:
        """The part of its life that it is in."""
        return self.runner.state

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Load every module of the store and warm the device's thread up; then the engine is ready."""
        try:
            report(await self.runner.in_thread(self.library.load))
            await self.runner.in_thread(self._recordings.clean)
            await self.runner.in_thread(self._fitted.clean)
            await self.runner.in_thread(partial(hub.clean, self.library.root))
            await self.runner.in_thread(partial(store_files.clean, self.library.root))
            await self.runner.in_thread(self.predictions.load)
            await self.executor.warm_up(partial(warm_up, self.device))
            await self.executor.measure()
            await self.sessions.choose_kernel()
            await self.runner.in_thread(give_back_freed_memory)
        except Exception as fault:
            self.runner.failure = type(fault).__name__
            raise
        self._follower.start()
        self.models.start()
        if self.state == "loading":
            self.runner.state = "ready"

    def drain(self) -> None:
        """Take no new work; what is in flight goes on."""
        self.runner.state = "draining"

    async def stop(self) -> None:
        """Drain, wait for what is in flight, and let the threads go."""
        self.drain()
        self.sessions.registry.stop()
        self.passes.clear()
        self.modules.fetches.stop()
        self._follower.cancel()
        await self.fits.stop()
        await self.models.stop()
        await self.executor.stop()
        self.predictions.settle()
        await self.runner.stop()
        await self._follower.stop()
        await asyncio.to_thread(partial(self._counting.shutdown, cancel_futures=True))

    async def catch_up(self) -> None:
        """Take over the modules that other processes have stored, replaced or deleted until now."""
        await self._follower.catch_up()

    def check_ready(self) -> None:
        """Raise Loading, Draining or Stuck unless work is taken, and every thread and process makes progress."""
        self.runner.check_ready()
        self.runner.check_live()
        self.models.check_progress()

    def health(self, status: Literal["live", "ready"]) -> Health:
        """The answer of a health check that found nothing wrong."""
        library = self.library
        return Health(status=status, modules=len(library.list()), modules_left_out=library.left_out)

    @property
    def refused(self) -> Counter[str]:
        """Requests that a budget refused, by the error's code."""
        return self.budget.refused + self.host.refused if self.host is not self.budget else self.budget.refused

    def _resident_bytes(self) -> int:
        """Bytes of modules, whole models, sessions and the modules that only they keep, and captured graphs."""
        sessions, library = self.sessions, self.library
        held = (
            library.resident_bytes
            + self.models.environment.memory.bytes
            + sessions.pool.held
            + self.device.graphs.bytes
        )
        if self.host is self.budget:
            held += sessions.registry.reply_bytes
        for module in sessions.registry.modules:
            if not library.holds(module):
                held += module.bytes
        return held

    def _host_bytes(self) -> int:
        """Bytes of the host beside a GPU: kept replies of steps, and pinned memory that no copy uses."""
        return self.sessions.registry.reply_bytes + self.device.pinned_bytes

    # ── the four questions ───────────────────────────────────────────────────────────────────────────────────────────

    async def forward(self, name: str | None, request: ForwardRequest, deadline: float | None = None) -> ForwardReply:
        """The output of a module (of raw attention, where there is no name), and any taps."""
        job = await self.runner.planned(forward.prepare, self._target(name, request), request)
        fields, ran = await self.executor.run(job, deadline)
        return valid(ForwardReply, fields | {"ran": ran})

    async def ask(
        self, question: str, name: str | None, request: AttentionInputs, deadline: float | None = None
    ) -> Any:
        """The reply to one of ``QUESTIONS`` about a module (about raw attention, where there is no name)."""
        prepare, reply = QUESTIONS[question]
        job = await self.runner.planned(prepare, self._target(name, request), request)
        fields, ran = await self.executor.run(job, deadline)
        return valid(reply, fields | {"ran": ran})

    async def create_pass(self, name: str | None, request: PassRequest, deadline: float | None = None) -> PassReply:
        """The output of a module or of raw attention, kept for its backward pass while there is room."""
        job = await self.runner.planned(kept_backward.prepare, self._target(name, request), request)
        fields, ran = await self.executor.run(job, deadline)
        return PassReply(id=self.passes.keep(fields["kept"]), output=fields["output"], ran=ran)

    async def backward(self, kept: str, request: BackwardRequest, deadline: float | None = None) -> GradientsReply:
        """Exact gradients of a kept pass, which is used up. Raises PassNotFound."""
        self.runner.check_ready()
        job = kept_backward.prepare_backward(self.passes.get(kept), request, self.device)
        self.passes.drop(kept)  # the job takes its memory over
        fields, ran = await self.executor.run(job, deadline)
        return valid(GradientsReply, fields | {"ran": ran})

    async def complexity(
        self, name: str | None, request: ComplexityRequest, deadline: float | None = None
    ) -> ComplexityReply:
        """The cost of a shape, or of a sweep of shapes; before a deadline, as much of it as can be counted."""
        now = time.monotonic()
        until = math.inf if deadline is None else now + _COUNTING_SHARE * (deadline - now)
        module, capacity = self._target(name, request), self.budget.capacity
        free = min(self.budget.available, capacity)
        place = DeviceMemory(replace(self.device), capacity, free, min(free, self.sessions.free_bytes))
        reply = await self.runner.in_thread(partial(complexity.report, module, request, place, until), self._counting)
        if not (request.measure and reply.crossovers):
            return reply
        return await complexity.tried(reply, module, request, place, self.executor.call, self.budget)

    def accuracy_report(self) -> AccuracyReply:
        """The errors of past predictions."""
        self.runner.check_ready()
        report = self.predictions.report()
        of_models = self.models.environment.accuracy.report()
        return report.model_copy(update={"predictions": [*report.predictions, *of_models]})

    def _target(self, name: str | None, request: AttentionInputs | ComplexityRequest) -> Module | None:
        self.runner.check_ready()
        return None if name is None else self.library.get(name, request.version)

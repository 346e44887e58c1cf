"""Whole models: loading, listing and unloading them, and questions to them.

A model is loaded by a request that says so, or by the first that names it. It ends when nobody asked for a while, and
the least recently used ones end when their memory is needed.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from attention_contract.base import WireModel
from attention_contract.errors import (
    CheckpointNotFound,
    InternalError,
    InvalidCheckpoint,
    InvalidRequest,
    ModelExists,
    ModelNotFound,
    Overloaded,
    Stuck,
)
from attention_contract.schemas.models import LoadModel, ModelInfo, ModelList
from attention_contract.schemas.openai import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationOptions,
)
from attention_contract.schemas.openai_api.responses import ResponseRequest
from attention_contract.schemas.openai_api.transcriptions import TranscriptionRequest
from attention_contract.schemas.recordings import RecordingFile
from attention_contract.tensors import Encoding
from attention_contract.wire import JSON, SAFETENSORS, from_body, to_body
from attention_service.cost import Estimate
from attention_service.models.folders import model_catalogue
from attention_service.models.folders.adapter_catalogue import BETWEEN, AdapterFolder
from attention_service.models.folders.model_catalogue import (
    all_with_adapters,
    named_adapter,
    named_variant,
    with_adapters,
)
from attention_service.models.server.fits_in_requests import AskedModelName, FitsInRequests
from attention_service.models.server.model_devices import ModelDevices
from attention_service.models.server.model_environment import NO_PREFIXES, KeptPrefixes, ModelEnvironment
from attention_service.models.server.model_memory import ModelMemory
from attention_service.models.server.model_question import Question, WrittenReply
from attention_service.models.server.resident_model import ResidentModel
from attention_service.models.server.spare_process import SpareProcess
from attention_service.models.server.unread_events import UnreadEvents
from attention_service.modules.fitted_store import FittedStores
from attention_service.runtime.callers import caller
from attention_service.runtime.planning.prediction_accuracy import TimedRun
from attention_service.runtime.request_timing import ModelRun, note_run
from attention_service.runtime.scheduling.request_runner import RequestRunner
from attention_service.runtime.services.recording_service import RecordingService

WAITING: Final = 64
"""Requests that wait for one model."""
OF_ONE: Final = WAITING // 2
"""The same of one caller."""
_TOKENS_OF_ONE: Final = 64
"""Tokens whose generation takes as much of a model's time as a question."""
_TRANSCRIPT_TOKENS: Final = 100
"""Tokens of the text of some 30 seconds."""
_COMPLETION_TOKENS: Final = 16
_CHAT_TOKENS: Final = 4096
"""Tokens that are generated at most if the request names no number."""


class ModelService:
    """Answers requests about whole models. Used from the event loop only."""

    def __init__(
        self,
        root: Path,
        runner: RequestRunner,
        recordings: RecordingService,
        idle_s: float,
        stuck_s: float,
        *,
        siblings: bool = False,
        spare: bool = False,
        devices: int = 1,
        prefixes: KeptPrefixes = NO_PREFIXES,
        fitted: FittedStores,
    ) -> None:
        """``siblings``: other processes answer for the same models. ``spare``: keep a process for the next load.

        ``devices``: those that each model is spread over that can be.
        """
        self._root = root
        self._runner = runner
        self._recordings = recordings
        self._siblings = siblings
        self.fits = FitsInRequests(runner, fitted.probes, fitted.vectors)
        """The stored probes and vectors that requests name."""
        self.environment = ModelEnvironment(runner.device, ModelMemory(runner.budget), idle_s, stuck_s, prefixes)
        self._spread = ModelDevices(runner.device, devices)
        self._spare = SpareProcess(self.environment) if spare and model_catalogue.has_transformers() else None
        self._models: dict[str, ResidentModel] = {}
        """Every model that was ever loaded, and is not unloaded."""
        self._unloaded: set[ResidentModel] = set()
        """Models that end once those who wait for them have their answers."""
        self._variants: dict[str, tuple[str, AdapterFolder]] = {}
        """The name of the base, and the adapter, of each name of a variant that was asked for."""

    @property
    def waiting(self) -> int:
        """Requests that wait until their model takes them."""
        return sum(model.waiting() for model in (*self._models.values(), *self._unloaded))

    @property
    def resident(self) -> int:
        """The number of resident models."""
        return sum(model.state == "resident" for model in (*self._models.values(), *self._unloaded))

    def check_progress(self) -> None:
        """Raise Stuck if the process of a model stands still."""
        for model in (*self._models.values(), *self._unloaded):
            if model.stands_s:
                raise Stuck(
                    f"the process of the model {model.name} has computed nothing for {model.stands_s:.0f} s; it is "
                    f"ended after {self.environment.stuck_s:g} s, and the next request starts it again"
                )

    # ── which there are ──────────────────────────────────────────────────────────────────────────────────────────────

    async def list(self) -> ModelList:
        """Every model that was loaded, and every checkpoint of the repository that can become one."""
        self._runner.check_ready()
        await self._read_again(self._models.values())
        own = [model.info() for model in self._models.values()]
        catalogued = await self._runner.in_thread(partial(model_catalogue.listed, self._root))
        every = own + [info for info in catalogued if info.id not in self._models]
        held = {model.name: [*model.adapters] for model in self._models.values()}
        return ModelList(data=await self._runner.in_thread(partial(all_with_adapters, self._root, every, held)))

    async def get(self, name: str) -> ModelInfo:
        """One model. Raises ModelNotFound."""
        self._runner.check_ready()
        model, adapter = await self._found(name)
        await self._read_again([model])
        infos = await self._runner.in_thread(partial(with_adapters, self._root, [model.info()], {}))
        if adapter is None or adapter.checkpoint == model.folder.checkpoint:
            return infos[0]
        loaded = adapter.name in model.adapters
        return await self._runner.in_thread(partial(adapter.variant, infos[0], model.folder.folder, loaded=loaded))

    async def load(self, request: LoadModel) -> ModelInfo:
        """Make a model resident, and wait until it is. It is loaded also if the caller leaves meanwhile."""
        self._runner.check_ready()
        for own in ("name", "dtype", "device_map", "devices"):
            if self._siblings and getattr(request, own) is not None:
                raise InvalidRequest.at(
                    own,
                    "expected none: several processes serve one repository (ATTENTION_REPLICAS), and the others would "
                    "load the model without it",
                )
        self._variants.clear()
        checkpoint, adapter = await self._runner.in_thread(
            partial(named_adapter, self._root, request.checkpoint, request.adapter)
        )
        folder = await self._runner.in_thread(partial(model_catalogue.find_folder, self._root, checkpoint))
        folder.check()
        if request.device_map is not None:
            model_catalogue.check_divisible(request.device_map)
        if request.name is None:
            await self._runner.in_thread(partial(model_catalogue.check_own_name, self._root, folder.checkpoint, "name"))
        name = request.name or folder.name
        divided = request.device_map is not None
        devices = self._spread.of_request(request, folder, adapter)
        made = ResidentModel(
            name, folder, request.dtype, self.environment, self._spare, divided=divided, devices=devices
        )
        model = self._models.get(name, made)
        same = (model.folder.folder, model.dtype, model.devices) == (folder.folder, made.dtype, made.devices)
        if not same and model.is_alive:
            raise ModelExists.at(
                "name",
                f"{name} is a model of {model.folder.checkpoint} in {model.dtype} on {', '.join(model.devices)}; "
                "unload it first, or give another name",
            )
        model = self._models[name] = model if model.is_alive else made
        question = Question()
        await self._ask(model, question)
        info = question.info or model.info()
        if (adapter := adapter or folder.adapter) is None:
            return info
        await self._ask(model, Question("adapt", adapter=adapter.facts))
        if adapter.checkpoint == folder.checkpoint:
            return model.info()
        return await self._runner.in_thread(partial(adapter.variant, model.info(), folder.folder, loaded=True))

    async def unload(self, name: str) -> None:
        """End a model once those who wait have their answers. Raises ModelNotFound unless it was loaded.

        Requests that come meanwhile load it anew, so that it ends however many come.
        """
        self._runner.check_ready()
        self._variants.clear()
        if name not in self._models and BETWEEN in name:
            base, adapter = await self._found(name)
            if adapter is not None and adapter.name in base.adapters:
                await self._ask(base, Question("forget", adapter=adapter.facts))
                return
        model = self._models.pop(name, None)
        if model is None:
            raise ModelNotFound(f"no model {name[:128]!r} is loaded", param="model")
        self._unloaded = {former for former in self._unloaded if former.is_alive} | {model}
        model.leave()
        await model.left()

    def start(self) -> None:
        """Start the spare process once the server is idle."""
        if self._spare is not None:
            self._spare.start()

    async def stop(self) -> None:
        """End every model now."""
        if self._spare is not None:
            await self._spare.stop()
        await asyncio.gather(*(model.stop() for model in (*self._models.values(), *self._unloaded)))

    async def _found(self, name: str, adapter: str | None = None) -> tuple[ResidentModel, AdapterFolder | None]:
        """The model of a name, and the adapter that is to answer: of the name or of its folder, or one beside it.

        Raises ModelNotFound, ModelExists, InvalidCheckpoint and InvalidRequest.
        """
        if name in self._models and adapter is None:
            return self._models[name], self._models[name].folder.adapter
        key = name if adapter is None else f"{name}{BETWEEN}{adapter}"
        if key not in self._variants:
            base, folder = await self._runner.in_thread(partial(named_variant, self._root, name, adapter))
            if folder is None:
                model = await self._model(base)
                return model, model.folder.adapter
            self._variants[key] = base, folder
        base, folder = self._variants[key]
        model = await self._model(base)
        if model.folder.adapter is not None:
            raise InvalidRequest.at("adapter", f"{base} has an adapter in its own folder, and takes no other one")
        return model, folder

    async def _model(self, name: str) -> ResidentModel:
        """The model of a name: one that was loaded, or one of a checkpoint. Raises ModelNotFound and ModelExists."""
        if (model := self._models.get(name)) is not None:
            return model
        folder = await self._runner.in_thread(partial(model_catalogue.find_name, self._root, name))
        devices = self._spread.of_folder(folder)
        made = ResidentModel(folder.name, folder, None, self.environment, self._spare, devices=devices)
        model = self._models.get(made.name, made)
        if model.folder.folder != folder.folder:
            raise ModelExists.at(
                "model",
                f"{model.name} is a model of {model.folder.checkpoint}; load {folder.checkpoint} with a name of its "
                "own",
            )
        return model

    # ── questions ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def ask(
        self, name: str, operation: str, request: WireModel, form: str = SAFETENSORS, lens: Path | None = None
    ) -> WrittenReply:
        """Have a model answer a request, and load it if need be. ``form``: the media type of the reply.

        ``lens``: the file of the lens that it reads by.

        Raises ModelNotFound, ModelEnded, Overloaded, what the budget raises, and what the model does.
        """
        encoding: Encoding = getattr(request, "encoding", "list")
        read_by = None if lens is None else str(lens)
        model, question = await self._question(name, operation, request, form=form, encoding=encoding, lens=read_by)
        await self._ask(model, question)
        reply, question.reply = question.reply, None  # the reply's memory is to be free once it is sent
        if reply is None:
            raise InternalError("the process of the model gave no answer")
        await self._store_recording(question)
        self._note(model, question)
        return reply

    async def stream(
        self, name: str, operation: str, request: WireModel, deadline: float | None = None
    ) -> AsyncGenerator[memoryview]:
        """Yield the events of a generation, which stops when the iterator is closed. Raises what ``ask`` does.

        ``deadline``: ``time.monotonic`` seconds before which it ends with the tokens that it has.
        """
        events = UnreadEvents(self._runner.host)
        model, question = await self._question(
            name, operation, request, on_event=events.put, deadline=deadline, cost=cost_of(request)
        )
        answering = asyncio.create_task(self._ask(model, question))
        answering.add_done_callback(lambda _: events.end())
        try:
            while (event := await events.get()) is not None:
                if event is question.last:
                    await self._store_recording(question)
                yield event
            await answering
        finally:
            answering.cancel()
            await asyncio.wait([answering])
            events.close()
            question.last = question.recording = None  # the model keeps its last question
            if question.began:
                self._note(model, question)

    async def _question(
        self, name: str, operation: str, request: WireModel, **more: Any
    ) -> tuple[ResidentModel, Question]:  # fmt: skip
        """The model of a name, kept for later, and a request to it; ``more``: further fields. Raises as ``_named``."""
        model, adapter = await self._named(name, request)
        asked = AskedModelName({name, model.name}, model.folder.checkpoint)
        return model, Question(
            operation, to_body(request, JSON, "request", "base64"), adapter=adapter,
            alone=bool(getattr(request, "alone", False)), probes=await self.fits.probe_files(request, asked),
            vectors=await self.fits.vector_files(request, asked), **more,
        )  # fmt: skip

    async def _named(self, name: str, request: WireModel) -> tuple[ResidentModel, dict[str, str] | None]:
        """The model of a name, kept for later, and the facts of the adapter that is to answer.

        Raises ModelNotFound, and InvalidCheckpoint if it is refused.
        """
        self._runner.check_ready()
        model, adapter = await self._found(name, getattr(request, "adapter", None))
        if model.state == "idle":
            await self._read_again([model] if model.name in self._models else [])
            model.folder.check()
        if adapter is not None:
            adapter.check()
        return self._models.setdefault(model.name, model), None if adapter is None else adapter.facts

    async def _read_again(self, models: Iterable[ResidentModel]) -> None:
        """Read the files of idle models again, which may have changed since they were loaded."""
        for model in [idle for idle in models if idle.state == "idle"]:
            with suppress(CheckpointNotFound, InvalidCheckpoint):  # the next load says so
                read = partial(model_catalogue.find_folder, self._root, model.folder.checkpoint)
                folder = await self._runner.in_thread(read)
                if model.state == "idle":
                    model.folder = folder

    async def _ask(self, model: ResidentModel, question: Question) -> None:
        asks = caller.get().name
        for count, limit, whose in ((model.waiting(), WAITING, ""), (model.waiting(asks), OF_ONE, " of yours")):
            if count >= limit:
                raise Overloaded(f"{limit} requests{whose} wait for this model; try again later", limit=limit)
        await model.ask(question)

    async def _store_recording(self, question: Question) -> None:
        """Store the recording of a request, before its reply names it."""
        if question.recording is not None:
            await self._recordings.add(from_body(RecordingFile, question.recording, SAFETENSORS, "recording"))

    def _note(self, model: ResidentModel, question: Question) -> None:
        """Count a run that ended now."""
        if (of_run := question.time) is not None:
            predicted = Estimate(*[ms / 1e3 for ms in of_run["predicted_ms"]])
            seconds, peak = of_run["measured_ms"] / 1e3, question.peak_bytes
            self.environment.accuracy.record(
                [TimedRun(model.name, of_run["purpose"], predicted, seconds, peak, model=True)]
            )
        compute_ms = question.compute_ms or (time.monotonic() - question.began) * 1e3
        note_run(question.came, ModelRun(model.name, self.environment.device.place, model.dtype, compute_ms))


def cost_of(request: WireModel) -> float:
    """The share of a model's time that a generation takes, where a question takes 1."""
    if isinstance(request, TranscriptionRequest):
        return 1 + _TRANSCRIPT_TOKENS / _TOKENS_OF_ONE
    if isinstance(request, ResponseRequest):
        return 1 + (request.max_output_tokens or _CHAT_TOKENS) / _TOKENS_OF_ONE
    if not isinstance(request, GenerationOptions):
        return 1.0
    tokens, prompts = request.max_tokens, 1
    if isinstance(request, ChatCompletionRequest):
        tokens = request.max_completion_tokens or tokens or _CHAT_TOKENS
    elif isinstance(request, CompletionRequest) and isinstance(request.prompt, list):
        prompts = sum(not isinstance(prompt_part, int) for prompt_part in request.prompt) or 1
    return prompts * (request.n or 1) * (1 + (tokens or _COMPLETION_TOKENS) / _TOKENS_OF_ONE)

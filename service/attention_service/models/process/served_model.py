"""The model of a process, as the loop of its turns asks it."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import torch

from attention_contract.errors import AttentionError, InvalidCheckpoint, NotFinite
from attention_service.models.costs.model_pace import times_of
from attention_service.models.generation.decoding.decoder import Decoder
from attention_service.models.generation.generation import RunningGeneration
from attention_service.models.generation.generation_turns import decode, read_prompts
from attention_service.models.inputs.tokenizer_faults import is_fault
from attention_service.models.loaded.adapters import needed_bytes
from attention_service.models.loaded.checkpoint_processors import reason_of
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import model_info
from attention_service.models.passes.device_heads import DeviceHeads
from attention_service.models.process.answered_contexts import AnswerGeneration
from attention_service.models.process.finite_answers import finite_work, located
from attention_service.models.process.generation_times import generation_time
from attention_service.models.process.model_operations import prepare
from attention_service.models.process.priced_questions import AskedModel, joined
from attention_service.models.process.served import Answer, Emit, Facts, PricedRun
from attention_service.models.process.work_blocks import with_adapter
from attention_service.modules.checkpoints.adapter_files import AdapterFiles
from attention_service.modules.checkpoints.checkpoint_files import SHIPPED_MODEL
from attention_service.runtime.device.freed_memory import MUCH
from attention_service.runtime.device.shared_cores import SharedCores
from attention_service.runtime.device.torch_device import is_out_of_memory

_MAX_REASON: Final = 400
"""Characters of a fault in the reason for which a model cannot be loaded."""


class ServedModel:
    """A model that answers the requests of its process."""

    def __init__(self, loaded: LoadedModel, prefix_bytes: int = 0) -> None:
        """``prefix_bytes``: memory for the keys and values of texts that have ended."""
        self.loaded = loaded
        self._decoder = Decoder(loaded, prefix_bytes)
        self._asked = AskedModel(loaded, self._decoder)
        threads = torch.get_num_threads() if loaded.device.torch.type == "cpu" else 1
        self._threads, self._cores = threads, SharedCores(threads)

    @classmethod
    def load(
        cls, facts: dict[str, Any], progress: Callable[[float], None], share: DeviceHeads | None = None
    ) -> Self:  # fmt: skip
        """Load a checkpoint by the facts of the message ``load``. Raises InvalidCheckpoint, whatever its files hold.

        ``share``: the part that this process has of a model that is spread over devices.
        """
        if facts["threads"]:
            torch.set_num_threads(facts["threads"])
        if share is None:
            torch.seed()  # texts that are drawn without a seed of their own
        device = torch.device(facts["device"])
        folder, free_bytes = Path(facts["folder"]), facts["free_bytes"]
        try:
            loaded = LoadedModel.load(
                folder, dtype=facts["dtype"], device=device, progress=progress, free_bytes=free_bytes, share=share
            )
        except AttentionError:
            raise
        except BaseException as fault:  # whatever a checkpoint does to the code of its model
            if is_out_of_memory(fault) or not is_fault(fault):
                raise
            reason = " ".join(reason_of(fault, folder).split())[:_MAX_REASON]
            raise InvalidCheckpoint.at(
                "checkpoint", f"{folder.name} cannot be loaded: {type(fault).__name__}: {reason}"
            ) from fault
        loaded.name = facts["name"]  # that of its folder is another where the server's users chose one
        return cls(loaded, facts["prefix_bytes"])

    def info(self) -> dict[str, Any]:
        """Return the fields of ModelInfo that the model itself knows."""
        info = model_info(self.loaded)
        return info | {"layers": [layer.model_dump() for layer in info["layers"]]}

    def held_bytes(self) -> int | None:
        """Return the bytes of a GPU that PyTorch has reserved; much that is free goes back first. None on a CPU."""
        device = self.loaded.device.torch
        if device.type != "cuda":
            return None
        if torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) > MUCH:
            torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(device)

    def adapter_bytes(self) -> dict[str, int]:
        """Return the memory that each of its adapters takes, by name."""
        return self.loaded.adapters.bytes

    def prepare(self, operation: str, body: memoryview, facts: Facts, emit: Emit) -> PricedRun:
        """Check a request and estimate its memory. Raises what the operation raises.

        An ``adapter`` that is not in memory is loaded first, once its memory is admitted.
        """
        self.loaded.check_files()
        made = partial(prepare, self._asked, operation, body, facts, emit)
        if (adapter := facts.get("adapter")) is None:
            return finite_work(made(), self.loaded, made, body)
        adapters, name = self.loaded.adapters, adapter["name"]
        files = AdapterFiles.open(Path(adapter["folder"]), Path(adapter["root"]))

        def loaded() -> PricedRun:
            return with_adapter(self.loaded, adapters.known(name, files.written) or adapters.load(name, files), made)

        is_known = adapters.known(name, files.written) is not None
        work = loaded() if is_known else PricedRun(needed_bytes(files.bytes), loaded)
        return finite_work(work, self.loaded, loaded, body)

    @contextmanager
    def turn(self, *, spares_core: bool) -> Iterator[None]:
        """Compute in a block, with a thread less if a core is spared. Threads sleep beside other programs."""
        self._cores.look()
        if not spares_core or self._threads == 1:
            yield
            return
        torch.set_num_threads(self._threads - 1)
        try:
            yield
        finally:
            torch.set_num_threads(self._threads)

    def answer_joined(self, questions: Sequence[Any]) -> list[Answer]:
        """Answer questions of one group by one pass."""
        return joined(self._asked, questions)

    def read(self, running: Sequence[RunningGeneration], most: int) -> dict[int, Exception]:
        """Read prompts of generations, up to so many tokens. Returns the faults by the place of a generation."""
        return self._timed(running, "reading", partial(read_prompts, self._decoder, running, most))

    def step(self, running: Sequence[RunningGeneration]) -> dict[int, Exception]:
        """Give each text of these generations its next token. Returns the faults by the place of a generation."""
        return self._timed(running, "tokens", partial(decode, self._decoder, running))

    def _timed(
        self, running: Sequence[RunningGeneration], part: str, step: Callable[[], dict[int, Exception]]
    ) -> dict[int, Exception]:
        """Run a step, and note its time as that of the only generation that has it; of several it is nobody's.

        Faults of numbers that are not finite name the layer.
        """
        began = time.perf_counter()
        faults = step()
        took_ms = 1e3 * (time.perf_counter() - began)
        for generation in running:
            generation.times[part] = generation.times.get(part, 0.0) + took_ms
            generation.has_mates = generation.has_mates or len(running) > 1
        for at, fault in faults.items():
            if isinstance(fault, NotFinite):
                faults[at] = located(fault, self.loaded, running[at].run_again)
        return faults

    def finish(self, running: RunningGeneration) -> Answer | PricedRun:
        """Return the end of a generation, or the work that it was the first part of."""
        if isinstance(running, AnswerGeneration):
            return running.then()
        of_run = generation_time(self._asked.costs, running)
        if of_run is not None:
            running.ran |= {**times_of(of_run.predicted), "compute_ms": of_run.measured_ms}
        done = running.end()
        return Answer(recording=done.recording, last=done.last, tokens=done.tokens, time=of_run)

    def recover(self, fault: Exception) -> None:
        """Free what a failed request holds. Raises Stuck if the device computes nothing any more."""
        self.loaded.device.recover(fault)
        self.loaded.device.check()


def warm() -> None:
    """Import what transformers imports late, by loading the model that ships, of which nothing is kept."""
    if SHIPPED_MODEL.is_dir():
        LoadedModel.load(SHIPPED_MODEL, dtype="float32", device=torch.device("cpu"), progress=lambda _: None)

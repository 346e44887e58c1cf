"""A text's way through a whole checkpoint, recorded or predicted by the client in a process of its own.

transformers computes the other parts of a model. It takes seconds to import and memory that no plan counts, so it never
enters the server's process: the command ``attention record`` or ``attention predict`` runs beside it, for one text at
a time, and ends with its caller or at its deadline.
"""

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import orjson
import psutil

from attention_contract.errors import DeadlineExceeded, InvalidCheckpoint, InvalidRequest, OverBudget, Overloaded
from attention_contract.schemas.recordings import TARGET_VARIABLE, TEXT_VARIABLE, RecordingFile, RecordText
from attention_contract.schemas.text_predictions import PredictText, TextPredictions
from attention_contract.wire import JSON, SAFETENSORS, from_body, to_json
from attention_service.modules.checkpoints.catalogue import described, has_transformers
from attention_service.runtime.callers import caller

_LONGEST_S: Final = 300.0
"""Seconds that one recording may take."""
WAITING: Final = 8
"""Texts that run, or wait for their turn."""
OF_ONE: Final = WAITING // 2
"""The same of one caller."""
_MARGIN: Final = 1.25
"""Memory that a process may take, as a multiple of its estimate, before it is ended."""
_LOOK_S: Final = 0.1
"""Seconds between two looks at the memory of a process."""
_COPIES: Final = 3
"""Times that the bytes of a checkpoint are in memory: as mapped, as loaded, and while a layer is cast."""
_VOCABULARY: Final = 2**18
"""Tokens of a large vocabulary."""
_PROCESS_BYTES: Final = 2**29
"""Memory of a process that has imported transformers."""
_PASSED: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH", "LD_LIBRARY_PATH")
"""Variables that the process is given: none with a secret."""


def needed_bytes(root: Path, request: RecordText | PredictText) -> int:
    """Estimate the memory of a recording, or of predictions.

    Raises CheckpointNotFound, InvalidCheckpoint and InvalidRequest.
    """
    if not has_transformers():
        raise InvalidRequest(
            "checkpoint: its other layers run by transformers, which this server lacks; install its extra "
            "(attention-service[transformers]), or record with `attention record` where it is installed, and send that",
            param="checkpoint",
        )
    checkpoint = described(root, request.checkpoint)
    if not checkpoint.records_text:
        raise InvalidCheckpoint(
            f"checkpoint: {request.checkpoint} has no tokenizer; put the files of its tokenizer beside it",
            param="checkpoint",
        )
    # A token has at least one byte, but for a few that a tokenizer adds.
    tokens = len(request.text.encode()) + len((request.target or "").encode()) + 4
    weights = 4 * tokens**2 * max(checkpoint.layers, 1) * (checkpoint.heads or 1)
    if isinstance(request, RecordText):
        weights += 4 * tokens * (checkpoint.d_model or 0) * checkpoint.layers * len(request.taps)
        logits = 0
    else:
        logits = 2 * 4 * tokens * _VOCABULARY
    return _PROCESS_BYTES + _COPIES * checkpoint.bytes + 2 * weights + logits


class TextRecorder:
    """Runs one text at a time."""

    def __init__(self, root: Path, holding: Callable[[int], AbstractAsyncContextManager[None]]) -> None:
        """``holding``: waits for so many bytes of the memory budget, and holds them while its block runs."""
        self._root = root
        self._holding = holding
        self._turn = asyncio.Lock()
        self._waiting: Counter[str] = Counter()
        """Texts of each caller."""

    async def record(self, request: RecordText, need: int, deadline: float | None) -> RecordingFile:
        """Run the recorder, which needs so many bytes, and return what it recorded.

        Raises InvalidCheckpoint with what the recorder says, Overloaded if too many wait, DeadlineExceeded, and
        OverBudget if it takes much more memory than it needs by the estimate.
        """
        with TemporaryDirectory(prefix="attention-recording-") as folder:
            file = Path(folder) / "recording.safetensors"
            taps = [f"--taps={tap}" for tap in request.taps]
            await self._run(["record", "--local", f"--output={file}", *taps], request, need, deadline)
            return await asyncio.to_thread(_read, file)

    async def predict(self, request: PredictText, need: int, deadline: float | None) -> TextPredictions:
        """Run the model with its head, unedited and edited. Raises what ``record`` raises."""
        with TemporaryDirectory(prefix="attention-predictions-") as folder:
            edits = Path(folder) / "edits.json"
            edits.write_bytes(orjson.dumps(orjson.loads(to_json(request)).get("edits", {})))
            more = [] if request.position is None else [f"--position={request.position}"]
            command = ["predict", "--json", f"--edits={edits}", f"--top-k={request.top_k}", *more]
            return from_body(TextPredictions, await self._run(command, request, need, deadline), JSON, "reply")

    async def _run(
        self, command: list[str], request: RecordText | PredictText, need: int, deadline: float | None
    ) -> bytes:
        """Run a command of ``attention`` in turn. Return its output."""
        asks = caller.get().name
        for count, limit, whose in ((self._waiting.total(), WAITING, ""), (self._waiting[asks], OF_ONE, " of yours")):
            if count >= limit:
                told = f"{limit} texts{whose} wait for their model, one at a time; try again later"
                raise Overloaded(told, limit=limit)
        self._waiting[asks] += 1
        now = time.monotonic()
        until = min(now + _LONGEST_S, deadline if deadline is not None else now + _LONGEST_S)
        try:
            # The turn comes first: texts that wait for it hold no memory.
            async with asyncio.timeout(until - now), self._turn, self._holding(need):
                return await self._process(command, request, need)
        except TimeoutError:
            raise DeadlineExceeded("the model did not end in time; send a shorter text, or wait longer") from None
        finally:
            self._waiting[asks] -= 1
            self._waiting += Counter()  # forgets callers without any

    async def _process(self, command: list[str], request: RecordText | PredictText, need: int) -> bytes:
        # Other users of the machine can read command lines, and not the environment.
        texts = {TEXT_VARIABLE: request.text}
        if request.target is not None:
            texts[TARGET_VARIABLE] = request.target
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # no Python file of the model repository is imported
            *("-m", "attention_client", *command, "--models-dir", str(self._root), "--", request.checkpoint),
            cwd=self._root,  # so that the model's name is its path in the repository
            env=_environment() | texts,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        most = int(_MARGIN * need)
        watch = asyncio.create_task(_ended_beyond(process, most))
        try:
            output, said = await process.communicate()
        finally:
            watch.cancel()
            if process.returncode is None:
                process.kill()
                await process.wait()
        if watch.done() and not watch.cancelled() and (taken := watch.result()) is not None:
            raise OverBudget(
                f"text: its model took {taken} bytes, where {need} were estimated and {most} are allowed; send a "
                "shorter text, or record it with `attention record` and send the recording",
                param="text", needed_bytes=taken, limit_bytes=most,
            )  # fmt: skip
        if process.returncode:
            raise InvalidCheckpoint(
                f"checkpoint: {request.checkpoint} cannot run this text: {_last_line(said)}", param="checkpoint"
            )
        return output


async def _ended_beyond(process: asyncio.subprocess.Process, most: int) -> int | None:
    """End a process once it holds more than so many bytes, and return how many; None if it ends before."""
    with suppress(psutil.NoSuchProcess):
        seen = psutil.Process(process.pid)
        while (taken := int(seen.memory_info().rss)) <= most:
            await asyncio.sleep(_LOOK_S)
        process.kill()
        return taken
    return None


def _read(file: Path) -> RecordingFile:
    return from_body(RecordingFile, file.read_bytes(), SAFETENSORS, "request")


def _environment() -> dict[str, str]:
    passed = {name: os.environ[name] for name in _PASSED if name in os.environ}
    return passed | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "COLUMNS": "1000"}


def _last_line(said: bytes) -> str:
    """The last line that is no frame around a message."""
    lines = [line.strip(" │") for line in said.decode("utf-8", "replace").splitlines()]
    told = [line for line in lines if any(character.isalnum() for character in line)]
    return told[-1][:500] if told else "it ended without a word"

"""Damaged folders loaded whole, each in a process of its own: the load and a text are answered, or refused by name."""

import json
import os
import resource
import signal
import warnings
from pathlib import Path
from typing import Any, Final

import psutil

from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.folders.model_catalogue import find_folder
from attention_service.models.process.served_model import ServedModel
from tools.fuzz.folder_forms import NAME
from tools.fuzz.folder_walk import FAULT, Said, said_of

SECONDS: Final = 30
"""The longest time of a load with its texts."""
MEMORY: Final = 8 * 2**30
"""Bytes of addresses that the process may take beyond those that it begins with."""
TEXTS: Final[dict[str, dict[str, Any]]] = {
    "a text": {"text": "the cat sat"}, "messages": {"messages": [{"role": "user", "content": "the cat"}]},
    "tokens": {"tokens": [3, 4, 5]},
}  # fmt: skip
"""Requests to a model that was loaded."""


def ask_loaded(root: Path) -> Said:
    """Load the model in a process of its own, whose end is a fault, and ask it about texts."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os._exit(_child(root, reading, writing))
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if status:
        return {"POST /v1/models": f"{FAULT} the process ended with status {os.waitstatus_to_exitcode(status)}"}
    found: Said = json.loads(said)
    return found


def _child(root: Path, reading: int, writing: int) -> int:
    os.close(reading)
    most = psutil.Process().memory_info().vms + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.alarm(SECONDS)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    warnings.simplefilter("ignore")
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(json.dumps(_answers(root)).encode())
    return 0


def _answers(root: Path) -> Said:
    models: list[ServedModel] = []

    def load() -> None:
        folder = find_folder(root, NAME)
        folder.check()
        facts = {"threads": 1, "device": "cpu", "folder": str(folder.folder), "free_bytes": None, "dtype": None,
                 "name": NAME, "prefix_bytes": 0}  # fmt: skip
        models.append(ServedModel.load(facts, lambda _: None))
        models[0].info()

    said = {"POST /v1/models": said_of(load)}
    if models and models[0].loaded.model.main_input_name == "input_ids":
        for name, fields in TEXTS.items():
            request = ModelForwardRequest(**fields, return_=["logits"])
            said[name] = said_of(lambda request=request: forward_reply(models[0].loaded, request))  # type: ignore[misc]
    return said

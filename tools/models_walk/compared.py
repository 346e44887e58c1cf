"""One model type, built small and held to its eager self, and to the properties of each question."""

import copy
import signal
import warnings
from typing import Any, Final

from tests.client.tiny_models import tokenizer
from transformers import PreTrainedModel

from attention_contract.errors import AttentionError
from attention_service.models.inputs.images.pair_inputs import PairInputs
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.runtime.device.torch_device import Device
from tools.models_walk.found import Found, short_error
from tools.models_walk.model_parts import PARTS
from tools.models_walk.model_types import READ, built, class_of, forms_of, processor_of, reads
from tools.models_walk.questions import QUESTIONS, NotAskedError

SECONDS: Final = 120
"""Seconds for one type."""


def limited(kind: str, device: str = "cpu") -> Found:
    """Compare one type on a device, within its time."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"it took more than {SECONDS} seconds")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        return compared(kind, device)
    finally:
        signal.alarm(0)


def compared(kind: str, device: str = "cpu") -> Found:
    """Compare every part of one model type; both models are on the device."""
    found = Found(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if (reading := reads(kind)) not in READ:
            found.architecture = class_of(kind).__name__
            found.reasons["whole"] = f"it reads {reading}"
            return found
        try:
            model = built(kind).to(device)
        except Exception as fault:
            found.reasons["whole"] = f"not built small: {short_error(fault)}"
            return found
        found.architecture = type(model).__name__
        try:
            own = copy.deepcopy(model).requires_grad_(False)
            loaded = LoadedModel(kind, own, tokenizer(), Device.open(device), processor_of(model))
        except AttentionError as fault:
            found.reasons["whole"] = short_error(fault)
            return found
        except Exception as fault:
            found.reasons["whole"] = f"fault: {short_error(fault)}"
            return found
        found.layers, found.forms = len(loaded.places), forms_of(kind)
        found.way = loaded.attention.way if loaded.places else "–"
        for part, compare in PARTS.items():
            try:
                compare(found, model, loaded)
            except Exception as fault:
                found.reasons[part] = short_error(fault)
        ask_younger(found, model, loaded)
        loaded.close()
    return found


def younger(kind: str) -> Found:
    """Ask the younger questions of one model type, and compare nothing else."""
    found, model = Found(kind), built(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = LoadedModel(kind, copy.deepcopy(model).requires_grad_(False), tokenizer(), Device.open("cpu"))
        ask_younger(found, model, loaded)
        loaded.close()
    return found


def ask_younger(found: Found, model: PreTrainedModel, loaded: LoadedModel) -> None:
    """Ask the younger questions of a model that reads the tokens of a text."""
    if not asks_younger(model, loaded):
        return
    for name, ask in QUESTIONS.items():
        try:
            found.asked[name] = ask(model, loaded)
        except (AttentionError, NotAskedError) as fault:
            found.refused[name] = short_error(fault)
        except Exception as fault:
            found.reasons[name] = f"fault: {short_error(fault)}"


def asks_younger(model: PreTrainedModel, loaded: LoadedModel) -> bool:
    """True for a model that reads the tokens of a text, which the younger questions are asked of."""
    return model.main_input_name == "input_ids" and not isinstance(loaded.reader, PairInputs)

"""The operations of a float64 model that read floats narrower than float64, by the lines of code that call them."""

import traceback
import warnings
from collections import Counter

import torch
from tests.client.tiny_models import tokenizer
from tools.models_walk.eager_runs import input_of
from tools.models_walk.model_types import built, processor_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_service.models.loaded.checked_request import check_request
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.attention_pass import AttentionPass
from attention_service.runtime.device.torch_device import Device

_NARROW = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.complex64})
_CALLERS = ("transformers/", "attention_service/", "tests/")


def narrow_reads(kind):
    """Return the operations of one pass over a text, an image or a sound of a small float64 model of a type."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = built(kind).double().requires_grad_(False)
        loaded = LoadedModel(kind, model, tokenizer(), Device.open("cpu"), processor_of(model))
        arguments = check_request(loaded, ModelForwardRequest(**input_of(loaded))).inputs.arguments
        arguments = {name: x.double() if x.is_floating_point() else x for name, x in arguments.items()}
        with _NarrowReads() as seen, torch.no_grad():
            loaded.run(arguments, AttentionPass({}))
        loaded.close()
    return dict(seen.counts)


class _NarrowReads(TorchDispatchMode):
    """Counts the operations that are given narrow floats."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, _, args=(), kwargs=None):
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        constant = function is torch.ops.aten.lift_fresh.default  # of one that is then made again in float64
        if any(x.dtype in _NARROW for x in tensors) and not constant:
            lines = [each for each in traceback.extract_stack() if any(part in each.filename for part in _CALLERS)]
            self.counts[f"{function} at {lines[-1].filename}:{lines[-1].lineno}"] += 1
        return function(*args, **kwargs or {})

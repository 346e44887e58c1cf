"""The weights of experts, beside what plain hooks on the modules of transformers see, and edited.

The module that holds experts is known here by its name, ``experts``, and by what transformers gives it.
"""

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_contract.validation import validate
from attention_service.models.loaded.checked_request import check_request, edit_tasks
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_runner import WHOLE, RunSpec
from attention_service.models.passes.attention_pass import AttentionPass
from attention_service.models.passes.attention_places import AttentionPlace
from tools.models_walk.differences import error
from tools.models_walk.questions.plain_runs import TEXTS, NotAskedError, hooked
from tools.models_walk.questions.points import layer_of, numbers, plain

_HELD: Final = ("experts", "moe", "local_experts")
"""The names that transformers gives to a module with experts."""


def router(model: PreTrainedModel, loaded: LoadedModel) -> float:
    """The weights of the experts of the first and the last layer that has any, read and halved, one of them removed."""
    places = [place for place in loaded.all_places if place.queries == "text"]
    having = [place for place in places if loaded.runner.refuses((place.key, "router"), "edit") is None]
    if not having:
        if not any(_held(place.layer) for place in places):
            raise NotAskedError("no layer that reads the text has experts")
        raise InvalidRequest.at("edits", str(loaded.runner.refuses((places[-1].key, "router"), "edit")))
    ends = [*dict.fromkeys([having[0], having[-1]])]
    return max(_error(model, loaded, place, ids) for place in ends for ids in TEXTS)


def _held(layer: nn.Module) -> list[nn.Module]:
    return [module for name, module in layer.named_modules() if name.rpartition(".")[2] in _HELD]


def _error(model: PreTrainedModel, loaded: LoadedModel, place: AttentionPlace, ids: list[int]) -> float:
    arguments = loaded.reader.read(ModelForwardRequest(tokens=ids)).arguments
    with torch.no_grad():
        weights = loaded.runner.run(arguments, RunSpec(read={(place.key, "router"): WHOLE})).at[place.key, "router"]
    seen: list[tuple[Tensor, Tensor]] = []
    removed = int(weights[0, -1].argmax())

    def hook(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        every = [*args, *options.values()]
        _, choice, given = every[:3]
        seen.append((choice.detach().clone(), given.detach().clone()))
        if len(seen) == 1:
            return None
        kept = choice != removed if choice.ndim == 2 else 1 - choice[..., removed]
        every[2] = given / 2 * kept
        return tuple(every[: len(args)]), dict(zip(options, every[len(args) :], strict=True))

    held = [module for module in _held(layer_of(model, loaded, place)) if not isinstance(module, nn.Linear)]
    with hooked(*[module.register_forward_pre_hook(hook, with_kwargs=True) for module in held]):
        plain(model, loaded, arguments)
        expected = plain(model, loaded, arguments)
    experts = weights.shape[-1]
    choice, given = seen[0]
    one_hot = torch.nn.functional.one_hot(choice, experts) if choice.ndim == 2 else choice
    dense = (one_hot * given[..., None]).sum(1)
    edits = [{"tap": "router", "scale": 0.5}, {"tap": "router", "experts": [removed], "set": 0}]
    request = validate(ModelForwardRequest, {"tokens": ids, "edits": {str(place.key): edits}})
    checked = check_request(loaded, request, lambda _: True)
    with torch.no_grad():
        found = numbers(loaded.run(arguments, AttentionPass(edit_tasks(loaded, checked))))
    rows = min(len(found), len(expected))
    read = weights.reshape(-1, experts).double().numpy(), dense.reshape(-1, experts).double().numpy()
    return max(error(*map(np.asarray, read)), error(found[-rows:], expected[-rows:]))

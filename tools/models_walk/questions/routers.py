"""The weights of experts, beside what plain hooks on the modules of transformers see, and edited.

The module that holds experts is known here by its name, ``experts``, and by what transformers gives it.
"""

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest
from attention_contract.validation import validate
from attention_service.models.answers.model_gradients import ModelGradients
from attention_service.models.loaded.checked_request import check_request, edit_tasks
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_runner import WHOLE, RunSpec
from attention_service.models.passes.attention_pass import AttentionPass
from attention_service.models.passes.attention_places import AttentionPlace
from attention_service.models.passes.float64_runs import in_float64
from tools.models_walk.differences import error
from tools.models_walk.questions.plain_runs import TEXTS, TOKEN, NotAskedError, hooked
from tools.models_walk.questions.points import layer_of, numbers, plain

_HELD: Final = ("experts", "moe", "local_experts")
"""The names that transformers gives to a module with experts."""


def router(model: PreTrainedModel, loaded: LoadedModel) -> float:
    """The weights of the experts of the first and the last layer that has any: read, halved, and their gradients."""
    places = [place for place in loaded.all_places if place.queries == "text"]
    having = [place for place in places if loaded.runner.refuses((place.key, "router"), "edit") is None]
    if not having:
        if not any(_held(place.layer) for place in places):
            raise NotAskedError("no layer that reads the text has experts")
        raise InvalidRequest.at("edits", str(loaded.runner.refuses((places[-1].key, "router"), "edit")))
    ends = [*dict.fromkeys([having[0], having[-1]])]
    errors = [_error(model, loaded, place, ids) for place in ends for ids in TEXTS]
    if loaded.head.predicts == "next":
        errors += [_gradient_error(model, loaded, place) for place in ends]
    return max(errors)


def _held(layer: nn.Module) -> list[nn.Module]:
    return [module for name, module in layer.named_modules() if name.rpartition(".")[2] in _HELD]


def _modules(model: PreTrainedModel, loaded: LoadedModel, place: AttentionPlace) -> list[nn.Module]:
    """The modules of transformers that are given the weights of experts, in the layer of an attention."""
    return [module for module in _held(layer_of(model, loaded, place)) if not isinstance(module, nn.Linear)]


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

    held = _modules(model, loaded, place)
    with hooked(*[module.register_forward_pre_hook(hook, with_kwargs=True) for module in held]):
        plain(model, loaded, arguments)
        expected = plain(model, loaded, arguments)
    experts = weights.shape[-1]
    dense = _dense(*seen[0], experts)
    edits = [{"tap": "router", "scale": 0.5}, {"tap": "router", "experts": [removed], "set": 0}]
    request = validate(ModelForwardRequest, {"tokens": ids, "edits": {str(place.key): edits}})
    checked = check_request(loaded, request, lambda _: True)
    with torch.no_grad():
        found = numbers(loaded.run(arguments, AttentionPass(edit_tasks(loaded, checked))))
    rows = min(len(found), len(expected))
    read = weights.reshape(-1, experts).double().numpy(), dense.reshape(-1, experts).double().numpy()
    return max(error(*map(np.asarray, read)), error(found[-rows:], expected[-rows:]))


def _dense(choice: Tensor, given: Tensor, experts: int) -> Tensor:
    """Numbers of the experts that are chosen as numbers ``[N, E]`` of all, 0 for the others."""
    one_hot = torch.nn.functional.one_hot(choice, experts) if choice.ndim == 2 else choice
    return (one_hot * given[..., None]).sum(1)


def _gradient_error(model: PreTrainedModel, loaded: LoadedModel, place: AttentionPlace) -> float:
    """The error of the gradient of a logit by the weights, in float64, by what hooks keep for autograd."""
    fields = {"tokens": TEXTS[0], "layers": [place.key], "wrt": ["router"], "of": {"token": TOKEN, "logit": True}}
    gradients = ModelGradients(loaded, validate(ModelGradientsRequest, fields))
    seen: list[tuple[Tensor, Tensor]] = []

    def hook(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        every = [*args, *options.values()]
        every[2] = every[2].detach().clone().requires_grad_()
        seen.append((every[1], every[2]))
        return tuple(every[: len(args)]), dict(zip(options, every[len(args) :], strict=True))

    held = _modules(model, loaded, place)
    cache = {"use_cache": False} if "use_cache" in loaded.reader.names else {}
    with in_float64(model), in_float64(loaded.model):  # also where transformers rounds to float32
        with hooked(*[module.register_forward_pre_hook(hook, with_kwargs=True) for module in held]):
            output: Any = model(**gradients.checked.inputs.arguments, **cache)
        (choice, given), *_ = seen
        (gradient,) = torch.autograd.grad(output.logits[0, -1, TOKEN], given)
        found = np.asarray(gradients.reply().layers[0].gradients["router"], np.float64)
    return error(found.reshape(-1, found.shape[-1]), _dense(choice, gradient, found.shape[-1]).numpy())

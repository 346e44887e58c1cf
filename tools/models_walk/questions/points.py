"""States of a text at the points of a model, read and added to, beside hooks of plain PyTorch on the modules."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
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
from attention_service.models.passes.points import EMBEDDINGS, Point
from tools.models_walk.differences import CLOSE, error
from tools.models_walk.questions.plain_runs import TEXTS, NotAskedError, hooked

Site = tuple[nn.Module, float]
"""A module, and the factor of its output."""
Finder = Callable[[Tensor, Any], Site]
"""Finds the module of a state in transformers, by the state and the arguments of a run."""
_SEED: Final = 5
_SIZE: Final = 0.5
"""The size of what is added, relative to the state's."""


def mlp(model: PreTrainedModel, loaded: LoadedModel) -> float:
    """What the MLP of the first and the last layer adds, read and added to."""
    return _of_layers(model, loaded, "mlp")


def hidden(model: PreTrainedModel, loaded: LoadedModel) -> float:
    """The state after the first and the last layer, read and added to."""
    return _of_layers(model, loaded, "hidden")


def embedded(model: PreTrainedModel, loaded: LoadedModel) -> float:
    """What the table of tokens returns, read and added to."""
    loaded.runner.check(EMBEDDINGS, "edit", "edits", "")
    reads: Any = model.get_encoder() if loaded.reader.pairs else model
    table = getattr(reads, "get_input_embeddings", model.get_input_embeddings)()
    return max(_error(model, loaded, ids, EMBEDDINGS, lambda *_: (table, 1.0)) for ids in TEXTS)


def _of_layers(model: PreTrainedModel, loaded: LoadedModel, name: str) -> float:
    places = [place for place in loaded.all_places if place.queries == "text"]
    if not places:
        raise NotAskedError("no layer reads the text")
    ends, errors = [*dict.fromkeys([places[0], places[-1]])], list[float]()
    reasons = [loaded.runner.refuses((place.key, name), "edit") for place in ends]
    if all(reasons):
        raise InvalidRequest.at("edits", str(reasons[0]))
    for place, reason in zip(ends, reasons, strict=True):
        if reason is None:
            layer = layer_of(model, loaded, place)
            finds: Finder = partial(_mlp_of, model, loaded, place, layer)
            finds = finds if name == "mlp" else partial(_whole, layer)
            errors += [_error(model, loaded, ids, (place.key, name), finds, place.turn) for ids in TEXTS]
    return max(errors)


def _error(
    model: PreTrainedModel, loaded: LoadedModel, ids: list[int], point: Point, finds: Finder, turn: int = 0
) -> float:
    """The largest error of a state, and of the model's output after a vector was added to every token's."""
    request = ModelForwardRequest(tokens=ids)
    arguments = loaded.reader.read(request).arguments
    with torch.no_grad():
        state = loaded.runner.run(arguments, RunSpec(read={point: WHOLE})).at[point]
    module, factor = finds(state, arguments)
    with _changing(module, turn, None) as seen:
        plain(model, loaded, arguments)
    size = float(state.float().square().mean().sqrt())
    added = _SIZE * size * torch.randn(state.shape[-1], generator=torch.Generator().manual_seed(_SEED))
    with _changing(module, turn, (added / factor).to(state)):
        expected = plain(model, loaded, arguments)
    layer, tap = point
    edits = {"embeddings" if layer is None else str(layer): [{"tap": tap, "add": added.numpy()}]}
    request = validate(ModelForwardRequest, {"tokens": ids, "edits": edits})
    checked = check_request(loaded, request, lambda _: True)
    with torch.no_grad():
        found = numbers(loaded.run(arguments, AttentionPass(edit_tasks(loaded, checked))))
    rows = min(len(found), len(expected))
    tokens = slice(min(len(_flat(state)), len(_flat(seen[0]))))  # transformers fills up Longformer's texts itself
    errors = error(_flat(state)[tokens], factor * _flat(seen[0])[tokens]), error(found[-rows:], expected[-rows:])
    return max(errors)


@torch.no_grad()
def plain(model: PreTrainedModel, loaded: LoadedModel, arguments: Any) -> np.ndarray:
    """The output of transformers."""
    cache = {"use_cache": False} if "use_cache" in loaded.reader.names else {}
    return numbers(model(**arguments, **cache, return_dict=True))


def numbers(output: Any) -> np.ndarray:
    """The logits, or the first states, of a text, token by token."""
    first: Any = output.logits if "logits" in output else output[0]
    return np.asarray(first.reshape(-1, first.shape[-1]).cpu(), np.float64)


def _flat(state: Tensor) -> np.ndarray:
    """A state of one text, batch first or time first, as rows."""
    return np.asarray(state.reshape(-1, state.shape[-1]).cpu(), np.float64)


@contextmanager
def _changing(module: nn.Module, turn: int, added: Tensor | None) -> Iterator[list[Tensor]]:
    """Add to the first output of one call of a module, which is yielded in a list."""
    seen, calls = list[Tensor](), count()

    def hook(_: Any, __: Any, output: Any) -> Any:
        if next(calls) != turn:
            return None
        first = output[0] if isinstance(output, tuple | list) else output
        seen.append(first.detach().clone())
        if added is None:
            return None
        if hasattr(output, "_replace"):
            return output._replace(**{output._fields[0]: first + added})
        return type(output)([first + added, *output[1:]]) if isinstance(output, tuple | list) else first + added

    with hooked(module.register_forward_hook(hook)):
        yield seen


def layer_of(model: PreTrainedModel, loaded: LoadedModel, place: AttentionPlace) -> nn.Module:
    """The entry of the class's own list of layers that has this attention."""
    name = next(name for name, module in loaded.model.named_modules() if module is place.module)
    parts = name.split(".")
    for end in range(1, len(parts) + 1):  # T5 has a list in each layer too
        if parts[end - 1].isdigit() and isinstance(model.get_submodule(".".join(parts[: end - 1])), nn.ModuleList):
            outer = model.get_submodule(".".join(parts[:end]))
            if outer is not model.get_submodule(name) and not isinstance(outer, nn.ModuleList):
                return outer
    raise NotAskedError("its attention is in no list of layers")


def _whole(layer: nn.Module, *_: Any) -> Site:
    return layer, 1.0


def _mlp_of(
    model: PreTrainedModel, loaded: LoadedModel, place: AttentionPlace, layer: nn.Module, state: Tensor, arguments: Any
) -> Site:
    """The module beside the attention whose output, perhaps times a number, is what the MLP is said to add."""
    name = next(name for name, module in loaded.model.named_modules() if module is place.module)
    attention = {*model.get_submodule(name).modules()}
    made: dict[nn.Module, list[Tensor]] = {}

    def note(module: nn.Module, _: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor) and _is_like(first, state):
            made.setdefault(module, []).append(first.detach().clone())  # Falcon adds to it in place

    beside = [one for one in layer.modules() if not attention & {*one.modules()}]
    with hooked(*[module.register_forward_hook(note) for module in beside]):
        plain(model, loaded, arguments)
    return _nearest({module: states[place.turn] for module, states in made.items() if place.turn < len(states)}, state)


def _is_like(one: Tensor, other: Tensor) -> bool:
    return one.numel() >= other.numel() and one.shape[-1] == other.shape[-1]


def _nearest(made: dict[nn.Module, Tensor], state: Tensor) -> Site:
    wanted, best = _flat(state), (np.inf, None, 1.0)
    for module, output in made.items():
        given = _flat(output)[: len(wanted)]
        factor = float((given * wanted).sum() / max((given * given).sum(), 1e-300))
        left = error(factor * given, wanted)
        best = min(best, (left, module, factor), key=lambda one: one[0])
    left, module, factor = best
    if module is None or left >= CLOSE:
        raise AssertionError(f"no module beside the attention returns what its mlp is said to add ({left:.0e})")
    return module, 1.0 if abs(factor - 1) < CLOSE else factor

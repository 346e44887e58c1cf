"""The attention modules of a ``transformers`` model, and the keys of their layers.

A key is the number of the layer if the model has one stack of self-attention: ``3``. Otherwise it is the name of the
stack and the number: ``"encoder.3"``, ``"decoder.3"``, ``"vision_model.3"``. Cross-attention is ``"cross.3"``.
"""

import inspect
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from attention_contract.errors import AttentionError

_NO_MIXERS: Final = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention", "mlp", "moe"})
"""Kinds of layers that attend by a softmax over pairs, or that mix no tokens."""
LayerKey = int | str
"""``3``, or ``"decoder.3"`` in a model of several stacks."""


class UnsupportedModel(AttentionError, status=422, title="This model's attention cannot run on the service"):
    """The attention of a model cannot run on the service."""


@dataclass(frozen=True)
class AttentionModule:
    """One attention module and the layers that it is."""

    path: str
    module: nn.Module
    keys: tuple[LayerKey, ...]
    """One key; several if layers share the module, in the order in which they run."""

    @property
    def implementation(self) -> str:
        """The name of the attention implementation that the module's config asks for."""
        config: Any = self.module.config
        return str(config._attn_implementation)


def uses_interface(module: nn.Module) -> bool:
    """Return True if a module asks the interface of ``transformers`` for its attention."""
    forward = inspect.unwrap(type(module).forward)
    return "ALL_ATTENTION_FUNCTIONS" in getattr(getattr(forward, "__code__", None), "co_names", ())


def own_attentions(model: nn.Module) -> list[nn.Module]:
    """Return the attention modules that compute their attention themselves."""
    attentions: list[nn.Module] = []
    closed: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if path.startswith(closed):
            continue
        name = type(module).__name__
        if uses_interface(module):
            closed = (*closed, f"{path}.")
        elif "attention" in name.lower() and _is_own(module):
            attentions.append(module)
            closed = (*closed, f"{path}.")
    return attentions


def type_names(modules: Iterable[nn.Module]) -> list[str]:
    """Return the names of their classes, each once, sorted."""
    return sorted({type(module).__name__ for module in modules})


def _is_own(module: nn.Module) -> bool:
    learns = any(True for _ in module.parameters())
    return learns and not any(map(uses_interface, module.modules()))


def other_mixers(model: nn.Module) -> dict[int, str]:
    """Return the kind of each layer that mixes tokens by other means than a softmax over pairs, by its number."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    # The config of a ResNet, and of a detector with one, lists the kinds that its class knows.
    kinds = () if getattr(type(text), "layer_types", None) else getattr(text, "layer_types", None) or ()
    return {number: str(kind) for number, kind in enumerate(kinds) if kind not in _NO_MIXERS}


def attention_modules(model: nn.Module) -> list[AttentionModule]:
    """Return the attention modules of a model that use the interface.

    Raises UnsupportedModel if there is none.
    """
    attentions = layered(model, [module for module in model.modules() if uses_interface(module)])
    if not attentions:
        own = ", ".join(type_names(own_attentions(model))) or "none of its modules"
        raise UnsupportedModel(
            f"{type(model).__name__} does not use the attention interface of transformers ({own}), so its attention "
            "cannot run on the service; take a model whose attention classes call ALL_ATTENTION_FUNCTIONS, as Llama, "
            "GPT-2, BERT, T5, ViT and others do",
            param="model",
        )
    return attentions


def layered(model: nn.Module, chosen: Collection[nn.Module]) -> list[AttentionModule]:
    """Return these modules of a model with the keys of their layers."""
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if module in chosen:
            paths.setdefault(module, []).append(path)
    if not paths:
        return []
    keys = _keys([path for several in paths.values() for path in several], model)
    times = _repeats(model, keys)
    return [
        AttentionModule(several[0], module, _layers_of([keys[path] for path in several], times))
        for module, several in paths.items()
    ]


def _keys(paths: list[str], model: nn.Module) -> dict[str, LayerKey]:
    """Return a key for each path; the paths themselves if they do not lead to numbered layers of named stacks."""
    split = {path: _split(path) for path in paths}
    stacks = {prefix for prefix, _, _ in split.values()}
    names = _stack_names(stacks, pairs=bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False)))
    keys: dict[str, LayerKey] = {}
    for path, (prefix, number, role) in split.items():
        if number is None:
            continue
        stack = "cross" if _is_cross(model.get_submodule(path), role) else names[prefix]
        keys[path] = f"{stack}.{number}" if stack else number
    unique = len(set(keys.values())) == len(paths)
    return keys if unique else {path: path for path in paths}


def _stack_names(stacks: set[tuple[str, ...]], *, pairs: bool) -> dict[tuple[str, ...], str]:
    """Name each stack by the first part of its path that not all have; ``pairs``: an encoder and a decoder."""
    shared = set.intersection(*map(set, stacks))
    if pairs:
        shared -= {"encoder", "decoder"}  # one may have no other attention, or lie in a part of the other's name
    names = {prefix: next((part for part in prefix if part not in shared), "") for prefix in stacks}
    for name in set(names.values()):
        alike = [prefix for prefix in stacks if names[prefix] == name]
        common = set.intersection(*map(set, alike))
        for prefix in alike if len(alike) > 1 else ():  # an encoder of text and one of images inside the same encoder
            own = next((part for part in prefix if part not in common), name)
            names[prefix] = name if own.startswith(("text", "language")) else own
    return names


def _split(path: str) -> tuple[tuple[str, ...], int | None, tuple[str, ...]]:
    """Split a path at its first number: the list of layers, the layer, the place in the layer."""
    parts = path.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return (tuple(parts), None, ()) if at is None else (tuple(parts[:at]), int(parts[at]), tuple(parts[at + 1 :]))


def layer_path(path: str, *, nested: bool = False) -> str | None:
    """Return the path of the layer that the module at this path is part of; None for one outside numbered layers.

    ``nested``: in lists of layers within others, as those of the stages of Swin, the innermost one; so too if the inner
    list is called ``layers``, as that of RT-DETR's encoder. A list of attentions, as in each layer of LongCat-Flash, is
    no list of layers.
    """
    prefix, number, role = _split(path)
    if nested or "layers" in role:
        parts = path.split(".")
        last = max((at for at, part in enumerate(parts[:-1]) if part.isdecimal()), default=None)
        return None if last is None else ".".join(parts[: last + 1])
    return None if number is None else ".".join((*prefix, str(number)))


def _is_cross(module: nn.Module, role: tuple[str, ...]) -> bool:
    name = ".".join(role).lower()
    named = any(word in name for word in ("cross", "encdec", "encoder_attn"))
    return named or getattr(module, "is_cross_attention", False) is True


def _repeats(model: nn.Module, keys: dict[str, LayerKey]) -> int:
    """Return how often each listed layer runs: more than once if the list is shorter than the model, as in ALBERT."""
    count = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    prefixes = {_split(path)[0] for path in keys}
    if not isinstance(count, int) or len(prefixes) > 1 or not all(isinstance(key, int) for key in keys.values()):
        return 1
    listed = model.get_submodule(".".join(prefixes.pop()))
    length = len(listed) if isinstance(listed, nn.ModuleList) else count
    return count // length if count % length == 0 else 1


def _layers_of(keys: list[LayerKey], times: int) -> tuple[LayerKey, ...]:
    first = keys[0]
    if times > 1 and isinstance(first, int):
        return tuple(range(first * times, (first + 1) * times))
    return tuple(keys)

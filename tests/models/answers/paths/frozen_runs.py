"""Path patching by hooks of plain torch, run by run, with every other component frozen at what it returned before.

Of a model of transformers with its eager attention; nothing of the service takes part.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

HEADS, WIDTH = 4, 8
Send = Callable[[Tensor, Tensor | None], Tensor]


@dataclass
class Names:
    """The names of the modules of a family."""

    layers: str
    attention: str
    projection: str
    mlp: str = "mlp"
    columns: Callable[[str, int], tuple[str, slice]] = lambda part, head: (f"{part}_proj", _slot(head))
    """The module that makes the queries, keys or values of a head, and their columns."""


def _slot(at: int) -> slice:
    return slice(at * WIDTH, (at + 1) * WIDTH)


GPT2 = Names(
    "transformer.h", "attn", "c_proj", columns=lambda part, head: ("c_attn", _slot("qkv".index(part) * HEADS + head))
)
NEOX = Names(
    "gpt_neox.layers", "attention", "dense",
    columns=lambda part, head: ("query_key_value", _slot(3 * head + "qkv".index(part))),
)  # fmt: skip
LLAMA = Names("model.layers", "self_attn", "o_proj")
OLMO2 = Names(
    "model.layers", "self_attn", "o_proj",
    columns=lambda part, head: ("v_proj" if part == "v" else f"{part}_norm", _slot(head)),
)  # fmt: skip
"""Whose queries and keys are normed over all heads."""
FAMILIES = {
    "gpt2": GPT2, "gpt_neox": NEOX, "llama": LLAMA, "gemma2": LLAMA, "qwen3": LLAMA, "olmo2": OLMO2, "granite": LLAMA,
}  # fmt: skip


@dataclass
class Seen:
    """What the components of one run made."""

    logits: Tensor
    heads: dict[int, Tensor] = field(default_factory=dict)
    attention: dict[int, Tensor] = field(default_factory=dict)
    mlp: dict[int, Tensor] = field(default_factory=dict)
    embeddings: Tensor = field(default_factory=lambda: torch.zeros(0))
    columns: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    """What the modules of queries, keys and values returned."""


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _with(output: Any, state: Tensor | None) -> Any:
    if state is None:
        return None
    return (state, *output[1:]) if isinstance(output, tuple) else state


@dataclass
class FrozenRuns:
    """The runs of one model over tokens."""

    model: PreTrainedModel
    family: str

    @property
    def names(self) -> Names:
        return FAMILIES[self.family]

    @property
    def layers(self) -> list[nn.Module]:
        return [*self.model.get_submodule(self.names.layers)]

    def attention(self, layer: int) -> nn.Module:
        return self.layers[layer].get_submodule(self.names.attention)

    @torch.no_grad()
    def run(
        self, tokens: Tensor, *, attention: dict[int, Tensor] | None = None, mlp: dict[int, Tensor] | None = None,
        embeddings: Tensor | None = None, columns: tuple[int, str, slice, Tensor] | None = None,
    ) -> Seen:  # fmt: skip
        """Run the model with these outputs of components in place of their own."""
        names, seen = self.names, Seen(torch.zeros(0))

        def keep(into: dict[Any, Tensor], key: Any, put: dict[int, Tensor] | None) -> Any:
            def hook(_: nn.Module, __: Any, output: Any) -> Any:
                into[key] = _first(output).clone()
                return _with(output, (put or {}).get(key))

            return hook

        def first(_: nn.Module, args: tuple[Any, ...]) -> Any:
            seen.embeddings = args[0].clone()
            return None if embeddings is None else (embeddings, *args[1:])

        with ExitStack() as stack:
            stack.callback(self.layers[0].register_forward_pre_hook(first).remove)
            for number, layer in enumerate(self.layers):
                module = self.attention(number)

                def given(_: nn.Module, args: tuple[Any, ...], number: int = number) -> None:
                    seen.heads[number] = args[0].clone()

                stack.callback(module.get_submodule(names.projection).register_forward_pre_hook(given).remove)
                stack.callback(module.register_forward_hook(keep(seen.attention, number, attention)).remove)
                mixed = layer.get_submodule(names.mlp)
                stack.callback(mixed.register_forward_hook(keep(seen.mlp, number, mlp)).remove)
                for name in {names.columns(part, 0)[0] for part in "qkv"}:

                    def made(_: nn.Module, __: Any, output: Tensor, key: tuple[int, str] = (number, name)) -> Any:
                        seen.columns[key] = output.clone()
                        if columns is None or columns[:2] != key:
                            return None
                        changed = output.clone()
                        changed[..., columns[2]] = columns[3][..., columns[2]]
                        return changed

                    stack.callback(module.get_submodule(name).register_forward_hook(made).remove)
            seen.logits = self.model(tokens).logits
        return seen

    @torch.no_grad()
    def frozen(self, tokens: Tensor, sender: dict[str, Any], send: Send, other: Tensor | None) -> Seen:
        """The run in which one component sends another output, and all others what they sent before.

        send: the changed output, of the output in the run and that in the run over other tokens.
        """
        clean = self.run(tokens)
        changed = None if other is None else self.run(other)
        attention, mlp, embeddings = dict(clean.attention), dict(clean.mlp), None
        layer: Any = sender.get("layer")
        if sender["part"] == "embeddings":
            embeddings = send(clean.embeddings, None if changed is None else changed.embeddings)
        elif sender["part"] == "mlps":
            mlp[layer] = send(clean.mlp[layer], None if changed is None else changed.mlp[layer])
        else:
            own, heads = _slot(sender["head"]), clean.heads[layer].clone()
            project = self.attention(layer).get_submodule(self.names.projection)
            if changed is None:  # the part that the head adds is sent, and not its context
                heads[..., own] = 0
                attention[layer] = project(heads) + send(clean.attention[layer] - project(heads), None)
            else:
                heads[..., own] = send(heads[..., own], changed.heads[layer][..., own])
                attention[layer] = project(heads)
        return self.run(tokens, attention=attention, mlp=mlp, embeddings=embeddings)

    @torch.no_grad()
    def received(self, tokens: Tensor, receiver: dict[str, Any], frozen: Seen) -> Tensor:
        """The logits of the run in which one component makes what it made in a frozen run."""
        if receiver["part"] == "logits":
            return frozen.logits
        if receiver["part"] == "mlps":
            return self.run(tokens, mlp={receiver["layer"]: frozen.mlp[receiver["layer"]]}).logits
        name, own = self.names.columns(receiver["part"], receiver["head"])
        key = receiver["layer"], name
        return self.run(tokens, columns=(*key, own, frozen.columns[key])).logits

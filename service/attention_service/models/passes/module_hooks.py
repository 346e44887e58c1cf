"""Hooks that read or replace the states that go through a module of a model."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

State = Callable[[Tensor], Tensor | None]
"""Takes a state ``[B, L, d_model]``, and returns one to put in its place, or None."""


def after(module: nn.Module, change: State) -> Callable[[], None]:
    """Call ``change`` with what a module returns. Returns the function that ends it."""

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        several = isinstance(output, tuple | list)
        changed = _batched(change, output[0] if several else output)
        return None if changed is None else (changed, *output[1:]) if several else changed

    return module.register_forward_hook(hook).remove


def before(module: nn.Module, change: State) -> Callable[[], None]:
    """Call ``change`` with the states that a module is given. Returns the function that ends it."""

    def hook(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if args:
            changed = _batched(change, args[0])
            return None if changed is None else ((changed, *args[1:]), options)
        changed = _batched(change, options["hidden_states"])
        return None if changed is None else (args, options | {"hidden_states": changed})

    return module.register_forward_pre_hook(hook, with_kwargs=True).remove


def _batched(change: State, state: Tensor) -> Tensor | None:
    """Change a state that may lack a batch dimension, as those of packed sequences do."""
    if state.ndim > 2:
        return change(state)
    changed = change(state[None])
    return None if changed is None else changed[0]


def on_turn(changes: Mapping[int, State], turns: int) -> State:
    """Make each change at its turn, of a module that is called so many times a pass."""
    calls = iter(range(2**62))

    def change(state: Tensor) -> Tensor | None:
        found = changes.get(next(calls) % turns)
        return None if found is None else found(state)

    return change

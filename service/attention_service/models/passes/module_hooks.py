"""All that watches or changes the calls of a model's modules from outside.

``before`` and ``after`` read or replace the states that go through a module. ``noting_calls`` and ``noting_returns``
look at whole calls, and ``within_calls`` at their beginning and end. ``change_outputs`` and ``replaced`` put something
else in the place of a module's outputs, and of its function.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

State = Callable[[Tensor], Tensor | None]
"""Takes a state ``[B, L, d_model]``, and returns one to put in its place, or None."""
Change = Callable[[Sequence[Any], Mapping[str, Any]], tuple[tuple[Any, ...], dict[str, Any]] | None]
"""Takes the arguments of a call by place and by name, and returns those to put in their place, or None."""
OnCall = Callable[[nn.Module, Sequence[Any], Mapping[str, Any]], None]
"""Is told of a call that begins: the module, its arguments by place, and those by name."""
OnReturn = Callable[[nn.Module, Sequence[Any], Mapping[str, Any], Any], None]
"""Is told of a call that has returned: the same, and the output."""
ModeT = TypeVar("ModeT", bound=TorchFunctionMode)


def after(module: nn.Module, change: State) -> Callable[[], None]:
    """Call ``change`` with what a module returns. Returns the function that ends it."""

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        changed = _batched(change, first_of(output))
        return None if changed is None else with_first(output, changed)

    return module.register_forward_hook(hook).remove


def first_of(output: Any) -> Any:
    """The first entry of a tuple, a list or a dictionary that a module returns, or what it returns alone."""
    if isinstance(output, dict):
        return next(iter(output.values()))
    return output[0] if isinstance(output, tuple | list) else output


def with_first(output: Any, first: Tensor) -> Any:
    """The same with another first entry."""
    if isinstance(output, dict):
        return type(output)({**output, next(iter(output)): first})
    if hasattr(output, "_replace"):
        return output._replace(**{output._fields[0]: first})
    return type(output)([first, *output[1:]]) if isinstance(output, tuple | list) else first


def before(module: nn.Module, change: State) -> Callable[[], None]:
    """Call ``change`` with the states that a module is given. Returns the function that ends it."""

    def hook(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if args:
            changed = _batched(change, args[0])
            return None if changed is None else ((changed, *args[1:]), options)
        changed = _batched(change, options["hidden_states"])
        return None if changed is None else (args, options | {"hidden_states": changed})

    return module.register_forward_pre_hook(hook, with_kwargs=True).remove


def before_call(module: nn.Module, change: Change) -> Callable[[], None]:
    """Call ``change`` with the arguments of a module. Returns the function that ends it."""

    def hook(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return change(args, options)

    return module.register_forward_pre_hook(hook, with_kwargs=True).remove


def _batched(change: State, state: Tensor) -> Tensor | None:
    """Change a state that may lack a batch dimension, as those of packed sequences do."""
    if state.ndim > 2:
        return change(state)
    changed = change(state[None])
    return None if changed is None else changed[0]


def turned(change: State) -> State:
    """A change of states ``[B, L, width]`` as one of states ``[L, B, width]``."""

    def changed(state: Tensor) -> Tensor | None:
        changed_state = change(state.transpose(0, 1))
        return None if changed_state is None else changed_state.transpose(0, 1)

    return changed


def with_channels_last(change: State) -> State:
    """A change of states ``[B, rows, columns, width]`` as one of states ``[B, width, rows, columns]``."""

    def changed(state: Tensor) -> Tensor | None:
        changed_state = change(state.permute(0, 2, 3, 1))
        return None if changed_state is None else changed_state.permute(0, 3, 1, 2)

    return changed


def one_by_one(changes: Sequence[State]) -> State:
    """Make several changes, each of what the one before has made."""

    def change(state: Tensor) -> Tensor | None:
        new: Tensor | None = None
        for one_change in changes:
            changed = one_change(state if new is None else new)
            new = new if changed is None else changed
        return new

    return change


def on_turn(changes: Mapping[int, State], turns: int) -> State:
    """Make each change at its turn, of a module that is called so many times a pass."""
    calls = iter(range(2**62))

    def change(state: Tensor) -> Tensor | None:
        changed = changes.get(next(calls) % turns)
        return None if changed is None else changed(state)

    return change


@contextmanager
def noting_calls(modules: Iterable[nn.Module], note: OnCall) -> Iterator[None]:
    """Call ``note`` with each call of these modules before it begins, until the block ends."""
    with ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_pre_hook(note, with_kwargs=True).remove)
        yield


@contextmanager
def noting_returns(modules: Iterable[nn.Module], note: OnReturn) -> Iterator[None]:
    """Call ``note`` with each call of these modules when it has returned, until the block ends."""
    with ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_hook(note, with_kwargs=True).remove)
        yield


@contextmanager
def within_calls(modules: Iterable[nn.Module], begin: OnCall, end: Callable[[], None]) -> Iterator[None]:
    """Call ``begin`` with each call of these modules, and ``end`` behind it even if it fails, until the block ends."""

    def leave(*_: Any) -> None:
        end()

    with ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


def change_outputs(
    module: nn.Module, change: Callable[[nn.Module, Sequence[Any], Mapping[str, Any], Any], Any]
) -> None:
    """Put what ``change`` returns in the place of a module's outputs, or leave them for None, from now on.

    Every other hook sees the changed outputs.
    """
    module.register_forward_hook(change, with_kwargs=True, prepend=True)


def replaced(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Put another function in the place of a module's own. Returns the function that ends it."""
    own = vars(module).get("forward")
    module.forward = forward

    def end() -> None:
        if own is None:
            del module.forward
        else:
            module.forward = own

    return end


@contextmanager
def running_within(
    modules: Collection[nn.Module], begin: Callable[[nn.Module], ModeT], running: list[ModeT]
) -> Iterator[None]:
    """Enter the mode that ``begin`` makes at each run of a module, and leave it at the run's end, until the block ends.

    ``running`` holds the modes that are entered, the innermost last.
    """

    def enter(module: nn.Module, *_: Any) -> None:
        mode = begin(module)
        running.append(mode)
        mode.__enter__()  # type: ignore[no-untyped-call]

    def leave() -> None:
        running.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    with within_calls(modules, enter, leave):
        try:
            yield
        finally:
            while running:  # of a run that was cancelled
                leave()

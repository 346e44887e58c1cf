"""The first module of a model that returns NaN or ∞."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from attention_service.models.passes.module_hooks import first_of, noting_returns


class _NonfiniteError(Exception):
    """Ends a run at the first module whose output is not finite."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def first_nonfinite(model: nn.Module, again: Callable[[], Any]) -> nn.Module | None:
    """Return the first module that returns NaN or ∞ while ``again`` runs; None if each returns finite numbers."""

    def look(module: nn.Module, _: Any, __: Any, output: Any) -> None:
        state = first_of(output)
        # −∞ alone forbids a token or a key.
        if isinstance(state, Tensor) and state.is_floating_point() and not bool((state < torch.inf).all()):
            raise _NonfiniteError(module)

    with noting_returns(model.modules(), look):
        try:
            again()
        except _NonfiniteError as stopped:
            return stopped.module
        except Exception:  # it need not run to its end
            return None
    return None

"""The FLOPs of the matrices of a model, counted module by module in a run: a matrix ``[m, k]`` takes 2·m·k a row."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def counted_products(model: nn.Module) -> Iterator[dict[nn.Module, int]]:
    """Count the FLOPs of the linear layers and convolutions that run in a block, attention itself left out."""
    found: dict[nn.Module, int] = {}
    with ExitStack() as hooks:
        for module in model.modules():
            matrix = matrix_of(module)
            if matrix is not None:
                hooks.callback(module.register_forward_hook(_counter(matrix, found)).remove)
        yield found


def matrix_of(module: nn.Module) -> Tensor | None:
    """The matrix, or the kernel of a convolution, by which a module itself multiplies states."""
    if isinstance(module, nn.Embedding):
        return None
    own = module.named_parameters(recurse=False)
    return next((x for name, x in own if name.endswith("weight") and x.ndim > 1), None)


def _counter(matrix: Tensor, found: dict[nn.Module, int]) -> Any:
    def hook(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        if isinstance(module, nn.MultiheadAttention):  # pools the tokens of an image, and projects beside its modules
            width, (query, key) = module.embed_dim, given[:2]
            count = 4 * width * (query.numel() + key.numel()) + 4 * query.numel() * key.shape[1]
        else:
            state = output[0] if isinstance(output, tuple) else output
            rows = state.numel() // (state.shape[-1] if matrix.ndim == 2 else len(matrix))
            count = 2 * matrix.numel() * rows
        found[module] = found.get(module, 0) + count

    return hook

"""The FLOPs of the matrices of a model, counted module by module in a run: a matrix ``[m, k]`` takes 2·m·k a row."""

from collections import Counter
from collections.abc import Iterable

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from attention_service.models.passes.run_records import ModuleCall


def products_of(calls: Iterable[ModuleCall]) -> Counter[nn.Module]:
    """Return the FLOPs of the linear layers and convolutions among these calls, attention itself left out."""
    flops = Counter[nn.Module]()
    for module, given, made in calls:
        if (matrix := matrix_of(module)) is None:
            continue
        if isinstance(module, nn.MultiheadAttention):  # pools the tokens of an image, and projects beside its modules
            width, (query, key) = module.embed_dim, given[:2]
            flops[module] += 4 * width * (query.numel() + key.numel()) + 4 * query.numel() * key[1]
        elif made is not None:
            rows = made.numel() // (made[-1] if matrix.ndim == 2 else len(matrix))
            flops[module] += 2 * matrix.numel() * rows
    return flops


def linear_matrices(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the matrices of the linear layers among these modules."""
    return [module.weight for module in modules if isinstance(module, nn.Linear | Conv1D)]


def matrix_of(module: nn.Module) -> Tensor | None:
    """The matrix, or the kernel of a convolution, by which a module itself multiplies states."""
    if isinstance(module, nn.Embedding):
        return None
    own = module.named_parameters(recurse=False)
    return next((x for name, x in own if name.endswith("weight") and x.ndim > 1), None)

"""A checkpoint of another library as a class of transformers: the tensors of the file that each of its is made of.

Notation: D the width of a tower, N its patches.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from attention_contract.errors import InvalidCheckpoint
from attention_service.modules.checkpoints.forms.form import Facts, Form, ImageSteps, Part, whole

Shapes = Mapping[str, Sequence[int]]
"""The shape of each tensor of a file."""
INTERPOLATIONS: Final = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")
"""Names of the filters of Pillow, as timm and OpenCLIP write them."""


def tower_form(
    library: str, config: Mapping[str, Any], parts: Mapping[str, Part], images: ImageSteps, shapes: Shapes,
    *, cleans: bool = False,
) -> Form:  # fmt: skip
    """The form of a file with tensors of these shapes, of which the parts are made."""
    used = {name for part in parts.values() for name in part.names}
    return Form(Facts(config, library=library, images=images, cleans=cleans), parts, tuple(sorted({*shapes} - used)))


def unlike(reason: str) -> InvalidCheckpoint:
    """The error for a checkpoint that no class of transformers computes exactly."""
    return InvalidCheckpoint.at("checkpoint", f"no class of transformers computes it exactly: {reason}")


def need(shapes: Shapes, name: str) -> Sequence[int]:
    """The shape of a tensor. Raises InvalidCheckpoint without one."""
    if name not in shapes:
        raise InvalidCheckpoint.at("checkpoint", f"it lacks the tensor {name}")
    return shapes[name]


# ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def third(name: str, number: int) -> Part:
    """One of the three equal parts of a fused projection: queries, keys, values."""
    return Part((name,), lambda x: x.chunk(3)[number].clone())


def half(name: str, number: int) -> Part:
    """One of two equal parts."""
    return Part((name,), lambda x: x.chunk(2)[number].clone())


def transposed(name: str) -> Part:
    """A matrix that multiplies from the other side."""
    return Part((name,), lambda x: x.t().contiguous())


def shaped(name: str, *shape: int) -> Part:
    """The same numbers in another shape."""
    return Part((name,), lambda x: x.reshape(shape))


def behind_zeros(name: str) -> Part:
    """Positions ``[1, N, D]`` behind one of zeros, for a class token that has no position."""
    return Part((name,), lambda x: torch.nn.functional.pad(x, (0, 0, 1, 0)))


def before_zeros(name: str) -> Part:
    """A classifier ``[V, D]`` of the class token, for a class that appends the mean over the patches to it."""
    return Part((name,), lambda x: torch.nn.functional.pad(x, (0, x.shape[1])))


def joined(first: str, second: str) -> Part:
    """Two tensors, one behind the other."""
    return Part((first, second), lambda x, y: torch.cat([x, y]))


def zeros_like(name: str, *shape: int) -> Part:
    """Zeros, where transformers has a tensor that the computation does not use. ``name``: of one of its dtype."""
    return Part((name,), lambda x: x.new_zeros(shape))


def renamed(parts: Mapping[str, str], shapes: Shapes, prefix: str = "", source: str = "") -> dict[str, Part]:
    """Weights and biases of modules, by their names in transformers and in the file. Without a bias that is missing.

    ``prefix`` and ``source``: the beginnings of their names. Raises InvalidCheckpoint.
    """
    parts_renamed: dict[str, Part] = {}
    for new, old in parts.items():
        need(shapes, f"{source}{old}.weight")
        for kind in ("weight", "bias"):
            if f"{source}{old}.{kind}" in shapes:
                parts_renamed[f"{prefix}{new}.{kind}"] = whole(f"{source}{old}.{kind}")
    return parts_renamed


def fused(name: str, prefix: str, shapes: Shapes, *, dotted: bool = True) -> dict[str, Part]:
    """The projections of queries, keys and values of an attention of transformers, from one fused tensor of the file.

    ``dotted``: its name is followed by ``.weight``, else by ``_weight`` as in ``torch.nn.MultiheadAttention``.
    Raises InvalidCheckpoint.
    """
    sign = "." if dotted else "_"
    need(shapes, f"{name}{sign}weight")
    return {
        f"{prefix}{letter}_proj.{kind}": third(f"{name}{sign}{kind}", number)
        for kind in ("weight", "bias")
        if f"{name}{sign}{kind}" in shapes
        for number, letter in enumerate("qkv")
    }


# ── sizes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def depth(shapes: Shapes, prefix: str) -> int:
    """The number of the layers whose tensors begin with a prefix and a number."""
    numbers = {int(rest) for name in shapes if (rest := name.removeprefix(prefix).partition(".")[0]).isdecimal()
               and name.startswith(prefix)}  # fmt: skip
    if not numbers or numbers != {*range(len(numbers))}:
        raise InvalidCheckpoint.at("checkpoint", f"the numbers of its layers ({prefix}0, …) have gaps, or it has none")
    return len(numbers)


def grid(shapes: Shapes, patches: str, size: tuple[int, int]) -> tuple[int, tuple[int, int]]:
    """The side of a patch, and the rows and columns of patches of an image of this size. Raises InvalidCheckpoint.

    ``patches``: the name of the convolution that makes them.
    """
    _, colours, down, across = need(shapes, patches)
    if colours != 3 or down != across:
        raise unlike(f"its patches have {colours} colours and {down} × {across} pixels; expected 3, and squares")
    return down, (size[0] // down, size[1] // down)

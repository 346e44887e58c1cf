"""Steps of a formula on sketches: what PyTorch does for each, forward and on the way back.

Those that take a number (scale, shift) take it for free; what is made for the way back is held by autograd and not
counted again. Shapes are those of the tensors: see ``core.tape``.
"""

from attention_service.core.steps.basics import apart, changed, filled, like, plain, reduced, size_of, together
from attention_service.core.steps.elementwise import (
    add,
    cast,
    choose,
    clamped,
    divide,
    hide,
    multiply,
    quotient,
    rsqrt,
    saved,
    scale,
    shift,
    square,
    total,
)
from attention_service.core.steps.products import by_matrix, by_weight, linear, mixed, outer, product
from attention_service.core.steps.shapes import (
    cat,
    copied,
    expanded,
    for_each_head,
    halves,
    merge_heads,
    part,
    picked,
    pieces,
    split_heads,
    view,
)

__all__ = [
    "add",
    "apart",
    "by_matrix",
    "by_weight",
    "cast",
    "cat",
    "changed",
    "choose",
    "clamped",
    "copied",
    "divide",
    "expanded",
    "filled",
    "for_each_head",
    "halves",
    "hide",
    "like",
    "linear",
    "merge_heads",
    "mixed",
    "multiply",
    "outer",
    "part",
    "picked",
    "pieces",
    "plain",
    "product",
    "quotient",
    "reduced",
    "rsqrt",
    "saved",
    "scale",
    "shift",
    "size_of",
    "split_heads",
    "square",
    "together",
    "total",
    "view",
]

"""The meaning of each step of an explanation, in one sentence with its largest numbers.

Notation for shapes: Lk keys, D width of a head.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_VECTORS: Final = {
    "q": "The query is a vector of {width}: what query {query} looks for.",
    "k": "Each key is a vector of {width}: what a token offers to be found by.",
    "v": "Each key has a value of {width}: what a query gets from it.",
    "context": "The context is the sum of the values, each times its weight.",
}
_OF_KEYS: Final = {
    "raw scores": "The product of the query with each key is large where the two point the same way: {largest}.",
    "scores": "The score of a key says how well it matches the query: {largest}.",
    "capped_scores": "The cap holds every score between two limits: {largest}.",
    "weights": "The normalizer turns scores into weights: {largest}. Together they are {total}.",
}
_WHOLE: Final = "The gradient of the loss by each number of {of}: a positive one raises the loss with that number."
_BACKWARD: Final = {
    "output": _WHOLE.format(of="the output"),
    "context": _WHOLE.format(of="the context, reached through the output"),
    "weights": "More weight on a key changes the loss by the value that it brings: {extremes}.",
    "masked_scores": "A higher score takes weight from the other keys, so only differences between keys count: "
    "{extremes}.",
    "capped_scores": "Keys that a mask hides cannot change the loss: {extremes}.",
    "scores": "The gradient reaches the scores of keys that the query may look at: {extremes}.",
    "q": "The query learns from every key that it looks at: this is the sum of their parts.",
    "k": "Each key learns from the query in proportion to the gradient of its score.",
    "v": "Each value learns in proportion to its weight.",
}
_SHOWN: Final = 2
"""Keys that a sentence names."""


def forward(tap: str, values: Array, query: int) -> str:
    """Say what a tap of the forward pass is; ``values`` ``[Lk]``, ``[Lk, D]`` or ``[D]``."""
    if tap in _VECTORS:
        return _VECTORS[tap].format(width=_numbers(values.shape[-1]), query=query)
    finite = np.isfinite(values)
    if tap == "masked_scores":
        hidden = int((~finite).sum())
        hidden_keys = f"{hidden} of {len(values)} keys are hidden, with the score −∞" if hidden else "no key is hidden"
        return f"Biases and masks are applied: {hidden_keys}."
    order = [at for at in (-values).argsort(kind="stable") if finite[at]]
    return _OF_KEYS[tap].format(largest=_largest(values, order), total=f"{float(values[finite].sum()):.4g}")


def output(*, module: bool, flat: bool) -> str:
    """Say what the output is, of a module or of raw attention, with all heads in one row where ``flat``."""
    if module:
        return "The output projection mixes the contexts of all heads into one vector."
    return "The output is the contexts of all heads side by side." if flat else "The output is the context itself."


def backward(tap: str, values: Array) -> str:
    """Say what the gradient of the loss by a tap is; ``values`` ``[Lk]``, ``[Lk, D]`` or ``[D]``."""
    return _BACKWARD[tap].format(extremes=_extremes(values) if values.ndim == 1 else "")


def _numbers(count: int) -> str:
    return f"{count} number{'s' if count != 1 else ''}"


def _largest(values: Array, order: list[np.intp]) -> str:
    if not order:
        return "no key has one"
    first, *more = [f"key {at} ({float(values[at]):.4g})" for at in order[:_SHOWN]]
    return f"the largest is of {' and the next of '.join([first, *more])}"


def _extremes(values: Array) -> str:
    finite = np.where(np.isfinite(values), values, 0.0)
    up, down = int(finite.argmax()), int(finite.argmin())
    parts = [f"key {up} raises the loss most ({finite[up]:.4g})"] if finite[up] > 0 else []
    parts += [f"key {down} lowers it most ({finite[down]:.4g})"] if finite[down] < 0 else []
    return ", ".join(parts) or "no key changes it"

"""Names and meanings of the tensors in a reply's account of memory."""

from collections.abc import Mapping
from typing import Final, NamedTuple


class Told(NamedTuple):
    """A tensor, or several tensors with one lifetime."""

    name: str
    meaning: str


TENSORS: Final[Mapping[str, Told]] = {
    "inputs": Told("inputs", "the request's tensors that are still needed: query, key, value, past, mask, parameters"),
    "roles": Told("q_k_v", "queries, keys and values by head, and their intermediates"),
    "q": Told("q", "queries by head, while separately projected queries are merged into them"),
    "scores": Told("scores", "one score per head, query and key, and the factors of their product"),
    "capped_scores": Told("capped_scores", "scores after the softcap, and its intermediates"),
    "masked_scores": Told("masked_scores", "masked scores, masks, position bias, and their intermediates"),
    "lse": Told("lse", "the log-sum-exp of each query, and its intermediates"),
    "weights": Told("weights", "one weight per head, query and key, and their intermediates"),
    "context": Told("context", "the weighted sums of the values by head, and intermediates of a kernel or method"),
    "taps": Told("taps", "taps and states that are returned: recomputed, selected and converted"),
    "output": Told("output", "the output of the module, computed and converted"),
    "comparison": Told("comparison", "exact attention for a block of queries, and the difference of its weights"),
    "outputs": Told(
        "compared_outputs", "the outputs of the approximation and of exact attention, and their difference"
    ),
    "workspace": Told("workspace", "temporary memory of a kernel or an operator"),
    "graph": Told(
        "saved_for_backward",
        "other tensors that the forward pass keeps for the backward pass, without a number per pair",
    ),
    "pairs": Told("over_pairs", "scores, masks and weights of the forward pass: one number per query and key"),
    "upstream": Told("upstream", "the gradient of the output, from the request"),
    "gradients": Told("gradients", "∂L/∂ of inputs, parameters, taps and intermediates"),
    "of_pairs": Told("gradients_over_pairs", "∂L/∂ of tensors with a number per query and key"),
}
"""Tensors by their names in a rehearsal."""


def told(held: Mapping[str, int]) -> dict[str, int]:
    """Sum the bytes of a phase by the reply's tensor names."""
    found: dict[str, int] = {}
    for name, size in held.items():
        called = TENSORS[name].name if name in TENSORS else name
        found[called] = found.get(called, 0) + size
    return found

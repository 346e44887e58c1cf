"""What the tensors of an account of memory are called in a reply, and what each is: said here, and nowhere else."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from attention_service.cost.phases import Phase


class Told(NamedTuple):
    """A tensor, or several that come and go together."""

    name: str
    meaning: str


TENSORS: Final[Mapping[str, Told]] = {
    "inputs": Told("inputs", "the request's tensors that are still needed: query, key, value, past, mask, parameters"),
    "roles": Told("q_k_v", "queries, keys and values by head, and what they are made of that is still needed"),
    "q": Told("q", "queries by head, where those of separate projections are put among them"),
    "scores": Told("scores", "one for each head, query and key, and what they are a product of"),
    "capped_scores": Told("capped_scores", "scores on their way through the softcap"),
    "masked_scores": Told("masked_scores", "masks and position bias, what they are made of, and scores with them"),
    "lse": Told("lse", "the logarithm of each query's sum, and what it is made of"),
    "weights": Told("weights", "one for each head, query and key, and what they are made of"),
    "context": Told("context", "the weighted sums of the values by head, and what a kernel or a method makes for them"),
    "taps": Told("taps", "taps and states that are returned: computed again, selected, and as they are answered"),
    "output": Told("output", "the output of the module as it is made and answered"),
    "comparison": Told("comparison", "exact attention for a block of queries, and how far its weights are apart"),
    "outputs": Told("compared_outputs", "outputs of the approximation and of exact attention, and their difference"),
    "workspace": Told("workspace", "what a kernel or an operator works in"),
    "graph": Told("saved_for_backward", "what else a forward pass has without a number for each pair, and keeps"),
    "pairs": Told("over_pairs", "scores, masks and weights of a forward pass: numbers for each query and key"),
    "upstream": Told("upstream", "the gradient of the output, as it was sent"),
    "gradients": Told("gradients", "∂L/∂ of inputs, parameters and taps, and of what lies between"),
    "of_pairs": Told("gradients_over_pairs", "∂L/∂ of what has a number for each query and key"),
}
"""By the names under which a rehearsal holds them."""


def told(phase: Phase) -> dict[str, int]:
    """Bytes by what the tensors of a phase are called."""
    found: dict[str, int] = {}
    for name, size in phase.tensors.items():
        called = TENSORS[name].name if name in TENSORS else name
        found[called] = found.get(called, 0) + size
    return found

"""What the tensors of an account of memory are called in a reply, and what each is: said here, and nowhere else."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from attention_service.core.cost.phases import Phase


class Told(NamedTuple):
    """A tensor, or several that come and go together."""

    name: str
    meaning: str


TENSORS: Final[Mapping[str, Told]] = {
    # what came, and what is made of it
    "inputs": Told("inputs", "the request's tensors that are still needed: query, key, value, past, mask, parameters"),
    "encoding": Told("position_table", "a position encoding that is added to tokens, while it is made"),
    "encoded": Told("encoded_tokens", "tokens with their position encoding added"),
    "q and k": Told("encoded_tokens", "tokens with their position encoding added"),
    "q": Told("q", "queries by head"),
    "k": Told("k", "keys by key/value head, the past included"),
    "v": Told("v", "values by key/value head, the past included"),
    "apart": Told("global_q_k_v", "queries, keys and values of the separate projections of global tokens"),
    "normed": Told("norm_intermediates", "queries or keys on their way through their norm, or back"),
    "angles": Told("rope_tables", "sines and cosines of rotary positions"),
    "turned": Told("rope_intermediates", "queries or keys on their way through the rotation, or back"),
    "k with past": Told("joined_keys", "past and new keys put together, beside both"),
    "v with past": Told("joined_values", "past and new values put together, beside both"),
    "added": Told("joined_added_keys", "keys and values with those that the spec adds, beside the ones without"),
    "padding": Told("unpadded_k_v", "copies of keys and values with zeros for padding"),
    "factors": Told("score_factors", "queries and keys as their product is taken: scaled, cast, or through a layer"),
    # over pairs
    "mask": Told("mask", "which keys each query may look at, as booleans or as numbers that are added"),
    "scores": Told("scores", "one for each head, query and key"),
    "layers": Told("hidden_layer", "what the additive score has between query and key, for some pairs at a time"),
    "capping": Told("softcap_intermediates", "scores on their way through the softcap"),
    "capped": Told("capped_scores", "scores after the softcap, kept for the backward pass"),
    "bias": Told("position_bias", "what the position encoding adds to scores, and what it is made of"),
    "biases": Told("position_bias", "what the position encoding adds to scores, and what it is made of"),
    "biased": Told("biased_scores", "scores with the bias, beside those without"),
    "masked": Told("masked_scores", "scores with what is forbidden hidden, beside those before"),
    "normalizing": Told("normalizer_intermediates", "scores on their way through the normalizer, or back"),
    "weights": Told("weights", "one for each head, query and key"),
    "drawing": Told("dropout_draws", "random numbers, and which weights they keep"),
    "dropped": Told("dropped_weights", "weights after dropout"),
    "edited": Told("edited_taps", "a tap with its edits, beside the one without"),
    "forbidden": Told("mask", "which keys each query may look at, as booleans or as numbers that are added"),
    # kernels and methods
    "arguments": Told("kernel_arguments", "q, k and v once more, as the fused kernel takes them"),
    "workspace": Told("workspace", "what a kernel or a method works in, and autograd keeps of a method"),
    "tile": Told("tile_q_k_v", "queries, keys and values of the tile at work, in the dtype of its scores"),
    "gathered": Told("tile_gathered", "keys and values of a tile that lie apart, side by side"),
    "limits": Told("tile_masks", "what positions forbid in a tile, remembered for the tiles that look the same"),
    "block": Told("tile_context", "the sum of the tiles so far of a block of queries"),
    "lse": Told("lse", "the logarithm of each query's sum"),
    "values": Told("laid_out_values", "values copied so that their product can be taken"),
    # Hopfield retrieval
    "states": Told("states", "the states that are sent, or projected"),
    "patterns": Told("patterns", "the stored patterns, as they are sent or projected"),
    "without_padding": Told("unpadded_patterns", "stored patterns with zeros for padding"),
    "matrix": Told("projection_matrix", "a projection of all heads at once"),
    "projected": Told("projected", "states or patterns as they are projected, before they are told by head"),
    "state": Told("falling_states", "the states at work, and which of them still fall"),
    "weights_before": Told("weights_before", "the weights of the step before"),
    "queries": Told("scaled_states", "the states that still fall, times beta"),
    "laid_out": Told("laid_out_patterns", "stored patterns copied so that their product can be taken"),
    "difference": Told("difference", "what an update changes"),
    "entropy": Told("entropy_intermediates", "weights on their way to their entropy"),
    "nearest": Told("nearest_patterns", "the pattern that each state came to, beside the state"),
    "results": Told("results", "states, energies and what is told of each state"),
    # what goes out
    "context": Told("context", "the weighted sums of the values by head"),
    "merged": Told("merged_context", "the context with the heads of a token side by side"),
    "output": Told("output", "the output of the module, or the context of raw attention"),
    "taps": Told("taps", "the taps that are returned or differentiated by, and their gradients"),
    "selected": Told("selection", "selected heads and queries of what is computed again, or returned"),
    "problem": Told("q_k_v_mask", "queries, keys, values and mask of exact attention, to compare with"),
    "outputs": Told("compared_outputs", "outputs and contexts of the approximation and of exact attention"),
    "comparison": Told("comparison", "weights and differences of a block of queries"),
    "copied": Told("context_with_global", "the context with the rows of queries of separate projections put in"),
    # the way back
    "roles": Told("q_k_v", "queries, keys and values by head, and what they are made of that is still needed"),
    "graph": Told("saved_for_backward", "what else a forward pass has without a number for each pair, and keeps"),
    "pairs": Told("over_pairs", "scores, masks and weights of a forward pass: numbers for each query and key"),
    "upstream": Told("upstream", "the gradient of the output, as it was sent"),
    "flowing": Told("flowing_gradients", "gradients of the step before, which this one goes on from"),
    "gradients": Told("gradients", "∂L/∂ of inputs, parameters and taps, and of what lies between"),
    "of_pairs": Told("gradients_over_pairs", "∂L/∂ of what has a number for each query and key"),
    "of_values": Told("gradient_of_v", "∂L/∂v"),
    "of_weights": Told("gradient_of_weights", "∂L/∂weights"),
    "of_bias": Told("gradient_of_position_bias", "∂L/∂bias of the position encoding"),
}
"""By the names of the ledger, which are short where formulas are."""


def told(phase: Phase) -> dict[str, int]:
    """Bytes by what the tensors of a phase are called."""
    found: dict[str, int] = {}
    for name, size in phase.tensors.items():
        called = TENSORS[name].name if name in TENSORS else name
        found[called] = found.get(called, 0) + size
    return found

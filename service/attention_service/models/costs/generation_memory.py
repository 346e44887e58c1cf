"""The memory of generations: keys and values of every token, the states of the prompts, and logits to draw from."""

from typing import Final

from attention_service.models.costs.implicit_costs import state_bytes
from attention_service.models.costs.pass_memory import STATES_OF_CACHED_PASS, bias_bytes, own_scores_bytes
from attention_service.models.loaded.loaded_model import LoadedModel

_MIN_SLAB: Final = 64
"""Tokens that the smallest slab has places for; each larger one has twice as many, up to ``_SLAB_STEP``."""
_SLAB_STEP: Final = 1024
"""Tokens by which longer slabs grow."""
ROWS_OF_TEXTS: Final = 1.5
"""The most rows that a slab has for each of its texts."""
_LOGITS: Final = 8
"""Tensors as wide as the vocabulary, of each choice, that the drawing of a token has at once."""


def slab_places(tokens: int) -> int:
    """The places of the slab in which a text of so many tokens lies before its next one."""
    if tokens >= _SLAB_STEP:
        return (tokens // _SLAB_STEP + 1) * _SLAB_STEP
    places = _MIN_SLAB
    while places <= tokens:
        places *= 2
    return places


def kept_bytes(loaded: LoadedModel, length: int, *, alone: bool) -> int:
    """Estimate the memory of keys, values and states of a text of so many tokens.

    Texts that share passes (not ``alone``) hold more places than tokens.
    """
    places = loaded.places.values()
    numbers = sum(place.cached_numbers(length) for place in places)
    if not alone:  # what the layers of an encoder make is kept by those that look at it
        kept = [place for place in places if place.queries != "media" and not str(place.key).startswith("encoder.")]
        every = sum(place.token_numbers for place in kept)
        numbers = max(numbers, int(ROWS_OF_TEXTS * slab_places(length) * every))
    return loaded.model.dtype.itemsize * numbers + state_bytes(loaded)


def generation_bytes(loaded: LoadedModel, choices: int, prompt: int, new_tokens: int, *, alone: bool) -> int:
    """Estimate the memory of so many texts that are generated after prompts of so many tokens."""
    config, width = loaded.model.config.get_text_config(), loaded.model.dtype.itemsize
    largest = max((place.widths.kv_heads * place.widths.head_dim for place in loaded.places.values()), default=0)
    longer = 4 * (prompt + new_tokens) * largest  # a longer copy of one layer's is made
    states = prompt * config.hidden_size * STATES_OF_CACHED_PASS
    of_text = kept_bytes(loaded, prompt + new_tokens, alone=alone) + width * (longer + states)
    pairs = own_scores_bytes(loaded, 1, prompt, prompt) + bias_bytes(loaded, 1, prompt, prompt)
    return int(choices * (of_text + 4 * _LOGITS * config.vocab_size) + pairs)

"""The passes in which a masked model predicts each token of a text from all others."""

from attention_contract.errors import InvalidRequest
from attention_service.models.costs.pass_memory import PassMemory
from attention_service.models.costs.question_stages import Stage
from attention_service.models.loaded.loaded_model import LoadedModel


def check_masked(loaded: LoadedModel, param: str) -> int:
    """Return the mask token. Raises InvalidRequest for a model that predicts no masked tokens; ``param``: the field."""
    mask, reason = loaded.reader.mask_id, loaded.without_masks
    if mask is None or reason is not None:
        raise InvalidRequest.at(param, str(reason))
    return mask


def masked_stage(loaded: LoadedModel, memory: PassMemory, copies: int, length: int) -> Stage:
    """Return the passes over so many copies of texts, each with a masked token, as many in each as are fast together.

    The answer counts copies.
    """
    some = min(copies, memory.in_part(length)) if loaded.stacks_texts else 1
    return Stage(some, length, peak_bytes=memory.rows_bytes(some, length, 1), times=copies / some, counted=copies)

"""Choice of the event loop or a thread beside it for binding and planning a request."""

from collections.abc import Sequence
from typing import Final

from attention_contract.schemas.attention import AttentionInputs, RawInputs
from attention_contract.schemas.gradients import GradientsRequest
from attention_contract.spec import Mask
from attention_service.core.kernels.fused.cpu_blocks import CUT
from attention_service.core.masks.operation_count import CHEAP, mask_cost
from attention_service.modules.resident import Module

_CELLS: Final = 2**12
"""Tiles that masks classify in one operation in about the time of a single tile."""


def quickly_planned(module: Module | None, request: AttentionInputs) -> bool:
    """True if a request is planned about as fast as one without masks.

    The lengths are estimates from its tensors: binding checks them later.
    """
    if isinstance(request, GradientsRequest) and (request.check or request.directions or request.edits):
        return False
    masks = (
        module.config.spec.masks if module is not None else request.spec.masks if isinstance(request, RawInputs) else []
    )
    if not masks:
        return True
    if request.global_mask is not None:
        return False
    new = max(
        (array.shape[-2] for array in (request.query, request.key) if array is not None and array.ndim > 1), default=0
    )
    past = 0 if request.past_key is None or request.past_key.ndim < 2 else request.past_key.shape[-2]
    return is_quick(masks, new, new + past, 1 if request.offsets is None else request.offsets.size)


def is_quick(masks: Sequence[Mask], queries: int, keys: int, offsets: int = 1) -> bool:
    """True if masks take little planning. ``offsets``: number of different offsets of the sequences."""
    if not masks:
        return True
    tiles = -(-queries // CUT.rows) * -(-keys // CUT.cell)
    return mask_cost(masks) * offsets * (1 + tiles / _CELLS) <= CHEAP

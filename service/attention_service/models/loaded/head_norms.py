"""Heads whose context goes through a norm of its own, so that nothing behind depends on its size.

The gated delta nets, Kimi delta attention and xLSTM have one. A first-order effect of the size
of a context is 0 there, whatever the head does. No list of classes says so: the module runs with contexts of two sizes.
"""

from typing import Final

import torch
from torch import Tensor

from attention_contract.schemas.attention import Edit
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_runner import WHOLE, RunSpec
from attention_service.models.passes.attention_pass import AttentionPass, LayerTask
from attention_service.models.passes.attention_places import AttentionPlace

_LARGE: Final = 1e4
"""The factor of every context, so large that a norm's ε is nothing beside it."""
_LARGER: Final = 1e2
"""The factor of the first head's, besides. A norm over several heads would make the others' smaller by it."""
_OUTPUT_TOLERANCE: Final = 2e-3
"""The difference of outputs that are the same, as a share."""
_SMALL: Final = 0.2
"""The largest sum of gradient · context, as a share of the sum of its magnitudes, that a norm's ε can leave."""


def may_be_normed(effect: Tensor) -> bool:
    """True if products gradient · context ``[B, H, L, Dv]`` cancel in every head, as those behind a norm do."""
    size = effect.abs().sum((2, 3))
    return bool(size.any()) and bool((effect.sum((2, 3)).abs() <= _SMALL * size).all())


@torch.no_grad()
def is_normed_by_head(loaded: LoadedModel, place: AttentionPlace) -> bool:
    """True if what an attention returns in a short run is the same whatever the size of its first head's context."""
    outputs: list[Tensor] = []
    point, large = (place.key, "output"), Edit(tap="context", scale=_LARGE)
    for edits in ([large], [large, Edit(tap="context", heads=[0], scale=_LARGER)]):
        spec = RunSpec(AttentionPass({place.key: LayerTask(edits=edits)}), read={point: WHOLE})
        outputs.append(loaded.runner.run(loaded.reader.short_runs()[0], spec).at[point])
    one, other = (output.double() for output in outputs)
    share = max(_OUTPUT_TOLERANCE, torch.finfo(outputs[0].dtype).eps)
    return bool((one - other).norm() <= share * other.norm()) and bool(other.any())

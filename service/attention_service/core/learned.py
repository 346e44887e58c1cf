"""The learned tensors of a spec: which there are, in which shapes, and how they begin."""

import operator
from collections.abc import Mapping
from functools import reduce

from torch import Tensor

from attention_contract.spec import AttentionSpec
from attention_service.core import qk_norm
from attention_service.core.indices import pick
from attention_service.core.normalizers import NORMALIZERS
from attention_service.core.positions import POSITIONS
from attention_service.core.scores import SCORES
from attention_service.core.types import Learned, Problem, Selection, Widths


def learned_of(spec: AttentionSpec, widths: Widths) -> dict[str, Learned]:
    """Every learned tensor that this spec needs beside the projections, by name, in the order of the computation."""
    encoded = POSITIONS.of(spec.position).learned(widths) | qk_norm.learned(spec.qk_norm, widths)
    extra = {}
    if spec.add_bias_kv:
        extra["bias_k"] = Learned((widths.kv_heads * widths.key_dim,), fill=0.0, heads=None)
        extra["bias_v"] = Learned((widths.kv_heads * widths.value_dim,), fill=0.0, heads=None)
    # Imported here, because the exact method's stages import this module.
    from attention_service.core.methods import METHODS  # noqa: PLC0415

    parts = (SCORES.of(spec.score), NORMALIZERS.of(spec.normalizer), METHODS.of(spec.method))
    return reduce(operator.or_, (part.learned(widths) for part in parts), encoded | extra)


def narrow_learned(problem: Problem, selection: Selection) -> Mapping[str, Tensor]:
    """The learned tensors of a problem, of the selected heads alone."""
    if selection.heads is None or not problem.learned:
        return problem.learned
    narrowed = {}
    for name, learned in learned_of(problem.spec, problem.widths).items():
        x = problem.learned[name]
        narrowed[name] = x if learned.heads is None else pick(x, learned.heads, selection.heads)
    return narrowed

"""The learned tensors that the stages of exact attention read."""

from collections.abc import Mapping

from torch import Tensor

from attention_contract.spec import AttentionSpec
from attention_service.core import qk_norm
from attention_service.core.indices import pick
from attention_service.core.normalizers import NORMALIZERS
from attention_service.core.positions import POSITIONS
from attention_service.core.scores import SCORES
from attention_service.core.types import Learned, Problem, Selection, Widths


def stage_tensors(spec: AttentionSpec, widths: Widths) -> dict[str, Learned]:
    """Every learned tensor beside the projections and those of the method, by name, in the order of the computation."""
    found = POSITIONS.of(spec.position).learned(widths) | qk_norm.learned(spec.qk_norm, widths)
    if spec.add_bias_kv:
        found["bias_k"] = Learned((widths.kv_heads * widths.key_dim,), fill=0.0, heads=None)
        found["bias_v"] = Learned((widths.kv_heads * widths.value_dim,), fill=0.0, heads=None)
    return found | SCORES.of(spec.score).learned(widths) | NORMALIZERS.of(spec.normalizer).learned(widths)


def narrow_learned(problem: Problem, selection: Selection) -> Mapping[str, Tensor]:
    """The learned tensors of the stages, of the selected heads alone."""
    if selection.heads is None or not problem.learned:
        return problem.learned
    narrowed = {}
    for name, learned in stage_tensors(problem.spec, problem.widths).items():
        x = problem.learned[name]
        narrowed[name] = x if learned.heads is None else pick(x, learned.heads, selection.heads)
    return narrowed

"""The learned tensors of a spec: their names, their shapes and how they begin."""

from attention_contract.spec import AttentionSpec
from attention_service.core.methods import METHODS
from attention_service.core.problem import Learned, Widths
from attention_service.core.stages import stage_tensors


def learned_of(spec: AttentionSpec, widths: Widths) -> dict[str, Learned]:
    """Every learned tensor that this spec needs beside the projections, by name, in the order of the computation."""
    return stage_tensors(spec, widths) | METHODS.of(spec.method).learned(widths)

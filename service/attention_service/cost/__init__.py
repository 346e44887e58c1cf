"""The cost model: FLOPs, bytes and seconds of one attention, before anything is allocated.

FLOPs are counted from its sizes. What it holds and moves is seen in a rehearsal of its operation on meta tensors, and
its time is a roofline of that. The estimate that is reported is the one by which a request is admitted and its kernel
chosen.

It imports the core. Read ``attention.py`` first.
"""

from attention_service.cost.attention import SizedAttention
from attention_service.cost.circuit_cost import CircuitWork, parameter_matrices, spectrum_flops
from attention_service.cost.clock import FORMS, NOTHING, Clock, Estimate, Factor, LearnedClock, Rates, Roofline, kind_of
from attention_service.cost.datasheet import Datasheet
from attention_service.cost.flops import (
    SECOND_PASSES,
    backward_flops,
    executed_backward_flops,
    executed_flops,
    flops,
    pair_count,
)
from attention_service.cost.kernels import kernel_of, rank_seconds
from attention_service.cost.operation_counter import Traffic
from attention_service.cost.rehearsal import Seen, rehearse
from attention_service.cost.retrieval import RetrievalSizes, retrieval_flops
from attention_service.cost.similarity_cost import SimilarityWork
from attention_service.cost.tensor_bytes import (
    input_bytes,
    kv_cache_bytes,
    kv_cache_bytes_per_token,
    output_bytes,
    parameter_count,
    tap_elements,
)

__all__ = [
    "FORMS",
    "NOTHING",
    "SECOND_PASSES",
    "CircuitWork",
    "Clock",
    "Datasheet",
    "Estimate",
    "Factor",
    "LearnedClock",
    "Rates",
    "RetrievalSizes",
    "Roofline",
    "Seen",
    "SimilarityWork",
    "SizedAttention",
    "Traffic",
    "backward_flops",
    "executed_backward_flops",
    "executed_flops",
    "flops",
    "input_bytes",
    "kernel_of",
    "kind_of",
    "kv_cache_bytes",
    "kv_cache_bytes_per_token",
    "output_bytes",
    "pair_count",
    "parameter_count",
    "parameter_matrices",
    "rank_seconds",
    "rehearse",
    "retrieval_flops",
    "spectrum_flops",
    "tap_elements",
]

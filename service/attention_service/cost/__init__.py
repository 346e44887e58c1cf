"""The cost model: FLOPs, bytes and seconds of one attention, counted from its sizes before anything is allocated.

The estimate that is reported is the one by which a request is admitted and its kernel chosen.
"""

from attention_service.cost.approximate import decode_step, exactly, plainly, sent_always
from attention_service.cost.attribution_cost import attribution_flops, attribution_peak_bytes
from attention_service.cost.circuit_cost import CircuitWork, parameter_matrices, spectrum_flops
from attention_service.cost.clock import Clock, Estimate, Roofline
from attention_service.cost.curve_clock import CurveClock
from attention_service.cost.curves import Curves
from attention_service.cost.datasheet import Datasheet
from attention_service.cost.flops import (
    SECOND_PASSES,
    backward_flops,
    flops,
    pair_count,
)
from attention_service.cost.gradient_memory import (
    gradient_peak_bytes,
    gradient_phases,
)
from attention_service.cost.growth import growth, memory_order, time_order
from attention_service.cost.learned_clock import Factor, LearnedClock, kind_of
from attention_service.cost.memory import inspection_peak_bytes, memory_phases, peak_bytes, retrieval_peak_bytes
from attention_service.cost.operation_counter import Traffic
from attention_service.cost.report import cost_of, milliseconds
from attention_service.cost.retrieval import (
    Retrieval,
    retrieval_flops,
)
from attention_service.cost.similarity_cost import SimilarityWork
from attention_service.cost.tensor_bytes import (
    input_bytes,
    kv_cache_bytes,
    kv_cache_bytes_per_token,
    output_bytes,
    parameter_count,
    tap_elements,
)
from attention_service.cost.terms import Term
from attention_service.cost.time import (
    Rates,
    executed_backward_flops,
    executed_flops,
    moved_bytes,
    predicted_gradient_seconds,
    predicted_retrieval_seconds,
    predicted_seconds,
)
from attention_service.cost.traffic import gradient_traffic, traffic
from attention_service.cost.workload import Workload

__all__ = [
    "SECOND_PASSES",
    "CircuitWork",
    "Clock",
    "CurveClock",
    "Curves",
    "Datasheet",
    "Estimate",
    "Factor",
    "LearnedClock",
    "Rates",
    "Retrieval",
    "Roofline",
    "SimilarityWork",
    "Term",
    "Traffic",
    "Workload",
    "attribution_flops",
    "attribution_peak_bytes",
    "backward_flops",
    "cost_of",
    "decode_step",
    "exactly",
    "executed_backward_flops",
    "executed_flops",
    "flops",
    "gradient_peak_bytes",
    "gradient_phases",
    "gradient_traffic",
    "growth",
    "input_bytes",
    "inspection_peak_bytes",
    "kind_of",
    "kv_cache_bytes",
    "kv_cache_bytes_per_token",
    "memory_order",
    "memory_phases",
    "milliseconds",
    "moved_bytes",
    "output_bytes",
    "pair_count",
    "parameter_count",
    "parameter_matrices",
    "peak_bytes",
    "plainly",
    "predicted_gradient_seconds",
    "predicted_retrieval_seconds",
    "predicted_seconds",
    "retrieval_flops",
    "retrieval_peak_bytes",
    "sent_always",
    "spectrum_flops",
    "tap_elements",
    "time_order",
    "traffic",
]

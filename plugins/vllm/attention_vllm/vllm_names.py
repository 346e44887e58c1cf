"""The names of vLLM 0.32 that this plugin uses. A version without one fails a test by that name."""

from typing import Final

IMPORTED: Final[dict[str, tuple[str, ...]]] = {
    "vllm": ("SamplingParams",),
    "vllm.config": ("get_layers_from_vllm_config",),
    "vllm.entrypoints.cli.main": ("main",),
    "vllm.model_executor.layers.attention": ("Attention",),
    "vllm.model_executor.models.utils": ("extract_layer_index",),
    "vllm.platforms": ("current_platform",),
    "vllm.v1.attention.backend": ("AttentionCGSupport",),
    "vllm.v1.attention.backends.cpu_attn": ("CPUAttentionBackend", "CPUAttentionBackendImpl"),
    "vllm.v1.attention.backends.flash_attn": (
        "FlashAttentionBackend", "FlashAttentionImpl", "FlashAttentionMetadataBuilder",
    ),
    "vllm.v1.attention.backends.registry": ("AttentionBackendEnum", "register_backend"),
    "vllm.v1.attention.backends.triton_attn": (
        "TritonAttentionBackend", "TritonAttentionImpl", "TritonAttentionMetadataBuilder",
    ),
    "vllm.v1.core.sched.output": ("CachedRequestData", "NewRequestData", "SchedulerOutput"),
    "vllm.v1.worker.cpu_worker": ("CPUWorker",),
    "vllm.v1.worker.gpu_worker": ("Worker",),
}  # fmt: skip
"""Names that are imported, by module."""
FORWARD: Final = (
    "self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale",
    "output_block_scale",
)  # fmt: skip
"""The arguments of an implementation's ``forward``."""
BUILD: Final = ("self", "common_prefix_len", "common_attn_metadata", "fast_build")
"""The arguments of a metadata builder's ``build``."""
FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "vllm.v1.core.sched.output:SchedulerOutput": (
        "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "total_num_scheduled_tokens",
        "finished_req_ids",
    ),
    "vllm.v1.core.sched.output:NewRequestData": (
        "req_id", "prompt_token_ids", "mm_features", "sampling_params", "pooling_params", "block_ids",
        "num_computed_tokens", "lora_request", "prefill_token_ids",
    ),
    "vllm.v1.core.sched.output:CachedRequestData": (
        "req_ids", "num_computed_tokens", "num_output_tokens", "new_block_ids",
    ),
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadata": ("query_start_loc", "seq_lens", "block_table"),
    "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadata": ("query_start_loc", "seq_lens", "block_table"),
    "vllm.v1.attention.backends.triton_attn:TritonAttentionMetadata": ("query_start_loc", "seq_lens", "block_table"),
    "vllm.v1.attention.backend:CommonAttentionMetadata": ("req_idx",),
    "vllm.config.model:ModelConfig": ("enforce_eager",),
    "vllm.config.parallel:ParallelConfig": ("tensor_parallel_size",),
}  # fmt: skip
"""Fields of data classes."""
METHODS: Final[dict[str, tuple[str, ...]]] = {
    "vllm.config.model:ModelConfig": ("get_total_num_kv_heads",),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": ("get_model",),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": ("get_model",),
}
"""Methods that are called."""
ATTRIBUTES: Final[dict[str, tuple[str, ...]]] = {
    "vllm.v1.attention.backends.cpu_attn": (
        "self.num_heads", "self.head_size", "self.scale", "self.num_kv_heads", "self.alibi_slopes",
        "self.sliding_window", "self.kv_cache_dtype", "self.logits_soft_cap", "self.attn_type", "self.sinks",
        "layer.isa",
    ),
    "vllm.model_executor.layers.linear": ("self.reduce_results",),
    "vllm.v1.worker.worker_base": ("self.rank",),
    "vllm.v1.worker.gpu_input_batch": ("self.req_id_to_index",),
    "vllm.v1.worker.gpu_model_runner": ("self.input_batch", "self.requests", "self.kv_cache_config"),
    "vllm.v1.worker.gpu.model_runner": ("self.req_states", "self.kv_cache_config"),
    "vllm.v1.worker.gpu.states": ("self.req_id_to_index",),
    "vllm.entrypoints.launchers.api_server.app_state": ("state.engine_client",),
}  # fmt: skip
"""Attributes that are read, as the source of a module sets them."""

"""A plugin of vLLM that answers the field ``attention`` of completions and chats, as attention-service does.

It imports the contract, the core and the prompts of attention-service, and torch; only ``inside/`` imports vLLM. Read
``pass_observer.py`` first.
"""


def register() -> None:
    """Take the places of vLLM's attention backends, in every process of vLLM: its entry point calls this."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend  # noqa: PLC0415 - vLLM only

    register_backend(AttentionBackendEnum.CPU_ATTN, "attention_vllm.inside.cpu_backend.ObservingCPUBackend")
    register_backend(AttentionBackendEnum.FLASH_ATTN, "attention_vllm.inside.gpu_backends.ObservingFlashBackend")
    register_backend(AttentionBackendEnum.TRITON_ATTN, "attention_vllm.inside.gpu_backends.ObservingTritonBackend")

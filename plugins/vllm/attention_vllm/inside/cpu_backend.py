"""vLLM's CPU backend, whose layers are told of. vLLM imports this file by its name."""

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from attention_vllm.observing_layers import ObservingLayer
from attention_vllm.page_layouts import TokensLast


class ObservingCPULayer(ObservingLayer, CPUAttentionBackendImpl):
    """A layer of CPU_ATTN."""

    layout = TokensLast()


class ObservingCPUBackend(CPUAttentionBackend):
    """CPU_ATTN in all but the class of its layers."""

    @staticmethod
    def get_impl_cls() -> type[ObservingCPULayer]:
        """The class of a layer."""
        return ObservingCPULayer

"""vLLM's FLASH_ATTN and TRITON_ATTN, whose layers are told of. vLLM imports this file by its name.

Written by what vLLM 0.32 has; never run on a GPU. Full CUDA graphs would replay passes without these layers, so the
builders say that they support none: vLLM then takes piecewise ones, between which attention runs in Python.
"""

from typing import Any

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from attention_vllm.observing_layers import ObservingLayer
from attention_vllm.page_layouts import SideBySide


class RowsBuilder:
    """Before a metadata builder of vLLM's among the bases of a class: adds the requests of the rows."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """No full CUDA graphs."""
        return AttentionCGSupport.NEVER

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Build the metadata, with ``attention_rows``: the numbers of the rows' requests in model runner V2."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)  # type: ignore[misc]
        metadata.attention_rows = common_attn_metadata.req_idx
        return metadata


class ObservingFlashLayer(ObservingLayer, FlashAttentionImpl):
    """A layer of FLASH_ATTN."""

    layout = SideBySide()


class ObservingFlashBuilder(RowsBuilder, FlashAttentionMetadataBuilder):
    """The builder of FLASH_ATTN's metadata."""


class ObservingFlashBackend(FlashAttentionBackend):
    """FLASH_ATTN in all but these classes."""

    @staticmethod
    def get_impl_cls() -> type[ObservingFlashLayer]:
        """The class of a layer."""
        return ObservingFlashLayer

    @staticmethod
    def get_builder_cls() -> type[ObservingFlashBuilder]:
        """The class of the builder."""
        return ObservingFlashBuilder


class ObservingTritonLayer(ObservingLayer, TritonAttentionImpl):
    """A layer of TRITON_ATTN."""

    layout = SideBySide()


class ObservingTritonBuilder(RowsBuilder, TritonAttentionMetadataBuilder):
    """The builder of TRITON_ATTN's metadata."""


class ObservingTritonBackend(TritonAttentionBackend):
    """TRITON_ATTN in all but these classes."""

    @staticmethod
    def get_impl_cls() -> type[ObservingTritonLayer]:
        """The class of a layer."""
        return ObservingTritonLayer

    @staticmethod
    def get_builder_cls() -> type[ObservingTritonBuilder]:
        """The class of the builder."""
        return ObservingTritonBuilder

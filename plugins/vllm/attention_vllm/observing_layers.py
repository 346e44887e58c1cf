"""The part of an attention implementation of vLLM's that tells of its layer. No vLLM in here."""

from typing import Any, ClassVar

from torch import Tensor

from attention_vllm.asked_requests import KernelCall
from attention_vllm.layer_facts import refused_layer
from attention_vllm.page_layouts import PageLayout
from attention_vllm.worker_process import OBSERVER


class ObservingLayer:
    """Before an implementation of vLLM's among the bases of a class: lets it attend, then tells of the layer."""

    layout: ClassVar[PageLayout]
    """The layout of its pages."""
    attention_layer: int | None = None
    """The number of the layer; None for one that is not told of."""

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any,
        output: Tensor, output_scale: Tensor | None = None, output_block_scale: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Attend as vLLM does. ``query [T, H, D]``; returns what vLLM returns."""
        result = super().forward(  # type: ignore[misc]
            layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
        )
        if attn_metadata is not None and self.attention_layer is not None and not OBSERVER.idle:
            refused = refused_layer(self, layer)
            if output_scale is not None or output_block_scale is not None:
                refused = "an output in 8 bits"
            call = KernelCall(self.attention_layer, self.layout, query, kv_cache, attn_metadata, output, refused)
            OBSERVER.observe(call)
        return result

"""The workspace of PyTorch's kernels on a GPU, against numbers by hand from ``flash_attn/flash_api.cpp`` of PyTorch."""

import pytest
import torch

from attention_service.core.kv_cache.cuda_pages import workspace_bytes
from attention_service.cost.cuda_kernels import Called

FLOAT = 4


def tensors(queries, keys, heads, kv_heads, width):
    sizes = (1, queries, heads, width), (1, keys, kv_heads, width), (1, keys, kv_heads, width)
    return [torch.empty(size, dtype=torch.bfloat16, device="meta") for size in sizes]


@pytest.mark.parametrize(
    ("sizes", "splits", "width"),
    [
        ((64, 1024, 1, 1, 64), 4, 64),
        ((64, 1024, 1, 1, 136), 16, 192),
        ((64, 1024, 1, 1, 200), 16, 256),
        ((1, 2048, 256, 1, 64), 8, 64),  # the heads are 256 rows of one head, in 4 tiles
    ],
)
def test_flash_keeps_the_sums_of_each_part_of_the_keys(sizes, splits, width):
    q, k, v = tensors(*sizes)
    called = Called("_flash_attention_forward", (q, k, v, None, None, sizes[0], sizes[1], 0.0, False, False), {})
    assert called.workspace_bytes == FLOAT * splits * sizes[0] * sizes[2] * (width + 1)


@pytest.mark.parametrize(("width", "kept"), [(128, 128), (136, 192), (200, 256)])
def test_flash_sums_the_gradient_of_queries_at_the_width_of_its_kernel(width, kept):
    q, k, v = tensors(100, 100, 2, 2, width)
    called = Called("_flash_attention_backward", (q, q, k, v, q, None, None, None, 100, 100, 0.0, False), {})
    assert called.workspace_bytes == FLOAT * 2 * 128 * (kept + 1), "100 queries in rows of 128"


def test_steps_by_block_tables_keep_the_same_widths():
    assert workspace_bytes(3, 2, 1, 136) == FLOAT * 16 * 3 * 2 * (192 + 1)

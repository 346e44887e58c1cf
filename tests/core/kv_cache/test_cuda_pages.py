"""Block tables made from runs, and PyTorch's kernel for them where there is a GPU."""

from dataclasses import dataclass

import pytest
import torch

from attention_contract.spec import AttentionSpec, Causal, SlidingWindow
from attention_service.core.attention import attend
from attention_service.core.kv_cache.attention import attend_in_place
from attention_service.core.kv_cache.cuda_pages import PAGE, attend_by_pages
from attention_service.core.kv_cache.runs import Run
from attention_service.core.problem import Problem

SPECS = {None: AttentionSpec(masks=[Causal()]), 70: AttentionSpec(masks=[Causal(), SlidingWindow(left=70)])}


@dataclass(eq=False)
class Slab:
    """Slots of a cache, by heads."""

    keys: torch.Tensor
    values: torch.Tensor


def slab_of(device="cpu", dtype=torch.float32, heads=2, width=16):
    """Keys and values of 12 pages, token after token."""
    rng = torch.Generator().manual_seed(3)
    shape = 12 * PAGE, heads, width
    return Slab(*(torch.randn(shape, generator=rng).to(device, dtype).transpose(0, 1) for _ in range(2)))


def sequences_of(slab, count):
    """New queries of sequences whose pages lie scattered, and their runs."""
    pages = [[(5, 2), (0, 1), (9, 0.5)], [(3, 1), (8, 0.25)], [(1, 0.75)]]
    runs = [[Run(slab, first * PAGE, int(count * PAGE)) for first, count in each] for each in pages]
    rng = torch.Generator().manual_seed(4)
    return torch.randn(len(runs), 4, count, slab.keys.shape[2], generator=rng).to(slab.keys), runs


def dense(q, runs, spec):
    """Attention of one sequence ``[H, Q, D]`` in float64."""
    k, v = (torch.cat([getattr(run, name) for run in runs], 1)[None].double() for name in ("keys", "values"))
    past = k.shape[2] - q.shape[1]
    return attend(Problem(q[None].double(), k, v, spec=spec, past=past), kernel="materialized").context[0]


def reference_kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **how):
    """The numbers that the documentation of ``varlen_attn`` promises, from the pages of each sequence."""
    assert how["num_splits"] == 1
    assert (cu_seq_q.diff().max(), cu_seq_k.diff().max()) == (max_q, max_k)
    assert cu_seq_k.diff().equal(how["seqused_k"])
    found = []
    for index, length in enumerate(how["seqused_k"].tolist()):
        q = query[cu_seq_q[index] : cu_seq_q[index + 1]].transpose(0, 1)
        k, v = (x[how["block_table"][index].long()].flatten(0, 1)[:length].transpose(0, 1) for x in (key, value))
        left, right = how["window_size"]
        assert right == 0
        scaled, whole = q * how["scale"] * q.shape[2] ** 0.5, Run(Slab(k, v), 0, length)
        found.append(dense(scaled, [whole], SPECS[None if left == -1 else left]).to(query.dtype).transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize("left", SPECS)
@pytest.mark.parametrize("queries", [1, 3])
def test_the_kernel_is_given_the_pages_of_every_sequence(monkeypatch, left, queries):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", reference_kernel)
    q, runs = sequences_of(slab_of(), queries)
    found = attend_by_pages(q, runs, 0.25, left)
    for context, *sequence in zip(found, q, runs, strict=True):
        torch.testing.assert_close(context.double(), dense(*sequence, SPECS[left]), atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("start", "tokens"), [(3, 64), (0, 63)], ids=["begins within a page", "ends within a page before another run"]
)
def test_runs_that_are_no_pages_are_left_to_another_way(start, tokens):
    slab = slab_of()
    runs = [Run(slab, start, tokens), Run(slab, 128, 64)]
    assert attend_by_pages(torch.zeros(1, 4, 1, 16), [runs], 0.25, None) is None


def test_pages_of_two_slabs_are_left_to_another_way():
    runs = [Run(slab_of(), 0, 64), Run(slab_of(), 128, 64)]
    assert attend_by_pages(torch.zeros(1, 4, 1, 16), [runs], 0.25, None) is None


def test_a_slab_by_heads_is_left_to_another_way():
    slab = slab_of()
    by_heads = Slab(slab.keys.contiguous(), slab.values.contiguous())
    assert attend_by_pages(torch.zeros(1, 4, 1, 16), [[Run(by_heads, 0, 64)]], 0.25, None) is None


@pytest.mark.gpu
@pytest.mark.parametrize("left", SPECS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_steps_on_a_gpu_give_the_dense_numbers(left, dtype):
    q, runs = sequences_of(slab_of("cuda", dtype, width=64), 1)
    for context, *sequence in zip(attend_in_place(q, runs, SPECS[left], {}), q, runs, strict=True):
        torch.testing.assert_close(context.double(), dense(*sequence, SPECS[left]), atol=1e-2, rtol=0)

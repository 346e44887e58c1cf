"""Block tables made from runs, and PyTorch's kernel for them where there is a GPU."""

import pytest
import torch

from attention_contract.spec import AttentionSpec, Causal, SlidingWindow
from attention_service.core.attention import attend
from attention_service.core.cached_attention import CachedQueries, Run, attend_in_place
from attention_service.core.paged_steps import PAGE, attend_by_pages
from attention_service.core.types import Problem

SPECS = {None: AttentionSpec(masks=[Causal()]), 70: AttentionSpec(masks=[Causal(), SlidingWindow(left=70)])}


def slab(device="cpu", dtype=torch.float32, heads=2, width=16):
    """Keys and values of 12 pages, token after token, by heads."""
    rng = torch.Generator().manual_seed(3)
    shape = 12 * PAGE, heads, width
    return [torch.randn(shape, generator=rng).to(device, dtype).transpose(0, 1) for _ in range(2)]


def sequences_of(keys, values):
    """Sequences whose pages lie scattered, with one or three new tokens."""
    pages = [[(5, 2), (0, 1), (9, 0.5)], [(3, 1), (8, 0.25)], [(1, 0.75)]]
    runs = [[(first * PAGE, int((first + count) * PAGE)) for first, count in each] for each in pages]
    rng = torch.Generator().manual_seed(4)
    queries = [torch.randn(4, count, keys.shape[2], generator=rng).to(keys) for count in (3, 1, 1)]
    return [
        CachedQueries(q, [Run(keys[:, a:b], values[:, a:b]) for a, b in each])
        for q, each in zip(queries, runs, strict=True)
    ]


def dense(sequence, spec):
    k, v = (torch.cat([getattr(run, name) for run in sequence.runs], 1)[None].double() for name in ("keys", "values"))
    past = k.shape[2] - sequence.q.shape[1]
    return attend(Problem(sequence.q[None].double(), k, v, spec=spec, past=past), kernel="materialized").context[0]


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
        run = CachedQueries(q * how["scale"] * q.shape[2] ** 0.5, [Run(k, v)])
        found.append(dense(run, SPECS[None if left == -1 else left]).to(query.dtype).transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize("left", SPECS)
def test_the_kernel_is_given_the_pages_of_every_sequence(monkeypatch, left):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", reference_kernel)
    sequences = sequences_of(*slab())
    found = attend_by_pages([each.q for each in sequences], [each.runs for each in sequences], 0.25, left)
    for context, sequence in zip(found.split([3, 1, 1], 1), sequences, strict=True):
        torch.testing.assert_close(context.double(), dense(sequence, SPECS[left]), atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    "place",
    [slice(3, 67), slice(0, 63)],
    ids=["begins within a page", "ends within a page before another run"],
)
def test_runs_that_are_no_pages_are_left_to_another_way(place):
    keys, values = slab()
    runs = [Run(keys[:, place], values[:, place]), Run(keys[:, 128:192], values[:, 128:192])]
    assert attend_by_pages([torch.zeros(4, 1, 16)], [runs], 0.25, None) is None


def test_a_slab_by_heads_is_left_to_another_way():
    keys, values = (x.contiguous() for x in slab())
    assert attend_by_pages([torch.zeros(4, 1, 16)], [[Run(keys, values)]], 0.25, None) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("left", SPECS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_steps_on_a_gpu_give_the_dense_numbers(left, dtype):
    sequences = sequences_of(*slab("cuda", dtype, width=64))
    for context, sequence in zip(attend_in_place(sequences, SPECS[left], {}), sequences, strict=True):
        torch.testing.assert_close(context.double(), dense(sequence, SPECS[left]), atol=1e-2, rtol=0)

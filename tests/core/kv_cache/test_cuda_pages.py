"""Steps by PyTorch's kernel for block tables: what it is given, what is left to products, and the trial of it."""

from dataclasses import dataclass

import pytest
import torch
from tests.core.kv_cache.paged_flash import Call, as_on_a_gpu, paged_flash
from torch.utils._python_dispatch import TorchDispatchMode

from attention_contract.spec import AttentionSpec, Causal, SlidingWindow, Softmax
from attention_service.core.attention import attend
from attention_service.core.kv_cache import cuda_pages, paged_trial
from attention_service.core.kv_cache.attention import attend_in_place
from attention_service.core.kv_cache.cuda_pages import PAGE
from attention_service.core.kv_cache.paged_trial import paged_fault
from attention_service.core.kv_cache.runs import SlotRun
from attention_service.core.problem import Problem

SPECS = {None: AttentionSpec(masks=[Causal()]), 70: AttentionSpec(masks=[Causal(), SlidingWindow(left=70)])}


@dataclass(eq=False)
class Slab:
    """Slots of a cache."""

    keys: torch.Tensor
    values: torch.Tensor
    paged: bool = True


@pytest.fixture
def calls():
    """The calls of the kernel, which is on the CPU."""
    with paged_flash() as found:
        yield found


def slab_of(device="cpu", dtype=torch.bfloat16, heads=2, width=16, seed=3):
    """Keys and values of 12 pages, token after token."""
    rng = torch.Generator().manual_seed(seed)
    shape = 12 * PAGE, heads, width
    return Slab(*(torch.randn(shape, generator=rng).to(device, dtype).transpose(0, 1) for _ in range(2)))


PAGES = [[(5, 2), (0, 1), (9, 0.5)], [(3, 1), (8, 0.25)], [(1, 0.75)]]
"""For each sequence its runs: the first page, and the number of pages."""


def runs_of(slab, pages):
    """The runs of one sequence."""
    return [SlotRun(slab, int(first * PAGE), int(count * PAGE)) for first, count in pages]


def queries_of(slab, sequences, count):
    """New queries of 4 heads."""
    rng = torch.Generator().manual_seed(4)
    return torch.randn(sequences, 4, count, slab.keys.shape[2], generator=rng).to(slab.keys)


def dense(q, runs, spec):
    """Attention of one sequence ``[H, Q, D]`` in float64."""
    k, v = (torch.cat([getattr(run, name) for run in runs], 1)[None].double() for name in ("keys", "values"))
    past = k.shape[2] - q.shape[1]
    return attend(Problem(q[None].double(), k, v, spec=spec, past=past), kernel="materialized").context[0]


def check(q, pasts, spec):
    """Compare with the dense numbers."""
    found = attend_in_place(q, pasts, spec, {})
    assert found.dtype == q.dtype
    for context, *sequence in zip(found, q, pasts, strict=True):
        torch.testing.assert_close(context.double(), dense(*sequence, spec), atol=2e-2, rtol=0)


@pytest.mark.parametrize("left", SPECS)
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sequences_of_one_slab_are_one_call_with_one_upload(calls, monkeypatch, left, queries, dtype):
    uploads = []
    to_device = cuda_pages.to_device
    monkeypatch.setattr(cuda_pages, "to_device", lambda *about: uploads.append(about) or to_device(*about))
    slab = slab_of(dtype=dtype)
    check(queries_of(slab, 3, queries), [runs_of(slab, each) for each in PAGES], SPECS[left])
    grouped = queries == 1 and left is None
    assert calls == [Call(3, queries, 16 if grouped else 1, grouped=grouped)]
    assert len(uploads) == 1


def test_a_window_that_hides_nothing_costs_nothing(calls):
    slab = slab_of()
    check(queries_of(slab, 1, 1), [runs_of(slab, [(2, 70 / PAGE)])], SPECS[70])
    assert calls[0].grouped


@pytest.mark.parametrize(
    ("heads", "queries", "alone", "beside"), [(2, 1, 16, 16), (4, 1, 16, 1), (2, 4, 4, 1), (2, 40, 1, 1)]
)
def test_keys_are_split_where_the_kernel_puts_the_parts_together(calls, heads, queries, alone, beside):
    slab = slab_of(heads=heads)
    for sequences in (1, 3):
        check(queries_of(slab, sequences, queries), [runs_of(slab, each) for each in PAGES[:sequences]], SPECS[None])
    assert [call.splits for call in calls] == [alone, beside]


@pytest.mark.parametrize("queries", [1, 3])
def test_sequences_of_several_slabs_are_a_call_a_slab(calls, queries):
    slabs = slab_of(seed=1), slab_of(seed=2)
    pasts = [runs_of(slabs[index % 2], PAGES[index % 3]) for index in range(5)]
    check(queries_of(slabs[0], 5, queries), pasts, SPECS[None])
    assert [call.sequences for call in calls] == [3, 2]


def _refused(slab):
    """Pasts that the kernel does not take."""
    return {
        "begins within a page": runs_of(slab, [(0.5, 1)]),
        "ends within a page before another run": runs_of(slab, [(4, 0.5), (6, 1)]),
        "lies in two slabs": [*runs_of(slab, [(4, 1)]), *runs_of(slab_of(seed=9), [(1, 0.5)])],
    }


@pytest.mark.parametrize("name", _refused(None))
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_sequence_that_the_kernel_does_not_take_leaves_the_others_to_it(calls, name, at):
    slab = slab_of()
    pasts = [runs_of(slab, each) for each in PAGES[:2]]
    pasts.insert(at, _refused(slab)[name])
    check(queries_of(slab, 3, 1), pasts, SPECS[None])
    assert [call.sequences for call in calls] == [2]
    calls.clear()
    check(queries_of(slab, 1, 1), pasts[at : at + 1], SPECS[None])
    assert not calls


@pytest.mark.parametrize(
    ("changed", "spec"),
    [
        ({"dtype": torch.float32}, SPECS[None]),
        ({"width": 12}, SPECS[None]),
        ({"width": 264}, SPECS[None]),
        ({}, AttentionSpec()),
        ({}, AttentionSpec(masks=[Causal()], softcap=2.0)),
        ({}, AttentionSpec(masks=[Causal()], normalizer=Softmax(sinks=True))),
    ],
)
def test_what_it_does_not_compute_is_left_to_products(calls, changed, spec):
    slab = slab_of(**changed)
    learned = {"sinks": torch.zeros(4, dtype=slab.keys.dtype)}
    attend_in_place(queries_of(slab, 1, 1), [runs_of(slab, PAGES[0])], spec, learned)
    assert not calls


@pytest.mark.parametrize("fault", [RuntimeError, TypeError, torch.OutOfMemoryError, torch.AcceleratorError])
def test_an_error_of_the_kernel_is_the_error_of_the_step(calls, monkeypatch, fault):
    def fails(*_, **__):
        raise fault("an error")

    monkeypatch.setattr(cuda_pages._Call, "run", fails)
    slab = slab_of()
    with pytest.raises(fault):
        attend_in_place(queries_of(slab, 1, 1), [runs_of(slab, PAGES[0])], SPECS[None], {})


CPU = torch.device("cpu")


def test_the_trial_succeeds_where_the_kernel_gives_the_numbers(calls, monkeypatch):
    as_on_a_gpu(monkeypatch)
    assert paged_fault(CPU) is None
    assert {(call.sequences, call.queries, call.splits) for call in calls} == {
        (1, 1, 16),
        (2, 1, 16),
        (2, 1, 1),
        (2, 3, 1),
    }
    assert len(calls) == 2 * 2 * 3


def test_the_trial_tells_why_a_pytorch_without_the_kernel_fails(monkeypatch):
    as_on_a_gpu(monkeypatch)
    assert "_flash_attention_forward" in paged_fault(CPU)


def test_the_trial_tells_that_pages_are_too_small(calls, monkeypatch):
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(cuda_pages, "PAGE", 64)
    assert "divisible by 256, not 64" in paged_fault(CPU)


@pytest.mark.parametrize("fault", [RuntimeError, TypeError])
def test_the_trial_tells_what_the_kernel_refuses(monkeypatch, fault):
    def fails(*_):
        raise fault("block size\nmore")

    monkeypatch.setattr(paged_trial, "attend_in_place", fails)
    assert paged_fault(CPU) == "block size"


@pytest.mark.parametrize("error", [0.1, float("nan")])
def test_the_trial_notices_wrong_numbers(calls, monkeypatch, error):
    as_on_a_gpu(monkeypatch)
    run = cuda_pages._Call.run
    monkeypatch.setattr(cuda_pages._Call, "run", lambda *about, **how: run(*about, **how) + error)
    assert "differ" in paged_fault(CPU)


@pytest.mark.parametrize("fault", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_the_trial_decides_nothing_on_a_device_that_fails(monkeypatch, fault):
    def fails(*_):
        raise fault("an error")

    monkeypatch.setattr(paged_trial, "attend_in_place", fails)
    with pytest.raises(fault):
        paged_fault(CPU)


class Counted(TorchDispatchMode):
    """Counts the calls of the kernel."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func is torch.ops.aten._flash_attention_forward.default
        return func(*args, **kwargs or {})


@pytest.mark.gpu
@pytest.mark.parametrize("left", SPECS)
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [2, 4])
def test_steps_on_a_gpu_run_by_the_kernel_and_give_the_dense_numbers(left, queries, dtype, heads):
    slab = slab_of("cuda", dtype, heads, width=64)
    with Counted() as counted:
        check(queries_of(slab, 3, queries), [runs_of(slab, each) for each in PAGES], SPECS[left])
        check(queries_of(slab, 1, queries), [runs_of(slab, PAGES[0])], SPECS[left])
    assert counted.calls == 2


@pytest.mark.gpu
def test_the_trial_succeeds_on_a_gpu():
    assert paged_fault(torch.device("cuda", 0)) is None


@pytest.mark.gpu
def test_a_sequence_has_the_same_bits_alone_and_beside_others_on_a_gpu():
    slab = slab_of("cuda", width=64)
    q, pasts = queries_of(slab, 3, 1), [runs_of(slab, each) for each in PAGES]
    together = attend_in_place(q, pasts, SPECS[None], {})
    for index, past in enumerate(pasts):
        assert torch.equal(attend_in_place(q[index : index + 1], [past], SPECS[None], {})[0], together[index])

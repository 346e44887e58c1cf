"""What the fake GPU notices: each kind of copy and wait, devices that are mixed, and what may not be captured."""

from functools import partial

import pytest
import torch

from tests.fake_cuda.machine import CUDA


def test_launches_copies_and_waits_are_counted(cuda):
    with cuda.counted(scalar=7.0) as counts:
        x = torch.ones(3, 4).to(CUDA)
        y = x @ x.mT + 1
        back = y.cpu()
        number = float(y.sum())
    assert counts.launches == {"mm": 1, "add": 1, "sum": 1}
    assert [each.shape for each in counts.blocking_uploads] == [(3, 4)]
    assert [each.shape for each in counts.downloads] == [(3, 3)]
    assert len(counts.waits) == 1
    assert number == 7.0
    assert back.eq(7.0).all()
    assert counts.largest == 9 * 4


@pytest.mark.parametrize("pinned", [False, True])
def test_a_copy_from_memory_that_is_not_pinned_blocks_in_any_case(cuda, pinned):
    with cuda.counted() as counts:
        host = torch.empty(8, pin_memory=pinned)
        torch.empty(4, device=CUDA).copy_(host[4:], non_blocking=True)
    assert [each.blocking for each in counts.uploads] == [not pinned]


def test_numbers_of_the_host_are_real(cuda):
    with cuda.counted() as counts:
        assert torch.arange(5).tolist() == [0, 1, 2, 3, 4]
    assert not counts.launches


def test_a_constant_made_on_the_device_is_a_blocking_copy(cuda):
    with cuda.counted() as counts:
        torch.tensor([1, 2], device=CUDA)
    assert [each.blocking for each in counts.uploads] == [True]


def test_mixed_devices_are_noticed(cuda):
    with cuda.counted() as counts:
        torch.ones(4, device=CUDA)[torch.tensor([1, 2])]
        assert counts.mixed
        with pytest.raises(RuntimeError, match="device"):
            torch.ones(4, device=CUDA) + torch.ones(4)


def test_what_may_not_be_captured_is_noticed(cuda):
    with cuda.counted() as counts:
        x = torch.ones(4, device=CUDA)
        counts.capturing = True
        x = x + x
        assert not counts.illegal
        bool(x.sum())
        x.cpu()
        torch.ones(4).to(CUDA)
    assert len(counts.illegal) == 3


def test_gradients_run_on_the_device(cuda):
    with cuda.counted() as counts:
        x = torch.ones(4, 4, device=CUDA, requires_grad=True)
        (x @ x).sum().backward()
        assert x.grad.device == CUDA
    assert counts.launches["mm"] == 3


def test_attention_of_pytorch_by_its_own_choice_is_noticed(cuda):
    with cuda.counted():
        q = torch.ones(1, 8, 16, 64, device=CUDA)
        with pytest.raises(AssertionError, match="flags"):
            torch.nn.functional.scaled_dot_product_attention(q, q, q)


@pytest.mark.parametrize(
    ("dtype", "width", "refused"),
    [(torch.bfloat16, 64, None), (torch.bfloat16, 60, "multiples"), (torch.float32, 64, "half")],
)
def test_a_kernel_refuses_what_it_does_on_a_gpu(cuda, dtype, width, refused):
    with cuda.counted() as counts:
        q = torch.ones(1, 16, 8, width, dtype=dtype, device=CUDA)
        run = partial(torch.ops.aten._flash_attention_forward, q, q, q, None, None, 16, 16, 0.0, True, False, scale=1.0)
        if refused is None:
            assert run()[0].shape == q.shape
        else:
            with pytest.raises(RuntimeError, match=refused):
                run()
    assert counts.launches["_flash_attention_forward"] == (refused is None)

"""FlexAttention: its masks and scores by the uncompiled reference on a CPU, and the kernel where there is a GPU."""

from dataclasses import replace

import pytest
import torch
from tests.core.conftest import MASKS
from torch.nn.attention.flex_attention import flex_attention

from attention_contract.spec import AttentionSpec, Documents, Sigmoid, Softmax
from attention_service.core.attention import attend
from attention_service.core.kernels import Needs, unsuitable
from attention_service.core.kernels.flex import flexed

LENGTHS = torch.tensor([150, 0])
NORMAL = torch.randn(2, 2, 140, 160, generator=torch.Generator().manual_seed(1))
REQUESTS = {
    "alone": {},
    "lengths": {"key_lengths": LENGTHS},
    "bool mask": {"mask": NORMAL > 0},
    "float mask": {"mask": NORMAL.masked_fill(NORMAL > 1, -torch.inf)},
    "short mask": {"mask": NORMAL[0, 0, :, :30] > 0},
    "past and offsets": {"past": 20, "offsets": torch.tensor([-130, 9])},
}
warned = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


PLAIN, CAPPED = {}, {"softcap": 0.7, "normalizer": Softmax(temperature=2.5)}
CASES = [
    *((masks, "past and offsets", PLAIN) for masks in MASKS),
    *(("several", name, CAPPED) for name in REQUESTS),
    ("none", "float mask", PLAIN),
]


def case_of(make_problem, case, **more):
    """The problem of a case; None if the kernel cannot do it."""
    masks, request, options = case
    spec = AttentionSpec(masks=MASKS[masks], **options)
    if unsuitable("flex", spec, torch.float32, Needs(device="cuda")):
        return None
    return make_problem(queries=140, keys=160, width=16, value_width=16, spec=spec, **REQUESTS[request], **more)


@warned
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_masks_and_scores_like_the_stages(case, make_problem):
    if (problem := case_of(make_problem, case)) is None:
        return
    found = flexed(problem, {"lse"}, flex_attention)
    expected = attend(problem, ("lse",), kernel="materialized")
    torch.testing.assert_close(found["context"], expected.context, rtol=0, atol=1e-5)
    torch.testing.assert_close(found["lse"].double(), expected.taps["lse"], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("spec", "dtype", "needs", "reason"),
    [
        (AttentionSpec(), torch.float32, {}, "CUDA"),
        (AttentionSpec(), torch.float64, {"device": "cuda"}, "float64"),
        (AttentionSpec(normalizer=Sigmoid()), torch.float32, {"device": "cuda"}, "softmax"),
        (AttentionSpec(normalizer=Softmax(sinks=True)), torch.float32, {"device": "cuda"}, "sinks"),
        (AttentionSpec(masks=[Documents(lengths=[3])]), torch.float32, {"device": "cuda"}, "documents"),
        (AttentionSpec(add_zero_attn=True), torch.float32, {"device": "cuda"}, "adds"),
        (AttentionSpec(), torch.float32, {"device": "cuda", "dropout": True}, "dropout"),
        (AttentionSpec(), torch.float32, {"device": "cuda", "edits": True}, "edits"),
        (AttentionSpec(), torch.float32, {"device": "cuda", "double_backward": True}, "differentiated again"),
    ],
)
def test_what_it_cannot_do(spec, dtype, needs, reason):
    assert reason in unsuitable("flex", spec, dtype, Needs(**needs))
    assert unsuitable("flex", AttentionSpec(softcap=1.0), torch.float32, Needs(device="cuda")) is None


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_the_compiled_kernel_and_its_gradient_on_a_gpu(case, make_problem):
    if (problem := case_of(make_problem, case, dtype=torch.float32)) is None:
        return
    moved = {name: x.cuda() for name, x in vars(problem).items() if isinstance(x, torch.Tensor)}
    on_gpu = replace(problem, **moved)
    leaves = [x.requires_grad_() for x in (on_gpu.q, on_gpu.k, on_gpu.v)]

    def differentiated(kernel):
        context = attend(on_gpu, kernel=kernel).context
        return context, *torch.autograd.grad(context.sum(), leaves)

    for found, expected in zip(differentiated("flex"), differentiated("materialized"), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)

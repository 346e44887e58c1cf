"""The computation without HTTP against bare PyTorch: forward, windows, gradients, taps.

``python -m benchmarks.kernels`` prints the tables; ``--output benchmarks/results/kernels.md`` writes them.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attention_contract.schemas.attention import RawForwardRequest
from attention_contract.schemas.gradients import RawGradientsRequest
from attention_contract.spec import AttentionSpec
from attention_service.core.attention import attend
from attention_service.core.problem import Problem, Selection, Widths
from attention_service.cost import flops
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import forward, gradients
from attention_service.runtime.planning.blank_requests import new_request
from attention_service.runtime.planning.request_sizes import RequestSizes
from benchmarks.measure import Case, rows
from benchmarks.page import IN_TURN, fewer, parser, publish

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
WIDTH = 64
PAIRS = 2**15
"""Heads times length, at most: the longest take seconds all the same."""
LENGTHS = 1024, 2048, 4096, 8192, 16384, 32768
QUICK = 1024, 4096
WINDOW = 512
FREE_BYTES = 2**34
CAUSAL = AttentionSpec.model_validate({"masks": [{"name": "causal"}]})
TEXT = f"""`forward` and `gradients` are what the server runs for a raw request, from its arrays to those of the reply;
`bare SDPA` is PyTorch's own call on the same tensors, `bare autograd` that call and its backward pass. Float32, heads
{WIDTH} wide, as many as keep heads times length to {PAIRS // 1024}k, eight at most.

{IN_TURN}"""


def heads(length: int) -> int:
    """Return the number of heads of a case of this length."""
    return min(8, PAIRS // length)


def drawn(length: int, device: Device) -> Three:
    """Query, key and value, each ``[1, H, n, D]``."""
    shape = 1, heads(length), length, WIDTH
    q, k, v = (torch.randn(shape, device=device.torch) for _ in range(3))
    return q, k, v


def flops_of(length: int, spec: AttentionSpec) -> int:
    """FLOPs of the same over every pair."""
    widths = Widths(heads(length), heads(length), WIDTH, WIDTH)
    return flops(new_request(spec, widths, "float32", RequestSizes(1, length, length)), masked=False).total


def forwards(lengths: tuple[int, ...], device: Device) -> Iterator[Case]:
    """Dense and causal, against SDPA."""
    for length in lengths:
        for label, spec in (("dense", AttentionSpec()), ("causal", CAUSAL)):
            q, k, v = drawn(length, device)
            request = _request(RawForwardRequest, (q, k, v), spec=spec)
            yield Case(
                f"forward, {label}, n = {length}, {heads(length)} heads",
                _served(forward, request, device),
                "bare SDPA",
                _bare(q, k, v, causal=label == "causal"),
                flops=flops_of(length, spec),
                predicted_ms=forward.prepare(None, request, device, FREE_BYTES).plan.predicted.median * 1e3,
            )


def windows(lengths: tuple[int, ...], device: Device) -> Iterator[Case]:
    """A causal window against all keys: what is masked is not computed."""
    mask = {"name": "sliding_window", "left": WINDOW - 1, "right": 0}
    spec = AttentionSpec.model_validate({"masks": [mask]})
    for length in lengths:
        q, k, v = drawn(length, device)
        run = _served(forward, _request(RawForwardRequest, (q, k, v), spec=spec), device)
        yield Case(f"forward, window of {WINDOW}, n = {length}", run, "bare SDPA, dense", _bare(q, k, v, causal=False))


def backwards(lengths: tuple[int, ...], device: Device) -> Iterator[Case]:
    """Gradients of query, key and value, against autograd."""
    for length in lengths:
        for label, spec in (("dense", AttentionSpec()), ("causal", CAUSAL)):
            q, k, v = drawn(length, device)
            request = _request(RawGradientsRequest, (q, k, v), spec=spec, wrt=["query", "key", "value"])
            run = _served(gradients, request, device)
            yield Case(
                f"gradients, {label}, n = {length}, {heads(length)} heads",
                run, "bare autograd", _autograd(q, k, v, causal=label == "causal"),
            )  # fmt: skip


def taps(lengths: tuple[int, ...], device: Device) -> Iterator[Case]:
    """Cost of returning the weights of one row, and of all rows."""
    for length in lengths:
        problem = Problem(*drawn(length, device))
        one = Selection(heads=(0,), queries=(length - 1,))
        for name, run in (
            ("fused, with one row of weights", lambda problem=problem, one=one: attend(problem, ("weights",), one)),
            ("materialized", lambda problem=problem: attend(problem, kernel="materialized")),
        ):
            yield Case(f"{name}, n = {length}", run, "fused", lambda problem=problem: attend(problem))


def _request(model: Any, tensors: Three, **more: Any) -> Any:
    query, key, value = (tensor.cpu().numpy() for tensor in tensors)
    return model(query=query, key=key, value=value, **more)


def _served(operation: Any, request: Any, device: Device) -> Any:
    """Return a function that runs one request, from arrays to arrays."""
    return lambda: operation.prepare(None, request, device, FREE_BYTES).run()


def _bare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        with torch.inference_mode():
            return sdpa(q, k, v, is_causal=causal)

    return run


def _autograd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> Callable[[], object]:
    leaves = q, k, v = (q.clone().requires_grad_(), k.clone().requires_grad_(), v.clone().requires_grad_())

    def run() -> object:
        output = sdpa(q, k, v, is_causal=causal)
        return torch.autograd.grad(output, leaves, torch.ones_like(output))

    return run


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__, 21)
    options.add_argument("--device", default="auto", help="auto, cpu or cuda")
    options.add_argument("--lengths", type=lambda text: tuple(map(int, text.split(","))), help="as in 1024,4096")
    arguments = options.parse_args()
    rounds = arguments.rounds or (fewer(21) if arguments.quick else 21)
    lengths = arguments.lengths or (QUICK if arguments.quick else LENGTHS)
    publish("Kernels", TEXT, tables(lengths, Device.open(arguments.device), rounds), arguments.output)


def tables(lengths: tuple[int, ...], device: Device, rounds: int) -> Iterator[str]:
    """All of them, line by line."""
    for title, cases in (
        ("Forward", forwards(lengths, device)),
        ("Windows", windows(lengths[-2:], device)),
        ("Gradients", backwards(lengths[:4], device)),
        ("Taps", taps(lengths[:2], device)),
    ):
        yield f"## {title}\n"
        yield from rows(cases, rounds)
        yield ""


if __name__ == "__main__":
    main()

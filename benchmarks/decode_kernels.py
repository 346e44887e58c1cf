"""Attention in place over a cache, beside bare PyTorch, vLLM's kernel and the bandwidth of the memory; one thread.

``python -m benchmarks.decode_kernels`` prints the tables; ``--output benchmarks/results/decode_kernels.md`` writes
them. ``--vllm`` adds vLLM: the operator library of a CPU wheel that fits the installed PyTorch, as in
``--vllm vllm/_C_AVX512.abi3.so``; nothing else of vLLM is imported.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attention_contract.spec import AttentionSpec, Causal
from attention_service.core.kv_cache.attention import Runs, attend_in_place
from attention_service.core.kv_cache.runs import SlotRun
from benchmarks.measure import Case, rows
from benchmarks.page import IN_TURN, fewer, parser, publish

ROUNDS = 301
SPEC = AttentionSpec(masks=[Causal()])
PAGE = 64
TEXT = f"""One decode step of attention, from queries to contexts, without projections: one new token a sequence, one
thread. `in place` is `core.kv_cache.attention`, with all that it does for a step: the choice of the way, the
table of runs, new tensors for the results. `bare SDPA` is PyTorch's own call over a contiguous cache
`[B, H, n, D]`. `vLLM` is the operator `cpu_attention_with_kv_cache` of its CPU wheel over pages of {PAGE}, its schedule
and its result made before the clock starts; the rows are left out where the wheel is not given. `sum` adds up the same
bytes: the bandwidth of the memory.

{IN_TURN}"""


@dataclass(frozen=True)
class Shape:
    """Sequences of one length, and the heads of the model."""

    sequences: int
    keys: int
    heads: int
    kv_heads: int
    width: int
    dtype: torch.dtype

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads}" if self.heads != self.kv_heads else f"{self.heads}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.sequences} × {self.keys:,}, {heads} heads × {self.width}, {dtype}"

    def queries(self) -> Tensor:
        """One new token of each sequence: ``[B, H, 1, D]``."""
        return torch.randn(self.sequences, self.heads, 1, self.width).to(self.dtype)

    def cache(self) -> tuple[Tensor, Tensor]:
        """Keys and values ``[B, Hkv, n, D]``."""
        shape = self.sequences, self.kv_heads, self.keys, self.width
        return torch.randn(shape).to(self.dtype), torch.randn(shape).to(self.dtype)


@dataclass(frozen=True)
class Memory:
    """Keys and values of all sequences, side by side."""

    keys: Tensor
    """``[Hkv, slots, D]``"""
    values: Tensor
    paged: bool = False

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> "Memory":
        """The memory of ``[B, Hkv, n, D]``."""
        return cls(k.transpose(0, 1).flatten(1, 2), v.transpose(0, 1).flatten(1, 2))

    def whole(self, shape: Shape) -> list[Runs]:
        """All keys of each sequence."""
        return [[SlotRun(self, i * shape.keys, shape.keys)] for i in range(shape.sequences)]


SHAPES = (
    Shape(1, 512, 12, 12, 32, torch.float32),
    Shape(16, 512, 12, 12, 32, torch.float32),
    Shape(16, 512, 12, 12, 32, torch.bfloat16),
    Shape(1, 4096, 32, 8, 128, torch.float32),
    Shape(1, 4096, 32, 8, 128, torch.bfloat16),
)


def beside_others(vllm: bool) -> Iterator[Case]:
    """The cases of the two decoders, beside bare SDPA and vLLM."""
    for shape in SHAPES:
        q, (k, v) = shape.queries(), shape.cache()
        run = in_place(q, Memory.of(k, v).whole(shape))
        grouped = shape.heads != shape.kv_heads
        bare = _quietly(lambda q=q, k=k, v=v, grouped=grouped: sdpa(q, k, v, enable_gqa=grouped))
        yield Case(f"in place, {shape}", run, "bare SDPA", bare)
        if vllm:
            theirs = _of_vllm(shape, q, k, v)
            yield Case(f"in place, {shape}", run, "vLLM", theirs)


def dtypes_and_runs() -> Iterator[Case]:
    """A half type beside float32, and scattered pages beside one run."""
    shape = SHAPES[1]
    q, (k, v) = shape.queries(), shape.cache()
    memory = Memory.of(k, v)
    whole = in_place(q, memory.whole(shape))
    for dtype in (torch.bfloat16, torch.float16):
        half = in_place(q.to(dtype), Memory.of(k.to(dtype), v.to(dtype)).whole(shape))
        yield Case(f"in place, {Shape(16, 512, 12, 12, 32, dtype)}", half, "in place, float32", whole)
    starts = torch.randperm(shape.keys // PAGE).mul(PAGE).tolist()
    pages = [[SlotRun(memory, i * shape.keys + start, PAGE) for start in starts] for i in range(shape.sequences)]
    yield Case(f"in place, {shape}, every page apart", in_place(q, pages), "in place, one run", whole)


def forks(sequences: int = 16, prefix: int = 4096, own: int = 10) -> Iterator[Case]:
    """Forks of one prefix, beside as many sequences of that length that share nothing."""
    for heads, kv_heads, width, dtype in (
        (12, 12, 32, torch.float32),
        (12, 12, 32, torch.bfloat16),
        (32, 8, 128, torch.float32),
    ):
        shape = Shape(sequences, prefix + own, heads, kv_heads, width, dtype)
        q, memory = shape.queries(), Memory.of(*shape.cache())
        first = SlotRun(memory, 0, prefix)
        shared = [[first, SlotRun(memory, i * shape.keys + prefix, own)] for i in range(sequences)]
        apart = in_place(q, memory.whole(shape))
        yield Case(f"forks of {prefix:,}, {shape}", in_place(q, shared), "without sharing", apart)


def long_pasts(keys: int = 100_000) -> Iterator[Case]:
    """A step over a long past, beside reading its bytes once."""
    for heads, kv_heads, width, dtype in (
        (12, 12, 32, torch.float32),
        (12, 12, 32, torch.bfloat16),
        (32, 8, 128, torch.float32),
    ):
        shape = Shape(1, keys, heads, kv_heads, width, dtype)
        q, (k, v) = shape.queries(), shape.cache()
        words = [x.view(-1).view(torch.int32).view(torch.float32) for x in (k, v)]
        run = in_place(q, Memory.of(k, v).whole(shape))
        yield Case(f"in place, {shape}", run, "sum", _quietly(lambda words=words: [x.sum() for x in words]))


def in_place(q: Tensor, pasts: Sequence[Runs]) -> Callable[[], object]:
    """Return a function that runs one step."""
    return _quietly(lambda: attend_in_place(q, pasts, SPEC, {}))


def _of_vllm(shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], object]:
    """Return a function that runs vLLM's operator, after a comparison of its numbers with SDPA's."""
    operators, kind = torch.ops._C, "vec"
    batch, pages = shape.sequences, shape.sequences * shape.keys // PAGE
    tokens = [x.transpose(1, 2).reshape(-1, shape.kv_heads, shape.width).contiguous() for x in (k, v)]
    keys, values = torch.zeros(pages, shape.kv_heads, 2 * PAGE, shape.width, dtype=shape.dtype).chunk(2, dim=2)
    slots = torch.arange(batch * shape.keys)
    operators.cpu_attn_reshape_and_cache(*tokens, keys, values, slots, kind, 1.0, 1.0, "auto")
    starts = torch.arange(batch + 1, dtype=torch.int32)
    lengths = torch.full((batch,), shape.keys, dtype=torch.int32)
    table = torch.arange(pages, dtype=torch.int32).view(batch, -1)
    sizes = batch, shape.heads, shape.kv_heads, shape.width, lengths, shape.dtype, starts
    schedule = operators.get_scheduler_metadata(*sizes, True, -1, kind, True, None, "auto")
    query = q.squeeze(2).contiguous()
    out = torch.empty_like(query)
    where = query, keys, values, out, starts, lengths, shape.width**-0.5, True, None, -1, table, 0.0, schedule
    run = _quietly(lambda: operators.cpu_attention_with_kv_cache(*where, None, None, 1.0, 1.0, "auto"))
    run()
    expected = sdpa(q.float(), k.float(), v.float(), enable_gqa=True).squeeze(2)
    torch.testing.assert_close(out.float(), expected, atol=2e-2 if shape.dtype.itemsize == 2 else 1e-5, rtol=0)
    return run


def _quietly(call: Callable[[], object]) -> Callable[[], object]:
    """Return the call without autograd."""
    return torch.inference_mode()(call)


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__, ROUNDS)
    options.add_argument("--vllm", type=Path, help="operator library of vLLM's CPU wheel, a .so file")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    if arguments.vllm is not None:
        torch.ops.load_library(arguments.vllm)
    rounds = arguments.rounds or (fewer(ROUNDS) if arguments.quick else ROUNDS)
    publish("Decode kernels", TEXT, tables(rounds, vllm=arguments.vllm is not None), arguments.output, ("torch",))


def tables(rounds: int, *, vllm: bool) -> Iterator[str]:
    """All of them, line by line."""
    for title, cases in (
        ("Beside other kernels", beside_others(vllm)),
        ("Dtypes and pages", dtypes_and_runs()),
        ("Forks of a prefix", forks()),
        ("A long past", long_pasts()),
    ):
        yield f"## {title}\n"
        yield from rows(cases, rounds)
        yield ""


if __name__ == "__main__":
    main()

"""``estimate_cost``: the time and the memory of a model, a module or an attention, and the sizes that fit."""

from typing import Any, Final, Literal

from pydantic import Field, model_validator

from attention_contract.base import WireModel, at_fault
from attention_contract.errors import InvalidRequest
from attention_contract.operations import complexity, model_complexity, raw_complexity
from attention_contract.schemas.answers import CostLimits
from attention_contract.schemas.costs.accuracy import Basis
from attention_contract.schemas.costs.complexity import ComplexityReply
from attention_contract.schemas.costs.model_complexity import ImageSize, ModelComplexityReply
from attention_contract.schemas.models import ModelName
from attention_contract.schemas.modules import Heads, Width
from attention_service.api.doors.agents.agent_tool import (
    AgentTool,
    ToolAnswer,
    ToolArguments,
    ToolContext,
    ToolResult,
    number,
)
from attention_service.api.doors.agents.opened_inputs import InputHandle


class AttentionShape(WireModel):
    """An attention that nobody has made yet."""

    num_heads: Heads
    head_dim: Width
    num_kv_heads: Heads | None = None
    spec: dict[str, Any] = Field(default_factory=dict)
    """Score, masks, position, normalizer and method, as in {"masks": [{"name": "causal"}]}; {} is scaled dot product
    over all pairs."""


class CostArguments(ToolArguments):
    """Exactly one subject, and the sizes of a request."""

    input: InputHandle | None = None
    """An open text: the cost of its model at its length."""
    model: ModelName | None = None
    """A whole model."""
    module: str | None = Field(default=None, min_length=1, max_length=256)
    """A resident module."""
    attention: AttentionShape | None = None
    length: int | None = Field(default=None, ge=1, lt=2**31)
    """Tokens of each text; default: those of the input, or 1024."""
    batch: int = Field(default=1, ge=1, lt=2**31)
    new_tokens: int = Field(default=0, ge=0, lt=2**31)
    """Tokens that a model generates after them."""
    images: list[ImageSize] = Field(default_factory=list, max_length=64)
    """Sizes in pixels of the images that a model reads."""

    @model_validator(mode="after")
    def _one_subject(self) -> "CostArguments":
        given = [name for name in ("input", "model", "module", "attention") if getattr(self, name) is not None]
        if len(given) != 1:
            raise at_fault(given[1] if given else "input", "expected one of input, model, module and attention")
        if given[0] in {"module", "attention"} and (self.new_tokens or self.images):
            raise at_fault("new_tokens" if self.new_tokens else "images", "only a model has them")
        return self


class CostAnswer(ToolAnswer):
    """The cost of one pass, and what fits."""

    subject: Literal["model", "module", "attention"]
    length: int
    batch: int
    predicted_ms: float
    """The median time of a forward pass; of a model with new_tokens, of the whole generation."""
    low_ms: float | None = None
    high_ms: float | None = None
    """Nine of ten runs should lie between low_ms and high_ms. Absent of a whole model, whose time is one estimate."""
    basis: Basis | None = None
    """The basis of the interval: runs on this device, rates measured on it, or its datasheet."""
    flops: int
    peak_bytes: int
    """Memory besides the parameters, by which the request would be admitted."""
    cache_bytes_per_token: int
    max_length: int
    """The longest text that fits into the free memory, at this batch."""
    max_batch: int
    """The largest batch that fits, at this length."""
    further: dict[str, float | int | str] | None = None
    """More numbers by name, in a detailed answer."""


async def estimate_cost(call: ToolContext, arguments: CostArguments) -> ToolResult:
    """Estimate the time and the memory of a pass before it is sent, and the sizes that fit.

    Milliseconds with the interval in which nine of ten runs lie, FLOPs, memory, and the longest text and the largest
    batch that fit. The subject is an open input, a model, a module, or an attention by its heads, width and spec.
    Nothing is computed. Detailed: growth, gradients, cache and decoding too.
    """
    if arguments.module is not None or arguments.attention is not None:
        return ToolResult(await _of_attention(call, arguments))
    model, length = arguments.model, arguments.length
    if arguments.input is not None:
        opened = call.input(arguments.input)
        if "images" in opened.fields:
            raise InvalidRequest.at(
                "input", "the cost of an image is asked by its size. Call estimate_cost with model, length and images"
            )
        model, length = opened.model, length or len(opened.tokens)
    sizes = {"length": length or 1024, "batch": arguments.batch, "new_tokens": arguments.new_tokens}
    question = sizes | {"images": [image.model_dump() for image in arguments.images]}
    reply = await call.requests.ask(model_complexity, question, model=model or "")
    return ToolResult(_of_model(reply, arguments, sizes["length"]))


def _of_model(reply: ModelComplexityReply, arguments: CostArguments, length: int) -> CostAnswer:
    milliseconds = reply.total_ms if arguments.new_tokens else reply.prefill.predicted_ms
    generated = f" and {arguments.new_tokens} new tokens" if arguments.new_tokens else ""
    further: dict[str, float | int | str] = {
        "parameters": reply.parameters,
        "parameter_bytes": reply.parameter_bytes,
        "ms_per_new_token": number(reply.per_token.predicted_ms),
        "flops_per_new_token": reply.per_token.flops,
        "cache_bytes": reply.cache_bytes,
    }
    return CostAnswer(
        summary=(
            f"{arguments.batch} × {length} tokens{generated} of {reply.model} take about {number(milliseconds, 3):g} "
            f"ms and {reply.prefill.peak_bytes:,} bytes; up to {reply.max_length:,} tokens fit, or a batch of "
            f"{reply.max_batch:,}."
        ),
        subject="model",
        length=length,
        batch=arguments.batch,
        predicted_ms=number(milliseconds),
        flops=reply.prefill.flops,
        peak_bytes=reply.prefill.peak_bytes,
        cache_bytes_per_token=reply.cache_bytes_per_token,
        max_length=reply.max_length,
        max_batch=reply.max_batch,
        further=further if arguments.detail == "detailed" else None,
    )


async def _of_attention(call: ToolContext, arguments: CostArguments) -> CostAnswer:
    length = arguments.length or 1024
    question: dict[str, Any] = {"shape": {"batch": arguments.batch, "queries": length}}
    if arguments.module is not None:
        reply = await call.requests.ask(complexity, question, name=arguments.module)
    else:
        shape = arguments.attention.model_dump(exclude_none=True) if arguments.attention else {}
        reply = await call.requests.ask(raw_complexity, shape | question)
    cost, fits = reply.costs[0], reply.limits.forward
    time = cost.predicted.forward
    return CostAnswer(
        summary=(
            f"{arguments.batch} × {length} tokens take {number(time.median_ms, 3):g} ms, nine of ten times between "
            f"{number(time.low_ms, 3):g} and {number(time.high_ms, 3):g}, and {cost.peak_bytes.request:,} bytes; up to "
            f"{fits.longest.size:,} tokens fit, or a batch of {fits.largest_batch.size:,}."
        ),
        subject="module" if arguments.module is not None else "attention",
        length=length,
        batch=arguments.batch,
        predicted_ms=number(time.median_ms),
        low_ms=number(time.low_ms),
        high_ms=number(time.high_ms),
        basis=cost.predicted.basis,
        flops=cost.executed_flops,
        peak_bytes=cost.peak_bytes.request,
        cache_bytes_per_token=cost.kv_cache_bytes_per_token,
        max_length=fits.longest.size,
        max_batch=fits.largest_batch.size,
        further=_further(reply, reply.limits) if arguments.detail == "detailed" else None,
    )


def _further(reply: ComplexityReply, limits: CostLimits) -> dict[str, float | int | str]:
    cost, growth = reply.costs[0], reply.growth
    numbers: dict[str, float | int | str | None] = {
        "device": reply.device_name,
        "kernel": cost.kernel,
        "time_order": growth.time_order,
        "memory_order": growth.memory_order,
        "allowed_pairs": cost.allowed_pairs,
        "intensity_flops_per_byte": number(cost.intensity),
        "gradients_ms": None if cost.predicted.gradients is None else number(cost.predicted.gradients.median_ms),
        "gradients_peak_bytes": cost.peak_bytes.gradients,
        "gradients_max_length": None if limits.gradients is None else limits.gradients.longest.size,
        "decode_step_ms": None if cost.predicted.decode is None else number(cost.predicted.decode.median_ms),
        "free_bytes": limits.free_bytes,
        "letters": "; ".join(f"{letter}: {meaning}" for letter, meaning in growth.letters.items()),
    }
    return {name: value for name, value in numbers.items() if value is not None}


TOOL: Final = AgentTool("Estimate a cost", CostArguments, CostAnswer, estimate_cost)

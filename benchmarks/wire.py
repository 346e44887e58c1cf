"""Tensors to bytes and back: our codecs against what a server would do without them."""

from collections.abc import Iterator

import numpy as np
import torch
from pydantic import BaseModel

from attention_contract.schemas.attention import ForwardRequest
from attention_contract.wire import JSON, SAFETENSORS, from_body, to_body
from benchmarks.measure import Case


class Lists(BaseModel):
    """The common way: nested lists that pydantic validates number by number."""

    query: list[list[list[float]]]


def cases() -> Iterator[Case]:
    """A request of ``[1, 128, 256]`` in float32 in each media type, read into an array."""
    query = np.random.default_rng(0).normal(size=(1, 128, 256)).astype(np.float32)
    request = ForwardRequest(query=query)
    lists = b"".join(to_body(request, JSON, "request"))
    packed = b"".join(to_body(request, SAFETENSORS, "request"))
    base64 = b"".join(to_body(request, JSON, "request", "base64"))
    bare = Lists(query=query.tolist()).model_dump_json()

    def common() -> torch.Tensor:
        return torch.tensor(Lists.model_validate_json(bare).query)

    for name, body, media_type in (
        ("nested lists", lists, JSON), ("base64", base64, JSON), ("safetensors", packed, SAFETENSORS),
    ):  # fmt: skip
        yield Case(
            f"read {name}, {len(body) // 1024} KiB",
            lambda body=body, media_type=media_type: from_body(ForwardRequest, body, media_type, "request"),
            "pydantic lists and torch.tensor",
            common,
        )

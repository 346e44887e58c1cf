"""Tensors from bytes: our codecs against what a server would do without them.

``python -m benchmarks.wire`` prints the table; ``--output benchmarks/results/wire.md`` writes it.
"""

from collections.abc import Iterator

import numpy as np
import torch
from pydantic import BaseModel

from attention_contract.schemas.attention import ForwardRequest
from attention_contract.wire import JSON, SAFETENSORS, from_body, to_body
from benchmarks.measure import Case, rows
from benchmarks.page import IN_TURN, fewer, parser, publish


class Lists(BaseModel):
    """The common way: nested lists that pydantic validates number by number."""

    query: list[list[list[float]]]


def cases() -> Iterator[Case]:
    """A request of ``[1, 128, 256]`` in float32 in each media type, read into an array."""
    query = np.random.default_rng(0).normal(size=(1, 128, 256)).astype(np.float32)
    request = ForwardRequest(query=query)
    nested = b"".join(to_body(request, JSON, "request"))
    packed = b"".join(to_body(request, SAFETENSORS, "request"))
    base64 = b"".join(to_body(request, JSON, "request", "base64"))
    bare = Lists(query=query.tolist()).model_dump_json()

    def common() -> torch.Tensor:
        return torch.tensor(Lists.model_validate_json(bare).query)

    for name, body, media_type in (
        ("nested lists", nested, JSON), ("base64", base64, JSON), ("safetensors", packed, SAFETENSORS),
    ):  # fmt: skip
        yield Case(
            f"read {name}, {len(body) // 1024} KiB",
            lambda body=body, media_type=media_type: from_body(ForwardRequest, body, media_type, "request"),
            "pydantic lists and torch.tensor",
            common,
        )


def main() -> None:
    """Measure, print, write."""
    arguments = parser(__doc__, 101).parse_args()
    rounds = arguments.rounds or (fewer(101) if arguments.quick else 101)
    publish(
        "Wire",
        f"Reading one request of `[1, 128, 256]` in float32.\n\n{IN_TURN}",
        rows(cases(), rounds),
        arguments.output,
    )


if __name__ == "__main__":
    main()

"""LitServe, with its faster queue; bodies are read and answers written as bytes, or by its JSON."""

import sys
from pathlib import Path
from typing import Annotated, Any

import litserve
import torch
from fastapi import Body, Request, Response

from benchmarks.servers.attention import Attention


class Loaded(litserve.LitAPI):  # type: ignore[misc]
    """State that both routes share."""

    def __init__(self, weights: str, threads: str, **options: Any) -> None:
        super().__init__(**options)
        self.given = Path(weights), int(threads)

    def setup(self, device: str) -> None:
        """Load the weights, in the worker."""
        self.attention = Attention(*self.given)


class Bytes(Loaded):
    """Raw float32 at ``/raw``."""

    def decode_request(self, request: Annotated[bytes, Body(media_type="application/octet-stream")]) -> bytes:
        """Return the request unchanged."""
        return request

    def predict(self, query: bytes) -> bytes:
        """The output of one request."""
        return bytes(self.attention.of_bytes(query)[0])

    def encode_response(self, output: bytes) -> Response:
        """Return the response unchanged."""
        return Response(output, media_type="application/octet-stream")


class Lists(Loaded):
    """Nested lists at ``/json``."""

    def decode_request(self, request: Request) -> torch.Tensor:
        """The tensor; LitServe has read the JSON."""
        return torch.tensor(request["query"])

    def predict(self, query: torch.Tensor) -> torch.Tensor:
        """The output of one request."""
        return self.attention(query)

    def encode_response(self, output: torch.Tensor) -> dict[str, Any]:
        """Lists, which LitServe writes."""
        return {"output": output.tolist()}


def main(weights: str, port: str, threads: str) -> None:
    """Serve until terminated."""
    apis = [Bytes(weights, threads, api_path="/raw"), Lists(weights, threads, api_path="/json")]
    server = litserve.LitServer(apis, accelerator="cpu", fast_queue=True)
    server.run(port=int(port), host="127.0.0.1", log_level="error", generate_client_file=False)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Common first implementation: a FastAPI route with pydantic models of nested lists."""

import sys
from pathlib import Path

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from benchmarks.servers.attention import Attention


class Request(BaseModel):
    """``[B, L, d]``."""

    query: list[list[list[float]]]


class Reply(BaseModel):
    """``[B, L, d]``."""

    output: list[list[list[float]]]


def main(weights: str, port: str, threads: str) -> None:
    """Serve until terminated."""
    attention = Attention(Path(weights), int(threads))
    app = FastAPI()

    @app.post("/forward")
    async def forward(request: Request) -> Reply:
        return Reply(output=attention(torch.tensor(request.query)).tolist())

    uvicorn.run(app, port=int(port), log_level="error", access_log=False)


if __name__ == "__main__":
    main(*sys.argv[1:])

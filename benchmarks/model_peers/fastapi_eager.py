"""A plain FastAPI around transformers, one request at a time: ``python -m … FOLDER PORT THREADS``."""

import sys
from threading import Lock
from typing import Any

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from benchmarks.model_peers.transformers_answers import Model

folder, port, threads = sys.argv[1:4]
model, turn, app = Model(folder, int(threads)), Lock(), FastAPI()


class Text(BaseModel):
    """A request."""

    ids: list[int]
    max_new_tokens: int = 48


@app.get("/health")
def health() -> None:
    """Answer that the model is loaded."""


@app.post("/generate")
def generate(text: Text) -> dict[str, Any]:
    """Answer greedy tokens."""
    with turn:
        return {"ids": model.generated([text.ids], text.max_new_tokens)[0]}


@app.post("/weights")
def weights(text: Text) -> dict[str, Any]:
    """Answer the weights of every head."""
    with turn:
        return model.weights([text.ids])[0]


if __name__ == "__main__":
    uvicorn.run(app, port=int(port), log_level="warning")

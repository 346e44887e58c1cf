"""A recording on this machine as tables for people."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from attention_client.cli.tables.block_map import print_map
from attention_client.cli.tables.model_tables import readable
from attention_client.cli.tables.table_output import cell, print_out, table
from attention_client.recording import Recording
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.recordings import RecordedAttention

_COMPUTED = {
    "local": "in the model, without a server",
    "raw": "on the server, with the model's q, k and v",
    "modules": "on the server, in modules of the checkpoint",
}


def facts(recording: Recording) -> None:
    """Print the model, the text and the versions."""
    about = recording.facts
    sizes = ", ".join(f"{len(labels)} tokens of {stack}" for stack, labels in about.tokens.items())
    kinds = sorted({name.rpartition(".")[2] for name in recording.tensors})
    target = f" → {cell('target', about.target)}" if about.target else ""
    print_out(f"{about.model}: {cell('text', about.text)}{target}")
    print_out(f"{sizes}; {', '.join(kinds)}", "dim")
    if about.computed is not None:
        print_out(f"attention: {_COMPUTED[about.computed]}", "dim")
    print_out(", ".join(f"{name} {version}" for name, version in about.versions.items()), "dim")


def overview(recording: Recording) -> None:
    """Print the map of the head that attends most firmly, and a row for each layer with the entropy of its heads."""
    every = [*_heads(recording, None, None)]
    entropies = {name: recording.entropy(name) for name in dict.fromkeys(attention.name for attention, *_ in every)}
    firmest = min(every, key=lambda head: np.nan_to_num(entropies[head[0].name][head[1]], nan=np.inf))
    _print_map(recording, *firmest)
    print_out("entropy of each head, in nats", "bold")
    table(
        {"layer": name} | {str(head): f"{nats:.2f}" for head, nats in enumerate(of_heads)}
        for name, of_heads in entropies.items()
    )


def top_keys(recording: Recording, layer: str | None, head: int | None, query: int | None, top_k: int) -> None:
    """Print one row for each head and token: its most attended keys with their weights; of one head, its map first."""
    rows = []
    for attention, at, label in _heads(recording, layer, head):
        if head is not None:
            _print_map(recording, attention, at, label)
        queries, _ = recording.tokens(attention.name)
        if query is not None and query >= len(queries):
            raise InvalidRequest.at("query", f"{query} is out of range; expected 0 to {len(queries) - 1}")
        for row in range(len(queries)) if query is None else [query]:
            largest = recording.top_keys(attention.name, at, row, top_k)
            cells: dict[str, Any] = {"layer": attention.name, "head": label, "query": str(row), "token": queries[row]}
            rows.append(
                cells | {"key (weight), the largest first": "  ".join(f"{key} ({x:.3f})" for key, x in largest)}
            )
    table(rows)


def _print_map(recording: Recording, attention: RecordedAttention, at: int, label: str) -> None:
    queries, _ = recording.tokens(attention.name)
    print_map(label, recording.weights(attention.name)[at], [readable(token) for token in queries])


def _heads(recording: Recording, layer: str | None, head: int | None) -> Iterator[tuple[RecordedAttention, int, str]]:
    """Yield each head with weights, its number and its label; of one layer or head, if one is meant.

    Raises InvalidRequest if there is none.
    """
    name = f"layers.{layer}" if layer is not None and layer.isdecimal() else layer
    with_weights = [attention for attention in recording.attentions if f"{attention.name}.weights" in recording.tensors]
    attentions = [attention for attention in with_weights if name in {None, attention.name}]
    if not attentions:
        known = ", ".join(attention.name for attention in recording.attentions)
        detail = f"no weights of {name or 'any layer'} are recorded; there is {known}"
        raise InvalidRequest.at("layer", detail)
    for attention in attentions:
        if head is not None and head >= len(attention.heads):
            detail = f"{head} is out of range; {attention.name} has heads 0 to {len(attention.heads) - 1}"
            raise InvalidRequest.at("head", detail)
        for at, label in enumerate(attention.heads) if head is None else [(head, attention.heads[head])]:
            yield attention, at, label

"""The part of a model to look at where all of it is too much: layers whose channels have weights of their own."""

from typing import Any, Final

from attention_client.client import Client
from attention_contract.errors import InvalidRequest

_MOST_NAMED: Final = 8
"""Layers that the sentence names."""


def asks_too_much(refused: InvalidRequest, fields: dict[str, Any]) -> bool:
    """True if a request for all layers was refused since each of them has too many matrices."""
    return refused.param == "layers" and "layers" not in fields


def narrow_to_channel(client: Client, model: str, fields: dict[str, Any]) -> str:
    """Choose the first layer of a model, and its first channel unless some are chosen. Returns a sentence on it."""
    layers = [layer.layer for layer in client.models.get(model).layers]
    fields["layers"] = layers[:1]
    select = fields.setdefault("select", {})
    channel = "" if select.get("heads") else ", channel 0"
    select.setdefault("heads", [0])
    named = ", ".join(map(str, layers[:_MOST_NAMED])) + (", …" if len(layers) > _MOST_NAMED else "")
    return (
        f"Layer {layers[0]}{channel} alone: each channel has weights of its own. Name a layer ({named}) to see its "
        "other channels."
    )

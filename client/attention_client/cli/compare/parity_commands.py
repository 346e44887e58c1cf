"""``attention parity``: the attention of generated tokens as two servers tell of it, such as this one and vLLM."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import numpy as np
import typer

from attention_client.cli.invocation import client_of
from attention_client.cli.tables.reply_output import AsJson
from attention_client.cli.tables.table_output import table
from attention_client.client import Client
from attention_contract.schemas.models import LayerRef
from attention_contract.schemas.openai import GeneratedToken
from attention_contract.wire import to_json

_ASKED = {"weights": True, "statistics": ["entropy"]}
"""The attention that both are asked for."""


@dataclass
class LayerParity:
    """The largest differences of one layer, over the tokens that both have chosen alike and over all heads."""

    layer: LayerRef
    weights: float = 0.0
    entropy: float = 0.0
    """In nats."""


@dataclass
class TextParity:
    """The answers of two servers to one prompt."""

    prompt: str
    tokens: int
    """The number that was generated."""
    alike: int
    """The first tokens that are the same. The next one is compared too: the same text came before it."""
    layers: list[LayerParity]

    def departs(self, tolerance: float) -> LayerRef | None:
        """Return the first layer whose weights differ by more; None if none does."""
        return next((one.layer for one in self.layers if not one.weights <= tolerance), None)


def parity_of(prompt: str, first: Sequence[GeneratedToken], second: Sequence[GeneratedToken]) -> TextParity:
    """Compare the tokens of two answers. Raises ValueError for answers to different tokens or of different layers."""
    pairs = list(zip(first, second, strict=False))
    alike = next((at for at, (one, other) in enumerate(pairs) if one.id != other.id), len(pairs))
    layers: dict[LayerRef, LayerParity] = {}
    for one, other in pairs[: alike + 1]:
        if one.position != other.position:
            raise ValueError(f"the prompt has {one.position} tokens there and {other.position} here; send token ids")
        if [layer.layer for layer in one.layers] != [layer.layer for layer in other.layers]:
            raise ValueError("the models have different layers")
        for mine, theirs in zip(one.layers, other.layers, strict=True):
            own = layers.setdefault(mine.layer, LayerParity(mine.layer))
            own.weights = _larger(own.weights, mine.weights, theirs.weights)
            own.entropy = _larger(own.entropy, mine.statistics.entropy, theirs.statistics.entropy)
    return TextParity(prompt, len(pairs), alike, list(layers.values()))


def _larger(before: float, first: object, second: object) -> float:
    """The largest difference of two arrays, or the one before if that is larger; NaN stays."""
    one, other = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if one.shape != other.shape:
        raise ValueError(f"the models have different heads: {one.shape[:1]} and {other.shape[:1]}")
    return float(np.maximum(before, np.abs(one - other).max(initial=0)))


def parity(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="A model of the server.")],
    texts: Annotated[list[str], typer.Argument(metavar="TEXT...", help="Prompts.")],
    against: Annotated[str, typer.Option(metavar="URL", help="The other server, such as vLLM with attention-vllm.")],
    named: Annotated[str | None, typer.Option(metavar="MODEL", help="The model's name there.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate, the likeliest ones.")] = 8,
    tolerance: Annotated[float, typer.Option(min=0, help="The largest difference of a weight that passes.")] = 1e-3,
    as_json: AsJson = False,
) -> None:
    """Compare the attention of generated tokens on two servers: by layer, and where it first departs.

    Exit status 1 if weights differ by more than the tolerance.
    """
    with client_of(ctx) as own, Client(against) as other:
        compared_texts = []
        for text in texts:
            answers = [
                client.models.generate(
                    name, text, max_tokens=max_tokens, temperature=0, ignore_eos=True, attention=_ASKED
                ).choices[0].attention
                for client, name in ((own, model), (other, named or model))
            ]  # fmt: skip
            try:
                compared_texts.append(parity_of(text, *answers))
            except ValueError as fault:
                raise typer.BadParameter(str(fault), param_hint="MODEL") from None
    passed = all(compared.departs(tolerance) is None for compared in compared_texts)
    if as_json:
        texts_data = [asdict(compared) | {"departs": compared.departs(tolerance)} for compared in compared_texts]
        typer.echo(to_json({"texts": texts_data, "tolerance": tolerance, "passed": passed}))
    else:
        _show(compared_texts, tolerance)
    if not passed:
        raise typer.Exit(1)


def _show(compared_texts: Sequence[TextParity], tolerance: float) -> None:
    for compared in compared_texts:
        table(
            {
                "layer": str(one.layer),
                "weights": f"{one.weights:.1e}",
                "entropy": f"{one.entropy:.1e}",
                "verdict": "passed" if one.weights <= tolerance else "FAILED",
            }
            for one in compared.layers
        )
        first = compared.departs(tolerance)
        departs = "" if first is None else f"; weights first depart in layer {first}"
        typer.echo(f"{compared.alike} of {compared.tokens} tokens alike{departs}: {compared.prompt}")

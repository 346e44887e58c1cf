"""``attention parity``: a model as two servers compute it, such as this one and vLLM."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Final

import numpy as np
import typer

from attention_client.cli.invocation import client_of
from attention_client.cli.tables.reply_output import AsJson
from attention_client.cli.tables.table_output import table
from attention_client.client import Client
from attention_contract.schemas.model_requests import ModelForwardReply
from attention_contract.schemas.models import LayerRef
from attention_contract.schemas.openai import CompletionChoice, CompletionLogprobs, GeneratedToken
from attention_contract.wire import to_json

_ASKED: Final = {"weights": True, "statistics": ["entropy"]}
"""The attention that both are asked for while they generate."""
_TAPS: Final = ("context", "output")
"""The taps that both are asked for of the whole text."""
_LIKELIEST: Final = 5
"""Tokens whose log-probabilities are compared."""
MEASURES: Final = ("weights", *_TAPS)
"""The numbers of a layer that must agree, in the order in which it computes them."""


@dataclass
class LayerParity:
    """The largest differences of one layer, over the tokens that both have chosen alike and over all heads."""

    layer: LayerRef
    weights: float = 0.0
    entropy: float = 0.0
    """In nats."""
    context: float | None = None
    """The same of all tokens, relative to the largest number there, as ``output`` is."""
    output: float | None = None

    def departs(self, tolerance: float) -> str | None:
        """Return the first tap that differs by more; None if none does."""
        differences = {name: getattr(self, name) for name in MEASURES}
        return next((tap for tap, size in differences.items() if size is not None and not size <= tolerance), None)


@dataclass
class Departure:
    """The first layer and tap of a text that differ by more than a tolerance."""

    layer: LayerRef
    tap: str


@dataclass
class TextParity:
    """The answers of two servers to one prompt."""

    prompt: str
    tokens: int
    """The number that was generated."""
    alike: int
    """The first tokens that are the same. The next one is compared too: the same text came before it."""
    layers: list[LayerParity] = field(default_factory=list)
    logprobs: float | None = None
    """The largest difference of the log-probabilities of the likeliest tokens, which are logits less one number."""

    def departs(self, tolerance: float) -> Departure | None:
        """Return the first layer that differs by more, with its tap; None if none does."""
        first = next(((layer.layer, tap) for layer in self.layers if (tap := layer.departs(tolerance))), None)
        return None if first is None else Departure(*first)

    def passed(self, tolerance: float) -> bool:
        """True if nothing differs by more."""
        likely = self.logprobs is None or self.logprobs <= tolerance
        return likely and self.departs(tolerance) is None


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
            layer_parity = layers.setdefault(mine.layer, LayerParity(mine.layer))
            layer_parity.weights = _larger(layer_parity.weights, mine.weights, theirs.weights)
            layer_parity.entropy = _larger(layer_parity.entropy, mine.statistics.entropy, theirs.statistics.entropy)
    return TextParity(prompt, len(pairs), alike, list(layers.values()))


def likelihood_parity(first: CompletionLogprobs, second: CompletionLogprobs, tokens: int) -> float:
    """Return the largest difference of the log-probabilities of tokens that both name, at the first places."""
    largest = 0.0
    pairs = zip(first.top_logprobs or (), second.top_logprobs or (), strict=False)
    for one, other in list(pairs)[:tokens]:
        if one is None or other is None:
            continue
        shared = sorted(one.keys() & other.keys())
        largest = _larger(largest, [one[name] for name in shared], [other[name] for name in shared])
    return largest


def add_taps(parity: TextParity, first: ModelForwardReply, second: ModelForwardReply) -> None:
    """Compare the taps of all tokens. Raises ValueError for replies of different layers or tokens."""
    if [layer.layer for layer in first.layers] != [layer.layer for layer in second.layers]:
        raise ValueError("the models have different layers")
    by_layer = {layer.layer: layer for layer in parity.layers}
    for mine, theirs in zip(first.layers, second.layers, strict=True):
        layer_parity = by_layer.get(mine.layer)
        for name in _TAPS if layer_parity is not None else ():
            one = getattr(mine, name)
            largest = float(np.abs(np.asarray(one, np.float64)).max(initial=0)) or 1.0
            setattr(layer_parity, name, _larger(0.0, one, getattr(theirs, name)) / largest)


def _larger(before: float, first: object, second: object) -> float:
    """The largest difference of two arrays, or the one before if that is larger; NaN stays."""
    one, other = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if one.shape != other.shape:
        raise ValueError(f"the models have different heads: {one.shape[:1]} and {other.shape[:1]}")
    return float(np.maximum(before, np.abs(one - other).max(initial=0)))


@dataclass
class _Server:
    """One of two servers, and the name of the model there."""

    client: Client
    model: str

    def answer(self, text: str, tokens: int) -> CompletionChoice:
        return self.client.models.generate(
            self.model, text, max_tokens=tokens, temperature=0, ignore_eos=True, logprobs=_LIKELIEST, attention=_ASKED
        ).choices[0]

    def taps(self, tokens: Sequence[int]) -> ModelForwardReply:
        return self.client.models.forward(self.model, tokens=list(tokens), return_=_TAPS, top_k=0)


def _compared(text: str, servers: tuple[_Server, _Server], tokens: int) -> TextParity:
    """Ask both servers. Raises ValueError for models that cannot be compared."""
    first, second = (server.answer(text, tokens) for server in servers)
    text_parity = parity_of(text, first.attention or (), second.attention or ())
    if isinstance(first.logprobs, CompletionLogprobs) and isinstance(second.logprobs, CompletionLogprobs):
        text_parity.logprobs = likelihood_parity(first.logprobs, second.logprobs, text_parity.alike + 1)
    own = servers[0]
    prompt = own.client.models.tokenize(own.model, text).tokens
    whole = [*prompt, *(token.id for token in (first.attention or ())[: text_parity.alike])]
    add_taps(text_parity, *(server.taps(whole) for server in servers))
    return text_parity


def parity(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="A model of the server.")],
    texts: Annotated[list[str], typer.Argument(metavar="TEXT...", help="Prompts.")],
    against: Annotated[str, typer.Option(metavar="URL", help="The other server, such as vLLM with attention-vllm.")],
    named: Annotated[str | None, typer.Option(metavar="MODEL", help="The model's name there.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate, the likeliest ones.")] = 8,
    tolerance: Annotated[float, typer.Option(min=0, help="The largest difference that passes.")] = 1e-3,
    as_json: AsJson = False,
) -> None:
    """Compare a model on two servers: attention by layer, likelihoods, and where they first depart.

    Exit status 1 if anything but the entropies differs by more than the tolerance.
    """
    parities = []
    with client_of(ctx) as own, Client(against) as other:
        for text in texts:
            try:
                parities.append(_compared(text, (_Server(own, model), _Server(other, named or model)), max_tokens))
            except ValueError as fault:
                raise typer.BadParameter(str(fault), param_hint="MODEL") from None
    passed = all(text_parity.passed(tolerance) for text_parity in parities)
    if as_json:
        texts_data = [
            asdict(text_parity) | {"departs": _data(text_parity.departs(tolerance))} for text_parity in parities
        ]
        typer.echo(to_json({"texts": texts_data, "tolerance": tolerance, "passed": passed}))
    else:
        for text_parity in parities:
            _show(text_parity, tolerance)
    if not passed:
        raise typer.Exit(1)


def _data(departure: Departure | None) -> dict[str, Any] | None:
    return None if departure is None else asdict(departure)


def _show(text_parity: TextParity, tolerance: float) -> None:
    table(
        {"layer": str(layer.layer)}
        | {name: _number(getattr(layer, name)) for name in ("weights", "entropy", *_TAPS)}
        | {"verdict": "passed" if layer.departs(tolerance) is None else "FAILED"}
        for layer in text_parity.layers
    )
    first = text_parity.departs(tolerance)
    departs = "" if first is None else f"; {first.tap} first departs in layer {first.layer}"
    likely = "" if text_parity.logprobs is None else f", log-probabilities within {_number(text_parity.logprobs)}"
    typer.echo(f"{text_parity.alike} of {text_parity.tokens} tokens alike{likely}{departs}: {text_parity.prompt}")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"

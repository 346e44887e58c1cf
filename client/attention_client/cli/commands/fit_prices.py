"""The price of a fit to a file of texts, before it begins: of texts that are all as long as the longest one."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from attention_client.client import Client
from attention_contract.schemas.costs.model_complexity import PassCost

Price = Annotated[bool, typer.Option("--price", help="Tell the price, and fit nothing.")]


def longest_of(client: Client, model: str, texts: Sequence[str]) -> int:
    """Return the tokens of the longest text."""
    return client.models.tokenize(model, max(texts, key=len)).count


def price_of(client: Client, model: str, texts: int, length: int, **fit: Any) -> PassCost:
    """Return the price of a fit to so many texts of so many tokens. ``fit``: the field that asks for it."""
    (name,) = fit
    cost: PassCost | None = getattr(client.models.complexity(model, length, batch=texts, **fit), name)
    if cost is None:
        raise typer.BadParameter(f"{model} tells no price of a fit", param_hint="MODEL")
    return cost

"""Forward passes that the server keeps until their backward pass. Notation as in ``attention``."""

from typing import Annotated

from pydantic import Field

from attention_contract.base import Listed, WireModel
from attention_contract.schemas.attention import AttentionInputs, Dropout, Ran, RawInputs
from attention_contract.tensors import Encoding, FloatArray


class PassRequest(AttentionInputs):
    """One forward pass through a module, which is kept for its backward pass."""

    wrt: Listed[Annotated[str, Field(max_length=256)]] = Field(
        default_factory=lambda: ["query"], min_length=1, max_length=256
    )
    """The gradients that the backward pass computes: inputs (query, key, value, mask, past_key, past_value, gate, beta,
    initial_state, initial_normalizer), parameters by name, or ``parameters`` for all of them."""
    dropout: Dropout | None = None
    """Drop weights, the same in both passes; default: none."""


class RawPassRequest(RawInputs, PassRequest):
    """One raw attention, which is kept for its backward pass."""


class PassReply(WireModel):
    """The output, and the id of the kept pass."""

    id: str | None = None
    """Id for the backward pass; null if there was no room to keep the pass, whose gradients ``gradients`` computes."""
    output: FloatArray
    """``[B, Lq, d_model]`` of a module; raw attention keeps the query's layout."""
    ran: Ran


class BackwardRequest(WireModel):
    """The backward pass of a kept pass, which it uses up."""

    upstream: FloatArray | None = None
    """∂L/∂output, of the output's shape; default: ones (L is the sum of the output)."""
    encoding: Encoding = "list"
    """The form of tensors in a JSON reply."""

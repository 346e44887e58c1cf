"""``predict``: the tokens that a whole model predicts, unedited and with edits of its attention."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from attention_client.arguments import EditLike
from attention_client.array_likes import plain
from attention_client.recording.recorder import model_inputs, run_model
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.attention import Edit
from attention_contract.schemas.text_predictions import PredictedToken, TextPredictions
from attention_contract.validation import validate

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_OWN: Final = "ForMaskedLM"
"""The end of the class names of models that predict each token in its own place."""


def predict(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    text: str,
    *,
    edits: Mapping[str, Sequence[EditLike]] | None = None,
    target: str | None = None,
    position: int | None = None,
    top_k: int = 5,
) -> TextPredictions:
    """Run a model with its head twice on this machine, unedited and edited, and compare what it predicts.

    ``edits`` are by attention, as recordings name them: ``{"layers.3": [{"tap": "context", "heads": [0], "set": 0}]}``.
    ``set`` and ``scale`` of q, k, v, weights and context are possible, and a positive ``scale`` of all masked_scores.
    ``position`` is the token whose prediction is told, by default the last. Raises InvalidRequest for a model without
    logits, for edits of other attentions or indices, and for a position that the text does not have.
    """
    from attention_client.transformers.local_taps import local_taps  # noqa: PLC0415 - imports torch

    inputs, stacks = model_inputs(model, tokenizer, text, target)
    tokens = stacks["decoder" if "decoder" in stacks else "layers"]
    place = len(tokens) - 1 if position is None else position
    if place >= len(tokens):
        raise InvalidRequest(f"position: expected 0 to {len(tokens) - 1}, got {place}", param="position")
    changes = {
        _layer_key(layer): [validate(Edit, plain(each)) for each in several] for layer, several in (edits or {}).items()
    }
    logits = []
    for wanted in ({}, changes):
        with local_taps(model, wanted):
            outputs = run_model(model, inputs)
        if getattr(outputs, "logits", None) is None:
            raise InvalidRequest(f"model: {type(model).__name__} has no head that predicts tokens", param="model")
        logits.append(outputs.logits[0])
    divergence = []
    for before, after in zip(*logits, strict=True):  # row by row: a vocabulary is large
        p, q = before.double().log_softmax(-1), after.double().log_softmax(-1)
        divergence.append(max(0.0, float((p.exp() * (p - q)).sum())))
    rows = [each[place].double() for each in logits]
    shares = [row.softmax(-1) for row in rows]
    chosen = sorted({int(i) for share in shares for i in share.topk(min(top_k, len(share))).indices})
    chosen.sort(key=lambda i: -float(shares[0][i]))
    names = tokenizer.convert_ids_to_tokens(chosen)
    top = [
        PredictedToken(
            token=str(name),
            id=i,
            logit=float(rows[0][i]),
            edited_logit=float(rows[1][i]),
            probability=float(shares[0][i]),
            edited_probability=float(shares[1][i]),
        )
        for name, i in zip(names, chosen, strict=True)
    ]
    return TextPredictions(
        tokens=list(tokens),
        predicts="own" if type(model).__name__.endswith(_OWN) else "next",
        position=place,
        top=top,
        divergence=divergence,
    )


def _layer_key(layer: str) -> str:
    """The key of ``attach`` for an attention of a recording: ``3``, ``decoder.3`` or ``cross.3``."""
    stack, number, *cross = layer.split(".")
    return f"cross.{number}" if cross else number if stack == "layers" else layer

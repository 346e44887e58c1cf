"""One vector a text: the hidden states behind a model's last layer, pooled as its checkpoint says.

Without the files of sentence-transformers, the vector of an encoder is the mean over its tokens, that of a decoder the
state of its last token, of length 1.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from tokenizers.normalizers import Lowercase
from torch import Tensor

from attention_contract.errors import InvalidCheckpoint, InvalidRequest, NotFinite
from attention_contract.schemas.openai import Embedding, EmbeddingRequest, Embeddings, OpenAIRan, Usage
from attention_contract.schemas.prompts import Message
from attention_service.core.cancellation import checkpoint
from attention_service.core.tensors import wide
from attention_service.models.answers.embeddings.sentence_settings import SentenceSettings, read_sentence_settings
from attention_service.models.answers.embeddings.vector_steps import DenseLayer, normalized
from attention_service.models.costs.pass_memory import STATES_OF_CACHED_PASS, own_scores_bytes
from attention_service.models.inputs.input_stacks import Stack, Tokens
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import weights_with
from attention_service.models.loaded.model_runner import RunResult, RunSpec
from attention_service.prompts.conversations import ChatForm

_UNLIMITED: Final = 2**31
"""A length that transformers writes for none."""


@dataclass(frozen=True)
class EmbeddingPlan:
    """A request for vectors, checked."""

    settings: SentenceSettings
    rows: list[list[int]]
    """The tokens of each text."""
    left_out: list[int]
    """The number of the first tokens of each text, those of a prompt, that are not pooled."""

    def needed_bytes(self, loaded: LoadedModel) -> int:
        """Estimate the memory that it takes besides the model."""
        numbers = len(self.rows) * max(map(len, self.rows)) * _width(loaded)
        layers = [step for step in self.settings.steps if isinstance(step, DenseLayer)]
        vectors = 4 * len(self.rows) * sum(layer.inputs + layer.outputs for layer in layers)
        states = numbers * STATES_OF_CACHED_PASS * loaded.model.dtype.itemsize
        length = max(map(len, self.rows))
        states += own_scores_bytes(loaded, len(self.rows), length, length)
        return states + vectors + sum(layer.held_bytes for layer in layers)

    def of(self, texts: Sequence[int]) -> "EmbeddingPlan":
        """The same of some of the texts, by their numbers."""
        return replace(self, rows=[self.rows[at] for at in texts], left_out=[self.left_out[at] for at in texts])

    def stack(self, loaded: LoadedModel) -> Stack:
        """The texts as one batch."""
        return loaded.reader.batch([Tokens(ids, [None] * len(ids)) for ids in self.rows])

    def pooled(self, states: Tensor, mask: Tensor) -> Tensor:
        """The vectors ``[B, D]`` of states ``[B, L, d_model]``, ``mask [B, L]`` true for real tokens."""
        place = mask.long().cumsum(1)  # from 1, of each real token
        real = mask & (place > torch.tensor(self.left_out, device=place.device)[:, None])
        vectors = torch.cat([_pool(mode, wide(states), real, place) for mode in self.settings.modes], -1)
        for step in self.settings.steps:
            vectors = step(vectors)
        return vectors[:, : self.settings.dimensions]


def plan_embedding(loaded: LoadedModel, request: EmbeddingRequest) -> EmbeddingPlan:
    """Check a request. Raises InvalidRequest that names the field at fault, and InvalidCheckpoint."""
    if loaded.reader.vector_width is not None and request.pooling is not None:
        raise InvalidRequest.at("pooling", "the vectors of a pair of encoders have no other pooling; leave it out")
    settings = _scaled(_settings(loaded, request.pooling), request.normalize)
    size = min(settings.dimensions or _UNLIMITED, _size(loaded, settings))
    if request.dimensions is not None and request.dimensions > size:
        raise InvalidRequest.at("dimensions", f"the vectors have {size}", limit=size)
    given: Any = request.input
    several = isinstance(given, list) and not isinstance(given[0], int)
    inputs = {f"input.{index}": item for index, item in enumerate(given)} if several else {"input": given}
    if not all(isinstance(item, str) for item in inputs.values()):
        if request.prompt_name is not None:
            raise InvalidRequest.at("prompt_name", "token ids are taken as they are; send texts, or no prompt_name")
        for place, ids in inputs.items():
            loaded.reader.check(ids, place)
        return EmbeddingPlan(settings, [*inputs.values()], [0] * len(inputs))
    return replace(plan_texts(loaded, inputs, request.prompt_name, request.pooling), settings=settings)


def plan_texts(
    loaded: LoadedModel, inputs: Mapping[str, str], prompt_name: str | None, pooling: str | None,
    param: str = "prompt_name",
) -> EmbeddingPlan:  # fmt: skip
    """The plan of texts by the places that they came from. ``param``: that of the prompt's name.

    Raises InvalidRequest and InvalidCheckpoint.
    """
    settings = _settings(loaded, pooling)
    prompt = _prompt(settings, prompt_name, param)
    rows = [_tokens(loaded, settings, prompt, text, place) for place, text in inputs.items()]
    if settings.pools_prompt or settings.chats or not prompt:
        return EmbeddingPlan(settings, rows, [0] * len(rows))
    ids = _tokens(loaded, settings, "", prompt, param)
    left_out = len(ids) - (ids[-1] in getattr(loaded.reader.tokenizer, "all_special_ids", ()))
    for place, row in zip(inputs, rows, strict=True):
        if len(row) <= left_out:
            raise InvalidRequest.at(place, "it has no token besides those of the prompt, which the model does not pool")
    return EmbeddingPlan(settings, rows, [left_out] * len(rows))


def embed(loaded: LoadedModel, request: EmbeddingRequest, plan: EmbeddingPlan) -> Embeddings:
    """Return a vector for each text."""
    reader, rows = loaded.reader, plan.rows
    checkpoint()
    with torch.inference_mode():
        if reader.vector_width is not None:
            run = loaded.runner.run(reader.arguments(plan.stack(loaded)), RunSpec())
            vectors = run.output.pooler_output if request.normalize is False else normalized(run.output.pooler_output)
        else:
            spec = RunSpec(last_states=True)
            vectors = torch.cat([vectors_of(loaded, part, spec)[0] for part in passes_of(loaded, plan)])
    vectors = vectors[:, : request.dimensions]
    if request.normalize or (request.normalize is None and request.dimensions is not None):
        vectors = normalized(vectors)
    if not bool(vectors.isfinite().all()):
        raise NotFinite("the vectors are not finite", param="model", field="embedding")
    written: list[Any] = vectors.tolist()
    if request.encoding_format == "base64":
        written = [
            base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors.cpu().numpy().astype(np.float32)
        ]
    count = sum(map(len, rows))
    return Embeddings(
        data=[Embedding(index=index, embedding=vector) for index, vector in enumerate(written)],
        model=request.model,
        usage=Usage(prompt_tokens=count, total_tokens=count),
        ran=OpenAIRan(weights=weights_with(loaded, loaded.adapters.active)),
    )


def passes_of(loaded: LoadedModel, plan: EmbeddingPlan) -> list[EmbeddingPlan]:
    """The texts of each pass: all in one, or each alone where padding would change its numbers."""
    lengths = {*map(len, plan.rows)}
    if len(lengths) == 1 or not loaded.reader.mixes_padding(max(lengths)):
        return [plan]
    return [plan.of([text]) for text in range(len(plan.rows))]


def vectors_of(loaded: LoadedModel, plan: EmbeddingPlan, spec: RunSpec) -> tuple[Tensor, RunResult]:
    """Run texts as one batch. Returns their vectors ``[B, D]``, and the results of the run."""
    stack = plan.stack(loaded)
    mask = torch.ones_like(stack.ids, dtype=torch.bool) if stack.mask is None else stack.mask
    run = loaded.runner.run(loaded.reader.arguments(stack), spec)
    if run.last_states is None:
        raise TypeError("vectors are made of last states")
    return plan.pooled(run.last_states, mask), run


def _settings(loaded: LoadedModel, pooling: str | None = None) -> SentenceSettings:
    """The settings of a model's checkpoint, or those of one without any; ``pooling``: in place of its own.

    Raises InvalidCheckpoint.
    """
    settings = _settings_of_checkpoint(loaded)
    return settings if pooling is None else replace(settings, modes=(pooling,))


def _scaled(settings: SentenceSettings, normalize: bool | None) -> SentenceSettings:
    """The settings without the last scaling to length 1, if ``normalize`` is false."""
    steps = settings.steps
    while normalize is False and steps and steps[-1] is normalized:
        steps = steps[:-1]
    return replace(settings, steps=steps)


def _settings_of_checkpoint(loaded: LoadedModel) -> SentenceSettings:
    model, reader = loaded.model, loaded.reader
    settings = read_sentence_settings(Path(str(model.name_or_path)))
    if settings is None:
        causal = loaded.head.predicts == "next" and not reader.pairs and getattr(model.config, "is_causal", True)
        return SentenceSettings(("lasttoken" if causal else "mean",), steps=(normalized,))
    limits = [settings.limit, reader.max_length]
    if settings.limit is None:
        tokenizers = getattr(reader.tokenizer, "model_max_length", None)
        limits += [tokenizers, getattr(model.config, "max_position_embeddings", None)]
    known = (limit for limit in limits if isinstance(limit, int) and 0 < limit < _UNLIMITED)
    return replace(settings, limit=min(known, default=None))


def _prompt(settings: SentenceSettings, chosen: str | None, param: str) -> str:
    """The text of a prompt, or of the default one. Raises InvalidRequest."""
    name = settings.default_prompt if chosen is None else chosen
    if not name:
        return ""
    if name not in settings.prompts:
        names = ", ".join(settings.prompts)[:400]
        raise InvalidRequest.at(param, f"the model has no prompt {name[:128]!r}; it has {names}")
    return settings.prompts[name]


def _tokens(loaded: LoadedModel, settings: SentenceSettings, prompt: str, text: str, place: str) -> list[int]:
    """The tokens of a text behind its prompt, cut as the folder says. Raises InvalidRequest and InvalidCheckpoint."""
    reader, limit = loaded.reader, settings.limit
    if settings.chats:
        messages = [Message(role="system", content=prompt)] if prompt else []
        try:
            written = reader.conversation([*messages, Message(role="user", content=text)], ChatForm(prompt=False)).text
        except InvalidRequest as fault:
            raise InvalidRequest(fault.detail, param=place) from None
        ids = reader.tokens(written, place, special=False).ids
        if limit is not None and len(ids) > limit:  # it would be cut within the chat template
            raise InvalidRequest.at(place, f"{len(ids)} tokens in the chat template; at most {limit}", limit=limit)
    else:
        added = 0 if reader.tokenizer is None else reader.tokenizer.num_special_tokens_to_add()
        if limit is not None and limit < added:
            raise InvalidCheckpoint.at("model", f"its texts are cut to {limit} tokens, of which {added} are special")
        whole = Lowercase().normalize_str(prompt + text) if settings.lowers else prompt + text
        ids = reader.tokens(whole, place, limit=limit).ids
    reader.check(ids, place)
    return ids


def _size(loaded: LoadedModel, settings: SentenceSettings) -> int:
    """The numbers of a vector. Raises InvalidCheckpoint if a layer takes vectors of another length."""
    size = _width(loaded) * len(settings.modes)
    for step in settings.steps:
        if isinstance(step, DenseLayer):
            if step.inputs != size:
                raise InvalidCheckpoint.at("model", f"its module Dense takes vectors of {step.inputs}, not of {size}")
            size = step.outputs
    return size


def _width(loaded: LoadedModel) -> int:
    own = loaded.reader.vector_width
    return loaded.last_states.width if own is None else own


def _pool(mode: str, states: Tensor, real: Tensor, place: Tensor) -> Tensor:
    """One vector a text ``[B, d_model]``; ``real [B, L]``: the tokens that count, ``place [B, L]``: theirs, from 1."""
    weights = (real * place if mode == "weightedmean" else real).to(states.dtype)[..., None]
    if mode == "max":
        return states.masked_fill(~real[..., None], -torch.inf).amax(1)
    if mode in {"cls", "lasttoken"}:
        last = real.shape[1] - 1 - real.flip(1).int().argmax(1)
        chosen = real.int().argmax(1) if mode == "cls" else last
        return states[torch.arange(len(states), device=states.device), chosen]
    total = weights.sum(1)
    return (states * weights).sum(1) / (total.sqrt() if mode == "mean_sqrt_len_tokens" else total)

"""``POST /v1/models/{model}/forward`` inside of vLLM: taps of all tokens of a text, as attention-service answers.

The text is the prompt of a completion of one token. No page of it is shared with other requests, so that the passes
compute all of its tokens, and each pass tells of those that it has computed.
"""

import time
import uuid
from collections.abc import MutableMapping, Sequence
from typing import Any, Final

import numpy as np

from attention_contract.errors import InternalError, InvalidRequest
from attention_contract.json_writing import to_json
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_contract.schemas.openai import AttentionOfTokens
from attention_contract.tensors import Encoding
from attention_contract.validation import validate
from attention_contract.wire import SAFETENSORS, from_body
from attention_vllm.asks import TAPS, AttentionAsk
from attention_vllm.door.openai_replies import Json, Tokenizer, object_of
from attention_vllm.door.result_inbox import AwaitedResults

_TAKEN: Final = frozenset({"text", "tokens", "layers", "return_", "top_k", "encoding"})
"""The fields that are answered."""
_MODELS: Final = "/v1/models/"
_COMPLETIONS: Final = "/v1/completions"


class ForwardRoute:
    """Forward requests, which vLLM answers as completions."""

    def scope(self, scope: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Return the scope of a completion, whose body is JSON."""
        path = scope["path"].partition(_MODELS)[0] + _COMPLETIONS
        own = {b"content-type", b"content-length"}
        headers = [header for header in scope["headers"] if header[0].lower() not in own]
        headers.append((b"content-type", b"application/json"))
        return {**scope, "path": path, "raw_path": path.encode(), "headers": headers}

    def asks(self, body: bytes, media_type: str) -> Json | None:
        """Return the request, of JSON, or of safetensors as the client sends it. Raises AttentionError.

        Tensors are in no field that is answered.
        """
        if media_type == SAFETENSORS:
            request = from_body(ModelForwardRequest, body, media_type, "request")
            fields: Json = request.model_dump(mode="json", by_alias=True, exclude_unset=True)
            return fields
        given = object_of(body)
        if given is None:
            raise InvalidRequest.at("body", "expected a JSON object")
        return given

    def prepare(
        self, given: Json, awaited: AwaitedResults, reply_to: str, tokenizer: Tokenizer, model: str
    ) -> tuple[Json, "ForwardWriter"]:
        """Return vLLM's request, and the writer of the reply. Raises InvalidRequest."""
        request = validate(ModelForwardRequest, given, by_name=False)
        fields = {name: field for name, field in type(request).model_fields.items() if name not in _TAKEN}
        for name, field in fields.items():
            if name in request.model_fields_set and getattr(request, name) != field.get_default(
                call_default_factory=True
            ):
                raise InvalidRequest.at(field.alias or name, "it is not answered inside of vLLM; leave it out")
        if request.top_k:
            raise InvalidRequest.at("top_k", "predictions are the logprobs of completions inside of vLLM; send 0")
        prompt = request.text if request.tokens is None else request.tokens
        if not isinstance(prompt, str) and (not prompt or not isinstance(prompt[0], int)):
            raise InvalidRequest.at("text" if request.tokens is None else "tokens", "expected one text")
        for index, tap in enumerate(request.return_):
            if tap not in TAPS:
                raise InvalidRequest.at(f"return.{index}", f"expected one of {', '.join(sorted(TAPS))} inside of vLLM")
        if not request.return_:
            raise InvalidRequest.at("return", "expected taps: predictions are the logprobs of completions")
        wanted = AttentionOfTokens(layers=request.layers, statistics=[])
        salt = uuid.uuid4().hex
        ask = AttentionAsk(id=awaited.id, attention=wanted, cache_salt=salt, reply_to=reply_to, taps=request.return_)
        body = {
            "model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "cache_salt": salt,
            "return_token_ids": True, "vllm_xargs": {"attention": to_json(ask).decode()},
        }  # fmt: skip
        if request.text is None:
            body["add_special_tokens"] = False
        return body, ForwardWriter(awaited, request.encoding, tokenizer, model)


class ForwardWriter:
    """Writes the reply of one forward request, once vLLM has replied."""

    def __init__(self, awaited: AwaitedResults, encoding: Encoding, tokenizer: Tokenizer, model: str) -> None:
        self._awaited, self._encoding, self._tokenizer, self._model = awaited, encoding, tokenizer, model
        self._begun = time.perf_counter()

    async def write(self, reply: Json) -> bytes:
        """Return the reply as attention-service has it. Raises AttentionError."""
        elapsed = 1e3 * (time.perf_counter() - self._begun)
        (choice,) = reply["choices"]
        ids = choice.get("prompt_token_ids") or reply.get("prompt_token_ids")
        if ids is None:
            raise InternalError("vLLM did not say the tokens of the prompt")
        parts = await self._awaited.take_text(len(ids))
        tokens = [str(token) if self._tokenizer is None else self._tokenizer.decode([token]) for token in ids]
        labels = {"tokens": tokens, "ids": ids, "spans": [None] * len(ids)}
        ran = {
            "model": self._model, "architecture": "vLLM", "device": "vLLM", "dtype": "float32", "kernels": ["vLLM"],
            "compute_ms": elapsed, "queue_ms": 0.0, "peak_bytes": 0,
        }  # fmt: skip
        whole = {"predicts": "next", "predictions": [], "labels": labels, "ran": ran, "layers": joined_parts(parts)}
        return to_json(whole, self._encoding)


def joined_parts(parts: Sequence[tuple[int, int, Sequence[Json]]]) -> list[Json]:
    """Join the taps of the first tokens, and of those behind them, by layer.

    ``parts``: first and last (exclusive) token of each, in order and without a gap, and the fields of its layers.
    """
    length = parts[-1][1]
    joined = []
    for layers in zip(*(layers for _, _, layers in parts), strict=True):
        own: Json = {"layer": layers[0]["layer"]}
        for name in layers[0].keys() - {"layer"}:
            arrays = [layer[name] for layer in layers]
            if name == "weights":  # later queries see more keys
                arrays = [np.pad(x, ((0, 0), (0, 0), (0, length - x.shape[2]))) for x in arrays]
            own[name] = np.concatenate(arrays, axis=0 if name == "output" else 1)
        joined.append(own)
    return joined

"""The fields of OpenAI's API: those of its own package, what changes nothing, and what is refused."""

from typing import get_type_hints

import pytest

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.openai import ChatCompletionRequest, CompletionRequest, EmbeddingRequest
from attention_contract.schemas.openai_api.transcriptions import EXAMPLE_SOUND, TranscriptionRequest
from attention_contract.validation import validate

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
TEXT = {"model": "m", "prompt": "Hello"}
MINIMAL = {
    ChatCompletionRequest: CHAT, CompletionRequest: TEXT, EmbeddingRequest: {"model": "m", "input": "Hello"},
    TranscriptionRequest: EXAMPLE_SOUND,
}  # fmt: skip


def test_every_field_that_the_package_can_send_is_known():
    pytest.importorskip("openai")
    from openai.types import completion_create_params, embedding_create_params
    from openai.types.chat import completion_create_params as chat_create_params

    sent = {
        ChatCompletionRequest: chat_create_params.CompletionCreateParamsBase,
        CompletionRequest: completion_create_params.CompletionCreateParamsBase,
        EmbeddingRequest: embedding_create_params.EmbeddingCreateParams,
    }
    for model, fields in sent.items():
        assert get_type_hints(fields).keys() <= model.model_fields.keys()


def test_every_field_that_the_package_reads_has_its_type():
    pytest.importorskip("openai")
    from openai.types import Completion, CreateEmbeddingResponse
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    from attention_contract.schemas import openai as own

    for theirs, ours in (
        (ChatCompletion, own.ChatCompletion),
        (ChatCompletionChunk, own.ChatCompletionChunk),
        (Completion, own.Completion),
        (CreateEmbeddingResponse, own.Embeddings),
    ):
        required = {name for name, field in theirs.model_fields.items() if field.is_required()}
        assert required <= ours.model_fields.keys()


@pytest.mark.parametrize("model", MINIMAL)
def test_what_changes_nothing_is_accepted(model):
    ignored = {name: "anything" for name in ("user", "safety_identifier", "store") if name in model.model_fields}
    neutral = {name: values[0] for name, values in model.neutral.items() if values}
    nulls = dict.fromkeys(model.model_fields.keys() - MINIMAL[model].keys())
    assert validate(model, nulls | MINIMAL[model] | ignored | neutral)


@pytest.mark.parametrize(
    "field", [(model, name) for model in MINIMAL for name in model.neutral], ids=lambda field: field[1]
)
def test_what_would_change_the_answer_is_refused(field):
    model, name = field
    with pytest.raises(InvalidRequest, match="change the answer") as refusal:
        validate(model, MINIMAL[model] | {name: {"type": "something"}})
    assert refusal.value.param == name


@pytest.mark.parametrize(
    ("model", "fields", "param"),
    [
        (ChatCompletionRequest, {"top_logprobs": 2}, "top_logprobs"),
        (ChatCompletionRequest, {"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens"),
        (ChatCompletionRequest, {"stream_options": {"include_usage": True}}, "stream_options"),
        (ChatCompletionRequest, {"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        (CompletionRequest, {"temperature": 3}, "temperature"),
        (CompletionRequest, {"n": 0}, "n"),
        (CompletionRequest, {"prompt": []}, "prompt"),
        (CompletionRequest, {"unknown": 1}, "unknown"),
        (CompletionRequest, {"attention": {"layer": 1}}, "attention.layer"),
        (EmbeddingRequest, {"encoding_format": "int8"}, "encoding_format"),
        (TranscriptionRequest, {"timestamp_granularities": ["word"]}, "timestamp_granularities"),
        (TranscriptionRequest, {"alignment_heads": [[0, 0]]}, "alignment_heads"),
    ],
)
def test_a_request_that_is_not_valid_names_its_field(model, fields, param):
    with pytest.raises(InvalidRequest) as refusal:
        validate(model, MINIMAL[model] | fields)
    assert refusal.value.param == param


def test_a_message_that_came_may_be_sent_back():
    message = {
        "role": "assistant", "content": "Hi", "refusal": None, "annotations": [], "audio": None, "function_call": None,
        "tool_calls": None,
    }  # fmt: skip
    parts = {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}], "name": "x"}
    request = validate(ChatCompletionRequest, CHAT | {"messages": [parts, message]})
    assert [part.text for part in request.messages[0].content] == ["Hel", "lo"]
    assert request.messages[1].content == "Hi"

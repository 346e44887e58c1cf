"""Generation by whole models: the arguments are those of OpenAI's API, and one more."""

import ssl
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, cast, overload

from attention_client.arguments import DrawFields
from attention_client.calls.base import Call, CallOptions, call
from attention_client.calls.method import Awaited, Blocking, Group, WayT, method, streamed
from attention_client.media_files import AudioLike, sent
from attention_contract import operations
from attention_contract.operations import Operation
from attention_contract.schemas.openai import (
    AttentionOfTokens,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    Embeddings,
)
from attention_contract.schemas.openai_api.responses import ModelResponse, ResponseEvent
from attention_contract.schemas.openai_api.scoring import PairScores, Ranking
from attention_contract.schemas.openai_api.sound_streams import SoundStreamEvent, SoundStreamStart
from attention_contract.schemas.openai_api.tokenization import Tokenization
from attention_contract.schemas.openai_api.transcriptions import GrowingSound, Transcription, TranscriptionEvent
from attention_contract.schemas.text_similarity import Pooling
from attention_contract.validation import validate

if TYPE_CHECKING:
    from attention_client.streams.sent_sounds import SoundPiece

Prompt = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
Messages = Sequence[Mapping[str, Any]]


class SamplingFields(DrawFields, total=False):
    """The settings of a generation that are None by default, and those of the call; see ``client.models.generate``."""

    temperature: float | None
    forced_bos_token_id: int | str | None
    attention: AttentionOfTokens | Mapping[str, Any] | None
    alone: bool | None
    adapter: str | None


class CompletionFields(SamplingFields, total=False):
    """The same, of a text."""

    max_tokens: int | None
    n: int | None
    logprobs: int | None
    logprob_tokens: Sequence[int | str] | None
    logprob_token_ids: Sequence[int] | None
    add_special_tokens: bool | None
    echo: bool | None


class SoundFields(TypedDict, total=False):
    """The settings of the text of a sound; see ``client.models.transcribe``."""

    language: str | None
    prompt: str | None
    temperature: float | None
    alignment_heads: Sequence[tuple[int, int]] | None
    adapter: str | None


class TemplateFields(CallOptions, total=False):
    """The settings of a chat template, and those of the call; see ``client.models.chat``."""

    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None


class ChatFields(SamplingFields, TemplateFields, total=False):
    """The settings of a conversation's answer."""

    max_tokens: int | None
    n: int | None
    logprobs: bool | None
    top_logprobs: int | None
    logprob_tokens: Sequence[int | str] | None
    logprob_token_ids: Sequence[int] | None
    add_special_tokens: bool | None


class ResponseFields(SamplingFields, TemplateFields, total=False):
    """The same, of the Responses API; see ``client.models.respond``."""

    instructions: str | None
    max_output_tokens: int | None
    include: Sequence[Literal["message.output_text.logprobs"]] | None
    top_logprobs: int | None


class TokenizeFields(TemplateFields, total=False):
    """The settings of ``client.models.tokenize`` that are None by default."""

    text_pair: str | None
    answer: str | None
    messages: Messages | None
    add_special_tokens: bool | None
    return_token_strs: bool | None
    adapter: str | None
    alone: bool | None


class TranscriptionFields(CallOptions, total=False):
    """The settings of a transcription that are None by default; see ``client.models.transcribe``."""

    language: str | None
    prompt: str | None
    response_format: Literal["json", "verbose_json"] | None
    temperature: float | None
    timestamp_granularities: Sequence[Literal["word", "segment"]] | None
    overlap: float | None
    growing: GrowingSound | Mapping[str, Any] | None
    include: Sequence[Literal["logprobs"]] | None
    attention: AttentionOfTokens | Mapping[str, Any] | None
    adapter: str | None
    alignment_heads: Sequence[tuple[int, int]] | None
    alone: bool | None


class Generation(Group[WayT]):
    """Calls that generate, and embeddings."""

    @method
    def generate(self, model: str, prompt: Prompt, **options: Unpack[CompletionFields]) -> Call[Completion]:
        """Continue a text, or several as one batch.

        ``temperature=0`` takes the likeliest tokens; otherwise they are drawn, the same ones after the same ``seed``.
        ``stop`` names texts that end a choice, and ``n`` asks for several. ``logprobs`` is the number of likeliest
        tokens to name beside each; with ``echo``, those of the prompt too. ``logprob_tokens`` adds further tokens, by
        ids or texts. ``add_special_tokens=False`` takes the prompt without the tokenizer's special tokens.
        ``attention`` tells what the heads looked at when they chose a token, and edits them:
        ``{"layers": [0, 3], "top_k": 3, "edits": {"3": [{"tap": "context", "heads": [0], "set": 0}]}}``.
        ``alone=True`` shares no pass with other requests, for the same bits every time. ``adapter`` names an adapter of
        the model.
        Raises ModelNotFound and InvalidRequest.
        """
        return call(operations.create_completion, locals())

    @streamed
    def stream(self, model: str, prompt: Prompt, **options: Unpack[CompletionFields]) -> Call[Completion]:
        """Yield what ``generate`` returns piece by piece, as it comes."""
        return call(operations.create_completion, _streaming(locals()))

    @method
    def chat(self, model: str, messages: Messages, **options: Unpack[ChatFields]) -> Call[ChatCompletion]:
        """Answer a conversation: ``[{"role": "user", "content": "Hello"}]``.

        ``logprobs=True`` returns the log-probability of each token, beside ``top_logprobs`` of the likeliest.
        ``chat_template_kwargs`` are variables of the chat template, and ``continue_final_message=True`` continues the
        last message. The other arguments are those of ``generate``.
        """
        return call(operations.create_chat_completion, locals())

    @streamed
    def stream_chat(self, model: str, messages: Messages, **options: Unpack[ChatFields]) -> Call[ChatCompletionChunk]:
        """Yield what ``chat`` returns piece by piece, as it comes."""
        whole = cast("Operation[Any]", operations.create_chat_completion)
        return call(replace(whole, reply=ChatCompletionChunk), _streaming(locals()))

    @method
    def respond(self, model: str, input: str | Messages, **options: Unpack[ResponseFields]) -> Call[ModelResponse]:  # noqa: A002
        """Answer a text or a conversation by the Responses API; the text is ``output_text`` of the reply.

        ``instructions`` are a message of the system before it. ``top_logprobs`` returns the log-probability of each
        token, beside so many of the likeliest. The other arguments are those of ``chat``.
        """
        return call(operations.create_response, locals())

    @streamed
    def stream_response(
        self, model: str, input: str | Messages, **options: Unpack[ResponseFields]  # noqa: A002
    ) -> Call[ResponseEvent]:  # fmt: skip
        """Yield the events of the answer that ``respond`` returns, as they come."""
        whole = cast("Operation[Any]", operations.create_response)
        return call(replace(whole, reply=ResponseEvent), _streaming(locals()))

    @method
    def tokenize(
        self, model: str, prompt: str | None = None, **options: Unpack[TokenizeFields]
    ) -> Call[Tokenization]:  # fmt: skip
        """Return the tokens of a text, or of ``messages``, with their places in it: the positions of edits.

        ``text_pair`` is a second text, and ``answer`` a given continuation, as in ``weights``. The arguments of the
        chat template are those of ``chat``. Raises ModelNotFound and InvalidRequest.
        """
        return call(operations.tokenize, locals())

    @method
    def transcribe(self, model: str, file: AudioLike, **options: Unpack[TranscriptionFields]) -> Call[Transcription]:
        """Return the text of a sound: the path of a WAV, FLAC, OGG or MP3 file, or its bytes.

        ``response_format="verbose_json"`` adds language, length and the times of words and segments, whose
        ``captions("srt")`` or ``captions("vtt")`` the reply writes. ``overlap`` is the seconds that the windows have in
        common into which a long sound is cut. ``attention`` returns what the heads looked at when they chose each
        token, as in ``generate``, with the seconds in the sound. ``growing={"accepted": […]}`` is for the beginning of
        a longer sound, whose text stops where its heads look at the end; the reply's ``accepted`` goes with the next.
        ``alignment_heads`` are those that times are taken from: layers and heads of cross-attentions, as in
        ``[(1, 0), (1, 3)]``. Raises ModelNotFound and InvalidRequest.
        """
        return call(operations.create_transcription, {**locals(), "file": sent(file, "file", image=False)})

    @streamed
    def stream_transcription(
        self, model: str, file: AudioLike, **options: Unpack[TranscriptionFields]
    ) -> Call[TranscriptionEvent]:
        """Yield pieces of what ``transcribe`` returns as they come; of a long sound, a window at a time."""
        whole = cast("Operation[Any]", operations.create_transcription)
        fields = {**locals(), "file": sent(file, "file", image=False)}
        del fields["whole"]
        return call(replace(whole, reply=TranscriptionEvent), _streaming(fields))

    @overload
    def stream_sound(
        self: "Generation[Blocking]", model: str, pieces: Iterable["SoundPiece"], *, rate: int = 16_000,
        frames: int = 25, every_s: float = 1.0, ssl: ssl.SSLContext | None = None, **options: Unpack[SoundFields],
    ) -> Iterator[SoundStreamEvent]: ...  # fmt: skip
    @overload
    def stream_sound(
        self: "Generation[Awaited]", model: str, pieces: AsyncIterable["SoundPiece"] | Iterable["SoundPiece"], *,
        rate: int = 16_000, frames: int = 25, every_s: float = 1.0, ssl: ssl.SSLContext | None = None,
        **options: Unpack[SoundFields],
    ) -> AsyncIterator[SoundStreamEvent]: ...  # fmt: skip
    def stream_sound(
        self: "Generation[Any]", model: str, pieces: Any, *, rate: int = 16_000, frames: int = 25,
        every_s: float = 1.0, ssl: ssl.SSLContext | None = None, **options: Unpack[SoundFields],
    ) -> Any:  # fmt: skip
        """Yield the text of a sound while its pieces come, as from a microphone: ``delta`` by ``delta``, which stays.

        ``pieces``: samples of one channel, ``rate`` a second, signed 16-bit or from −1 to 1; they are taken from by
        another thread, or task. After each ``every_s`` seconds of sound the model hears on, and stops before the first
        token whose ``alignment_heads`` look most at one of the last ``frames`` frames. The last event has the whole
        ``text``. Raises ModelNotFound and InvalidRequest, and ConnectionFailed if the connection breaks.
        """
        from attention_client.streams.sent_sounds import heard, heard_async  # noqa: PLC0415 - few calls need websockets

        start = validate(
            SoundStreamStart, {"model": model, "rate": rate, "frames": frames, "every_s": every_s, **options}
        )
        return (heard_async if self._awaits else heard)(self._client.stream_settings(), start, pieces, ssl)

    @method
    def embed(
        self, model: str, input: Prompt, *, dimensions: int | None = None, prompt_name: str | None = None,  # noqa: A002
        pooling: Pooling | None = None, normalize: bool | None = None, adapter: str | None = None,
        alone: bool | None = None, **options: Unpack[CallOptions],
    ) -> Call[Embeddings]:  # fmt: skip
        """Return a vector for each text, pooled as the model's checkpoint says.

        ``dimensions`` keeps the first numbers of each; ``pooling`` takes the place of the checkpoint's.
        ``normalize=False`` returns vectors that are not scaled to length 1.
        ``prompt_name`` is the prompt of the checkpoint to put before each text, in place of its default one.
        ``adapter`` names an adapter of the model. Raises ModelNotFound and InvalidRequest.
        """
        return call(operations.create_embedding, locals())

    @method
    def rerank(
        self, model: str, query: str, documents: Sequence[str], *, top_n: int | None = None,
        return_documents: bool | None = None, truncate_prompt_tokens: int | None = None,
        use_activation: bool | None = None, adapter: str | None = None, alone: bool | None = None,
        **options: Unpack[CallOptions],
    ) -> Call[Ranking]:  # fmt: skip
        """Return documents by their relevance to a query, the most relevant first; ``top_n`` of them.

        A relevance is the logit of a model with one class after the activation of its config, by default the logistic
        function, or the cosine of two vectors of a model of embeddings. ``use_activation=False`` returns the logit.
        ``truncate_prompt_tokens`` cuts each pair, the longer text first.
        Raises ModelNotFound and InvalidRequest.
        """
        return call(operations.rerank, locals())

    @method
    def score(
        self, model: str, text_1: str | Sequence[str] | None = None, text_2: str | Sequence[str] | None = None, *,
        queries: str | Sequence[str] | None = None, documents: str | Sequence[str] | None = None,
        truncate_prompt_tokens: int | None = None, use_activation: bool | None = None, adapter: str | None = None,
        alone: bool | None = None, **options: Unpack[CallOptions],
    ) -> Call[PairScores]:  # fmt: skip
        """Return the score of each pair of texts as ``rerank`` makes it, in their order.

        One first text goes with every second one. ``queries`` and ``documents`` are other names of both.
        Raises ModelNotFound and InvalidRequest.
        """
        return call(operations.score, locals())


def _streaming(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name != "whole"} | {"stream": True}

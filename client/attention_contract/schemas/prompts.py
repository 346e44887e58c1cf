"""The input of a whole model: a text, messages, tokens, images or sound; and its tokens, which every reply has.

A request with one text has no batch dimension, and its reply has none. A request with several texts is one batch, and
its reply has the dimension B. Shorter texts are padded, at the left of a model that generates and at the right of
others. All indices count padding too, which has labels of its own.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from attention_contract.base import ABSENT, IfRequested, Listed, WireModel, at_fault
from attention_contract.exact_types import Index
from attention_contract.schemas.attention import MAX_EDITS, Edit
from attention_contract.schemas.models import EditedKey, LayerKey, LayerRef
from attention_contract.schemas.recordings import RecordingId
from attention_contract.tensors import Encoding

MAX_TEXT: Final = 1_000_000
"""Characters of one text."""
MAX_TEXTS: Final = 256
"""Texts of one request."""
MAX_TOKENS: Final = 1_048_576
"""Tokens of one text."""
MAX_MODEL_EDITS: Final = 1024
"""Edits of one request to a model."""
EMBEDDINGS: Final = "embeddings"
"""The key of edits of the model's embeddings, and their tap."""
Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT, pattern=r"^[^\x00]*$")]
TokenIds = Annotated[list[Index], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True)]


def _check_layers(layers: Literal["all"] | list[LayerRef]) -> Literal["all"] | list[LayerRef]:
    names = [] if layers == "all" else [str(layer) for layer in layers]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"expected each layer once; got {twice[0]} again")
    return layers


def _check_edits(edits: dict[str, list[Edit]]) -> dict[str, list[Edit]]:
    if (count := sum(map(len, edits.values()))) > MAX_MODEL_EDITS:
        raise ValueError(f"expected at most {MAX_MODEL_EDITS} edits of all layers; got {count}")
    for key, stated in edits.items():
        for index, edit in enumerate(stated):
            if (edit.tap == EMBEDDINGS) != (key == EMBEDDINGS):
                raise at_fault(
                    f"{key}.{index}.tap", "embeddings are those of the model: edits of them, and of nothing else, have "
                    "the key embeddings in place of a layer"
                )  # fmt: skip
    return edits


LayersInOrder = Annotated[
    Literal["all"] | Annotated[list[LayerRef], Field(min_length=1, max_length=4096)], AfterValidator(_check_layers)
]
"""Layers, each once."""
EditsByLayer = Annotated[
    dict[EditedKey, Annotated[Listed[Edit], Field(max_length=MAX_EDITS)]],
    Field(max_length=4096),
    AfterValidator(_check_edits),
]
"""Edits of each layer, each in the form of edits of a module, and of the ``embeddings``: at most 256 of a layer, and
1,024 in all."""


class ImageBytes(WireModel):
    """One image, as the bytes of a PNG, JPEG, WebP or GIF file. The images of a request have 2^25 pixels at most."""

    base64: str = Field(min_length=1, max_length=2**26)


class AudioBytes(WireModel):
    """One sound, as the bytes of a WAV, FLAC, OGG or MP3 file. The sounds of a request have 2^26 samples at most."""

    base64: str = Field(min_length=1, max_length=2**27)


class TextPart(WireModel):
    """A part of a message that is text."""

    type: Literal["text"]
    text: str = Field(max_length=MAX_TEXT)


class ImagePart(WireModel):
    """The place of an image in a message: the next of the request's ``images``."""

    type: Literal["image"]


def _check_data(url: str) -> str:
    if not re.match(r"data:image/(png|jpe?g|webp|gif);base64,", url):
        raise ValueError("expected data:image/png;base64,… (or jpeg, webp, gif): the server fetches nothing")
    return url


ImageAddress = Annotated[str, Field(max_length=2**26), AfterValidator(_check_data)]
"""``data:image/png;base64,…``; jpeg, webp and gif too. Nothing is fetched."""


class DataUrl(WireModel):
    """An image inside its address."""

    url: ImageAddress
    """``data:image/png;base64,…``; jpeg, webp and gif too. Nothing is fetched."""
    detail: Any = None
    """Accepted, but without effect."""


class ImageUrlPart(WireModel):
    """A part of a message that is an image, in the form of OpenAI's API."""

    type: Literal["image_url"]
    image_url: DataUrl


class AudioPart(WireModel):
    """The place of a sound in a message: the next of the request's ``audio``."""

    type: Literal["audio"]


class InputAudio(WireModel):
    """A sound inside a message."""

    data: str = Field(min_length=1, max_length=2**27)
    """The bytes of a file in base64."""
    format: Literal["wav", "mp3", "flac", "ogg"] = "wav"
    """The file says its form itself; this is for OpenAI's clients."""


class InputAudioPart(WireModel):
    """A part of a message that is a sound, in the form of OpenAI's API."""

    type: Literal["input_audio"]
    input_audio: InputAudio


MessagePart = Annotated[TextPart | ImagePart | ImageUrlPart | AudioPart | InputAudioPart, Field(discriminator="type")]


def kind_of_content(content: Any) -> str:
    """Return ``parts`` for the parts of a message, else ``text``: a refusal names what is wrong with what came."""
    return "parts" if isinstance(content, list) else "text"


class CalledFunction(WireModel):
    """The function of a tool, and its arguments."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Annotated[str, Field(max_length=MAX_TEXT)] | dict[str, Any] | None = None
    """An object, or its JSON text as in OpenAI's API. The chat template gets an object."""


class ToolCall(WireModel):
    """A call of a tool in a message of the past."""

    id: Annotated[str, Field(max_length=256)] | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(WireModel):
    """One message of a conversation, for models with a chat template."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: (
        Annotated[
            Annotated[str, Field(max_length=MAX_TEXT), Tag("text")]
            | Annotated[list[MessagePart], Field(max_length=1024), Tag("parts")],
            Discriminator(kind_of_content),
        ]
        | None
    ) = None
    """A text, or parts; may be null beside ``tool_calls``. Images without a part of their own are inserted before the
    text of the first message."""
    tool_calls: Annotated[list[ToolCall], Field(max_length=256)] | None = None
    """The calls of tools that an answer of the past made."""
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    """The call that a message of the role ``tool`` answers."""
    name: Annotated[str, Field(max_length=256)] | None = None
    """The name of the speaker or of the tool, for templates that write it."""
    reasoning_content: Annotated[str, Field(max_length=MAX_TEXT)] | None = None
    """The reasoning before an answer of the past, for templates that write it."""

    @model_validator(mode="after")
    def _says_something(self) -> "Message":
        if self.content is None and not self.tool_calls:
            raise at_fault("content", "expected a text or parts; only a message with tool_calls may have none")
        return self


class ChatTemplateFields(WireModel):
    """The fields of a request with messages that say how the chat template writes them, as in vLLM."""

    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=256)] | None = None
    """Variables of the checkpoint's chat template, such as ``{"enable_thinking": false}``; ``tools`` and ``documents``
    too."""
    add_generation_prompt: bool | None = None
    """End the conversation with the beginning of an answer. Default: true, but for ``continue_final_message``."""
    continue_final_message: bool | None = None
    """End the conversation inside its last message, so that the model continues that message."""

    @model_validator(mode="after")
    def _one_end(self) -> "ChatTemplateFields":
        if self.add_generation_prompt and self.continue_final_message:
            raise at_fault(
                "continue_final_message", "an answer cannot begin within a message; set add_generation_prompt to false"
            )
        return self


def images_in(messages: Iterable[Any]) -> list[ImageBytes]:
    """Return the images inside the addresses of a conversation, in their order."""
    urls = [part.image_url.url for part in _parts(messages) if isinstance(part, ImageUrlPart)]
    return [ImageBytes(base64=url.partition(",")[2]) for url in urls]


def sounds_in(messages: Iterable[Any]) -> list[AudioBytes]:
    """Return the sounds inside a conversation, in their order."""
    return [AudioBytes(base64=part.input_audio.data) for part in _parts(messages) if isinstance(part, InputAudioPart)]


def _parts(messages: Iterable[Any]) -> list[Any]:
    return [part for message in messages if isinstance(message.content, list) for part in message.content]


def _lengths(ids: list[int] | list[list[int]]) -> list[int] | int:
    return [len(row) for row in ids if isinstance(row, list)] or len(ids)


class ModelInput(ChatTemplateFields):
    """The input of a whole model: exactly one of ``text``, ``tokens`` and ``messages``; images or sounds for encoders.

    A reply about one image, or one sound, alone has no batch dimension; several are one batch.
    """

    text: Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS)] | None = None
    """One text, or several as one batch."""
    text_pair: Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS)] | None = None
    """A second text that the tokenizer joins to ``text``, as a classifier of pairs, a reranker or a model that answers
    questions reads it. A list has one for each text; one text, or one pair, goes with every other."""
    tokens: TokenIds | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_TEXTS)] | None = None
    """Token ids; no special tokens are added."""
    token_type_ids: TokenIds | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_TEXTS)] | None = None
    """The type of each of ``tokens``, for models that tell a first text from a second one so, such as BERT; default:
    0."""
    messages: Annotated[list[Message], Field(min_length=1, max_length=1024)] | None = None
    """A conversation. The checkpoint's chat template formats it, up to the beginning of the model's answer; or, if the
    last message is the assistant's, with that as a given answer."""
    answer: Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS)] | None = None
    """A given continuation of ``text``: replies tell its log-probability, which ``gradients`` differentiates. Of a
    masked model, the text in place of the mask tokens of ``text``, one for each of its tokens. A list has one for each
    text; one text, or one answer, goes with every other."""
    target: Text | None = None
    """The text of the decoder, for a model with an encoder and a decoder; default: only its start token."""
    images: Annotated[list[ImageBytes], Field(max_length=64)] = Field(default_factory=list)
    """Images, for models that take them, with one text. The model's image token marks the place of each image in the
    text; without such tokens, the images come before the text."""
    audio: Annotated[list[AudioBytes], Field(max_length=64)] = Field(default_factory=list)
    """Sounds, for models that hear them; of those that read text too, with one text. A sound of several channels
    becomes their mean, at the rate of the model."""
    mask_seed: int = Field(default=0, ge=0, lt=2**63)
    """Chooses the patches that a model which leaves out some at random, such as ViT-MAE, sees of each image."""
    layers: LayersInOrder = "all"
    """The layers in the reply, in this order."""
    edits: EditsByLayer = Field(default_factory=dict)
    """Edits by layer, each in the form of edits of a module: ``{"3": [{"tap": "context", "heads": [0], "set":
    0}]}``."""
    adapter: str | None = Field(default=None, min_length=1, max_length=1024)
    """The name or path of an adapter that answers beside the model, as the model ``base:adapter`` does."""
    alone: bool = False
    """Share no pass with other requests: the same numbers to the last bit, whoever asks at the same time."""
    encoding: Encoding = "list"
    """The form of tensors in a JSON reply."""

    @model_validator(mode="after")
    def _one_input(self) -> "ModelInput":
        given = [name for name in ("text", "tokens", "messages") if getattr(self, name) is not None]
        if len(given) > 1:
            raise at_fault(given[1], f"expected one of text, tokens and messages; got {' and '.join(given)}")
        if not given and not self.images and not self.audio:
            raise at_fault("text", "expected text, tokens, messages, images or audio; got none")
        if self.images and self.audio:
            raise at_fault("audio", "no model reads images and sound in one request; send one of them")
        if self.images and images_in(self.messages or ()):
            raise at_fault("images", "the messages bring their own; send them in one way")
        if self.audio and sounds_in(self.messages or ()):
            raise at_fault("audio", "the messages bring their own; send them in one way")
        for name in ("text_pair", "answer"):
            self._check_beside(name)
        if self.text_pair is not None and self.answer is not None:
            raise at_fault("answer", "it continues one text; leave text_pair out")
        for name in ("chat_template_kwargs", "add_generation_prompt", "continue_final_message"):
            if getattr(self, name) is not None and self.messages is None:
                raise at_fault(name, "it goes with messages")
        self._check_types()
        return self

    def _check_beside(self, name: str) -> None:
        beside = getattr(self, name)
        if beside is not None and self.text is None:
            raise at_fault(name, "it goes with text; send the first of the two there")
        if isinstance(self.text, list) and isinstance(beside, list) and len(self.text) != len(beside):
            raise at_fault(name, f"expected one for each of {len(self.text)} texts; got {len(beside)}")

    def _check_types(self) -> None:
        if self.token_type_ids is None:
            return
        if self.tokens is None:
            raise at_fault("token_type_ids", "they go with tokens; those of text and text_pair are the tokenizer's")
        if _lengths(self.tokens) != _lengths(self.token_type_ids):
            raise at_fault("token_type_ids", "expected one for each token, in the same lists as tokens")

    @property
    def inputs(self) -> int:
        """The number of texts, or of images or sounds alone."""
        beside = self.text_pair or self.answer
        texts = beside if isinstance(beside, list) else self.text or self.tokens
        if texts is None:
            return 1 if self.messages is not None else len(self.images or self.audio)
        return len(texts) if isinstance(texts, list) and not isinstance(texts[0], int) else 1

    @property
    def all_images(self) -> list[ImageBytes]:
        """Its images, those inside its messages too."""
        return self.images or images_in(self.messages or ())

    @property
    def all_audio(self) -> list[AudioBytes]:
        """Its sounds, those inside its messages too."""
        return self.audio or sounds_in(self.messages or ())


class TokenLabelsReply(WireModel):
    """The tokens of one input, for reading."""

    tokens: list[str]
    """The tokens in readable form: without the tokenizer's own marks, and with bytes as text; bytes that are only a
    part of a character are written as ``\\xe2``. Patches of an image are ``[row,column]``; other tokens of an image
    encoder are ``CLS`` and ``register 0``. Frames of a sound are the second at which they begin, as in ``1.24 s``,
    and patches of a spectrogram have their row after it, as in ``1.24 s/3``."""
    ids: list[int]
    """The token ids; for an encoder of images or sound, the positions of the tokens; −1 for a key that stands for
    several tokens, whose label is their first and last position, as in ``[4…7]``."""
    spans: list[tuple[int, int] | None]
    """Start and end (exclusive) of each token in the characters of its text, which is the whole conversation for
    messages; null for a token without text."""
    parts: IfRequested[list[str | None]] = ABSENT
    """The field that each token comes from, with ``text_pair`` or ``answer``; null for a special token. Of messages,
    the role of the message that it is in, ``answer`` for a given answer at the end, and null for a token that the chat
    template writes."""
    patches: IfRequested[list[tuple[int, int, int] | None]] = ABSENT
    """Image, row and column of each token that is a patch of an image, counted inside its crop."""
    crops: IfRequested[list[int | None]] = ABSENT
    """The crop that each patch belongs to; 0 if the model sees the whole image at once."""
    rectangles: IfRequested[list[tuple[float, float, float, float] | None]] = ABSENT
    """Left, top, right and bottom of each patch in pixels of the original image, after the rotation by its EXIF data.
    Null for padding."""
    seconds: IfRequested[list[tuple[float, float] | None]] = ABSENT
    """The second of the sound at which each token begins, and at which it ends. Null after the end of the sound."""


class ModelRan(WireModel):
    """The run of a request to a whole model."""

    model: str
    architecture: str
    device: str
    dtype: str
    weights: str = "float32"
    """The numbers that it computed with: the dtype, ``dequantized from Q4_K_M`` for a quantized checkpoint, or
    ``base + adapter NAME``; ``dequantized from Q4_K_M + adapter NAME`` for an adapter of such a base."""
    kernels: list[str]
    """The kernels that computed the attention outputs."""
    predicted_ms: float | None = None
    """The predicted median of ``compute_ms``; null of requests whose time is not predicted."""
    predicted_low_ms: float | None = None
    predicted_high_ms: float | None = None
    """Nine of ten runs should take between ``predicted_low_ms`` and ``predicted_high_ms``."""
    compute_ms: float
    """Milliseconds in the model's process; of a shared pass, those of the whole pass."""
    queue_ms: float
    """Milliseconds between admission and execution."""
    load_ms: float = 0.0
    """Milliseconds that the request waited for its model to be loaded."""
    peak_bytes: int
    """Memory that the request was admitted for, besides the model: an estimate."""
    joined: int = 1
    """The largest number of requests that shared one of its passes; 1 if it ran alone."""


class ModelReply(WireModel):
    """The fields of every reply for an input."""

    labels: TokenLabelsReply | list[TokenLabelsReply]
    """The tokens of the input, with one entry for each text if there are several; for an encoder-decoder model, those
    of the decoder."""
    image_labels: IfRequested[list[TokenLabelsReply]] = ABSENT
    """The tokens of the layers ``vision.…``, for a model that also reads text. These layers always have a batch
    dimension; there is one entry for each index, which is a crop of an image, or all images as one sequence."""
    audio_labels: IfRequested[list[TokenLabelsReply]] = ABSENT
    """The frames of the layers ``audio.…``, for a model that also reads text. These layers always have a batch
    dimension; there is one entry for each index, which is a sound, or a part of one that is longer than they hear."""
    encoder_labels: IfRequested[TokenLabelsReply | list[TokenLabelsReply]] = ABSENT
    """The tokens of the encoder's text, or the frames of its sound."""
    key_labels: IfRequested[dict[LayerKey, TokenLabelsReply | list[TokenLabelsReply]]] = ABSENT
    """The keys of those layers whose keys are not the tokens of one text: see ``keys`` in ``GET /v1/models/{model}``.
    Of a layer that attends within windows a list, with the queries and keys of each window of each image."""
    recording: IfRequested[RecordingId] = ABSENT
    """The id of the recording, with ``keep``."""
    ran: ModelRan

    def labels_of(self, text: int = 0) -> TokenLabelsReply:
        """Return the tokens of one text by its index, whether one or several came. Raises IndexError."""
        several = self.labels if isinstance(self.labels, list) else [self.labels]
        return several[text]

    def media_labels_of(self, layer: LayerRef) -> list[TokenLabelsReply] | None:
        """Return the labels of each crop, window or sound of a layer that sees images or hears sounds; else None.

        None too for encoders of images or sounds whose layers have the tokens of ``labels``.
        """
        keys = (self.key_labels or {}).get(str(layer))
        if isinstance(keys, list) and keys[0].patches is not None:
            return keys
        labels = {"vision": self.image_labels, "audio": self.audio_labels}
        return labels.get(str(layer).partition(".")[0])

    def tokens_of(self, layer: LayerRef, text: int = 0) -> tuple[TokenLabelsReply, TokenLabelsReply]:
        """Return the tokens that are the queries and the keys of a layer. Raises IndexError.

        ``text`` is the index of a crop or a sound for the layers that see or hear in a model that reads text too, and
        that of a window in a layer that attends within windows.
        """
        if (rows := self.media_labels_of(layer)) is not None:
            return rows[text], rows[text]
        own, encoder = self.labels_of(text), self.encoder_labels
        keys = (self.key_labels or {}).get(str(layer))
        if keys is not None:
            return own, keys[text] if isinstance(keys, list) else keys
        if encoder is None:
            return own, own
        read = encoder[text] if isinstance(encoder, list) else encoder
        stack = str(layer).partition(".")[0]
        return read if stack == "encoder" else own, own if stack == "decoder" else read


EXAMPLE_TEXT: Final[dict[str, Any]] = {"text": "the cat sat on the mat"}

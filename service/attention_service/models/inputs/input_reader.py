"""The reader of a model's inputs: what enters its layers, the media and their parts, and the limits of texts."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.prompts import Message, ModelInput, TokenLabelsReply
from attention_service.models.inputs.input_stacks import Inputs, SizedImage, Stack, Tokens
from attention_service.models.inputs.patch_grids import patch_labels
from attention_service.models.inputs.sounds.sound_decoding import Sound
from attention_service.models.inputs.token_texts import TokenDecoder
from attention_service.models.passes.attention_places import TEXT, AttentionPlace
from attention_service.models.passes.run_records import RunRecord
from attention_service.prompts.conversations import ChatForm, Conversation

HEARS_NONE: Final = "this model hears none; send text, tokens or messages"


class InputReader(ABC):
    """Reads the inputs of one model. A subclass states what its model can; nothing asks for the class of a reader."""

    reads = "texts"
    """The inputs that an error for another one names."""
    enters: Literal["tokens", "tokens and media", "pixels", "frames"] = "tokens"
    """The states that enter its first layer: the embeddings of tokens, those with states of images or sounds among
    them, the patches of images, or the frames of sounds."""
    media: Literal["images", "audio"] | None = None
    """The field of the images or sounds that it reads beside texts; None of a model that reads texts or media alone."""
    tower: ClassVar[tuple[str, str] | None] = None
    """The part of the config that its layers of media have, and the name of their stack; None if all layers are one."""
    senses = "sees images"
    """The input of layers that do not read texts."""
    pairs = False
    """True for a model with an encoder and a decoder."""
    fills_masks = False
    """True for a masked model with a mask token, which predicts an answer in place of such tokens."""
    shifts = False
    """True if the decoder reads the text itself, moved by one token, as in classifiers of BART and T5."""
    short_text = TEXT
    """The tokens of the text of the short run, or the frames of its sound."""
    max_length: int | None = None
    """The most tokens of a text; None if there is no limit."""
    min_length = 1
    """The fewest tokens of a text over which the model runs."""
    last_states: int | None = None
    """The last hidden states of an input, of a model whose layers merge its tokens; None for one of each token."""
    vector_width: int | None = None
    """The numbers of the one vector that the model itself pools of a text, or of an image; None if it makes none."""

    # ── images and sounds ────────────────────────────────────────────────────────────────────────────────────────────

    packs = False
    """True if all images are one sequence in the layers that see them."""
    edge = 0
    """The ``shortest_edge`` of the image processor."""
    leaves_out = False
    """True if the model sees a part of its input, chosen at random."""
    whole: frozenset[int] = frozenset()
    """The layers that see all of an image, of a model whose others see windows of it."""
    objects = 0
    """The objects that it looks for in an image; 0 of one that looks for none."""
    rate = 0
    """Samples a second of its sounds; 0 of a model that hears none."""
    hears_s: float | None = None
    """Seconds of a sound that it hears at a time; None for any number."""
    transcribes = False
    """True if it can ask for the text of a sound."""
    names_language = False
    """True if a request for a transcript names the language to the model, and has no further words."""
    takes_no_images = "this model takes none; send text, tokens or messages"
    """The reason for a request with images."""

    # ── texts ────────────────────────────────────────────────────────────────────────────────────────────────────────

    template: Any = None
    """The chat template."""
    pads_left = False
    """True if texts of one batch are filled up at their beginnings; a trial at load chooses the side."""
    pads_up_to: int | None = None
    """The tokens up to which a text filled up with padding has the numbers that it has alone; None for any number."""
    unread: str | None = None
    """The reason for which a tokenizer of the checkpoint is not read, if it has one."""
    text_files_changed: Callable[[], bool] = staticmethod(lambda: False)
    """Return True if the checkpoint's files of a tokenizer are others than when the model was loaded."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        self.tokenizer = tokenizer
        self.decoder = TokenDecoder(tokenizer)
        """The text of its tokens."""
        self.names = frozenset(inspect.signature(model.forward).parameters)
        """The names of the model's arguments."""
        self.vocabulary = self._known_ids(model)
        """The number of token ids that the model reads, or of the classes that it tells apart."""
        self.predictable = self.vocabulary
        """The number of token ids that the model predicts, and that its decoder reads if it has an encoder too."""
        self._device = model.device

    @property
    @abstractmethod
    def takes(self) -> list[str]:
        """The inputs that requests may have."""

    @abstractmethod
    def read(self, request: ModelInput) -> Inputs:
        """Read the input of a request. Raises InvalidRequest that names the field at fault."""

    @abstractmethod
    def short_runs(self) -> list[dict[str, Tensor]]:
        """The arguments of runs over a few tokens, a small image or a short sound, one for each kind of input."""

    @abstractmethod
    def _known_ids(self, model: PreTrainedModel) -> int:
        """The number of token ids that the model reads, or of its classes. Raises InvalidCheckpoint."""

    def module(self, model: PreTrainedModel, arguments: Mapping[str, Tensor]) -> Callable[..., Any]:
        """The part of a model that reads these arguments: all of it."""
        return model

    def embedder(self, model: PreTrainedModel) -> Any:
        """The part of a model that embeds the tokens of a text: all of it, or its encoder."""
        return model.get_encoder() if self.pairs else model

    def absent(self, inputs: Inputs) -> str | None:
        """The tokens that an input does not have, as queries of a layer are named; None if it has all."""
        return None

    def labels(self, stack: Stack) -> list[TokenLabelsReply]:
        """The labels of every token of each text, those of padding included."""
        replies = []
        for row, (ids, spans) in enumerate(zip(stack.host_ids.tolist(), stack.spans, strict=True)):
            single = ids[: len(ids) - len(stack.compressed)]
            tokens = self.decoder.readable(single) if stack.names is None else stack.names[row]
            tokens = [*tokens, *(f"[{span.start}…{span.stop - 1}]" for span in stack.compressed)]
            more = {} if stack.patches is None else patch_labels(stack.patches[row])
            more |= {} if stack.seconds is None else {"seconds": stack.seconds[row]}
            if stack.parts is not None:
                more["parts"] = stack.parts[row]
            replies.append(TokenLabelsReply.model_construct(tokens=tokens, ids=ids, spans=spans, **more))
        return replies

    def front_bytes(self, arguments: Mapping[str, Tensor]) -> int:
        """The memory that a model takes before its first layer, besides states as wide as that."""
        return 0

    # ── images and sounds ────────────────────────────────────────────────────────────────────────────────────────────

    def sees(self, place: AttentionPlace) -> bool:
        """True for an attention over parts of images or sounds alone."""
        return self.enters in {"pixels", "frames"} or place.queries == "media"

    def find_parts(
        self, places: Sequence[AttentionPlace], run: Callable[..., Any], record: RunRecord
    ) -> dict[str, str]:
        """Find the part of an image or a sound that each token is in these attentions, in short runs.

        ``places``: those that it ``sees``; ``record``: that of the last short run. Return the layers whose tokens have
        no names, by the text of their keys, with the reason. Raises InvalidCheckpoint for a model with other tokens.
        """
        return {}

    def placed(self, place: AttentionPlace) -> AttentionPlace:
        """An attention with the tokens that it is over, which are known once the parts are found."""
        return place

    def sized(self, width: int, height: int) -> SizedImage:
        """Return the tokens of an image of this size. Raises InvalidRequest."""
        raise InvalidRequest.at("images", self.takes_no_images)

    def asks_two_vectors(self, request: ModelInput) -> bool:
        """True for a text and an image that pass no layer together, so that each has a vector of its own."""
        return False

    def to_transcribe(self, sound: Sound, language: str | None, instruction: str | None) -> Inputs:
        """Read a sound whose text is to be written, by a reader that ``transcribes``.

        ``language``: two letters, for one that ``names_language``. Raises InvalidRequest.
        """
        raise InvalidRequest.at("audio", HEARS_NONE)

    # ── texts ────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def no_tokenizer(self) -> str:
        """The reason for which texts are refused, if they are."""
        if self.text_files_changed():
            return "the checkpoint's tokenizer was written after the model was loaded (unload the model to read it)"
        if self.unread is not None:
            return f"the checkpoint has no tokenizer that can be read ({self.unread})"
        return "the checkpoint has no tokenizer"

    def knows(self, token: Any) -> bool:
        """True for the id of a token that the model has an embedding of, as a config may not state."""
        return isinstance(token, int) and 0 <= token < self.vocabulary

    def end_ids(self, model: PreTrainedModel) -> list[int]:
        """The ids that end a text, by the settings of the checkpoint or its tokenizer."""
        ids: Any = getattr(model.generation_config, "eos_token_id", None)
        if ids is None and self.tokenizer is not None:
            ids = self.tokenizer.eos_token_id
        return [token_id for token_id in (ids if isinstance(ids, list) else [ids]) if isinstance(token_id, int)]

    @property
    def mask_id(self) -> int | None:
        """The token that a masked model reads in place of a hidden one; None without one."""
        token = getattr(self.tokenizer, "mask_token_id", None)
        return token if self.knows(token) else None

    @property
    def special_ids(self) -> frozenset[int]:
        """The tokens that are no part of a text; the one of what the tokenizer does not know is."""
        return frozenset(getattr(self.tokenizer, "all_special_ids", ())) - {
            getattr(self.tokenizer, "unk_token_id", None)
        }

    def readable(self, ids: Sequence[int]) -> list[str]:
        """The tokens of these ids, cleaned for reading."""
        return self.decoder.readable(ids)

    def mixes_padding(self, length: int) -> bool:
        """True if a text has other numbers beside a longer one, of ``length`` tokens, than alone."""
        return self.pads_up_to is not None and length > self.pads_up_to

    def refused(self, param: str) -> InvalidRequest:
        """The error for an input that the model does not read."""
        return InvalidRequest.at(param, f"this model reads only {self.reads}")

    def check(self, ids: Sequence[int], param: str) -> None:
        """Raise InvalidRequest for tokens that the model does not read: here, for any."""
        raise self.refused(param)

    def token_id(self, token: int | str, param: str) -> int:
        """The id of a token, given as such or as a text that is one token. Raises InvalidRequest: here, for any."""
        raise self.refused(param)

    def tokens(
        self, text: str, param: str, *, pair: str | None = None, special: bool = True, limit: int | None = None
    ) -> Tokens:
        """The tokens of a text, or of two, cut to ``limit``; ``special``: with those that the tokenizer adds.

        Raises InvalidRequest: here, for any text.
        """
        raise self.refused(param)

    def texts(self, request: ModelInput) -> tuple[list[Tokens], str, bool]:
        """The texts of a request, the field that they came in, and True if they came as a list.

        Raises InvalidRequest: here, for any.
        """
        raise self.refused("text")

    def conversation(
        self, messages: Sequence[Message], form: ChatForm | None = None, *, parted: bool = False
    ) -> Conversation:
        """A conversation as the checkpoint's chat template writes it. ``parted``: find the messages in it.

        Raises InvalidRequest: here, for any.
        """
        raise self.refused("messages")

    def batch(self, texts: Sequence[Tokens]) -> Stack:
        """Pad texts to one batch: see ``pads_left``. Raises InvalidRequest: here, for any."""
        raise self.refused("model")

    def arguments(self, stack: Stack) -> dict[str, Tensor]:
        """The model's arguments for one batch of texts. Raises InvalidRequest: here, for any."""
        raise self.refused("model")

"""One whole model in a worker's process: transformers computes all but its attention, and this package's core that."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from attention_contract.errors import AttentionError, InvalidCheckpoint
from attention_service.core.tensors import torch_dtype_name
from attention_service.models.folders.input_kinds import PAIRS
from attention_service.models.folders.tokenizer_files import TEXT_FILES
from attention_service.models.inputs.images.detector_inputs import DetectorInputs, is_detector
from attention_service.models.inputs.images.encoder_inputs import EncoderInputs
from attention_service.models.inputs.images.pair_inputs import PairInputs
from attention_service.models.inputs.images.prompt_inputs import PromptInputs
from attention_service.models.inputs.input_reader import InputReader
from attention_service.models.inputs.model_inputs import TextInputs
from attention_service.models.inputs.model_limits import SOUND
from attention_service.models.inputs.prediction_head import PredictionHead
from attention_service.models.inputs.sounds.sound_inputs import SoundInputs
from attention_service.models.inputs.sounds.sound_prompts import SoundPrompts
from attention_service.models.loaded.adapters import Adapters
from attention_service.models.loaded.entering_states import EnteringStates
from attention_service.models.loaded.last_states import (
    LastStates,
    find_last_states,
    own_arguments,
)
from attention_service.models.loaded.matrix_products import products_of
from attention_service.models.loaded.mlp_outputs import find_layer_states
from attention_service.models.loaded.model_attentions import find_attentions, find_mixers, no_layers_seen
from attention_service.models.loaded.model_loading import load_checkpoint, places_of_parts
from attention_service.models.loaded.model_runner import ModelRunner
from attention_service.models.loaded.padding_trial import choose_padding, find_least_length
from attention_service.models.loaded.streams.expert_routers import RouterTrials
from attention_service.models.passes.attention_pass import AttentionPass
from attention_service.models.passes.attention_places import AttentionPlace
from attention_service.models.passes.device_heads import DeviceHeads, let_outputs_change, not_spread
from attention_service.models.passes.float64_runs import compute_in_float64
from attention_service.models.passes.module_hooks import State
from attention_service.models.passes.module_states import ModuleStates
from attention_service.models.passes.module_taps import CHOSEN
from attention_service.models.passes.points import LayerStates, Point, Points, state_edits
from attention_service.models.passes.run_records import RecordedRuns
from attention_service.models.passes.shared_layers import SharedLayers
from attention_service.runtime.device.torch_device import Device
from attention_transformers.model_layers import LayerKey

_UNREADABLE: Final = (AttentionError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""The errors of processors, and of models, for an image that they cannot read: the model reads text alone then."""
_TENSORS_IN_ERROR: Final = 3
"""Tensors that an error names of those that the model leaves out."""


class LoadedModel:
    """A model, its tokenizer, and its attention. One request runs at a time."""

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        device: Device,
        processor: Any = None,
        unread: str | None = None,
        left_out: Sequence[str] = (),
        share: DeviceHeads | None = None,
    ) -> None:
        """Make the model attend by this package. ``processor``: of images, or of sounds.

        ``unread``, ``left_out``: see ``CheckpointParts``. ``share``: see ``LayerAttention``.

        Raises InvalidCheckpoint for a model that cannot.
        """
        if model.main_input_name not in {"input_ids", "pixel_values", *SOUND}:
            raise InvalidCheckpoint.at(
                "checkpoint",
                f"{type(model).__name__} reads {model.main_input_name}, but only models that read "
                "tokens, images or sound are supported",
            )
        if model.dtype == torch.float64:
            compute_in_float64(model)
        if share is not None:
            let_outputs_change(model)
        self.name = name
        self.model = model
        self.device = device
        self.share = share
        self.left_out = list(left_out)
        self.adapters = Adapters(model, self._two_rows)
        self.weights = torch_dtype_name(model.dtype)
        """The numbers that it computes with, as ``ran`` names them."""
        self._read_again: tuple[Path, dict[str, tuple[int, int]]] | None = None
        """The folder whose files are read for each pass, with times and sizes as they were; None: all is in memory."""
        self.head = PredictionHead.of(model)
        self.normed_kinds: dict[type[nn.Module], bool] = {}
        """The classes of attentions that were tried for a norm of each head: see ``head_norms``."""
        try:
            self._prepare(lambda: reader_of(model, tokenizer, processor))
        except _UNREADABLE as fault:
            if model.main_input_name != "input_ids" or processor is None:
                raise
            self._prepare(lambda: TextInputs(model, tokenizer))
            reason = str(getattr(fault, "detail", fault)).partition("\n")[0].removeprefix("checkpoint: ")
            self.reader.takes_no_images = f"those of this model cannot be read here: {reason}"
        self.reader.unread = unread
        self.bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))

    def _prepare(self, read: Callable[[], InputReader]) -> None:
        """Find its attentions, and the patches that they see. Raises InvalidCheckpoint."""
        model = self.model
        self.states = ModuleStates(model)
        self.reader = read()
        self.reader.fills_masks = self.without_masks is None
        run = RecordedRuns(model, self._run_bare)
        self.attention, self.places = find_attentions(model, self.reader, self.device, run, self.share)
        """Its attentions by the text of their keys."""
        self.mixers, self.implicit = find_mixers(model, self.reader, run, self.places)
        """Its layers with implicit weights, likewise."""
        if self.share is not None and self.implicit:
            raise not_spread(model, "has layers that mix tokens by a running state")
        if not self.places and not self.implicit:
            raise no_layers_seen(model, self.reader)
        seen = [place for place in self.places.values() if self.reader.sees(place)]
        plain = partial(self.run, attention_pass=AttentionPass({}))
        self.in_parts = self.reader.find_parts(seen, plain, run.last) if seen else {}
        """The layers that see images in windows, or in patches that merge between layers, with the reason."""
        self.places = {key: self.reader.placed(place) for key, place in self.places.items() if key not in self.in_parts}
        self.short_products = products_of(run.last.calls)
        """The FLOPs of the matrices of each module in a short run, over a gray image if the model reads images."""
        self.shared_layers = SharedLayers(model, [*self.places.values()])
        self.entering = EnteringStates(model, self.reader, [*self.places.values()], self._run_bare)
        if model.main_input_name == "input_ids":
            headless = self.reader.shifts or self.head.unit == "choice"
            part = model.base_model if headless else None
            self.reader.min_length = find_least_length(self.reader, self.run, part)
            alike = choose_padding(self.reader, self.run, part)
            self.reader.pads_up_to = self._unchosen_tokens if alike else 0

    @property
    def _unchosen_tokens(self) -> int | None:
        """The tokens up to which padding changes no choice of keys; None for any number.

        Among more tokens than it chooses, an indexer may take others of equal scores. Padding moves the bounds of keys
        that stand for several tokens.
        """
        if any(place.compression for place in self.places.values()):
            return 0
        chooses = any(CHOSEN in place.beside.names for place in self.places.values())
        return int(getattr(self.model.config.get_text_config(), "index_topk", None) or 0) if chooses else None

    @property
    def without_masks(self) -> str | None:
        """The reason for which it predicts no masked tokens; None if it does."""
        if self.head.predicts != "own" or self.reader.enters != "tokens":
            return f"{type(self.model).__name__} predicts no masked tokens; ask a masked model, such as BERT"
        if self.reader.mask_id is not None:
            return None
        reason = self.reader.no_tokenizer if self.reader.tokenizer is None else "its tokenizer has none"
        return f"expected a model with a mask token; {reason}"

    @cached_property
    def stacks_texts(self) -> bool:
        """True if the rows of a batch are texts at every attention, so that those of several questions share passes."""
        whole = all(place.windows is None for place in self.places.values())
        return whole and self.attention.way == "computed"

    @cached_property
    def points(self) -> Points:
        """The points at which its states are read and replaced."""
        return Points(self.all_places, lambda: self.entering.sites, lambda: self.layer_states)

    @cached_property
    def layer_states(self) -> Mapping[LayerKey, LayerStates]:
        """The states, the MLP and the router of each layer, which short runs find when they are first asked for."""
        places, dtype = self.all_places, self.model.dtype
        routers = RouterTrials(places, dtype)
        with routers.watching():
            states = find_layer_states(places, self.reader.short_runs(), self._run_bare, dtype)
        return routers.beside(states)

    @cached_property
    def runner(self) -> ModelRunner:
        """Its runs, as questions ask for them."""
        return ModelRunner(
            self.run, self.reader, self.head, self.points, self.entering, self.shared_layers, lambda: self.last_states
        )

    @cached_property
    def reported(self) -> Mapping[str, AttentionPlace]:
        """The attentions whose weights come with generated tokens, by layer."""
        return {
            key: place
            for key, place in self.places.items()
            if self.runner.refuses((place.key, "weights"), "report") is None
        }

    @cached_property
    def last_states(self) -> LastStates:
        """The way to the last states of its texts, which short runs find when it is first asked for."""
        return find_last_states(self.model, self.reader, self.all_places, self.run)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        dtype: str | None,
        device: torch.device,
        progress: Callable[[float], None],
        free_bytes: int | None = None,
        share: DeviceHeads | None = None,
    ) -> Self:
        """Load a checkpoint of transformers from a folder. Raises InvalidCheckpoint.

        ``dtype``: by default the checkpoint's on a GPU, and float32 on a CPU. ``progress`` is told the share that is
        loaded. ``share``: the part that this process has of a model that is spread over devices.
        """
        stamps, texts = _stamps(folder.glob("*.safetensors")), _text_stamps(folder)
        devices = 1 if share is None else share.devices
        parts = load_checkpoint(folder, dtype, device, progress, free_bytes, devices)
        model, tokenizer, processor, unread, left_out, weights = parts
        loaded = cls(folder.name, model, tokenizer, Device.open(str(device)), processor, unread, left_out, share)
        loaded.weights = weights
        loaded.reader.text_files_changed = lambda: _text_stamps(folder) != texts
        if "disk" in places_of_parts(model):
            loaded._read_again = folder, stamps
        return loaded

    def check_files(self) -> None:
        """Raise InvalidCheckpoint if layers are read from files for each pass that have changed since the load."""
        if self._read_again is not None and _stamps(self._read_again[0].glob("*.safetensors")) != self._read_again[1]:
            raise InvalidCheckpoint.at(
                "model",
                f"{self.name} reads layers from its checkpoint for each pass, and its files have changed since it was "
                "loaded; unload it, and ask again",
            )

    @property
    def without_head(self) -> str:
        """The beginning of an error for a model that predicts nothing."""
        reason = f"{type(self.model).__name__} has no prediction head"
        if not self.left_out:
            return reason
        names = ", ".join(self.left_out[:_TENSORS_IN_ERROR]) + (", …" if len(self.left_out) > _TENSORS_IN_ERROR else "")
        return f"{reason} ({names} are left out of the checkpoint: left_out of the model)"

    @property
    def without_attention(self) -> str:
        """The beginning of an error for a model none of whose layers attends."""
        kinds = " and ".join(sorted({place.mixes for place in self.implicit.values()}))
        return f"{type(self.model).__name__} has no attention; its layers ({kinds}) have implicit weights"

    def close(self) -> None:
        """Forget the attention function; the model cannot run any more."""
        self.attention.remove()

    @cached_property
    def all_places(self) -> list[AttentionPlace]:
        """Its attentions and its layers with implicit weights, in the order in which they run."""
        ordered, waiting = list[AttentionPlace](), [*self.implicit.values()]
        for place in self.places.values():
            while waiting and place.queries == "text" and waiting[0].number <= place.number:
                ordered.append(waiting.pop(0))
            ordered.append(place)
        last = next((index for index, place in enumerate(ordered) if place.queries == "media"), len(ordered))
        return [*ordered[:last], *waiting, *ordered[last:]]

    def run(
        self, arguments: Mapping[str, Tensor], attention_pass: AttentionPass, *, logits: Tensor | None = None,
        model: nn.Module | None = None, changes: Iterable[tuple[Point, State]] = (),
    ) -> Any:  # fmt: skip
        """Run the model once; ``logits``: the places of the rows of logits that are needed, if not all are.

        ``model``: a part of it to run in its place; ``changes``: of states, behind the edits of the pass.
        """
        mixes = self.implicit and self.mixers.concerns(attention_pass)
        mixing = self.mixers.running(attention_pass) if mixes else nullcontext()
        changes = [*state_edits(attention_pass), *changes]
        changing = self.points.changing(changes) if changes else nullcontext()
        with self.attention.running(attention_pass), mixing, changing:
            options = self.options(arguments, logits, whole=model is None)
            if model is not None:
                return model(**own_arguments(model, options))
            return self.reader.module(self.model, arguments)(**options)

    def options(
        self, arguments: Mapping[str, Tensor], logits: Tensor | None = None, *, whole: bool = True
    ) -> dict[str, Any]:
        """The arguments of the model for a run that keeps no past; ``whole``: not of a part of it."""
        dtype = self.model.dtype
        options: dict[str, Any] = {name: x.to(dtype) if x.is_floating_point() else x for name, x in arguments.items()}
        if self.head.unit == "choice" and whole:  # of one question
            options = {name: x[None] for name, x in options.items()}
        options["return_dict"] = True
        if "use_cache" in self.reader.names:
            options["use_cache"] = False
        if logits is not None and "logits_to_keep" in self.reader.names:
            options["logits_to_keep"] = logits.to(self.model.device)
        return options

    @cached_property
    def entered_place(self) -> AttentionPlace:
        """The first layer that the states of ``embeddings`` reach; its queries are their tokens."""
        places = (place for place in self.all_places if self.reader.enters == "pixels" or place.queries == "text")
        return next(places, self.all_places[0])

    def place_of(self, key: LayerKey) -> AttentionPlace:
        """The layer of a key. Raises KeyError."""
        return self.places.get(str(key)) or self.implicit[str(key)]

    def begins_at(self, layer: int) -> bool:
        """True if copies of a text may share the layers before this one: see ``SharedLayers.unable``."""
        return self.first_unable([layer]) is None

    def first_unable(self, layers: Iterable[int]) -> int | None:
        """The first of these layers at which no pass can begin; None if there is none: see ``SharedLayers.unable``."""
        return self.shared_layers.unable(layers, self._short_predictions)

    def _short_predictions(self, copies: int) -> Tensor:
        """The predictions ``[copies, V]`` of the last token of a short text."""
        arguments = {name: torch.cat([x] * copies) for name, x in self.reader.short_runs()[0].items()}
        output = self.run(arguments, AttentionPass({}))
        logits: Tensor = output[0]
        return logits[:, -1] if logits.ndim > 2 else logits

    def _two_rows(self) -> None:
        """Run the model over a few tokens twice, as two rows of one pass."""
        arguments = {name: torch.cat([x, x]) for name, x in self.reader.short_runs()[0].items()}
        self.run(arguments, AttentionPass({}))

    def _run_bare(self, arguments: Mapping[str, Tensor], **more: Any) -> Any:
        """Run the model over a few tokens; without the head of a classifier, which needs an end."""
        part = self.model.base_model if self.reader.shifts else None
        called = part or self.reader.module(self.model, arguments)
        return called(**self.options(arguments, whole=part is None), **more)


def _stamps(files: Iterable[Path]) -> dict[str, tuple[int, int]]:
    """The time of the last change and the size of each file."""
    return {file.name: (seen.st_mtime_ns, seen.st_size) for file in files if (seen := file.stat())}


def _text_stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """The same of the files of a tokenizer."""
    return _stamps(file for name in TEXT_FILES if (file := folder / name).is_file())


def reader_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, processor: Any) -> InputReader:
    """Return the reader of a model's inputs. ``processor``: of images, sounds, or prompts. Raises InvalidCheckpoint."""
    if getattr(model.config, "canvas_length", None) is not None:
        raise InvalidCheckpoint.at(
            "checkpoint",
            f"{type(model).__name__} writes by diffusion over a canvas of random tokens, and no request carries one",
        )
    if model.main_input_name == "pixel_values":
        return (DetectorInputs if is_detector(model) else EncoderInputs)(model, processor)
    if model.config.model_type in PAIRS:
        return PairInputs(model, tokenizer, processor)
    if model.main_input_name in SOUND:
        return SoundInputs(model, tokenizer, processor)
    if isinstance(processor, ProcessorMixin):
        return (
            PromptInputs(model, processor) if hasattr(model.config, "vision_config") else SoundPrompts(model, processor)
        )
    return TextInputs(model, tokenizer)

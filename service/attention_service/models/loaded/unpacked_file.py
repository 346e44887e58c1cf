"""A safetensors file with quantized weights, as transformers would read it if they were not."""

from typing import Any

from torch import Tensor

from attention_service.core.cancellation import checkpoint
from attention_service.modules.checkpoints.checkpoint_files import Checkpoint
from attention_service.modules.checkpoints.forms.quantized_form import QuantizedForm
from attention_service.modules.store_files import open_tensors


class UnpackedFile:
    """One file of a checkpoint. Each weight is unpacked when it is read, so that one at a time is there twice."""

    def __init__(self, opened: Any, form: QuantizedForm, checkpoint: Checkpoint) -> None:
        """``opened``: the file, by ``safe_open``; ``checkpoint``: all files, since parts may lie in others."""
        self._opened, self._form, self._names = opened, form, checkpoint.names
        self._weights = form.weights(checkpoint.headers)
        self._hidden = form.hidden(self._weights)

    def keys(self) -> list[str]:
        """The names of its tensors, with one in the place of all that a weight is made of."""
        main = {prefix + self._form.main: name for name, prefix in self._weights.items()}
        own = list(self._opened.keys())
        return [name for name in own if name not in self._hidden] + [main[name] for name in own if name in main]

    def get_slice(self, name: str) -> Any:
        """A tensor that is read when it is indexed."""
        return _Weight(self, self._weights[name]) if name in self._weights else self._opened.get_slice(name)

    def unpacked(self, prefix: str) -> Tensor:
        """The float32 weight of a module. Raises InvalidCheckpoint."""
        checkpoint()
        return self._form.unpack(prefix, self._read)

    def _read(self, name: str) -> Tensor:
        with open_tensors(self._names[name]) as file:
            found: Tensor = file.get_tensor(name)
            return found.clone()

    def __exit__(self, *fault: object) -> None:
        self._opened.__exit__(*fault)


class _Weight:
    def __init__(self, file: UnpackedFile, prefix: str) -> None:
        self._file, self._prefix = file, prefix

    def __getitem__(self, place: Any) -> Tensor:
        return self._file.unpacked(self._prefix)[place]

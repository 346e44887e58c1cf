"""One file of a checkpoint as transformers would read it if it had written it: each tensor is made when it is read."""

from pathlib import Path
from typing import Any

from torch import Tensor

from attention_service.core.cancellation import checkpoint
from attention_service.modules.checkpoints.checkpoint_files import Checkpoint
from attention_service.modules.checkpoints.forms.form import Part, Read


class FormFile:
    """One file of a checkpoint. One tensor at a time is there both as it is stored and as it is made."""

    def __init__(self, opened: Any, file: Path, whole: Checkpoint) -> None:
        """``opened``: the file, by ``safe_open``; ``whole``: all files, since what makes a tensor may lie in others."""
        self._opened, self._read = opened, whole.stored.read
        place, places = file.resolve(), whole.stored.names
        self._parts = {name: part for name, part in whole.tensors.items() if places[part.names[0]] == place}
        self._left_out = [name for name in whole.form.left_out if places.get(name) == place]

    def keys(self) -> list[str]:
        """The names of its tensors in transformers, and of those of which none is made."""
        return [*self._parts, *self._left_out]

    def get_slice(self, name: str) -> Any:
        """A tensor that is read when it is indexed."""
        part = self._parts.get(name)
        if part is None or part.make is None:
            return self._opened.get_slice(name if part is None else part.names[0])
        return _Made(part, self._read)

    def __exit__(self, *fault: object) -> None:
        self._opened.__exit__(*fault)


class _Made:
    def __init__(self, part: Part, read: Read) -> None:
        self._part, self._read = part, read

    def __getitem__(self, place: Any) -> Tensor:
        checkpoint()
        return self._part.read(self._read)[place]

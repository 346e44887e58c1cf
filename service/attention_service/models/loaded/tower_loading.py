"""The file of a tower as transformers would read it if it had written it, and the readers of its inputs."""

from pathlib import Path
from typing import Any, Final

from tokenizers import Regex, normalizers
from torch import Tensor
from transformers import AutoConfig

from attention_service.core.cancellation import checkpoint
from attention_service.models.towers.tower import Part, Tower

_PUNCTUATION: Final = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
"""Source: ``canonicalize_text`` of OpenCLIP's tokenizers."""


class TowerFile:
    """One file of a tower. Each tensor is made when it is read."""

    def __init__(self, opened: Any, tower: Tower) -> None:
        """``opened``: the file, by ``safe_open``."""
        self._opened, self._tower = opened, tower

    def keys(self) -> list[str]:
        """The names of its tensors in transformers, and of those of which none is made."""
        return [*self._tower.parts, *self._tower.left_out]

    def get_slice(self, name: str) -> Any:
        """A tensor that is read when it is indexed."""
        part = self._tower.parts.get(name)
        return self._opened.get_slice(name) if part is None else _Made(self._opened, part)

    def __exit__(self, *fault: object) -> None:
        self._opened.__exit__(*fault)


class _Made:
    def __init__(self, opened: Any, part: Part) -> None:
        self._opened, self._part = opened, part

    def __getitem__(self, place: Any) -> Tensor:
        checkpoint()
        made = self._part.make(*(self._opened.get_tensor(name) for name in self._part.names))
        return made[place]


def tower_config(tower: Tower, folder: Path) -> tuple[Any, dict[str, Any]]:
    """The config of a tower, and the arguments by which transformers finds its tensors."""
    entries = dict(tower.config)
    config: Any = AutoConfig.for_model(entries.pop("model_type"), **entries)
    alone = {"add_pooling_layer": False} if entries["architectures"][0] in {"ViTModel", "DeiTModel"} else {}
    return config, {"pretrained_model_name_or_path": folder, **alone}


def clean_texts(tokenizer: Any) -> None:
    """Have a fast tokenizer remove punctuation and capitals first. Source: Zhai et al. 2023, as OpenCLIP does."""
    backend = tokenizer.backend_tokenizer
    steps = [
        normalizers.Replace("_", " "), normalizers.Replace(Regex(_PUNCTUATION), ""), normalizers.Lowercase(),
        normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip(),
    ]  # fmt: skip
    own = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence([*steps, *own])

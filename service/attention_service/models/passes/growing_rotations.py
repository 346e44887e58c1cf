"""Rotary embeddings whose angles depend on the longest text of a pass: dynamic and long scaling."""

from typing import Any, Final

from torch import nn

_GROWS: Final = "dynamic"
"""Angles by the length of the longest text so far (``dynamic_rope_update`` of transformers)."""
_SWITCHES: Final = "longrope"
"""Other angles once a text is longer than those of the first training (Ding et al. 2024)."""


class GrowingRotations:
    """The rotary embeddings of a model that depend on the length of a text."""

    def __init__(self, model: nn.Module) -> None:
        self._growing: list[tuple[Any, str]] = []
        """Modules that keep the angles of the longest text that they have seen, and the prefix of their buffers."""
        limits = []
        for module in model.modules():
            rotation: Any = module
            kinds = getattr(module, "rope_type", None)
            for layer, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
                if not isinstance(kind, str) or not (_GROWS in kind or kind == _SWITCHES):
                    continue
                if _GROWS in kind:
                    self._growing.append((rotation, "" if layer is None else f"{layer}_"))
                scaling = rotation.config.rope_parameters
                own = (scaling if layer is None else scaling[layer]).get("original_max_position_embeddings")
                limits.append(int(own or rotation.config.max_position_embeddings))
        self.limit = min(limits, default=None)
        """The most tokens of a text whose angles do not depend on its length; None for any."""

    def restart(self) -> None:
        """Forget the texts of the passes before, so that the angles of a pass are by its own longest text."""
        for module, prefix in self._growing:
            original = getattr(module, f"{prefix}original_inv_freq")
            setattr(module, f"{prefix}inv_freq", original.to(getattr(module, f"{prefix}inv_freq").device))
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)

"""The frames of a sound that some heads look at while its text is written, token by token."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention_service.core.edits import BoundEdit
from attention_service.core.inspection.time_warping import warped_frames
from attention_service.core.inspection.weights import weights_of
from attention_service.core.problem import Problem, Selection
from attention_service.models.inputs.input_stacks import Seconds
from attention_service.models.passes.device_heads import DeviceHeads
from attention_transformers.model_layers import LayerKey


class HeardFrames:
    """The weights of the alignment heads of one text."""

    def __init__(
        self, heads: Mapping[LayerKey, Sequence[int]], seconds: Sequence[Seconds], median_width: int,
        silence: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        """``heads``: of each layer; ``seconds``: of each key; ``median_width``: frames to smooth over.

        ``silence``: the position of the first pass that predicts the token that nothing is said, and that token.
        """
        self._heads = {layer: tuple(own) for layer, own in heads.items()}
        self._frames = [at for at, second in enumerate(seconds) if second is not None]
        """The keys that are frames of the sound: all of a cross-attention, and in a prompt those between its words."""
        self._seconds = [second for second in seconds if second is not None]
        self._width = median_width
        self._pass: dict[LayerKey, Tensor] = {}
        self._rows: list[Tensor] = []
        """The weights ``[N, F]`` of the last query of each pass; the token that pass p chose is token p."""
        self._silence = silence
        self.no_speech: float | None = None
        """The probability that nothing is said, if the model predicts one."""

    @property
    def length(self) -> float:
        """Seconds of the sound."""
        return self._seconds[-1][1]

    def wants(self, layer: LayerKey) -> bool:
        """True if a layer has alignment heads."""
        return layer in self._heads

    def see(self, layer: LayerKey, last: Problem, edits: Sequence[BoundEdit], share: DeviceHeads | None = None) -> None:
        """Take the problem of the last query of a layer in a pass. ``share``: given if it has a part of the heads."""
        if share is not None:
            self.take(layer, share.whole(weights_of(last, Selection(), edits))[0, :, 0])
            return
        weights = weights_of(last, Selection(heads=self._heads[layer]), edits)
        self._pass[layer] = weights[0, :, 0, self._frames].float().cpu()

    def take(self, layer: LayerKey, weights: Tensor) -> None:
        """Take the weights ``[H, K]`` of the last query of a layer in a pass."""
        self._pass[layer] = weights[list(self._heads[layer])][:, self._frames].float().cpu()

    def end_pass(self, logits: Tensor | None = None) -> None:
        """Keep what was seen in a pass. ``logits``: ``[1, T, V]`` of the first one."""
        if self._silence is not None and logits is not None and not self._rows:
            position, token = self._silence
            self.no_speech = float(logits[0, position].double().softmax(-1)[token])
        self._rows.append(torch.cat([self._pass[layer] for layer in self._heads]))
        self._pass.clear()

    @property
    def looked_at(self) -> Seconds:
        """The seconds of the frame that the heads looked at most, in the mean, when they chose the last token."""
        return self._seconds[int(self._rows[-1].mean(0).argmax())]

    def looks_at_end(self, frames: int) -> bool:
        """True if the last token looks most, in the mean of the heads, at one of so many last frames of the sound."""
        return int(self._rows[-1].mean(0).argmax()) >= len(self._seconds) - frames

    def times(self) -> NDArray[np.float64]:
        """The seconds ``[tokens + 1]`` at which each token begins, by dynamic time warping, and the end of the sound.

        A token is aligned by the weights of the query that chose it, which is that of the token before, and ends where
        the next one begins.
        """
        if not self._rows:
            return np.array([self.length])
        frames = warped_frames(torch.stack(self._rows, 1), self._width)
        return np.array([*(self._seconds[frame][0] for frame in frames), self.length])

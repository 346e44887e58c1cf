"""Predictions and what became of them: their accuracy, and factors that are learned from runs."""

import time
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path

from attention_contract.schemas.costs.accuracy import AccuracyReply
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.planning.learned_factors import LearnedFactors
from attention_service.runtime.planning.prediction_accuracy import Accuracy
from attention_service.runtime.request_timing import Later
from attention_service.runtime.scheduling.passes import PassRun


class PredictionWatch:
    """Compares predictions of one device with its runs, and corrects its clock. Used from the event loop only."""

    def __init__(self, device: Device, root: Path, files: Executor, *, learns: bool) -> None:
        """``files``: threads for work on the store; ``learns``: correct predicted times by those of what ran."""
        self.accuracy = Accuracy()
        self.factors = LearnedFactors(device.clock) if learns else None
        self._device = device
        self._root = root
        self._files = files
        self._judged = device.clock
        """The clock whose predictions ``accuracy`` is about."""
        self._seen = Later(self._keep)
        self.see = self._seen.note
        """Notes a run."""

    def load(self) -> None:
        """Predict by what was learned before."""
        if self.factors is not None and (clock := self.factors.load(self._root, self._device)) is not None:
            self._device.clock = clock

    def settle(self) -> None:
        """See to what was noted of runs and waits to be counted."""
        self._seen.settle()

    def report(self) -> AccuracyReply:
        """The errors of past predictions."""
        self.settle()
        self._judge()
        return AccuracyReply(
            device=self._device.name,
            basis=self._device.clock.basis,
            calibrated_at=None if self.factors is None else self.factors.changed_at,
            recalibrations=0 if self.factors is None else self.factors.changes,
            predictions=self.accuracy.report(),
        )

    def _keep(self, seen: list[PassRun]) -> None:
        """Remember how predictions fared, and predict by what ran from now on if that differs."""
        self._judge()
        runs = [(done, done.run) for done in seen if done.clock is self._judged]  # another may have been set since
        self.accuracy.record([run for _, run in runs])
        if self.factors is None:
            return
        for done, run in runs:
            if done.alone and done.prepared.watched:
                self.factors.see(run, done.prepared.dtype, done.ended)
        if (clock := self.factors.changed(time.monotonic())) is not None:
            self._device.clock = clock
            with suppress(RuntimeError):  # the engine has stopped
                self._files.submit(self.factors.save, self._root, self._device)

    def _judge(self) -> None:
        """Begin anew if the device has another clock now."""
        if self._device.clock is not self._judged:
            self._judged = self._device.clock
            self.accuracy.restart()

"""The windows into which a sound is cut that is longer than a model hears at a time."""

from typing import Final, NamedTuple

from attention_service.models.inputs.sounds.sound_decoding import Sound

OVERLAP: Final = 1 / 6
"""The part of a window that it has in common with the next, by default. Source: the pipeline of transformers."""


class SoundWindow(NamedTuple):
    """A part of a sound."""

    begin: float
    """Seconds."""
    sound: Sound

    @property
    def end(self) -> float:
        """Seconds."""
        return round(self.begin + self.sound.seconds, 6)


def cut(sound: Sound, rate: int, most_s: float | None, overlap_s: float) -> list[SoundWindow]:
    """Cut a sound into windows of ``most_s`` seconds, or leave it whole if it is no longer.

    Each window begins ``overlap_s`` seconds before the end of the one before. The last begins earlier, so that it is
    whole and ends with the sound. ``rate``: samples a second; ``most_s``: None for any length.
    """
    samples = len(sound.samples)
    most = samples if most_s is None else round(most_s * rate)
    if samples <= most:
        return [SoundWindow(0.0, sound)]
    step = max(1, most - round(overlap_s * rate))
    begins = [*range(0, samples - most, step), samples - most]
    return [SoundWindow(at / rate, Sound(sound.samples[at : at + most], most / rate)) for at in begins]

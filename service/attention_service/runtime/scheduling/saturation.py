"""Whether those that wait are a crowd: where another comes for each that is answered, as clients do that wait."""

_SEVERAL = 4
"""Fewer that wait are none."""
_SLOWLY, _MOST = 0.25, 0.7
"""How much the last pass counts; and how many must have come, of late, for each that was answered."""


class Crowd:
    """Counts who comes and who is answered. Used from the event loop only."""

    def __init__(self) -> None:
        self.came = 0
        """Requests since the last pass began."""
        self._answered = 0
        """By that pass."""
        self._share = 0.0
        """How many came for each that was answered, of late, while several waited."""

    def waits(self, count: int) -> bool:
        """Whether so many that wait are a crowd; to be asked when a pass is to begin, and ``answers`` to be told then.

        A burst is none: nobody comes while it is worked off.
        """
        share = min(self.came / self._answered, 1.0) if count >= _SEVERAL and self._answered else 0.0
        self._share += _SLOWLY * (share - self._share)
        return count >= _SEVERAL and self._share >= _MOST

    def answers(self, count: int) -> None:
        """So many run now."""
        self.came, self._answered = 0, count

"""One attention as the cost model reads it."""

from abc import abstractmethod
from dataclasses import dataclass

from attention_service.core.kernels.extent import Extent
from attention_service.core.masks.global_projections import separate_positions
from attention_service.core.multihead import Sizes


@dataclass(eq=False, kw_only=True)
class SizedAttention(Extent):
    """One attention with the widths of its module, which determine projections. A request that is bound is one."""

    @property
    @abstractmethod
    def sizes(self) -> Sizes | None:
        """The module's widths; None for raw attention, which has no projections."""

    @property
    def apart(self) -> int:
        """Number of queries per sequence with projections of their own, at most."""
        if self.sizes is None:
            return 0
        return min(len(separate_positions(self.spec.masks)), self.queries)

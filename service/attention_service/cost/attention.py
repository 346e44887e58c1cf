"""One attention as the cost model reads it."""

from abc import abstractmethod

from attention_service.core.kernels.extent import Extent
from attention_service.core.masks.global_projections import separate_positions
from attention_service.core.multihead import Sizes
from attention_service.core.problem import Widths


class Attention(Extent):
    """The sizes and facts of a request that determine its FLOPs and bytes. A request that is bound is one."""

    own_key_dim: int | None
    """Width of the keys where it differs from ``head_dim``, as raw attention by an additive or bilinear score may."""

    @property
    @abstractmethod
    def sizes(self) -> Sizes | None:
        """The module's widths; None for raw attention, which has no projections."""

    @property
    @abstractmethod
    def inputs(self) -> frozenset[str]:
        """Names of distinct input tensors: self-attention has the query alone."""

    @property
    @abstractmethod
    def bool_mask(self) -> bool:
        """True if the request's mask is boolean; otherwise it is added."""

    @property
    @abstractmethod
    def batched_places(self) -> bool:
        """True if rows of the batch have different places in a position encoding."""

    @property
    def widths(self) -> Widths:
        """Widths that determine the shapes of the spec's learned tensors."""
        return Widths(self.heads, self.kv_heads, self.head_dim, self.value_dim, self.d_model, self.own_key_dim)

    @property
    def key_dim(self) -> int:
        """Width of a head's keys."""
        return self.own_key_dim or self.head_dim

    @property
    def pairs(self) -> int:
        """Query-key pairs of one head over the batch: B · Q · K."""
        return self.batch * self.queries * self.keys

    @property
    def apart(self) -> int:
        """Number of queries per sequence with projections of their own, at most."""
        if self.sizes is None:
            return 0
        return min(len(separate_positions(self.spec.masks)), self.queries)

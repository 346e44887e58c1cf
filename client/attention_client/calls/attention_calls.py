"""Raw attention: calls that bring q, k, v and the spec."""

from collections.abc import Sequence
from typing import Unpack

from attention_client.arguments import (
    AlternativeLike,
    AttributionFields,
    EffectsFields,
    ForwardFields,
    GradientsFields,
    ProjectionsLike,
    ShapeLike,
    SpecLike,
    SweepLike,
    SweptEditLike,
    WeightsFields,
)
from attention_client.array_likes import TensorLike
from attention_client.calls.base import Call, CallOptions, call, sized
from attention_client.calls.method import Group, WayT, method
from attention_contract import operations
from attention_contract.schemas.analyses.attribution import AttributionMethod, AttributionReply
from attention_contract.schemas.analyses.effects import EffectsReply
from attention_contract.schemas.analyses.hopfield import HopfieldReply
from attention_contract.schemas.analyses.rollout import CombinedHeads, RolloutReply, SentMethod
from attention_contract.schemas.analyses.similarity import Measure, SimilarityReply
from attention_contract.schemas.attention import ForwardReply, KernelName, Tap
from attention_contract.schemas.costs.complexity import ComplexityReply
from attention_contract.schemas.gradients import GradientsReply
from attention_contract.schemas.weights import WeightsReply


class Attention(Group[WayT]):
    """Calls about attention without a module."""

    @method
    def forward(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        past_key: TensorLike | None = None, past_value: TensorLike | None = None, offsets: TensorLike | None = None,
        spec: SpecLike | None = None, num_heads: int | None = None, num_kv_heads: int | None = None,
        return_: Sequence[Tap] = ("output",), average_heads: bool = False, return_state: bool = False,
        report_error: bool = False, **options: Unpack[ForwardFields],
    ) -> Call[ForwardReply]:  # fmt: skip
        """Compute attention over raw q, k and v, as the ``spec`` says: scaled dot product by default.

        ``query [B, H, Lq, D]``, ``key [B, Hkv, Lk − P, D]``, ``value [B, Hkv, Lk − P, Dv]``; or ``[B, L, H·D]`` with
        ``num_heads`` (and ``num_kv_heads``, by default the same). The key is by default the query, the value the key.
        ``parameters``: learned tensors of the spec by name, as ``score.weight``.
        The other arguments are those of ``Client.forward``.
        """
        return call(operations.raw_forward, locals())

    @method
    def weights(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        past_key: TensorLike | None = None, past_value: TensorLike | None = None, offsets: TensorLike | None = None,
        spec: SpecLike | None = None, num_heads: int | None = None, num_kv_heads: int | None = None,
        top_k: int = 0, return_weights: bool = True, average_heads: bool = False, **options: Unpack[WeightsFields],
    ) -> Call[WeightsReply]:  # fmt: skip
        """Return the weights of a raw attention. Inputs as in ``forward``, the rest as in ``Client.weights``."""
        return call(operations.raw_weights, locals())

    @method
    def attribution(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        past_key: TensorLike | None = None, past_value: TensorLike | None = None, offsets: TensorLike | None = None,
        spec: SpecLike | None = None, num_heads: int | None = None, num_kv_heads: int | None = None,
        methods: Sequence[AttributionMethod] = ("gradient_attention",), steps: int = 32,
        **options: Unpack[AttributionFields],
    ) -> Call[AttributionReply]:  # fmt: skip
        """Attribute to weights of raw attention. Inputs as in ``forward``, the rest as in ``Client.attribution``."""
        return call(operations.raw_attribution, locals())

    @method
    def gradients(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        past_key: TensorLike | None = None, past_value: TensorLike | None = None, offsets: TensorLike | None = None,
        spec: SpecLike | None = None, num_heads: int | None = None, num_kv_heads: int | None = None,
        wrt: Sequence[str] = ("query",), check: bool = False, return_: Sequence[Tap] = ("output",),
        average_heads: bool = False, return_state: bool = False, report_error: bool = False,
        **options: Unpack[GradientsFields],
    ) -> Call[GradientsReply]:  # fmt: skip
        """Return exact gradients of a raw attention. Inputs as in ``forward``, the rest as in ``Client.gradients``."""
        return call(operations.raw_gradients, locals())

    @method
    def effects(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        past_key: TensorLike | None = None, past_value: TensorLike | None = None, offsets: TensorLike | None = None,
        spec: SpecLike | None = None, num_heads: int | None = None, num_kv_heads: int | None = None,
        sweep: SweptEditLike, return_differences: bool = False, **options: Unpack[EffectsFields],
    ) -> Call[EffectsReply]:  # fmt: skip
        """Return the effects of a sweep of edits. Inputs as in ``forward``, the rest as in ``Client.effects``."""
        return call(operations.raw_effects, locals())

    @method
    def rollout(
        self, weights: TensorLike, *, method: SentMethod = "rollout", combine: CombinedHeads = "mean",
        residual: float = 0.5, discard: float = 0.0, queries: Sequence[int] | None = None,
        labels: Sequence[str] | None = None, **options: Unpack[CallOptions],
    ) -> Call[RolloutReply]:  # fmt: skip
        """Return where the state of each token comes from, from ``weights [layers, heads, tokens, tokens]``.

        ``method="relevance"`` accumulates the ``relevance`` or ``gradient_attention`` of attributions to each layer.
        ``labels`` of the tokens stand in a picture. The other arguments are those of ``Recordings.rollout``.
        """
        return call(operations.rollout, locals())

    @method
    def complexity(
        self, shape: ShapeLike, sweep: SweepLike | None = None, *, num_heads: int, head_dim: int,
        num_kv_heads: int | None = None, value_dim: int | None = None, key_dim: int | None = None,
        dtype: str = "float32", spec: SpecLike | None = None, return_: Sequence[Tap] = ("output",),
        kernel: KernelName | None = None,
        memory_bytes: int | None = None, hardware: str | None = None, compare: Sequence[AlternativeLike] = (),
        measure: bool = False, version: str | None = None, **options: Unpack[CallOptions],
    ) -> Call[ComplexityReply]:  # fmt: skip
        """Return the cost of attention without projections. The other arguments are those of ``Client.complexity``."""
        return sized(operations.raw_complexity, locals())

    @method
    def similarity(
        self, a: TensorLike, b: TensorLike | None = None, *, measure: Measure = "jensen_shannon",
        **options: Unpack[CallOptions],
    ) -> Call[SimilarityReply]:  # fmt: skip
        """Return the similarity ``[A, B]`` of every pair of heads, by their weights or features.

        ``a [A, Lq, Lk]`` weights for the divergence of Jensen and Shannon in nats, or ``[A, N, D]`` features for linear
        CKA (``measure="cka"``). ``b``, with the same queries and keys or tokens, is by default ``a``.
        """
        return call(operations.similarity, locals())


class Hopfield(Group[WayT]):
    """Calls of Hopfield networks."""

    @method
    def retrieve(
        self, stored: TensorLike, states: TensorLike, *, beta: TensorLike | None = None, steps: int | None = None,
        eps: float | None = None, max_steps: int | None = None, stored_mask: TensorLike | None = None,
        projections: ProjectionsLike | None = None, num_heads: int | None = None, return_association: bool = False,
        **options: Unpack[CallOptions],
    ) -> Call[HopfieldReply]:  # fmt: skip
        """Let states fall to stored patterns: ``steps`` updates, or until an update is smaller than ``eps``.

        ``stored [B, H, N, D]``, ``states [B, H, S, D]``; or ``[B, L, H·D]`` with ``num_heads``. ``beta``, one number
        or ``[H]``, is the inverse temperature; by default 1/√D. ``max_steps`` goes with ``eps``; by default 100.
        ``stored_mask [B, N]``, True for a real pattern. ``projections``: state, stored and output matrices.
        """
        return call(operations.hopfield_retrieve, locals())

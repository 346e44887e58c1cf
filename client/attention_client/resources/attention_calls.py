"""Raw attention: calls that bring q, k, v and the spec."""

from collections.abc import Sequence
from typing import Literal, Unpack

from attention_client.arguments import (
    AlternativeLike,
    DropoutLike,
    EditLike,
    ReadoutLike,
    SelectLike,
    ShapeLike,
    SpecLike,
    StatisticOptionsLike,
    SweepLike,
    SweptEditLike,
    TensorMap,
)
from attention_client.array_likes import TensorLike
from attention_client.calls import CallOptions, call, sized
from attention_client.resources.base import AsyncResource, Resource
from attention_contract import operations
from attention_contract.schemas.attention import ForwardReply, KernelName, Tap
from attention_contract.schemas.attribution import AttributionMethod, AttributionReply
from attention_contract.schemas.complexity import ComplexityReply
from attention_contract.schemas.effects import EffectsReply
from attention_contract.schemas.gradients import GradientsReply
from attention_contract.schemas.rollout import CombinedHeads, RolloutReply, SentMethod
from attention_contract.schemas.similarity import Measure, SimilarityReply
from attention_contract.schemas.weights import StatisticName, WeightsReply


class Attention(Resource):
    """Calls about attention without a module."""

    def forward(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        spec: SpecLike | None = None, parameters: TensorMap | None = None, num_heads: int | None = None,
        num_kv_heads: int | None = None,
        mask: TensorLike | None = None, key_mask: TensorLike | None = None, key_lengths: TensorLike | None = None,
        global_mask: TensorLike | None = None, past_key: TensorLike | None = None, past_value: TensorLike | None = None,
        offsets: TensorLike | None = None, positions: TensorLike | None = None, gate: TensorLike | None = None,
        beta: TensorLike | None = None,
        initial_state: TensorLike | None = None, initial_normalizer: TensorLike | None = None,
        return_: Sequence[Tap] = ("output",), select: SelectLike | None = None, average_heads: bool = False,
        edits: Sequence[EditLike] = (), dropout: DropoutLike | None = None, return_state: bool = False,
        report_error: bool = False, compare: Literal["unedited"] | None = None,
        kernel: KernelName | None = None, version: str | None = None,
        **options: Unpack[CallOptions],
    ) -> ForwardReply:  # fmt: skip
        """Compute attention over raw q, k and v, as the ``spec`` says: scaled dot product by default.

        ``query [B, H, Lq, D]``, ``key [B, Hkv, Lk − P, D]``, ``value [B, Hkv, Lk − P, Dv]``; or ``[B, L, H·D]`` with
        ``num_heads`` (and ``num_kv_heads``, by default the same). The key is by default the query, the value the key.
        ``parameters``: learned tensors of the spec by name, as ``score.weight``.
        The other arguments are those of ``Client.forward``.
        """
        return self.send(call(operations.raw_forward, locals()))

    def weights(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        spec: SpecLike | None = None, parameters: TensorMap | None = None, num_heads: int | None = None,
        num_kv_heads: int | None = None,
        mask: TensorLike | None = None, key_mask: TensorLike | None = None, key_lengths: TensorLike | None = None,
        global_mask: TensorLike | None = None, past_key: TensorLike | None = None, past_value: TensorLike | None = None,
        offsets: TensorLike | None = None, positions: TensorLike | None = None, gate: TensorLike | None = None,
        beta: TensorLike | None = None,
        initial_state: TensorLike | None = None, initial_normalizer: TensorLike | None = None,
        edits: Sequence[EditLike] = (), top_k: int = 0, select: SelectLike | None = None, return_weights: bool = True,
        pool: int | None = None, average_heads: bool = False, query_mask: TensorLike | None = None,
        statistics: Sequence[StatisticName] | None = None, statistic_options: StatisticOptionsLike | None = None,
        compare: Literal["unedited"] | None = None, labels: Sequence[str] | None = None,
        query_labels: Sequence[str] | None = None, kernel: KernelName | None = None,
        version: str | None = None, **options: Unpack[CallOptions],
    ) -> WeightsReply:  # fmt: skip
        """Return the weights of a raw attention. Inputs as in ``forward``, the rest as in ``Client.weights``."""
        return self.send(call(operations.raw_weights, locals()))

    def attribution(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        spec: SpecLike | None = None, parameters: TensorMap | None = None, num_heads: int | None = None,
        num_kv_heads: int | None = None,
        mask: TensorLike | None = None, key_mask: TensorLike | None = None, key_lengths: TensorLike | None = None,
        global_mask: TensorLike | None = None, past_key: TensorLike | None = None, past_value: TensorLike | None = None,
        offsets: TensorLike | None = None, positions: TensorLike | None = None, gate: TensorLike | None = None,
        beta: TensorLike | None = None,
        initial_state: TensorLike | None = None, initial_normalizer: TensorLike | None = None,
        methods: Sequence[AttributionMethod] = ("gradient_attention",), upstream: TensorLike | None = None,
        readout: ReadoutLike | None = None, steps: int = 32, edits: Sequence[EditLike] = (),
        select: SelectLike | None = None, compare: Literal["unedited"] | None = None,
        labels: Sequence[str] | None = None, query_labels: Sequence[str] | None = None,
        kernel: KernelName | None = None, version: str | None = None, **options: Unpack[CallOptions],
    ) -> AttributionReply:  # fmt: skip
        """Attribute to weights of raw attention. Inputs as in ``forward``, the rest as in ``Client.attribution``."""
        return self.send(call(operations.raw_attribution, locals()))

    def gradients(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        spec: SpecLike | None = None, parameters: TensorMap | None = None, num_heads: int | None = None,
        num_kv_heads: int | None = None,
        wrt: Sequence[str] = ("query",), upstream: TensorLike | None = None, tap_upstream: TensorMap | None = None,
        check: bool = False, directions: TensorMap | None = None,
        mask: TensorLike | None = None, key_mask: TensorLike | None = None, key_lengths: TensorLike | None = None,
        global_mask: TensorLike | None = None, past_key: TensorLike | None = None, past_value: TensorLike | None = None,
        offsets: TensorLike | None = None, positions: TensorLike | None = None, gate: TensorLike | None = None,
        beta: TensorLike | None = None,
        initial_state: TensorLike | None = None, initial_normalizer: TensorLike | None = None,
        return_: Sequence[Tap] = ("output",), select: SelectLike | None = None, average_heads: bool = False,
        edits: Sequence[EditLike] = (), dropout: DropoutLike | None = None, return_state: bool = False,
        report_error: bool = False, kernel: KernelName | None = None, version: str | None = None,
        **options: Unpack[CallOptions],
    ) -> GradientsReply:  # fmt: skip
        """Return exact gradients of a raw attention. Inputs as in ``forward``, the rest as in ``Client.gradients``."""
        return self.send(call(operations.raw_gradients, locals()))

    def effects(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        sweep: SweptEditLike, spec: SpecLike | None = None, parameters: TensorMap | None = None,
        num_heads: int | None = None, num_kv_heads: int | None = None, edits: Sequence[EditLike] = (),
        queries: Sequence[int] | None = None, direction: TensorLike | None = None, return_differences: bool = False,
        mask: TensorLike | None = None, key_mask: TensorLike | None = None, key_lengths: TensorLike | None = None,
        global_mask: TensorLike | None = None, past_key: TensorLike | None = None, past_value: TensorLike | None = None,
        offsets: TensorLike | None = None, positions: TensorLike | None = None, gate: TensorLike | None = None,
        beta: TensorLike | None = None,
        initial_state: TensorLike | None = None, initial_normalizer: TensorLike | None = None,
        kernel: KernelName | None = None, version: str | None = None, **options: Unpack[CallOptions],
    ) -> EffectsReply:  # fmt: skip
        """Return the effects of a sweep of edits. Inputs as in ``forward``, the rest as in ``Client.effects``."""
        return self.send(call(operations.raw_effects, locals()))

    def rollout(
        self, weights: TensorLike, *, method: SentMethod = "rollout", combine: CombinedHeads = "mean",
        residual: float = 0.5, discard: float = 0.0, queries: Sequence[int] | None = None,
        labels: Sequence[str] | None = None, **options: Unpack[CallOptions],
    ) -> RolloutReply:  # fmt: skip
        """Return where the state of each token comes from, from ``weights [layers, heads, tokens, tokens]``.

        ``method="relevance"`` accumulates the ``relevance`` or ``gradient_attention`` of attributions to each layer.
        ``labels`` of the tokens stand in a picture. The other arguments are those of ``Recordings.rollout``.
        """
        return self.send(call(operations.rollout, locals()))

    def complexity(
        self, shape: ShapeLike, sweep: SweepLike | None = None, *, num_heads: int, head_dim: int,
        num_kv_heads: int | None = None, value_dim: int | None = None, key_dim: int | None = None,
        dtype: str = "float32", spec: SpecLike | None = None, return_: Sequence[Tap] = ("output",),
        kernel: KernelName | None = None,
        memory_bytes: int | None = None, hardware: str | None = None, compare: Sequence[AlternativeLike] = (),
        measure: bool = False, version: str | None = None, **options: Unpack[CallOptions],
    ) -> ComplexityReply:  # fmt: skip
        """Return the cost of attention without projections. The other arguments are those of ``Client.complexity``."""
        return self.send(sized(operations.raw_complexity, locals()))

    def similarity(
        self, a: TensorLike, b: TensorLike | None = None, *, measure: Measure = "jensen_shannon",
        **options: Unpack[CallOptions],
    ) -> SimilarityReply:  # fmt: skip
        """Return the similarity ``[A, B]`` of every pair of heads, by their weights or features.

        ``a [A, Lq, Lk]`` weights for the divergence of Jensen and Shannon in nats, or ``[A, N, D]`` features for linear
        CKA (``measure="cka"``). ``b``, with the same queries and keys or tokens, is by default ``a``.
        """
        return self.send(call(operations.similarity, locals()))


class AsyncAttention(AsyncResource):
    """The same calls as ``Attention``, awaited."""

    async def forward(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        spec: SpecLike | None = None, parameters: TensorMap | None = None, num_heads: int | None = None,
        num_kv_heads: int | None = None,
        mask: TensorLike | None = None, key_mask: TensorLike | None = None, key_lengths: TensorLike | None = None,
        global_mask: TensorLike | None = None, past_key: TensorLike | None = None, past_value: TensorLike | None = None,
        offsets: TensorLike | None = None, positions: TensorLike | None = None, gate: TensorLike | None = None,
        beta: TensorLike | None = None,
        initial_state: TensorLike | None = None, initial_normalizer: TensorLike | None = None,
        return_: Sequence[Tap] = ("output",), select: SelectLike | None = None, average_heads: bool = False,
        edits: Sequence[EditLike] = (), dropout: DropoutLike | None = None, return_state: bool = False,
        report_error: bool = False, compare: Literal["unedited"] | None = None,
        kernel: KernelName | None = None, version: str | None = None,
        **options: Unpack[CallOptions],
    ) -> ForwardReply:  # fmt: skip
        """Compute attention over raw q, k and v, as the ``spec`` says: scaled dot product by default.

        ``query [B, H, Lq, D]``, ``key [B, Hkv, Lk − P, D]``, ``value [B, Hkv, Lk − P, Dv]``; or ``[B, L, H·D]`` with
        ``num_heads`` (and ``num_kv_heads``, by default the same). The key is by default the query, the value the key.
        ``parameters``: learned tensors of the spec by name, as ``score.weight``.
        The other arguments are those of ``Client.forward``.
        """
        return await self.send(call(operations.raw_forward, locals()))

    async def weights(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        spec: SpecLike | None = None, parameters: TensorMap | None = None, num_heads: int | None = None,
        num_kv_heads: int | None = None,
        mask: TensorLike | None = None, key_mask: TensorLike | None = None, key_lengths: TensorLike | None = None,
        global_mask: TensorLike | None = None, past_key: TensorLike | None = None, past_value: TensorLike | None = None,
        offsets: TensorLike | None = None, positions: TensorLike | None = None, gate: TensorLike | None = None,
        beta: TensorLike | None = None,
        initial_state: TensorLike | None = None, initial_normalizer: TensorLike | None = None,
        edits: Sequence[EditLike] = (), top_k: int = 0, select: SelectLike | None = None, return_weights: bool = True,
        pool: int | None = None, average_heads: bool = False, query_mask: TensorLike | None = None,
        statistics: Sequence[StatisticName] | None = None, statistic_options: StatisticOptionsLike | None = None,
        compare: Literal["unedited"] | None = None, labels: Sequence[str] | None = None,
        query_labels: Sequence[str] | None = None, kernel: KernelName | None = None,
        version: str | None = None, **options: Unpack[CallOptions],
    ) -> WeightsReply:  # fmt: skip
        """Return the weights of a raw attention. Inputs as in ``forward``, the rest as in ``Client.weights``."""
        return await self.send(call(operations.raw_weights, locals()))

    async def attribution(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        spec: SpecLike | None = None, parameters: TensorMap | None = None, num_heads: int | None = None,
        num_kv_heads: int | None = None,
        mask: TensorLike | None = None, key_mask: TensorLike | None = None, key_lengths: TensorLike | None = None,
        global_mask: TensorLike | None = None, past_key: TensorLike | None = None, past_value: TensorLike | None = None,
        offsets: TensorLike | None = None, positions: TensorLike | None = None, gate: TensorLike | None = None,
        beta: TensorLike | None = None,
        initial_state: TensorLike | None = None, initial_normalizer: TensorLike | None = None,
        methods: Sequence[AttributionMethod] = ("gradient_attention",), upstream: TensorLike | None = None,
        readout: ReadoutLike | None = None, steps: int = 32, edits: Sequence[EditLike] = (),
        select: SelectLike | None = None, compare: Literal["unedited"] | None = None,
        labels: Sequence[str] | None = None, query_labels: Sequence[str] | None = None,
        kernel: KernelName | None = None, version: str | None = None, **options: Unpack[CallOptions],
    ) -> AttributionReply:  # fmt: skip
        """Attribute to weights of raw attention. Inputs as in ``forward``, the rest as in ``Client.attribution``."""
        return await self.send(call(operations.raw_attribution, locals()))

    async def gradients(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        spec: SpecLike | None = None, parameters: TensorMap | None = None, num_heads: int | None = None,
        num_kv_heads: int | None = None,
        wrt: Sequence[str] = ("query",), upstream: TensorLike | None = None, tap_upstream: TensorMap | None = None,
        check: bool = False, directions: TensorMap | None = None,
        mask: TensorLike | None = None, key_mask: TensorLike | None = None, key_lengths: TensorLike | None = None,
        global_mask: TensorLike | None = None, past_key: TensorLike | None = None, past_value: TensorLike | None = None,
        offsets: TensorLike | None = None, positions: TensorLike | None = None, gate: TensorLike | None = None,
        beta: TensorLike | None = None,
        initial_state: TensorLike | None = None, initial_normalizer: TensorLike | None = None,
        return_: Sequence[Tap] = ("output",), select: SelectLike | None = None, average_heads: bool = False,
        edits: Sequence[EditLike] = (), dropout: DropoutLike | None = None, return_state: bool = False,
        report_error: bool = False, kernel: KernelName | None = None, version: str | None = None,
        **options: Unpack[CallOptions],
    ) -> GradientsReply:  # fmt: skip
        """Return exact gradients of a raw attention. Inputs as in ``forward``, the rest as in ``Client.gradients``."""
        return await self.send(call(operations.raw_gradients, locals()))

    async def effects(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        sweep: SweptEditLike, spec: SpecLike | None = None, parameters: TensorMap | None = None,
        num_heads: int | None = None, num_kv_heads: int | None = None, edits: Sequence[EditLike] = (),
        queries: Sequence[int] | None = None, direction: TensorLike | None = None, return_differences: bool = False,
        mask: TensorLike | None = None, key_mask: TensorLike | None = None, key_lengths: TensorLike | None = None,
        global_mask: TensorLike | None = None, past_key: TensorLike | None = None, past_value: TensorLike | None = None,
        offsets: TensorLike | None = None, positions: TensorLike | None = None, gate: TensorLike | None = None,
        beta: TensorLike | None = None,
        initial_state: TensorLike | None = None, initial_normalizer: TensorLike | None = None,
        kernel: KernelName | None = None, version: str | None = None, **options: Unpack[CallOptions],
    ) -> EffectsReply:  # fmt: skip
        """Return the effects of a sweep of edits. Inputs as in ``forward``, the rest as in ``Client.effects``."""
        return await self.send(call(operations.raw_effects, locals()))

    async def rollout(
        self, weights: TensorLike, *, method: SentMethod = "rollout", combine: CombinedHeads = "mean",
        residual: float = 0.5, discard: float = 0.0, queries: Sequence[int] | None = None,
        labels: Sequence[str] | None = None, **options: Unpack[CallOptions],
    ) -> RolloutReply:  # fmt: skip
        """Return where the state of each token comes from, from ``weights [layers, heads, tokens, tokens]``.

        ``method="relevance"`` accumulates the ``relevance`` or ``gradient_attention`` of attributions to each layer.
        ``labels`` of the tokens stand in a picture. The other arguments are those of ``Recordings.rollout``.
        """
        return await self.send(call(operations.rollout, locals()))

    async def complexity(
        self, shape: ShapeLike, sweep: SweepLike | None = None, *, num_heads: int, head_dim: int,
        num_kv_heads: int | None = None, value_dim: int | None = None, key_dim: int | None = None,
        dtype: str = "float32", spec: SpecLike | None = None, return_: Sequence[Tap] = ("output",),
        kernel: KernelName | None = None,
        memory_bytes: int | None = None, hardware: str | None = None, compare: Sequence[AlternativeLike] = (),
        measure: bool = False, version: str | None = None, **options: Unpack[CallOptions],
    ) -> ComplexityReply:  # fmt: skip
        """Return the cost of attention without projections. The other arguments are those of ``Client.complexity``."""
        return await self.send(sized(operations.raw_complexity, locals()))

    async def similarity(
        self, a: TensorLike, b: TensorLike | None = None, *, measure: Measure = "jensen_shannon",
        **options: Unpack[CallOptions],
    ) -> SimilarityReply:  # fmt: skip
        """Return the similarity ``[A, B]`` of every pair of heads, by their weights or features.

        ``a [A, Lq, Lk]`` weights for the divergence of Jensen and Shannon in nats, or ``[A, N, D]`` features for linear
        CKA (``measure="cka"``). ``b``, with the same queries and keys or tokens, is by default ``a``.
        """
        return await self.send(call(operations.similarity, locals()))

"""Questions about a module: output, weights, attribution, gradients, effects, cost and circuits."""

from collections.abc import Sequence
from typing import Unpack

from attention_client.arguments import (
    AlternativeLike,
    AttributionFields,
    EffectsFields,
    ForwardFields,
    GradientsFields,
    SessionShapeLike,
    ShapeLike,
    SweepLike,
    SweptEditLike,
    WeightsFields,
)
from attention_client.array_likes import TensorLike
from attention_client.calls.base import Call, CallOptions, call, sized
from attention_client.calls.method import Calls, WayT, method
from attention_contract import operations
from attention_contract.schemas.analyses.attribution import AttributionMethod, AttributionReply
from attention_contract.schemas.analyses.circuits import CircuitPart, CircuitsReply
from attention_contract.schemas.analyses.effects import EffectsReply
from attention_contract.schemas.attention import ForwardReply, KernelName, Tap
from attention_contract.schemas.costs.complexity import ComplexityReply
from attention_contract.schemas.gradients import GradientsReply
from attention_contract.schemas.weights import WeightsReply


class Questions(Calls[WayT]):
    """Questions about a resident module, which are methods of the client itself."""

    @method
    def forward(
        self, name: str, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        past_key: TensorLike | None = None, past_value: TensorLike | None = None, offsets: TensorLike | None = None,
        return_: Sequence[Tap] = ("output",), average_heads: bool = False, return_state: bool = False,
        report_error: bool = False, **options: Unpack[ForwardFields],
    ) -> Call[ForwardReply]:  # fmt: skip
        """Return the output of a module and the taps named in ``return_``.

        ``query [B, Lq, d_model]``; ``key [B, Lk − P, key_width]``, by default the query; ``value [B, Lk − P,
        value_width]``, by default the key.
        ``mask``, broadcastable to ``[B, H, Lq, Lk]``: bool, True lets a query look; or float, added to the scores.
        ``key_mask [B, Lk]``, True for a real key; ``key_lengths [B]``, how many keys from the first on are real.
        ``global_mask [B, Lk]``, True for a global token: it sees every key, and every query sees it.
        ``past_key [B, Hkv, P, D]``, ``past_value [B, Hkv, P, Dv]``: projected keys and values of earlier tokens.
        ``offsets [B]`` or a number, added to the index of each query; by default P. ``positions [B, Lq]``: where each
        new token stands in the position encoding.
        ``gate [B, Hkv, Lk]`` or ``[B, Hkv, Lk, D]``, ``beta [B, Hkv, Lk]``, ``initial_state [B, Hkv, F, Dv]`` and
        ``initial_normalizer [B, Hkv, F]`` belong to method ``linear``; ``return_state`` returns its last state.
        ``return_``: q, k, v, scores, capped_scores, masked_scores, weights, context, lse, output.
        ``select {"heads": […], "queries": […]}`` keeps these of the taps; ``average_heads`` averages the weights.
        ``edits``: interventions such as ``{"tap": "weights", "heads": [3], "set": 0}``.
        ``compare="unedited"`` adds ``differences``. ``dropout {"p": 0.1, "seed": 0}``.
        ``report_error`` compares a method with exact attention.
        ``kernel`` is by default the cheapest. ``parameters`` take the place of the module's own in this call alone.
        With a ``version``, answers only if the module is at it.
        """
        return call(operations.forward, locals())

    @method
    def weights(
        self, name: str, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        past_key: TensorLike | None = None, past_value: TensorLike | None = None, offsets: TensorLike | None = None,
        top_k: int = 0, return_weights: bool = True, average_heads: bool = False, **options: Unpack[WeightsFields],
    ) -> Call[WeightsReply]:  # fmt: skip
        """Return the weights of each head ``[B, H, Lq, Lk]``, their statistics, and the ``top_k`` keys of each query.

        The statistics are ``[B, H]`` each: entropy in nats, distance in tokens, shares of 1. ``top_k`` is at most
        1,024. ``return_weights=False`` leaves the weights out; ``pool`` returns the largest weight of each square of so
        many queries and keys. ``query_mask [B, Lq]``, True for a query that the
        statistics count. ``statistics`` names them, as in ``["induction"]``; ``statistic_options`` holds window, sinks,
        tokens ``[B, Lk]``, query_tokens ``[B, Lq]``, classes and token_classes; ``normalize="absolute"`` takes shares
        |w| / Σ|w|, which implicit weights of linear attention need. The weights are those after the
        ``edits``; ``compare="unedited"`` adds ``differences``. ``labels`` of the Lk keys and ``query_labels`` stand in
        pictures. The other arguments are those of ``forward``.
        """
        return call(operations.weights, locals())

    @method
    def attribution(
        self, name: str, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        past_key: TensorLike | None = None, past_value: TensorLike | None = None, offsets: TensorLike | None = None,
        methods: Sequence[AttributionMethod] = ("gradient_attention",), steps: int = 32,
        **options: Unpack[AttributionFields],
    ) -> Call[AttributionReply]:  # fmt: skip
        """Return the share of each weight and head in L = Σ output · upstream, one tensor for each method.

        ``methods``: gradient_attention and integrated ``[B, H, Lq, Lk]``, relevance ``[B, Lq, Lk]``, norm ``[B, H, Lq,
        Lk]`` with norm_of_sum ``[B, Lq, Lk]``, head_importance ``[B, H]``. ``upstream`` is ∂L/∂output; by default ones.
        ``readout {"weight": [C, d_model], "bias": [C], "targets": [B, Lq]}`` makes L the log-likelihood of the targets,
        of which −1 counts nothing. ``steps`` are the points of the path of ``integrated``, whose accuracy
        ``completeness`` tells. ``compare="unedited"`` adds ``differences``. The other arguments are those of
        ``weights``.
        """
        return call(operations.attribution, locals())

    @method
    def gradients(
        self, name: str, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        past_key: TensorLike | None = None, past_value: TensorLike | None = None, offsets: TensorLike | None = None,
        wrt: Sequence[str] = ("query",), check: bool = False, return_: Sequence[Tap] = ("output",),
        average_heads: bool = False, return_state: bool = False, report_error: bool = False,
        **options: Unpack[GradientsFields],
    ) -> Call[GradientsReply]:  # fmt: skip
        """Return exact gradients ∂L/∂name for each name of ``wrt``: inputs, taps, parameters, or ``"parameters"``.

        ``upstream`` is ∂L/∂output, of the output's shape; by default ones. ``tap_upstream`` is ∂L/∂tap of taps that L
        depends on too. ``check`` compares with central differences in float64. ``directions``, by names of ``wrt`` and
        of their shapes, adds Hessian-vector products.
        The other arguments are those of ``forward``.
        """
        return call(operations.gradients, locals())

    @method
    def effects(
        self, name: str, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        past_key: TensorLike | None = None, past_value: TensorLike | None = None, offsets: TensorLike | None = None,
        sweep: SweptEditLike, return_differences: bool = False, **options: Unpack[EffectsFields],
    ) -> Call[EffectsReply]:  # fmt: skip
        """Return the change of a module's output by each edit of a sweep: one edit a head, a query or a key.

        ``sweep {"tap": "context", "over": ["heads"], "set": 0}`` knocks each head out in turn; a ``value`` of the whole
        tap patches each in turn. The effects are ``[B, *swept]``: norm, relative, max, and with a ``direction`` of the
        output's shape the projection on it. ``queries``: those whose outputs are compared. ``edits`` hold throughout.
        ``return_differences`` adds the changes themselves. The other arguments are those of ``forward``.
        """
        return call(operations.effects, locals())

    @method
    def complexity(
        self, name: str, shape: ShapeLike, sweep: SweepLike | None = None, *, return_: Sequence[Tap] = ("output",),
        kernel: KernelName | None = None, memory_bytes: int | None = None, hardware: str | None = None,
        compare: Sequence[AlternativeLike] = (), session: SessionShapeLike | None = None, measure: bool = False,
        version: str | None = None,
        **options: Unpack[CallOptions],
    ) -> Call[ComplexityReply]:  # fmt: skip
        """Return the cost of a module at a shape or over a sweep: FLOPs, bytes, milliseconds, and what fits.

        ``shape {"batch": 1, "queries": 512, "keys": None, "past": 0}``, or a number of queries; ``sweep {"dimension":
        "length", "values": […]}``, or a list of lengths. ``memory_bytes`` supposes that so much is free, ``hardware``
        another device. ``compare`` costs alternatives such as ``{"num_kv_heads": 2}``; ``measure`` also runs both near
        the size where one becomes faster. ``session`` prices a decode session too, such as ``{"sequences": 4, "policy":
        {"name": "full"}, "pasts": [1024]}``.
        """
        return sized(operations.complexity, locals())

    @method
    def circuits(
        self, name: str, *, heads: Sequence[int] | None = None, parts: Sequence[CircuitPart] = ("qk", "ov", "spectra"),
        top: int | None = None, vectors: bool = False, with_: str | None = None, with_version: str | None = None,
        version: str | None = None, **options: Unpack[CallOptions],
    ) -> Call[CircuitsReply]:  # fmt: skip
        """Return the QK and OV circuits of a module's heads, and the spectra of its parameters, in float64.

        ``heads``, by default all. ``parts``: qk, ov, spectra. ``top`` limits the singular values of each matrix;
        ``vectors`` adds the singular vectors of the circuits ``[H, k, width]``. ``with_`` names a later module:
        composition scores ``[H, L]`` of this module's heads with its heads are added. ``with_version`` pins it.
        """
        return call(operations.circuits, locals())

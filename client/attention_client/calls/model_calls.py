"""Whole models: loading and listing them, and questions about a text, tokens, messages or images."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, Unpack, cast

from attention_client.arguments import (
    ContextOptions,
    ModelEffectsFields,
    ModelForwardFields,
    ModelGradientsFields,
    ModelLensFields,
    ModelSweptEditLike,
    ModelWeightsFields,
    PathReceiversLike,
    PathSendersLike,
    PricedProbeLike,
    PricedVectorLike,
    ProbeFeatureLike,
)
from attention_client.array_likes import TensorLike
from attention_client.calls.base import Call, CallOptions, call
from attention_client.calls.generation_calls import Generation
from attention_client.calls.method import WayT, method
from attention_client.calls.survey_calls import Surveys
from attention_client.media_files import ImageLike, image_pairs, with_media
from attention_contract import operations
from attention_contract.operations import Operation
from attention_contract.schemas.analyses.context import ContextReply, Measure
from attention_contract.schemas.analyses.lenses import (
    LensInfo,
    LensKind,
    LensList,
    LensMatrices,
    LensPart,
    ModelLensReply,
)
from attention_contract.schemas.analyses.model_effects import ModelEffectsReply
from attention_contract.schemas.analyses.probes import ProbeInfo, ProbeList, ProbeMethod
from attention_contract.schemas.costs.model_complexity import ImageSize, ModelComplexityReply
from attention_contract.schemas.model_requests import (
    ModelForwardReply,
    ModelGradient,
    ModelGradientsReply,
    ModelTap,
    ModelWeightsReply,
)
from attention_contract.schemas.models import ModelInfo, ModelList
from attention_contract.schemas.text_similarity import Pooling, TextSimilarityReply
from attention_contract.tensors import FloatName
from attention_contract.wire import JSON, SAFETENSORS

MEASURES: Final[tuple[Measure, ...]] = "attention", "gradient", "hidden", "lookback"
"""The measures of ``context`` by default."""


class Models(Generation[WayT], Surveys[WayT]):
    """Calls about whole models."""

    @method
    def load(
        self, checkpoint: str, *, name: str | None = None, adapter: str | None = None, dtype: FloatName | None = None,
        device_map: Literal["auto", "balanced"] | None = None, devices: int | Sequence[str] | None = None,
        **options: Unpack[CallOptions],
    ) -> Call[ModelInfo]:  # fmt: skip
        """Make a checkpoint of the server's model repository a resident model, and wait until it is.

        ``checkpoint`` is its path, or ``tiny``. ``name`` is by default the path with ``--`` for ``/``. A request that
        names a model loads it too. ``adapter`` is an adapter to load beside it, by its name or path; the path of an
        adapter as ``checkpoint`` loads its base too. ``devices``: those that it is spread over, by their number or
        their names. Raises CheckpointNotFound, InvalidCheckpoint, InvalidRequest, ModelExists and OverBudget.
        """
        return call(operations.load_model, locals())

    @method
    def list(self, **options: Unpack[CallOptions]) -> Call[ModelList]:
        """List every model that is resident, and every checkpoint that can become one."""
        return call(operations.list_models, locals())

    @method
    def get(self, model: str, **options: Unpack[CallOptions]) -> Call[ModelInfo]:
        """Return state, layers and memory of a model. Raises ModelNotFound."""
        return call(operations.get_model, locals())

    @method
    def unload(self, model: str, **options: Unpack[CallOptions]) -> Call[None]:
        """End a resident model once its requests are answered. Raises ModelNotFound."""
        return call(operations.unload_model, locals())

    @method
    def forward(
        self, model: str, text: str | Sequence[str] | None = None, *, return_: Sequence[ModelTap] = (),
        top_k: int = 5, average_heads: bool = False, keep: bool = False, alone: bool = False,
        **options: Unpack[ModelForwardFields],
    ) -> Call[ModelForwardReply]:  # fmt: skip
        """Return what a model predicts after a text, and taps of its layers.

        Give exactly one of ``text``, ``tokens`` and ``messages``; several texts are one batch. ``text_pair`` is a
        second text beside each, as classifiers of pairs and rerankers read it. ``answer`` is a given continuation,
        whose log-probability is told; so is that of a last message of the assistant. ``target`` is the decoder's text
        of an encoder-decoder. ``images`` are paths, the bytes of files, or images of Pillow; an encoder of images takes
        them alone. ``audio`` are the paths or the bytes of sounds, for a model that hears. ``layers`` are those to
        answer for, as in ``[0, 3]`` or ``["decoder.0"]``. ``edits`` are by layer:
        ``{"3": [{"tap": "context", "heads": [0], "set": 0}]}``. ``return_`` names taps, ``hidden`` or ``logits``;
        ``select`` the heads and queries. ``positions`` are the tokens whose predictions are told, by default the last.
        ``compare="unedited"`` tells both runs, and ``"base"`` those of an adapter and of its base. ``keep`` stores the
        run as a recording. ``likelihood="masked"``, of a masked model, masks each token in turn, and returns the
        log-probabilities of all, their sum and mean by text.
        ``alone`` shares no pass with other requests, for the same bits every time. ``adapter`` names an adapter that
        answers beside the model, as the model ``base:adapter`` does.
        """
        return call(operations.model_forward, with_media(locals()))

    @method
    def weights(
        self, model: str, text: str | Sequence[str] | None = None, *, top_k: int = 0, return_weights: bool = True,
        average_heads: bool = False, keep: bool = False, alone: bool = False, **options: Unpack[ModelWeightsFields],
    ) -> Call[ModelWeightsReply]:  # fmt: skip
        """Return statistics, top keys and weights of the heads of each layer of a model.

        Inputs as in ``forward``. The other arguments are those of ``Client.weights``.
        """
        return call(operations.model_weights, with_media(locals()))

    @method
    def gradients(
        self, model: str, text: str | Sequence[str] | None = None, *, wrt: Sequence[ModelGradient] = ("tokens",),
        by_head: bool = True, check: bool = False, alone: bool = False, **options: Unpack[ModelGradientsFields],
    ) -> Call[ModelGradientsReply]:  # fmt: skip
        """Return exact gradients of log p(token at a position), or of another number that a model predicts.

        ``of`` says which: ``{"position": -1, "token": "mat", "against": "dog"}`` for the margin of two tokens,
        ``{"token": "POSITIVE"}`` for a class, ``{"answer": "sum"}`` for all tokens of a given answer, or
        ``{"upstream": ∂L/∂logits}``; by default a given answer, or the likeliest token after the last. ``wrt`` names
        tokens, embeddings, hidden, output and taps; ``by_head`` adds Σ gradient · context of each head. ``integrated``
        integrates those of tokens over so many steps from zeros. ``check`` compares with central differences. Inputs
        as in ``forward``.
        """
        return call(operations.model_gradients, with_media(locals()))

    @method
    def context(
        self, model: str, text: str | None = None, *, return_: Sequence[Measure] = MEASURES, heads: int = 8,
        temperature: float = 0.0, alone: bool = False, **options: Unpack[ContextOptions],
    ) -> Call[ContextReply]:  # fmt: skip
        """Return which parts of a prompt made each sentence of an answer.

        The prompt is ``text``, ``messages``, or ``sources`` by themselves. ``sources`` name its parts, as in
        ``[{"name": "report", "text": "…"}, {"span": [10, 80]}]``; by default they are its sentences, with
        ``split="messages"`` its messages. ``answer`` is given, or generated first by the settings of ``generate``, of
        which ``temperature`` is 0 by default. ``return_`` names the measures: ``attention``, ``gradient``, ``hidden``,
        ``removed`` and ``lookback``. ``heads`` is the number of heads to tell of by themselves. Raises ModelNotFound
        and InvalidRequest.
        """
        return call(operations.model_context, locals())

    @method
    def lens(
        self, model: str, text: str | Sequence[str] | None = None, *, kind: LensKind = "logit",
        of: Sequence[LensPart] = ("hidden",), top_k: int = 5, targets: Sequence[int | str] = (), alone: bool = False,
        **options: Unpack[ModelLensFields],
    ) -> Call[ModelLensReply]:  # fmt: skip
        """Return what states inside a model would predict if they were read out at once.

        ``of`` names the states: ``hidden`` behind each layer, and the contributions of each layer's attention
        (``output``) and of its ``heads``. Each reading tells its ``top_k`` tokens, and the logits of ``targets``, which
        are ids or texts of one token. With targets, ``rest`` has the other parts of their logits. ``positions`` are the
        tokens to read, by default all. ``kind="jacobian"`` reads by a fitted lens, whose id is ``lens``. ``labels`` of
        the tokens stand in pictures. Inputs as in ``forward``. Raises InvalidRequest for a model without an
        unembedding, or whose parts do not sum.
        """
        return call(operations.model_lens, with_media(locals()))

    @method
    def effects(
        self, model: str, text: str | Sequence[str] | None = None, *, alone: bool = False,
        **options: Unpack[ModelEffectsFields],
    ) -> Call[ModelEffectsReply]:  # fmt: skip
        """Return the change of a prediction by each edit of a sweep, or by each path between components.

        The ``sweep`` ``{"tap": "context", "over": ["layers", "heads"], "set": 0}`` knocks out each head of each layer
        in turn. ``layers`` are those that are swept, ``window`` of the sweep the number of layers that one edit
        changes. ``query_groups`` and ``key_groups`` of the sweep take groups of tokens in place of single ones: with
        ``{"tap": "masked_scores", "set": float("-inf")}`` one group no longer sees another. ``of`` is the number that
        is measured, as in ``gradients``. ``edits`` apply in every run. ``labels`` of the tokens stand in pictures of
        swept queries and keys.

        ``from_`` and ``to`` take the place of ``sweep``: they name components, each of which sends a changed output
        along a path through the residual stream alone. With ``from_={"layer": 0, "text": "…"}`` the heads of layer 0
        send what they make of another text of as many tokens, with ``{"set": 0}`` nothing. ``to={"layer": 1}`` are the
        inputs of that layer's queries, keys and values, head by head; by default the logits. ``parts`` of both name
        others: ``mlps`` and ``embeddings``. Inputs as in ``forward``. Raises InvalidRequest for a model whose states
        are no sum of parts.
        """
        return call(operations.model_effects, with_media(locals()))

    @method
    def fit_lens(
        self, model: str, texts: Sequence[str] | None = None, *, jacobians: Mapping[str, TensorLike] | None = None,
        skip_first: int = 16, max_tokens: int = 128, wait_s: float | None = None, **options: Unpack[CallOptions],
    ) -> Call[LensInfo]:  # fmt: skip
        """Fit a Jacobian lens over texts, and wait until it is there: its ``id`` is the ``lens`` of ``lens``.

        Of each text the first ``skip_first`` tokens and the last are left out, and at most ``max_tokens`` are read.
        With ``wait_s``, the reply comes after so many seconds and tells the ``progress``; the same call again waits
        further. ``jacobians`` are matrices that were fitted elsewhere, by the number of their layer, in place of texts.
        Raises InvalidRequest for a text without a token that counts, and Conflict if ``delete_lens`` stopped the fit.
        """
        return call(operations.fit_lens, locals())

    @method
    def lenses(self, model: str, **options: Unpack[CallOptions]) -> Call[LensList]:
        """List the fitted lenses of a model, and those that are being fitted."""
        return call(operations.list_lenses, locals())

    @method
    def fitted_lens(self, id: str, **options: Unpack[CallOptions]) -> Call[LensInfo]:  # noqa: A002
        """Describe a lens. Raises LensNotFound."""
        return replace(call(operations.get_lens, locals()), headers={"Accept": JSON})  # the other form is the file

    @method
    def lens_matrices(self, id: str, **options: Unpack[CallOptions]) -> Call[LensMatrices]:  # noqa: A002
        """Return a fitted lens with its matrices: ``jacobians`` by the number of the layer. Raises LensNotFound."""
        whole = replace(cast("Operation[Any]", operations.get_lens), reply=LensMatrices)
        return replace(call(whole, locals()), headers={"Accept": SAFETENSORS})

    @method
    def delete_lens(self, id: str, **options: Unpack[CallOptions]) -> Call[None]:  # noqa: A002
        """Remove a lens, or stop its fit. Raises LensNotFound."""
        return call(operations.delete_lens, locals())

    @method
    def fit_probe(
        self, model: str, of: ProbeFeatureLike, texts: Sequence[str] | None = None,
        labels: Sequence[int] | Sequence[Sequence[int]] | None = None, *,
        positions: Literal["last", "mean", "all"] | Sequence[int] | Sequence[Sequence[int]] = "last",
        method: ProbeMethod = "logistic", regularization: float = 1.0, folds: int = 5,
        false_positive_rate: float = 0.05, weights: TensorLike | None = None, bias: float | None = None,
        scale: TensorLike | None = None, wait_s: float | None = None, **options: Unpack[CallOptions],
    ) -> Call[ProbeInfo]:  # fmt: skip
        """Fit a linear probe to texts with labels 0 and 1, and wait until it is there.

        ``of`` is the feature: ``{"point": "hidden", "layer": 7}``, or ``"all"`` layers, or ``{"statistics":
        ["entropy"]}`` of heads. ``positions`` are the tokens that are samples. The reply has for each layer the
        cross-validated AUC with its interval, and the ``threshold`` above which at most ``false_positive_rate`` of the
        samples with label 0 score. ``weights`` with ``bias`` and ``scale`` were fitted elsewhere, in place of texts.
        With ``wait_s``, the reply comes after so many seconds and tells the ``progress``; the same call again waits
        further. Raises InvalidRequest for labels of one class, and Conflict if ``delete_probe`` stopped the fit.
        """
        return call(operations.fit_probe, locals())

    @method
    def probes(self, model: str, **options: Unpack[CallOptions]) -> Call[ProbeList]:
        """List the linear probes of a model, and those that are being fitted."""
        return call(operations.list_probes, locals())

    @method
    def probe(self, id: str, **options: Unpack[CallOptions]) -> Call[ProbeInfo]:  # noqa: A002
        """Describe a linear probe, with its ``weights`` by layer. Raises ProbeNotFound."""
        return call(operations.get_probe, locals())

    @method
    def delete_probe(self, id: str, **options: Unpack[CallOptions]) -> Call[None]:  # noqa: A002
        """Remove a linear probe, or stop its fit. Raises ProbeNotFound."""
        return call(operations.delete_probe, locals())

    @method
    def similarity(
        self, model: str, pairs: Sequence[Sequence[str | ImageLike]], *, gradients: bool = True,
        prompt_names: Sequence[str] | None = None, pooling: Pooling | None = None, adapter: str | None = None,
        alone: bool = False, **options: Unpack[CallOptions],
    ) -> Call[TextSimilarityReply]:  # fmt: skip
        """Return the cosine of the vectors of two texts, for each pair, and the share of every token in it.

        The vectors are those of ``embed``. ``prompt_names`` are the prompts before the first and the second texts, as
        in ``["query", "document"]``; ``pooling`` takes the place of the checkpoint's. ``gradients=False`` leaves the
        shares out. For CLIP, SigLIP and other pairs of encoders, a side may be an image: a ``Path``, the bytes of a
        file, or an image of Pillow. A string is a text. ``adapter`` names an adapter of the model. These requests
        never share a pass, with ``alone`` or without. Raises InvalidRequest for an image that cannot be read.
        """
        return call(operations.model_similarity, {**locals(), "pairs": image_pairs(pairs)})

    @method
    def complexity(
        self, model: str, length: int = 1024, *, target_length: int | None = None,
        images: Sequence[ImageSize | Mapping[str, int]] = (), batch: int = 1, new_tokens: int = 0,
        weights: bool = False, lens: Sequence[LensPart] = (), fit: bool = False,
        vector: PricedVectorLike | None = None, probe: PricedProbeLike | None = None,
        likelihood: Literal["masked"] | None = None, sweep: ModelSweptEditLike | None = None,
        from_: PathSendersLike | None = None, to: PathReceiversLike | None = None, text: str | None = None,
        return_: Sequence[Measure] = MEASURES, heads: int = 8, temperature: float = 0.0, alone: bool = False,
        **options: Unpack[ContextOptions],
    ) -> Call[ModelComplexityReply]:  # fmt: skip
        """Return what a text of so many tokens costs, and a generation of new ones after it.

        ``target_length`` is the number of tokens of the target, for a model with an encoder and a decoder. ``images``
        are the sizes of images that come with the text, or that an encoder reads, as in ``[{"width": 640, "height":
        480}]``. ``lens`` names the parts that a lens reads at every token, to price that too, and
        ``fit`` prices the fit of a Jacobian lens over the texts, ``vector`` that of a steering vector, as in
        ``{"method": "pca"}``, ``probe`` that of a probe, as in ``{"of": {"point": "hidden", "layer": "all"}}``,
        ``likelihood="masked"`` their pseudo log-likelihood, ``sweep`` a sweep of ``effects``, and ``from_`` and ``to``
        its paths. The arguments of ``context`` give the cost of that call, in place of sizes. Raises InvalidRequest for
        images if the model reads none.
        """
        return call(operations.model_complexity, locals())

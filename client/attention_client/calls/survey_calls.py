"""Surveys of a model's heads over many texts: flows of requests for weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from attention_client.arguments import SurveyFields
from attention_client.calls.base import CallOptions
from attention_client.calls.method import Flow, Group, WayT, method
from attention_client.survey.head_survey import HeadSurvey, Passage, shipped_texts
from attention_client.survey.headvis_files import exported
from attention_client.survey.survey_flow import OnTexts, read_passages, surveyed
from attention_contract.schemas.models import LayerRef
from attention_contract.schemas.weights import StatisticName


class Surveys(Group[WayT]):
    """Calls that find heads by what they do in many texts."""

    @method
    def survey(
        self, model: str, texts: Sequence[str] | None = None, *, statistics: Sequence[StatisticName] | None = None,
        batch: int = 16, answer_tokens: int = 32, on_texts: OnTexts | None = None, **options: Unpack[SurveyFields],
    ) -> Flow[HeadSurvey]:  # fmt: skip
        """Return every statistic of every head of a model over many texts.

        ``texts`` are by default those that ship, ``statistics`` all of one number for each head that need no more
        than a text. A request has
        ``batch`` texts of similar lengths and returns no weights; it waits for its turn, is priced and has its
        ``timeout`` like any other. After each, ``on_texts`` is called with the number of texts that are done and that
        of all. ``edits`` hold in every text. ``audio`` has a sound for each text, which is then its transcript, the
        decoder's, or a text with the sound in it. Raises InvalidRequest that names a text, as in ``texts.3``.

        ``retrieval`` needs a needle, a part of each text: ``statistic_options={"needle": [...]}``, one for each text or
        one for all. It counts the tokens that ``answer`` copies, one for each text; by default, the model first
        continues each text by its ``answer_tokens`` likeliest tokens. ``classes`` is one statistic for each of
        ``token_classes`` and ``passages``, as in ``classes.names``. ``pairs`` needs
        ``statistic_options={"pairs": [...]}``, a list of ``[query, key]`` for each text or one for all, and is six
        statistics, as in ``pairs.share``. ``received`` is that of the key that receives most.
        """
        texts = shipped_texts() if texts is None else texts
        return surveyed(model, texts, statistics, batch, answer_tokens, on_texts, options)

    @method
    def passages(
        self, survey: HeadSurvey, layer: LayerRef, head: int, *, by: str = "induction", count: int = 5,
        top_k: int = 3, **options: Unpack[CallOptions],
    ) -> Flow[list[Passage]]:  # fmt: skip
        """Return the texts in which a head is strongest by a statistic, with its weights, the strongest first."""
        return read_passages(survey, (layer, head), by, count, top_k, options)

    @method
    def export_headvis(
        self, survey: HeadSurvey, folder: str | Path, *, intervals: int = 10, samples: int = 20, top_k: int = 8,
        threshold: float = 0.005, on_texts: OnTexts | None = None, **options: Unpack[CallOptions],
    ) -> Flow[Path]:  # fmt: skip
        """Write a survey as the folder ``data`` of HeadVis, and return it.

        Each head has at most ``samples`` texts in each of ``intervals`` equal groups by its largest weight, of each
        token its ``top_k`` largest weights from ``threshold`` on. Each text goes through the model once more, and its
        weights wait in a temporary file until it is known for which heads it is chosen. Of a model with several stacks,
        the first that was surveyed is written. Source: Luger et al. 2026.
        """
        return exported(survey, Path(folder), (intervals, samples, top_k), threshold, on_texts, options)

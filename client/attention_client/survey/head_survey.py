"""``HeadSurvey``: the statistics of every head over many texts. T texts, N heads of all layers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Final, Literal, NamedTuple, Unpack, get_args

import numpy as np
from numpy.typing import NDArray

from attention_contract.arrow_tables import TableRows
from attention_contract.drawings import drawing_module
from attention_contract.errors import InvalidRequest
from attention_contract.reply_names import head_name, layer_name
from attention_contract.schemas.answers import Picture
from attention_contract.schemas.model_requests import ModelWeightsReply
from attention_contract.schemas.models import LayerRef
from attention_contract.schemas.picture_options import PictureFields, PictureFormat, PictureOptions
from attention_contract.schemas.weights import BY_KEY, NEEDS_NEEDLE, NEEDS_PAIRS, OF_SOME_ATTENTIONS, StatisticName
from attention_contract.validation import clip, validate

_ON_REQUEST: Final = {"classes", *OF_SOME_ATTENTIONS, *NEEDS_NEEDLE, *NEEDS_PAIRS, *BY_KEY}
SURVEYED: Final = [name for name in get_args(StatisticName) if name not in _ON_REQUEST]
"""The statistics of a survey by default: all of one number for each head that need no more than a text."""


class SurveyedHead(NamedTuple):
    """One head of a model."""

    layer: LayerRef
    head: int

    def __str__(self) -> str:
        return head_name(self.layer, self.head)


class Distribution(NamedTuple):
    """One statistic of one head over texts. Texts for which it is NaN are left out."""

    mean: float
    deviation: float
    """The standard deviation."""
    quantiles: tuple[float, float, float, float, float]
    """The least, the quartiles and the largest."""
    edges: list[float]
    """Bounds of equal bins from the least to the largest value."""
    counts: list[int]
    """Texts in each bin; one fewer than ``edges``."""


@dataclass(frozen=True)
class Passage:
    """One text, and what a head looks at in it."""

    text: int
    """Its index in the survey."""
    value: float
    """The statistic by which it was chosen."""
    reply: ModelWeightsReply
    """The head's weights ``[1, Lq, Lk]`` and top keys; ``reply.plot(view="lines")`` draws them."""


@dataclass(frozen=True, eq=False)
class HeadSurvey:
    """Every statistic of every head over many texts: 4 bytes a text, head and statistic, 8 of a model in float64."""

    model: str
    texts: Sequence[str]
    heads: Sequence[SurveyedHead]
    """All heads, in the order of their layers."""
    values: Mapping[str, NDArray[Any]]
    """``[T, N]`` by the name of each statistic, as in ``classes.names`` for a class and ``pairs.share`` for a number of
    pairs; their formulas are those of ``HeadStatistics``. ``received`` is that of the key that receives most."""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """Edits, and the answers or the sounds of the texts, which the passages are read with too."""
    text_field: Literal["text", "target"] = "text"
    """The field of a request that a text is sent as."""

    def __repr__(self) -> str:
        names = ", ".join(self.values)
        return clip(f"HeadSurvey of {self.model!r}: {len(self.texts)} texts, {len(self.heads)} heads; {names}", 400)

    def _repr_html_(self) -> str | None:
        """A map of layers × heads for each statistic, the mean over texts."""
        from attention_pictures.notebook.notebook_maps import html_of, statistic_maps  # noqa: PLC0415 - draws

        return html_of(statistic_maps(self._by_layer(self.values)))

    def plot(
        self, format: PictureFormat = "svg", *, statistics: Sequence[str] | None = None,  # noqa: A002
        **fields: Unpack[PictureFields],
    ) -> Picture:  # fmt: skip
        """Draw a map of layers × heads for each of these statistics, the means over texts; by default of all.

        Needs matplotlib: the extra ``plot``. The fields are those of ``PictureOptions``. Raises InvalidRequest.
        """
        options = validate(PictureOptions, dict(fields))
        drawing, layers = drawing_module("figures"), self._by_layer(self.values if statistics is None else statistics)
        title = f"{self.model} · mean over {len(self.texts)} texts"
        facts = {"model": self.model, "operation": "survey", "texts": len(self.texts)}
        picture: Picture = drawing.draw_layers(layers, title, options, drawing.media_type_of(format), facts)
        return picture

    def _by_layer(self, statistics: Iterable[str]) -> list[tuple[str, dict[str, NDArray[np.float64]]]]:
        """The means ``[H]`` of statistics by the names of the layers."""
        means = {name: self.means(name) for name in statistics}
        heads: dict[LayerRef, list[int]] = {}
        for at, head in enumerate(self.heads):
            heads.setdefault(head.layer, []).append(at)
        return [(layer_name(layer), {name: mean[own] for name, mean in means.items()}) for layer, own in heads.items()]

    def to_table(self) -> Any:
        """Return the values as a ``pyarrow.Table``: a row for each text and head. Needs the extra ``tables``.

        Columns: ``text``, the index of the text; ``layer``, a number, or text if the model has several stacks;
        ``head``; a column for each statistic. Raises ImportError.
        """
        texts, heads, rows = len(self.texts), len(self.heads), TableRows()
        places = {
            "text": np.repeat(np.arange(texts, dtype=np.int32), heads),
            "layer": np.tile(np.asarray([head.layer for head in self.heads]), texts),
            "head": np.tile(np.asarray([head.head for head in self.heads], np.int32), texts),
        }
        rows.add(texts * heads, places | {name: values.ravel() for name, values in self.values.items()})
        return rows.table()

    def index(self, layer: LayerRef, head: int) -> int:
        """Return the number of a head in ``heads``. Raises InvalidRequest."""
        wanted = SurveyedHead(layer, head)
        if wanted not in self.heads:
            raise InvalidRequest.at(
                "head", f"the survey has no head {wanted}; it has {self.heads[0]} to {self.heads[-1]}"
            )
        return self.heads.index(wanted)

    def of(self, statistic: str) -> NDArray[Any]:
        """Return the values ``[T, N]`` of a statistic. Raises InvalidRequest."""
        if statistic not in self.values:
            raise InvalidRequest.at("by", f"the survey has no {statistic!r}; it has {', '.join(self.values)}")
        return self.values[statistic]

    def means(self, statistic: str) -> NDArray[np.float64]:
        """Return the mean ``[N]`` of a statistic over texts; NaN of a head that has none."""
        values = self.of(statistic).astype(np.float64)
        known = np.isfinite(values)
        count = known.sum(0)
        means: NDArray[np.float64] = np.where(known, values, 0).sum(0) / np.where(count, count, np.nan)
        return means

    def ranked(self, by: str) -> list[SurveyedHead]:
        """Return all heads, the one with the largest mean of a statistic first."""
        return [self.heads[at] for at in np.argsort(-self.means(by), kind="stable")]

    def distribution(self, layer: LayerRef, head: int, statistic: str, *, bins: int = 20) -> Distribution:
        """Return the distribution of one statistic of one head over the texts."""
        values = self.of(statistic)[:, self.index(layer, head)].astype(np.float64)
        values = values[np.isfinite(values)]
        if not values.size:
            return Distribution(np.nan, np.nan, (np.nan,) * 5, [0.0] * (bins + 1), [0] * bins)
        least, *quartiles, largest = np.quantile(values, [0, 0.25, 0.5, 0.75, 1]).tolist()
        counts, edges = np.histogram(values, np.linspace(least, largest, bins + 1) if least < largest else bins)
        quantiles = (least, quartiles[0], quartiles[1], quartiles[2], largest)
        return Distribution(float(values.mean()), float(values.std()), quantiles, edges.tolist(), counts.tolist())

    def strongest(self, layer: LayerRef, head: int, by: str, count: int = 5) -> list[int]:
        """Return the texts for which a statistic of a head is largest, the largest first; equal ones in their order."""
        values = self.of(by)[:, self.index(layer, head)]
        order = np.argsort(np.where(np.isnan(values), np.inf, -values), kind="stable")
        return [int(at) for at in order[:count] if not np.isnan(values[at])]


def shipped_texts() -> list[str]:
    """Return the texts that ship: stories and lists by the grammar of ``training/tiny_text.py``, under this licence.

    The model that ships was not trained on them.
    """
    return texts_of(files("attention_client.survey").joinpath("texts.txt").read_text("utf-8"))


def texts_of(content: str) -> list[str]:
    """Return the texts of a file: one for each line that is not empty."""
    return [line.strip() for line in content.splitlines() if line.strip()]

"""The plan of a lens: the layers, the parts and the targets to read, checked, with what it costs."""

from collections.abc import Sequence
from dataclasses import dataclass

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.lenses import MAX_READ, LensPart, ModelLensRequest
from attention_service.models.answers.lenses.lens_file import LensFile
from attention_service.models.costs.lens_costs import LensCost, lens_cost
from attention_service.models.inputs.prediction_head import Places, places_of
from attention_service.models.loaded.checked_request import CheckedRequest, check_request
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.streams.residual_stream import ResidualStream
from attention_service.runtime.binding.selection import check_label_count


@dataclass(frozen=True)
class LensPlan:
    """A request for a lens, checked."""

    request: ModelLensRequest
    checked: CheckedRequest
    stream: ResidualStream
    positions: Places
    targets: list[int]
    file: LensFile | None = None
    """The fitted lens, for the kind ``jacobian``."""

    @property
    def of(self) -> Sequence[LensPart]:
        """The parts to read, each once."""
        return [*dict.fromkeys(self.request.of)]

    @property
    def by_part(self) -> bool:
        """True if contributions are asked for."""
        return any(part != "hidden" for part in self.of)

    @property
    def tells_rest(self) -> bool:
        """True if the other parts of the logits are told."""
        return self.by_part and bool(self.targets) and self.file is None

    @property
    def cost(self) -> LensCost:
        """The cost of the readings, beside that of the pass."""
        return lens_cost(
            self.stream.readout.loaded, self.of, self.checked.places, sum(map(len, self.positions)),
            top_k=self.request.top_k, targets=len(self.targets), matrices=self.file is not None,
        )  # fmt: skip


def plan_lens(
    loaded: LoadedModel,
    request: ModelLensRequest,
    stream: ResidualStream,
    file: LensFile | None = None,
) -> LensPlan:
    """Check a request. Raises InvalidRequest that names the field at fault."""
    if request.layers == "all":
        request = request.model_copy(update={"layers": [*stream.places]})
    checked = check_request(loaded, request, lambda place: place.key in stream.places)
    for index, place in enumerate(checked.places):
        if place.key not in stream.places:
            raise InvalidRequest.at(
                f"layers.{index}", f"layer {place.key} does not read the text whose next token is predicted"
            )
    tokens = checked.inputs.predicted
    check_label_count("labels", request.labels, tokens.length, "token")
    every = [[*range(tokens.length)]] * len(tokens.ids)
    positions = every if request.positions is None else places_of(request.positions, tokens)
    targets = [loaded.head.find(loaded.reader, target, f"targets.{at}", 0) for at, target in enumerate(request.targets)]
    plan = LensPlan(request, checked, stream, positions, targets, file)
    if file is not None:
        file.check(stream, checked.places)
    for index, part in enumerate(request.of):
        if part != "hidden":
            keys = [place.key for place in checked.places]
            stream.check_parts(keys, f"of.{index}", checked.adapter, heads=part == "heads")
    if (count := plan.cost.readings * (1 + request.top_k)) > MAX_READ:
        raise InvalidRequest.at(
            "positions" if request.positions else "top_k",
            f"expected at most {MAX_READ} readings and tokens named in them; got {count}. Ask for fewer positions, "
            "layers or tokens",
            limit=MAX_READ,
            actual=count,
        )
    return plan

"""The components at the beginnings and the ends of a request's paths."""

from collections.abc import Sequence
from dataclasses import dataclass

from attention_contract.base import valid
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.effects import MAX_EFFECTS
from attention_contract.schemas.analyses.model_paths import PathEnd, PathReceivers, PathSenders
from attention_service.models.loaded.checked_request import attention_of
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.attention_places import AttentionPlace


@dataclass(frozen=True, eq=False)
class Component:
    """One component of a stack of layers."""

    end: PathEnd
    layer: int
    """The place of its layer in the stack: −1 before it, the number of layers behind it."""
    place: AttentionPlace | None = None
    """The attention of its layer; None for embeddings and logits."""

    @property
    def order(self) -> tuple[int, bool]:
        """Its place in the stack: an attention, and what its layer adds beside it, which may read the attention's."""
        return self.layer, self.end.part == "mlps"

    def reaches(self, other: "Component") -> bool:
        """True if another component comes behind this one."""
        return self.order < other.order

    @property
    def attention(self) -> AttentionPlace:
        """The attention of its layer. Raises TypeError for embeddings and logits."""
        if self.place is None:
            raise TypeError(f"{self.end.part} have no layer")
        return self.place


@dataclass(frozen=True)
class PathEnds:
    """The beginnings and the ends of paths."""

    senders: list[Component]
    receivers: list[Component]

    @property
    def paths(self) -> list[int]:
        """The numbers of the paths whose end comes behind their beginning, those to one component together."""
        many, receivers = len(self.receivers), self.receivers
        pairs = [
            number * many + at
            for number, sender in enumerate(self.senders)
            for at, receiver in enumerate(receivers)
            if sender.reaches(receiver)
        ]

        def group(path: int) -> tuple[int, bool, str]:
            receiver = receivers[path % many]
            return *receiver.order, receiver.end.part

        return sorted(pairs, key=group)

    def of(self, path: int) -> tuple[Component, Component]:
        """The beginning and the end of a path."""
        sender, receiver = divmod(path, len(self.receivers))
        return self.senders[sender], self.receivers[receiver]


def path_ends(
    loaded: LoadedModel, senders: PathSenders, receivers: PathReceivers, layers: Sequence[AttentionPlace]
) -> PathEnds:
    """Return the ends of paths. Raises InvalidRequest that names the field at fault. ``layers``: the default ones."""
    begins = [Component(PathEnd(part="embeddings"), -1)] if "embeddings" in senders.parts else []
    begins += _in_layers(loaded, senders, [*senders.parts], layers, "from")
    ends = _in_layers(loaded, receivers, [*receivers.named_parts], layers, "to")
    if "logits" in receivers.named_parts:
        ends.append(Component(PathEnd(part="logits"), loaded.shared_layers.count))
    ends_ = PathEnds(begins, ends)
    if (count := len(begins) * len(ends)) > MAX_EFFECTS:
        raise InvalidRequest.at(
            "from",
            f"there are {count} pairs of components; at most {MAX_EFFECTS} are tried in one request. List fewer layers "
            "or heads",
            limit=MAX_EFFECTS,
            actual=count,
        )
    if not ends_.paths:
        raise InvalidRequest.at("to", "none of its components comes behind one of from; name a later layer")
    return ends_


def _in_layers(
    loaded: LoadedModel, named: PathSenders | PathReceivers, parts: Sequence[str], layers: Sequence[AttentionPlace],
    param: str,
) -> list[Component]:  # fmt: skip
    """The components in layers, layer by layer."""
    if named.layer is not None:
        several = isinstance(named.layer, list)
        keys = named.layer if isinstance(named.layer, list) else [named.layer]
        names = [f"{param}.layer.{index}" if several else f"{param}.layer" for index in range(len(keys))]
        layers = [attention_of(loaded, key, name) for key, name in zip(keys, names, strict=True)]
    components: list[Component] = []
    in_heads = [part for part in parts if part in {"heads", "q", "k", "v"}]
    most = max((_heads(place, part) for place in layers for part in in_heads), default=0)
    for index, head in enumerate(named.heads or ()):
        if head >= most:
            raise InvalidRequest.at(
                f"{param}.heads.{index}", f"{head} is out of range; there are {most} heads, numbered from 0", limit=most
            )
    for place in layers:
        at = loaded.shared_layers.first([place.key])
        for part in parts:
            if part in in_heads:
                own = range(_heads(place, part))
                heads = own if named.heads is None else [head for head in named.heads if head in own]
                ends = [{"part": part, "layer": place.key, "head": head} for head in heads]
            else:
                ends = [{"part": part, "layer": place.key}] if part == "mlps" else []
            components += [Component(valid(PathEnd, end), at, place) for end in ends]
    return components


def _heads(place: AttentionPlace, part: str) -> int:
    return place.widths.kv_heads if part in {"k", "v"} else place.widths.heads

"""The models whose paths are known: one stack of layers, each of which adds to the states that it is given."""

from typing import Final

from attention_contract.errors import InvalidRequest
from attention_service.models.answers.paths.path_ends import PathEnds
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.streams.residual_stream import ResidualStream

_PARAM: Final = "from"


def check_stack(loaded: LoadedModel) -> None:
    """Raise InvalidRequest for a model whose paths cannot be known, as its modules tell without a run."""
    name = type(loaded.model).__name__
    if not loaded.places:
        reason = f"{loaded.without_attention}, whose paths are not measured"
    elif loaded.attention.way == "observed":
        reason = f"{name} computes its attention itself, so what its heads send is not seen"
    elif loaded.head.predicts != "next":
        reason = f"{name} does not predict the next token, which is where paths are known to end"
    elif not loaded.shared_layers.count:
        reason = f"the layers of {name} are not one stack that hands on states alone"
    else:
        return
    raise InvalidRequest.at(_PARAM, f"{reason}; ask for the effects of a sweep of edits")


def check_paths_known(loaded: LoadedModel, stream: ResidualStream, ends: PathEnds) -> None:
    """Raise InvalidRequest for paths of a model whose layers do not add what is known to the states that they get."""
    check_stack(loaded)
    name, instead = type(loaded.model).__name__, "ask for the effects of a sweep of edits"
    if stream.several_streams or stream.without_parts:
        why = stream.without_parts or f"the states of {name} are several streams"
        raise InvalidRequest.at(_PARAM, f"{why}; {instead}")
    for sender in ends.senders:
        if sender.end.part == "heads" and stream.branches[sender.attention.key].projection is None:
            why = stream.branches[sender.attention.key].without_heads
            raise InvalidRequest.at("from.parts", f"layer {sender.attention.key}: {why}; take mlps or embeddings")
    for receiver in ends.receivers:
        part = receiver.end.part
        if part in {"q", "k", "v"}:
            loaded.runner.check((receiver.attention.key, part), "put", "to.parts", "take other parts")
    if (layer := stream.unsummed_layer) is not None:
        raise InvalidRequest.at(_PARAM, f"layer {layer} of {name} makes its states of more than sums; {instead}")
    begins = {min(receiver.layer, loaded.shared_layers.count - 1) for receiver in ends.receivers}
    if (first := loaded.first_unable(sorted(begins))) is not None:
        raise InvalidRequest.at(_PARAM, f"a pass of {name} cannot begin at its layer {first}; {instead}")

"""The probes that watch a generation: each of a state between modules, or of statistics of heads."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.probes import FeaturesRequest
from attention_contract.schemas.openai import AttentionOfTokens
from attention_service.models.answers.probes.token_features import plan_features
from attention_service.models.inputs.field_names import fields_named
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.streams.watched_probes import (
    Watched,
    WatchedHeads,
    watched_heads,
    watched_state,
)
from attention_service.runtime.binding.bound_statistics import check_unspoiled


def watch_of(
    loaded: LoadedModel, wanted: AttentionOfTokens, files: Mapping[str, str], new_tokens: int
) -> Sequence[Watched]:
    """Read the probes of a generation; ``files``: their paths by id; ``new_tokens``: the most that are generated.

    Raises InvalidRequest that names the field.
    """
    watched: list[Watched] = []
    for at, watch in enumerate(wanted.watch):
        param, path = f"attention.watch.{at}", Path(files[watch.probe])
        if watch.stop is not None and watch.stop.after >= new_tokens:
            raise InvalidRequest.at(
                f"{param}.stop.after", f"expected less than the {new_tokens} tokens that are generated at most"
            )
        heads = watched_heads(watch, path, param)
        if heads is not None:
            watched.append(_of_heads(loaded, heads, wanted, f"{param}.probe"))
            continue
        probe = watched_state(loaded, watch, path, param)
        if loaded.place_of(probe.layer).queries != _tokens(loaded):
            raise InvalidRequest.at(
                f"{param}.probe", f"layer {probe.layer} does not read the tokens that are generated"
            )
        watched.append(probe)
    return watched


def _tokens(loaded: LoadedModel) -> str:
    return "target" if loaded.reader.pairs else "text"


def _of_heads(loaded: LoadedModel, probe: WatchedHeads, wanted: AttentionOfTokens, param: str) -> WatchedHeads:
    """Find the layers of a probe of statistics, all of which attend from generated tokens."""
    with fields_named(of=param, layers=param, **{"of.statistics": param}):
        places = plan_features(loaded, FeaturesRequest(of=probe.of)).checked.places
    for place in places:
        if str(place.key) not in loaded.reported:
            reason = loaded.runner.refuses((place.key, "weights"), "report")
            raise InvalidRequest.at(param, f"layer {place.key}: {reason}; the probe reads statistics of its weights")
    numbers = sum(place.widths.heads if probe.of.heads is None else len(probe.of.heads) for place in places)
    width = numbers * len(probe.of.statistics)
    if len(probe.weights) != width:
        raise InvalidRequest.at(
            param, f"it has {len(probe.weights)} weights, and the statistics are {width}",
            expected=width, actual=len(probe.weights),
        )  # fmt: skip
    check_unspoiled(probe.of.statistics, chain.from_iterable(wanted.edits.values()), param)
    return replace(probe, places=places)

"""Recordings as tables for people."""

from collections.abc import Sequence

import numpy as np
from rich.text import Text

from attention_client.cli.display import new_table, number, print_out, scaled
from attention_client.cli.result_tables import ran
from attention_client.recording import Recording
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.recording_statistics import RecordingStatistics
from attention_contract.schemas.recordings import RecordedAttention, RecordingList
from attention_contract.schemas.rollout import RecordingRollout, RolloutReply
from attention_contract.schemas.similarity import ComparedPart, RecordingSimilarity, SimilarityReply
from attention_contract.schemas.weights import HeadStatistics

MOST_ROWS = 128
"""Rows of one table."""
MOST_CHARACTERS = 120
NEAREST = 3
"""Similar heads that one row names."""
_MEANINGS = {"jensen_shannon": "divergence in nats", "cka": "CKA"}

_COMPUTED = {
    "local": "in the model, without a server",
    "raw": "on the server, with the model's q, k and v",
    "modules": "on the server, in modules of the checkpoint",
}


def facts(recording: Recording) -> None:
    """Print the model, the text and the versions."""
    told = recording.facts
    sizes = ", ".join(f"{len(labels)} tokens of {stack}" for stack, labels in told.tokens.items())
    kinds = sorted({name.rpartition(".")[2] for name in recording.tensors})
    print_out(Text(f"{told.model}: {_short(told.text)}{f' → {_short(told.target)}' if told.target else ''}"))
    print_out(Text(f"{sizes}; {', '.join(kinds)}", style="dim"))
    if told.computed is not None:
        print_out(Text(f"attention: {_COMPUTED[told.computed]}", style="dim"))
    print_out(Text(", ".join(f"{name} {version}" for name, version in told.versions.items()), style="dim"))


def _short(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…"


def heads(recording: Recording, layer: str | None, head: int | None) -> None:
    """Print one row for each head: its entropy in nats, and the pair of tokens with its largest weight."""
    table = new_table("layer", "head", "entropy", "largest", "query → key", left=2)
    table.columns[-1].justify = "left"
    rows = 0
    for attention in _chosen(recording, layer):
        weights, entropy = recording.weights(attention.name).astype(np.float64), recording.entropy(attention.name)
        queries, keys = recording.tokens(attention.name)
        for at, label in _heads(attention, head):
            query, key = np.unravel_index(int(np.argmax(weights[at])), weights[at].shape)
            if (rows := rows + 1) <= MOST_ROWS:
                pair = Text(f"{queries[query]} → {keys[key]}")
                table.add_row(attention.name, label, number(entropy[at]), f"{weights[at, query, key]:.3f}", pair)
    print_out(table)
    _more(rows)


def top_keys(recording: Recording, layer: str | None, head: int | None, query: int | None, top_k: int) -> None:
    """Print one row for each head and token: its most attended keys with their weights."""
    table = new_table("layer", "head", "query", "token", "key (weight), the largest first", left=5)
    rows = 0
    for attention in _chosen(recording, layer):
        queries, _ = recording.tokens(attention.name)
        if query is not None and query >= len(queries):
            raise InvalidRequest(f"query: {query} is out of range; expected 0 to {len(queries) - 1}", param="query")
        for at, label in _heads(attention, head):
            for row in range(len(queries)) if query is None else [query]:
                if (rows := rows + 1) <= MOST_ROWS:
                    found = recording.top_keys(attention.name, at, row, top_k)
                    told = "  ".join(f"{token} ({weight:.3f})" for token, weight in found)
                    table.add_row(attention.name, label, str(row), Text(queries[row]), Text(told))
    print_out(table)
    _more(rows)


def _chosen(recording: Recording, layer: str | None) -> list[RecordedAttention]:
    """The attentions with weights, or the one that is meant. Raises InvalidRequest if there is none."""
    name = f"layers.{layer}" if layer is not None and layer.isdecimal() else layer
    found = [
        each
        for each in recording.attentions
        if f"{each.name}.weights" in recording.tensors and name in {None, each.name}
    ]
    if not found:
        known = ", ".join(each.name for each in recording.attentions)
        raise InvalidRequest(
            f"layer: no weights of {name or 'any layer'} are recorded; there is {known}", param="layer"
        )
    return found


def _heads(attention: RecordedAttention, head: int | None) -> list[tuple[int, str]]:
    if head is None:
        return list(enumerate(attention.heads))
    if head >= len(attention.heads):
        raise InvalidRequest(
            f"head: {head} is out of range; {attention.name} has heads 0 to {len(attention.heads) - 1}", param="head"
        )
    return [(head, attention.heads[head])]


def _more(rows: int) -> None:
    if rows > MOST_ROWS:
        print_out(Text(f"… and {rows - MOST_ROWS} more; choose a --layer, a --head or a --query", style="dim"))


def stored(reply: RecordingList) -> None:
    """Print one row for each stored recording."""
    table = new_table("id", "model", "text", "tokens", "layers", "heads", "taps", "bytes", "created", left=3)
    for each in reply.recordings:
        tokens = " + ".join(map(str, each.tokens.values()))
        sizes = (tokens, str(each.layers), str(each.heads), ", ".join(each.taps), scaled(each.bytes, "B"))
        created = each.created.strftime("%Y-%m-%d %H:%M")
        table.add_row(each.id, Text(each.model), Text(_short(each.text)), *sizes, created)
    print_out(table)
    print_out(Text(f"{scaled(reply.bytes, 'B')} of {scaled(reply.limit_bytes, 'B')}", style="dim"))
    if reply.damaged:
        print_out(Text(f"cannot be read, and may be deleted: {', '.join(reply.damaged)}"))


def statistics(reply: RecordingStatistics) -> None:
    """Print one row for each recorded head with its statistics."""
    shown: list[tuple[str, str, dict[str, float]]] = []
    for each in reply.attentions:
        found = {name: getattr(each.statistics, name) for name in HeadStatistics.model_fields if name != "classes"}
        found |= {f"class {name}": share for name, share in (each.statistics.classes or {}).items()}
        values = {name: value for name, value in found.items() if value is not None}
        for at, head in enumerate(each.heads):
            shown.append((each.name, head, {name: float(value[at]) for name, value in values.items()}))
    names = list(shown[0][2]) if shown else []
    table = new_table("layer", "head", *(name.replace("_", " ") for name in names), left=2)
    for layer, head, row in shown:
        table.add_row(layer, head, *(number(row[name]) for name in names))
    print_out(table)


def similarity(reply: RecordingSimilarity) -> None:
    """Print the most similar heads or layers of each one, itself left out."""
    table = new_table("layer", "head", f"most similar ({_MEANINGS[reply.measure]})", left=3)
    names = [_named(part) for part in reply.columns]
    for at, row in enumerate(reply.rows):
        own = reply.columns.index(row) if reply.id == reply.with_ and row in reply.columns else None
        table.add_row(row.layer, row.head or "", _most_similar(reply, at, names, own))
    print_out(table)
    print_out(Text(f"over {reply.tokens} tokens", style="dim"))
    ran(reply.ran)


def sent_similarity(reply: SimilarityReply, *, same: bool) -> None:
    """Print the most similar heads of each one; ``same``: of both sides, so that itself is left out."""
    table = new_table("head", f"most similar ({_MEANINGS[reply.measure]})", left=2)
    names = [str(column) for column in range(reply.values.shape[1])]
    for at in range(len(reply.values)):
        table.add_row(str(at), _most_similar(reply, at, names, at if same else None))
    print_out(table)
    ran(reply.ran)


def _most_similar(reply: SimilarityReply, at: int, names: Sequence[str], own: int | None) -> str:
    """The names of the most similar to one row, each with its value; ``own``: the column to leave out."""
    values = reply.values[at]
    closest = values if reply.measure == "jensen_shannon" else -values
    order = [column for column in closest.argsort(kind="stable") if column != own]
    return "  ".join(f"{names[column]} ({number(values[column])})" for column in order[:NEAREST])


def rollout(reply: RolloutReply, queries: Sequence[int] | None, labels: Sequence[str] | None = None) -> None:
    """Print the inputs that each token comes from, the largest value first."""
    tokens = reply.tokens if isinstance(reply, RecordingRollout) else labels
    named = [f"{at} {tokens[at]}" if tokens else str(at) for at in range(reply.values.shape[1])]
    table = new_table("token", "comes from", left=2)
    for query, row in zip(queries or range(len(reply.values)), reply.values, strict=True):
        order = (-row).argsort(kind="stable")[:NEAREST]
        table.add_row(named[query], "  ".join(f"{named[token]} ({number(row[token])})" for token in order))
    print_out(table)
    if isinstance(reply, RecordingRollout):
        print_out(Text(f"over {', '.join(reply.layers)}", style="dim"))
    ran(reply.ran)


def _named(part: ComparedPart) -> str:
    return part.layer if part.head is None else f"{part.layer} {part.head}"

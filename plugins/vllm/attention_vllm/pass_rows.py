"""The rows of a pass: which of its tokens belong to which request. It knows both of vLLM's model runners."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class PassRow(NamedTuple):
    """The part of a pass that belongs to one request."""

    name: str
    """The request, by vLLM's id."""
    at: int
    """Its place in the batch."""
    start: int
    stop: int
    """Its tokens among those of the pass."""
    length: int
    """Its keys, those of the pass included."""

    @property
    def first(self) -> int:
        """The position of its first query."""
        return self.length - (self.stop - self.start)


def rows_of(names: Sequence[str], runner: Any, metadata: Any) -> list[PassRow]:
    """Return the rows of these requests. Raises LookupError where they are not found, each once.

    Model runner V1 has the places in ``input_batch``. V2 numbers requests in ``req_states``, and the metadata that our
    builders make has the number of each row as ``attention_rows``.
    """
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    numbers = getattr(metadata, "attention_rows", None)
    places = _places_v1(runner) if numbers is None else _places_v2(names, runner, list(numbers))
    rows = []
    for name in names:
        at = places[name]
        if not at < len(starts) - 1 <= len(lengths):
            raise LookupError(f"row {at} is not in a pass of {len(starts) - 1} rows")
        rows.append(PassRow(name, at, starts[at], starts[at + 1], lengths[at]))
    return rows


def tokens_of(name: str, runner: Any) -> list[int] | None:
    """Return the tokens of a request, prompt and answer, of model runner V1; None where they are not known."""
    requests = getattr(runner, "requests", None)
    if requests is None or name not in requests or requests[name].prompt_token_ids is None:
        return None
    return [*requests[name].prompt_token_ids, *requests[name].output_token_ids]


def _places_v1(runner: Any) -> Mapping[str, int]:
    places: Mapping[str, int] = runner.input_batch.req_id_to_index
    return places


def _places_v2(names: Sequence[str], runner: Any, numbers: list[Any]) -> Mapping[str, int]:
    own = runner.req_states.req_id_to_index
    places = {}
    for name in names:
        if numbers.count(own[name]) != 1:
            raise LookupError("a request with several rows in one pass")
        places[name] = numbers.index(own[name])
    return places

"""Selected and edited parts of a request's taps: every index is checked against the sizes."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from attention_contract.errors import InvalidRequest, ShapeMismatch
from attention_contract.schemas.attention import AddedVector, Edit, Select, Tap, TokenLabels, WeightsSelect
from attention_contract.spec import AttentionSpec
from attention_contract.tensors import DTYPES
from attention_service.core.attention import has_implicit_weights, taps_of
from attention_service.core.edits import AXES
from attention_service.core.methods import approximation_of
from attention_service.core.problem import Selection
from attention_service.core.tensors import TORCH_DTYPES
from attention_service.runtime.binding.bound_request import BoundRequest, wrong_shape


def check_taps(taps: Sequence[Tap], spec: AttentionSpec) -> None:
    """Raise InvalidRequest for a tap that has no meaning with this spec."""
    for index, tap in enumerate(taps):
        check_tap(tap, spec, f"return.{index}")


def check_tap(tap: str, spec: AttentionSpec, param: str) -> None:
    """Raise InvalidRequest, for the field ``param``, if this tap has no meaning with this spec."""
    if tap == "output" or tap in taps_of(spec):
        return
    if tap in {"gate", "index_scores", "mlp", "router", "hidden", "embeddings"}:
        raise InvalidRequest.at(param, f"only whole models and their layers may have {tap}; leave it out")
    if approximation_of(spec) is not None:
        raise InvalidRequest.at(
            param,
            f"method {spec.method.name} has no {tap}: it passes {', '.join(taps_of(spec))} and output; take method "
            "exact, or compare with it by report_error in a forward request",
        )
    raise InvalidRequest.at(
        param, f"{tap} is the logarithm of a softmax's sum, and the normalizer is {spec.normalizer.name}; leave it out"
    )


def computes_pairs(spec: AttentionSpec, taps: Iterable[str], edits: Iterable[Edit]) -> bool:
    """True if implicit weights are computed for these taps and edits."""
    return has_implicit_weights(spec) and "weights" in {*taps, *(edit.tap for edit in edits)}


def bind_selection(select: Select | None, bound: BoundRequest) -> Selection:
    """Return the selected heads and queries. Raises InvalidRequest for an index that is out of range."""
    if select is None:
        return Selection()
    check_indices("select.heads", select.heads, bound.heads, "heads")
    check_indices("select.queries", select.queries, bound.queries, "queries")
    return Selection(as_tuple(select.heads), as_tuple(select.queries))


def bind_keys(select: Select | None, bound: BoundRequest) -> tuple[int, ...] | None:
    """Return the selected keys of the weights; None for all. Raises InvalidRequest for an index out of range."""
    if not isinstance(select, WeightsSelect):
        return None
    check_indices("select.keys", select.keys, bound.keys, "keys")
    return as_tuple(select.keys)


def check_indices(param: str, indices: Sequence[int] | None, size: int, what: str) -> None:
    """Raise InvalidRequest for an index beyond the size."""
    if indices is not None and (largest := max(indices)) >= size:
        raise InvalidRequest.at(
            param, f"{largest} is out of range; there are {size} {what}, numbered from 0", limit=size
        )


def as_tuple(indices: list[int] | None) -> tuple[int, ...] | None:
    """Return indices as a tuple; None stays None, and selects all."""
    return None if indices is None else tuple(indices)


def check_labels(labelled: TokenLabels, bound: BoundRequest) -> None:
    """Raise ShapeMismatch if there are labels, but not one for each token."""
    check_label_count("labels", labelled.labels, bound.keys - bound.added_keys, "key")
    check_label_count("query_labels", labelled.query_labels, bound.queries, "query")


def check_label_count(param: str, labels: Sequence[str] | None, expected: int, of: str) -> None:
    """Raise ShapeMismatch unless there is a label for each, or none at all."""
    if labels is not None and len(labels) != expected:
        raise ShapeMismatch.at(
            param,
            f"expected {expected} labels, one for each {of}; got {len(labels)}",
            expected=[expected],
            actual=[len(labels)],
        )


def check_edits(edits: Sequence[Edit], bound: BoundRequest) -> None:
    """Raise InvalidRequest if an edit names a missing index, or has a value that does not fit."""
    for index, edit in enumerate(edits):
        check_edit(edit, bound, f"edits.{index}")


def check_edit(edit: Edit, bound: BoundRequest, param: str) -> None:
    """Check one edit, the field ``param``, as ``check_edits`` does."""
    check_tap(edit.tap, bound.spec, f"{param}.tap")
    check_edit_sizes(edit, bound, param)


def check_edit_sizes(edit: Edit, bound: BoundRequest, param: str) -> None:
    """Check the indices and the value of an edit of a tap that the attention has."""
    heads = bound.kv_heads if edit.tap in {"k", "v"} else bound.heads
    sizes: dict[str, tuple[list[int] | None, int]] = {
        "heads": (edit.heads, heads),
        "queries": (edit.queries, bound.queries),
        "keys": (edit.keys, bound.keys),
        "experts": (edit.experts, bound.output_shape[-1]),
    }
    has = AXES[edit.tap]
    part: list[int] = [bound.batch]
    for axis, (indices, size) in sizes.items():
        if axis not in has:
            if indices is not None:
                raise InvalidRequest.at(f"{param}.{axis}", f"{edit.tap} has no {axis}; leave them out")
            continue
        check_indices(f"{param}.{axis}", indices, size, axis)
        if edit.tensor is not None and indices is not None and len(set(indices)) < len(indices):
            raise InvalidRequest.at(
                f"{param}.{axis}",
                "an index is listed twice, so the tensor would have two numbers for it; list each once",
            )
        part.append(size if indices is None else len(indices))
    widths: dict[str, int] = {
        "q": bound.head_dim, "k": bound.key_dim, "v": bound.value_dim, "context": bound.value_dim,
        "output": bound.output_shape[-1], "mlp": bound.output_shape[-1], "hidden": bound.output_shape[-1],
        "embeddings": bound.output_shape[-1], "gate": bound.value_dim,
    }  # fmt: skip
    part += [widths[edit.tap]] if edit.tap in widths else []
    if edit.tap == "output" and bound.module is None and not bound.layout.merged:
        part.insert(1, bound.heads)
    if isinstance(edit.add, AddedVector):
        raise InvalidRequest.at(f"{param}.add", "vectors belong to whole models; send the numbers that are added")
    for name, tensor in (("value", edit.value), ("add", edit.add)):
        if tensor is not None and not broadcasts(tensor.shape, part):
            raise wrong_shape(f"{param}.{name}", f"a shape that broadcasts to {part}", tensor)
    if edit.add is not None and not np.isfinite(edit.add).all():
        raise InvalidRequest.at(f"{param}.add", "expected finite numbers; got NaN or infinity")
    most = torch.finfo(TORCH_DTYPES[bound.dtype]).max
    for name, given in (("set", edit.set), ("value", edit.value), ("add", edit.add)):
        if given is None or np.can_cast(np.asarray(given).dtype, DTYPES[bound.dtype]):
            continue
        numbers = np.abs(np.asarray(given))
        if (largest := float(numbers.max(initial=0, where=np.isfinite(numbers)))) > most:
            raise InvalidRequest.at(
                f"{param}.{name}", f"{largest:g} is too large for {bound.dtype}, in which this is computed"
            )


def broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    """True if a tensor of this shape broadcasts to the target."""
    if len(shape) > len(target):
        return False
    return all(size in {1, want} for size, want in zip(shape[::-1], target[::-1], strict=False))

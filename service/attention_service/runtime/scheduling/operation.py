"""An operation on the device in three steps: upload the request's tensors, launch the computation, collect the reply.

``launch`` reads and makes device tensors only, so that it also runs on meta tensors, which have shapes and no numbers.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attention_contract.errors import InvalidRequest
from attention_service.core.edits import BoundEdit
from attention_service.core.tensors import all_to_host, assumed_finite, assumed_sums, to_numpy

Fields = dict[str, Any]
"""The fields of a reply, but for ``ran``."""
Results = dict[str, Any]
"""The fields of a reply with device tensors in place of arrays."""


@dataclass(slots=True)
class Uploaded:
    """The tensors of one request on the device."""

    tensors: dict[str, Tensor]
    """The request's tensors by field name. ``launch`` empties it, so that memory is free as soon as possible."""
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    """The parameters of the module, or the learned tensors of a raw request."""
    edits: Sequence[BoundEdit] = ()


class DeviceOperation(ABC):
    """One request, or several joined, ready to run on a device."""

    __slots__ = ()

    @abstractmethod
    def upload(self, device: torch.device) -> Uploaded:
        """Copy the request's arrays to the device. Raises InvalidTensor if a number overflows the computing dtype."""

    @abstractmethod
    def launch(self, uploaded: Uploaded) -> Results:
        """Compute on the device. The results have the reply's dtypes and layout."""

    def collect(self, results: Results) -> Fields:
        """Copy the results to the host."""
        return on_host(results)


class _NotFinite(Exception):
    """Numbers that were taken for finite are not."""


def execute(operation: DeviceOperation, device: torch.device) -> Fields:
    """Run all three steps and wait for the result.

    On a GPU, whose numbers would have to be waited for, they are taken for finite, and looked at as the result comes;
    the steps run again if some are not.
    """
    if device.type == "cuda":
        with assumed_finite() as sums, suppress(_NotFinite):
            return _looked_at(operation, device, sums)
    return operation.collect(operation.launch(operation.upload(device)))


def _looked_at(operation: DeviceOperation, device: torch.device, sums: list[Tensor]) -> Fields:
    try:
        fields = operation.collect(operation.launch(operation.upload(device)))
    except InvalidRequest as fault:  # perhaps of what comes of numbers that are not finite
        if sums:
            raise _NotFinite from fault
        raise
    _look(all_to_host(sums))
    return fields


def _look(sums: Sequence[Tensor]) -> None:
    if not all(map(math.isfinite, sums)):
        raise _NotFinite


def on_host(results: Results) -> Fields:
    """The results with numpy arrays in place of tensors; other values stay as they are. A GPU is waited for once."""
    if (sums := assumed_sums()) is None:
        return {name: _on_host(value) for name, value in results.items()}
    tensors = [*_tensors(results)]
    hosts = all_to_host([*tensors, *sums])
    _look(hosts[len(tensors) :])
    sums.clear()
    arriving = iter(hosts)
    return {name: _on_host(value, arriving) for name, value in results.items()}


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in the order in which ``_on_host`` meets them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | dict):
        for member in value.values() if isinstance(value, dict) else value:
            yield from _tensors(member)


def _on_host(value: Any, hosts: Iterator[Tensor] | None = None) -> Any:
    if isinstance(value, Tensor):
        return to_numpy(value if hosts is None else next(hosts))
    if isinstance(value, list):
        return [_on_host(member, hosts) for member in value]
    return {name: _on_host(member, hosts) for name, member in value.items()} if isinstance(value, dict) else value

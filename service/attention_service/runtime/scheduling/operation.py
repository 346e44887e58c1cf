"""An operation on the device in three steps: upload the request's tensors, launch the computation, collect the reply.

``launch`` reads and makes device tensors only, so that it also runs on meta tensors, which have shapes and no numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from attention_service.core.edits import BoundEdit
from attention_service.core.tensors import to_numpy

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


class Operation(Protocol):
    """One request, or several joined, ready to run on a device."""

    def upload(self, device: torch.device) -> Uploaded:
        """Copy the request's arrays to the device. Raises InvalidTensor if a number overflows the computing dtype."""

    def launch(self, uploaded: Uploaded) -> Results:
        """Compute on the device. The results have the reply's dtypes and layout."""

    def collect(self, results: Results) -> Fields:
        """Copy the results to the host."""


def execute(operation: Operation, device: torch.device) -> Fields:
    """Run all three steps and wait for the result."""
    return operation.collect(operation.launch(operation.upload(device)))


def on_host(results: Results) -> Fields:
    """The results with numpy arrays in place of tensors; other values stay as they are."""
    return {name: _on_host(value) for name, value in results.items()}


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return to_numpy(value)
    if isinstance(value, list):
        return [_on_host(each) for each in value]
    return on_host(value) if isinstance(value, dict) else value

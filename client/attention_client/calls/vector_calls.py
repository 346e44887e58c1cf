"""Steering vectors of whole models: fitting, storing, exporting and removing them."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Unpack, cast

from attention_client.array_likes import TensorLike
from attention_client.calls.base import Call, CallOptions, call
from attention_client.calls.method import Flow, Group, WayT, method
from attention_contract import operations
from attention_contract.errors import InvalidRequest
from attention_contract.operations import Operation
from attention_contract.schemas.analyses.vectors import (
    GgufFile,
    VectorInfo,
    VectorList,
    VectorMethod,
    VectorPosition,
)
from attention_contract.wire import GGUF


class Vectors(Group[WayT]):
    """Calls about steering vectors."""

    @method
    def fit(
        self, model: str, positive: Sequence[str] | Sequence[Mapping[str, str]] | None = None,
        negative: Sequence[str] | Sequence[Mapping[str, str]] | None = None, *, position: VectorPosition = "last",
        method: VectorMethod = "mean_difference", layers: Literal["all"] | Sequence[int | str] = "all",
        directions: Mapping[str, TensorLike] | None = None, gguf: bytes | str | PathLike[str] | None = None,
        wait_s: float | None = None, **options: Unpack[CallOptions],
    ) -> Call[VectorInfo]:  # fmt: skip
        """Fit a steering vector that leads from negative texts to positive ones, and wait until it is there.

        ``position`` is the state of each text: that of its last token, the mean over its tokens, or over those of its
        answer, of texts as ``{"text", "answer"}``. ``method``: the difference of means, or ``pca``, the first principal
        component of the differences of pairs. ``directions`` by layer were made elsewhere; ``gguf`` is the file of a
        control vector, or its path. Edits add the vector by ``{"vector": id, "scale": 4}``, generations by ``steer``.
        With ``wait_s``, the reply comes after so many seconds and tells the ``progress``. Raises InvalidRequest, and
        Conflict if ``delete`` stopped the fit.
        """
        given = {name: value for name, value in locals().items() if name != "gguf"}
        return call(operations.fit_vector, given if gguf is None else given | {"gguf": _file(gguf)})

    @method
    def list(self, model: str, **options: Unpack[CallOptions]) -> Call[VectorList]:
        """List the steering vectors of a model, and those that are being fitted."""
        return call(operations.list_vectors, locals())

    @method
    def get(self, id: str, **options: Unpack[CallOptions]) -> Call[VectorInfo]:  # noqa: A002
        """Describe a steering vector, with its ``directions`` by layer. Raises VectorNotFound."""
        return call(operations.get_vector, locals())

    @method
    def export(self, id: str, **options: Unpack[CallOptions]) -> Flow[bytes]:  # noqa: A002
        """Return a steering vector as a GGUF file, which llama.cpp and repeng read. It has no direction of layer 0.

        Raises VectorNotFound, and InvalidRequest for a vector of layer 0 alone.
        """
        whole = replace(cast("Operation[Any]", operations.get_vector), reply=GgufFile)
        file: GgufFile = yield replace(call(whole, {"id": id, "options": options}), headers={"Accept": GGUF})
        return file.data

    @method
    def delete(self, id: str, **options: Unpack[CallOptions]) -> Call[None]:  # noqa: A002
        """Remove a steering vector, or stop its fit. Raises VectorNotFound."""
        return call(operations.delete_vector, locals())


def _file(given: bytes | str | PathLike[str]) -> dict[str, str]:
    """Return a file as a request has it. Raises InvalidRequest for one that cannot be read."""
    if isinstance(given, bytes):
        return {"base64": b64encode(given).decode()}
    path = Path(given)
    try:
        return {"base64": b64encode(path.read_bytes()).decode()}
    except OSError as fault:
        raise InvalidRequest.at("gguf", f"{path} cannot be read: {fault.strerror}") from None

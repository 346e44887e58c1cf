"""Models to bytes and back, in the two media types.

``application/json`` carries tensors in one of the forms of ``tensors``. ``application/vnd.safetensors`` carries them as
they lie in memory, in a safetensors file whose tensors are named by their field (dotted when nested: ``mask``,
``edits.0.value``, ``parameters.q_proj.weight``). The rest of the model is JSON text in one metadata entry, ``request``
or ``reply``. Numbers without a dtype (``Untyped``) are nested lists in both.
"""

from typing import Final, TypeVar

from pydantic import BaseModel

from attention_contract.arrow_tables import TableForm
from attention_contract.json_reading import TextSize, from_json, read_json
from attention_contract.json_writing import to_json
from attention_contract.tensor_files import (
    MAX_HEADER,
    Entry,
    from_safetensors,
    to_safetensors,
)
from attention_contract.tensors import Encoding
from attention_contract.validation import validate

VERSION_HEADER: Final = "attention-version"
"""The header of every response that tells the server's version."""
JSON: Final = "application/json"
SAFETENSORS: Final = "application/vnd.safetensors"
EVENTS: Final = "text/event-stream"
"""Server-sent events: objects of OpenAI's API, as they are made."""
PLAIN: Final = "text/plain"
GGUF: Final = "application/vnd.gguf"
"""Files of ggml: of steering vectors."""
MEDIA_TYPES: Final = (JSON, SAFETENSORS)
PICTURES: Final = {"image/svg+xml": "svg", "image/png": "png", "application/pdf": "pdf"}
"""Media types of replies that can be drawn, and the ending of their files."""
TABLES: Final[dict[str, TableForm]] = {
    "application/vnd.apache.parquet": "parquet", "application/vnd.apache.arrow.file": "arrow",
    "application/vnd.apache.arrow.stream": "stream",
}  # fmt: skip
"""Media types of replies that have rows, and the form of the table."""
ModelT = TypeVar("ModelT", bound=BaseModel)


def from_body(
    model: type[ModelT], body: bytes | memoryview, media_type: str, entry: Entry, size: TextSize | None = None
) -> ModelT:
    """Read a model from a body of one of the two media types. ``size``: of a JSON text that was measured before."""
    if media_type == SAFETENSORS:
        return from_safetensors(body, entry, model)
    return validate(model, read_json(body, model, size), by_name=False)


def to_body(model: BaseModel, media_type: str, entry: Entry, encoding: Encoding = "list") -> list[bytes | memoryview]:
    """The pieces of a model's body in one of the two media types."""
    return to_safetensors(model, entry) if media_type == SAFETENSORS else [to_json(model, encoding)]


__all__ = [
    "EVENTS", "GGUF", "JSON", "MAX_HEADER", "MEDIA_TYPES", "PICTURES", "PLAIN", "SAFETENSORS", "TABLES", "from_body",
    "from_json", "from_safetensors", "to_body", "to_json", "to_safetensors",
]  # fmt: skip

"""The file of one recording: its name, and its description by its header alone."""

import hashlib
import re
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from attention_contract.errors import Unreadable
from attention_contract.recording_tensors import place_of
from attention_contract.schemas.recordings import (
    RecordedTensor,
    RecordingFacts,
    RecordingFile,
    RecordingInfo,
    RecordingSummary,
    read_facts,
)
from attention_contract.tensor_files import DTYPE_NAMES
from attention_contract.tensors import DTYPES, dtype_name
from attention_service.modules.store_files import check_regular, open_tensors

SUFFIX: Final = ".safetensors"
RECORDING_ID: Final = re.compile(r"[0-9a-f]{32}")
_TEXT: Final = 200
"""Characters of a text in a list."""


def content_id(recording: RecordingFile, owner: str | None) -> str:
    """A hash of owner, facts, and name, dtype, shape and bytes of each tensor, in whatever order they came."""
    facts = recording.model_dump(mode="json", include=set(RecordingFacts.model_fields))
    content = hashlib.sha256(orjson.dumps(facts, option=orjson.OPT_SORT_KEYS))
    if owner is not None:
        content.update(orjson.dumps(owner))
    for name, array in sorted(recording.tensors(), key=itemgetter(0)):
        content.update(orjson.dumps([name, dtype_name(array), array.shape]))
        content.update(np.ascontiguousarray(array, DTYPES[dtype_name(array)]).reshape(-1).view(np.uint8).data)
    return content.hexdigest()[:32]


def recordings_in(folder: Path) -> Iterator[Path]:
    """The files of a folder that have the name of a recording."""
    return (path for path in folder.glob(f"*{SUFFIX}") if RECORDING_ID.fullmatch(path.stem))


def _recorded(name: str, part: Any) -> RecordedTensor:
    code = part.get_dtype()
    if code not in DTYPE_NAMES:
        raise Unreadable(f"tensor {name[:80]!r} has dtype {code}; expected one of {', '.join(DTYPE_NAMES)}")
    return RecordedTensor(name=name, dtype=DTYPE_NAMES[code], shape=list(part.get_shape()))


def described(path: Path, size: int, recording: str = "") -> RecordingInfo:
    """Read the header of a file of this size, by default that of the recording of its name.

    Raises Unreadable, SafetensorError and OSError.
    """
    check_regular(path, size)
    with open_tensors(path, framework="np") as file:
        tensors = [_recorded(name, file.get_slice(name)) for name in file.keys()]  # noqa: SIM118
        text = (file.metadata() or {}).get(RecordingFile.file_entry)
    facts = read_facts(text, ((tensor.name, tuple(tensor.shape)) for tensor in tensors))
    stated = {field: getattr(facts, field) for field in RecordingFacts.model_fields}
    return RecordingInfo(**stated, id=recording or path.stem, bytes=size, tensors=tensors)


def summary(info: RecordingInfo) -> RecordingSummary:
    """A recording in a list, without its tensors."""
    places = [place for tensor in info.tensors if (place := place_of(tensor.name)) is not None]
    return RecordingSummary(
        id=info.id,
        model=info.model,
        text=info.text[:_TEXT],
        created=info.created,
        tokens={stack: len(labels) for stack, labels in info.tokens.items()},
        layers=len({(place.stack, place.number) for place in places if place.number is not None}),
        heads=max((len(attention.heads) for attention in info.attentions), default=0),
        taps=sorted({place.kind for place in places}),
        bytes=info.bytes,
    )

"""The messages of ``WS /v1/sessions/stream``: a binary frame is a safetensors file, a text frame is JSON.

A request is one step, or many; a reply has the form of its request and is a step's reply, those of many steps, or the
problem document of one.
"""

from collections.abc import Callable
from typing import Any, Final, TypeVar

from attention_contract.base import WireModel
from attention_contract.errors import AttentionError, InvalidRequest
from attention_contract.json_reading import TextSize, check_text, measure_text, read_json
from attention_contract.json_writing import to_json
from attention_contract.schemas.sessions import (
    MAX_SESSION_ID,
    SessionStep,
    StepProblem,
    StepReply,
    StepsReply,
    StepsRequest,
)
from attention_contract.tensor_files import Entry, either_from_safetensors, to_safetensors
from attention_contract.tensors import Encoding
from attention_contract.validation import validate

Frame = bytes | bytearray | memoryview | str
"""A binary frame, or a text frame as it came."""
ModelT = TypeVar("ModelT", bound=WireModel)
MAX_FRAME_BYTES: Final = 2**24
"""The largest message in bytes. A longer step travels in a request of its own."""
MAX_UNANSWERED: Final = 64
"""The most messages of one connection that wait for their reply; then the server stops reading."""


def request_from_frame(frame: Frame, size: TextSize | None = None) -> SessionStep | StepsRequest:
    """Read the request of a frame. ``size``: of a text that was measured and checked before.

    Raises Unreadable or BodyTooLarge for the whole, InvalidRequest or InvalidTensor for a field at fault; its fact
    ``session`` is the session of a step, if the frame names one.
    """
    sessions: list[Any] = []

    def choose(data: dict[str, Any]) -> type[SessionStep | StepsRequest]:
        sessions.append(data.get("session"))
        return StepsRequest if "steps" in data else SessionStep

    try:
        return _from_frame(frame, "request", choose, SessionStep, size)
    except InvalidRequest as error:
        if sessions and isinstance(sessions[0], str) and len(sessions[0]) <= MAX_SESSION_ID:
            error.facts["session"] = sessions[0]
        raise


def reply_from_frame(frame: Frame) -> StepReply | StepsReply | StepProblem:
    """Read the reply of a frame. Raises what ``request_from_frame`` raises."""
    return _from_frame(frame, "reply", _reply_of, StepReply)


def to_frame(model: WireModel, *, text: bool, entry: Entry, encoding: Encoding = "list") -> bytes | str:
    """Write a model as a text frame, or as a binary one."""
    return to_json(model, encoding).decode() if text else b"".join(to_safetensors(model, entry))


def problem_of(error: AttentionError, session: str | None) -> StepProblem:
    """The problem document of one step. ``session`` None: that which the error tells of, if any."""
    return StepProblem.model_validate(error.to_problem() | ({} if session is None else {"session": session}))


def _reply_of(data: dict[str, Any]) -> type[StepReply | StepsReply | StepProblem]:
    return StepsReply if "steps" in data else StepProblem if "code" in data else StepReply


def _from_frame(
    frame: Frame, entry: Entry, choose: Callable[[dict[str, Any]], type[ModelT]], single: type[WireModel],
    size: TextSize | None = None,
) -> ModelT:  # fmt: skip
    """``single``: the model whose tensor fields are read straight into arrays."""
    body = frame.encode() if isinstance(frame, str) else memoryview(frame)
    if size is None:
        if not isinstance(frame, str):
            return either_from_safetensors(body, entry, choose)
        size = measure_text(body)
        check_text(size)
    data = read_json(body, single, size)
    return validate(choose(data), data, by_name=False)

"""The repository of the protocol: its index, and modules that are made and removed by it."""

from typing import Any

from pydantic import Field

from attention_contract.base import WireModel
from attention_contract.errors import Conflict, InvalidRequest, Unreadable
from attention_contract.json_reading import from_json
from attention_contract.schemas.modules import CreateModule, ImportModule
from attention_contract.validation import clip, validate
from attention_service.api.doors.oip.model_questions import RAW, VERSION, Model, models_of
from attention_service.api.handlers import RequestContext
from attention_service.modules.resident import Module


class IndexRequest(WireModel):
    """The body of a request for the repository's index."""

    ready: bool = False
    """Only the models that are ready: all are."""


class LoadRequest(WireModel):
    """The body of a request to load or to unload a model."""

    parameters: dict[str, Any] | None = Field(default=None, max_length=64)

    def parameter(self, known: str) -> Any:
        """The value of the one known parameter. Raises InvalidRequest for another one, a file among them."""
        given = self.parameters or {}
        for name in given:
            if name.startswith("file:"):
                advice = "files are not taken from requests; put them into the model repository"
                raise InvalidRequest.at(f"parameters.{clip(name)}", advice)
            if name != known:
                raise InvalidRequest.at(f"parameters.{clip(name)}", f"there is no such parameter; expected {known}")
        return given.get(known)


def model_names(call: RequestContext) -> list[str]:
    """The names of all models."""
    modules = [module.name for module in call.engine.modules.list().modules]
    return [model.name for module in (*modules, RAW) for model in models_of(module)]


def index(call: RequestContext) -> list[dict[str, str]]:
    """Every model. All are ready."""
    state = {"version": VERSION, "state": "READY", "reason": ""}
    return [{"name": name} | state for name in model_names(call)]


def check_is_module(model: Model) -> None:
    """Raise InvalidRequest for a question about a module, which is neither loaded nor unloaded alone."""
    if model.question:
        raise InvalidRequest.at("name", f"{clip(model.name)!r} is a question about a module; name the module alone")


def module_request(model: Model, config: Any) -> CreateModule | ImportModule:
    """The native request for the module that ``config`` describes, in memory alone unless it says otherwise."""
    if not isinstance(config, str) or model.module is None:
        expected = "the JSON text of a body of POST /v1/modules or /v1/modules/import, for a module"
        raise InvalidRequest.at("parameters.config", f"expected {expected}")
    try:
        data = {"durable": False} | from_json(config.encode(), "the text") | {"name": model.module}
    except Unreadable as fault:
        raise InvalidRequest.at("parameters.config", fault.detail) from None
    if "checkpoint" in data:
        return validate(ImportModule, data, by_name=False)
    return validate(CreateModule, data, by_name=False)


def check_may_go(module: Module | None) -> None:
    """Raise Conflict for raw attention, and for a module that the store keeps."""
    if module is None:
        raise Conflict("raw attention is always there; unload what was loaded with a config", param="name")
    if module.durable:
        raise Conflict(
            f"the store keeps the module {module.name!r}, and unloading would lose it for good, as DELETE "
            f"/v1/modules/{module.name} does; unload what was loaded with a config",
            param="name",
        )

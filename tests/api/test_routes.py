"""The table of routes answers every operation of the contract, and nothing else."""

import inspect

from attention_contract.operations import OPERATIONS
from attention_service.api.doors.openai.openai_handlers import OPENAI_HANDLERS
from attention_service.api.endpoint import RequestContext
from attention_service.api.handlers import HANDLERS
from attention_service.api.routes import make_routes


def test_every_operation_has_a_handler_and_every_handler_an_operation():
    handlers = HANDLERS | OPENAI_HANDLERS
    assert sorted(handlers) == sorted(operation.name for operation in OPERATIONS)
    assert sorted(route.name for route in make_routes()) == sorted(handlers)


def test_a_handler_takes_the_call_and_the_body():
    for name, handler in (HANDLERS | OPENAI_HANDLERS).items():
        assert len(inspect.signature(handler).parameters) == 2, name
    assert {"engine", "settings", "headers", "path", "media_type", "came", "pin", "deadline"} == set(
        RequestContext.__slots__
    )


def test_every_part_of_a_path_that_names_something_is_documented():
    for route in make_routes():
        documented = {each.name for each in route.dependant.path_params}
        assert documented == set(route.param_convertors), route.name

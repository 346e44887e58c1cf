"""Options of the command against the contract's models: every request field can be set at the shell."""

import pytest
from typer.main import get_command

from attention_client.cli import app
from attention_contract import operations
from attention_contract.schemas.complexity import Shape
from attention_contract.schemas.modules import ModuleConfig

REQUESTS = {
    "forward": ["forward", "raw_forward"],
    "weights": ["weights", "raw_weights"],
    "attribution": ["attribution", "raw_attribution"],
    "gradients": ["gradients", "raw_gradients"],
    "complexity": ["complexity", "raw_complexity"],
    "hopfield": ["hopfield_retrieve"],
    "circuits": ["circuits"],
    "effects": ["effects", "raw_effects"],
    "rollout": ["rollout"],
    "similarity": ["similarity"],
    "recordings rollout": ["recording_rollout"],
    "recordings similarity": ["recording_similarity"],
    "modules create": ["create_module"],
    "modules replace": ["replace_parameters"],
    "modules parameters": ["get_parameter"],
    "import": ["import_module"],
    "sessions open": ["open_session"],
}
MODELS = {command: [getattr(operations, name).request for name in names] for command, names in REQUESTS.items()}
MODELS["modules create"].append(ModuleConfig)
MODELS["complexity"].append(Shape)
SPREAD = {
    "select": {"head", "row"},
    "shape": {"batch", "queries", "keys", "past"},
    "heads": {"head"},
    "queries": {"row"},
    "parts": {"part"},
    "layers": {"layer"},
    "return_differences": {"output"},
    "sweep": {"edit"},
    "with_layers": {"with_layer"},
    "measure": {"cka"},
}
"""Fields whose parts have an option each."""
WITHOUT = {"encoding": "the form of a reply in JSON, which the client chooses by itself"}


def options(command):
    """Return the names of every option and argument of a command, without dashes."""
    found = get_command(app)
    for part in command.split():
        found = found.commands[part]
    opts = {name.lstrip("-") for parameter in found.params for name in (*parameter.opts, parameter.name)}
    return opts | {name.replace("-", "_") for name in opts}


@pytest.mark.parametrize("command", MODELS)
def test_every_request_field_has_an_option_of_its_name(command):
    known = options(command)
    fields = {field.alias or name for model in MODELS[command] for name, field in model.model_fields.items()}
    missing = {
        field for field in fields - WITHOUT.keys() if field not in known and not SPREAD.get(field, {field}) <= known
    }
    assert missing == set()


def test_one_name_means_one_thing_in_every_command():
    """An option that several commands have has the same placeholder and the same short name in all of them."""
    kinds = {}
    two_meanings = {
        "--beta",  # a file for the delta rules; the inverse temperature of Hopfield retrieval
        "--layer",  # the number of a checkpoint's layer; the name of a recorded one
    }
    for command in MODELS:
        found = get_command(app)
        for part in command.split():
            found = found.commands[part]
        for parameter in found.params:
            if parameter.opts[0].startswith("--"):
                kinds.setdefault(parameter.opts[0], set()).add((parameter.metavar, tuple(parameter.opts[1:])))
    assert {name: found for name, found in kinds.items() if len(found) > 1}.keys() == two_meanings

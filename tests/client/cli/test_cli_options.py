"""Options of the command: they are the fields of the requests."""

import re

import pytest
from typer.main import get_command

from attention_client.cli import app
from attention_client.cli.arguments.model_options import options_of
from attention_client.cli.commands.command_table import COMMANDS
from attention_contract.descriptions import described
from attention_contract.schemas.modules import ImportModule
from attention_contract.schemas.sessions import OpenSession
from attention_contract.schemas.weights import RawWeightsRequest

SENDING = [*COMMANDS, "modules create", "modules parameters", "import"]
"""Commands whose options are fields of a request."""


def parameters(command):
    """Return the parameters of a command by the names of their options."""
    found = get_command(app)
    for part in command.split():
        found = found.commands[part]
        found = getattr(found, "command", found)
    return {option: each for each in found.params for option in each.opts}


def test_an_option_has_the_name_the_type_and_the_docstring_of_its_field():
    weights = parameters("weights")
    field = described(RawWeightsRequest)["pool"]
    assert weights["--pool"].help == field.description.replace("``", "").replace("\n", " ")
    assert weights["--query"].metavar == weights["--parameters"].metavar == "FILE"
    assert weights["--edits"].metavar == weights["--statistic-options"].metavar == "JSON|FILE"
    assert weights["--statistic"].multiple  # statistics, one a time
    assert {"--head", "--row"} <= weights.keys()  # the parts of select
    assert "[default: 32]" in parameters("attribution")["--steps"].help
    assert "One of encoder, decoder" in parameters("import")["--stack"].help


def commands(command, words=()):
    """Return every command by its words."""
    command = getattr(command, "command", command)  # of a lazy one, the command itself
    if not hasattr(command, "list_commands"):
        return {" ".join(words): command}
    found = {}
    for name in command.list_commands(None):
        found |= commands(command.get_command(None, name), (*words, name))
    return found


def test_every_option_says_what_it_does():
    """The choices, the default and *May be repeated* say nothing of it."""
    every = {
        (name, *each.opts): each.help or "" for name, of in commands(get_command(app)).items() for each in of.params
    }
    assert len(every) > 300
    of_no_use = r"May be repeated\.|One of [^.]*\.|\[dim\].*"
    assert not [option for option, text in every.items() if not re.sub(of_no_use, "", text).strip()]
    assert not [option for option, text in every.items() if text.startswith("unedited")]


@pytest.mark.parametrize("model", [RawWeightsRequest, OpenSession, ImportModule])
def test_every_field_of_a_request_but_its_encoding_is_set_by_an_option(model):
    paths = {option.path[0] for option in options_of(model).values()}
    assert paths == model.model_fields.keys() - {"encoding"}


def test_one_name_means_one_thing_in_every_command():
    """An option that several commands have has the same placeholder and the same short name in all of them."""
    kinds = {}
    two_meanings = {
        "--beta",  # a file for the delta rules; the inverse temperature of Hopfield retrieval
        "--from",  # the session to begin with; the components at the beginnings of paths
        "--layer",  # the number of a checkpoint's layer; the name of a recorded one
        "--sweep",  # the sizes to vary of a module; the edits to price of a model
    }
    for command in SENDING:
        for option, each in parameters(command).items():
            if option.startswith("--"):
                kinds.setdefault(each.opts[0], set()).add((each.metavar, tuple(each.opts[1:])))
    assert {name: found for name, found in kinds.items() if len(found) > 1}.keys() == two_meanings

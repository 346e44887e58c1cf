"""Asks are checked by the contract's schema, and refused by the name of their field."""

import ast
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.plugins.fake_vllm import facts_of

from attention_contract.errors import InvalidRequest
from attention_vllm import vllm_names
from attention_vllm.asks import prompt_digest, read_ask
from attention_vllm.bound_asks import KnownModel, bind_ask
from attention_vllm.engine_refusals import refused_engine
from attention_vllm.serve_command import with_plugin

PLUGIN = Path(__file__).parents[2] / "plugins" / "vllm" / "attention_vllm"
MODEL = KnownModel({0: facts_of(), 2: facts_of(window=4)}, outputs={0: 6, 2: 6})
PROMPT = [*range(5)]
EDIT = {"tap": "context", "set": 0}
FAULTS = {
    "attention.steer": {"steer": [{"vector": "0" * 32}]},
    "attention.keep": {"keep": True},
    "attention.watch": {"watch": [{"probe": "0" * 32}]},
    "attention.layers.0": {"layers": ["decoder.1"]},
    "attention.layers": {"layers": [1]},
    "attention.heads": {"heads": [4]},
    "attention.top_k": {"top_k": -1},
    "attention.unknown": {"unknown": 1},
    "attention.statistics.1": {"statistics": ["entropy", "alignment"]},
    "attention.statistics.0": {"statistics": ["sink_mass"]},
    "attention.statistic_options.token_classes": {"statistics": ["classes"]},
    "attention.statistic_options.spans.0.characters": {
        "statistics": ["classes"], "statistic_options": {"spans": [{"name": "a", "characters": [0, 2]}]},
    },
    "attention.statistic_options.spans.0.tokens": {
        "statistics": ["classes"], "statistic_options": {"spans": [{"name": "a", "tokens": [0, 9]}]},
    },
    "attention.statistic_options.pairs": {"statistics": ["pairs"]},
    "attention.statistic_options.pairs.0.0": {"statistics": ["pairs"], "statistic_options": {"pairs": [[1, 0]]}},
    "attention.statistic_options.pairs.1.1": {
        "statistics": ["pairs"], "statistic_options": {"pairs": [[12, 12], [12, 13]]},
    },
    "attention.edits.embeddings": {"edits": {"embeddings": [{"tap": "embeddings", "set": 0}]}},
    "attention.edits.1": {"edits": {"1": [EDIT]}},
    "attention.edits.0.0.tap": {"edits": {"0": [{"tap": "mlp", "set": 0}]}},
    "attention.edits.2.1.heads": {"edits": {"2": [EDIT, {"tap": "output", "heads": [0], "set": 0}]}},
    "attention.edits.2.1.keys": {"edits": {"2": [EDIT, EDIT | {"keys": [0]}]}},
    "attention.edits.2.1.queries": {"edits": {"2": [EDIT, {"tap": "v", "queries": [0], "set": 0}]}},
    "attention.edits.2.1.experts": {"edits": {"2": [EDIT, EDIT | {"experts": [0]}]}},
    "attention.edits.2.1.value": {"edits": {"2": [EDIT, {"tap": "output", "value": [1.0, 2.0]}]}},
    "attention.edits.2.2.heads": {
        "edits": {"2": [EDIT, EDIT, {"tap": "q", "heads": [1, 1], "value": [[[1.0]], [[2.0]]]}]},
    },
    "attention.edits.2.1.set": {"edits": {"2": [EDIT, {"tap": "output", "set": 1e39}]}},
    "attention.edits.2.0.tap": {"edits": {"2": [{"tap": "weights", "set": 0.5}]}},
    "attention.edits.0.0.heads": {"edits": {"0": [{"tap": "v", "heads": [2], "set": 0}]}},
    "attention.edits.0.0.queries": {"edits": {"0": [EDIT | {"queries": [40]}]}},
    "attention.edits.0.0.add": {"edits": {"0": [{"tap": "context", "add": {"vector": "0" * 32}}]}},
    "attention.edits.0.0.value": {"edits": {"0": [{"tap": "context", "value": [1.0, 2.0, 3.0]}]}},
    "attention.edits.0.0.set": {"edits": {"0": [{"tap": "context", "set": float("inf")}]}},
}  # fmt: skip


@pytest.mark.parametrize("param", FAULTS)
def test_a_field_that_is_not_answered_is_refused_by_its_name(param):
    with pytest.raises(InvalidRequest) as caught:
        bind_ask(read_ask({"id": "a", "attention": FAULTS[param], "cache_salt": "own"}), MODEL, PROMPT, 20)
    assert caught.value.param == param


def test_an_ask_is_an_object_or_its_text_and_edits_need_a_salt():
    given = {"id": "a", "attention": {"edits": {"0": [EDIT]}}, "cache_salt": "own"}
    ask = read_ask(json.dumps(given))
    assert ask == read_ask(given)
    bound = bind_ask(ask, MODEL, PROMPT, 20)
    assert bound.layers == (0, 2)
    assert bound.edited_heads == {0: [0, 1, 2, 3]}
    for fault, param in (("{", "attention"), ([], "attention"), (given | {"cache_salt": None}, "cache_salt")):
        with pytest.raises(InvalidRequest) as caught:
            read_ask(fault)
        assert caught.value.param == param


def test_spans_of_messages_belong_to_the_prompt_of_which_the_server_knew_the_characters():
    wanted = {"statistics": ["classes"], "statistic_options": {"spans": [{"name": "a", "messages": [0]}]}}
    given = {"id": "a", "attention": wanted, "spans": {"prompt": prompt_digest(PROMPT), "tokens": [[1, 2]]}}
    assert bind_ask(read_ask(given), MODEL, PROMPT, 20).spans == {"a": [1, 2]}
    faults = {
        "expected the tokens": {"spans": None},
        "other tokens": {"spans": given["spans"] | {"prompt": prompt_digest([1])}},
        "did not come": {"spans": given["spans"] | {"tokens": []}},
        "not among": {"spans": given["spans"] | {"tokens": [[5]]}},
    }
    for fault, fields in faults.items():
        with pytest.raises(InvalidRequest) as caught:
            bind_ask(read_ask(given | fields), MODEL, PROMPT, 20)
        assert caught.value.param == "attention.statistic_options.spans.0.messages", fault


def test_outputs_are_refused_by_their_field_where_they_are_not_seen():
    ask = read_ask({"id": "a", "attention": {"edits": {"0": [{"tap": "output", "set": 0}]}}, "cache_salt": "own"})
    with pytest.raises(InvalidRequest, match="compiled") as caught:
        bind_ask(ask, replace(MODEL, outputs="compiled graphs hide it"), PROMPT, 20)
    assert caught.value.param == "attention.edits.0.0.tap"


def test_values_by_head_are_bound_as_float32():
    value = [[[1.0]], [[2.0]]]
    edits = {"0": [{"tap": "context", "heads": [1, 3], "value": value}]}
    bound = bind_ask(read_ask({"id": "a", "attention": {"edits": edits}, "cache_salt": "x"}), MODEL, PROMPT, 20)
    (edit,) = bound.edits[0]
    assert torch.equal(edit.value, torch.tensor(value))
    assert bound.edited_heads == {0: [1, 3]}


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ({}, None),
        ({"model_config.use_mla": True}, "MLA"),
        ({"model_config.is_encoder_decoder": True}, "encoder-decoder"),
        ({"cache_config.cache_dtype": "fp8_e4m3"}, "fp8_e4m3"),
        ({"parallel_config.decode_context_parallel_size": 2}, "context parallel"),
        ({"parallel_config.tensor_parallel_size": 2}, None),
        ({"parallel_config.pipeline_parallel_size": 2}, "pipeline parallel"),
        ({"parallel_config.enable_dbo": True}, "dual batch overlap"),
        ({"speculative_config": object()}, "speculative"),
    ],
)
def test_an_engine_that_is_not_read_says_why(place, reason):
    config = SimpleNamespace(
        model_config=SimpleNamespace(use_mla=False), cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1), speculative_config=None,
    )  # fmt: skip
    for path, value in place.items():
        *owners, name = path.split(".")
        setattr(getattr(config, owners[0]) if owners else config, name, value)
    refusal = refused_engine(config)
    assert refusal is None if reason is None else reason in refusal


def imported():
    """Each module that a file of the plugin imports, with the names, and the file."""
    for path in PLUGIN.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom):
                yield path, node.module, {alias.name for alias in node.names}
            elif isinstance(node, ast.Import):
                yield from ((path, alias.name, set()) for alias in node.names)


def test_the_names_of_vllm_that_are_imported_are_listed():
    names_by_module = {}
    for path, module, names in imported():
        if module.partition(".")[0] == "vllm":
            assert path.parent.name == "inside" or path.name in {"__init__.py", "serve_command.py"}, path
            names_by_module.setdefault(module, set()).update(names)
    assert {module: {*names} for module, names in vllm_names.IMPORTED.items()} == names_by_module


def test_the_plugin_needs_the_contract_the_core_and_the_prompts_of_the_service():
    own = {module for _, module, _ in imported() if module.startswith("attention_") and "vllm" not in module}
    rooms = ("attention_contract.", "attention_service.core.", "attention_service.prompts.")
    assert {module for module in own if not module.startswith(rooms)} == set()
    others = {module.partition(".")[0] for _, module, _ in imported()}
    assert not others & {"transformers", "fastapi", "starlette", "uvicorn", "attention_client"}


def test_the_command_adds_the_worker_and_the_door():
    arguments = with_plugin(["serve", "m", "--port", "1"], on_cpu=True)
    assert arguments[:4] == ["serve", "m", "--port", "1"]
    classes = {arguments[at + 1] for at, name in enumerate(arguments) if name in {"--worker-cls", "--middleware"}}
    for name in classes:
        module, _, kind = name.rpartition(".")
        source = (PLUGIN.parent / Path(*module.split("."))).with_suffix(".py").read_text("utf-8")
        assert f"class {kind}" in source

"""The ``attention`` command against a played service."""

import json
import socket
import subprocess
import sys
from importlib.metadata import EntryPoint

import httpx
import ml_dtypes
import numpy as np
import pytest
import typer

from attention_client.cli import extensions
from attention_client.cli.arguments import tensor_arguments
from attention_client.cli.command_index import PANELS
from attention_client.cli.invocation import Invocation
from attention_client.cli.tables import reply_tables
from attention_contract.errors import PROBLEM_MEDIA_TYPE, ModuleNotFound
from attention_contract.operations import OPERATIONS
from attention_contract.request_names import names_of
from attention_contract.schemas.attention import ApproximationError, ForwardReply
from attention_contract.schemas.weights import HeadStatistics, TopKeys, WeightsReply, WeightsRequest
from attention_contract.wire import from_body, to_safetensors
from tests.client.cli.command_line import invoke
from tests.client.service import RAN, URL, reply_to

X = np.arange(24, dtype=np.float32).reshape(3, 8)


@pytest.fixture
def run(played, tmp_path, monkeypatch):
    """Return a function that runs the command in an empty folder and checks its exit status."""
    monkeypatch.chdir(tmp_path)
    np.save("q.npy", X)

    def run(*arguments, code=0, stdin=None):
        invocation = Invocation(transport=played.transport)
        result = invoke(["--url", URL, *arguments], input=stdin, obj=invocation)
        assert result.exit_code == code, result.output
        assert code == 0 or isinstance(result.exception, SystemExit)
        return result

    return run


# ── every command, for people and as JSON ────────────────────────────────────────────────────────────────────────────

COMMANDS = {
    "modules": ["demo", "abc", "288"],
    "modules list": ["demo", "abc", "1.15 kB"],
    "modules show demo": ["config.d_model", "8", "sinks", " false"],
    "modules create demo --d-model 8 --num-heads 2 --seed 1": ["version", "abc"],
    "modules parameters demo": ["q_proj.weight", "[8, 8]", "non finite", "   3\n"],
    "modules parameters demo q_proj.weight --head 1 --slice 0:2": ["[2, 2]; dtype float32", "1."],
    "import minilm --layer 1": ["demo"],
    "import org/net --layer 1": ["demo"],
    "models fetch org/net": ["idle"],
    "forward demo --query q.npy": ["output", "[3, 8]", "2 kFLOP", "1.5 ms (predicted 1, from 0.5 to 2; queued 0.1)"],
    "forward --query q.npy": ["output"],
    "weights demo --query q.npy --top-k 2": ["entropy", "own position", "0 (0.000)  1 (1.000)"],
    "weights --raw --query q.npy": ["first key"],
    "gradients demo --query q.npy --wrt query --wrt q_proj.weight --check": [
        "gradients.q_proj.weight",
        "passed",
        "1e-08",
    ],
    "gradients --query q.npy --key q.npy --value q.npy": ["query"],
    "complexity demo --sweep length=512,1024,2048": ["2048", "O(n²·d)", "2 MB"],
    "complexity --queries 4 --num-heads 8 --head-dim 64": ["fused", "0.25", "4321", "blocked", "9 MB"],
    "complexity demo --queries 4": ["a cpu", "projections crossover 1024", "n: keys", "gradients ms"],
    'complexity demo --queries 4 --session {"pasts":[700]}': ["700", "4.1 kB", "64 B", "longest 16384"],
    "complexity demo --queries 4 --sweep num_heads=2,16": ["num heads", " 16  ", "flops exponent 2"],
    'complexity demo --queries 4 --measure --compare {"label":"wide"}': ["measured", " 700"],
    'complexity demo --queries 4 --compare {"label":"wide","num_heads":4} --compare {"label":"none"}': [
        "wide",
        "time  request, none  length     1, 1048576  none     777  333",
    ],
    "hardware": ["G1", "80 GB", "989.5", "float16 TFLOP/s", "a sheet"],
    "hopfield --stored q.npy --states q.npy --eps 0.1": ["converged", "single", "2.969  0.9688"],
    f"recordings rollout {'0' * 32} --row 1 --row 0 --row 2": [
        "comes from",
        "1 cat",
        "0 the (1)",
        "layers layers.0",
    ],
    f"recordings similarity {'0' * 32} --tensor context": ["L0H0", "layers.1 (0.875)  layers.0 (0.5)", "tokens 7"],
    f"recordings statistics {'0' * 32}": ["layers.0  L0H1        1", "entropy"],
    'rollout q.npy --row 1 --row 0 --row 2 --labels ["the","cat","sat"]': ["comes from", "1 cat", "0 the (1)"],
    "similarity q.npy": [" 0  1 (0)", "most similar (CKA)"],
    "similarity q.npy q.npy --cka": [" 0  1 (0)"],
    "circuits demo --with later": [
        "qk",
        "1.562",
        "-0.5",
        "score.weight",
        "later head",
        "0.75",
        "baseline 0.125",
        "rope",
    ],
    "sessions": ["demo", "7-1  3 tokens  3.07 kB own, 1.02 kB shared", "2 sessions; 2 pages of 64 tokens, 1 shared"],
    "sessions list": ["└── 7-1", "    └── 7-2"],
    "sessions show 7-1": ["policy.name", "full", "own_bytes", "3072"],
    "sessions open demo --capacity 128 --pinned": ["7-1"],
    "models": ["net", "idle"],
    "models show net": ["checkpoint", "org/net"],
    "models load org/net --dtype float16": ["net"],
    "models forward net cat --position 0": ["net (GPT2LMHeadModel) on cpu"],
    "lens net cat --state heads --logit cat": ["net (GPT2LMHeadModel) on cpu"],
    "models lenses net": ["ready", "0, 1", "2026-01-01 00:00", "bytes 0 B; limit bytes 1 B"],
    "models gradients net cat": ["net (GPT2LMHeadModel) on cpu"],
    "models complexity net --length 8": ["total_ms"],
    "look net cat --layer 0 --layer cross.1": ["net (GPT2LMHeadModel) on cpu in float32: 1 ms (queued 1), fused"],
    "recordings": ["by hand", "the cat", "limit bytes 1 kB", "damaged 1111"],
    f"recordings get {'0' * 32}": ["by hand", "layers.0.weights"],
    "hopfield --stored q.npy --states q.npy --steps 2": ["single", "1.5 ms"],
    "accuracy": [
        "fused",
        "gradients",
        "-0.0625",
        "0.125",
        "0.25",
        "0.9",
        "basis calibrated",
    ],
    "info": ["limits.max_queue", "media_types", " application/json "],
    "variants": ["score", "dot", "O(n²)"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_shows_a_table_or_prints_the_reply_as_json_and_nothing_else(run, command):
    output = run(*command.split()).stdout
    assert all(text in output for text in COMMANDS[command]), output
    result = run(*command.split(), "--json")
    assert isinstance(json.loads(result.stdout), dict)
    assert result.stderr == ""


@pytest.mark.sampled(operation=33)
@pytest.mark.parametrize(
    "operation", [each for each in OPERATIONS if each.reply is not None], ids=lambda each: each.name
)
def test_every_reply_has_tables(operation, capsys):
    """A reply that no command shows today is shown by the same rules."""
    request = None if operation.request is None else operation.request.model_validate(operation.example or {})
    reply_tables.show(reply_to(operation, request))
    assert capsys.readouterr().out


# ── what is asked ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_options_become_request_fields(run, played):
    np.savez("in.npz", query=X, key_mask=np.array([True, True, False]))
    np.savez("more.npz", first=X, other=X + 1)
    run(
        "forward", "demo", "--inputs", "in.npz", "--key", "more.npz:other", "--return", "output", "--return", "weights",
        "--head", "1", "--row", "0", "--edits", '[{"tap": "weights", "set": 0}]', "--average-heads", "--version", "abc",
        "--report-error", "--return-state", "--differences",
    )  # fmt: skip
    payload = played.payload
    np.testing.assert_array_equal(payload.query, X)
    np.testing.assert_array_equal(payload.key, X + 1)
    assert payload.key_mask.tolist() == [True, True, False]
    assert payload.return_ == ["output", "weights"]
    assert (payload.select.heads, payload.select.queries) == ([1], [0])
    assert (payload.edits[0].set, payload.average_heads, payload.version) == (0, True, "abc")
    assert (payload.report_error, payload.return_state, payload.compare) == (True, True, "unedited")


def test_inputs_of_recurrent_methods_and_dropout_become_request_fields(run, played):
    names = ("gate", "beta", "initial_state", "initial_normalizer")
    options = [part for name in names for part in (f"--{name.replace('_', '-')}", "q.npy")]
    run("forward", "demo", "--query", "q.npy", *options, "--dropout", "0.25")
    for name in names:
        np.testing.assert_array_equal(getattr(played.payload, name), X)
    assert (played.payload.dropout.p, played.payload.dropout.seed) == (0.25, 0)
    np.savez("d.npz", query=X, **{"q_proj.weight": X})
    dropout = '{"p": 0.5, "seed": 7, "return_mask": true}'
    shown = run("gradients", "demo", "--query", "q.npy", "--directions", "d.npz", "--dropout", dropout).stdout
    assert "hessian_products.query" in shown
    assert sorted(played.payload.directions) == ["q_proj.weight", "query"]
    assert (played.payload.dropout.seed, played.payload.dropout.return_mask) == (7, True)


def test_options_of_a_session_become_request_fields(run, played):
    run(
        "sessions", "open", "demo", "--sequences", "2", "--ttl-s", "30", "--share", "--version", "abc", "--from", "7-1",
        "--policy", '{"name": "window_sinks", "window": 8}',
    )  # fmt: skip
    payload = played.payload
    assert (payload.sequences, payload.ttl_s, payload.share, payload.pinned, payload.version) == (
        2,
        30,
        True,
        False,
        "abc",
    )
    assert (payload.from_.session, payload.policy.window) == ("7-1", 8)
    np.savez("past.npz", past_key=X[None], past_value=X[None] + 1)
    run("sessions", "open", "demo", "--past-key", "past.npz", "--past-value", "past.npz")
    np.testing.assert_array_equal(played.payload.past_value, X[None] + 1)
    assert run("sessions", "delete", "7-1").stdout == "deleted 7-1\n"
    assert played.requests[-1].method == "DELETE"
    assert run("models", "delete-lens", "0" * 32).stdout == f"deleted {'0' * 32}\n"
    assert played.requests[-1].url.path == f"/v1/lenses/{'0' * 32}"


def test_parameters_are_replaced_at_a_version(run, played):
    np.savez("parameters.npz", **{"q_proj.weight": X})
    assert "version" in run("modules", "replace", "demo", "--parameters", "parameters.npz", "--version", "abc").stdout
    assert (list(played.payload.parameters), played.payload.version) == (["q_proj.weight"], "abc")


def test_only_keys_that_are_there_are_named(capsys):
    keys, weights = np.array([[[1, 0, -1, -1]]]), np.array([[[0.75, 0.25, 0, 0]]], np.float32)
    statistics, top = HeadStatistics(entropy=np.zeros(1)), TopKeys(keys=keys, weights=weights)
    reply_tables.show(WeightsReply(statistics=statistics, queries=np.array(1), top=top, ran=RAN))
    out = capsys.readouterr().out
    assert "1 (0.750)  0 (0.250)" in out
    assert "-1" not in out


def test_the_largest_weights_have_the_labels_and_the_heads_of_the_request(capsys):
    request = WeightsRequest(query=np.zeros((1, 2, 4)), labels=["the", "cat"], select={"heads": [5], "queries": [1]})
    top = TopKeys(keys=np.array([[[[0, 1]]]]), weights=np.array([[[[0.75, 0.25]]]]))
    reply = WeightsReply(statistics=HeadStatistics(), queries=np.array([2]), top=top, ran=RAN)
    object.__setattr__(reply, "_names", names_of(request))
    reply_tables.show(reply)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["5", "cat", "the", "(0.750)", "cat", "(0.250)"] in [row[-6:] for row in rows]


def test_pairs_and_what_keys_receive_are_columns_of_the_heads(capsys):
    statistics = HeadStatistics(
        received=np.array([[0.25, np.nan], [0.125, 0.5]]), pairs={"both_first": np.array([0.75, 0.375])}
    )
    reply_tables.show(WeightsReply(statistics=statistics, queries=np.array(2), ran=RAN))
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines()]
    assert "largest received" in printed
    assert "pairs both first" in printed
    assert [row[-2:] for row in rows if row[:1] == ["0"]] == [["0.25", "0.75"], ["0.5", "0.375"]]


def test_an_error_is_one_line(capsys):
    for error in (ApproximationError(max=0.5, rms=0.125, mean_kl=0.25), ApproximationError(max=0.5, rms=0.125)):
        reply_tables.show(ForwardReply(output=X, error=error, ran=RAN))
    with_kl, without = (line for line in capsys.readouterr().out.splitlines() if line.startswith("error"))
    assert with_kl == "error max 0.5; error rms 0.125; error mean kl 0.25"
    assert "kl" not in without


def test_a_spec_may_stand_in_a_file(run, played, tmp_path):
    (tmp_path / "spec.json").write_text('{"masks": [{"name": "causal"}]}')
    run("forward", "--query", "q.npy", "--spec", "spec.json", "--num-heads", "2")
    assert (played.payload.spec.masks[0].name, played.payload.num_heads) == ("causal", 2)
    run("complexity", "--queries", "4", "--num-heads", "2", "--head-dim", "4", "--spec", '{"softcap": 5}')
    assert played.payload.spec.softcap == 5


def test_paths_are_requested_in_place_of_a_sweep(run, played):
    run("models", "effects", "net", "cat", "--from", '{"layer": 0, "text": "dog"}', "--to", '{"layer": 1}')
    payload = played.payload
    assert (payload.sweep, payload.from_.layer, payload.from_.text, payload.to.layer) == (None, 0, "dog", 1)
    run("models", "effects", "net", "cat")
    assert (played.payload.sweep.over, played.payload.from_) == (["layers", "heads"], None)
    run("models", "complexity", "net", "--length", "8", "--from", '{"set": "mean"}')
    assert played.payload.from_.set == "mean"


def test_options_of_costs_become_request_fields(run, played, tmp_path):
    (tmp_path / "other.json").write_text('{"kernel": "blocked"}')
    run(
        "complexity", "demo", "--queries", "8", "--hardware", "T4", "--memory-bytes", "1000", "--sweep", "d_model=8,16",
        "--compare", "other.json", "--compare", '{"num_heads": 4}',
    )  # fmt: skip
    payload = played.payload
    assert (payload.hardware, payload.memory_bytes) == ("T4", 1000)
    assert (payload.sweep.dimension, payload.sweep.values) == ("d_model", [8, 16])
    assert [(one.kernel, one.num_heads) for one in payload.compare] == [("blocked", None), (None, 4)]


@pytest.mark.parametrize("target", [["demo"], ["--num-heads", "2", "--head-dim", "4"]])
def test_a_picture_goes_into_a_file(run, played, tmp_path, target):
    for name, begin in (("costs.svg", b"image/svg+xml"), ("costs.PNG", b"image/png")):
        assert name in run("complexity", *target, "--queries", "8", "--plot", name, "--theme", "dark").stdout
        assert (tmp_path / name).read_bytes() == b"drawn as " + begin
        assert played.requests[-1].url.params == httpx.QueryParams({"theme": "dark"})


def test_weights_and_statistics_are_drawn_with_their_labels_and_look(run, played, tmp_path):
    look = ("--view", "lines", "--palette", "magma", "--width", "400", "--scale", "log", "--head", "1")
    run("weights", "demo", "--query", "q.npy", "--labels", "[CLS] a [SEP]", "--plot", "lines.pdf", *look)
    assert (tmp_path / "lines.pdf").read_bytes() == b"drawn as application/pdf"
    assert (played.payload.labels, played.payload.select.heads) == (["[CLS]", "a", "[SEP]"], [1])
    payload = {"view": "lines", "palette": "magma", "width": "400", "scale": "log"}
    assert dict(played.requests[-1].url.params) == payload
    (tmp_path / "labels.json").write_text('["the end", "of"]')
    run("weights", "--query", "q.npy", "--labels", "labels.json", "--plot", "raw.svg")
    assert played.payload.labels == ["the end", "of"]
    run("attribution", "demo", "--query", "q.npy", "--labels", "a b", "--method", "norm", "--plot", "norm.svg")
    assert (played.payload.methods, played.payload.labels) == (["norm"], ["a", "b"])
    run("forward", "demo", "--query", "q.npy", "--differences", "--plot", "output.svg")
    assert played.payload.compare == "unedited"
    run("effects", "demo", "--query", "q.npy", "--plot", "effects.svg")
    run("circuits", "demo", "--with", "later", "--plot", "circuits.svg", "--view", "composition")
    assert (played.payload.with_, dict(played.requests[-1].url.params)) == ("later", {"view": "composition"})
    run("recordings", "similarity", "0" * 32, "--tensor", "q", "--plot", "similar.svg")
    assert played.payload.tensor == "q"
    run("recordings", "rollout", "0" * 32, "--row", "1", "--plot", "rollout.svg", "--view", "lines")
    assert played.payload.queries == [1]
    run("rollout", "q.npy", "--labels", "a b", "--row", "1", "--method", "flow", "--plot", "flow.svg")
    assert (played.payload.labels, played.payload.queries, played.payload.method) == (["a", "b"], [1], "flow")
    run("similarity", "q.npy", "--cka", "--plot", "cka.svg")
    assert (played.payload.measure, played.payload.b) == ("cka", None)
    for name in ("norm", "output", "effects", "circuits", "similar", "rollout", "flow", "cka"):
        assert (tmp_path / f"{name}.svg").read_bytes() == b"drawn as image/svg+xml"
    run("recordings", "statistics", "0" * 32, "--plot", "layers.png", "--statistic", "entropy")
    assert played.payload.statistics == ["entropy"]
    assert (tmp_path / "layers.png").read_bytes() == b"drawn as image/png"


def test_a_size_that_no_shape_has_has_a_column_of_its_own(run):
    """Rows of a sweep over heads would look alike without it; lengths, batches and the like have their columns."""
    swept = run("complexity", "demo", "--queries", "4", "--sweep", "num_kv_heads=1,32").stdout.splitlines()
    assert [line.split()[0] for line in swept[1:3]] == ["1", "32"]
    assert swept[0].split()[:4] == ["num", "kv", "heads", "kernel"]
    by_length = run("complexity", "demo", "--sweep", "length=4,8").stdout
    by_past = run("complexity", "demo", "--queries", "1", "--sweep", "past=4,8").stdout
    assert by_length.splitlines()[0] == by_past.splitlines()[0]
    assert by_length.split()[:2] == ["kernel", "batch"]


def test_a_module_may_be_made_from_files(run, played, tmp_path):
    np.savez("parameters.npz", **{"q_proj.weight": X})
    (tmp_path / "config.json").write_text('{"d_model": 8, "num_heads": 2}')
    run("modules", "create", "demo", "--config", "config.json", "--num-heads", "4", "--parameters", "parameters.npz")
    assert played.payload.config.num_heads == 4
    assert list(played.payload.parameters) == ["q_proj.weight"]


@pytest.mark.parametrize("command", ["modules create demo --d-model 8 --num-heads 2", "import minilm"])
def test_a_module_is_durable_by_default(run, played, command):
    run(*command.split())
    assert played.payload.durable
    run(*command.split(), "--no-durable")
    assert not played.payload.durable


def test_a_module_takes_parameters_of_the_request(run, played):
    np.savez("parameters.npz", **{"q_proj.weight": X})
    run("forward", "demo", "--query", "q.npy", "--parameters", "parameters.npz")
    assert list(played.payload.parameters) == ["q_proj.weight"]


def test_weights_are_fetched_only_where_they_are_kept(run, played):
    run("weights", "demo", "--query", "q.npy")
    assert played.payload.return_weights is False
    run("weights", "demo", "--query", "q.npy", "-o", "w.npy", "--edits", '[{"tap": "q", "set": 0}]')
    assert played.payload.edits[0].tap == "q"
    assert np.load("w.npy").shape == (2, 3, 3)


def test_labels_name_the_keys_of_the_largest_weights(run, played):
    labelled = ("weights", "demo", "--query", "q.npy", "--labels", "the cat sat down")
    run(*labelled)
    assert (played.payload.labels, played.payload.top_k) == (["the", "cat", "sat", "down"], 3)
    run(*labelled, "--top-k", "1")
    assert played.payload.top_k == 1
    run(*labelled, "-o", "w.npy")
    assert played.payload.top_k == 0


def test_names_of_a_files_tensors_stand_in_the_order_of_their_layers(run):
    np.savez("w.npz", **{f"layers.{at}.weights": X for at in (10, 9, 0)})
    refused = " ".join(run("similarity", "w.npz", code=2).stderr.replace("│", " ").split())
    assert "no 'a'; it holds 'layers.0.weights', 'layers.9.weights', 'layers.10.weights'; choose one" in refused
    assert "as in w.npz:layers.0.weights" in refused
    run("similarity", "w.npz:layers.9.weights")


def test_attributions_take_methods_a_readout_and_a_comparison(run, played):
    np.savez("readout.npz", weight=X, targets=np.array([0, -1, 2]))
    printed = run(
        "attribution", "demo", "--query", "q.npy", "--method", "integrated", "--method", "norm", "--readout",
        "readout.npz", "--steps", "7", "--edits", '[{"tap": "q", "set": 0}]', "--differences", "-o", "out.npz",
    ).stdout  # fmt: skip
    payload = played.payload
    assert (payload.methods, payload.steps, payload.compare) == (["integrated", "norm"], 7, "unedited")
    assert payload.readout.targets.tolist() == [0, -1, 2]
    assert "completeness.gap" in printed
    assert "differences.norm" in printed
    np.testing.assert_array_equal(np.load("out.npz")["differences.norm"], [[0, 1], [0, -1]])


def test_patterns_beta_and_projections_become_request_fields(run, played):
    np.savez("layer.npz", state=X, output=X + 1)
    np.save("mask.npy", np.array([True, False, True]))
    run(
        "hopfield", "--stored", "q.npy", "--states", "q.npy", "--beta", "0.5,2", "--eps", "0.01", "--max-steps", "7",
        "--stored-mask", "mask.npy", "--projections", "layer.npz", "--num-heads", "2", "-o", "out.npz",
    )  # fmt: skip
    payload = played.payload
    np.testing.assert_array_equal(payload.stored, X)
    np.testing.assert_array_equal(payload.projections.output, X + 1)
    assert (payload.beta.tolist(), payload.eps, payload.max_steps, payload.num_heads) == ([0.5, 2.0], 0.01, 7, 2)
    assert payload.stored_mask.tolist() == [True, False, True]
    assert np.load("out.npz")["association"].shape == (3, 3)
    run("hopfield", "--stored", "q.npy", "--states", "q.npy", "--beta", "3", "-o", "out.npy")
    assert (played.payload.beta.tolist(), played.payload.steps) == (3.0, None)
    np.testing.assert_array_equal(np.load("out.npy"), X)


def test_a_module_is_deleted_at_a_version(run, played):
    assert run("modules", "delete", "demo", "--version", "abc").stdout == ""
    assert played.requests[0].headers["if-match"] == '"abc"'


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors", ".json"])
def test_what_is_written_can_be_read_again(run, suffix):
    run("forward", "demo", "--query", "q.npy", "-o", f"out{suffix}")
    np.testing.assert_array_equal(tensor_arguments.read(f"out{suffix}", "output"), X)


def test_bfloat16_survives_in_safetensors_and_widens_elsewhere(run, tmp_path):
    reply = ForwardReply(output=X.astype(ml_dtypes.bfloat16), ran=RAN)
    (tmp_path / "in.safetensors").write_bytes(b"".join(to_safetensors(reply, "reply")))
    for suffix in ("safetensors", "npy"):
        run("forward", "demo", "--query", "in.safetensors", "-o", f"out.{suffix}")
    again = from_body(ForwardReply, (tmp_path / "out.safetensors").read_bytes(), "application/vnd.safetensors", "reply")
    assert again.output.dtype == ml_dtypes.bfloat16
    assert np.load("out.npy").dtype == np.float32


@pytest.mark.parametrize(
    "text", ["[[1.5, 2]]", '{"query": [[1.5, 2]]}', '{"dtype": "int64", "shape": [1, 2], "data": [1, 2]}']
)
def test_json_comes_from_standard_input(run, played, text):
    if "int64" in text:
        run("forward", "demo", "--query", "-", stdin=text, code=1)
    else:
        run("forward", "demo", "--query", "-", stdin=text)
        assert played.payload.query.tolist() == [[1.5, 2]]


# ── what goes wrong ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("forward demo", "--query"),
        ("forward demo --query missing.npy", "No such file"),
        ("forward demo --query q.txt", "expected a file that ends in"),
        ("forward demo --query broken.npy", "does not read as .npy"),
        ("forward demo --query in.npz:nothing", "no 'nothing'"),
        ("forward demo --query q.npy -o out.txt", "expected a file that ends in"),
        ("forward demo --query q.npy -o nowhere/out.npy", "there is no folder"),
        ("forward demo --query q.npy --return weigths", "did you mean 'weights'?"),
        ("forward demo --query q.npy --head -1", "--head"),
        ("forward demo --query q.npy --dropout much", "--dropout"),
        ("forward demo --query q.npy --raw", "exclude each other"),
        ("forward demo --query q.npy --spec {}", "raw attention"),
        ("forward demo --query member.json", "holds null"),
        ("forward demo --inputs member.json", "--query"),
        ("modules create demo --config []", "expected a JSON object, got list"),
        ("forward --query q.npy --spec {", "not JSON"),
        ("complexity demo", "--queries"),
        ("complexity demo --sweep length=a,b", "--sweep"),
        ("complexity demo --sweep tokens=1,2", "'tokens' is not one of length"),
        ("complexity --queries 4", "--num-heads"),
        ("complexity --queries 4 --num-heads 2 --head-dim 4 --session {}", "--session"),
        ("complexity demo --queries 4 --plot p.gif", ".svg or .png"),
        ("weights demo --query q.npy --view head", "add --plot FILE"),
        ("weights demo --query q.npy --plot no/p.png", "no folder"),
        ("hopfield --stored q.npy --states q.npy --beta high", "--beta"),
        ("modules parameters demo --head 1", "need a PARAMETER"),
        ("modules --json list", "behind the command"),
        ("nothing", "No such command"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(run, played, tmp_path, command, text):
    (tmp_path / "broken.npy").write_bytes(b"nothing")
    (tmp_path / "member.json").write_text('{"query": null}')
    np.savez("in.npz", a=X, b=X)
    result = run(*command.split(), code=2)
    assert text in " ".join(result.stderr.replace("│", " ").split())
    assert result.stdout == ""
    assert not played.requests


def _cut(archive):
    return archive[: len(archive) // 2]


def _flipped(archive):
    return archive[:120] + bytes([archive[120] ^ 255]) + archive[121:]


def _packed_oddly(archive):
    at = archive.index(b"PK\1\2") + 10
    return archive[:8] + b"\x63" + archive[9:at] + b"\x63" + archive[at + 1 :]


@pytest.mark.parametrize("damage", [_cut, _flipped, _packed_oddly])
def test_a_damaged_archive_is_not_read(run, tmp_path, damage):
    np.savez_compressed("in.npz", query=X)
    whole = (tmp_path / "in.npz").read_bytes()
    run("forward", "demo", "--query", "in.npz")
    (tmp_path / "in.npz").write_bytes(damage(whole))
    assert "does not read as .npz" in run("forward", "demo", "--query", "in.npz", code=2).stderr


def test_a_pickle_is_not_read(run):
    np.save("objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    assert "does not read" in run("forward", "demo", "--query", "objects.npy", code=2).stderr


def test_a_refusal_is_one_paragraph_on_standard_error(run, played):
    problem = ModuleNotFound("no module 'demo'; there are: a, b", request_id="r-1").to_problem()
    played.first = [httpx.Response(404, json=problem, headers={"content-type": PROBLEM_MEDIA_TYPE})]
    result = run("modules", "show", "demo", "--json", code=1)
    assert result.stdout == ""
    assert result.stderr == "No such module: no module 'demo'; there are: a, b (request r-1)\n"


def test_no_server_is_one_paragraph_on_standard_error(run, played):
    played.first = [httpx.ConnectError("refused")] * 4
    result = run("--retries", "3", "modules", code=1)
    last = result.stderr.splitlines(keepends=True)[-1]
    assert (result.stdout, last) == ("", f"No connection to the server: cannot connect to {URL}: refused\n")


@pytest.mark.long
def test_repeats_are_reported_on_standard_error():
    command = [sys.executable, "-c", "import attention_client.cli as cli; cli.main()"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    options = ["--url", url, "--retries", "1", "modules", "--json"]
    done = subprocess.run([*command, *options], check=False, capture_output=True, text=True, timeout=60)
    repeat, failed = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, "")
    assert f"list_modules: cannot connect to {url}" in repeat
    assert "trying again in" in repeat
    assert failed.startswith("No connection to the server: cannot connect")


def test_a_url_that_is_none_is_a_usage_error(run):
    assert "expected something like" in run("--url", "localhost:8000", "info", code=2).stderr


# ── contributed commands ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("value", "code", "text"), [
    ("tests.client.cli.test_cli:contributed", 3, "got ['--port', '1', '--help']"),
    ("no_such_package:serve", 1, "pip install 'attention-service[server]'"),
])  # fmt: skip
def test_other_packages_contribute_commands(monkeypatch, value, code, text):
    entry = EntryPoint("serve", value, extensions.COMMAND_GROUP)
    monkeypatch.setattr(extensions, "entry_points", lambda group: [entry] if group == extensions.COMMAND_GROUP else [])
    result = invoke(["serve", "--port", "1", "--help"])
    assert (result.exit_code, text in result.output) == (code, True), result.output


def contributed(arguments):
    """Stand for an entry point of the group."""
    typer.echo(f"got {arguments}")
    return 3


def test_every_panel_stands_in_the_help():
    printed = invoke(["--help"]).stdout
    assert [panel for panel in PANELS if f"─ {panel} ─" not in printed] == []

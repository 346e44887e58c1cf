"""Each reproduced result is a module with the same parts, and a row of docs/examples.md. Nothing is installed here."""

import json
import pickle
import re
from contextlib import nullcontext
from importlib import import_module
from inspect import signature
from math import nan
from types import SimpleNamespace

import pytest
import torch
from benchmarks.processes import ROOT
from benchmarks.reproduced import __main__ as program
from benchmarks.reproduced.package import Line, Package, convert, log_probabilities
from safetensors.torch import load_file

PAGE = (
    (ROOT / "docs" / "examples.md").read_text("utf-8").partition("\n## Results reproduced\n")[2].partition("\n## ")[0]
)


@pytest.mark.parametrize("name", program.NAMES)
def test_a_result_pins_its_package_and_writes_a_checkpoint(name):
    result = import_module(f"benchmarks.reproduced.{name}")
    assert isinstance(result.PACKAGE, Package)
    assert f"`{result.PACKAGE.requirement}`" in PAGE
    assert list(signature(result.write).parameters) == ["models"]
    assert list(signature(result.lines).parameters) == ["client"]


def test_the_page_lists_every_script_and_no_other():
    rows = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    files = {path.stem for path in (ROOT / "benchmarks" / "reproduced").glob("*.py")}
    assert list(dict.fromkeys(rows)) == list(program.NAMES)
    assert set(program.NAMES) == files - {"__init__", "__main__", "package"}


def test_without_a_name_the_results_are_listed(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["reproduced"])
    program.main()
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(program.NAMES)


@pytest.mark.parametrize(("ours", "holds"), [(1.0, True), (1.125, True), (1.25, False), (0.75, False), (nan, False)])
def test_a_number_holds_within_its_bound(ours, holds):
    assert Line("number", 1.0, ours, 0.125).holds is holds


def test_log_probabilities_of_equal_logits_are_equal():
    assert log_probabilities([0.0, 0.0, float("-inf")]).tolist() == pytest.approx(
        [-0.6931471805599453] * 2 + [-float("inf")]
    )


@pytest.mark.parametrize(("ours", "code"), [(1.0, 0), (2.0, 1)])
def test_the_program_fails_if_a_number_differs(ours, code, capsys, monkeypatch):
    lines = [Line("equal", 3.0, 3.0, 0), Line("other", 1.0, ours, 0.5)]
    package = SimpleNamespace(install=lambda: None)
    result = SimpleNamespace(PACKAGE=package, write=lambda models: None, lines=lambda client: lines)
    monkeypatch.setattr(program, "import_module", lambda name: result)
    monkeypatch.setattr(program, "local", lambda models_dir: nullcontext())
    monkeypatch.setattr("sys.argv", ["reproduced", program.NAMES[0]])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == code
    assert f"| other | 1 | {ours:g} |" in capsys.readouterr().out


def test_pickled_tensors_are_converted_and_other_objects_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["Other"]}')
    tensors = {"a": torch.arange(6.0).reshape(2, 3)}
    tensors["tied"] = tensors["a"]
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    convert(tmp_path, tmp_path / "made", "BertForMaskedLM")
    made = load_file(tmp_path / "made" / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in made.items()} == {name: made["a"].tolist() for name in tensors}
    assert made["a"].tolist() == tensors["a"].tolist()
    assert json.loads((tmp_path / "made" / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]
    torch.save({"a": SimpleNamespace()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(pickle.UnpicklingError):
        convert(tmp_path, tmp_path / "other", "BertForMaskedLM")

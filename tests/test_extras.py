"""``make test`` runs with what the extra ``test`` installs: no file of tests imports more without asking for it."""

import pytest

from tools import extras


@pytest.fixture(scope="module")
def installed():
    return extras.installed_by("test")


def test_no_test_file_imports_what_the_extra_does_not_install(installed):
    missing = {str(path.relative_to(extras.ROOT)): extras.imported(path) - installed for path in extras.FILES}
    assert {path: names for path, names in missing.items() if names} == {}


def test_the_extra_of_the_client_has_no_torch():
    assert {"pytest", "hypothesis", "numpy", "matplotlib"} <= extras.installed_by("test-base")
    assert not {"torch", "transformers", "fastapi"} & extras.installed_by("test-base")


@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("import onnx.helper", {"onnx"}),
        ("from onnx import helper", {"onnx"}),
        ("try:\n    import onnx\nfinally:\n    import jax", {"onnx", "jax"}),
        ("class A:\n    import onnx", {"onnx"}),
        ("import pytest\nonnx = pytest.importorskip('onnx.helper')\nfrom onnx import numpy_helper", set()),
        ("import onnx\nonnx = pytest.importorskip('onnx')", {"onnx"}),
        ("def late():\n    import onnx", set()),
        ("import json, tools.docs.notebook_outputs", {"nbclient", "nbformat"}),
        ("from tools.docs import notebook_outputs", {"nbclient", "nbformat"}),
        ("from tests.examples import test_notebooks", {"nbclient", "nbformat"}),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import onnx", set()),
    ],
)
def test_imports_are_found_where_they_run(text, more, tmp_path, installed):
    file = tmp_path / "test_it.py"
    file.write_text(text, "utf-8")
    assert extras.imported(file) - (installed - {"nbclient", "nbformat"}) == more  # as if it did not install these

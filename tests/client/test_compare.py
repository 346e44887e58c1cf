"""``attention compare`` against a live server: what passes, what fails, and what is refused."""

import json

import pytest
from typer.testing import CliRunner

from attention_client.cli import app


@pytest.fixture
def compare(server):
    def compare(*arguments, code=0):
        small = ("--queries", "9", "--keys", "7", "--head-dim", "8")
        result = CliRunner().invoke(app, ["--url", server, "compare", *arguments, *small])
        assert result.exit_code == code, result.output
        return result

    return compare


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_an_exact_kernel_passes_in_every_dtype(compare, dtype):
    printed = compare(
        "blocked", "--dtype", dtype, "--spec", '{"masks": [{"name": "causal"}]}', "--kv-heads", "2"
    ).stdout
    assert printed.count("passed") == 4


def test_an_error_beyond_the_tolerance_fails(compare):
    found = json.loads(compare("fused", "--dtype", "float16", "--tolerance", "1e-9", "--json", code=1).stdout)
    assert not found["passed"]
    assert 1e-9 < found["errors"]["output"] < 1e-2
    assert {*found["errors"]} == {"output", "query", "key", "value"}


def test_the_output_may_be_compared_alone(compare):
    found = json.loads(compare("fused", "--no-gradients", "--json").stdout)
    assert {*found["errors"]} == {"output"}
    assert {*found["compute_ms"]} == {"fused", "materialized"}


def test_a_name_that_is_not_known_is_answered_with_one_that_is_meant(compare):
    assert "did you mean 'fused'" in compare("fussed", code=1).stderr

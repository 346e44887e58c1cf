"""Tests in forked processes are reported as pytest reports those that it runs itself."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

FILES = {
    "conftest.py": """
import os, pathlib, pytest
@pytest.fixture(scope="session")
def shared():
    yield os.getpid()
    pathlib.Path(f"ended_{os.getpid()}").touch()
""",
    "test_many.py": """
import os, pathlib, pytest
@pytest.mark.parametrize("number", range(9))
def test_one_process_runs_a_file(number, shared, tmp_path):
    pathlib.Path("many.txt").open("a").write(f"{os.getpid()}\\n")
""",
    "test_faults.py": """
import os, pytest
def test_fails():
    print("printed before")
    assert 1 + 1 == 3
def test_dies(): os._exit(7)
def test_goes_on(): pass
def test_is_skipped(): pytest.skip("not here")
""",
    "test_last.py": "def test_last(capfd): print('x'); assert capfd.readouterr().out == 'x\\n'",
}


def run(folder, *options):
    for name, text in FILES.items():
        (folder / name).write_text(text, "utf-8")
    command = (
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tools.forked_tests",
        "--forks",
        "2",
        "-p",
        "no:cacheprovider",
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [*command, "-p", "no:schemathesis", "--junitxml=told.xml", *options],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    cases = ElementTree.parse(folder / "told.xml").iter("testcase")  # noqa: S314 - written here
    return done, {case.get("name"): [each.tag for each in case if each.tag != "system-out"] for case in cases}


def test_every_test_is_reported_whatever_happens_to_its_process(tmp_path):
    done, outcomes = run(tmp_path)
    many = {f"test_one_process_runs_a_file[{number}]": [] for number in range(9)}
    assert outcomes == many | {
        "test_fails": ["failure"],
        "test_dies": ["failure"],
        "test_goes_on": [],
        "test_is_skipped": ["skipped"],
        "test_last": [],
    }
    assert done.returncode == 1
    for part in ("printed before", "assert (1 + 1) == 3", "ended with 7", "2 failed, 11 passed, 1 skipped"):
        assert part in done.stdout
    processes = {*(tmp_path / "many.txt").read_text("ascii").split()}
    assert len(processes) == 1
    assert {each.name for each in tmp_path.glob("ended_*")} == {f"ended_{each}" for each in processes}


def test_a_limit_of_failures_ends_the_run(tmp_path):
    done, outcomes = run(tmp_path, "-x", "-k", "test_fails or test_goes_on or test_last")
    assert done.returncode == 1
    assert "stopping after 1 failures" in done.stdout
    assert outcomes["test_fails"] == ["failure"]

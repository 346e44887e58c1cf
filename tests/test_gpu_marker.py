"""The marker ``gpu`` finds every test that needs a GPU, which ``make gpu-hour`` relies on."""

from pathlib import Path

ROOT = Path(__file__).parent
HERE = Path(__file__).name


def test_nothing_but_the_marker_skips_for_want_of_a_gpu():
    """What needs a GPU and has no marker fails on a machine without one."""
    uses = {
        str(path.relative_to(ROOT)): count
        for path in ROOT.rglob("*.py")
        if path.name != HERE and (count := path.read_text("utf-8").count("cuda.is_available"))
    }
    assert uses == {"conftest.py": 1}

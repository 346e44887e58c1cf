"""Every notebook runs from its first cell to its last, and its claims hold."""

import os
import re
from pathlib import Path
from unittest.mock import patch

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs Jupyter")
nbclient = pytest.importorskip("nbclient", reason="needs Jupyter")
NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"


def executed(name: str, folder: Path, **env: str) -> tuple[str, dict[str, list[str]]]:
    """Run a notebook in a folder. Return the text that it prints, and its shown results by media type."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=200,
        resources={"metadata": {"path": str(folder)}},
    )
    with patch.dict(os.environ, {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"} | env):
        client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(one.text for one in outputs if one.output_type == "stream" and one.name == "stdout")
    shown: dict[str, list[str]] = {}
    for one in outputs:
        for media_type, content in one.get("data", {}).items():
            shown.setdefault(media_type, []).append(content)
    return printed, shown


def numbers(printed: str, line: str) -> list[float]:
    """Return the numbers that follow a text in the printed output, up to a bracket or the end of the line."""
    found = re.search(rf"{line}[^\d\[-]*\[?([^\]\n]+)", printed)
    assert found, printed
    return [float(number) for number in re.findall(r"-?\d+\.?\d*(?:e[+-]?\d+)?", found[1])]


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_kept_with_their_outputs(path):
    cells = nbformat.read(path, as_version=4).cells
    assert cells[0].cell_type == "markdown"
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)], "run it whole, then keep it"
    outputs = [output for cell in code for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "execute_result", "display_data"}
    assert any("text/html" in output.get("data", {}) or "image/png" in output.get("data", {}) for output in outputs)
    assert path.stat().st_size < 2**20


def check_first_look(notebook):
    """Hold three cells to what they show, and to how a page of them does."""
    nbconvert = pytest.importorskip("nbconvert")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) == 3
    sizes = [len(output.data["text/html"]) for cell in code for output in cell.outputs if "data" in output]
    assert len(sizes) == 3
    assert max(sizes) <= 300_000
    assert all(
        len(output.data["text/plain"].splitlines()) <= 12
        for cell in code[1:] for output in cell.outputs if "data" in output
    )  # fmt: skip
    exported, _ = nbconvert.HTMLExporter(template_name="classic").from_notebook_node(notebook)
    assert exported.count('class="attention-maps"') == 2, "maps of the first and the last cell"
    assert "Predictions of tiny" in exported


def test_three_cells_are_kept_as_they_show_a_model():
    check_first_look(nbformat.read(NOTEBOOKS / "first_look.ipynb", as_version=4))


@pytest.mark.slow  # it starts Jupyter, a server and a model's process: fifteen seconds of a processor
def test_three_cells_show_a_model_without_a_server_beside_them(tmp_path):
    notebook = nbformat.read(NOTEBOOKS / "first_look.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    check_first_look(notebook)


@pytest.mark.slow
def test_a_checkpoint_is_inspected(tmp_path):
    printed, shown = executed("inspect_a_checkpoint", tmp_path)
    assert numbers(printed, "largest difference from transformers")[0] < 1e-5
    assert "tiny-bert.0 4 heads" in printed
    assert "tiny-bert.1 4 heads" in printed
    assert len(numbers(printed, "entropy of each head")) == 4
    assert len(shown["text/html"]) == 2, "the reply and the recording show themselves"
    assert len(shown["image/svg+xml"]) == 1


@pytest.mark.slow
def test_heads_are_patched(server, tmp_path):
    printed, shown = executed("patch_heads", tmp_path, ATTENTION_URL=server)
    changes = [float(change) for change in re.findall(r"^head \d: ([\d.]+)$", printed, re.MULTILINE)]
    assert len(changes) == 8
    assert min(changes) > 0
    assert len(numbers(printed, "restored by each head")) == 8
    assert numbers(printed, "restored by all heads") == [1.0]
    assert numbers(printed, "restored by each query")[:2] == [0.0, 0.0]
    moved = numbers(printed, "change of the entropy of each head")
    assert moved[0] != 0
    assert set(moved[1:]) == {0.0}
    assert len(shown["text/html"]) == 1


@pytest.mark.slow
def test_a_trained_model_has_induction_heads(server, tmp_path):
    printed, shown = executed("induction_heads", tmp_path, ATTENTION_URL=server)
    assert numbers(printed, "loss")[0] < 0.05 + 1e-3
    differences = [float(one) for one in re.findall(r"layer \d differs by (\S+)", printed)]
    assert len(differences) == 2
    assert max(differences) < 1e-4
    rows = re.findall(r"^ +(\d) +(\d) +([\d.]+) +([\d.]+)$", printed, re.MULTILINE)
    assert len(rows) == 8
    assert max(float(previous) for layer, _, previous, _ in rows if layer == "0") > 0.6
    assert max(float(induction) for layer, _, _, induction in rows if layer == "0") < 0.2
    assert max(float(induction) for layer, _, _, induction in rows if layer == "1") > 0.7
    assert min(numbers(printed, "change of the output without each head")) > 0
    assert len(shown["text/html"]) == 1
    assert len(shown["image/svg+xml"]) == 1


@pytest.mark.slow
def test_a_sequence_to_sequence_model_is_aligned(server, tmp_path):
    printed, shown = executed("alignment_of_a_seq2seq", tmp_path, ATTENTION_URL=server)
    assert "notebook → koobeton" in printed
    assert numbers(printed, "weight on the anti-diagonal")[0] > 0.99
    assert len(shown["text/html"]) == 1


@pytest.mark.slow
def test_statistics_of_a_long_context_need_no_weights(server, tmp_path):
    printed, shown = executed("long_context", tmp_path, ATTENTION_URL=server)
    assert "weights in the reply: None" in printed
    assert "pooled: (1, 4, 64, 64)" in printed
    rows = re.findall(r"^ +(\d) +([\d.]+) +([\d.]+) +([\d.]+)$", printed, re.MULTILINE)
    distances = [float(row[1]) for row in rows]
    assert len(distances) == 4
    assert distances == sorted(distances), "a flatter slope looks farther"
    assert "weights: (1, 1, 1, 8192)" in printed
    assert len(shown["image/png"]) == 1

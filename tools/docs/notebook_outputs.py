"""Writer of the notebooks' outputs: ``python -m tools.docs.notebook_outputs [NAME …]`` runs each and keeps them."""

import os
import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat
from tests.conftest import live_server

NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"


def run(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Run a notebook in a folder, its outputs in place of what it held. What goes to standard error is left out."""
    place = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=200, record_timing=False, resources=place).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]


def main(names: list[str]) -> None:
    """Run the notebooks of these names, or all, against a server of their own, and write them."""
    os.environ |= {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if names and path.stem not in names:
            continue
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as folder, live_server(Path(folder)) as url:
            os.environ["ATTENTION_URL"] = url
            run(notebook, Path(folder))
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main(sys.argv[1:])

"""A notebook with a map, run as Jupyter does, exported as a page and read without a network."""

import pytest

nbformat, nbclient, nbconvert = (
    pytest.importorskip(name, reason="needs the extra dev") for name in ("nbformat", "nbclient", "nbconvert")
)

CELL = """
import numpy as np
from attention_contract.schemas.attention import ForwardReply, Ran, Taps

times = dict.fromkeys(["predicted_ms", "predicted_low_ms", "predicted_high_ms", "compute_ms", "queue_ms"], 1.0)
ran = Ran(kernel="fused", device="cpu", dtype="float32", flops=1, batch=1, peak_bytes=1, **times)
weights = np.array([[[[0.1234567, 0.8765433], [1, 0]]]], np.float32)
ForwardReply(weights=weights, differences=Taps(weights=weights - 0.5), ran=ran)
"""


def test_maps_of_an_exported_notebook_work_offline(browser, tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    nbclient.NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(tmp_path)}}).execute()
    exported, _ = nbconvert.HTMLExporter().from_notebook_node(notebook)
    file = tmp_path / "notebook.html"
    file.write_text(exported, "utf-8")
    context = browser.new_context(offline=True)
    page, faults = context.new_page(), []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(f"file://{file}")
    weights, moved = (page.locator(".attention-maps").nth(at) for at in (0, 1))
    weights.locator("canvas").focus()
    page.keyboard.press("ArrowLeft")
    assert weights.get_by_role("status").inner_text() == "0 → 0: 0.1234567"
    moved.locator("canvas").focus()
    page.keyboard.press("ArrowDown")
    assert moved.get_by_role("status").inner_text() == "1 → 0: 0.5"
    label = "H0: 2 × 2, from -0.5 to 0.5"
    assert moved.locator("canvas").get_attribute("aria-label") == label
    painted = "(c) => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size"
    assert moved.locator("canvas").evaluate(painted) > 4
    assert faults == []
    context.close()

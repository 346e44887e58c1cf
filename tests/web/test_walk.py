"""A new user's first minute: from a server with nothing in it to a figure, and to Python that asks the same."""

import os
import subprocess
import sys
import time
from contextlib import redirect_stdout
from io import StringIO

import httpx
import pytest
from tools.proof.servers import serving

from tests.web.conftest import ROOT

SENTENCE = "Kate has a red kite. Tom has a blue"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The URL of a server as `make serve` starts it, with an empty model repository."""
    with serving(tmp_path_factory.mktemp("new"), preload="tiny") as server:
        for _ in range(600):
            if httpx.get(f"{server.url}/v1/models/tiny", timeout=60).json()["state"] == "resident":
                break
            time.sleep(0.2)
        yield server.url


@pytest.mark.parametrize("visit", [{"permissions": ["clipboard-read", "clipboard-write"]}], indirect=True, ids=["user"])
def test_the_first_minute(visit, tmp_path):
    began = time.monotonic()
    page = visit.open()
    page.get_by_label("Type a sentence").fill(SENTENCE)
    page.get_by_label("Type a sentence").press("Enter")
    page.locator(".linked svg > text", has_text="blue").first.wait_for()
    page.get_by_role("link", name="Open L1H0").click()
    page.wait_for_url("**head=0**")
    page.locator(".linked svg > text", has_text="·red").first.hover()
    page.locator(".linked > .readout").filter(has_text="·red looks at").wait_for()

    page.goto(page.url.replace("#/overview", "#/edit"))
    page.get_by_role("button", name="Knock out L1H0").click()
    page.get_by_label("Prediction of").wait_for()
    page.goto(page.url.replace("#/edit", "#/compare"))
    page.get_by_label("Its head").select_option("2")
    page.wait_for_url("**b_head=2**")
    page.locator("dt", has_text="largest difference").wait_for()

    page.goto(page.url.replace("#/compare", "#/head"))
    page.locator("main canvas").first.wait_for()
    with page.expect_download() as download:
        page.get_by_role("button", name="SVG", exact=True).click()
    assert download.value.path().read_text("utf-8").count("<rect") > 1
    page.get_by_role("button", name="Copy Python").first.click()
    page.get_by_role("button", name="Copied").wait_for()
    took = time.monotonic() - began
    program = tmp_path / "copied.py"
    program.write_text(page.evaluate("navigator.clipboard.readText()"), "utf-8")
    assert "from attention_client import Client" in program.read_text("utf-8")
    ran = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "client"), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "weights" in ran.stdout
    print(f"{took:.1f} s from the page's address to the copied Python")
    assert took < 60


@pytest.mark.parametrize(
    "view",
    [
        "overview", "head", "query", "edit", "effects?sweep=heads", "gradient", "gradient?method=gradient_attention",
        "rollout", "circuits", "cost", "learn",
    ],
)  # fmt: skip
def test_copied_python_sends_what_the_page_sent(visit, view):
    for source in ("builtin:cat", "model:tiny"):
        page = visit.open(f"#/{view}{'&' if '?' in view else '?'}source={source}&layer=1&head=1")
        visit.screenshot()  # commands may come after what they ask for
        for command in page.locator(".command details").all():
            command.locator("summary").click()
            program = command.locator("pre").nth(1).text_content()
            with redirect_stdout(StringIO()) as printed:
                exec(program, {})  # noqa: S102 - the test is whether it runs
            assert printed.getvalue()

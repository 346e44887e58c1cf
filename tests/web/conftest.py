"""A browser, and pages that fail a test for console errors and for requests to another host."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

import attention_service
from attention_client.recording import Recording
from tests.conftest import live_server

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
ARGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip
ROOT = Path(__file__).parent.parent.parent
AXE = ROOT / "web/node_modules/axe-core/axe.min.js"
SHOTS = os.environ.get("PAGE_PICTURES")
"""A folder for pictures of the views. Without it they are compared with those of the documents."""
PICTURES = ROOT / "docs/page"
DRAWN_BY = "chromium "
"""The release of the browser follows it in a picture's ``Software``."""
RECORDING = Path(attention_service.__file__).parent / "web/recordings/cat.safetensors"
DARK = pytest.mark.parametrize("visit", [{"color_scheme": "dark"}], indirect=True)
SCREEN = {"width": 1100, "height": 980}
NEEDS_AXE = pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed: run `make web`")
PHONE = pytest.mark.parametrize(
    "visit", [{"viewport": {"width": 390, "height": 844}, "has_touch": True}], indirect=True
)
DRAWN = """() => document.querySelector("main h2") && !document.querySelector("[aria-busy=true]")
  && [...document.querySelectorAll("main .empty")].every((each) => !each.textContent.includes("…"))
  && [...document.querySelectorAll(".stage canvas")].every((each) => each.style.width || !each.checkVisibility())"""
"""True once nothing is waited for and each heat map is laid out."""
PATIENCE_S = 120
"""Seconds after which something will not come: other work may be on both processors."""
BLOCK = 8
"""Pixels a side of the squares whose mean colours are compared: edges of letters differ between releases of a font."""
OTHER = 24
"""Of 255: the difference of a channel from which on a square looks different."""
ALIKE = 0.98
"""The share of squares that must look the same."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith("tests/web/"):
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    if not Path(CHROMIUM).exists():
        pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=list(ARGS))
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server whose model repository holds a small checkpoint."""
    folder = tmp_path_factory.mktemp("page")
    _save_checkpoint(folder / "tiny-bert")
    with live_server(folder) as url:
        yield url


@pytest.fixture(scope="session")
def site_with_t5(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server with `tiny` and a T5 with random parameters, whose scores have a bias and no scale."""
    families = pytest.importorskip("tests.client.transformers.families")
    tiny_models = pytest.importorskip("tests.client.tiny_models")
    folder = tmp_path_factory.mktemp("models")
    for part in (families.tiny("t5"), tiny_models.tokenizer()):
        part.save_pretrained(folder / "t5")
    with live_server(folder) as url:
        for checkpoint in ("tiny", "t5"):
            httpx.post(f"{url}/v1/models", json={"checkpoint": checkpoint}, timeout=120).raise_for_status()
        yield url


def _save_checkpoint(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    width, layers = 16, 2
    random = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(layers):
        for role in ("self.query", "self.key", "self.value", "output.dense"):
            name = f"encoder.layer.{layer}.attention.{role}"
            tensors[f"{name}.weight"] = torch.randn(width, width, generator=random) / 4
            tensors[f"{name}.bias"] = torch.zeros(width)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "bert", "hidden_size": width, "num_attention_heads": 2, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")


def release_of(picture: Path) -> str:
    """The release of the browser that drew a picture."""
    with Image.open(picture) as opened:
        return opened.info["Software"].removeprefix(DRAWN_BY)


def numbers(page: Any, at: int = 0) -> np.ndarray:
    """The numbers of the table below a heat map, the first of the page by default."""
    table = page.locator("details", has_text="As a table").nth(at)
    table.locator("summary").click()
    table.locator("tbody tr").first.wait_for()
    rows = [row.locator("td").all_inner_texts() for row in table.locator("tbody tr").all()]
    return np.array([[float(cell.replace("−", "-")) for cell in row] for row in rows])


@dataclass
class Visit:
    """One page of the browser at the server, and what went wrong in it."""

    page: Any
    url: str
    http: httpx.Client
    """Asks the same server, with patience: the browser's own questions may be on both processors."""
    faults: list[str] = field(default_factory=list)

    def open(self, fragment: str = "") -> Any:
        """Load the page at a fragment such as ``#/head`` and return it once its view is there.

        A fragment without a source gets the recording that ships with the page. Without a fragment the page opens as
        it does for everybody.
        """
        if fragment and "source=" not in fragment:
            fragment += f"{'&' if '?' in fragment else '?'}source=builtin:cat"
        self.page.goto("about:blank")
        self.page.goto(f"{self.url}/{fragment}")
        self.drawn()
        return self.page

    def until(self, holds: Callable[[], object]) -> None:
        """Let the page go on until something holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, "it did not come to hold"
            self.page.wait_for_timeout(20)

    def drawn(self) -> None:
        """Wait until the view has its numbers and its heat maps are laid out."""
        self.page.wait_for_function(DRAWN)

    def screenshot(self) -> bytes:
        """The page as a PNG, once it stands still: drawn, and the same twice."""
        self.drawn()
        before = None
        for _ in range(100):
            shown = self.page.screenshot(animations="disabled")
            if shown == before:
                break
            before = shown
            self.page.wait_for_timeout(100)
        return shown

    def refused(self, requests: int) -> None:
        """Forget the browser's lines about so many requests that were refused; they may come after the answers."""
        self.until(lambda: len(self.faults) >= requests)
        assert all("status of 4" in line for line in self.faults)
        self.faults.clear()

    def picture(self, name: str, at: Any = None, *, compared: bool = True) -> None:
        """Compare the page with its picture in the documents, or write it if a folder for pictures is set.

        Pictures of another release of the browser are not compared, since it may draw letters and fields differently;
        ``test_pictures_are_of_this_browser`` is skipped then.

        ``at``: the locator that is scrolled into view; by default the picture begins at the top. Not ``compared`` is a
        page that shows what other tests left.
        """
        self.drawn()
        self.page.evaluate("scrollTo(0, 0)")
        if at is not None:
            at.scroll_into_view_if_needed()
        raw = Image.open(BytesIO(self.screenshot())).convert("RGB")
        drawn = raw.quantize(96, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)  # rare colours too keep theirs
        release = self.page.context.browser.version
        if SHOTS:
            facts = PngInfo()
            facts.add_text("Software", DRAWN_BY + release)
            drawn.save(f"{SHOTS}/{name}.png", optimize=True, pnginfo=facts)
        elif compared and (path := PICTURES / f"{name}.png").exists() and release_of(path) == release:
            kept = Image.open(path)
            found, expected = (np.asarray(each.convert("RGB").reduce(BLOCK), int) for each in (drawn, kept))
            assert found.shape == expected.shape
            share = (np.abs(found - expected).max(2) <= OTHER).mean()
            assert share >= ALIKE, f"{name} looks different: look at it, and renew docs/page with PAGE_PICTURES"

    def violations(self) -> list[str]:
        """The rules of axe that the page breaks; none without axe, so that the rest of a test is run there too."""
        if not AXE.exists():
            return []
        self.drawn()  # pale until its numbers are there
        self.page.evaluate(AXE.read_text("utf-8"))
        found = self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [f"{each['id']}: {each['nodes'][0]['html'][:200]}" for each in found["violations"]]


@pytest.fixture
def visit(browser: Any, site: str, request: pytest.FixtureRequest) -> Iterator[Visit]:
    """A page of a context of its own. The test fails for an error in the console, or a request to another host."""
    options = {"viewport": SCREEN} | getattr(request, "param", {})
    context = browser.new_context(**options)
    visited = Visit(context.new_page(), site, httpx.Client(base_url=site, timeout=60))
    page = visited.page
    page.set_default_timeout(1000 * PATIENCE_S)
    page.on("console", lambda line: line.type in ("error", "warning") and visited.faults.append(line.text))
    page.on("pageerror", lambda error: visited.faults.append(str(error)))
    page.on(
        "request",
        lambda sent_request: visited.faults.append(sent_request.url) if not _own(sent_request.url, site) else None,
    )
    with visited.http:
        yield visited
    context.close()
    assert visited.faults == []


def _own(url: str, site: str) -> bool:
    return url.startswith((site, "blob:", "data:", "about:"))


@pytest.fixture
def recorded() -> Recording:
    """The recording that the page opens first, read by the client."""
    return Recording.load(RECORDING)


def live(recorded: Recording, layer: int) -> dict[str, object]:
    """The queries, keys and values that the page sends of a recorded layer."""
    fields = {"query": "q", "key": "k", "value": "v"}
    return {name: recorded.read(layer, tap).astype(float).tolist() for name, tap in fields.items()}


def facts(page) -> dict[str, str]:
    """The facts of the view, by name."""
    return page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('dl.facts > div')].map((e) => "
        "[e.querySelector('dt').textContent, e.querySelector('dd').textContent]))"
    )

"""Export the page with recorded replies: static files that any file server shows, without a server of this project.

::

    python web/export_site.py [FOLDER]    needs the extras server and transformers, playwright, and Debian's chromium

A browser opens the views at a server, and every reply is written to a file whose name is a hash of its request
(``web/src/server/recorded.ts`` computes the same). The views are Overview, Head, Find heads,
and those of the tour of ``tiny``.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from attention_client import Client
from attention_client.survey.head_survey import SURVEYED

ROOT: Final = Path(__file__).parent.parent
BUILT: Final = ROOT / "service/attention_service/web"
TARGET: Final = ROOT / "build/page"
CHROMIUM: Final = shutil.which("chromium") or "/usr/bin/chromium"
MODEL: Final = "tiny"
VIEWS: Final = ("overview", "head", "find", "tour")
"""The views that are always there; those that the tour leads to come with them."""
OWN_SERVER: Final = "http://127.0.0.1:8000/"
"""The server of ``make serve``, which the commands on the exported page name."""


def reply_file(method: str, path: str, body: str) -> str:
    """The name of the file of a reply: FNV-1a with 64 bits of the request."""
    state = 0xCBF29CE484222325
    for byte in f"{method} {path} {body}".encode():
        state = (state ^ byte) * 0x100000001B3 % 2**64
    return f"{state:016x}"


@contextmanager
def server() -> Iterator[str]:
    """The URL of a server with an empty model repository, at which the model is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as models:
        environment = os.environ | {"ATTENTION_MODELS_DIR": models, "ATTENTION_PORT": str(port)}
        command = [sys.executable, "-m", "attention_service", "--log-level", "warning"]
        process = subprocess.Popen(command, env=environment, cwd=models)  # noqa: S603 - this server
        try:
            wait_until_ready(url, process)
            httpx.post(f"{url}/v1/models", json={"checkpoint": MODEL}, timeout=300).raise_for_status()
            yield url
        finally:
            process.terminate()
            process.wait(30)


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait for a server. Raises SystemExit if it does not become ready."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise SystemExit("the server did not become ready; its log is above")


class Recorder:
    """The replies of a server, as files."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._folder = folder

    def finished(self, request: Any) -> None:
        """Keep a reply that the browser got."""
        path = request.url.removeprefix(f"{self._url}/")
        response = request.response()
        if path.startswith(("v1", "health/")) and response is not None and response.status == 200:
            self.keep(request.method, path, request.post_data or "", response.body())

    def keep(self, method: str, path: str, body: str, content: bytes) -> None:
        """Write a reply."""
        if path == "health/ready":  # the page shows the status in its head
            content = json.dumps(json.loads(content) | {"status": "recorded"}).encode()
        (self._folder / reply_file(method, path, body)).write_bytes(content)

    def keep_passages(self) -> None:
        """Ask for the passages of *Find heads*, in which each head is strongest by each statistic; keep the replies."""
        path = f"v1/models/{MODEL}/weights"
        headers = {"Accept": "application/vnd.safetensors", "Content-Type": "application/json"}
        with Client(self._url, timeout=120) as client:
            survey = client.models.survey(MODEL)
        listed = {
            (layer, head, survey.texts[text])
            for layer, head in survey.heads
            for by in SURVEYED
            for text in survey.strongest(layer, head, by)
        }
        with httpx.Client(base_url=self._url, headers=headers, timeout=60) as http:
            for layer, head, text in sorted(listed):
                fields = {"text": text, "layers": [layer], "select": {"heads": [head]}, "statistics": []}
                body = json.dumps(fields, separators=(",", ":"), ensure_ascii=False)  # as the page writes it
                self.keep("POST", path, body, http.post(path, content=body.encode()).raise_for_status().content)


def visit(page: Any, url: str, address: str) -> None:
    """Open an address and wait until the view has all its replies."""
    page.goto("about:blank")
    page.goto(f"{url}/{address}")
    page.wait_for_selector("main h2")
    page.wait_for_load_state("networkidle")
    page.locator("main .empty", has_text="…").wait_for(state="detached")
    page.wait_for_load_state("networkidle")


def record(url: str, folder: Path) -> list[str]:
    """Open every view and write its replies. Returns the views."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - of the extra dev

    recorder = Recorder(url, folder)
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--headless", "--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(60_000)
        page.on("requestfinished", recorder.finished)
        visit(page, url, "")
        visit(page, url, f"#/head?source=model:{MODEL}")
        visit(page, url, "#/tour")
        links = page.locator("ol.tour a").evaluate_all("links => links.map((each) => each.getAttribute('href'))")
        for link in links:
            visit(page, url, link)
        visit(page, url, f"#/find?source=model:{MODEL}&survey=yes")
        page.locator(".passages li").first.wait_for()
        page.wait_for_load_state("networkidle")
        browser.close()
    recorder.keep_passages()
    shown = [urlsplit(link.removeprefix("#")).path.strip("/") for link in links]
    return [*dict.fromkeys([*VIEWS, *shown])]


def export(target: Path) -> None:
    """Write the page and its replies to a folder, which is emptied first."""
    shutil.rmtree(target, ignore_errors=True)
    (target / "replies").mkdir(parents=True)
    shutil.copytree(BUILT, target / "web", ignore=shutil.ignore_patterns("index.html"))
    with server() as url:
        views = record(url, target / "replies")
    meta = f'  <meta name="recorded-views" content="{" ".join(views)}" data-server="{OWN_SERVER}">\n'
    page = (BUILT / "index.html").read_text("utf-8")
    (target / "index.html").write_text(page.replace("  <title>", f"{meta}  <title>", 1), "utf-8")
    files = [each for each in target.rglob("*") if each.is_file()]
    size = sum(each.stat().st_size for each in files) / 2**20
    print(f"{target}: {len(files)} files, {size:.1f} MiB; views {', '.join(views)}")


if __name__ == "__main__":
    if not Path(CHROMIUM).exists():
        raise SystemExit("the replies are recorded by chromium, which is not installed: apt-get install chromium")
    export(Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET)

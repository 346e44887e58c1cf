"""One view of the page in a frame of another page."""

import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.conftest import live_server

SNIPPET = re.search(r"```text\n(<iframe.*?)```", Path("docs/page.md").read_text("utf-8"), re.DOTALL)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def blog(tmp_path):
    """The folder and the origin of a site that has nothing to do with the server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path)) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        yield tmp_path, f"http://localhost:{site.server_port}"
        site.shutdown()


@pytest.mark.parametrize("allowed", [True, False])
def test_the_documented_frame_shows_one_view_where_the_operator_allows_it(browser, blog, tmp_path_factory, allowed):
    folder, origin = blog
    (models := tmp_path_factory.mktemp("embedding")).mkdir(exist_ok=True)
    with live_server(models, **({"frame_origins": origin} if allowed else {})) as url:
        framed = SNIPPET[1].replace("https://attention.example", url)
        (folder / "index.html").write_text(f"<!doctype html><title>blog</title>{framed}", "utf-8")
        context = browser.new_context(viewport={"width": 800, "height": 900})
        page = context.new_page()
        frame = page.frame_locator("iframe")
        if allowed:
            page.goto(origin)
            frame.locator(".linked svg path, .stage canvas").first.wait_for(timeout=60_000)
            assert frame.locator("header.page, footer, .skip").count() == 0
            link = frame.get_by_role("link", name="on the whole page")
            assert "embed" not in link.get_attribute("href")
        else:
            with page.expect_console_message(lambda line: "frame-ancestors" in line.text):
                page.goto(origin)
            assert frame.locator("#main").count() == 0
        context.close()

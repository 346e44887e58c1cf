"""The page that `make site` exports: any file server shows it; what was not recorded says so."""

import re
import subprocess
import sys

import pytest

from tests.web.conftest import ROOT

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def exported(browser, tmp_path_factory):
    """The folder of the exported page."""
    folder = tmp_path_factory.mktemp("exported")
    command = [sys.executable, str(ROOT / "web/export_site.py"), str(folder)]
    subprocess.run(command, check=True, timeout=300)
    return folder


@pytest.fixture(scope="module")
def site(exported):
    """The URL of Python's file server at the exported page."""
    command = [sys.executable, "-u", "-m", "http.server", "--bind", "127.0.0.1", "--directory", str(exported), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as files:
        try:
            yield re.search(r"http://127.0.0.1:\d+", files.stdout.readline())[0]
        finally:
            files.terminate()


def test_an_exported_page_draws_the_overview_the_tour_and_all_heads_without_a_server(visit):
    refused = []
    visit.page.on("response", lambda reply: reply.status >= 400 and refused.append(reply.url))
    page = visit.open()
    page.locator("main canvas").first.wait_for()
    page.locator(".health", has_text="recorded").wait_for()
    views = page.get_by_role("navigation", name="Views")
    assert views.get_by_role("list").first.locator("a").all_inner_texts() == ["Look", "Change", "Explain"]
    assert views.get_by_role("list", name="Look").locator("a").all_inner_texts() == ["Overview", "Head", "Find heads"]
    assert page.get_by_role("link", name="API docs").count() == 0

    page.get_by_role("link", name="five findings").click()
    page.get_by_role("button", name="Begin").click()
    strip = page.get_by_role("region", name="Tour")
    for stop in range(1, 5):
        strip.get_by_text(f"{stop} of 5").wait_for()
        page.locator("main canvas").first.wait_for()
        visit.drawn()
        strip.get_by_role("link", name="Next").click()
    page.locator("svg.drawing").get_by_text("ir", exact=True).wait_for()  # the likeliest next tokens

    visit.open("#/find?source=model:tiny&survey=yes")
    page.locator(".scatter [role=button]").last.click()  # another head than the first
    page.locator(".passages button").nth(2).click()
    page.locator(".linked canvas").wait_for()
    visit.drawn()
    page.wait_for_load_state("networkidle")
    assert refused == []
    assert page.locator(".problem").count() == 0


def test_a_sentence_about_what_was_not_recorded_names_the_way_to_a_server(visit):
    page = visit.open("#/head?source=model:tiny")
    page.get_by_label("Type a sentence").fill("Another sentence")
    page.get_by_label("Type a sentence").press("Enter")
    page.get_by_text("This page has no server").wait_for()
    page.get_by_text("make serve starts a server").wait_for()
    page.wait_for_load_state("networkidle")  # a view that is still open may ask too
    visit.refused(1)

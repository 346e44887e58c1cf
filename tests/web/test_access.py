"""The page of a server with keys: the browser asks for one and keeps it; the page tells when it is no longer good."""

from contextlib import closing

import pytest

from attention_service.api.access import api_keys
from attention_service.api.access.api_keys import create_key, revoke_key
from tests.conftest import live_server


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    create_key(folder, "operator", ["manage"])
    return folder


@pytest.fixture(scope="module")
def site(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api_keys, "_LOOK_S", 0.0)
        with live_server(folder, require_keys=True) as url:
            yield url


def test_the_browser_asks_for_a_key_and_the_page_for_another_once_it_is_revoked(browser, site, folder):
    key = create_key(folder, "alice", ["infer", "inspect"])
    with closing(browser.new_context(http_credentials={"username": "alice", "password": key})) as context:
        page = context.new_page()
        page.goto(f"{site}/#/head?source=builtin:cat")
        page.locator(".stage canvas").wait_for()
        page.reload()  # the browser keeps the key
        page.locator(".stage canvas").wait_for()
        revoke_key(folder, "alice")
        page.get_by_role("link", name="Server").click()
        again = page.get_by_role("button", name="Enter another key").first
        again.wait_for()
        with page.expect_response(f"{site}/") as loaded:
            again.click()
        assert loaded.value.status == 401
        assert loaded.value.headers["www-authenticate"].startswith("Basic ")

"""The gateway's page in a real browser, on a desktop's and a phone's width."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from models.serving.gateway.keys import CHAT, Key, Keys
from tests.integration.servers import BROWSER
from tests.models.serving.gateway_running import KEY, built
from tests.models.serving.gateway_servers import Stub, serving

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if BROWSER is None:
        pytest.skip("no browser is installed; tests/ensure_chromium.sh brings one")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (375, 720)])
def test_a_person_sees_who_answers_and_tries_a_message(browser: Any, tmp_path: Path, width: int, height: int) -> None:
    stub = Stub()
    with serving(stub.app) as behind:
        app, fleet, _ = built(behind)
        with serving(app) as url:
            page = browser.new_page(viewport={"width": width, "height": height})
            said: list[str] = []
            page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
            page.on("pageerror", lambda problem: said.append(str(problem)))
            asked: list[str] = []
            page.on("request", lambda request: asked.append(request.url))
            page.goto(url)
            # The gateway asks for a key: nothing is shown before it is given.
            page.get_by_label("API key").fill(KEY)
            page.get_by_role("button", name="Use this key").click()
            page.get_by_text("refund@v1-aaaaaaaa").first.wait_for()
            assert page.locator("#about").inner_text() == "shop · 1 of 1 servers up".replace("servers", "model")
            assert page.locator("#release").inner_text().startswith("Release 1, served since ")
            assert page.locator("#release").inner_text().endswith(": refund@v1-aaaaaaaa.")
            # An adapter may be live for weeks: its time has a date.
            assert re.search("since .*1970", page.locator("#adapters").inner_text())
            assert page.locator("#refused").is_hidden()
            page.get_by_label("What a user would write").fill("<b>refund</b> 7 of order 264")
            page.get_by_role("button", name="Send").click()
            page.locator("#result").wait_for()
            assert page.locator("#who").inner_text() == "refund@v1-aaaaaaaa"
            assert page.locator("#said").inner_text() == "you said <b>refund</b> 7 of order 264"
            assert "90 %" in page.locator("#route").inner_text()
            assert "Release 1. Route: refund" in page.locator("#how").inner_text()
            page.locator("#answers", has_text="1").wait_for()
            assert page.locator("#adapted").inner_text() == "100 %"
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"the page is {wide} wide on a screen of {width}"
            fleet.wanted, fleet.problem = 2, "ship@v1-cccccccc is refused: <b>not live</b>"
            page.locator("#refused", has_text="Should be served: release 2. Release 1 goes on, because").wait_for()
            assert "<b>not live</b>" in page.locator("#refused").inner_text()
            page.get_by_label("What a user would write").fill("fail")
            page.get_by_role("button", name="Send").click()
            page.get_by_role("alert").wait_for()
            assert "failed" in page.get_by_role("alert").inner_text()
            # 401 before the key and 500 at the end are logged by the browser itself.
            assert [line for line in said if "status of 401" not in line and "status of 500" not in line] == []
            assert all(one.startswith(url) for one in asked), "the page asks nobody else"
            page.screenshot(path=str(tmp_path / f"page-{width}.png"), full_page=True)
            page.close()


def test_a_key_that_may_not_see_the_figures_may_try_a_message(browser: Any) -> None:
    stub = Stub()
    mine = Key("anna", (hashlib.sha256(KEY.encode()).digest(),), frozenset({CHAT}))
    with serving(stub.app) as behind, serving(built(behind, keys=Keys([mine]))[0]) as url:
        page = browser.new_page()
        page.goto(url)
        page.get_by_label("API key").fill(KEY)
        page.get_by_role("button", name="Use this key").click()
        page.locator("#about", has_text="it needs the scope admin").wait_for()
        page.get_by_label("What a user would write").fill("refund 7")
        page.get_by_role("button", name="Send").click()
        page.locator("#result").wait_for()
        assert page.locator("#said").inner_text() == "you said refund 7"
        assert page.get_by_role("alert").is_hidden()
        page.close()

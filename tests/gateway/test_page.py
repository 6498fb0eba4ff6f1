"""What the page makes of news: which models can be asked, what is said of a swarm and of a run, how wide it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright import sync_api as playwright

from tests.gateway.page_stage import CHROMIUM, Stage, model, stage, swarm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium"),
]
NOTE = "form [role=status]"


@pytest.fixture
def browser() -> Iterator[Stage]:
    with stage() as found:
        yield found


def test_a_model_that_cannot_chat_is_marked_with_the_reason(browser: Stage) -> None:
    browser.open()
    browser.say("swarm", swarm(model("demo", chats=False)))
    option = browser.page.locator("option[value=demo]")
    playwright.expect(option).to_have_text("demo (cannot chat: it has no chat template)")
    playwright.expect(option).to_have_attribute("disabled", "")
    browser.see(NOTE, "No model here can chat. demo only continues texts: swarmd run demo")
    assert browser.page.locator("text=Send").is_disabled()
    browser.say("swarm", swarm(model("demo", chats=False), model("smol")))
    playwright.expect(browser.page.locator("select")).to_have_value("smol")
    playwright.expect(browser.page.locator("text=Send")).to_be_enabled()
    playwright.expect(browser.page.locator(NOTE)).to_have_text("")


def test_no_other_model_is_chosen_silently(browser: Stage) -> None:
    browser.open()
    browser.say("swarm", swarm(model("demo", chats=None), model("other"), model("smol")))
    picker = browser.page.locator("select")
    playwright.expect(picker).to_have_value("smol")
    browser.say("swarm", swarm(model("demo", chats=None), model("other"), model("smol", (3, 6))))
    browser.see(NOTE, "Nobody serves blocks [3,6) of smol now")
    playwright.expect(picker).to_have_value("smol")
    browser.say("swarm", swarm(model("demo", chats=None), model("other")))
    browser.see(NOTE, "smol is not in the swarm's catalog any more")
    playwright.expect(picker).to_have_value("smol")
    assert browser.page.locator("text=Send").is_disabled()


def test_who_turns_out_not_to_chat_keeps_its_place_once_it_was_chosen(browser: Stage) -> None:
    browser.open()
    browser.say("swarm", swarm(model("base", chats=None), model("smol")))
    browser.page.select_option("select", "base")
    browser.say("swarm", swarm(model("base", chats=False), model("smol")))
    browser.see(NOTE, "base has no chat template, so it cannot chat: choose another model")
    playwright.expect(browser.page.locator("select")).to_have_value("base")

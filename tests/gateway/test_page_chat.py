"""The page's chat in a real Chromium: conversations that stay, branches, files, thoughts, calls, code, what is sent."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright import sync_api as playwright

from tests.gateway.page_stage import CHROMIUM, WAIT_MS, Stage, model, stage, started_chromium, swarm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium"),
]
WIDE = {"width": 1280, "height": 900}
ANSWER = """| name | n |
|:--|--:|
| a | 1 |

```python
def f(): return "x"  # note
```

- [x] done

<script>alert(1)</script>

[bad](javascript:alert(1)) ![i](https://x.y/i.png)"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with started_chromium() as started:
        yield started


@pytest.fixture(params=[WIDE, {"width": 390, "height": 800}], ids=["wide", "mobile"])
def browser(chromium: Any, request: pytest.FixtureRequest) -> Iterator[Stage]:
    with stage(chromium, request.param) as shown:
        begin(shown)
        yield shown
        assert shown.too_wide() <= 0


def begin(shown: Stage) -> None:
    shown.open()
    be_told(shown)


def be_told(shown: Stage) -> None:
    """Have the page know a model that it can ask, as it does not right after it was loaded."""
    for _ in range(3):  # one may still go to the page as it was before
        shown.say("swarm", swarm(model("smol")))
    playwright.expect(shown.page.locator(".ask button[type=submit]")).to_be_enabled()


def ask(shown: Stage, question: str, answer: str, finish: str = "stop") -> None:
    shown.reply({"content": answer}, finish=finish)
    shown.ask(question)
    playwright.expect(shown.page.locator(".turn.assistant .told").last).to_contain_text("tokens/s", timeout=WAIT_MS)


def said(shown: Stage) -> list[str]:
    return [text.strip() for text in shown.page.locator(".turn > .said").all_inner_texts()]


def open_side(shown: Stage) -> None:
    open_side_of(shown.page)


def open_side_of(page: Any) -> None:
    if page.locator("details.side").get_attribute("open") is None:
        page.click("details.side > summary")


def open_another_tab(shown: Stage) -> Any:
    """A page of the same browser that shows its last conversation."""
    other = shown.page.context.new_page()
    other.goto(shown.page.url)
    open_side_of(other)
    other.click(".conversations .title")
    return other


def test_conversations_are_kept_found_renamed_exported_and_deleted(browser: Stage) -> None:
    page = browser.page
    ask(browser, "How tall is a giraffe?", "Tall.")
    open_side(browser)
    page.click("text=New")
    assert said(browser) == []
    ask(browser, "And an okapi?", "Less tall.")
    page.reload()
    open_side(browser)
    titles = page.locator(".conversations .title")
    playwright.expect(titles).to_have_text(["And an okapi?", "How tall is a giraffe?"])
    page.fill("[aria-label='Search conversations']", "GIRAFFE")
    playwright.expect(titles).to_have_text(["How tall is a giraffe?"])
    titles.first.click()
    assert said(browser) == ["How tall is a giraffe?", "Tall."]
    open_side(browser)
    page.click(".more summary")
    page.locator(".more").get_by_text("Rename").click()
    page.fill("[aria-label=Title]", "Giraffes")
    page.press("[aria-label=Title]", "Enter")
    page.fill("[aria-label='Search conversations']", "")
    playwright.expect(titles).to_have_text(["And an okapi?", "Giraffes"])
    page.locator("li", has_text="Giraffes").locator(".more summary").click()
    with page.expect_download() as download:
        page.locator("li", has_text="Giraffes").get_by_text("Export").click()
    assert download.value.suggested_filename.startswith("Giraffes.")
    page.once("dialog", lambda dialog: dialog.accept())
    page.locator("li", has_text="Giraffes").get_by_text("Delete").click()
    playwright.expect(titles).to_have_text(["And an okapi?"])
    page.reload()
    open_side(browser)
    playwright.expect(titles).to_have_text(["And an okapi?"])


def test_what_was_exported_is_imported_with_its_branches_and_settings(browser: Stage, tmp_path: Path) -> None:
    page = browser.page
    page.click("text=Settings")
    page.get_by_label("Temperature").fill("0.5")
    ask(browser, "one", "first")
    page.click("text=Retry")
    browser.reply({"content": "second"})
    playwright.expect(page.locator(".turn.assistant .said")).to_have_text("second")
    open_side(browser)
    page.click(".more summary")
    with page.expect_download(lambda file: file.suggested_filename.endswith(".json")) as download:
        page.get_by_text("Export").click()
    exported = tmp_path / "one.json"
    download.value.save_as(exported)
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_text("Delete").click()
    assert said(browser) == []
    page.set_input_files("[aria-label='An exported conversation']", exported)
    browser.see(".turn.assistant", "2 of 2")
    assert said(browser) == ["one", "second"]
    page.click("[aria-label='The branch before']")
    assert said(browser) == ["one", "first"]
    ask(browser, "two", "third")
    assert browser.asked[-1]["temperature"] == 0.5
    assert [turn["content"] for turn in browser.asked[-1]["messages"]] == ["one", "first", "two"]


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"turns": [{"role": "user", "text": "x", "parent": 4}]}', '{"turns": [null]}']
)
def test_what_is_no_conversation_is_not_imported(browser: Stage, tmp_path: Path, text: str) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text(text)
    open_side(browser)
    browser.page.set_input_files("[aria-label='An exported conversation']", wrong)
    browser.see("[role=alert]", "wrong.json is no exported conversation")
    assert browser.page.locator(".conversations .title").count() == 0


def test_while_one_answer_grows_another_conversation_is_asked(browser: Stage) -> None:
    page = browser.page
    browser.ask("slow")  # which the gateway does not answer yet
    browser.see(".turn.assistant", "")
    open_side(browser)
    page.click("text=New")
    playwright.expect(page.locator(".ask button[type=submit]")).to_be_enabled()
    browser.ask("quick")
    playwright.expect(page.locator(".conversations li", has_text="being answered")).to_have_count(2)
    browser.reply({"content": "first asked"})
    browser.reply({"content": "second asked"})
    playwright.expect(page.locator(".conversations li", has_text="being answered")).to_have_count(0, timeout=WAIT_MS)
    answers = said(browser)
    open_side(browser)
    page.locator(".conversations .title", has_text="slow").click()
    assert sorted([answers[1], said(browser)[1]]) == ["first asked", "second asked"]
    assert [answers[0], said(browser)[0]] == ["quick", "slow"]


def test_a_few_answers_grow_at_a_time(browser: Stage) -> None:
    """A browser has six connections to a gateway."""
    page = browser.page
    for question in ("one", "two", "three"):
        browser.ask(question)
        browser.see(".turn.assistant", "")
        open_side(browser)
        page.click("text=New")
    send = page.locator(".ask button[type=submit]")
    playwright.expect(send).to_be_disabled()
    browser.see(".ask [role=status]", "3 other answers are still being written")
    for _ in range(3):
        browser.reply({"content": "done"})
    playwright.expect(send).to_be_enabled(timeout=WAIT_MS)


def test_a_conversation_is_asked_in_one_tab_at_a_time(browser: Stage) -> None:
    ask(browser, "one", "first")
    other = open_another_tab(browser)
    browser.ask("two")  # which the gateway does not answer yet
    note = other.locator(".ask [role=status]")
    playwright.expect(note).to_have_text("This conversation is being answered in another tab.", timeout=WAIT_MS)
    open_side_of(other)
    other.click(".more summary")
    other.locator(".more").get_by_text("Rename").click()
    other.fill("[aria-label=Title]", "Renamed")
    other.press("[aria-label=Title]", "Enter")
    open_side(browser)
    titles = browser.page.locator(".conversations .title")
    playwright.expect(titles).to_have_text("Renamed")
    browser.reply({"content": "second"})
    playwright.expect(browser.page.locator(".turn.assistant .said")).to_have_text(["first", "second"])
    playwright.expect(note).not_to_contain_text("another tab", timeout=WAIT_MS)
    playwright.expect(other.locator(".turn.assistant .said")).to_have_text(["first", "second"])
    playwright.expect(titles).to_have_text("Renamed")
    other.close()


def test_what_is_edited_or_asked_again_grows_a_branch(browser: Stage) -> None:
    page = browser.page
    ask(browser, "one", "first")
    page.click("text=Retry")
    browser.reply({"content": "second"})
    playwright.expect(page.locator(".turn.assistant .said")).to_have_text("second")
    browser.see(".turn.assistant", "2 of 2")
    page.click("[aria-label='The branch before']")
    assert said(browser) == ["one", "first"]
    ask(browser, "two", "third")
    page.locator(".turn.user").first.get_by_text("Edit").click()
    assert page.input_value("#question") == "one"
    assert said(browser) == []
    page.click("text=Cancel")
    assert said(browser) == ["one", "first", "two", "third"]
    page.locator(".turn.user").first.get_by_text("Edit").click()
    ask(browser, "another one", "fourth")
    assert said(browser) == ["another one", "fourth"]
    assert [turn["content"] for turn in browser.asked[-1]["messages"]] == ["another one"]
    page.click("[aria-label='The branch before']")
    assert said(browser) == ["one", "first", "two", "third"], "as far as it went"


def test_an_answer_that_was_cut_goes_on(browser: Stage) -> None:
    ask(browser, "Count.", "one two ", finish="length")
    browser.reply({"content": "three"})
    browser.page.click("text=Go on")
    playwright.expect(browser.page.locator(".turn.assistant .said")).to_have_text("one two three")
    asked = browser.asked[-1]
    assert asked["continue_final_message"] is True
    assert asked["add_generation_prompt"] is False
    assert asked["messages"][-1] == {"role": "assistant", "content": "one two "}
    assert browser.page.locator("text=Go on").count() == 0


def test_settings_are_sent_and_stay_with_their_conversation(browser: Stage) -> None:
    page = browser.page
    page.click("text=Settings")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.3")
    page.get_by_label("At most, tokens").fill("50")
    page.get_by_label("Thinking").select_option("none")
    ask(browser, "Hi", "Hello.")
    asked = browser.asked[-1]
    assert asked["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (asked["temperature"], asked["max_tokens"], asked["reasoning_effort"]) == (0.3, 50, "none")
    assert "top_p" not in asked
    page.reload()
    open_side(browser)
    page.click(".conversations .title")
    page.click("text=Settings")
    assert page.get_by_label("System prompt").input_value() == "Be brief."


def test_a_text_file_is_asked_about_and_what_is_none_is_refused(browser: Stage) -> None:
    page = browser.page
    file = ".ask input[type=file]"
    page.set_input_files(file, {"name": "a.bin", "mimeType": "x/y", "buffer": b"a\0b"})
    browser.see(".ask [role=alert]", "a.bin is no text.")
    page.set_input_files(file, {"name": "big.txt", "mimeType": "text/plain", "buffer": b"x" * 200_001})
    browser.see(".ask [role=alert]", "big.txt has 200001 characters")
    page.set_input_files(file, {"name": "notes.txt", "mimeType": "text/plain", "buffer": "naïve".encode()})
    browser.see(".chip", "notes.txt")
    ask(browser, "What is it?", "A word.")
    assert browser.asked[-1]["messages"][-1]["content"] == "notes.txt:\n```\nnaïve\n```\n\nWhat is it?"
    browser.see(".turn.user summary", "notes.txt, 5 characters")
    assert page.locator(".chip").count() == 0


def test_tools_are_called_and_what_came_of_them_is_sent(browser: Stage) -> None:
    page = browser.page
    page.click("text=Settings")
    tools = page.get_by_label("Tools")
    tools.fill("{not a list")
    tools.blur()
    assert tools.evaluate("(place) => place.validationMessage").startswith("These tools cannot be read")
    tools.fill('[{"type": "function", "function": {"name": "weather"}}]')
    tools.blur()
    call = {"index": 0, "id": "c1", "function": {"name": "weather", "arguments": '{"where": "Rome"}'}}
    browser.reply({"tool_calls": [call]}, finish="tool_calls")
    browser.ask("Is it warm?")
    browser.see(".call", "weather")
    page.fill("[aria-label='Result of weather']", "Sunny")
    browser.reply({"content": "It is."})
    page.click("text=Send result")
    playwright.expect(page.locator(".turn.assistant .said").last).to_have_text("It is.")
    *_, called, result = browser.asked[-1]["messages"]
    assert called["tool_calls"][0]["function"] == call["function"]
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "Sunny"}


def test_thoughts_are_folded_and_an_answer_is_drawn_without_its_html(browser: Stage) -> None:
    page = browser.page
    browser.reply({"reasoning_content": "I wonder."}, {"content": ANSWER})
    browser.ask("Show me")
    browser.see(".told", "tokens/s")
    assert not page.locator(".thoughts").is_visible()
    page.click("text=Thoughts")
    assert page.locator(".thoughts").inner_text() == "I wonder."
    assert page.locator(".said td.to-right").inner_text() == "1"
    assert page.locator(".said .hljs-keyword").first.inner_text() == "def"
    assert page.locator(".said pre").inner_text() == 'def f(): return "x"  # note'
    assert page.locator(".said input[type=checkbox]").is_checked()
    shown = page.locator(".said").last
    assert "<script>alert(1)</script>" in shown.inner_text()
    assert shown.locator("script, img").count() == 0
    assert [link.get_attribute("href") for link in shown.locator("a").all()] == ["https://x.y/i.png"]


def test_an_error_is_told_under_its_answer_and_asked_again(browser: Stage) -> None:
    browser.replies.put([{"error": {"message": "the queue is full"}}])
    browser.ask("Hi")
    browser.see(".told.bad", "✖ the queue is full")
    browser.reply({"content": "Hello."})
    browser.page.click("text=Retry")
    playwright.expect(browser.page.locator(".turn.assistant .said")).to_have_text("Hello.")


def test_the_picker_says_how_large_a_model_is_who_serves_it_and_how_fast(browser: Stage) -> None:
    known = model("smol") | {"max_tokens": 8192}
    browser.say("swarm", swarm(known))
    browser.see(".row .dim", "6 blocks · 1 machine serves it · 8,192 tokens of context · up to 31 tokens/s")


def test_a_swarm_is_pictured_with_its_answers_and_a_death(browser: Stage) -> None:
    page = browser.page
    page.click("nav a[href='#/swarm']")
    known = model("smol")
    whole = swarm(known)
    first = whole["peers"][0]
    bob = {**first, "peer": "12D3KooWbobsbobs", "label": "bobsbobs (bob)", "is_here": False}
    browser.say("swarm", {**whole, "peers": [first, bob], "n_peers": 2})
    browser.see(".bar.online text", "bobsbobs")
    flow = {"model": known["model"], "chain": ["[0,6) on bobsbobs"], "n_prompt": 5, "n_generated": 7, "repairs": []}
    browser.say("flows", [flow])
    browser.see(".flows li", "An answer, 7 tokens so far, through bobsbobs (bob)")
    page.locator(".flow.moves").wait_for(state="attached", timeout=WAIT_MS)
    browser.say("flows", [{**flow, "chain": ["[0,6) on abcdefgh"], "repairs": ["bobsbobs does not answer"]}])
    browser.say("swarm", whole)
    browser.see(".bar.gone text", "✖ bobsbobs (bob)")
    browser.see(".flows li", "through abcdefgh (anna); repaired 1×: bobsbobs does not answer")
    picture = page.locator("svg.picture").get_attribute("aria-label")
    assert picture == "smol: 1 spans of 6 blocks, 1 answers go through them now; gone: bobsbobs (bob)"


def test_a_swarm_without_models_says_the_next_command(browser: Stage) -> None:
    browser.say("swarm", swarm())
    browser.see("form > [role=status]", "The swarm has no models yet. To add one: swarmd models add FOLDER")
    browser.page.click("nav a[href='#/swarm']")
    browser.see("main code", "swarmd models add FOLDER")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_whoever_cannot_see_a_conversation_can_use_it(browser: Stage, scheme: str) -> None:
    page = browser.page
    page.emulate_media(color_scheme=scheme)
    call = {"index": 0, "id": "c1", "function": {"name": "weather", "arguments": "{}"}}
    browser.reply({"reasoning_content": "Hm."}, {"content": ANSWER}, {"tool_calls": [call]}, finish="length")
    browser.ask("Show me")
    browser.see(".told", "tokens/s")
    open_side(browser)
    page.click("text=Settings")
    found = Axe().run(page)
    assert not found.violations_count, found.generate_report()


def test_an_edit_that_is_left_is_none(browser: Stage) -> None:
    page = browser.page
    ask(browser, "one", "first")
    open_side(browser)
    page.click("text=New")
    ask(browser, "other", "second")
    open_side(browser)
    page.locator(".conversations .title", has_text="one").click()
    page.locator(".turn.user").get_by_text("Edit").click()
    page.click("text=Settings")
    page.get_by_label("Temperature").fill("0.35")
    page.get_by_label("Temperature").blur()
    open_side(browser)
    page.locator(".conversations .title", has_text="other").click()
    open_side(browser)
    page.locator(".conversations .title", has_text="one").click()
    assert said(browser) == ["one", "first"]
    page.reload()
    open_side(browser)
    page.locator(".conversations .title", has_text="one").click()
    assert said(browser) == ["one", "first"]
    be_told(browser)
    ask(browser, "two", "third")
    assert browser.asked[-1]["temperature"] == 0.35


def test_another_tab_shows_what_this_one_keeps_and_forgets_what_it_deletes(browser: Stage) -> None:
    ask(browser, "one", "first")
    other = open_another_tab(browser)
    ask(browser, "two", "second")
    playwright.expect(other.locator(".turn.assistant .said")).to_have_text(["first", "second"])
    other.once("dialog", lambda dialog: dialog.accept())
    open_side_of(other)
    other.click(".more summary")
    other.locator(".more").get_by_text("Delete").click()
    playwright.expect(browser.page.locator(".turn")).to_have_count(0)
    other.close()


IS_KEPT = """(text) => new Promise((resolve) => {
  const asked = indexedDB.open("swarmd");
  asked.onsuccess = () => {
    const kept = asked.result.transaction("conversations").objectStore("conversations").getAll();
    kept.onsuccess = () => resolve(JSON.stringify(kept.result).includes(text));
  };
})"""


def wait_kept(page: Any, text: str) -> None:
    until = time.monotonic() + WAIT_MS / 1000
    while not page.evaluate(IS_KEPT, text):
        assert time.monotonic() < until, f"{text!r} is not kept"
        page.wait_for_timeout(50)


@pytest.mark.parametrize("is_at_once", [False, True], ids=["later", "at once"])
def test_who_closes_the_page_in_mid_answer_loses_nothing(browser: Stage, is_at_once: bool) -> None:
    page = browser.page
    browser.replies.put([{"choices": [{"delta": {"content": "half an answer"}, "finish_reason": None}]}, None])
    browser.ask("Tell me")
    browser.see(".turn.assistant .said", "half an answer")
    if is_at_once:
        page.goto("about:blank")
        page.goto(browser.url)
    else:
        wait_kept(page, "half an answer")
        page.reload()
    open_side(browser)
    page.click(".conversations .title")
    browser.see(".turn.assistant .said", "half an answer")
    browser.see(".told", "It was left before its end.")
    be_told(browser)
    browser.reply({"content": " and the rest"})
    page.click("text=Go on")
    playwright.expect(page.locator(".turn.assistant .said")).to_have_text("half an answer and the rest")


def test_an_answer_that_failed_is_not_sent_again_and_one_that_breaks_off_says_so(browser: Stage) -> None:
    browser.replies.put([{"error": {"message": "the prompt is too long"}}])
    browser.ask("one")
    browser.see(".told.bad", "✖ the prompt is too long")
    ask(browser, "two", "fine")
    assert [turn["role"] for turn in browser.asked[-1]["messages"]] == ["user", "user"]
    browser.replies.put([{"choices": [{"delta": {"content": "half"}, "finish_reason": None}]}])
    browser.ask("three")
    browser.see(".told.bad", "✖ the answer broke off")
    browser.see(".turn.assistant", "Go on")


def test_each_call_is_answered_once_and_drafts_stay(browser: Stage) -> None:
    page = browser.page
    calls = [{"index": n, "id": f"c{n}", "function": {"name": name, "arguments": "{}"}} for n, name in enumerate("ab")]
    browser.reply({"tool_calls": calls}, finish="tool_calls")
    browser.ask("Do both")
    page.fill("[aria-label='Result of b']", "draft of b")
    page.fill("[aria-label='Result of a']", "one")
    page.locator(".call", has_text="Calls a").get_by_text("Send result").click()
    playwright.expect(page.locator("[aria-label='Result of a']")).to_have_count(0)
    assert page.input_value("[aria-label='Result of b']") == "draft of b"
    browser.see(".turn.tool .who", "Result of a")
    browser.reply({"content": "Done."})
    page.click("text=Send result")
    playwright.expect(page.locator(".turn.assistant .said").last).to_have_text("Done.")
    assert page.locator("text=Send result").count() == 0
    assert [turn.get("content") for turn in browser.asked[-1]["messages"][-2:]] == ["one", "draft of b"]


def test_escape_stops_an_answer_and_the_field_keeps_the_focus(browser: Stage) -> None:
    page = browser.page
    browser.replies.put([{"choices": [{"delta": {"content": "on and on"}, "finish_reason": None}]}, None])
    browser.ask("Tell me")
    browser.see(".turn.assistant .said", "on and on")
    page.keyboard.press("Escape")
    browser.see(".told", "stopped")
    assert page.evaluate("() => document.activeElement.id") == "question"
    assert page.title() == "Chat - swarmd"


SHA256 = {
    "marked.js": "5371fea86fd0656b4fc7bea7c94c663109d82789b69433eeee78d42895aa44de",
    "highlight.js": "1ed8fc5256b738b8875b74e4d3f0754f60d6411fb034d618dfbc4e6e6c9999d7",
    "uplot.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uplot.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}


def test_what_others_wrote_is_as_they_published_it_and_comes_with_its_licence() -> None:
    folder = files("swarmd.gateway") / "page" / "vendor"
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    licences = (folder / "LICENSES.txt").read_text()
    assert {name: digest for name, digest in found.items() if name != "LICENSES.txt"} == SHA256
    for name in ("marked 18.2.1", "highlight.js 11.12.0", "uPlot 1.6.32"):
        assert f"== {name}" in licences

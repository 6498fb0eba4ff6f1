"""What the page makes of news: which models can be asked, what is said of a swarm and of a run, how wide it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright import sync_api as playwright

from tests.gateway.page_stage import CHROMIUM, WAIT_MS, Stage, model, run, stage, started_chromium, swarm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium"),
]
NOTE = "form > [role=status]"
PICKER = "select[aria-label=Model]"
SEND = ".ask button[type=submit]"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with started_chromium() as started:
        yield started


@pytest.fixture
def browser(chromium: Any) -> Iterator[Stage]:
    with stage(chromium) as shown:
        yield shown


def test_a_model_that_cannot_chat_is_marked_with_the_reason(browser: Stage) -> None:
    browser.open()
    browser.say("swarm", swarm(model("demo", chats=False)))
    option = browser.page.locator("option[value=demo]")
    playwright.expect(option).to_have_text("demo (cannot chat: it has no chat template)")
    playwright.expect(option).to_have_attribute("disabled", "")
    browser.see(NOTE, "No model here can chat. demo only continues texts: swarmd run demo")
    assert browser.page.locator(SEND).is_disabled()
    browser.say("swarm", swarm(model("demo", chats=False), model("smol")))
    playwright.expect(browser.page.locator(PICKER)).to_have_value("smol")
    playwright.expect(browser.page.locator(SEND)).to_be_enabled()
    playwright.expect(browser.page.locator(NOTE)).to_have_text("")


def test_no_other_model_is_chosen_silently(browser: Stage) -> None:
    browser.open()
    browser.say("swarm", swarm(model("demo", chats=None), model("other"), model("smol")))
    picker = browser.page.locator(PICKER)
    playwright.expect(picker).to_have_value("smol")
    browser.say("swarm", swarm(model("demo", chats=None), model("other"), model("smol", (3, 6))))
    browser.see(NOTE, "Nobody serves blocks [3,6) of smol now")
    playwright.expect(picker).to_have_value("smol")
    browser.say("swarm", swarm(model("demo", chats=None), model("other")))
    browser.see(NOTE, "smol is not in the swarm's catalog any more")
    playwright.expect(picker).to_have_value("smol")
    assert browser.page.locator(SEND).is_disabled()


def test_who_turns_out_not_to_chat_keeps_its_place_once_it_was_chosen(browser: Stage) -> None:
    browser.open()
    browser.say("swarm", swarm(model("base", chats=None), model("smol")))
    browser.page.select_option(PICKER, "base")
    browser.say("swarm", swarm(model("base", chats=False), model("smol")))
    browser.see(NOTE, "base has no chat template, so it cannot chat: choose another model")
    playwright.expect(browser.page.locator(PICKER)).to_have_value("base")


def test_a_gateway_with_keys_is_given_one_in_the_page(browser: Stage) -> None:
    browser.key = "sk-swarmd-of-anna"
    browser.open()
    browser.see("#health", "a key is needed: enter one below")
    browser.page.fill("#key input", browser.key)
    browser.page.click("text=Use it in this tab")
    browser.say("swarm", swarm(model("smol")))
    browser.see("#health", "whole: smol")
    assert not browser.page.locator("#key").is_visible()
    assert browser.key not in browser.page.url
    browser.complaints.clear()  # of the browser itself, about the 401


def test_a_long_block_map_does_not_widen_a_narrow_page(browser: Stage) -> None:
    browser.open("swarm")
    browser.say("swarm", swarm(model("smol", n_blocks=30), model("a-model-with-quite-a-long-name-of-its-own-Instruct")))
    browser.say("training", {"runs": [run("a-run-with-quite-a-long-name-of-its-own-1234567890", (10.0, 9.9, 9.85))]})
    for view in ("swarm", "chat", "training", "machine"):
        browser.page.click(f"nav a[href='#/{view}']")
        if view == "swarm":
            browser.see("h2", "smol")
        assert browser.too_wide() <= 0, view


def test_health_is_coloured(browser: Stage) -> None:
    browser.open()
    health = browser.page.locator("#health")
    seen = []
    for missing, kind in (((), "good"), (((0, 3),), "bad")):
        browser.say("swarm", swarm(model("smol", *missing)))
        playwright.expect(health).to_have_class(kind)
        colour = "(name) => getComputedStyle(document.querySelector(name)).color"
        browser.page.evaluate(
            "(kind) => document.querySelector('main').append(Object.assign(document.createElement('p'),"
            " { className: kind, id: `of-${kind}` }))",
            kind,
        )
        seen.append(browser.page.evaluate(colour, "#health"))
        assert seen[-1] == browser.page.evaluate(colour, f"#of-{kind}")
    assert seen[0] != seen[1]


def test_a_run_is_told_in_sentences_and_its_curve_falls(browser: Stage) -> None:
    browser.open("training")
    browser.say("training", {"runs": [run("caesar", (10.0, 9.9, 9.85))]})
    browser.see("li", "12 of 100 updates are done, from 3,072 samples.")
    browser.see("li", "When a member vanishes, the others wait for it 5 s at most.")
    browser.see("figcaption", "Loss: now 9.85, from 9.85 to 10")
    text = browser.page.inner_text("main")
    assert not any(word in text for word in ("_", "undefined", "null", "NaN", "[object")), text
    browser.page.locator(".plot canvas").wait_for(timeout=WAIT_MS)
    browser.say("training", {"runs": [run("caesar", (), updates=None, left_s=None, last_round=None, why="")]})
    browser.see("li", "12 updates are done")
    assert not any(word in browser.page.inner_text("main") for word in ("undefined", "null", "NaN", "; ."))


def test_members_are_shown_by_their_names(browser: Stage) -> None:
    browser.open("swarm")
    browser.say("swarm", swarm(model("demo")))
    browser.see("th", "abcdefgh (anna) (here)")
    browser.open("training")
    browser.say("training", {"runs": [run("caesar", (10.0, 9.9), shunned=["12D3KooWabcdefgh", "12D3KooWstranger"])]})
    browser.see("th", "abcdefgh (anna)")
    browser.see("li", "Done without, for faulty numbers: abcdefgh (anna), stranger.")


DRAWN = """async (text) => {
  const { markdown } = await import('/page/files/markdown.js');
  const place = document.createElement('div');
  for (const part of markdown(text)) place.append(part);
  return [place.textContent, place.innerHTML];
}"""


def test_a_run_in_stages_is_shown_once_as_a_pipeline(browser: Stage) -> None:
    browser.open("training")
    stages = [
        {
            "stage": 0,
            "first_block": None,
            "end_block": None,
            "update": 7,
            "samples": 12,
            "holders": ["12D3KooWabcdefgh"],
        },
        {"stage": 1, "first_block": 0, "end_block": 2, "update": 7, "samples": 14, "holders": []},
        {"stage": 2, "first_block": 2, "end_block": None, "update": 7, "samples": 16, "holders": ["12D3KooWstranger"]},
    ]
    rows = [
        run("ours", (10.0, 9.9), run="abc", role=role, stage=stage, stages=stages, busy=busy)
        for stage, role, busy in ((2, "anchor", None), (0, "train", 0.81), (1, "anchor", None))
    ]
    browser.say("training", {"runs": rows})
    browser.see("td", "embedding and head")
    shown = browser.page.inner_text("main")
    assert browser.page.locator("h2", has_text="ours").count() == 1
    for words in ("embedding and head", "blocks 0 to 1", "blocks from 2 on", "nobody: the run waits", "14 of", "81 %"):
        assert words in shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("*a* ", "<em>a</em> "),
        ("`a` ", "<code>a</code> "),
        ("a\n", "a<br>"),
        ("`a``", None),
        ("[", "["),
        ("[a](", "[a]("),
        ("**a ", None),
        ("| ", None),
    ],
)
def test_an_answer_of_thousands_of_marks_is_drawn(browser: Stage, text: str, expected: str | None) -> None:
    browser.open()
    shown, drawn = browser.page.evaluate(DRAWN, text * 8_000 + "x")
    assert shown.endswith("x")
    if expected is not None:
        assert drawn.startswith(f"<p>{expected * 7_999}")


def test_marks_mean_what_they_did(browser: Stage) -> None:
    browser.open()
    text = "a **b `c` d** and *e*, ``f ` g``, [h](https://x.y/z) [i] *j\nk* l `m"
    link = '<a href="https://x.y/z" rel="noopener noreferrer" target="_blank">h</a>'
    expected = (
        f"a <strong>b <code>c</code> d</strong> and <em>e</em>, <code>f ` g</code>, {link} [i] <em>j<br>k</em> l `m"
    )
    assert browser.page.evaluate(DRAWN, text)[1] == f"<p>{expected}</p>"


def test_beyond_a_size_an_answer_is_plain(browser: Stage) -> None:
    browser.open()
    assert browser.page.evaluate(DRAWN, "*a* " * 30_000)[1].startswith('<p class="plain">*a* *a*')

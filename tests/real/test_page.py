"""The page in a real Chromium: it chats, shows the swarm and a kill, and breaks no rule of its own."""

from __future__ import annotations

import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright import sync_api as playwright

from tests.gateway.page_stage import CHROMIUM, NARROW, started_chromium
from tests.real.gateways import RealGateway, real_gateway
from tests.real.harness import LocalSwarm, Volunteer, local_swarm
from tests.real.training import start_run, wait_update

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium"),
]
WAIT_MS = 60_000
STRIKE_S = 5.0  # for an answer that has begun to go on
QUESTIONS = 5  # answers are of any length: one that ends within a tenth of a second needs no repair
LOOKS = 4  # at which a server has to have served more: one that checks an answer does so in one or two of them
ON_FIRST_TEXT = """(act) => {
  const watch = new MutationObserver(() => {
    if (!document.querySelector(".turn.assistant .said")?.textContent) return;
    watch.disconnect();
    if (act === "strike") strike();
    else [...document.querySelectorAll("button")].find((button) => button.textContent === "Stop").click();
  });
  watch.observe(document.querySelector("[role=log]"), { childList: true, subtree: true });
}"""


@dataclass
class Browser:
    """A page, and what it complained of."""

    page: Any
    gateway: RealGateway
    swarm: LocalSwarm
    volunteers: list[Volunteer]
    complaints: list[str] = field(default_factory=list)

    def open(self, token: str = "") -> None:
        self.page.goto(f"{self.gateway.url}/" + (f"#token={token}" if token else ""))
        self.page.locator("#health", has_text="whole: chatty").wait_for(timeout=WAIT_MS)

    def see(self, selector: str, text: str) -> None:
        self.page.locator(selector, has_text=text).first.wait_for(timeout=WAIT_MS)

    def ask(self, question: str) -> None:
        self.page.fill("#question", question)
        self.page.press("#question", "Enter")

    @property
    def token(self) -> str:
        return (self.volunteers[0].home.folder / "gateway.token").read_text()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalSwarm, list[Volunteer], RealGateway]]:
    """A model without a template would not chat: the bundled one gets a plain one."""
    folder = chatty(tmp_path_factory.mktemp("chatty"))
    with local_swarm(tmp_path_factory.mktemp("page")) as swarm:
        volunteers = swarm.serving((0, 3), (3, 6), (0, 6), model="chatty", models={"chatty": folder})
        with real_gateway(volunteers[0].home.folder) as gateway:
            yield swarm, volunteers, gateway


def chatty(folder: Path) -> Path:
    from swarmd.home.models import bundled_folder

    for path in bundled_folder().iterdir():
        shutil.copy(path, folder / path.name)
    (folder / "generation_config.json").write_text('{"eos_token_id": 5}')  # one that it never says: answers are long
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    return folder


both = pytest.mark.parametrize("browser", ["light", "dark"], indirect=True)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with started_chromium() as started:
        yield started


@pytest.fixture
def browser(
    chromium: Any, stage: tuple[LocalSwarm, list[Volunteer], RealGateway], request: pytest.FixtureRequest
) -> Iterator[Browser]:
    swarm, volunteers, gateway = stage
    context = chromium.new_context(color_scheme=getattr(request, "param", "light"), viewport=NARROW)
    page = context.new_page()
    found = Browser(page, gateway, swarm, volunteers)
    page.on("console", lambda m: found.complaints.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: found.complaints.append(str(error)))
    yield found
    too_wide = page.evaluate("() => document.documentElement.scrollWidth > innerWidth")
    context.close()
    assert not found.complaints, "the console is silent"
    assert not too_wide, "everything fits 320 pixels"


@pytest.mark.parametrize("browser", ["light", pytest.param("dark", marks=pytest.mark.prove)], indirect=True)
def test_it_chats_streams_and_stops(browser: Browser) -> None:
    browser.open()
    page = browser.page
    page.select_option("select[aria-label=Model]", "chatty")
    page.evaluate(ON_FIRST_TEXT, "stop")  # a model as small has ended before a hand is there
    browser.ask("The function <b>returns</b>")
    browser.see(".turn.user .said", "<b>returns</b>")
    browser.see(".turn.assistant .told", "stopped")
    page.click("text=Retry")
    browser.see(".turn.assistant .dim", "tokens/s")
    assert page.locator(".turn").count() == 2
    page.click("text=Edit")
    assert page.input_value("#question") == "The function <b>returns</b>"
    assert page.locator(".turn").count() == 0


def test_a_kill_is_shown_under_the_answer(browser: Browser) -> None:
    browser.open()
    page, killed = browser.page, list[Volunteer]()

    def served() -> list[int]:
        return [int(volunteer.ask("status")["server"]["tokens_served"]) for volunteer in browser.volunteers]

    def strike() -> None:
        """Kill who serves more tokens from look to look: others check now and then, all at once, what was answered."""
        until = time.monotonic() + STRIKE_S
        n_grown, now = Counter[int](), served()
        while not killed and time.monotonic() < until:
            before, now = now, served()
            n_grown.update(i for i, (a, b) in enumerate(zip(before, now, strict=True)) if b > a and i)  # 0: the gateway
            for victim, n in n_grown.most_common(1):
                if n >= LOOKS:
                    killed.append(browser.volunteers[victim])
                    killed[0].signal(signal.SIGKILL, "both")

    page.expose_function("strike", strike)
    page.select_option("select[aria-label=Model]", "chatty")
    told = page.locator(".turn.assistant .told").last
    for number in range(QUESTIONS):
        page.evaluate(ON_FIRST_TEXT, "strike")
        if number:
            page.click("text=Retry")
        else:
            browser.ask("The function returns")
        try:
            playwright.expect(told).to_contain_text("tokens/s", timeout=WAIT_MS)  # it has ended
        finally:
            for volunteer in killed:
                volunteer.stop()
                volunteer.start()
            browser.swarm.wait_online()
        if "repaired" in told.inner_text():
            break
        killed.clear()  # the answer was over before
    assert killed, f"none of {QUESTIONS} answers went on after a kill"


def test_the_map_is_right_and_follows(browser: Browser) -> None:
    browser.open()
    page, leaving = browser.page, browser.volunteers[1]
    page.click("nav a[href='#/swarm']")
    row = page.locator("table.map tr", has_text=leaving.peer[-8:])
    row.wait_for(timeout=WAIT_MS)
    blocks, counts = row.locator("td.block"), page.locator("table.map tfoot td.block")
    playwright.expect(blocks).to_have_text(["", "", "", "●", "●", "●"], timeout=WAIT_MS)
    playwright.expect(counts).to_have_text(["2"] * 6, timeout=WAIT_MS)  # who was killed before may only just be back
    leaving.ask("drain", "POST")
    row.locator("td.draining", has_text="◑").first.wait_for(timeout=WAIT_MS)
    playwright.expect(counts).to_have_text(["2", "2", "2", "1", "1", "1"], timeout=WAIT_MS)
    leaving.ask("resume", "POST")
    row.locator("td.online", has_text="●").first.wait_for(timeout=WAIT_MS)
    browser.swarm.wait_online()


def test_only_with_the_token_it_changes_this_machine(browser: Browser) -> None:
    browser.open()
    page = browser.page
    page.click("nav a[href='#/machine']")
    browser.see("dd", "chatty blocks [0,3)")
    assert page.locator("button", has_text="Stop serving").is_disabled()
    with browser.gateway.http() as http:
        assert http.post("/page/drain", json={}).status_code == 401
    page.goto("about:blank")
    browser.open(browser.token)
    assert "token" not in page.url, "it does not stay in the address"
    page.click("nav a[href='#/machine']")
    page.click("text=Stop serving")
    browser.see("dd", "drain")
    page.click("text=Serve again")
    browser.swarm.wait_online()


def test_a_run_shows_its_losses(browser: Browser) -> None:
    swarm, first = browser.swarm, browser.volunteers[0]
    if not any(run["name"] == "caesar" for run in first.ask("train")["runs"]):
        start_run(first, "caesar", target=8, steps=4)
    wait_update(swarm, [first], 4, "caesar")
    browser.open()
    browser.page.click("nav a[href='#/training']")
    browser.see("h2", "caesar")
    browser.page.locator("[role=img][aria-label^='Loss']").first.wait_for(timeout=WAIT_MS)


@both
def test_whoever_cannot_see_it_can_use_it(browser: Browser) -> None:
    browser.open()
    for view in ("chat", "swarm", "machine", "training"):
        browser.page.click(f"nav a[href='#/{view}']")
        found = Axe().run(browser.page)
        assert not found.violations_count, found.generate_report()


def test_no_other_page_can_frame_it_or_run_scripts_in_it(browser: Browser) -> None:
    browser.open()
    with browser.gateway.http() as http:
        policy = http.get("/").headers["content-security-policy"]
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert http.get("/page/files/../guard.py").status_code == 404
        assert http.get("/page/files/%2e%2e%2fguard.py").status_code == 404

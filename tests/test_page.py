"""The published page in a real browser: read, sorted, filtered, opened, printed, by mouse and by keyboard."""

import base64
import json
import re
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

from fedmjp.benchmarks.report.page import Gallery, KeptPicture
from fedmjp.benchmarks.report.publish import publish
from tests.sample_board import NASTY, nasty_entry, sample_board

DRIVER, BROWSER = shutil.which("chromedriver"), shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (DRIVER and BROWSER), reason="no chromium and chromedriver (Debian: chromium-driver)"),
]
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
WIDTHS = (400, 768, 1280)
REFUSED = "needs a gradient, and the update is a weight delta"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    board = sample_board(models=["deit_small"], extra=[nasty_entry()])
    files = []
    for index, name in enumerate(("original", "shuffled", "reconstruction")):
        files.append(folder / f"{name}.png")
        Image.fromarray(np.full((300, 300, 3), 90 * index, dtype=np.uint8)).save(files[-1])
    labels = ("most revealing", "median", "least revealing")
    shown = tuple(KeptPicture(label, "cat <1>", 17.25, *files) for label in labels)
    publish(board, folder, formats=["html"], pictures=Gallery({entry.id: shown for entry in board.entries}))
    return folder / "leaderboard.html"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    for option in (*OPTIONS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(service=Service(str(DRIVER)), options=options)
    yield driver
    driver.quit()


@pytest.fixture
def browser(started: webdriver.Chrome, page: Path) -> Iterator[webdriver.Chrome]:
    """The page as it opens; nothing may have been logged when the test is over."""
    show(started, 1280, "light")
    started.get("about:blank")  # so that what follows is a load, whatever the fragment was
    started.get(page.as_uri())
    yield started
    assert started.get_log("browser") == []


def show(driver: webdriver.Chrome, width: int, scheme: str) -> None:
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def first(browser: webdriver.Chrome, selector: str) -> WebElement:
    return browser.find_element(By.CSS_SELECTOR, selector)


def heading(browser: webdriver.Chrome, name: str) -> WebElement:
    return next(each for each in browser.find_elements(By.CSS_SELECTOR, "#all thead th") if each.text.startswith(name))


def column(browser: webdriver.Chrome, name: str) -> list[str]:
    """The texts of a column in the rows that are shown; empty in rows that say instead why they have no numbers."""
    script = (
        "return [...document.querySelectorAll('#all tbody tr:not([hidden])')]"
        ".map(row => row.cells[arguments[0].cellIndex]).map(cell => cell && cell.colSpan === 1 ? cell.textContent : '')"
    )
    texts: list[str] = browser.execute_script(script, heading(browser, name))
    return texts


def press(browser: webdriver.Chrome, key: str) -> None:
    browser.switch_to.active_element.send_keys(key)


def opened(browser: webdriver.Chrome) -> WebElement:
    """The one dialog that is open, once it is: browsers tell pages of a new fragment in a task of its own."""
    soon(browser).until(lambda _: browser.find_elements(By.CSS_SELECTOR, "dialog[open]"))
    (dialog,) = browser.find_elements(By.CSS_SELECTOR, "dialog[open]")
    return dialog


def soon(browser: webdriver.Chrome) -> WebDriverWait[webdriver.Chrome]:
    """Wait for what a browser does in a task of its own, which on a busy machine comes after the driver's answer."""
    return WebDriverWait(browser, 20, poll_frequency=0.05)


def filter_named(browser: webdriver.Chrome, name: str) -> Select:
    return Select(first(browser, f".filters select[name='{name}']"))


def test_the_first_screen_of_a_laptop_holds_question_answer_pictures_and_matrix(browser: webdriver.Chrome) -> None:
    for selector in ("h1", ".answer", ".front .strip", ".matrix tbody tr:nth-child(3)"):
        bottom = browser.execute_script(f"return document.querySelector({selector!r}).getBoundingClientRect().bottom")
        assert 0 < bottom <= 800, selector
    assert first(browser, "h1").text == "What do uploads give away, and does a masked jigsaw puzzle change that?"
    pictures = browser.find_elements(By.CSS_SELECTOR, ".front svg[role=img]")
    assert [one.get_attribute("aria-label") for one in pictures] == [
        "private, cat <1>", "uploaded, cat <1>", "recovered, cat <1>",
    ]  # fmt: skip


@pytest.mark.parametrize("how", ["mouse", "keyboard"])
def test_a_cell_opens_pictures_and_details_and_gives_a_link_to_them(browser: webdriver.Chrome, how: str) -> None:
    cell = first(browser, ".matrix .subject td a")
    if how == "mouse":
        cell.click()
    else:
        browser.execute_script("arguments[0].focus()", cell)
        press(browser, Keys.ENTER)
    dialog = opened(browser)
    assert len(dialog.find_elements(By.CSS_SELECTOR, "svg[role=img]")) == 9
    assert "17.2 dB" in dialog.text
    assert "recovered exactly" in dialog.text
    link = browser.current_url
    assert link.endswith(f"#{dialog.get_attribute('id')}")
    if how == "mouse":
        dialog.find_element(By.CSS_SELECTOR, ".close").click()
    else:
        press(browser, Keys.ESCAPE)
    soon(browser).until(lambda _: "#" not in browser.current_url)
    assert browser.find_elements(By.CSS_SELECTOR, "dialog[open]") == []
    assert browser.switch_to.active_element == cell, "focus returns to where it was"
    browser.get("about:blank")
    browser.get(link)
    dialog = opened(browser)
    assert link.endswith(f"#{dialog.get_attribute('id')}")
    place = browser.execute_script("return document.querySelector('.matrix .subject td a').getBoundingClientRect()")
    assert 0 < place["top"] < place["bottom"] < 800, "the cell itself is scrolled to"


@pytest.mark.parametrize("direction", ["ascending", "descending"])
def test_numbers_sort_as_numbers_and_gaps_come_last(browser: webdriver.Chrome, direction: str) -> None:
    browser.execute_script("arguments[0].focus()", heading(browser, "median").find_element(By.CSS_SELECTOR, "button"))
    for _ in range(1 if direction == "ascending" else 2):
        press(browser, Keys.ENTER)
    assert heading(browser, "median").get_attribute("aria-sort") == direction
    texts = column(browser, "median")
    found = [float(text.replace("\N{MINUS SIGN}", "-")) for text in texts if text]
    assert max(found) > 100 > 20 > min(found), "as text, 115 would come before 20"
    assert found == sorted(found, reverse=direction == "descending")
    assert texts[len(found) :] == [""] * (len(texts) - len(found)) != []


@pytest.mark.parametrize("name", ["model", "attack", "setting", "server sees", "defence", "verdict"])
def test_results_are_filtered_by_a_value(browser: webdriver.Chrome, name: str) -> None:
    everything = column(browser, name)
    options = [option.text for option in filter_named(browser, name).options]
    assert set(options) == {"all", *everything}
    filter_named(browser, name).select_by_visible_text(options[-1])
    kept = [text for text in everything if text == options[-1]]
    assert column(browser, name) == kept != everything
    assert first(browser, ".filters output").text == f"{len(kept)} of {len(everything)} rows"
    first(browser, ".filters button[type=reset]").click()  # the page waits until the fields are empty
    soon(browser).until(lambda _: column(browser, name) == everything)


def test_filters_work_by_keyboard_together_with_words(browser: webdriver.Chrome) -> None:
    browser.execute_script("arguments[0].focus()", first(browser, ".filters select[name='attack']"))
    press(browser, "oracle")
    assert set(column(browser, "attack")) == {"oracle_april (bound)"}
    first(browser, ".filters input[type=search]").send_keys("jigsaw bound")
    assert {text.split(",")[0] for text in column(browser, "defence")} == {"jigsaw"}
    first(browser, ".filters input[type=checkbox]").click()
    assert column(browser, "attack") == [], "no bound decides a verdict"


def test_a_refused_row_says_why(browser: webdriver.Chrome) -> None:
    filter_named(browser, "verdict").select_by_visible_text("refused")
    reasons = browser.find_elements(By.CSS_SELECTOR, "#all tr:not([hidden]) .why")
    assert {reason.text for reason in reasons} == {REFUSED}


def test_names_are_text(browser: webdriver.Chrome) -> None:
    filter_named(browser, "model").select_by_visible_text(re.sub(r"\s+", " ", NASTY))
    assert column(browser, "model") == [NASTY]
    assert browser.find_elements(By.CSS_SELECTOR, "img, main script, dialog script") == []
    first(browser, "#all tr:not([hidden]) a").click()
    assert NASTY in opened(browser).text


def test_markup_that_got_in_would_not_run(browser: webdriver.Chrome) -> None:
    markup = "<img src=x onerror='window.ran = 1'><p id=styled style='color: rgb(1, 2, 3)'>x</p>"
    browser.execute_script("document.body.insertAdjacentHTML('beforeend', arguments[0])", markup)
    browser.execute_script("document.body.append(document.createElement('script'))")
    browser.execute_script("document.querySelector('body > script:last-child').textContent = 'window.ran = 1'")
    assert browser.execute_async_script("setTimeout(() => arguments[0](window.ran ?? null), 100)") is None
    assert browser.execute_script("return getComputedStyle(styled).color") != "rgb(1, 2, 3)"
    refused = browser.get_log("browser")
    assert len(refused) >= 4
    assert all("Content Security Policy" in entry["message"] for entry in refused)


def test_nothing_is_requested(browser: webdriver.Chrome) -> None:
    browser.get_log("performance")  # of the tests before
    browser.refresh()
    first(browser, ".matrix td a").click()
    events: list[dict[str, Any]] = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert {url for url in urls if not url.startswith("data:")} == {browser.current_url.partition("#")[0]}


@pytest.mark.parametrize("width", WIDTHS)
def test_only_tables_and_plots_scroll_sideways_and_only_where_it_is_narrow(
    browser: webdriver.Chrome, width: int
) -> None:
    browser.execute_script("for (const each of document.querySelectorAll('details')) each.open = true")
    browser.execute_script("document.querySelector('#all').tBodies[0].lastElementChild.remove()")  # has a hostile name
    browser.execute_script("document.querySelector('.matrix').tBodies[0].lastElementChild.remove()")
    show(browser, width, "light")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    wider = browser.execute_script(
        "return [...document.querySelectorAll('.scroll, .wide')].filter(each => each.scrollWidth > each.clientWidth)"
        ".map(each => each.ariaLabel ?? each.getAttribute('aria-labelledby'))"
    )
    assert not wider or width < 1280
    letters = browser.execute_script(
        "return [...document.querySelectorAll('.plots svg text')]"
        ".map(each => [each.getScreenCTM(), parseFloat(getComputedStyle(each).fontSize)])"
        ".map(([matrix, size]) => Math.hypot(matrix.a, matrix.b) * size)"
    )
    assert min(letters) >= 8.9, "plots shrink no further than can be read"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_axe_finds_no_violation(browser: webdriver.Chrome, width: int, scheme: str) -> None:
    show(browser, width, scheme)
    browser.execute_script(FEWER)
    (package,) = find_spec("axe_playwright_python").submodule_search_locations  # not imported: it would need Playwright
    browser.execute_script((Path(package) / "axe.min.js").read_text(encoding="utf-8"))
    assert browser.execute_async_script(AXE, "body") == []
    first(browser, ".matrix td a").click()
    opened(browser)
    assert browser.execute_async_script(AXE, "dialog[open]") == []


# Of what is alike a few are enough, and axe takes seconds for thousands of elements.
FEWER = """
const shown = document.querySelector(document.querySelector(".matrix td a").hash);
for (const dialog of document.querySelectorAll("dialog")) if (dialog !== shown) dialog.remove();
for (const row of document.querySelectorAll("#all tbody tr:nth-child(n + 16)")) row.remove();
for (const plot of document.querySelectorAll(".plots figure:nth-child(n + 2)")) plot.remove();
"""
AXE = """
const [scope, done] = arguments;
axe.run(scope, {resultTypes: ["violations"]}).then(
  ({violations}) => done(violations.map(({id, nodes}) => [id, nodes.map(({html}) => html)])), done);
"""


def test_dark_is_dark(browser: webdriver.Chrome) -> None:
    show(browser, 1280, "dark")
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(21, 23, 28)"


def test_it_prints_on_two_sheets(browser: webdriver.Chrome) -> None:
    content = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})["data"])
    assert len(re.findall(rb"/Type\s*/Page\b", content)) <= 2


def test_without_scripts_every_table_is_there_and_links_open_details(browser: webdriver.Chrome, page: Path) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get("about:blank")
        browser.get(page.as_uri())
        assert not first(browser, ".filters").is_displayed()
        assert len(browser.find_elements(By.CSS_SELECTOR, "#all tbody tr")) > 80
        first(browser, ".matrix td a").click()
        soon(browser).until(lambda _: browser.find_elements(By.CSS_SELECTOR, "dialog:target"))
        assert [dialog.is_displayed() for dialog in browser.find_elements(By.CSS_SELECTOR, "dialog:target")] == [True]
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})

"""The published page in a real browser: sorted, filtered, searched, opened and closed, by mouse and by keyboard."""

import json
import shutil
from collections.abc import Iterator
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
from selenium.webdriver.support.ui import WebDriverWait

from benchmarks.report.page import Gallery, Shown
from benchmarks.report.publish import publish
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
CELLS = 2  # the third sortable table: all cells before the first server, after two rankings
DELTAS = 5  # all cells before the second server, where gradient matching is refused
TABLES = 6
LEAKAGE = "leakage, PSNR dB"
REFUSED = "needs a gradient, and the update is a weight delta"
FIRST = [
    "rank", "model", "defence", "mask ratio", "setting", "verdict", LEAKAGE, "worst", "p95", "recognisable",
    "against no defence, dB", "strongest attack",
]  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    board = sample_board(models=["deit_small"], extra=[nasty_entry()])
    files = []
    for index, name in enumerate(("original", "shuffled", "reconstruction")):
        files.append(folder / f"{name}.png")
        Image.fromarray(np.full((8, 8, 3), 90 * index, dtype=np.uint8)).save(files[-1])
    labels = ("most revealing", "median", "least revealing")
    shown = tuple(Shown(label, "cat <1>", 17.25, *files) for label in labels)
    publish(board, folder, formats=["html"], pictures=Gallery({entry.id: shown for entry in board.entries[:6]}))
    return folder / "leaderboard.html"


@pytest.fixture(scope="module")
def started(page: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
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
    show(started, 1300, "light")
    started.get(page.as_uri())
    made = WebDriverWait(started, 10)
    made.until(lambda driver: len(driver.find_elements(By.CSS_SELECTOR, ".dt-container")) == TABLES)
    yield started
    assert started.get_log("browser") == []


def show(driver: webdriver.Chrome, width: int, scheme: str) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def table(browser: webdriver.Chrome, place: int = CELLS) -> WebElement:
    return browser.find_elements(By.CSS_SELECTOR, "table.sortable")[place]


def headings(browser: webdriver.Chrome, place: int = CELLS) -> list[WebElement]:
    return table(browser, place).find_elements(By.CSS_SELECTOR, "thead th")


def heading(browser: webdriver.Chrome, name: str, place: int = CELLS) -> WebElement:
    return next(each for each in headings(browser, place) if title(each) == name)


def title(cell: WebElement) -> str:
    return cell.find_element(By.CSS_SELECTOR, ".dt-column-title").text


def column(browser: webdriver.Chrome, name: str, place: int = CELLS) -> list[str]:
    index = [title(each) for each in headings(browser, place)].index(name)
    script = "return [...arguments[0].tBodies[0].rows].map(row => row.cells[arguments[1]].textContent)"
    texts: list[str] = browser.execute_script(script, table(browser, place), index)
    return texts


def click(browser: webdriver.Chrome, element: WebElement) -> None:
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', inline: 'center'})", element)
    element.click()


def focus(browser: webdriver.Chrome, element: WebElement) -> None:
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', inline: 'center'})", element)
    browser.execute_script("arguments[0].focus()", element)


def press(browser: webdriver.Chrome, key: str) -> None:
    browser.switch_to.active_element.send_keys(key)


def choose(browser: webdriver.Chrome, name: str, value: str) -> None:
    """Filter a column by one value, as a reader does: open its list, click the value."""
    click(browser, heading(browser, name).find_element(By.CSS_SELECTOR, ".dtcc-button_dropdown"))
    buttons = browser.find_elements(By.CSS_SELECTOR, ".dtcc-dropdown .dtcc-list-buttons button")
    click(browser, next(button for button in buttons if button.text == value))


def leading(texts: list[str]) -> list[float]:
    return [float(text.split()[0]) for text in texts if text]


@pytest.mark.parametrize("direction", ["ascending", "descending"])
def test_numbers_sort_as_numbers_and_gaps_come_last(browser: webdriver.Chrome, direction: str) -> None:
    for _ in range(1 if direction == "ascending" else 2):
        click(browser, heading(browser, LEAKAGE))
    assert heading(browser, LEAKAGE).get_attribute("aria-sort") == direction
    found = leading(column(browser, LEAKAGE))
    assert max(found) > 100 > 20 > min(found), "as text, 115 would come before 20"
    assert found == sorted(found, reverse=direction == "descending")


def test_refused_cells_are_last_whichever_way(browser: webdriver.Chrome) -> None:
    for _ in range(2):
        click(browser, heading(browser, LEAKAGE, DELTAS))
        texts = column(browser, LEAKAGE, DELTAS)
        gaps = sum(REFUSED in text for text in texts)
        assert 0 < gaps < len(texts)
        assert texts[-gaps:] == [REFUSED] * gaps


def test_a_refused_row_says_why_in_one_line_and_its_details_say_all(browser: webdriver.Chrome) -> None:
    refused = table(browser, DELTAS).find_element(By.CSS_SELECTOR, "tbody tr.verdict-refused")
    other = table(browser, DELTAS).find_element(By.CSS_SELECTOR, "tbody tr:not(.verdict-refused)")
    reason = refused.find_element(By.CSS_SELECTOR, ".why span")
    assert reason.text == REFUSED
    assert reason.size["width"] > 300
    assert refused.size["height"] == other.size["height"] < 35
    click(browser, refused.find_element(By.CSS_SELECTOR, "button.more"))
    (panel,) = opened(browser)
    assert panel.find_element(By.CSS_SELECTOR, "header + *").text == f"refused: {REFUSED}"


def test_rows_are_one_line_high(browser: webdriver.Chrome) -> None:
    heights = browser.execute_script(
        "return [...document.querySelectorAll('table.sortable tbody tr')].map(row => row.offsetHeight)"
    )
    assert max(heights) < 35


def test_standings_show_the_strongest_attack_on_a_laptop(browser: webdriver.Chrome) -> None:
    names = [title(each) for each in headings(browser, 0)]
    assert names[: len(FIRST)] == FIRST
    last = headings(browser, 0)[len(FIRST) - 1]
    browser.find_elements(By.CSS_SELECTOR, ".dt-search input")[0].send_keys("deit_small")
    assert right_of(browser, last) <= right_of(browser, table(browser, 0).find_element(By.XPATH, ".."))


def right_of(browser: webdriver.Chrome, element: WebElement) -> float:
    return float(browser.execute_script("return arguments[0].getBoundingClientRect().right", element))


@pytest.mark.parametrize("scrolled", [0, 400, 5000])
def test_verdicts_stay_in_sight_on_a_phone(browser: webdriver.Chrome, scrolled: int) -> None:
    show(browser, 420, "light")
    for place in range(TABLES):
        box = table(browser, place).find_element(By.XPATH, "..")
        browser.execute_script("arguments[0].scrollLeft = arguments[1]", box, scrolled)
        button = box.find_element(By.CSS_SELECTOR, "button.more")
        assert 0 <= button.rect["x"] < right_of(browser, button) <= 420
        browser.execute_script("arguments[0].scrollIntoView({block: 'center', inline: 'nearest'})", button)
        button.click()
        assert len(opened(browser)) == 1, "nothing lies over it"
        press(browser, Keys.ESCAPE)


def test_means_line_up_whatever_their_intervals(browser: webdriver.Chrome) -> None:
    edges = browser.execute_script(
        "return [...arguments[0].tBodies[0].rows].filter(row => !row.querySelector('.why'))"
        ".map(row => row.querySelector('.interval').getBoundingClientRect().left)",
        table(browser),
    )
    assert len(edges) > 40
    assert max(edges) - min(edges) < 1


def test_columns_sort_by_keyboard(browser: webdriver.Chrome) -> None:
    button = heading(browser, "n").find_element(By.CSS_SELECTOR, "[tabindex='0'], button")
    focus(browser, button)
    press(browser, Keys.ENTER)
    assert heading(browser, "n").get_attribute("aria-sort") == "ascending"


@pytest.mark.parametrize(("name", "value"), [("defence", "jigsaw"), ("verdict", "reduced"), ("setting", "b")])
def test_a_column_is_filtered_by_a_value(browser: webdriver.Chrome, name: str, value: str) -> None:
    everything = column(browser, name)
    choose(browser, name, value)
    assert column(browser, name) == [text for text in everything if text == value] != everything


def test_a_filter_opens_and_closes_by_keyboard(browser: webdriver.Chrome) -> None:
    focus(browser, heading(browser, "defence").find_element(By.CSS_SELECTOR, ".dtcc-button_dropdown"))
    press(browser, Keys.ENTER)
    assert browser.find_elements(By.CSS_SELECTOR, ".dtcc-dropdown")
    press(browser, Keys.ESCAPE)
    assert not browser.find_elements(By.CSS_SELECTOR, ".dtcc-dropdown")


def test_search_finds_rows(browser: webdriver.Chrome) -> None:
    field = browser.find_elements(By.CSS_SELECTOR, ".dt-search input")[CELLS]
    field.send_keys("oracle_april")
    found = column(browser, "attack")
    assert found
    assert set(found) == {"oracle_april (bound)"}


def more(browser: webdriver.Chrome) -> WebElement:
    return table(browser).find_element(By.CSS_SELECTOR, "button.more")


def opened(browser: webdriver.Chrome) -> list[WebElement]:
    return browser.find_elements(By.CSS_SELECTOR, ".panel:popover-open")


def test_pictures_and_provenance_open_and_close_by_mouse(browser: webdriver.Chrome) -> None:
    click(browser, more(browser))
    (panel,) = opened(browser)
    pictures = panel.find_elements(By.CSS_SELECTOR, "svg[role=img]")
    assert [picture.get_attribute("aria-label") for picture in pictures[:3]] == [
        "original, cat <1>",
        "shuffled, cat <1>",
        "reconstruction, cat <1>",
    ]
    assert all(picture.size["width"] > 50 for picture in pictures)
    assert "c" * 64 in panel.text
    assert "17.2 dB, least revealing" in panel.text
    panel.find_element(By.CSS_SELECTOR, "button").click()
    assert opened(browser) == []


def test_pictures_and_provenance_open_and_close_by_keyboard(browser: webdriver.Chrome) -> None:
    button = more(browser)
    focus(browser, button)
    press(browser, Keys.ENTER)
    (panel,) = opened(browser)
    assert browser.switch_to.active_element == panel.find_element(By.CSS_SELECTOR, "button")
    press(browser, Keys.ESCAPE)
    assert opened(browser) == []
    assert browser.switch_to.active_element == button, "focus returns to where it was"


def test_names_are_text_also_where_the_library_shows_them(browser: webdriver.Chrome) -> None:
    browser.find_elements(By.CSS_SELECTOR, ".dt-search input")[CELLS].send_keys("onerror")
    assert column(browser, "model") == [NASTY]
    click(browser, heading(browser, "model").find_element(By.CSS_SELECTOR, ".dtcc-button_dropdown"))
    offered = [each.text for each in browser.find_elements(By.CSS_SELECTOR, ".dtcc-dropdown .dtcc-list-buttons button")]
    assert NASTY in offered
    assert "deit_small" in offered
    assert browser.find_elements(By.CSS_SELECTOR, "img, table script, .dtcc-dropdown script") == []
    press(browser, Keys.ESCAPE)
    click(browser, more(browser))
    assert NASTY in opened(browser)[0].text


def test_a_name_of_special_letters_is_filtered_by(browser: webdriver.Chrome) -> None:
    choose(browser, "model", NASTY)
    assert column(browser, "model") == [NASTY]


def test_nothing_is_requested(browser: webdriver.Chrome) -> None:
    browser.get_log("performance")  # of the tests before
    browser.refresh()
    click(browser, more(browser))
    events: list[dict[str, Any]] = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert {url for url in urls if not url.startswith("data:")} == {browser.current_url}


def test_only_tables_and_plots_scroll_sideways_on_a_phone(browser: webdriver.Chrome) -> None:
    show(browser, 420, "light")
    assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    wider = browser.execute_script(
        "return [...document.querySelectorAll('body *')]"
        ".filter(each => !each.closest('table, svg, pre, [popover]') && each.scrollWidth > each.clientWidth + 1"
        " && getComputedStyle(each).overflowX !== 'visible' && each.clientWidth > 0)"
        ".map(each => each.querySelector('table') ? 'table' : each.matches('.wide') ? 'plot' : each.outerHTML)"
    )
    assert set(wider) == {"table", "plot"}


@pytest.mark.parametrize("width", [420, 1300])
def test_letters_of_plots_are_large_enough_to_read(browser: webdriver.Chrome, width: int) -> None:
    show(browser, width, "light")
    heights = browser.execute_script(
        "return [...document.querySelectorAll('.plots svg text')]"
        ".map(each => [each.getScreenCTM(), parseFloat(getComputedStyle(each).fontSize)])"
        ".map(([matrix, size]) => Math.hypot(matrix.a, matrix.b) * size)"
    )
    assert min(heights) >= 9


# Relative luminance and contrast as WCAG 2 defines them.
CONTRAST = """
const parse = text => text.match(/[\\d.]+/g).map(Number);
const luminance = ([r, g, b]) => [r, g, b].map(v => v / 255)
  .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const background = element => {
  for (; element; element = element.parentElement) {
    const found = parse(getComputedStyle(element).backgroundColor);
    if (found.length < 4 || found[3] > 0.99) return found;
  }
  return [255, 255, 255];
};
return [...document.querySelectorAll(arguments[0])].slice(0, 60).map(element => {
  const [a, b] = [luminance(parse(getComputedStyle(element).color)), luminance(background(element))];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
});
"""


READ = (
    "body", "h2", ".question", "thead th", "tbody td", "tr.dim td", "td.verdict", "figcaption", "dt", "button.more",
    ".interval", ".why span",
)  # fmt: skip


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(browser: webdriver.Chrome, scheme: str) -> None:
    show(browser, 1300, scheme)
    ratios = {selector: browser.execute_script(CONTRAST, selector) for selector in READ}
    assert all(ratios.values())
    assert {selector: min(found) for selector, found in ratios.items() if min(found) < 4.5} == {}


def test_dark_is_dark(browser: webdriver.Chrome) -> None:
    show(browser, 1300, "dark")
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 29)"


def test_without_scripts_every_table_is_there(browser: webdriver.Chrome, page: Path) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(page.as_uri())
        assert browser.find_elements(By.CSS_SELECTOR, ".dt-container") == []
        assert len(browser.find_elements(By.CSS_SELECTOR, "table.sortable tbody tr")) > 100
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})

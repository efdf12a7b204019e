"""A site of several studies: every link leads somewhere, figures are those of the rows, nothing is half-written."""

import os
import re
import shutil
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator
from hashlib import sha256
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pandas as pd
import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from fedmjp.attacks import ATTACKS
from fedmjp.benchmarks.report.site import build
from fedmjp.benchmarks.report.site.files import copy_picture
from fedmjp.benchmarks.report.site.folders import find_studies, unique_name
from fedmjp.benchmarks.report.site.readme import Readme
from fedmjp.cli import main
from fedmjp.defences import DEFENCES
from fedmjp.errors import OutputError
from tests.test_page import AXE, BROWSER, DRIVER, OPTIONS, show

RESULTS = Path(__file__).parents[1] / "results"
BAD_INPUT = 2
LARGEST = 1_500_000  # bytes of a page
QUICKSTART, HOSTILE = "quickstart-reference", "hostile-img-src-x"
WISHES_ILL = "hostile <img src=x>"
SEEN = """
const pictures = [...document.images], done = arguments[0];
for (const picture of pictures) picture.loading = "eager";
Promise.all(pictures.map(picture => picture.decode())).then(() => done(true), () => done(false));
"""  # whether all pictures can be shown
README = """# <b>Bold</b> & `code`

Is it safe? <script>alert(1)</script> [run](javascript:alert(1)) and [up](../../../etc/passwd).

![none](missing.png) ![drawn](figures/drawn.svg) [order](../order/README.md#top) [notes](notes.txt) `mjp`

| left | right |
|---|--:|
| a | 1 |
"""


class Page(HTMLParser):
    """What a page refers to, and what it may be referred to by."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.texts: dict[str, list[str]] = {"style": [], "script": [], "title": []}
        self._inside = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.attributes |= set(values)
        self.links += [values[name] for name in ("href", "src") if name in values]
        self.ids += [values["id"]] if "id" in values else []
        self._inside = tag if values.get("type") != "application/json" else ""
        if tag == "meta" and values.get("http-equiv"):
            self.policy = values["content"]

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside in self.texts:
            self.texts[self._inside].append(data)


Run = Callable[..., int]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    def called(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["fedmjp", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    return called


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A campaign, rows of another study, and a study by somebody who wishes us ill."""
    root = tmp_path_factory.mktemp("collected") / "results"
    for name in (QUICKSTART, "order"):
        shutil.copytree(RESULTS / name, root / name)
    hostile = root / WISHES_ILL
    shutil.copytree(RESULTS / "recurring_batches" / "bat", hostile)
    (hostile / "README.md").write_text(README)
    (hostile / "notes.txt").write_text("notes")
    (hostile / "figures").mkdir()
    (hostile / "figures" / "drawn.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    return root


@pytest.fixture(scope="module")
def site(studies: Path) -> Path:
    """Beneath its own studies."""
    target, told = studies / "site", list[str]()
    assert build.write_site([studies], target, pictures=True, database="", tell=told.append) == 0
    assert len(told) == 3
    assert set(find_studies([studies])) == {QUICKSTART, "order", HOSTILE}, "the site's copies are no studies"
    return target


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def test_every_page_is_reached_and_every_link_leads_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    waiting, reached, outside = [site / "index.html"], set(), set()
    while waiting:
        path = waiting.pop()
        if path in reached:
            continue
        reached.add(path)
        for link in pages[path].links:
            parts = urlsplit(link)
            if parts.scheme == "data":
                continue
            if parts.scheme or parts.netloc:
                outside.add(link)
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.is_file(), f"{path}: {link}"
            assert target.is_relative_to(site), f"{path}: {link}"
            if target.suffix == ".html":
                assert parts.fragment in ("", *pages[target].ids), f"{path}: {link}"
                waiting.append(target)
    assert reached == set(pages)
    cited = "".join(path.read_text() for path in RESULTS.rglob("README.md"))
    assert all(link in cited for link in outside), "what leads elsewhere is a citation"


def test_attacks_and_defences_say_what_their_registries_say(site: Path, pages: dict[Path, Page]) -> None:
    for folder, registry in (("attacks", ATTACKS), ("defences", DEFENCES)):
        assert {path.stem for path in pages if path.parent == site / folder} == set(registry)
        for name in registry:
            text = (site / folder / f"{name}.html").read_text()
            for said in (registry.get(name).summary, registry.get(name).paper):
                assert re.sub(r"&#?\w+;", "", text).count(re.sub(r"['&<>\"]", "", said)) >= 1


@pytest.mark.parametrize("name", ["style", "script"])
def test_pages_run_and_look_like_nothing_but_what_their_policy_names(pages: dict[Path, Page], name: str) -> None:
    for path, page in pages.items():
        if path.name == "leaderboard.html":
            continue
        (content,) = page.texts[name]
        digest = b64encode(sha256(content.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in page.policy
        assert "default-src 'none'" in page.policy
        assert not {each for each in page.attributes if each == "style" or each.startswith("on")}


def test_no_page_is_large(site: Path, pages: dict[Path, Page]) -> None:
    assert max(path.stat().st_size for path in pages) < LARGEST
    assert not list(site.rglob("*.png")), "a figure of two megabytes became smaller"


def test_the_figures_are_those_of_the_rows(site: Path) -> None:
    rows = pd.read_parquet(RESULTS / QUICKSTART / "trials.parquet")
    groups = rows[(rows["attack"] == "mjp_intersection") & (rows["setting"] == "c")].groupby("cell")["psnr"]
    strongest = max(groups, key=lambda group: ((group[1] >= 40).mean(), group[1].median()))[1]
    text = (site / "index.html").read_text()
    row = next(each for each in text.split("<tr") if f"studies/{QUICKSTART}/" in each)
    shown = [re.sub(r"<[^>]+>", " ", each).split() for each in row.split("<td")[4:7]]
    assert [each[-1] for each in shown[:1]] == [str(len(strongest))]
    assert f"{100 * (strongest >= 40).mean():.0f} %" in " ".join(shown[1])
    assert f"{strongest.median():.1f} dB" in " ".join(shown[2])


def test_a_readme_is_text_and_leads_to_what_the_site_holds(site: Path, pages: dict[Path, Page]) -> None:
    folder = site / "studies" / HOSTILE
    page, text = pages[folder / "index.html"], (folder / "index.html").read_text()
    assert page.texts["title"] == ["<b>Bold</b> & code · fedmjp"]
    assert page.tags.count("script") == 2, "the index and the search"
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert not [link for link in page.links if "javascript" in link or "passwd" in link]
    assert {"../order/index.html", "readme-notes.txt", "readme-figures-drawn.svg", "../../defences/mjp.html"} <= set(
        page.links
    )
    assert "[none]" in text
    assert '<td class="right">1</td>' in text
    landing = (site / "index.html").read_text()
    assert "<b>Bold</b>" not in landing, "not in the index of the search either"
    assert "\\u003cb\\u003eBold" in landing


STILL = '<path d="M 0 0" style="fill: none; clip-path: url(#a)"/><use xlink:href="#a"/><style>*{fill: red}</style>'
LIVE = (
    "<script>alert(1)</script>", '<path onload="alert(1)"/>', '<g ONCLICK="alert(1)"/>', "<foreignObject/>",
    '<a href="javascript:alert(1)"><text>here</text></a>', '<image href="https://example.org/seen.png"/>',
    '<use xlink:href="other.svg#a"/>', "<style>@import 'https://example.org/a.css';</style>",
    '<path style="fill: url( https://example.org/a)"/>', '<set attributeName="href" to="javascript:alert(1)"/>',
    '<image href="data:image/svg+xml;base64,PHN2Zy8+"/>', '<body xmlns="http://www.w3.org/1999/xhtml"/>',
)  # fmt: skip
FRAME = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">{}</svg>'


@pytest.mark.parametrize(
    "content",
    [
        *map(FRAME.format, LIVE),
        '<?xml-stylesheet href="a.css"?>' + FRAME.format(STILL),
        '<!DOCTYPE svg [<!ENTITY a "b">]>' + FRAME.format("&a;"),
        FRAME.format(STILL)[:-3],
        FRAME.replace("2000/svg", "2000/other").format(STILL),
    ],
)
def test_an_svg_that_runs_or_loads_something_is_not_copied(tmp_path: Path, content: str) -> None:
    (tmp_path / "site").mkdir()
    for name in ("drawn.svg", "drawn.SVG"):
        (tmp_path / name).write_text(content)
        assert copy_picture(tmp_path / name, tmp_path, tmp_path / "site") is None
    assert not list((tmp_path / "site").iterdir())


def test_shapes_and_text_are_copied_as_they_are(tmp_path: Path) -> None:
    """Those of matplotlib in our own studies too."""
    for number, content in enumerate([FRAME.format(STILL), *(path.read_text() for path in RESULTS.rglob("*.svg"))]):
        path = tmp_path / f"{number}.svg"
        path.write_text(content)
        (tmp_path / "site").mkdir(exist_ok=True)
        name = copy_picture(path, tmp_path, tmp_path / "site")
        assert name is not None
        assert (tmp_path / "site" / name).read_text() == content
    assert number > 2


@pytest.mark.parametrize("name", ["README.md", "shown.png", "manifest.json", "trials.parquet"])
def test_nothing_that_a_link_leads_to_is_published(
    studies: Path, tmp_path: Path, run: Run, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root, secret = tmp_path / "results", tmp_path / name
    shutil.copytree(studies / "order", root / "order")
    theirs = Path(shutil.copytree(studies / "order", root / "theirs"))
    (theirs / "shown.png").touch()
    (theirs / "README.md").write_text("# Mine\n\n![shown](shown.png)\n")
    secret.write_bytes((theirs / name).read_bytes())
    (theirs / name).unlink()
    (theirs / name).symlink_to(secret)
    assert run("leaderboard", root, "--site", tmp_path / "site") == BAD_INPUT
    assert f"{theirs / name} is a link" in capsys.readouterr().out.replace("\n", "")
    assert [path.name for path in (tmp_path / "site" / "studies").iterdir()] == ["order"]


@pytest.mark.parametrize("name", ["CNAME", "studies/order/mine.html", "album"])
def test_a_site_is_not_replaced_while_it_holds_a_file_of_others(
    studies: Path, tmp_path: Path, run: Run, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    site = tmp_path / "site"
    assert run("leaderboard", studies / "order", "--site", site) == 0
    assert run("leaderboard", studies / "order", "--site", site) == 0, "as it was written"
    (tmp_path / "album").mkdir()
    (tmp_path / "album" / "cat.png").touch()
    if name == "album":
        (site / name).symlink_to(tmp_path / "album")
    else:
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).touch()
    assert run("leaderboard", studies / "order", "--site", site) == BAD_INPUT
    assert f"{site / name} is not from fedmjp, and would be lost" in capsys.readouterr().err
    assert (site / name).exists()
    assert (tmp_path / "album" / "cat.png").exists()


def test_what_cannot_be_read_is_told_and_left_out(
    studies: Path, tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "results"
    shutil.copytree(studies / "order", root / "order")
    for name in ("cut", "latin", "list", "plan"):
        shutil.copytree(studies / WISHES_ILL, root / name)
    (root / "cut" / "trials.parquet").write_bytes((root / "cut" / "trials.parquet").read_bytes()[:5000])
    (root / "latin" / "README.md").write_bytes("# Größe".encode("latin-1"))
    (root / "list" / "manifest.json").write_text("[1]")
    (root / "order" / "pipe.png").unlink(missing_ok=True)
    os.mkfifo(root / "order" / "pipe.png")
    (root / "order" / "README.md").write_text("# Order\n\n![pipe](pipe.png)\n")
    (root / "plan" / "trials.parquet").unlink()
    os.mkfifo(root / "plan" / "trials.parquet")
    assert run("leaderboard", root, "--site", tmp_path / "site") == BAD_INPUT
    printed = capsys.readouterr()
    for name in ("cut", "latin", "list"):
        (line,) = [each for each in printed.out.splitlines() if f"{root / name} is left out" in each]
        assert line.startswith("[")
    assert "Traceback" not in printed.out + printed.err
    assert "order: 280 rows" in printed.out
    assert {path.name for path in (tmp_path / "site" / "studies").iterdir()} == {"order"}


def test_a_former_site_stands_until_the_new_one_is_whole(
    studies: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = tmp_path / "site"
    assert run("leaderboard", studies / "order", "--site", site) == 0
    before = {path: path.read_bytes() for path in site.rglob("*") if path.is_file()}
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "trials.parquet").write_bytes(b"PAR1")
    assert run("leaderboard", damaged, "--site", site) == BAD_INPUT
    assert "none of 1 studies can be read" in capsys.readouterr().err
    with monkeypatch.context() as broken:
        broken.setattr(build, "list_methods", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            build.write_site([studies / "order"], site, pictures=True, database="", tell=print)
    assert {path: path.read_bytes() for path in site.rglob("*") if path.is_file()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"site", "damaged"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{studies}", "--site", "{studies}"], "holds something that is no site"),
        (["{studies}", "--site", "{studies}/order/README.md"], "holds something that is no site"),
        (["{studies}", "--site", "new", "--format", "md"], "leave out --format and --output"),
        (["{studies}", "--site", "new", "--output", "new"], "leave out --format and --output"),
        (["nowhere", "--site", "new"], "nowhere is no folder"),
        (["--site", "new"], "results is no folder"),
        ([".", "--site", "new"], "no folder in . holds trials.sqlite or trials.parquet"),
        (["{studies}", "{studies}"], "name one folder of results, got 2"),
    ],
)
def test_bad_arguments_are_told_in_a_line(
    studies: Path,
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("leaderboard", *(each.format(studies=studies) for each in arguments)) == BAD_INPUT
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_names_differ_on_every_file_system() -> None:
    assert unique_name("mjp", ["MJP", "mjp-2"]) == "mjp-3"
    assert unique_name("../<b>", []) == "b"
    assert unique_name("дом", []) == "unnamed"


def test_a_readme_that_is_empty_or_has_no_title_is_read() -> None:
    assert (Readme("").title, Readme("").sentence) == ("", "")
    assert Readme("One. Two.").sentence == "One."
    with pytest.raises(OutputError):
        build.write_site([Path(__file__)], Path("never"), pictures=False, database="", tell=print)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    if not (DRIVER and BROWSER):
        pytest.skip("no chromium and chromedriver (Debian: chromium-driver)")
    options = webdriver.ChromeOptions()
    for option in (*OPTIONS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(service=Service(str(DRIVER)), options=options)
    yield driver
    driver.quit()


@pytest.fixture
def browser(started: webdriver.Chrome) -> Iterator[webdriver.Chrome]:
    """Nothing may have been logged when the test is over: no refused style, no picture that is missing."""
    yield started
    assert started.get_log("browser") == []


@pytest.mark.slow
def test_search_works_by_keyboard_from_a_file(browser: webdriver.Chrome, site: Path) -> None:
    show(browser, 1280, "light")
    browser.get((site / "studies" / QUICKSTART / "index.html").as_uri())
    browser.find_element(By.TAG_NAME, "body").send_keys("/")
    field = browser.switch_to.active_element
    assert field.get_attribute("id") == "query"
    field.send_keys("gaussian NOISE")
    names = [each.text for each in browser.find_elements(By.CSS_SELECTOR, "#found a")]
    assert names[0] == "gaussian"
    assert browser.find_element(By.ID, "count").text == f"{len(names)} pages"
    field.send_keys(Keys.ARROW_DOWN)
    assert browser.switch_to.active_element.text == "gaussian"
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert browser.find_elements(By.CSS_SELECTOR, "#found a") == []
    browser.switch_to.active_element.send_keys("gaussian", Keys.ENTER)
    assert browser.current_url.endswith("/defences/gaussian.html")


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (1280, "light")])
def test_pages_fit_and_axe_finds_no_violation(browser: webdriver.Chrome, site: Path, width: int, scheme: str) -> None:
    show(browser, width, scheme)
    (package,) = find_spec("axe_playwright_python").submodule_search_locations  # not imported: it would need Playwright
    axe = (Path(package) / "axe.min.js").read_text(encoding="utf-8")
    for name in ("index.html", f"studies/{QUICKSTART}/index.html", "defences/mjp.html"):
        browser.get((site / name).as_uri())
        for other in (800, width):
            show(browser, other, scheme)
            assert browser.execute_script("return document.documentElement.scrollWidth") <= other
        assert browser.execute_async_script(SEEN)
        browser.find_element(By.ID, "query").send_keys("mjp")
        browser.execute_script(axe)
        assert browser.execute_async_script(AXE, "body") == []

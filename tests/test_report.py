"""What a leaderboard is published as: every number at full precision, every name as text, the same bytes again."""

import csv
import io
import json
import re
import time
import xml.etree.ElementTree as ET
from collections.abc import Hashable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image
from rich.console import Console

from fedmjp.benchmarks import leaderboard, report
from fedmjp.benchmarks.leaderboard.entries import Board, BoardEntry, Difference, Marginal, Utility
from fedmjp.benchmarks.leaderboard.headline import headline
from fedmjp.benchmarks.leaderboard.standings import rank_models, strongest
from fedmjp.benchmarks.report import numbers
from fedmjp.benchmarks.report.drawing import COLOURS, UNDEFENDED_COLOUR, assign_styles
from fedmjp.benchmarks.report.findings import LINES, NAIVE, list_findings
from fedmjp.benchmarks.report.page import Gallery, KeptPicture, page
from fedmjp.benchmarks.report.plots import embed_svg, plots, write_svg
from fedmjp.benchmarks.report.publish import FORMATS, publish
from fedmjp.benchmarks.report.reported import find_nearest, reported_table
from fedmjp.benchmarks.report.tables import CHANGED, Report, Section
from fedmjp.benchmarks.report.terminal import PRINTED, print_table
from fedmjp.benchmarks.report.texts import csv_text, escape_latex, latex_text, markdown_text
from fedmjp.defences import DEFENCES
from fedmjp.zoo import ZOO
from tests.sample_board import NASTY, THREATS, nasty_entry, sample_board, sample_entry


@pytest.fixture(scope="module")
def board() -> Board:
    return sample_board(models=["deit_small"], extra=[nasty_entry()])


@pytest.fixture(scope="module")
def folder(board: Board, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    publish(board, folder, formats=FORMATS, pictures=None)
    return folder


def test_every_format_is_written(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    assert names == {f"leaderboard.{suffix}" for suffix in ("html", "md", "csv", "json", "tex")} | {"plots"}


def test_files_are_whole_or_as_they_were(board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaderboard.csv").write_text("before")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        publish(board, tmp_path, formats=["csv"], pictures=None)
    assert (tmp_path / "leaderboard.csv").read_text() == "before"


def test_the_same_board_gives_the_same_bytes(board: Board, folder: Path) -> None:
    again = {plot.name: write_svg(plot) for plot in plots(board)}
    assert again == {path.stem: path.read_text() for path in (folder / "plots").iterdir()}
    text = page(Report(board), None, again, plots(board))
    assert text == (folder / "leaderboard.html").read_text()


def test_json_is_the_board(board: Board, folder: Path) -> None:
    assert Board.model_validate_json((folder / "leaderboard.json").read_text()) == board


def test_tables_lead_with_the_share_recovered_exactly_then_the_median_and_keep_the_mean(board: Board) -> None:
    lines = {line["id"]: line for line in csv.DictReader(io.StringIO(csv_text(Report(board))))}
    nasty = lines[nasty_entry().id]  # 120, 130 and 95 dB
    assert [float(nasty[name]) for name in ("exact", "median", "psnr_mean", "flat")] == [1, 120, 115, 0]
    assert float(nasty["exact_low"]) < float(nasty["exact_high"]) == 1
    names = ["recovered exactly", "median, dB", "mean, PSNR dB"]
    section = Report(board).sections[0]
    for ranking in section.rankings.values():
        assert [name for name in ranking if name in names] == names
    assert list(section.cells.loc[nasty_entry().id, names[:2]]) == ["3 of 3 (85 to 100 %)", "120.0"]


def test_csv_holds_every_number_at_full_precision(board: Board) -> None:
    lines = list(csv.DictReader(io.StringIO(csv_text(Report(board)))))
    assert len(lines) == len(board.entries)
    for line, entry in zip(lines, board.entries, strict=True):
        for name in board.metrics:
            for statistic in ("mean", "low", "high", "median", "p95", "worst"):
                text = line[f"{name}_{statistic}"]
                found = entry.metrics.get(name)
                assert (float(text) if text else None) == (getattr(found, statistic) if found else None)
        assert (line["model"], line["reason"]) == (entry.model, entry.reason)
        assert line["threat_local_steps"] == str(entry.threat.local_steps)
    assert not re.search(r"\bnan\b", csv_text(Report(board)), flags=re.I)


class Cells(HTMLParser):
    """Texts of all cells, and the tags that there are."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "td":
            self.inside = True
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag != "td"

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.cells[-1] += data


def test_html_shows_names_as_they_are_and_loads_nothing(folder: Path) -> None:
    parsed = Cells((folder / "leaderboard.html").read_text())
    assert parsed.cells.count(NASTY) >= 2, "model and attack"
    links = [
        value for tag, attrs in parsed.tags for name, value in attrs.items() if name in ("src", "href") and tag != "a"
    ]
    assert all(str(link).startswith(("data:", "#")) for link in links)
    assert sum(tag == "script" for tag, _ in parsed.tags) == 1
    ids = [attrs["id"] for _, attrs in parsed.tags if "id" in attrs]
    assert len(ids) == len(set(ids))


def test_whatever_the_page_links_to_is_there(folder: Path) -> None:
    parsed = Cells((folder / "leaderboard.html").read_text())
    links = [str(attrs["href"]) for tag, attrs in parsed.tags if tag == "a"]
    files = {link for link in links if not link.startswith("#")}
    assert files == {"leaderboard.csv", "leaderboard.json"}
    assert all((folder / file).exists() for file in files)
    ids = {f"#{attrs['id']}" for _, attrs in parsed.tags if "id" in attrs}
    assert set(links) - files <= ids


def test_html_says_beside_the_table_what_differs_in_a_paper(board: Board, folder: Path) -> None:
    text = (folder / "leaderboard.html").read_text()
    for row in board.reported:
        assert f"<li><b>{row.row}</b>, {row.source}: {row.differs}</li>" in text


def test_html_says_why_there_are_no_pictures(folder: Path) -> None:
    assert "may be passed on" in (folder / "leaderboard.html").read_text()


def test_a_picture_is_embedded_once(board: Board, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(np.zeros((4, 4, 3), dtype=np.uint8)).save(path)
    copy = tmp_path / "b.png"
    copy.write_bytes(path.read_bytes())
    shown = {entry.id: (KeptPicture("median", "cat", 12.0, path, copy, path),) for entry in board.entries[:5]}
    text = page(Report(board), Gallery(shown), {}, [])
    assert text.count('<image id="picture-') == 1
    assert text.count('href="#picture-0"') == 15


def test_refused_rows_say_why_and_empty_cells_have_a_reason(board: Board) -> None:
    (_, delta) = Report(board).sections
    refused = next(row for row in delta.cells.to_dict("records") if row["verdict"] == "refused")
    assert refused["reason"] == "needs a gradient, and the update is a weight delta"
    for section in Report(board).sections:
        for row in (*standings_of(section), *section.cells.to_dict("records")):
            named = {name: text for name, text in row.items() if name not in ("origin", "reason")}
            assert all(text or text.why for text in named.values())
            assert not any(text == "nan" for text in named.values())


def test_a_standing_shows_the_numbers_of_its_strongest_attack(board: Board) -> None:
    for standing in board.standings:
        rivals = [
            headline(entry)
            for entry in board.entries
            if entry.role == "attack"
            and entry.metrics
            and (entry.threat, entry.setting, entry.model, entry.defences)
            == (standing.threat, standing.setting, standing.model, standing.defences)
        ]
        assert headline(strongest(board, standing)) == max(rivals)


def test_rankings_are_of_what_is_compared_with_one_version_of_the_picture(board: Board) -> None:
    for section in Report(board).sections:
        (title, clean), (_, shuffled) = section.rankings.items()
        assert "settings a and c" in title
        assert set(clean["setting"]) == {"a", "c"}
        assert set(shuffled["setting"]) == {"b"}
        assert set(clean["defence"]) == {"none", "jigsaw", "mjp"}


def noised_board() -> Board:
    """One attack on two defences together, on each alone and on none; and on twice as many as there are colours."""
    random = np.random.default_rng(0)
    levels = {"none": 80.0, "mjp": 30.0, "gaussian": 50.0, "mjp + gaussian": 20.0}
    levels |= {f"gaussian:noise={noise}": 40.0 for noise in range(1, 2 * len(COLOURS))}

    def entry_of(label: str, **values: object) -> BoardEntry:
        return sample_entry(
            id=label, model="deit_tiny", weights="untrained", defences=label.split(" + "), attack="april",
            role="attack", setting="c" if "mjp" in label else "a", threat=THREATS[0], verdict="leaks", reason="",
            values=random.normal(levels[label], 1, 8), twin=None if label == "none" else "none",
            utility=Utility(top1=70.0, source="paper"), **values,
        )  # fmt: skip

    gains = [
        Marginal(defence="mjp", twin="gaussian", difference=Difference(mean=-30, low=-31, high=-29, p_value=0.01, n=8)),
        Marginal(defence="gaussian", twin="mjp", difference=None),
    ]
    entries = [entry_of("mjp + gaussian", marginal=tuple(gains))]
    entries += [entry_of(label) for label in levels if label != "mjp + gaussian"]
    board = sample_board(models=[], extra=entries)
    return board.model_copy(update={"standings": tuple(rank_models(board.entries))})


def test_readers_find_the_rows_that_a_row_is_held_against(tmp_path: Path) -> None:
    lines = list(csv.DictReader(io.StringIO(csv_text(Report(noised_board())))))
    by_id = {line["id"]: line for line in lines}
    for line in lines:
        if line["defence"] == "none":
            assert line["twin"] == line["marginal"] == ""
        else:
            assert by_id[line["twin"]]["defence"] == "none"
    assert lines[0]["defences"] == "mjp + gaussian"
    gains = json.loads(lines[0]["marginal"])
    assert [(gain["defence"], by_id[gain["twin"]]["defence"]) for gain in gains] == [
        ("mjp", "gaussian"), ("gaussian", "mjp"),
    ]  # fmt: skip
    assert gains[0]["difference"]["mean"] == -30
    publish(noised_board(), tmp_path, formats=FORMATS, pictures=None)
    shown = (tmp_path / "leaderboard.html").read_text()
    assert "−30.0 (−31.0 to −29.0), p = 0.01; entry without it: gaussian" in shown
    assert "mjp -30.0" in (tmp_path / "leaderboard.md").read_text()


def test_clients_that_degrade_updates_stand_in_the_section_of_their_server() -> None:
    (section,) = Report(noised_board()).sections
    assert section.server == THREATS[0]
    told = "Of gaussian it is told the standard deviation of the noise, relative to each tensor."
    assert section.sentence.startswith(THREATS[0].sentence())
    assert section.sentence.endswith(CHANGED)
    assert CHANGED not in Report(sample_board()).sections[0].sentence, "there no update is changed"
    assert section.sentence.count(told) == 1
    (ranking,) = section.rankings.values()
    assert len(ranking) == len(noised_board().entries)
    assert list(ranking["rank"][:2]) == ["1", "2"]
    assert ranking["defence"].iloc[0] == "mjp + gaussian"


def test_any_number_of_defences_is_drawn_each_in_its_own_style() -> None:
    board = noised_board()
    drawn = assign_styles(board)
    assert next(iter(drawn)) == "none"
    assert set(drawn) == {entry.defence for entry in board.entries}
    assert len({(style.colour, style.line) for style in drawn.values()}) == len(drawn) > 2 * len(COLOURS)
    assert drawn["none"] == assign_styles(sample_board())["none"]
    assert [plot.name for plot in plots(board)] == ["threat-1-leakage-1", "threat-1-utility"]


def test_colours_keep_a_contrast_of_three_on_white_and_on_near_black() -> None:
    def luminance(colour: str) -> float:
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in to_rgb(colour)]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    dark = luminance("#16181d")
    for colour in (UNDEFENDED_COLOUR, *COLOURS):
        assert 1.05 / (luminance(colour) + 0.05) >= 3
        assert (luminance(colour) + 0.05) / (dark + 0.05) >= 3


def test_no_defence_is_compared_by_name_where_boards_are_made() -> None:
    name = rf"""["']({"|".join(map(re.escape, DEFENCES))})["']"""
    compared = re.compile(rf"(==|!=|\bin|\bis)\s*[(\[{{]*{name}|{name}\s*(==|!=|in\b|:)")
    packages = (Path(str(module.__file__)).parent for module in (leaderboard, report))
    for path in [path for package in packages for path in package.glob("*.py")]:
        assert not compared.search(path.read_text()), path


def standings_of(section: Section) -> list[dict[Hashable, Any]]:
    return [row for ranking in section.rankings.values() for row in ranking.to_dict("records")]


def test_findings_say_for_each_defence_what_its_strongest_attack_recovers(board: Board) -> None:
    entries = {entry.id: entry for entry in board.entries}
    lines = Report(board).sections[0].findings
    assert len(lines) == 4, "jigsaw and mjp at three ratios; what has no defence is none"
    assert lines[0].startswith("jigsaw at mask ratio 0.27 on deit_small"), "the one that leaks comes first"
    (line,) = [line for line in lines if line.startswith("mjp at mask ratio 0.5 ")]
    prefix = "gradient-deit_small-mjp-0.5-patch_embedding"
    for setting in "abc":
        entry = entries[f"{prefix}-{setting}"]
        twin, floor = entries[str(entry.twin)], entries[str(entry.floor)]
        shown = [f"{np.median(list(one.scores['psnr'].values())):.1f}" for one in (entry, floor, twin)]
        recovers = f"recovers 0 of 20 exactly, median {shown[0]} dB, in {setting}"
        assert f"strongest attack patch_embedding {recovers}" in line
        references = f"(grey guess {shown[1]} dB, without defence 0 of 20 exactly, median {shown[2]} dB): "
        assert references in line, "once where all say the same"
        assert re.search(rf"{recovers}[^;]*: {verdict_in(board, entry)}", line)
    assert line.endswith(NAIVE)


def verdict_in(board: Board, entry: BoardEntry) -> str:
    return next(one.verdict for one in board.standings if strongest(board, one) == entry)


def test_findings_name_naive_attacks_only_where_all_are(board: Board) -> None:
    knows = [one.model_copy(update={"adapted": one.defence == "mjp"}) for one in board.standings]
    lines = list_findings(board, knows)
    assert {line.split()[0]: line.endswith(NAIVE) for line in lines} == {"jigsaw": True, "mjp": False}


def test_findings_of_a_defence_that_no_attack_applies_to_say_so(board: Board) -> None:
    refused = [entry for entry in board.entries if entry.verdict == "refused" and entry.defence == "mjp"]
    mjp = [one for one in board.standings if one.threat == THREATS[1] and one.defence == "mjp"]
    entry = refused[0]
    standing = next(
        one for one in mjp if (one.setting, one.mask_ratio) == (entry.setting, entry.mask_ratio)
    ).model_copy(update={"strongest": entry.attack, "verdict": "refused", "attacks": 0})
    (line,) = list_findings(board, [standing])
    assert line.endswith(f": no attack applies in {entry.setting}")


def test_many_findings_are_cut_and_counted() -> None:
    whole = sample_board(pictures=3)
    lines = Report(whole).sections[0].findings
    assert len(lines) == LINES + 1
    assert lines[-1] == "and 6 more below", "four on each of three models"


def test_verdicts_are_counted_in_a_sentence(board: Board) -> None:
    section = Report(board).sections[0]
    counted = [int(number) for number in re.findall(r"\d+", section.summary)]
    assert counted[0] == sum(counted[1:]) == len(standings_of(section))


def test_reported_figures_stand_beside_ours_as_they_were_printed(board: Board) -> None:
    ours, none = reported_table(board).to_dict("records")
    assert ours["PSNR dB"] == "10.34"
    assert ours["MSE"] == "0.0350", "its column has four digits"
    assert ours["nearest of ours"].startswith("deit_small, mjp at mask ratio 0.1, patch_embedding")
    assert none["nearest of ours"] == ""
    nearest = find_nearest(board, board.reported[0])
    assert nearest is not None
    assert nearest.setting == board.reported[0].setting


def test_the_attack_of_breaching_is_nearest_to_a_paper_that_ran_it(board: Board) -> None:
    weaker = next(entry for entry in board.entries if entry.defence == "mjp" and entry.attack == "gradient_matching")
    ours = weaker.model_copy(update={"id": "ours", "attack": "april_min_norm"})
    more = board.model_copy(update={"entries": (*board.entries, ours)})
    named = board.reported[0].model_copy(update={"attack": "APRIL analytic attack (breaching)"})
    assert find_nearest(more, named) == ours, "although patch_embedding reveals more"
    assert find_nearest(board, named) == find_nearest(board, board.reported[0])


def test_markdown_tables_have_as_many_cells_as_headings(board: Board) -> None:
    text = markdown_text(Report(board))
    tables = re.findall(r"(?:^\|.*\n)+", text, flags=re.M)
    assert len(tables) == 7
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1
    assert "<script>" not in text
    assert "deit_small" in text, "underscores inside words stay readable"


def test_latex_escapes_and_closes_what_it_opens(board: Board) -> None:
    text = latex_text(Report(board))
    plain = re.sub(r"\\[&%$#_{}\\]", "", text)
    assert plain.count("{") == plain.count("}")
    assert not re.search(r"[$#_~^<>\"]", plain)
    for name in ("table", "tabular"):
        assert text.count(rf"\begin{{{name}}}") == text.count(rf"\end{{{name}}}") > 0
    for line in text.splitlines():
        if line.endswith(r"\\") and not line.startswith("%"):
            assert len(re.findall(r"(?<!\\)&", line)) == 13
    assert THREATS[0].sentence() in text
    assert "n = 3 to 20 pictures" in text


def test_latex_keeps_every_letter() -> None:
    names = {r"\textbackslash{}": "\\", r"\textasciitilde{}": "~", r"\textasciicircum{}": "^", r"\textless{}": "<"}
    names |= {r"\textgreater{}": ">", r"\textbar{}": "|", r"\textquotedbl{}": '"'}
    text = escape_latex(NASTY)
    back = re.sub(r"\\text\w+\{\}|\\([&%$#_{}])", lambda found: found[1] or names[found[0]], text)
    assert back == NASTY


@pytest.mark.parametrize("width", [100, 140, 200])
def test_terminal_tables_fit_and_say_what_is_left_out(width: int) -> None:
    console = Console(width=width, file=io.StringIO(), no_color=True)
    whole = sample_board(models=["deit_small"])
    few = {
        one: [each for each in getattr(whole, one) if each.defence != "mjp" and each.threat == THREATS[0]]
        for one in ("entries", "standings")
    }
    board = whole.model_copy(update=few)
    assert len(board.entries) <= PRINTED
    print_table(Report(board), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "All cells" in text
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text, "nothing is cut"
    assert "Left out for want of width" in text
    assert "recognisable" in text or width < 200


def test_a_terminal_gets_the_standings_of_a_large_board(board: Board) -> None:
    console = Console(width=120, file=io.StringIO(), no_color=True)
    print_table(Report(board), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "All cells" not in text
    assert f"All {len(board.entries)} cells are in the report." in text
    assert text.count("Standings, compared with the picture") == 2
    assert text.count("Standings, compared with the shuffled picture") == 2


def test_plots_have_titles_their_own_ids_and_no_black(board: Board) -> None:
    found = plots(board)
    assert len({plot.name for plot in found}) == len(found)
    for plot in found:
        element = ET.fromstring(embed_svg(plot, write_svg(plot)).replace("xlink:href", "href"))
        assert plot.caption in str(element[0].text)
        ids = [each.get("id") for each in element.iter() if each.get("id")]
        assert len(ids) == len(set(ids))
        assert all(str(each).startswith(plot.name) for each in ids)
        text = ET.tostring(element, encoding="unicode")
        assert "#000" not in text
        assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', text)) <= set(ids)


def test_a_page_writes_in_a_plot_what_its_file_writes(board: Board) -> None:
    written = []
    for plot in plots(board):
        content = write_svg(plot)
        texts = [
            [each.text for each in ET.fromstring(drawn).iter() if each.tag.endswith("text")]
            for drawn in (content, embed_svg(plot, content).replace("xlink:href", "href"))
        ]
        assert texts[0] == texts[1]
        written += texts[0]
    assert any(re.search(r"\d\.\d\d", str(text)) for text in written), "none that rounding would show in"


def test_plots_without_numbers_are_left_out_with_a_reason(tmp_path: Path) -> None:
    one = sample_entry(
        id="one", model="vit", weights="untrained", defences="none", attack="grey", role="attack",
        setting="a", threat=THREATS[0], verdict="leaks", reason="", values=np.array([20.0]),
    )  # fmt: skip
    board = sample_board(models=[], extra=[one])
    publish(board, tmp_path, formats=["html"], pictures=None)
    assert {path.name for path in tmp_path.glob("*.*")} == {f"leaderboard.{kind}" for kind in ("html", "csv", "json")}
    text = (tmp_path / "leaderboard.html").read_text()
    assert "no accuracy is known" in text
    assert "at two ratios or more" in text
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["threat-1-leakage-1.svg"]


def test_a_board_with_nothing_finished_is_published(tmp_path: Path, board: Board) -> None:
    refused = [entry for entry in board.entries if entry.verdict == "refused"]
    kept = [standing for standing in board.standings if standing.verdict == "refused"]
    empty = board.model_copy(update={"entries": tuple(refused), "standings": tuple(kept), "reported": ()})
    assert len(publish(empty, tmp_path, formats=FORMATS, pictures=None)) == 5


def test_numbers_are_shown_with_fitting_digits() -> None:
    assert numbers.score(17.26, "psnr") == "17.3"
    assert numbers.score(0.3, "fft2d") == "0.30"
    assert numbers.score(1.234e-10, "mse") == "1.2e-10"
    shares = {"0 %": 0.0, "< 1 %": 0.001, "1 %": 0.01, "99 %": 0.99, "> 99 %": 199 / 200, "100 %": 1.0}
    assert [numbers.share(each, 0, 1).main for each in shares.values()] == list(shares)
    assert numbers.p_value(0.0123) == ", p = 0.012"
    assert numbers.p_value(1e-9) == ", p < 0.001"
    assert numbers.p_value(None) == ""
    assert numbers.seconds(1234.5) == "1234"
    assert numbers.seconds(0.01234) == "0.012"
    assert numbers.weights("untrained") == "untrained"
    assert numbers.weights(ZOO["wide-mjp-0"].sha256) == "zoo:wide-mjp-0"


def test_a_large_board_is_published_in_seconds_and_stays_small(tmp_path: Path) -> None:
    whole = sample_board(pictures=500)
    board = whole.model_copy(update={"entries": whole.entries[:200], "standings": whole.standings[:30]})
    kept = [standing for standing in board.standings if standing.threat == THREATS[0]]
    board = board.model_copy(update={"standings": tuple(kept)})
    began = time.process_time()
    publish(board, tmp_path, formats=FORMATS, pictures=None)
    assert time.process_time() - began < 15
    assert (tmp_path / "leaderboard.html").stat().st_size < 1_500_000
    assert len(json.loads((tmp_path / "leaderboard.json").read_text())["entries"]) == 200

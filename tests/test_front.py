"""What stands first on a board's page: the matrix, the answer, figures, pictures, and who is to be cited."""

import base64
import hashlib
import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedmjp.benchmarks.leaderboard import statistics
from fedmjp.benchmarks.leaderboard.entries import Board, BoardEntry
from fedmjp.benchmarks.leaderboard.headline import server_name
from fedmjp.benchmarks.report import numbers
from fedmjp.benchmarks.report.citation import read_citation
from fedmjp.benchmarks.report.details import list_facts
from fedmjp.benchmarks.report.front import MOST_KEY_FIGURES, NOTHING, QUESTION, answer, select_key_entries
from fedmjp.benchmarks.report.matrix import Matrix, arrange_matrix
from fedmjp.benchmarks.report.page import anchor, page
from fedmjp.benchmarks.report.percent import percent
from fedmjp.benchmarks.report.tables import Report
from fedmjp.benchmarks.report.thumbnails import BUDGET, SIDES, make_thumbnails
from fedmjp.errors import GAVE_UP
from fedmjp.settings import Setting
from fedmjp.threat import ThreatModel
from tests.sample_board import nasty_entry, sample_board, sample_entry

README = Path(__file__).parents[1] / "README.md"
ONCE, FOUR, BATCH = ThreatModel(), ThreatModel(uploads_per_picture=4), ThreatModel(batch_size=8)


def entry_of(threat: ThreatModel, values: list[float], **changes: object) -> BoardEntry:
    given = {
        "id": threat.digest() + str(changes), "model": "deit_tiny", "weights": "untrained", "defences": "mjp",
        "attack": "mjp_intersection", "role": "attack", "setting": Setting.C, "verdict": "leaks",
        "reason": "", "adapted": True, "threat": threat, "values": np.array(values),
    }  # fmt: skip
    return sample_entry(**given | changes)


PLAIN = entry_of(ONCE, [80.0, 90.0], defences="none", setting=Setting.A, attack="april", adapted=False)
NAIVE = entry_of(ONCE, [12.0, 39.9], attack="april", adapted=False)
KNOWING = entry_of(ONCE, [13.0, 41.0, 12.0], attack="mjp_prior")
AGAIN = entry_of(FOUR, [50.0, 60.0])
NOISED = entry_of(BATCH, [9.0, 8.0], defences="gaussian", setting=Setting.A, adapted=False, attack="april")
SHUFFLED = entry_of(ONCE, [99.0, 99.0], setting=Setting.B)  # compared with the shuffled picture: proves nothing
SIGNED = entry_of(ONCE, [9.0, 8.0], defences="sign", setting=Setting.A, verdict="withstood")
GAVE_UP_ON_SIGNS = entry_of(
    ONCE, [], defences="sign", setting=Setting.A, attack="april", adapted=False, verdict="inconclusive"
).model_copy(update={"failures": 2, "errors": (f"{GAVE_UP}nothing to solve for",)})
CLIPPED = entry_of(ONCE, [39.0, 25.0], defences="clip", setting=Setting.A)
ROUNDED = entry_of(FOUR, [41.0, 25.0], defences="round", setting=Setting.A, adapted=False)

WITH_MJP = "With mjp (mask ratio 0.27) on deit_tiny, a server recovers"
NO_SUCH_ATTACK = "No attack that knows mjp was run."


def board_of(*entries: BoardEntry) -> Board:
    return sample_board(models=[], extra=entries)


def shown(table: Matrix) -> dict[str, list[str]]:
    return {row.defence: [cell.text + "?" * cell.blind if cell else "" for cell in row.cells] for row in table.rows}


def test_the_matrix_shows_what_the_strongest_attack_recovers_exactly_before_each_server() -> None:
    table = arrange_matrix(board_of(SHUFFLED, AGAIN, NAIVE, KNOWING, NOISED, PLAIN))
    assert [server_name(server) for server in table.columns] == ["1 upload", "4 uploads", "1 upload (batch of 8)"]
    assert shown(table) == {
        "no defence": ["100 %", "", ""],
        "mjp, mask ratio 0.27": ["33 %", "100 %", ""],
        "gaussian": ["", "", "0 %?"],
    }
    cell = table.rows[1].cells[0]
    assert cell is not None
    assert [attack.attack for attack in cell.attacks] == ["mjp_prior", "april"]
    assert cell.decibels == "13.0", "the median of its strongest attack, which is not the highest mean"


def test_cells_are_of_all_attacks_of_a_board() -> None:
    board = sample_board(models=["deit_small"], extra=[nasty_entry()])
    for row in arrange_matrix(board).rows:
        for cell in row.measured:
            rivals = [
                one for one in board.entries if one.role == "attack" and one.n and one.setting is not Setting.B
                if (one.model, one.server, one.defence, one.mask_ratio, one.pipeline.shuffles) == (
                    cell.entry.model, cell.entry.server, cell.entry.defence, cell.entry.mask_ratio,
                    cell.entry.pipeline.shuffles)
            ]  # fmt: skip
            shares = [np.mean(np.array(list(one.scores["psnr"].values())) >= 40) for one in rivals]
            assert cell.text == percent(float(max(shares)))


@pytest.mark.parametrize(
    ("share", "text"), [(0, "0 %"), (0.001, "< 1 %"), (0.3, "30 %"), (0.995, "> 99 %"), (1, "100 %")]
)
def test_none_and_all_are_said_of_none_and_of_all_alone(share: float, text: str) -> None:
    assert percent(share) == text


@pytest.mark.parametrize(
    ("recovered", "of", "text"),
    [(199, 200, "> 99 % (97 to 99.9)"), (200, 200, "100 % (98 to 100)"), (1, 400, "< 1 % (0.1 to 1)")],
)
def test_an_interval_ends_at_all_only_where_all_came_back(recovered: int, of: int, text: str) -> None:
    measured = statistics.share(recovered, of)
    assert numbers.share(measured.share, measured.low, measured.high) == text


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        (
            (PLAIN, NAIVE, KNOWING, AGAIN),
            f"{WITH_MJP} 33 % of pictures exactly from 1 upload, and every picture from 4 uploads.",
        ),
        (
            (PLAIN, NAIVE),
            f"{WITH_MJP} no picture exactly from 1 upload; without a defence, every picture. {NO_SUCH_ATTACK}",
        ),
        ((PLAIN,), "With no defence on deit_tiny, a server recovers every picture exactly from 1 upload."),
        (
            (PLAIN, NAIVE, AGAIN, SIGNED, CLIPPED, ROUNDED),
            (
                "Of 4 defences, 2 let some server recover a picture exactly and 1 less than that; 1 withstood attacks "
                "that know them, and of 0 nothing follows."
            ),
        ),
        (
            (PLAIN, NAIVE, AGAIN, SIGNED, GAVE_UP_ON_SIGNS, CLIPPED, ROUNDED),
            (
                "Of 4 defences, 2 let some server recover a picture exactly and 1 less than that; 0 withstood attacks "
                "that know them, and of 1 nothing follows."
            ),
        ),
        ((entry_of(ONCE, [], verdict="refused"),), NOTHING),
        ((), NOTHING),
    ],
)
def test_the_answer_is_one_sentence(entries: tuple[BoardEntry, ...], sentence: str) -> None:
    assert answer(arrange_matrix(board_of(*entries))) == sentence
    assert sentence.replace("'", "&#39;") in page(Report(board_of(*entries)), None, {}, [])


def test_key_figures_are_those_behind_the_answer() -> None:
    board = board_of(PLAIN, NAIVE, KNOWING, AGAIN)
    assert select_key_entries(arrange_matrix(board)) == [KNOWING, AGAIN]
    ratios = [entry_of(ONCE, [30.0 - place], defences=f"mjp:mask_ratio=0.{place}") for place in range(1, 10)]
    other = entry_of(ONCE, [99.0], model="vit", defences="mjp:mask_ratio=0.9")
    many = board_of(*ratios, PLAIN, other)
    entries = select_key_entries(arrange_matrix(many))
    assert entries[:2] == [PLAIN, ratios[2]], "what the answer is about, at 0.3"
    assert len(entries) == MOST_KEY_FIGURES
    several = board_of(PLAIN, NAIVE, AGAIN, SIGNED, CLIPPED, ROUNDED)
    assert select_key_entries(arrange_matrix(several)) == [SIGNED, CLIPPED, ROUNDED, AGAIN]


def test_a_board_without_a_question_asks_one() -> None:
    board = board_of(PLAIN)
    assert f"<h1>{board.question}</h1>" in page(Report(board), None, {}, [])
    assert QUESTION in page(Report(board.model_copy(update={"question": ""})), None, {}, [])


def test_minus_signs_are_true_and_names_and_dates_keep_their_hyphens() -> None:
    assert numbers.with_minus("-3.2 (-4.1 to -2.3)") == "−3.2 (−4.1 to −2.3)"
    for text in ("2026-11-20", "mjp-0.27", "noise=1e-05", "Wilcoxon-1", "--workers 2"):
        assert numbers.with_minus(text) == text


def test_links_to_cells_outlive_other_results() -> None:
    assert anchor(PLAIN.id) == anchor(PLAIN.model_copy(update={"verdict": "incomplete"}).id) != anchor(NAIVE.id)
    assert re.fullmatch(r"cell-[0-9a-f]{12}", anchor(nasty_entry().id))


def test_only_our_style_and_script_are_allowed() -> None:
    text = page(Report(board_of(PLAIN)), None, {}, [])
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; ")
    assert "unsafe" not in policy[1]
    for kind in ("style", "script"):
        (content,) = re.findall(rf"<{kind}>(.*?)</{kind}>", text, flags=re.S)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy[1]
    assert not re.search(r'\son\w+="|\sstyle="', text), "attributes that the policy would forbid"


def test_facts_of_all_entries_are_said_once() -> None:
    board = sample_board(models=["deit_small"])
    by_id, shared = list_facts(board)
    assert ("Campaign", "sample") in shared
    assert ("SHA-256 of the configuration", "c" * 64) in shared
    assert not any(fact in shared for own in by_id.values() for fact in own)
    entry = board.entries[0]
    assert ("Entry", entry.id) in by_id[entry.id]
    assert list_facts(board_of(PLAIN))[1] == [], "of one entry, all facts are its own"


def test_it_is_said_who_is_cited_for_what() -> None:
    board = sample_board(models=["deit_small"])
    found = read_citation(board)
    assert (found.version, found.commit, found.date, found.licence) == (
        "0.1.0",
        "0123456789",
        "2026-11-20",
        "Apache-2.0",
    )
    assert found.bibtex in README.read_text(encoding="utf-8")
    foreign = board.entries[0].provenance.model_copy(update={"environments": ({"versions": "old"},), "last": None})
    bare = board_of(PLAIN.model_copy(update={"provenance": foreign}))
    assert read_citation(bare).commit == read_citation(bare).date == ""


def test_thumbnails_fit_a_budget_and_show_the_picture(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    paths = []
    for place in range(40):
        paths.append(tmp_path / f"{place}.png")
        coarse = noise.integers(0, 256, (7, 14, 3), dtype=np.uint8)
        Image.fromarray(coarse.repeat(32, 0).repeat(32, 1)).save(paths[-1])
    small = tmp_path / "small.png"
    Image.new("RGB", (8, 8), "red").save(small)
    made = make_thumbnails([*paths, small], "picture")
    contents = [base64.b64decode(one.content) for one in made.values()]
    assert sum(map(len, contents)) <= BUDGET
    with Image.open(io.BytesIO(contents[0])) as image, Image.open(paths[0]) as whole:
        assert max(image.size) in SIDES
        assert image.width == 2 * image.height
        expected = np.asarray(whole.resize(image.size), dtype=float)
        assert np.abs(np.asarray(image, dtype=float) - expected).mean() < 16
    with Image.open(io.BytesIO(contents[-1])) as image:
        assert image.size == (8, 8), "nothing is enlarged"

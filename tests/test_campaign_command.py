"""`fedmjp campaign` and `fedmjp leaderboard` as a user meets them."""

import json
import shutil
import sqlite3
from pathlib import Path

import pandas as pd
import pytest

from fedmjp.benchmarks.leaderboard.entries import Board
from fedmjp.cli import main
from tests import databases
from tests.databases import PASSWORD

server, postgresql = databases.server, databases.postgresql

ROOT = Path(__file__).parents[1]
FILE = """\
name: tiny
title: A tiny campaign
data: {source: bundled, pictures: 6}
image_size: 64
patch_size: 8
metrics: [mse, psnr]
shared: {settings: [a, c]}
grids:
  - models: [deit_tiny]
    defences: [none, mjp]
    attacks: [patch_embedding, grey]
  - models: [deit_tiny_without_positions]
    defences: [none]
    attacks: [patch_embedding]
"""
TRIALS = 48
BAD_INPUT = 2


def run(*arguments: str | Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["fedmjp", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
    return int(end.value.code or 0)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("campaign") / "tiny.yaml"
    path.write_text(FILE)
    return path


@pytest.fixture(scope="module")
def finished(file: Path) -> Path:
    """A campaign that ran: tests read it, those that damage it copy it."""
    folder = file.parent / "results"
    assert run("campaign", "run", file, "--output", folder, "--device", "cpu") == 0
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "results"))


def test_a_run_writes_every_format_and_a_row_for_every_cell(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert names >= {
        "leaderboard.html", "leaderboard.md", "leaderboard.csv", "leaderboard.json", "leaderboard.tex",
        "manifest.json", "plan.json", "plan.csv", "trials.sqlite", "pictures", "plots",
    }  # fmt: skip
    board = Board.read((finished / "leaderboard.json").read_text())
    verdicts = {
        (entry.model, entry.defence, entry.attack, str(entry.setting)): entry.verdict for entry in board.entries
    }
    assert len(verdicts) == 10
    assert verdicts["deit_tiny", "none", "patch_embedding", "a"] == "leaks"
    assert verdicts["deit_tiny_without_positions", "none", "patch_embedding", "a"] == "refused"
    assert verdicts["deit_tiny", "mjp", "grey", "c"] == "floor"
    mjp = {(s.defence, str(s.setting)): s.verdict for s in board.standings if s.model == "deit_tiny"}
    assert mjp["mjp", "c"] in ("reduced", "inconclusive"), "no attack that knows MJP was run"


def test_results_show_neither_folders_nor_passwords(file: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDMJP_DATABASE", "")
        database = f"--database=sqlite:///{tmp_path}/secret.sqlite"
        words = ("data.pictures=2", "data.source=bundled", "--output", tmp_path / "r", "--device", "cpu", database)
        assert run("campaign", "run", file, *words) == 0
    for path in (tmp_path / "r").rglob("*.*"):
        if path.suffix in (".json", ".csv", ".html", ".md", ".tex"):
            assert not any(word in path.read_text() for word in ("secret", str(tmp_path), str(file.parent))), path
    command = json.loads((tmp_path / "r" / "manifest.json").read_text())["command"]
    assert command == "fedmjp campaign run tiny.yaml data.pictures=2 data.source=bundled --device cpu"


def test_three_pictures_of_each_cell_are_kept(finished: Path) -> None:
    kept = {
        folder.name: len(list(folder.glob("*.png"))) for folder in (finished / "pictures").iterdir() if folder.is_dir()
    }
    assert kept
    assert set(kept.values()) <= {1, 2, 3}


def test_a_second_run_only_renders_and_says_the_same(
    finished: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = (finished / "leaderboard.csv").read_bytes()
    assert run("campaign", "run", file, "--output", finished, "--device", "cpu") == 0
    assert f"{TRIALS} of {TRIALS} trials are finished" in capsys.readouterr().out
    assert (finished / "leaderboard.csv").read_bytes() == table


@pytest.mark.slow
def test_two_workers_write_to_one_postgresql_what_one_writes_to_a_file(
    finished: Path, file: Path, tmp_path: Path, postgresql: str, capsys: pytest.CaptureFixture[str]
) -> None:
    database = ("--database", postgresql)
    arguments = ("campaign", "run", file, "--output", tmp_path / "r", "--device", "cpu", "--workers", "2")
    assert run(*arguments, *database) == 0
    one, two = (pd.read_csv(folder / "leaderboard.csv") for folder in (finished, tmp_path / "r"))
    columns = [column for column in one.columns if column.startswith(("psnr", "mse"))]
    pd.testing.assert_frame_equal(one[columns], two[columns], rtol=1e-6)
    kept, expected = (sorted(path.name for path in folder.rglob("*.png")) for folder in (tmp_path / "r", finished))
    assert kept == expected
    assert not (tmp_path / "r" / "trials.sqlite").exists()
    assert run("campaign", "status", tmp_path / "r", *database) == 0
    assert f"{TRIALS} of {TRIALS} trials finished" in capsys.readouterr().out
    assert run("campaign", "verify", tmp_path / "r", *database) == 0
    assert run("campaign", "status", tmp_path / "r") == BAD_INPUT
    assert "holds neither trials.sqlite nor trials.parquet" in capsys.readouterr().err
    assert not any(PASSWORD in path.read_text() for path in (tmp_path / "r").glob("*.json"))


@pytest.mark.slow
def test_the_smoke_campaign_runs_whole(tmp_path: Path) -> None:
    smoke = ROOT / "benchmarks" / "campaigns" / "smoke.yaml"
    assert run("campaign", "run", smoke, "data.pictures=2", "--output", tmp_path / "r", "--device", "cpu") == 0
    board = Board.read((tmp_path / "r" / "leaderboard.json").read_text())
    assert len({entry.threat.undefended for entry in board.entries}) == 2
    assert {entry.role for entry in board.entries} == {"attack", "floor", "bound"}
    assert not any(entry.failures or entry.missing for entry in board.entries)
    assert all((entry.n == 2) != (entry.verdict == "refused") for entry in board.entries)


def test_a_dry_run_counts_says_what_cannot_run_and_writes_nothing(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("campaign", "run", file, "--dry", "--output", tmp_path / "r", "--device", "cpu") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"10 cells (2 refused), {TRIALS} trials, 6 pictures from bundled" in printed
    assert "refused, the model has no position embedding" in printed
    assert "untrained" in printed
    assert not (tmp_path / "r").exists()


def test_a_budget_that_is_spent_leaves_the_rest_for_the_next_run(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("campaign", "run", file, "budget.hours=1e-9", "--output", tmp_path / "r", "--device", "cpu")
    printed = " ".join(capsys.readouterr().out.split())
    assert f"is spent; {TRIALS} trials wait for the next run" in printed
    assert run("campaign", "status", tmp_path / "r") == 0
    assert f"0 of {TRIALS} trials finished" in capsys.readouterr().out
    verdicts = set(pd.read_csv(tmp_path / "r" / "leaderboard.csv")["verdict"])
    assert verdicts == {"incomplete", "refused", "floor"} or verdicts == {"incomplete", "refused"}


def test_verification_misses_pictures_that_should_be_there(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(copied / "pictures")
    assert run("campaign", "verify", copied) == 1
    assert "is missing, which keep: extremes promises" in " ".join(capsys.readouterr().out.split())


def test_a_folder_belongs_to_one_campaign(copied: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("campaign", "run", file, "name=other", "--output", copied, "--device", "cpu") == BAD_INPUT
    assert "holds the campaign 'tiny', this one is 'other'" in " ".join(capsys.readouterr().err.split())


def test_status_tells_what_is_done(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("campaign", "status", finished) == 0
    printed = capsys.readouterr().out
    assert f"{TRIALS} of {TRIALS} trials finished (100 %)" in printed
    assert "Nothing is left to do." in printed
    assert "refused" in printed


def test_verification_of_an_untouched_folder_finds_nothing(
    finished: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("campaign", "verify", finished, "--rerun", "4", "--file", file, "--device", "cpu") == 0
    printed = capsys.readouterr().out
    assert "4 trials run again" in printed
    assert "Nothing contradicts the results." in printed


@pytest.mark.parametrize("damage", ["score", "picture", "lost", "row", "table", "manifest"])
def test_verification_finds_what_was_tampered_with(
    copied: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    match damage:
        case "score":
            with sqlite3.connect(copied / "trials.sqlite") as database:
                database.execute("""UPDATE trials SET scores = '{"mse": 0.2, "psnr": 7.0}'""")
        case "picture":
            for folder in (copied / "pictures").iterdir():
                for path in folder.glob("*.png") if folder.is_dir() else ():
                    path.write_bytes(
                        (copied / "pictures" / next((copied / "pictures").glob("*.png")).name).read_bytes()
                    )
        case "lost":
            for path in (copied / "pictures").glob("*.png"):
                path.unlink()
        case "row":
            with sqlite3.connect(copied / "trials.sqlite") as database:
                database.execute("DELETE FROM trials WHERE key IN (SELECT key FROM trials LIMIT 1)")
        case "table":
            table = copied / "leaderboard.json"
            table.write_text(table.read_text().replace('"verdict": "leaks"', '"verdict": "withstood"'))
        case "manifest":
            manifest = copied / "manifest.json"
            manifest.write_text(manifest.read_text().replace('"failed": 0', '"failed": 1'))
    assert run("campaign", "verify", copied) == 1
    assert "Wrong: " in capsys.readouterr().out


def test_the_leaderboard_is_made_anew_in_the_formats_asked_for(copied: Path, tmp_path: Path) -> None:
    assert run("leaderboard", copied, "--format", "csv", "--format", "latex", "--output", tmp_path / "new") == 0
    written = {path.name for path in (tmp_path / "new").iterdir()}
    assert written == {"leaderboard.csv", "leaderboard.tex", "manifest.json"}
    assert (tmp_path / "new" / "leaderboard.csv").read_bytes() == (copied / "leaderboard.csv").read_bytes()
    assert run("leaderboard", "--format", "md", "--output", tmp_path / "md", copied) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("campaign", "run", "none.yaml"), "none.yaml cannot be read: No such file"),
        (("campaign", "run", "{file}", "data.source=nowhere"), "there is no folder"),
        (("campaign", "run", "{file}", "data.ids=[a]"), "there is no picture 'a'"),
        (("campaign", "run", "{file}", "data.pictures=500"), "500 pictures were asked for, but only 8"),
        (("campaign", "run", "{file}", "--database", "mysql://x"), "is not a kind of database"),
        (("campaign", "run", "{file}", "--weights", "deit_tiny"), "--weights 'deit_tiny' is not of the form KEY=VALUE"),
        (("campaign", "run", "{file}", "--weights", "deit_tiny=none.pth"), "none.pth"),
        (("campaign", "status", "{folder}"), "holds neither trials.sqlite nor trials.parquet"),
        (("campaign", "verify", "{folder}"), "holds neither trials.sqlite nor trials.parquet"),
        (("campaign", "verify", "{folder}", "--rerun", "2"), "--rerun needs the pictures"),
        (("leaderboard", "{folder}"), "holds neither trials.sqlite nor trials.parquet"),
        (("leaderboard", "{folder}", "--format", "pdf"), "Unknown format 'pdf'"),
        (("leaderboard", "add", "none.json", "--to", "{folder}"), "holds no results to add an entry to"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    given = [argument.format(file=file, folder=folder) for argument in arguments]
    output = ("--output", tmp_path / "out") if given[:2] == ["campaign", "run"] else ()
    assert run(*given, *output) == BAD_INPUT
    error = capsys.readouterr().err
    assert message in " ".join(error.split())
    assert error.count("\n") == 1

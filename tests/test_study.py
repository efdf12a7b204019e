"""A campaign as it is published: one file of trials, from which all else can be made and checked."""

import base64
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from fedmjp.benchmarks.folder.output import OutputFolder
from fedmjp.benchmarks.folder.study import (
    DIGITS,
    ENVIRONMENTS,
    PLAN,
    TRIALS,
    keep_rows,
    open_results,
    read_study,
    write_study,
)
from fedmjp.benchmarks.folder.trials import StudyTrials
from fedmjp.cli import main
from fedmjp.errors import OutputError

FILE = """\
name: tiny
data: {source: bundled, pictures: 2}
image_size: 64
patch_size: 8
metrics: [mse, psnr]
grids:
  - models: [deit_tiny, deit_tiny_without_positions]
    defences: [none, {name: gaussian, noise: 0.1}]
    settings: [a]
    attacks: [patch_embedding, grey]
"""
BAD_INPUT = 2
SMALL = 4000  # bytes: less than a plan, more than it takes packed


def run(*arguments: str | Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["fedmjp", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
    return int(end.value.code or 0)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("campaign")
    (folder / "tiny.yaml").write_text(FILE)
    assert run("campaign", "run", folder / "tiny.yaml", "--output", folder / "run", "--device", "cpu") == 0
    return folder / "run"


@pytest.fixture(scope="module")
def published(finished: Path) -> Path:
    study = finished.parent / "study"
    assert run("campaign", "publish", finished, study) == 0
    return study


@pytest.fixture
def copied(published: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(published, tmp_path / "study"))


def board_of(folder: Path, output: Path) -> dict[str, Any]:
    assert run("leaderboard", folder, "--no-pictures", "--format", "json", "--output", output) == 0
    board: dict[str, Any] = json.loads((output / "leaderboard.json").read_text())
    return board


def change(study: Path, column: str, value: object) -> None:
    """Put another value into the first finished trial, and leave all else of the file as it is."""
    table = parquet.read_table(study / TRIALS)
    rows = table.to_pandas()
    rows.loc[rows["status"] == "ok", column] = [value, *rows.loc[rows["status"] == "ok", column].tolist()[1:]]
    changed = pa.Table.from_pandas(rows, preserve_index=False).replace_schema_metadata(table.schema.metadata)
    parquet.write_table(changed, study / TRIALS, compression="zstd")


def test_a_study_is_two_files_and_verifies(published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {path.name for path in published.iterdir()} == {TRIALS, "manifest.json"}
    assert run("campaign", "verify", published) == 0
    printed = capsys.readouterr().out
    assert "12 rows: 12 ok, 0 failed" in printed
    assert "Nothing contradicts the results." in printed


def test_keys_are_cut_but_where_that_joined_trials(finished: Path, copied: Path) -> None:
    ledger, store = open_results(OutputFolder(finished))
    whole = ledger.trials["key"].tolist()
    assert sorted(read_study(copied)[0].trials["key"]) == sorted(key[:DIGITS] for key in whole)
    alike = {key: f"{'0' * DIGITS}{place}" for place, key in enumerate(whole)}
    same = StudyTrials(store.frame().replace({"key": alike}), store.environments())
    write_study(copied / TRIALS, replace(ledger, table=ledger.trials.replace({"key": alike})), same)
    assert read_study(copied)[0].trials["key"].tolist() == list(alike.values())


def test_its_leaderboard_is_that_of_the_run_but_for_pictures(finished: Path, published: Path, tmp_path: Path) -> None:
    ours, theirs = board_of(finished, tmp_path / "run"), board_of(published, tmp_path / "study")
    of_study = {"keep": "none", "trials_sha256": theirs["about"]["trials_sha256"]}
    assert theirs["about"].pop("rendered_at")
    assert ours["about"].pop("rendered_at")
    assert theirs.pop("about") == ours.pop("about") | of_study
    assert theirs == ours
    assert len(ours["entries"]) == 8
    for name, folder in (("run", finished), ("study", published)):
        assert run("leaderboard", folder, "--no-pictures", "--format", "csv", "--output", tmp_path / name) == 0
    assert (tmp_path / "run" / "leaderboard.csv").read_bytes() == (tmp_path / "study" / "leaderboard.csv").read_bytes()


def test_a_study_that_was_rendered_verifies_with_its_table(copied: Path) -> None:
    assert run("leaderboard", copied, "--format", "json") == 0
    assert run("campaign", "verify", copied) == 0
    table = copied / "leaderboard.json"
    table.write_text(table.read_text().replace('"verdict": "leaks"', '"verdict": "withstood"'))
    assert run("campaign", "verify", copied) == 1


@pytest.mark.parametrize(
    ("column", "value"), [("psnr", 9.0), ("picture_sha256", "0" * 64), ("status", "failed"), ("attack_seconds", 1e6)]
)
def test_a_changed_row_is_noticed(copied: Path, column: str, value: object, capsys: pytest.CaptureFixture[str]) -> None:
    change(copied, column, value)
    assert run("campaign", "verify", copied) == 1
    assert "trials_sha256" in " ".join(capsys.readouterr().out.split())


def test_a_row_that_stands_twice_is_told(copied: Path) -> None:
    table = parquet.read_table(copied / TRIALS)
    parquet.write_table(pa.concat_tables([table, table.slice(0, 1)]), copied / TRIALS)
    with pytest.raises(OutputError, match=r"is damaged.*a key stands twice"):
        read_study(copied)


def test_a_lost_row_is_noticed(copied: Path) -> None:
    table = parquet.read_table(copied / TRIALS)
    parquet.write_table(table.slice(1), copied / TRIALS)
    assert run("campaign", "verify", copied) == 1


def test_a_changed_byte_is_noticed(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = bytearray((copied / TRIALS).read_bytes())
    content[len(content) // 2] ^= 1
    (copied / TRIALS).write_bytes(content)
    assert run("campaign", "verify", copied) in (1, BAD_INPUT), "the trials are others, or cannot be read"
    printed = capsys.readouterr()
    assert "Traceback" not in printed.out + printed.err


@pytest.mark.parametrize("kept", [0, 7, -4])
def test_a_plan_that_is_cut_is_damage(copied: Path, kept: int, capsys: pytest.CaptureFixture[str]) -> None:
    table = parquet.read_table(copied / TRIALS)
    plan = base64.b64decode(table.schema.metadata[PLAN])
    cut = {**table.schema.metadata, PLAN: base64.b64encode(plan[:kept])}
    parquet.write_table(table.replace_schema_metadata(cut), copied / TRIALS)
    assert run("campaign", "verify", copied) == BAD_INPUT
    assert "is damaged" in capsys.readouterr().err


def test_a_plan_that_unpacks_to_more_than_is_read_is_refused(
    published: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(parquet.read_schema(published / TRIALS).metadata[PLAN]) < SMALL
    monkeypatch.setattr("fedmjp.benchmarks.folder.study.LARGEST", SMALL)
    assert run("campaign", "verify", published) == BAD_INPUT
    assert f"more than {SMALL:,} bytes" in " ".join(capsys.readouterr().err.split())


def test_a_study_holds_its_plan_once(published: Path) -> None:
    content = (published / TRIALS).read_bytes()
    assert content.count(parquet.read_schema(published / TRIALS).metadata[PLAN]) == 1
    assert parquet.read_metadata(published / TRIALS).metadata.keys() == {b"pandas", PLAN, ENVIRONMENTS}


def test_status_reads_a_study(published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("campaign", "status", published) == 0
    printed = capsys.readouterr().out
    assert "12 of 12 trials finished (100 %)" in printed
    assert "refused" in printed


def test_rows_of_a_study_that_is_no_campaign_verify_by_their_digest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = tmp_path / "study"
    keep_rows(study, pd.DataFrame({"picture": ["a", "b"], "psnr": [20.0, 30.0]}), {"command": "python -m study"})
    manifest = json.loads((study / "manifest.json").read_text())
    assert manifest["command"] == "python -m study"
    assert run("campaign", "verify", study) == 0
    assert "rows against the manifest" in capsys.readouterr().out
    for command in (("campaign", "status"), ("leaderboard",)):
        assert run(*command, study) == BAD_INPUT
        assert "holds a study that is no campaign" in capsys.readouterr().err
    keep_rows(study, pd.DataFrame({"picture": ["a", "b"], "psnr": [20.0, 31.0]}), {})
    (study / "manifest.json").write_text(json.dumps(manifest))
    assert run("campaign", "verify", study) == 1
    assert "the manifest says" in capsys.readouterr().out


def test_a_folder_of_neither_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (("campaign", "verify"), ("campaign", "status"), ("leaderboard",)):
        assert run(*command, tmp_path) == BAD_INPUT
        assert "holds neither trials.sqlite nor trials.parquet" in capsys.readouterr().err

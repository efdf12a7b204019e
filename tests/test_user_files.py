"""Files of the user in and around results: nothing but what a run wrote is deleted, nothing leads outside."""

import json
import shutil
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from fedmjp.benchmarks.folder.pictures import LEDGER, PictureFolder
from fedmjp.benchmarks.folder.store import Store
from fedmjp.benchmarks.folder.study import TRIALS
from fedmjp.benchmarks.plan.trial_plan import TrialPlan
from fedmjp.claims import claim_folder
from fedmjp.cli import main
from fedmjp.cli.progress import TerminalProgress, TrainingProgress
from fedmjp.errors import OutputError
from fedmjp.files import remove_files
from fedmjp.training.run_folder import TrainingFolder

BAD_INPUT, FAILED = 2, 1
CAMPAIGN = """\
name: tiny
data: {source: bundled, pictures: 4}
image_size: 64
patch_size: 8
metrics: [mse, psnr]
grids: [{models: [deit_tiny], defences: [none], settings: [a], attacks: [patch_embedding, grey]}]
"""
ROWS = 8
GONE = "was removed, moved or replaced"
NOWHERE = "is no name of a file in|is a link"


def run(*arguments: str | Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["fedmjp", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
    return int(end.value.code or 0)


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("file") / "tiny.yaml"
    path.write_text(CAMPAIGN)
    return path


@pytest.fixture(scope="module")
def finished(campaign: Path) -> Path:
    assert run("campaign", "run", campaign, "--output", campaign.parent / "run", "--device", "cpu") == 0
    return campaign.parent / "run"


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "results"))


@pytest.fixture
def album(tmp_path: Path) -> Path:
    """Somebody's own pictures."""
    for name in ("cat.png", "holidays/beach.png", f"holidays/.{'0' * 32}.partial"):
        (tmp_path / "album" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "album" / name).write_bytes(b"mine")
    return tmp_path / "album"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("fresh", [(), ("--fresh",)], ids=["again", "fresh"])
@pytest.mark.parametrize("place", ["pictures", "pictures/deeper", "manifest.json"])
def test_a_link_in_a_folder_of_results_is_refused_and_what_it_leads_to_stays(
    campaign: Path, copied: Path, album: Path, place: str, fresh: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    link, before = copied / place, contents(album)
    if link.is_dir():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.symlink_to(album if link.suffix == "" else album / "cat.png")
    code = run("campaign", "run", campaign, "--output", copied, "--device", "cpu", *fresh)
    assert contents(album) == before
    assert code == BAD_INPUT
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"{link} is a link" in line
    assert "name another --output" in line


def test_only_what_the_ledger_names_is_deleted(campaign: Path, copied: Path) -> None:
    strangers = {"pictures/cat.png", "pictures/mine/cat.png", "trials.sqlite.backup", "trials.sqlite-old", "notes.txt"}
    for name in strangers:
        (copied / name).parent.mkdir(parents=True, exist_ok=True)
        (copied / name).write_bytes(b"mine")
    arguments = ("campaign", "run", campaign, "--output", copied, "--device", "cpu")
    assert run(*arguments) == 0
    assert strangers <= contents(copied).keys()
    assert run(*arguments, "--fresh", "keep=none") == 0
    assert strangers <= contents(copied).keys()
    assert {path.as_posix() for path in copied.rglob("*.png")} == {
        (copied / name).as_posix() for name in strangers if name.endswith(".png")
    }
    assert {(copied / name).read_bytes() for name in strangers} == {b"mine"}


def test_fresh_training_deletes_what_training_wrote_alone(tmp_path: Path, album: Path) -> None:
    folder = TrainingFolder(tmp_path / "train")
    ours = [
        "weights.safetensors", "tensorboard/events.out.tfevents.1", "evaluation/table.md",
        "records/round-00001/uploads/a/round-00001-node-0.safetensors", "records/round-00001/manifest.json",
    ]  # fmt: skip
    strangers = ["tensorboard/notes.txt", "evaluation/table.md.backup", "records/round-00001/uploads/cat.png"]
    for name in (*ours, *strangers):
        (folder.root / name).parent.mkdir(parents=True, exist_ok=True)
        (folder.root / name).touch()
    (folder.root / "records" / "link").symlink_to(album)
    before = contents(album)
    folder.clear()
    assert contents(folder.root).keys() == set(strangers)
    assert contents(album) == before
    remove_files(folder.root / "records" / "link", ".*")
    assert contents(album) == before


NOT_NAMES = ("../out.png", "/etc/passwd", "a/../../out.png", "", ".", "a//b.png", "a/", "out\0.png")


@pytest.mark.parametrize("name", [*NOT_NAMES, "linked/cat.png", "linked.png"])
def test_a_name_out_of_a_changed_file_leads_nowhere(tmp_path: Path, album: Path, name: str) -> None:
    pictures, before = PictureFolder(tmp_path / "results"), contents(album)
    pictures.folder.mkdir(parents=True)
    (pictures.folder / "linked").symlink_to(album)
    (pictures.folder / "linked.png").symlink_to(album / "cat.png")
    for use in (pictures.path, lambda name: pictures.save({name: b"theirs"})):
        with pytest.raises(OutputError, match=NOWHERE):
            use(name)
    pictures.ledger.write_text(f"{json.dumps(name)}\n[3]\n{{\n")
    with pytest.raises(OutputError, match=NOWHERE):
        pictures.clear()
    assert contents(album) == before
    assert contents(tmp_path).keys() == {f"album/{path}" for path in before} | {
        f"results/{LEDGER}", "results/pictures/linked.png"
    }  # fmt: skip


def test_a_changed_plan_shows_no_picture_of_elsewhere(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The names of pictures to read come from a stranger's plan."""
    plan = TrialPlan.load(copied)
    plan.trials["stem"] = "../../secret"
    plan.save(copied)
    for command in (("leaderboard", copied, "--output", tmp_path / "board"), ("campaign", "verify", copied)):
        assert run(*command) == BAD_INPUT
        assert "is no name of a file in" in capsys.readouterr().err


def foreign(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("create table trials (trial_id integer, number integer, state text)")
        connection.execute("insert into trials values (1, 2, 'kept')")
        connection.commit()


@pytest.mark.parametrize("end", ["", "-wal", "-shm", "-journal"])
def test_a_database_that_is_a_link_is_refused_and_stays(tmp_path: Path, end: str) -> None:
    foreign(tmp_path / "theirs.sqlite")
    before = (tmp_path / "theirs.sqlite").read_bytes()
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / f"trials.sqlite{end}").symlink_to(tmp_path / "theirs.sqlite")
    with pytest.raises(OutputError, match="is a link"):
        Store.at(tmp_path / "results" / "trials.sqlite")
    if not end:
        assert run("campaign", "status", tmp_path / "results") == BAD_INPUT
    assert (tmp_path / "theirs.sqlite").read_bytes() == before


@pytest.mark.parametrize("fresh", [(), ("--fresh",)], ids=["again", "fresh"])
def test_a_database_of_another_program_is_refused_and_stays(
    campaign: Path, tmp_path: Path, fresh: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    claim_folder(tmp_path / "results")
    database = tmp_path / "results" / "trials.sqlite"
    foreign(database)
    before = database.read_bytes()
    assert run("campaign", "run", campaign, "--output", tmp_path / "results", "--device", "cpu", *fresh) == BAD_INPUT
    assert "trials.sqlite is the database of another program (it holds 'trials')" in capsys.readouterr().err
    assert database.read_bytes() == before
    assert {path.name for path in database.parent.iterdir()} == {".fedmjp", "trials.sqlite"}


def test_a_publication_replaces_no_other_results(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = tmp_path / "study"
    assert run("campaign", "publish", finished, study) == 0
    assert run("campaign", "publish", finished, study) == 0, "its own publication again"
    published = contents(study)
    other = tmp_path / "other.yaml"
    other.write_text(CAMPAIGN.replace("name: tiny", "name: other"))
    assert run("campaign", "run", other, "--output", tmp_path / "other", "--device", "cpu") == 0
    capsys.readouterr()
    rows = Path(__file__).parents[1] / "results" / "order"
    for place, reason in (
        (study, "holds the study 'tiny', this one is 'other'; name another folder"),
        (Path(shutil.copytree(rows, tmp_path / "rows")), "holds the rows of a study that is no campaign"),
        (Path(shutil.copytree(finished, tmp_path / "run")), "holds other results than a published study"),
    ):
        before = contents(place)
        assert run("campaign", "publish", tmp_path / "other", place) == BAD_INPUT
        assert reason in capsys.readouterr().err
        assert contents(place) == before
    assert published.keys() == {TRIALS, "manifest.json"}


Removal = Callable[[Path], object]
REMOVALS: dict[str, Removal] = {
    "removed": shutil.rmtree,
    "emptied": lambda folder: [path.unlink() for path in folder.glob("[!.]*") if path.is_file()],
    "moved": lambda folder: folder.rename(folder.with_name("elsewhere")),
}


def removing(folder: Path, remove: Removal, monkeypatch: pytest.MonkeyPatch, progress: type, method: str) -> None:
    """Remove a folder when a run first tells its progress."""
    original, done = getattr(progress, method), list[bool]()

    def told(self: object, *arguments: object) -> object:
        if not done:
            done.append(True)
            remove(folder)
        return original(self, *arguments)

    monkeypatch.setattr(progress, method, told)


@pytest.mark.parametrize("remove", REMOVALS)
def test_trials_outlive_the_folder_of_a_campaign(
    campaign: Path, tmp_path: Path, remove: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "results"
    removing(folder, REMOVALS[remove], monkeypatch, TerminalProgress, "trials")
    arguments = ("campaign", "run", campaign, "--output", folder, "--device", "cpu")
    assert run(*arguments) == FAILED
    printed = capsys.readouterr()
    assert "Written to" not in printed.out
    (line,) = printed.err.strip().splitlines()
    assert GONE in line
    assert "trials were written to" in line
    with closing(sqlite3.connect(folder / "trials.sqlite")) as connection:
        ((count,),) = connection.execute("select count(*) from trials where status = 'ok'")
    assert count >= ROWS // 2
    assert run(*arguments) == 0
    assert f"{count} of {ROWS} trials are finished" in capsys.readouterr().out


@pytest.mark.parametrize("remove", REMOVALS)
def test_rows_outlive_the_folder_of_an_attack(
    tmp_path: Path, remove: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "results"
    removing(folder, REMOVALS[remove], monkeypatch, TerminalProgress, "trials")
    sizes = ("--model", "deit_tiny", "--image-size", "64", "--patch-size", "8", "--limit", "2")
    arguments = ("attack", "--attack", "patch_embedding", *sizes, "--output", folder, "--device", "cpu")
    assert run(*arguments) == FAILED
    printed = capsys.readouterr()
    assert "Written to" not in printed.out
    (line,) = printed.err.strip().splitlines()
    assert f"{GONE} while the attack wrote to it; its 4 rows were written again" in line
    assert run(*arguments) == 0
    assert "4 of 4 trials are finished" in capsys.readouterr().out


def test_weights_outlive_the_folder_of_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, settings = tmp_path / "results", ("recipe.epochs=2", "recipe.batch_size=4", "model.image_size=64")
    removing(folder, shutil.rmtree, monkeypatch, TrainingProgress, "_step")
    arguments = (
        "train",
        "model.name=deit_tiny",
        "model.patch_size=8",
        *settings,
        "--output",
        folder,
        "--device",
        "cpu",
    )
    assert run(*arguments) == FAILED
    printed = capsys.readouterr()
    assert "Written to" not in printed.out
    (line,) = printed.err.strip().splitlines()
    assert f"{GONE} during the training; the weights after epoch 1 were written again" in line
    assert run(*arguments) == 0
    assert len((folder / "history.csv").read_text().splitlines()) == 2, "the second epoch alone"

"""Files of the user in and around results: nothing but what a run wrote is deleted, nothing leads outside."""

import ast
import json
import resource
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from fedmjp import provenance
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
from fedmjp.training.state import save_state, save_weights

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


def test_a_leaderboard_replaces_no_other_results_and_follows_no_link(
    finished: Path, copied: Path, album: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(copied)
    assert run("leaderboard", finished, "--output", copied) == BAD_INPUT
    assert "holds other results than" in capsys.readouterr().err
    assert contents(copied) == before
    (tmp_path / "board").mkdir()
    (tmp_path / "board" / "plots").symlink_to(album)
    before = contents(album)
    assert run("leaderboard", finished, "--output", tmp_path / "board") == BAD_INPUT
    assert "plots is a link" in capsys.readouterr().err
    assert contents(album) == before


Removal = Callable[[Path], object]


def empty(folder: Path) -> None:
    """What `rm DIR/*` does."""
    for path in folder.glob("[!.]*"):
        path.unlink() if path.is_file() else shutil.rmtree(path)


REMOVALS: dict[str, Removal] = {
    "removed": shutil.rmtree,
    "emptied": empty,
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


@pytest.mark.parametrize("change", ["torch", "code"])
def test_a_run_says_that_finished_trials_no_longer_count(
    campaign: Path, copied: Path, change: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = provenance.versions()
    if change == "torch":
        monkeypatch.setattr(provenance, "versions", lambda: {**versions, "torch": "99.0"})
    else:
        monkeypatch.setattr(provenance, "code_digest", lambda: "other")
    capsys.readouterr()
    assert run("campaign", "run", campaign, "--output", copied, "--device", "cpu") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"0 of {ROWS} trials are finished" in printed
    reason = f"with torch {versions['torch']}, here 99.0" if change == "torch" else "with the same packages: the code"
    assert f"{ROWS} finished trials no longer count and will be run anew ({ROWS} {reason}" in printed
    assert run("campaign", "run", campaign, "--output", copied, "--device", "cpu") == 0
    assert "no longer count" not in capsys.readouterr().out, "only before they are run anew"


@pytest.mark.parametrize("save", [save_weights, save_state])
def test_a_checkpoint_on_a_full_disk_is_told_in_one_line_and_the_last_one_stays(
    tmp_path: Path, save: Callable[[Path, dict[str, torch.Tensor]], None]
) -> None:
    """torch and safetensors have errors of their own for it."""
    path = tmp_path / "checkpoint"
    save(path, {"weights": torch.zeros(10)})
    before, (limit, most) = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, most))
    try:
        with pytest.raises(OutputError, match=r"checkpoint cannot be written .* make room and run the same") as caught:
            save(path, {"weights": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    assert "\n" not in str(caught.value)
    assert contents(tmp_path) == {"checkpoint": before}


ROOT = Path(__file__).parents[1]
PACKAGES = ("fedmjp", "benchmarks", "clients", "server", "attacks")
DELETING = {"unlink", "rmtree", "remove", "removedirs", "rmdir", "rename", "renames", "replace", "move", "truncate"}
OURS = "a name that this command writes, in a folder that it claimed"
TEMPORARY = "a folder that mkdtemp made for this process"
# Every place that deletes or replaces files, with the reason why it cannot be the user's.
DELETIONS = {
    "fedmjp/files.py": {
        "replacing": "replaces the path that its caller wrote before, and its own partial file",
        "remove_files": "regular files with names that runs write; folders that are empty",
    },
    "fedmjp/training/history.py": {"keep_until": OURS},
    "fedmjp/training/run_folder.py": {"clear": OURS},
    "fedmjp/cli/their_model.py": {"attack_module": OURS},
    "fedmjp/cli/evaluate.py": {"evaluate": OURS},
    "fedmjp/cli/audit.py": {"_failing_in_one_line": OURS},
    "benchmarks/folder/output.py": {"prepare": "the database, if it is ours, and files of an attack"},
    "benchmarks/folder/pictures.py": {"delete": "what the ledger names", "tidy": "the ledger itself, if it is empty"},
    "benchmarks/federation/simulation.py": {"clear": "records by their names; a folder that is empty"},
    "benchmarks/uploads/source.py": {"stale": "the marker of whole records"},
    "benchmarks/federation/guard.py": {"main": TEMPORARY, "end_abandoned": "homes of SuperLinks that a prefix marks"},
    "benchmarks/federation/superlink.py": {"close": TEMPORARY},
    "benchmarks/report/site/build.py": {
        "_read": "a folder of the new site, made a moment before",
        "_replace": "a site whose every file its list names",
    },
    "benchmarks/report/site/place.py": {"remove_site": "a site that its mark shows"},
    "benchmarks/audit/report.py": {"write_report": OURS},
    "benchmarks/audit/running.py": {"play": "records in the home of a SuperLink"},
    "benchmarks/audit/sandbox.py": {"_remove": TEMPORARY},
    "benchmarks/audit/site.py": {"answer_watched": "records that were made with mkdir, which refuses what is there"},
    "benchmarks/audit/probe/watching.py": {"_keep_model": "the model's file in the records of the audit"},
    "benchmarks/deployment/training.py": {"train_at_sites": TEMPORARY},
    "benchmarks/deployment/checking.py": {"_intrusions": TEMPORARY},
    "benchmarks/deployment/creating.py": {"own_bundle": TEMPORARY},
    "benchmarks/deployment/dealing.py": {"deal_to_sites": "from its own temporary folder to one that was empty"},
    "benchmarks/deployment/intrusions.py": {"_start_impostor": "the file that it wrote a moment before"},
    "benchmarks/private_ray.py": {"socket_folder": "an empty folder that it made a moment before"},
    "benchmarks/running/ray_driver.py": {"ray_team": TEMPORARY},
    "clients/gate/ledger.py": {"_end_of_whole_lines": "half a line of its own file, after a crash"},
}


def deletions(path: Path) -> Iterator[tuple[str, int]]:
    """Find the calls of a file that delete or replace files, with the functions around them."""

    def visit(node: ast.AST, function: str) -> Iterator[tuple[str, int]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_deletion(node, node.func):
            yield function, node.lineno
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)

    text = path.read_text()
    if any(f"{name}(" in text for name in DELETING):
        yield from visit(ast.parse(text), "")


def is_deletion(call: ast.Call, name: ast.Attribute) -> bool:
    """Tell calls of files from those of text, tables and lists, which have other arguments."""
    if name.attr not in DELETING:
        return False
    of_system = isinstance(name.value, ast.Name) and name.value.id in ("os", "shutil")
    if name.attr in ("unlink", "rmtree", "rmdir"):
        return True
    if name.attr == "truncate":
        return bool(call.args)
    return of_system or (name.attr in ("rename", "replace") and len(call.args) == 1 and not call.keywords)


def test_every_deletion_in_the_code_has_a_reason() -> None:
    """Whoever adds one says here why it cannot be a file of the user's."""
    found = {
        (path.relative_to(ROOT).as_posix(), function): line
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if "performance" not in path.parts and not path.is_symlink() and path.resolve() == path
        for function, line in deletions(path)
    }
    stated = {(file, function) for file, functions in DELETIONS.items() for function in functions}
    assert {
        f"{file}:{line} in {function}" for (file, function), line in found.items() if (file, function) not in stated
    } == set()
    assert stated <= found.keys(), "reasons of what is gone"

"""`fedmjp attack`: direct mode and recorded uploads, as a user meets them."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from fedmjp import provenance
from fedmjp.benchmarks.federation.simulation import RunFolder
from fedmjp.benchmarks.folder.pictures import load_png
from fedmjp.benchmarks.folder.scores import ScoreTable
from fedmjp.benchmarks.folder.trials import TrialResult
from fedmjp.benchmarks.report import figure
from fedmjp.cli import main
from fedmjp.data.selection import select_for
from fedmjp.models import names
from fedmjp.records import UPLOAD_FIELDS, Upload, save_tensors
from fedmjp.scenario import Scenario
from fedmjp.zoo import ZOO
from tests.boards import attack_board
from tests.conftest import small_scenario
from tests.experiments import record_directly

SMALL = ("--model", "deit_tiny", "--image-size", "64", "--patch-size", "8", "--device", "cpu")
BAD_INPUT = 2


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["fedmjp", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def attack(
    monkeypatch: pytest.MonkeyPatch, output: Path, name: str, *arguments: str, small: Sequence[str] = SMALL
) -> int:
    return run(monkeypatch, "attack", "--attack", name, *small, "--output", str(output), *arguments)


def board(output: Path) -> pd.DataFrame:
    return attack_board(output).set_index(["attack", "setting"])


def test_one_cell_and_its_floor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert attack(monkeypatch, tmp_path, "patch_embedding", "--limit", "4") == 0
    found = board(tmp_path)
    assert found.loc[("patch_embedding", "a"), "psnr_mean"] > 60
    assert found.loc[("grey", "a"), "role"] == "floor"
    assert {path.name for path in tmp_path.iterdir()} >= {
        "scores.csv", "reconstructions.jpg", "manifest.json", "pictures",
    }  # fmt: skip
    about = json.loads((tmp_path / "manifest.json").read_text())
    assert about["uploads"] == "computed in process (direct mode)"
    assert about["command"].startswith("fedmjp attack --attack patch_embedding")
    rows = pd.read_csv(tmp_path / "scores.csv")
    assert len(rows) == 8, "a row per picture and attack"
    assert (rows.query("attack == 'patch_embedding'")["psnr"] > 60).all()
    assert set(rows["status"]) == {"ok"}


def test_a_second_run_finds_its_trials_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for _ in range(2):
        assert attack(monkeypatch, tmp_path, "patch_embedding", "--limit", "2") == 0
    assert "4 of 4 trials are finished" in capsys.readouterr().out
    assert attack(monkeypatch, tmp_path, "patch_embedding", "--limit", "2", "--set", "reading=zeros") == 0
    assert "2 of 4 trials are finished" in capsys.readouterr().out, "another option makes other trials"


def test_rows_of_another_attack_stay_and_a_cut_row_is_made_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert attack(monkeypatch, tmp_path, "patch_embedding", "--limit", "2") == 0
    assert attack(monkeypatch, tmp_path, "patch_embedding", "--limit", "2", "--set", "reading=zeros") == 0
    path = tmp_path / "scores.csv"
    rows = pd.read_csv(path)
    assert len(rows) == 6
    assert len(attack_board(tmp_path)) == 3, "the board is of all that the folder holds"
    path.write_text(path.read_text()[:-90])
    capsys.readouterr()
    assert attack(monkeypatch, tmp_path, "patch_embedding", "--limit", "2", "--set", "reading=zeros") == 0
    assert "3 of 4 trials are finished" in capsys.readouterr().out
    repaired = pd.read_csv(path)
    assert set(repaired["key"]) == set(rows["key"])
    assert len(repaired) == 6


def test_rows_of_two_checkouts_are_read_and_each_has_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert attack(monkeypatch, tmp_path, "patch_embedding", "--limit", "1") == 0
    changed = provenance.environment() | {"revision": {"commit": "another", "modified": True}}
    with monkeypatch.context() as patch:
        patch.setattr("fedmjp.provenance.environment", lambda: changed)
        assert attack(patch, tmp_path, "patch_embedding", "--limit", "2") == 0
    assert attack_board(tmp_path)["n"].tolist() == [2, 2]
    environments = json.loads((tmp_path / "manifest.json").read_text())["environments"].values()
    commits = {environment["revision"]["commit"] for environment in environments}
    assert commits == {"another", provenance.revision()["commit"]}


def test_rows_stay_when_a_run_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    put, calls = ScoreTable.put, list[TrialResult]()

    def interrupted(table: ScoreTable, trials: Iterable[TrialResult]) -> None:
        rows = list(trials)
        calls.extend(rows[:1])
        if len(calls) > 1:
            raise KeyboardInterrupt
        put(table, rows)

    with monkeypatch.context() as patch:
        patch.setattr(ScoreTable, "put", interrupted)
        assert attack(patch, tmp_path, "patch_embedding", "--limit", "2") != 0
    assert len(pd.read_csv(tmp_path / "scores.csv")) == 2
    capsys.readouterr()
    assert attack(monkeypatch, tmp_path, "patch_embedding", "--limit", "2") == 0
    assert "2 of 4 trials are finished" in capsys.readouterr().out
    assert attack(monkeypatch, tmp_path, "patch_embedding", "--limit", "2", "--fresh") == 0
    assert "0 of 4 trials are finished" in capsys.readouterr().out


@pytest.mark.parametrize("damage_of", ["another header", "no manifest", "no text"])
def test_a_damaged_table_is_one_line(
    damage_of: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert attack(monkeypatch, tmp_path, "grey", "--limit", "1") == 0
    path = tmp_path / "scores.csv"
    if damage_of == "another header":
        path.write_text("a,b\n1,2\n")
    if damage_of == "no manifest":
        (tmp_path / "manifest.json").unlink()
    if damage_of == "no text":
        path.write_bytes(b"\xff\xfe\x00")
    capsys.readouterr()
    for words in (("attack", "--attack", "grey", *SMALL, "--output", str(tmp_path)), ("leaderboard", str(tmp_path))):
        assert run(monkeypatch, *words) == BAD_INPUT
        error = capsys.readouterr().err
        assert "--fresh" in error
        assert len(error.strip().splitlines()) == 1
    assert attack(monkeypatch, tmp_path, "grey", "--limit", "1", "--fresh") == 0


def test_a_campaign_is_not_written_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / ".fedmjp").touch()
    (tmp_path / "trials.sqlite").touch()
    assert attack(monkeypatch, tmp_path, "grey", "--limit", "1") == BAD_INPUT
    assert "holds a campaign's trials; name another --output" in capsys.readouterr().err


def test_batches_are_matched_and_the_caveat_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert attack(monkeypatch, tmp_path, "patch_embedding", "--limit", "4", "--batch-size", "2") == 0
    assert board(tmp_path).loc[("patch_embedding", "a"), "n"] == 4
    assert "2 pictures of 64 patches share 192 equations per pixel: underdetermined" in capsys.readouterr().out


def test_weight_deltas_settings_and_defence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = (
        "--limit",
        "2",
        "--local-steps",
        "2",
        "--local-learning-rate",
        "0.1",
        "--setting",
        "b",
        "--setting",
        "c",
    )
    assert attack(monkeypatch, tmp_path / "none", "patch_embedding", *arguments) == 0
    assert board(tmp_path / "none").loc[("patch_embedding", "b"), "psnr_mean"] > 35
    assert attack(monkeypatch, tmp_path / "mjp", "patch_embedding", *arguments, "--defence", "mjp") == 0
    mjp = attack_board(tmp_path / "mjp").set_index(["defence", "attack", "setting"])
    assert mjp.loc[("mjp", "patch_embedding", "b"), "psnr_mean"] < 25
    assert "weight delta after 2 SGD steps" in " ".join(capsys.readouterr().out.split())


def test_repeated_defences_are_a_pipeline_with_every_twin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = ("--limit", "2", "--defence", "mjp:mask-ratio=0.5", "--defence", "gaussian:noise=0.1")
    assert attack(monkeypatch, tmp_path, "patch_embedding", *given) == 0
    found = attack_board(tmp_path).query("role == 'attack'").set_index("defence")
    assert set(found.index) == {"mjp + gaussian:noise=0.1", "none", "mjp", "gaussian:noise=0.1"}
    assert found["mask_ratio"].to_dict() == {
        "mjp + gaussian:noise=0.1": 0.5, "none": 0.0, "mjp": 0.5, "gaussian:noise=0.1": 0.0,
    }  # fmt: skip
    defended = found.drop("none")
    assert set(defended["twin"]) == {found.loc["none", "id"]}, "each is held against the same, undefended"
    assert pd.isna(found.loc["none", "twin"])


def test_the_figure_shows_what_the_defence_shuffled_and_not_what_the_twin_saw(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shown: list[Path] = []

    class Opening:
        new, Resampling = Image.new, Image.Resampling

        @staticmethod
        def open(path: Path) -> Image.Image:
            shown.append(path)
            return Image.open(path)

    monkeypatch.setattr(figure, "Image", Opening)
    assert attack(monkeypatch, tmp_path, "patch_embedding", "--limit", "2", "--defence", "mjp:mask-ratio=0.5") == 0
    clean, shuffled = (
        [load_png(path) for path in shown if path.stem.endswith(kind)] for kind in ("-clean", "-shuffled")
    )
    assert len(clean) == len(shuffled) == 2
    assert all(np.abs(x - y).mean() > 0.02 * x.max() for x, y in zip(clean, shuffled, strict=True))
    shown.clear()
    assert attack(monkeypatch, tmp_path / "none", "patch_embedding", "--limit", "2") == 0
    assert not [path for path in shown if path.stem.endswith("-shuffled")], "nothing is shuffled there"


@pytest.fixture
def two_classes(tmp_path: Path) -> Path:
    """A folder with a picture of each of two classes."""
    for label, value in (("dark", 60), ("light", 190)):
        folder = tmp_path / "data" / label
        folder.mkdir(parents=True)
        noise = np.random.default_rng(value).integers(-50, 50, (32, 32, 3))
        Image.fromarray((value + noise).astype(np.uint8)).save(folder / "picture.png")
    return tmp_path / "data"


@pytest.mark.parametrize("weights", ["zoo:coarse-mjp-0", "results/learning/runs/coarse-mjp-0/weights.safetensors"])
def test_trained_weights_bring_what_is_known_of_their_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, two_classes: Path, weights: str
) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    given = ("--weights", weights, "--data", str(two_classes), "--limit", "2", "--defence", "mjp", "--device", "cpu")
    assert attack(monkeypatch, tmp_path / "r", "patch_embedding", *given, small=()) == 0
    rows = attack_board(tmp_path / "r").query("role == 'attack'").set_index("defence")
    assert set(rows["model"]) == {"deit_micro"}
    assert set(rows["weights"]) == {ZOO["coarse-mjp-0"].sha256}, "the undefended twin has the same weights"
    assert rows.loc["none", "psnr_mean"] > 60


def test_weights_of_another_model_are_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for given, message in (
        (("--weights", "zoo:coarse-none-0", "--classes", "10"), "set classes to 32"),
        (("--weights", "zoo:coarse-none-0", "--defence", "mjp"), "fits a model without one, as under no defence"),
        (("--weights", "zoo:coarse-nine-0"), "Did you mean zoo:coarse-none-0"),
        (("--weights", "zoo:coarse-none-0", "--model", "deit_tiny"), "take the model that it is a checkpoint of"),
        (("--weights", str(tmp_path / "none.safetensors")), "cannot be read: No such file"),
        (("--weights", "zoo:coarse-none-0", "--uploads", str(tmp_path / "u")), "--weights: that was decided when"),
    ):
        assert attack(monkeypatch, tmp_path / "r", "patch_embedding", *given, small=("--device", "cpu")) == BAD_INPUT
        assert message in " ".join(capsys.readouterr().err.split())


def test_defence_none_is_no_defence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder, given in (("said", ("--defence", "none")), ("unsaid", ())):
        assert attack(monkeypatch, tmp_path / folder, "patch_embedding", "--limit", "1", *given) == 0
    said, unsaid = (attack_board(tmp_path / folder) for folder in ("said", "unsaid"))
    assert set(said["defence"]) == {"none"}
    assert said["twin"].isna().all()
    assert list(said["id"]) == list(unsaid["id"])
    assert list(said["psnr_mean"]) == list(unsaid["psnr_mean"])


def test_summed_clients_share_the_pictures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = ("--limit", "4", "--defence", "secure_sum:clients=2")
    assert attack(monkeypatch, tmp_path / "attack", "patch_embedding", *given) == BAD_INPUT
    assert "needs each client's own update, not the sum over 2 clients" in capsys.readouterr().err
    assert attack(monkeypatch, tmp_path / "grey", "grey", *given) == 0
    assert board(tmp_path / "grey").loc[("grey", "a"), "n"] == 4
    told = " ".join(capsys.readouterr().out.split())
    assert "it is told the sum of the clients' updates" in told, told


def test_bounds_are_marked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ("--limit", "2", "--defence", "mjp", "--setting", "b")
    assert attack(monkeypatch, tmp_path, "oracle_patch_embedding", *arguments) == 0
    assert board(tmp_path).loc[("oracle_patch_embedding", "b"), "role"] == "bound"
    assert board(tmp_path).loc[("oracle_patch_embedding", "b"), "psnr_mean"] > 60
    printed = capsys.readouterr().out
    assert "oracle_patch_embedding (bound)" in printed
    assert "given more than any server sees" in printed


def test_a_client_that_diverges_is_a_failed_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ("--limit", "1", "--local-steps", "3", "--local-learning-rate", "1e30")
    assert attack(monkeypatch, tmp_path, "patch_embedding", *arguments) == 1
    assert "the client's update of" in capsys.readouterr().out
    assert board(tmp_path).loc[("patch_embedding", "a"), "failures"] == 1


def test_labels_may_be_granted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ("--limit", "1", "--set", "iterations=2", "--labels-known")
    assert attack(monkeypatch, tmp_path, "gradient_matching", *arguments) == 0
    assert "is told the labels but no masks" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("patch_embeding", (), "Unknown attack 'patch_embeding'. Did you mean patch_embedding"),
        ("april", (), "april on deit_tiny-none: needs a first block without first norm and residuals"),
        ("patch_embedding", ("--set", "reading=none"), "reading = 'none'"),
        ("patch_embedding", ("--set", "readin=zeros"), "unknown key 'readin', did you mean 'reading'?"),
        ("patch_embedding", ("--set", "reading"), "--set 'reading' is not of the form KEY=VALUE"),
        ("patch_embedding", ("--defence", "gausian"), "Unknown defence 'gausian'. Did you mean gaussian"),
        ("patch_embedding", ("--defence", "gaussian:nois=0.1"), "unknown key 'nois', did you mean 'noise'?"),
        ("patch_embedding", ("--defence", "gaussian:noise"), "'noise' is not KEY=VALUE"),
        ("patch_embedding", ("--defence", "gaussian", "--defence", "mjp"), "name mjp first"),
        ("patch_embedding", ("--defence", "mjp", "--defence", "mjp"), "'mjp' is named twice"),
        (
            "patch_embedding",
            ("--defence", "secure_sum:clients=3", "--limit", "4"),
            "4 pictures make no whole uploads, which are of 3 each",
        ),
        ("patch_embedding", ("--setting", "d"), "'--setting': 'd' is not one of 'a', 'b', 'c'"),
        ("patch_embedding", ("--mask-ratio", "1.5"), "'--mask-ratio': 1.5 is not in the range"),
        (
            "patch_embedding",
            ("--limit", "3", "--batch-size", "2"),
            "3 pictures make no whole uploads, which are of 2 each",
        ),
        ("patch_embedding", ("--limit", "9"), "9 pictures were asked for, but only 8 can be read"),
        ("patch_embedding", ("--local-steps", "0"), "'--local-steps': 0 is not in the range"),
        ("patch_embedding", ("--image-size", "48"), ""),
        ("patch_embedding_wiener", ("--image-size", "48"), "none for image size 48"),
        ("patch_embedding", ("--model", "deit"), "Unknown model 'deit'"),
        ("patch_embedding", ("--data", "nowhere"), "there is no folder"),
        ("patch_embedding", ("--setting", "a", "--setting", "a"), "settings must each be named once, got a, a"),
        ("patch_embedding", ("--image-size", "8"), "less than SSIM's window of 11"),
        ("patch_embedding", ("--local-learning-rate", "0.1"), "give both or neither"),
        ("patch_embedding", ("--set", "reading=zeros", "--set", "reading=copied"), "--set reading is given twice"),
        ("oracle_patch_embedding", ("--batch-size", "2"), "needs the gradient of a single picture"),
        ("oracle_patch_embedding", ("--local-steps", "2"), "needs the gradient of a single picture"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    name: str,
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    code = attack(monkeypatch, tmp_path / "out", name, *arguments)
    if not message:
        assert code == 0
        return
    assert code == BAD_INPUT
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists(), "nothing is written before the input is known to be good"


def test_pictures_that_the_prior_was_measured_on_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from fedmjp.attacks.held_out import MEASURED

    known = json.loads(MEASURED.read_text())["pictures"][0]
    folder = tmp_path / "data" / "class"
    folder.mkdir(parents=True)
    for name in (known, "other.png"):
        pixels = np.random.RandomState(0).randint(0, 256, (64, 64, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / name, format="PNG")
    data = ("--data", str(folder.parent))
    assert attack(monkeypatch, tmp_path / "one", "patch_embedding", *data, "--limit", "1") == 0
    assert "1 pictures are left out" in capsys.readouterr().out
    assert attack(monkeypatch, tmp_path / "two", "patch_embedding", *data, "--limit", "2") == BAD_INPUT


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """What `fedmjp record` leaves behind, recorded without Flower."""
    scenario = small_scenario(clients=2)
    record_into(tmp_path / "recorded", scenario)
    return tmp_path / "recorded"


def record_into(folder: Path, *scenarios: Scenario) -> None:
    record_directly(scenarios, RunFolder(folder))
    pictures = {entry.name: entry.sha256 for each in scenarios for entry in select_for(each).entries}
    about = {"scenarios": [each.model_dump(mode="json") for each in scenarios], "pictures": pictures}
    (folder / "manifest.json").write_text(json.dumps(about))


def test_recorded_uploads_give_what_direct_mode_gives(
    monkeypatch: pytest.MonkeyPatch, recorded: Path, tmp_path: Path
) -> None:
    arguments = ("--uploads", str(recorded))
    assert attack(monkeypatch, tmp_path / "recorded-out", "patch_embedding", *arguments, small=()) == 0
    assert attack(monkeypatch, tmp_path / "direct-out", "patch_embedding", "--limit", "2") == 0
    rows = [
        pd.read_csv(tmp_path / folder / "scores.csv")
        .query("attack == 'patch_embedding'")
        .sort_values("picture")[["picture", "psnr"]]
        .to_numpy()
        .tolist()
        for folder in ("recorded-out", "direct-out")
    ]
    assert [name for name, _ in rows[0]] == [name for name, _ in rows[1]]
    assert all(min(one, other) > 60 for (_, one), (_, other) in zip(*rows, strict=True))


def test_changed_records_make_new_trials(monkeypatch: pytest.MonkeyPatch, recorded: Path, tmp_path: Path) -> None:
    arguments = ("--uploads", str(recorded))
    assert attack(monkeypatch, tmp_path / "out", "patch_embedding", *arguments, small=()) == 0
    before = board(tmp_path / "out").loc[("patch_embedding", "a"), "psnr_mean"]
    for path in (recorded / "uploads" / "deit_tiny-none").glob("round-*"):
        damage(path, "noise")
    assert attack(monkeypatch, tmp_path / "out", "patch_embedding", *arguments, small=()) == 0
    assert board(tmp_path / "out").loc[("patch_embedding", "a"), "psnr_mean"] < before - 20


def test_a_recording_is_never_written_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recorded: Path
) -> None:
    for output in (recorded, recorded / "out"):
        code = attack(monkeypatch, output, "patch_embedding", "--uploads", str(recorded), small=())
        assert code == BAD_INPUT
        assert "which is read; name another folder" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["records", "weights", "manifest"])
def test_records_that_are_not_whole_are_named(
    how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    recorded = tmp_path / "recorded"
    record_into(recorded, small_scenario(clients=4))
    cut, without_private, without_upload = (f"round-00001-node-{node}.safetensors" for node in range(3))
    private, uploads = (recorded / folder / "deit_tiny-none" for folder in ("evaluator", "uploads"))
    if how == "records":
        (private / cut).write_bytes((private / cut).read_bytes()[:40])
        (private / without_private).unlink()
        (uploads / without_upload).unlink()
    if how == "weights":
        next(uploads.glob("weights-*")).unlink()
    if how == "manifest":
        about = json.loads((recorded / "manifest.json").read_text())
        (recorded / "manifest.json").write_text(json.dumps(about | {"pictures": {}}))
    arguments = ("--uploads", str(recorded))
    assert attack(monkeypatch, tmp_path / "out", "patch_embedding", *arguments, small=()) == BAD_INPUT
    printed = capsys.readouterr()
    assert "Traceback" not in printed.out + printed.err
    if how == "records":
        assert all(name in printed.out for name in (cut, without_private, without_upload))
    if how == "weights":
        assert "weights" in printed.out
    if how == "manifest":
        assert "pictures that the manifest names" in printed.err


def test_recorded_scenarios_are_attacked_unless_a_model_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recorded = tmp_path / "recorded"
    wanted = [("deit_tiny", "none"), ("deit_tiny", "mjp:shuffle=False"), ("deit_tiny_april", "none")]
    record_into(recorded, *(small_scenario(name, defences=defences, clients=2) for name, defences in wanted))
    given = ("--uploads", str(recorded))
    assert attack(monkeypatch, tmp_path / "all", "grey", *given, small=()) == 0
    every = attack_board(tmp_path / "all")
    assert set(zip(every["model"], every["defence"], strict=True)) == {
        (name, text.split(":")[0]) for name, text in wanted
    }
    assert attack(monkeypatch, tmp_path / "one", "april", *given, small=()) == BAD_INPUT, "not all can be"
    named = (*given, "--model", "deit_tiny_april")
    assert attack(monkeypatch, tmp_path / "one", "april", *named, small=()) == 0
    assert set(attack_board(tmp_path / "one")["model"]) == {"deit_tiny_april"}


def damage(upload: Path, how: str) -> None:
    loaded = Upload.load(upload)
    tensors = dict(loaded.tensors)
    if how == "missing":
        del tensors[names.PATCH_WEIGHT]
    if how == "shape":
        tensors[names.POSITION_EMBEDDING] = tensors[names.POSITION_EMBEDDING][:, :10]
    if how == "noise":
        generator = torch.Generator().manual_seed(0)
        tensors = {key: value + torch.randn(value.shape, generator=generator) for key, value in tensors.items()}
    if how == "integers":
        tensors[names.PATCH_WEIGHT] = tensors[names.PATCH_WEIGHT].int()
    if how == "nan":
        tensors[names.PATCH_WEIGHT] = torch.full_like(tensors[names.PATCH_WEIGHT], torch.nan)
    fields = {name: getattr(loaded, name) for name in UPLOAD_FIELDS}
    fields |= {"kind": "delta"} if how == "kind" else {"num_examples": 3} if how == "count" else {}
    fields |= {"labels": [1]} if how == "labels" else {}
    if how == "fields":
        del fields["node"]
    save_tensors(upload, tensors, {"record": "Upload", **fields})


@pytest.mark.parametrize(
    "reasons",
    [
        {
            "missing": "no tensor",
            "shape": "has shape (1, 10, 192)",
            "nan": "holds NaN or infinite values",
            "integers": "holds torch.int32, no real numbers",
        },
        {
            "kind": "of kind delta, but the run was of gradients",
            "count": "reports 3 pictures, the client had 1",
            "labels": "states [",
            "fields": "states [",
        },
    ],
    ids=["tensors", "fields"],
)
def test_unusable_uploads_are_named_the_rest_is_attacked_and_it_ends_with_2(
    reasons: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    recorded = tmp_path / "recorded"
    record_into(recorded, small_scenario(clients=2, pictures_per_client=3))
    uploads = sorted((recorded / "uploads" / "deit_tiny-none").glob("round-*"))
    for path, how in zip(uploads, reasons, strict=False):
        damage(path, how)
    arguments = ("--uploads", str(recorded))
    assert attack(monkeypatch, tmp_path / "out", "patch_embedding", *arguments, small=()) == BAD_INPUT
    printed = capsys.readouterr()
    assert "Traceback" not in printed.out + printed.err
    _, *unusable = printed.out.split("Unusable upload ")
    assert len(unusable) == len(reasons)
    for path, reason, line in zip(uploads, reasons.values(), unusable, strict=False):
        assert line.startswith(str(path))
        assert reason in line
    assert board(tmp_path / "out").loc[("patch_embedding", "a"), "n"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "bundled"), "--data: that was decided when"),
        (("--mask-ratio", "0.5"), "--mask-ratio: that was decided when"),
        (("--model", "deit_small"), "model 'deit_small' was not recorded"),
        (("--attack", "oracle_patch_embedding"), "is a bound: no recorded upload holds"),
        (("--setting", "b"), "settings b do not fit uploads of the clean picture: ask for setting a"),
        (("--defence", "mjp"), "--defence: that was decided when"),
    ],
)
def test_what_records_do_not_hold_is_refused(
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    recorded: Path,
    tmp_path: Path,
) -> None:
    given = ("--uploads", str(recorded), *arguments)
    assert attack(monkeypatch, tmp_path / "out", "patch_embedding", *given, small=()) == BAD_INPUT
    assert message in capsys.readouterr().err


def test_a_folder_without_records_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = ("--uploads", str(tmp_path / "elsewhere"))
    assert attack(monkeypatch, tmp_path / "out", "patch_embedding", *given, small=()) == BAD_INPUT
    assert "holds no records of `fedmjp record`" in capsys.readouterr().err

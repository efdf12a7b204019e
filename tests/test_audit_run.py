import hashlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedmjp.cli import app
from tests.apps import vit_app

PLANTED = (
    'content["metrics"]["curve"] = [float(value) for value in images[0].mean(0).flatten()]; '
    "pixels = (images[0] * 64 + 127).clamp(0, 255).byte().numpy(); "
    'content["debug"] = ConfigRecord({"state": pixels.tobytes()})'
)
KEYS = {"leaves", "server_controls", "recipe", "attacks", "recovered", "not_tested", "stand_ins"}


@pytest.mark.slow
def test_an_app_that_gives_its_pictures_away_is_told_so(tmp_path: Path) -> None:
    folder = vit_app(tmp_path / "app", batch=1, answer=PLANTED)
    before = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}
    done = CliRunner().invoke(app, ["audit", str(folder), "--output", str(tmp_path / "out"), "--rounds", "1"])
    assert done.exit_code == 1, done.output
    assert {
        path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()
    } == before
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report.keys() >= KEYS
    assert report["problem"] is None
    assert report["rounds"] == 1
    names = {(entry["record"], entry["name"]) for entry in report["leaves"]}
    assert {("arrays", "patch_embed.proj.weight"), ("metrics", "loss"), ("debug", "state")} <= names
    assert report["recipe"]["optimiser"] == "SGD"
    assert report["recipe"]["learning_rates"] == [0.05]
    assert any("learning rate" in control["meaning"] for control in report["server_controls"])
    said = [leak["what"] for leak in report["leaks"]]
    assert sum("curve of metrics" in what or "state of debug" in what for what in said) == 2
    assert "an upload is of one example alone" in said
    rows = {row["attack"]: row for row in report["recovered"]}
    assert rows["patch_embedding"]["psnr_worst_case"] > 40
    assert "pictures" in report["control"]["leaks"]
    protections = {row["protection"]: row for row in report["protections"]}
    assert (
        "asked twice, with the same weights and batches, answered the same" in protections["clipping or noise"]["said"]
    )
    assert {row["verified"] for row in protections.values()} == {None}
    assert all(row["reason"] for row in report["attacks"] if not row["applies"])
    for name in ("report.html", "summary.html"):
        page = (tmp_path / "out" / name).read_text()
        assert "default-src 'none'" in page
        assert "http://" not in page
        assert "https://" not in page
        assert all(line in page for line in report["not_tested"])


def test_what_is_no_app_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    done = CliRunner().invoke(app, ["audit", str(tmp_path / "app"), "--output", str(tmp_path / "out")])
    assert done.exception is not None
    assert "no pyproject.toml" in str(done.exception)

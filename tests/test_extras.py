"""What single commands need besides: told in one line where it is not installed, and nothing else asks for it."""

import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from fedmjp.data.datasets import open_dataset
from fedmjp.data.partitions import partition
from fedmjp.errors import MissingExtraError
from fedmjp.extras import EXTRAS, require
from fedmjp.learning import PartitionConfig
from fedmjp.training.history import History
from tests.conftest import ROOT
from tests.test_cli import run

DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
HIDDEN = sorted({package for packages in EXTRAS.values() for package in packages})


def test_extras_are_those_of_the_installation_and_tests_have_them_all() -> None:
    assert set(EXTRAS) == set(DECLARED) - {"test", "dev"}
    for extra, packages in EXTRAS.items():
        said = " ".join(DECLARED[extra])
        assert all(package.replace("_", "-") in said for package in packages)
        require(extra, "A test")
    assert "fedmjp[postgresql,study,training]" in DECLARED["test"]


@pytest.mark.parametrize("package", ["tensorboard", "datasets", "flwr_datasets"])
def test_training_is_refused_before_anything_is_written(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    message = f"needs {package}, which is not installed; pip install 'fedmjp[training]'"
    for command in (["train"], ["simulate", "clients=2", "model.name=deit_micro"]):
        assert run(monkeypatch, *command, "--output", str(tmp_path / "run")) == 2
        printed = capsys.readouterr().err
        assert message in printed
        assert printed.count("\n") == 1
    assert not list(tmp_path.iterdir())
    with pytest.raises(MissingExtraError, match=package):
        History(tmp_path / "history.csv", tmp_path / "tensorboard")
    with pytest.raises(MissingExtraError, match=package):
        partition(np.zeros(4, dtype=np.int64), PartitionConfig(), clients=2, seed=0)


def test_parquet_files_and_the_hub_name_their_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "train.parquet").touch()
    for data in (str(tmp_path), "hub:OWNER/NAME"):
        with pytest.raises(MissingExtraError, match=r"pip install 'fedmjp\[datasets\]'"):
            open_dataset(data, "train", classes=2)


@pytest.mark.slow
def test_the_core_does_without_any_extra(tmp_path: Path) -> None:
    code = f"""
import sys
sys.modules.update(dict.fromkeys({HIDDEN}))
import fedmjp
scenario = fedmjp.Scenario(model={{"name": "deit_micro", "image_size": 32, "patch_size": 8}})
exchange = scenario.exchange(fedmjp.bundled_pictures(1, size=32))
result = fedmjp.attack("patch_embedding", exchange.upload, scenario)
print(fedmjp.score(result, exchange.private, setting="a")["psnr"])
import importlib, pkgutil
probe = "fedmjp.benchmarks.audit.probe"
for module in pkgutil.walk_packages(fedmjp.__path__, "fedmjp."):
    # What is opened behind a check, and what runs in a copy of somebody's app alone.
    if module.name not in ("fedmjp.data.tables", probe + ".client", probe + ".server", probe + ".scripts"):
        importlib.import_module(module.name)
from fedmjp.cli import main
for words in (["--help"], ["list", "attacks"]):
    sys.argv = ["fedmjp", *words]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, ended.code
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "quickstart" in done.stdout
    assert "mjp_intersection" in done.stdout

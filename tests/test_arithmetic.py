"""Arithmetic: a row of its own where it is not float32, and never what a device does not have."""

import pytest
import torch

from fedmjp.arithmetic import Arithmetic, computing
from fedmjp.benchmarks.campaign.spec import Campaign
from fedmjp.cli import main
from fedmjp.data.selection import Selection
from fedmjp.errors import ConfigError
from fedmjp.models import names
from tests.conftest import small_scenario


def test_float32_is_not_in_what_results_are_known_by_and_others_are() -> None:
    plain, other = small_scenario(), small_scenario(arithmetic="bfloat16")
    assert "arithmetic" not in plain.model_dump_json()
    assert "arithmetic" not in plain.threat.model_dump_json()
    assert plain.digest() != other.digest()
    assert plain.threat.digest() != other.threat.digest()
    assert "computed in bfloat16" in other.threat.sentence()
    assert plain.threat.rounding == 2**-24
    assert other.threat.rounding == 2**-9


def test_a_cpu_has_no_tf32() -> None:
    with (
        pytest.raises(ConfigError, match="tf32 is of CUDA, device cpu has none: take float32 or bfloat16"),
        computing("tf32", "cpu"),
    ):
        pass


def test_bfloat16_uploads_are_off_by_its_rounding(pictures: Selection) -> None:
    picture = pictures.load(pictures.entries[0])
    arithmetics: tuple[Arithmetic, ...] = ("float32", "bfloat16")
    exact, rounded = (
        small_scenario(arithmetic=each).exchange([picture]).upload.tensors[names.PATCH_WEIGHT] for each in arithmetics
    )
    assert rounded.dtype == torch.float32
    assert 2**-9 < float((rounded - exact).norm() / exact.norm()) < 0.2


def test_a_campaign_has_rows_of_each_arithmetic() -> None:
    grid = {"models": ["deit_micro"], "attacks": ["patch_embedding"], "defences": [[]], "settings": ["a"]}
    values = {
        "name": "two",
        "question": "?",
        "image_size": 32,
        "patch_size": 4,
        "data": {"source": "bundled", "pictures": 2},
    }
    campaign = Campaign.parse({**values, "grids": [{**grid, "threats": [{"arithmetic": ["float32", "bfloat16"]}]}]})
    made = campaign.experiments(device="cpu")
    assert [experiment.scenario.arithmetic for experiment in made] == ["float32", "bfloat16"]
    with pytest.raises(ConfigError, match="tf32 is of CUDA"):
        Campaign.parse({**values, "grids": [grid]}).experiments(device="cpu", arithmetic="tf32")


def test_commands_refuse_tf32_without_a_gpu_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["attack", "--attack", "patch_embedding", "--device", "cpu", "--arithmetic", "tf32"]
    monkeypatch.setattr("sys.argv", ["fedmjp", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "arithmetic tf32 is of CUDA" in capsys.readouterr().err

"""What position embeddings hold, against scikit-learn's own analysis, plain least squares and timm's own attention."""

import csv
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from torch import Tensor

from fedmjp.cli import main
from fedmjp.config import ModelConfig
from fedmjp.errors import BadInputError
from fedmjp.evaluation.attention import compute_entropies, compute_head_distances, read_last_attention
from fedmjp.evaluation.positions import (
    PAPER_VARIANCE,
    PositionTable,
    compute_energy,
    compute_explained_variance,
    compute_similarities,
    find_nearest_reading,
    measure_position_regression,
    project_on_principal_axes,
    read_positions,
)
from fedmjp.models.build import build, build_vit
from fedmjp.seeds import numpy_generator

RUNS = Path(__file__).parents[1] / "results" / "learning" / "runs"
MICRO = {"name": "deit_micro", "image_size": 32, "patch_size": 8, "classes": 4}


@pytest.fixture
def table() -> PositionTable:
    return PositionTable("drawn", np.random.default_rng(0).normal(size=(49, 24)) * np.linspace(3, 1, 24))


def test_explained_variance_is_that_of_a_principal_component_analysis(table: PositionTable) -> None:
    measured = compute_explained_variance(table.rows).pivot(index="k", columns="reading", values="share")
    fitted = PCA(7).fit(table.rows)
    assert measured["centred, squared"].to_numpy() == pytest.approx(fitted.explained_variance_ratio_.cumsum()[2:])
    values = np.sqrt(np.linalg.eigvalsh(table.rows.T @ table.rows)[::-1])
    assert measured["not centred"].to_numpy() == pytest.approx((values.cumsum() / values.sum())[2:7])
    assert compute_energy(table.rows)["share"].to_numpy() == pytest.approx(values.cumsum() / values.sum())
    assert np.abs(project_on_principal_axes(table.rows, 3)) == pytest.approx(
        np.abs(fitted.transform(table.rows)[:, :3])
    )


def test_the_reading_that_is_nearest_to_the_paper_is_the_one_its_figures_are_made_in(table: PositionTable) -> None:
    measured = compute_explained_variance(table.rows)
    made = measured["reading"] == "centred"
    measured.loc[made, "share"] = np.array(PAPER_VARIANCE["mjp"]) / 100
    assert find_nearest_reading(measured, "mjp") == "centred"


def test_position_regression_is_least_squares_on_four_fifths(table: PositionTable) -> None:
    measured = measure_position_regression(table, seed=3, repetitions=2).set_index("target")
    errors = []
    for number in range(2):
        order = numpy_generator(3, "positions", "absolute 2-D", number).permutation(49)
        inputs = np.column_stack([table.rows[order], np.ones(49)])
        targets = np.stack([order // 7, order % 7], axis=1)
        folds = []
        for held in np.array_split(np.arange(49), 5):
            rest = np.setdiff1d(np.arange(49), held)
            solved = np.linalg.lstsq(inputs[rest], targets[rest], rcond=None)[0]
            folds.append(np.abs(inputs[held] @ solved - targets[held]).mean())
        errors.append(np.mean(folds))
    assert measured.loc["absolute 2-D", "error"] == pytest.approx(np.mean(errors))
    assert measured.loc["absolute 2-D", "deviation"] == pytest.approx(np.std(errors, ddof=1))


def test_places_that_a_table_states_are_told_exactly() -> None:
    places = PositionTable("places", np.zeros((36, 1))).places
    stated = PositionTable("stated", places @ np.random.default_rng(0).normal(size=(2, 8)) + 1)
    measured = measure_position_regression(stated, seed=0, repetitions=2).set_index("target")["error"]
    assert measured[["absolute 1-D", "absolute 2-D"]].max() < 1e-9
    assert measured["relative 2-D"] > 0.1, "how far apart is no linear map of the difference"
    assert measured["relative 2-D, wraps"] > 10 * measured["relative 2-D"], "bytes wrap"
    assert compute_similarities(stated.rows).diagonal() == pytest.approx(1)


def test_the_last_attention_is_timms_own(generator: torch.Generator) -> None:
    model = build_vit(ModelConfig.parse(MICRO)).eval()
    attention = model.backbone.blocks[-1].attn
    images, seen = torch.rand(2, 3, 32, 32, generator=generator), list[Tensor]()
    made = read_last_attention(model, images, "drawn")
    attention.fused_attn = False
    attention.attn_drop.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        model(images)
    assert torch.allclose(made, seen[0][:, :, 0, 1:], atol=1e-6)
    assert made.shape == (2, 2, 16)


def test_heads_that_look_alike_are_at_no_distance() -> None:
    even, first, last = torch.full((4,), 0.25), torch.eye(4)[0], torch.eye(4)[3]
    attention = torch.stack([torch.stack([even, even]), torch.stack([first, last])])
    assert compute_head_distances(attention).tolist() == [0, 1]
    assert compute_entropies(attention).tolist() == [[2, 2], [0, 0]]


@pytest.mark.parametrize(("name", "patch"), [("swin_tiny", 4), ("deit_small_without_positions", 16)])
def test_a_model_without_position_embeddings_is_refused(name: str, patch: int) -> None:
    config = ModelConfig.parse({"name": name, "patch_size": patch, "classes": 2})
    with pytest.raises(BadInputError, match="no absolute position embeddings"):
        read_positions(build(config), "run")


def test_a_table_of_zeros_has_no_spectrum() -> None:
    with pytest.raises(BadInputError, match="all zero"):
        compute_explained_variance(np.zeros((16, 8)))


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["fedmjp", "study", "positions", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


class Umap:
    """In place of umap-learn's, which compiles for twenty seconds: what it is asked for, and one projection."""

    asked: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, **options: Any) -> None:
        self.asked.append(options)

    def fit_transform(self, rows: np.ndarray) -> np.ndarray:
        return rows[:, :2].astype(np.float32)


@pytest.mark.slow
def test_the_command_writes_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, made = [RUNS / name for name in ("coarse-none-0", "coarse-mjp-0")], tmp_path / "made"
    monkeypatch.setattr("umap.UMAP", Umap)
    assert run(monkeypatch, *runs, "--pictures", 2, "--output", made) == 0
    assert Umap.asked == [{"n_components": 2, "random_state": 0, "n_jobs": 1}] * 2
    with (made / "position_regression.csv").open() as lines:
        assert {row["run"] for row in csv.DictReader(lines)} == {"coarse-none-0", "coarse-mjp-0"}
    page = (made / "report.html").read_text()
    for name in ("energy", "projections", "similarities", "attention"):
        assert (made / f"{name}.png").stat().st_size > 1000
        assert f"{name}.svg" in page
    capsys.readouterr()
    assert run(monkeypatch, tmp_path / "nothing") == 2
    assert "there is no folder" in capsys.readouterr().err

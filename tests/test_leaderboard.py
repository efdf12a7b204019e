"""The leaderboard against statistics computed by hand, and the files that are made of it."""

from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from rich.console import Console

from benchmarks.experiment import AttackConfig, Cell, Experiment, plan
from benchmarks.leaderboard.summary import leaderboard, summary
from benchmarks.output import OutputFolder
from benchmarks.report import tables
from benchmarks.report.render import render
from fedmjp import provenance
from fedmjp.data.selection import select_for
from fedmjp.errors import ConfigError
from fedmjp.settings import Picture, Setting
from fedmjp.store import Store, Trial
from tests.experiments import planned_trials, run_small, small_experiment

METRICS = ("mse", "psnr", "ssim", "fft2d", "lpips_alex")
CELL = ["model", "defence", "mask_ratio", "attack", "role", "setting", "protocol", "n", "failures"]


def test_summary_agrees_with_statistics_by_hand() -> None:
    values = np.array([10.0, 12.0, 20.0, 14.0])
    found = summary(values, "psnr")
    assert (found["mean"], found["median"], found["worst"]) == (14.0, 13.0, 20.0)
    assert summary(values, "mse")["worst"] == 10.0, "a low error reveals most"


def test_interval_agrees_with_a_slow_bootstrap() -> None:
    values = np.random.default_rng(0).normal(20, 3, size=30)
    found = summary(values, "psnr")
    random = np.random.default_rng(1)
    means = [random.choice(values, size=len(values)).mean() for _ in range(20_000)]
    assert found["low"] == pytest.approx(np.quantile(means, 0.025), abs=0.05)
    assert found["high"] == pytest.approx(np.quantile(means, 0.975), abs=0.05)


def test_one_picture_has_no_interval_and_none_has_no_statistics() -> None:
    assert summary(np.array([3.0]), "psnr") == {"mean": 3.0, "median": 3.0, "low": None, "high": None, "worst": 3.0}
    assert set(summary(np.array([]), "psnr").values()) == {None}


def test_cells_name_the_ratio_that_went_into_the_gradient() -> None:
    experiment = small_experiment()
    ratios = {(trial.cell.defence, trial.cell.setting): trial.cell.mask_ratio for trial in planned_trials(experiment)}
    assert ratios == {
        ("none", Setting.A): 0.0,
        ("none", Setting.B): 0.27,
        ("none", Setting.C): 0.27,
        ("mjp", Setting.A): 0.27,
        ("mjp", Setting.B): 0.27,
        ("mjp", Setting.C): 0.27,
    }


def test_keys_are_unique_stable_and_depend_on_what_determines_the_trial() -> None:
    experiment = small_experiment()
    pictures = select_for(experiment.federation).batches(experiment.federation)
    base = [trial.key for trial in plan(experiment, pictures, uploads="direct")]
    assert len(set(base)) == len(base) == 96
    assert [trial.key for trial in plan(small_experiment(), pictures, uploads="direct")] == base
    read = AttackConfig(name="patch_embedding", options={"reading": "zeros"})
    attacks = {"deit_tiny": (read, AttackConfig(name="grey")), "deit_tiny_april": experiment.attacks["deit_tiny_april"]}
    other_option = [
        trial.key for trial in plan(experiment.model_copy(update={"attacks": attacks}), pictures, uploads="direct")
    ]
    assert len(set(base) & set(other_option)) == 96 - 24
    for changed in (
        small_experiment(mask_ratio=0.5),
        small_experiment(seed=1),
        small_experiment(patch_size=16),
        experiment.model_copy(update={"protocol": "8bit"}),
        experiment.model_copy(update={"metrics": ("mse",)}),
        experiment.model_copy(update={"labels_known": True}),
        small_experiment(update="delta", local_steps=2),
    ):
        different = [trial.key for trial in plan(changed, pictures, uploads="direct")]
        unchanged = set(base) & set(different)
        # An undefended clean picture does not depend on the mask ratio.
        assert len(unchanged) == (16 if changed.federation.mask_ratio == 0.5 else 0)


def test_keys_depend_on_device_versions_code_learning_rate_and_the_picture_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experiment = small_experiment()
    picture, mate = select_for(experiment.federation).entries[:2]
    base = {trial.key for trial in plan(experiment, [(picture,)], uploads="direct")}
    changed = [
        plan(small_experiment(device="cuda"), [(picture,)], uploads="direct"),
        plan(small_experiment(server_learning_rate=0.1), [(picture,)], uploads="direct"),
        plan(experiment, [(replace(picture, sha256="0"),)], uploads="direct"),
        plan(experiment, [(replace(picture, label=3),)], uploads="direct"),
        plan(experiment, [(replace(picture, name="other"),)], uploads="direct"),
        plan(experiment, [(picture, mate)], uploads="direct"),
        plan(experiment, [(picture,)], uploads="federated"),
    ]
    monkeypatch.setattr("fedmjp.provenance.code_digest", lambda: "changed code")
    changed.append(plan(experiment, [(picture,)], uploads="direct"))
    monkeypatch.undo()
    versions = provenance.versions()
    monkeypatch.setattr("fedmjp.provenance.versions", lambda: {**versions, "torch": "0.0"})
    changed.append(plan(experiment, [(picture,)], uploads="direct"))
    for other in changed:
        assert base.isdisjoint(trial.key for trial in other)


def test_experiments_that_do_not_fit_together_are_refused() -> None:
    experiment = small_experiment()
    with pytest.raises(ConfigError, match="attacks names none for deit_tiny_april"):
        Experiment.parse({"federation": experiment.federation, "attacks": {"deit_tiny": ("grey",)}})
    shuffled_only = experiment.federation.model_copy(update={"inputs": (Picture.SHUFFLED,)})
    with pytest.raises(ConfigError, match="settings a need gradients"):
        Experiment.parse({"federation": shuffled_only, "attacks": experiment.attacks})


def rows(keys: list[str], cell: Cell) -> list[Trial]:
    return [
        Trial(key=keys[0], status="ok", scores={"psnr": 10.0, "lpips_alex": None}, model=cell.model),
        Trial(key=keys[1], status="ok", scores={"psnr": 30.0, "lpips_alex": None}, model=cell.model),
        Trial(key=keys[2], status="failed", error="broken", scores={}, model=cell.model),
    ]


def test_failures_are_counted_and_not_averaged() -> None:
    planned = planned_trials(small_experiment())[:4]
    board = leaderboard(planned, rows([p.key for p in planned], planned[0].cell), ("psnr", "lpips_alex"))
    (row,) = board.to_dict("records")
    assert (row["n"], row["failures"], row["psnr_mean"], row["psnr_worst"]) == (2, 1, 20.0, 30.0)
    assert row["lpips_alex_mean"] is None


class References(HTMLParser):
    """Collects everything that a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if name in ("src", "href", "srcset") and value]


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> tuple[OutputFolder, str]:
    """An experiment run and rendered on a machine without LPIPS weights."""
    output = OutputFolder(tmp_path_factory.mktemp("report"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.hub.get_dir", lambda: str(output.root))
        run_small(output.root)
        experiment = small_experiment()
        console = Console(width=200, record=True, file=(output.root / "terminal.txt").open("w"))
        failed = render(
            experiment, planned_trials(experiment), Store.at(output.database), output, console, uploads="here"
        )
    assert failed == []
    return output, console.export_text()


def test_csv_has_the_promised_columns_and_one_row_per_cell(rendered: tuple[OutputFolder, str]) -> None:
    board = pd.read_csv(rendered[0].root / "leaderboard.csv")
    statistics = [f"{name}_{part}" for name in METRICS for part in ("mean", "median", "low", "high", "worst")]
    assert sorted(board.columns) == sorted(CELL + statistics)
    assert list(board.columns)[: len(CELL)] == CELL
    assert len(board) == len(board[CELL[:7]].drop_duplicates()) == 24
    assert (board["n"] == 4).all()
    assert (board["psnr_low"] <= board["psnr_mean"]).all()
    assert (board["psnr_mean"] <= board["psnr_high"]).all()


def test_figure_shows_every_picture_and_every_reconstruction(rendered: tuple[OutputFolder, str]) -> None:
    with Image.open(rendered[0].root / "reconstructions.png") as figure:
        pixels = np.asarray(figure.convert("RGB")).astype(float)
    rows, columns = 2 + 4, 4
    left = round(pixels.shape[1] * 1.45 / (1.45 + 1.15 * columns))
    for row in np.array_split(pixels[:, left:], rows):
        for cell in np.array_split(row, columns, axis=1):
            assert cell.std() > 5, "a cell without a picture"


def test_page_is_self_contained(rendered: tuple[OutputFolder, str]) -> None:
    page = (rendered[0].root / "report.html").read_text()
    references = References()
    references.feed(page)
    assert references.found
    assert all(reference.startswith("data:") for reference in references.found)
    assert "url(" not in page
    assert "@import" not in page
    assert "Honest-but-curious" in page


def test_missing_metric_leaves_the_column_empty_and_gives_the_reason(
    rendered: tuple[OutputFolder, str],
) -> None:
    output, terminal = rendered
    assert pd.read_csv(output.root / "leaderboard.csv")["lpips_alex_mean"].isna().all()
    for text in (terminal, (output.root / "leaderboard.md").read_text(), (output.root / "report.html").read_text()):
        assert "alexnet-owt-7be5be79.pth" in text


@pytest.mark.parametrize("width", [80, 100, 200])
def test_terminal_table_never_cuts_a_cell(rendered: tuple[OutputFolder, str], width: int) -> None:
    board = leaderboard_of(rendered[0])
    console = Console(width=width, record=True, file=(rendered[0].root / "narrow.txt").open("w"))
    tables.print_table(board, METRICS, console)
    text = console.export_text()
    assert "…" not in text
    assert "patch_embedding" in text
    assert "PSNR dB" in text
    assert ("Left out" in text) == (width < 120)


def leaderboard_of(output: OutputFolder) -> pd.DataFrame:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.hub.get_dir", lambda: str(output.root))
        planned = planned_trials(small_experiment())
    return leaderboard(planned, Store.at(output.database).trials([p.key for p in planned]), METRICS)

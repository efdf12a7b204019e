"""`fedmjp evaluate` on runs that were not trained, and what it makes of their figures."""

import hashlib
import io
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from rich.console import Console

from fedmjp.cli import main
from fedmjp.data.datasets import open_dataset
from fedmjp.data.loading import evaluation_batches
from fedmjp.evaluation.consistency import Puzzles, compare_with_shuffled
from fedmjp.evaluation.figures import compute_figures, summarise
from fedmjp.evaluation.runs import describe_kinds, open_run, refuse_twins
from fedmjp.evaluation.sweep import draw_sweep
from fedmjp.evaluation.tables import build_tables, find_families, print_tables
from fedmjp.learning import Recipe
from fedmjp.models.build import build
from fedmjp.scenario import TrainingScenario
from fedmjp.training.accuracy import top1
from fedmjp.training.config import TrainingConfig
from fedmjp.training.state import save_weights

BAD_INPUT, CLASSES, PICTURES = 2, 3, 12
MODEL = {"name": "deit_micro", "image_size": 32, "patch_size": 4, "classes": CLASSES}


def training(seed: int = 0, ratio: float | None = None, **changes: Any) -> TrainingConfig:
    """Undefended without a ratio."""
    defences = [] if ratio is None else [{"name": "mjp", "mask_ratio": ratio}]
    model, recipe = {**MODEL, "seed": seed, **changes}, {"epochs": 30}
    return TrainingConfig.parse({"model": model, "defences": defences, "seed": seed, "recipe": recipe})


def keep(
    folder: Path, config: TrainingConfig | TrainingScenario, *, spoil: Callable[[Any], None] = lambda _: None
) -> Path:
    """A run's folder, with initial weights and larger positions, or every model would be consistent."""
    federated = isinstance(config, TrainingScenario)
    model = build(config.network)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        if model.has_positions:
            model.backbone.pos_embed.normal_(std=3, generator=generator)
        model.backbone.head.weight.normal_(generator=generator)
        spoil(model)
    folder.mkdir(parents=True)
    save_weights(folder / "weights.safetensors", model.state_dict())
    about = {"kind": "federated" if federated else "central", "config": config.model_dump(mode="json")}
    (folder / "manifest.json").write_text(json.dumps(about))
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    generator = np.random.default_rng(0)
    for index in range(PICTURES):
        place = folder / f"class{index % CLASSES}"
        place.mkdir(exist_ok=True)
        pixels = generator.integers(0, 256, (40, 36, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{index}.png")
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        keep(root / f"none-{seed}", training(seed))
    for ratio in (0.09, 0.27):
        keep(root / f"mjp-{ratio}", training(ratio=ratio))
    dealt = {"rounds": 25, "partition": {"scheme": "dirichlet"}}
    keep(root / "federated", TrainingScenario.parse({"model": MODEL, "clients": 4, "training": dealt}))
    return root


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["fedmjp", "evaluate", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def measured(folder: Path, data: Path, *ratios: float):
    run = open_run(folder)
    dataset = open_dataset(str(data), "validation", classes=CLASSES)
    batches = evaluation_batches(dataset, np.arange(PICTURES), 0.875, size=32, batch_size=5)
    return run, list(
        compute_figures(compare_with_shuffled(build(run.model), batches, Puzzles(ratios), key_of=dataset.key))
    )


def test_writes_what_it_measured(monkeypatch, capsys, tmp_path, data, runs):
    folders = sorted(runs.iterdir())
    ratios = ("--mask-ratio", 0.27, "--mask-ratio", 0.6)
    assert command(monkeypatch, *folders, "--data", data, *ratios, "--device", "cpu", "--output", tmp_path / "out") == 0
    lines = pd.read_csv(tmp_path / "out" / "evaluation.csv")
    assert list(zip(lines["run"], lines["mask_ratio"], strict=True)) == [
        (folder.name, ratio) for folder in folders for ratio in (0.27, 0.6)
    ]
    for folder in folders:
        run = open_run(folder)
        dataset = open_dataset(str(data), "validation", classes=CLASSES)
        batches = evaluation_batches(dataset, np.arange(PICTURES), 0.875, size=32, batch_size=5)
        expected = 100 * top1(build(run.model), batches).top1
        assert lines[lines["run"] == folder.name]["top1"].tolist() == [expected, expected]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    digests = [hashlib.sha256((folder / "weights.safetensors").read_bytes()).hexdigest() for folder in folders]
    assert [run["weights_sha256"] for run in manifest["runs"]] == digests
    assert manifest["data"] == {"name": data.name, "pictures": PICTURES, "of": PICTURES}
    assert (tmp_path / "out" / "sweep.png").stat().st_size > 10_000
    assert "30 epochs" in capsys.readouterr().out
    for name in ("manifest.json", "table.md", "evaluation.csv"):
        assert str(tmp_path.parent) not in (tmp_path / "out" / name).read_text()


def test_one_ratio_has_no_sweep_and_a_former_one_goes(monkeypatch, tmp_path, data, runs):
    options = ("--data", data, "--limit", 5, "--device", "cpu", "--output", tmp_path / "out")
    assert command(monkeypatch, runs / "none-0", *options, "--mask-ratio", 0, "--mask-ratio", 1) == 0
    assert (tmp_path / "out" / "sweep.png").exists()
    assert command(monkeypatch, runs / "none-0", *options) == 0
    assert not (tmp_path / "out" / "sweep.png").exists()
    line = pd.read_csv(tmp_path / "out" / "evaluation.csv").iloc[0]
    assert (line["pictures"], line["mask_ratio"]) == (5, 0.27)


def test_a_file_of_weights(monkeypatch, tmp_path, data, runs):
    weights = ("--weights", runs / "mjp-0.27" / "weights.safetensors", "--model", "unknown_embedding=true")
    about = [part for key, value in MODEL.items() for part in ("--model", f"{key}={value}")]
    options = ("--data", data, "--device", "cpu", "--output", tmp_path / "out")
    assert command(monkeypatch, *weights, *about, *options) == 0
    alone = pd.read_csv(tmp_path / "out" / "evaluation.csv").iloc[0]
    assert command(monkeypatch, runs / "mjp-0.27", *options) == 0
    as_run = pd.read_csv(tmp_path / "out" / "evaluation.csv").iloc[0]
    assert alone["training"] == "trained elsewhere"
    assert alone["difference"] == as_run["difference"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "there is no folder nowhere"),
        (["untrained"], "untrained has no weights yet"),
        (["empty"], "empty holds no training run"),
        (["none-0", "--mask-ratio", "1.5"], "1.5 is not in the range 0<=x<=1"),
        (["none-0", "--mask-ratio", "much"], "'much' is not a valid float"),
        (["none-0", "--data", "no/pictures"], "there is no folder no/pictures"),
        (["none-0", "--data", "empty"], "empty holds no picture"),
        (["narrow"], "but the model knows 2 classes"),
        (["none-0", "none-0"], "none-0 and none-0 are the same training with the same seed"),
        (["none-0", "--limit", "0"], "0 is not in the range"),
        (["none-0", "--device", "gpu"], "'--device': 'gpu' is not one of"),
        ([], "name folders of training runs"),
        (["none-0", "--weights", "x", "--model", "name=deit_micro"], "name folders of training runs"),
        (["--weights", "missing.pth", "--model", "name=deit_micro"], "missing.pth cannot be read"),
        (["none-0", "--output", "none-0"], "is the folder of a training run; name another --output"),
    ],
)
def test_bad_input_is_one_line(monkeypatch, capsys, tmp_path, data, runs, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "none-0").symlink_to(runs / "none-0")
    (tmp_path / "empty").mkdir()
    keep(tmp_path / "untrained", training())
    (tmp_path / "untrained" / "weights.safetensors").unlink()
    if "narrow" in arguments:
        keep(tmp_path / "narrow", training(classes=2))
    given = arguments if "--data" in arguments else [*arguments, "--data", str(data)]
    assert command(monkeypatch, *given) == BAD_INPUT
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def test_seeds_are_one_line_with_their_standard_deviation(data, runs):
    found = [measured(runs / name, data, 0.27) for name in ("none-0", "none-1", "federated")]
    several, single = summarise([run for run, _ in found], [every for _, every in found])
    for name in ("top1", "difference", "consistency", "top1_shuffled"):
        values = [getattr(every[0], name).value for _, every in found[:2]]
        assert several.spreads[name].value == pytest.approx(np.mean(values))
        assert several.spreads[name].deviation == pytest.approx(np.std(values, ddof=1))
    assert (several.seeds, several.spreads["top1"].low, single.seeds, single.spreads["top1"].deviation) == (
        2,
        None,
        1,
        None,
    )
    assert str(single.kind) == "deit_micro, no defence; fedavg, 4 clients, dirichlet 0.3, 25 rounds"


def test_intervals_are_wilsons_and_students(data, runs):
    _, (found,) = measured(runs / "none-0", data, 0.27)
    z, n, p = 1.959964, PICTURES, found.top1.value / 100
    centre, half = (p + z * z / (2 * n)) / (1 + z * z / n), z / (1 + z * z / n)
    half *= math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    assert (found.top1.low, found.top1.high) == pytest.approx((100 * (centre - half), 100 * (centre + half)), rel=1e-4)
    assert (found.difference.high - found.difference.value) == pytest.approx(
        found.difference.value - found.difference.low
    )


def test_kinds_that_read_the_same_say_what_they_differ_in(tmp_path):
    one = training()
    other = one.model_copy(update={"recipe": Recipe(epochs=30, learning_rate=0.001)})
    found = describe_kinds([open_run(keep(tmp_path / "one", one)), open_run(keep(tmp_path / "other", other))])
    assert [kind.training for kind in found] == [
        "central, 30 epochs; recipe.learning_rate 0.0005",
        "central, 30 epochs; recipe.learning_rate 0.001",
    ]


def test_the_same_run_twice_is_refused_wherever_it_lies(tmp_path):
    first = open_run(keep(tmp_path / "a", training()))
    moved = open_run(keep(tmp_path / "b", training().model_copy(update={"device": "cuda"})))
    with pytest.raises(Exception, match="a and b are the same training"):
        refuse_twins([first, moved])


def test_trainings_that_differ_in_their_ratio_stand_side_by_side(data, runs):
    found = [measured(runs / name, data, 0.27, 0.6) for name in ("mjp-0.27", "federated", "none-0", "mjp-0.09")]
    lines = summarise([run for run, _ in found], [every for _, every in found])
    (family,) = find_families(lines)
    assert family.trained_with == [0.0, 0.09, 0.27]
    for ratio, row in family.lines.items():
        assert [(line.ratio, line.kind.defence) for line in row] == [
            (ratio, "none"),
            (ratio, "mjp 0.09"),
            (ratio, "mjp 0.27"),
        ]
    assert family.name == "deit_micro, mjp; central, 30 epochs"
    sheet = build_tables(lines, "pictures")[1]
    assert [row[0] for row in sheet.rows] == [
        "Top-1 %",
        *(f"{name} at {at}" for at in (0.27, 0.6) for name in ("Diff. Norm.", "Consistency %", "Top-1 of x~ %")),
    ]
    assert sheet.rows[3][2].startswith(f"{found[3][1][0].top1_shuffled.value:.1f}\n")


def test_the_papers_row_stands_below_ours(data, runs):
    run, every = measured(runs / "none-0", data, 0.27, 0.5)
    run = replace(run, model=run.model.model_copy(update={"name": "deit_small"}))
    console = Console(width=80, record=True, file=io.StringIO())
    (sheet,) = build_tables(summarise([run], [every]), "pictures")
    print_tables([sheet], console)
    printed = " ".join(console.export_text().split())
    assert "Table 1, deit_small" in printed
    assert sheet.rows[1][3:] == ["79.8", "16.21", "64.3", "36.0"]
    assert sheet.rows[3][3:] == ["79.8", "16.21", "64.3", "-"]


def test_every_kind_is_drawn_with_its_accuracy_on_x_at_ratio_0(data, runs):
    found = [measured(runs / name, data, 0.6, 0.27) for name in ("none-0", "none-1", "mjp-0.27")]
    lines = summarise([run for run, _ in found], [every for _, every in found])
    accuracy, difference, _ = draw_sweep(lines, "pictures").axes
    assert [line.get_label() for line in accuracy.lines] == ["no defence", "mjp 0.27"]
    assert accuracy.lines[0].get_xdata().tolist() == [0.0, 0.27, 0.6]
    assert accuracy.lines[1].get_ydata()[0] == found[2][1][0].top1.value
    assert difference.lines[1].get_ydata().tolist() == [every.difference.value for every in found[2][1][::-1]]


def test_a_broken_model_is_told(monkeypatch, capsys, tmp_path, data):
    folder = keep(tmp_path / "run", training(), spoil=lambda model: model.backbone.head.weight.fill_(3e38))
    options = ("--data", data, "--device", "cpu", "--output", tmp_path / "out")
    assert command(monkeypatch, folder, *options) == 0
    assert "12 of 12 pictures have logits that are not finite" in " ".join(capsys.readouterr().out.split())
    line = pd.read_csv(tmp_path / "out" / "evaluation.csv").iloc[0]
    assert (line["undecided"], line["top1"], line["consistency"]) == (PICTURES, 0, 0)


def test_a_training_that_has_not_ended_is_told(monkeypatch, capsys, tmp_path, data):
    folder = keep(tmp_path / "run", training())
    (folder / "history.csv").write_text("epoch,loss\n1,2.0\n2,1.9\n")
    options = ("--data", data, "--device", "cpu", "--output", tmp_path / "out")
    assert command(monkeypatch, folder, *options) == 0
    assert "run: its training has not ended: 2 of 30 epochs" in capsys.readouterr().out

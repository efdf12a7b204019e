"""The training loop: exact resumption, losses against autograd, schedules against their formulas."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
from dp_accounting.gaussian_mechanism import get_sigma_gaussian
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
from safetensors.torch import load_file
from scipy.special import ndtri

from fedmjp.cli import main
from fedmjp.config import ModelConfig
from fedmjp.data.loading import Batch
from fedmjp.defences.pipeline import Pipeline, read_pipeline
from fedmjp.errors import CheckpointError, ConfigError, DataError, TrainingError
from fedmjp.learning import OFFICIAL_CODE, Learning, Recipe
from fedmjp.models.build import build
from fedmjp.randomness import SeededRandomness
from fedmjp.scenario import TrainingScenario
from fedmjp.training.central import TrainingEvents, open_pictures
from fedmjp.training.central import train as train_on
from fedmjp.training.config import TrainingConfig
from fedmjp.training.history import History
from fedmjp.training.loop import Anchor, Schedule, Trainer
from fedmjp.training.run_folder import TrainingFolder

MODEL = {"name": "deit_micro", "image_size": 32, "patch_size": 4, "classes": 1000}
DAL = {"localisation": "nonlinear"}
MJP = {"unknown_embedding": True, **DAL}
WHOLE = {"epochs": 4, "warmup_epochs": 1, "batch_size": 4, "drop_path": 0.2}
LIGHT = WHOLE | {"mixup": 0, "cutmix": 0, "rand_augment": "", "color_jitter": 0, "random_erasing": 0, "repeats": 1}


class StoppedError(Exception):
    """As by a kill between two epochs."""


def config_of(**changes: object) -> TrainingConfig:
    values = {"model": MODEL | DAL, "defences": ["mjp:mask_ratio=0.3"], "recipe": WHOLE}
    return TrainingConfig.parse(values | changes)


def train(config: TrainingConfig, folder: TrainingFolder, events: TrainingEvents) -> None:
    train_on(config, open_pictures(config.data, config.model.classes), folder, events)


def trainer_of(*defences: str, model: dict | None = None, recipe: dict | None = None) -> Trainer:
    pipeline = read_pipeline(defences)
    network = build(pipeline.change_model(ModelConfig.parse(MODEL | (model or {}))))
    plain = LIGHT | {"drop_path": 0.0, "label_smoothing": 0.0} | (recipe or {})
    return Trainer(
        network,
        Learning.parse({"recipe": plain}),
        pipeline,
        schedule=Schedule(4, 2),
        seed=0,
    )


def batch_of(pictures: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(1000, (pictures,), generator=generator)
    return Batch(torch.rand(pictures, 3, 32, 32, generator=generator), labels, tuple(range(pictures)))


def stop_after(epochs: int) -> TrainingEvents:
    def stop(epoch: int, *_: object) -> None:
        if epoch == epochs:
            raise StoppedError

    return TrainingEvents(on_epoch=stop)


@pytest.mark.parametrize("every", [1, 2])
def test_a_stopped_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path: Path, every: int) -> None:
    config = config_of(checkpoint_every=every)
    whole, parts = TrainingFolder(tmp_path / "whole"), TrainingFolder(tmp_path / "parts")
    for folder in (whole, parts):
        folder.root.mkdir()
    train(config, whole, TrainingEvents())
    with pytest.raises(StoppedError):
        train(config, parts, stop_after(3))
    train(config, parts, TrainingEvents())
    expected, found = load_file(whole.weights), load_file(parts.weights)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    columns = ["epoch", "loss", "localisation", "top1", "learning_rate"]
    rows = [np.loadtxt(f.history, delimiter=",", skiprows=1, usecols=range(3)) for f in (whole, parts)]
    assert np.array_equal(*rows)
    assert whole.history.read_text().splitlines()[0].split(",")[:3] == columns[:3]


@pytest.mark.slow
def test_a_killed_process_goes_on_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [f"model.{key}={value}" for key, value in (MODEL | DAL).items()]
    settings += [f"recipe.{key}={value}" for key, value in (WHOLE | {"epochs": 8}).items()]
    command = ["train", *settings, "--defence", "mjp:mask_ratio=0.3", "--device", "cpu", "--output"]
    parts, whole = TrainingFolder(tmp_path / "parts"), TrainingFolder(tmp_path / "whole")
    # The number of threads decides the last bits; this process has one, too.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = [sys.executable, "-c", "from fedmjp.cli import main; main()"]
    killed = subprocess.Popen([*start, *command, parts.root], stdout=subprocess.DEVNULL, env=environment)
    deadline = time.monotonic() + 120
    while not parts.state.exists() and killed.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    for folder in (parts, whole):
        monkeypatch.setattr(sys, "argv", ["fedmjp", *command, str(folder.root)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        assert ("Going on after epoch" in capsys.readouterr().out) == (folder is parts)
    expected, found = load_file(whole.weights), load_file(parts.weights)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_folder_of_another_configuration_is_refused_and_kept(tmp_path: Path) -> None:
    folder = TrainingFolder(tmp_path)
    with pytest.raises(StoppedError):
        train(config_of(), folder, stop_after(1))
    before = folder.state.read_bytes()
    with pytest.raises(CheckpointError, match="another configuration"):
        train(config_of(seed=1), folder, TrainingEvents())
    assert folder.state.read_bytes() == before


def test_a_run_may_go_on_with_more_reading_processes_but_not_with_another_recipe() -> None:
    assert config_of().digest() == config_of(checkpoint_every=3, recipe=WHOLE | {"workers": 2}).digest()
    assert config_of().digest() != config_of(recipe=WHOLE | {"mixup": 0.5}).digest()
    training = {"recipe": {"warmup_epochs": 1}}
    digest = TrainingScenario.parse({"training": training}).digest_of_run()
    assert digest == TrainingScenario.parse({"training": training | {"round_seconds": 5}}).digest_of_run()
    assert digest == TrainingScenario.parse({"training": training, "data": "elsewhere"}).digest_of_run()
    assert digest != TrainingScenario.parse({"training": training | {"rounds": 11}}).digest_of_run()
    assert digest != TrainingScenario.parse({"training": training, "defences": ["clip"]}).digest_of_run()


def test_a_federated_run_is_of_the_pictures_that_its_manifest_says(tmp_path: Path) -> None:
    folder = TrainingFolder(tmp_path)
    folder.check_pictures("any")
    folder.manifest.write_text('{"kind": "federated", "pictures": "these"}')
    folder.check_pictures("these")
    with pytest.raises(CheckpointError, match="is of a run on other pictures"):
        folder.check_pictures("others")


def test_a_damaged_state_is_told(tmp_path: Path) -> None:
    folder = TrainingFolder(tmp_path)
    with pytest.raises(StoppedError):
        train(config_of(), folder, stop_after(1))
    folder.state.write_bytes(folder.state.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="damaged; --fresh"):
        train(config_of(), folder, TrainingEvents())


def test_labels_outside_the_head_are_told_before_training(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="10 classes"):
        train(config_of(model=MODEL | DAL | {"classes": 10}), TrainingFolder(tmp_path), TrainingEvents())


def test_the_gradient_is_that_of_the_written_out_loss() -> None:
    trainer = trainer_of("mjp:mask_ratio=0.3", model=DAL)
    model, batch = trainer.model, batch_of()
    shown = trainer.prepare(batch, 0, 0)
    puzzle, targets = shown.arranged, shown.targets
    assert shown.puzzled
    found, told = trainer.gradient(batch, 0, 0)
    probabilities = model(puzzle.images, puzzle.mask).softmax(dim=1)
    loss = -probabilities[torch.arange(4), targets].log().mean()
    assert told == pytest.approx(loss.item(), rel=1e-5)
    rows = model.backbone.pos_embed[0, 1:]
    places = [(index // 8, index % 8) for index in range(64)]
    differences = []
    for mask in puzzle.mask:
        kept = [index for index in range(64) if not mask[index]]
        predicted = model.localisation.layers(rows[kept])
        differences.append((predicted - torch.tensor([places[index] for index in kept])).abs().mean())
    total = loss + 0.01 * torch.stack(differences).mean()
    for (name, parameter), expected in zip(
        model.named_parameters(), torch.autograd.grad(total, list(model.parameters())), strict=True
    ):
        assert torch.allclose(found[name], expected, rtol=1e-4, atol=1e-7), (name, parameter.shape)


@pytest.mark.parametrize(("defences", "at_once"), [((), 1), (("mjp:mask_ratio=0.3",), 3), (("mjp:mask_ratio=0.3",), 8)])
def test_parts_of_a_batch_add_up_to_its_gradient(defences: tuple[str, ...], at_once: int) -> None:
    model = DAL if defences else {}
    whole, loss = trainer_of(*defences, model=model).gradient(batch_of(8), 0, 0)
    parts, told = trainer_of(*defences, model=model, recipe={"at_once": at_once}).gradient(batch_of(8), 0, 0)
    assert told == pytest.approx(loss, rel=1e-6)
    assert all((parts[name] - expected).norm() <= 1e-5 * expected.norm() for name, expected in whole.items())


def test_an_epoch_of_plain_steps_is_adamw_by_hand() -> None:
    recipe = {"clip_gradient": 0, "warmup_epochs": 0, "learning_rate": 0.1, "weight_decay": 0.0}
    trainer, other = trainer_of(recipe=recipe), trainer_of(recipe=recipe)
    batch = batch_of()
    trainer.epoch(0, [batch])
    model = other.model
    gradients = torch.autograd.grad(F.cross_entropy(model(batch.images), batch.labels), list(model.parameters()))
    rate = 0.1 * 4 / 512
    for parameter, gradient, (name, found) in zip(
        model.parameters(), gradients, trainer.model.named_parameters(), strict=True
    ):
        expected = parameter - rate * gradient / (gradient.abs() + 1e-8)  # Adam's first step
        assert torch.allclose(found, expected, atol=2e-5), name


def test_decay_is_decoupled_and_leaves_positions_biases_and_norms_alone() -> None:
    recipe = {"clip_gradient": 0, "warmup_epochs": 0, "learning_rate": 0.1, "weight_decay": 0.5}
    decayed, plain = trainer_of(recipe=recipe), trainer_of(recipe=recipe | {"weight_decay": 0.0})
    before = {name: value.detach().clone() for name, value in plain.model.named_parameters()}
    for trainer in (decayed, plain):
        trainer.epoch(0, [batch_of()])
    rate = 0.1 * 4 / 512
    for (name, found), expected in zip(decayed.model.named_parameters(), plain.model.parameters(), strict=True):
        kept = found.ndim == 1 or "pos_embed" in name or "cls_token" in name
        shift = torch.zeros_like(found) if kept else -rate * 0.5 * before[name]
        assert torch.allclose(found, expected + shift, atol=1e-7), name


def test_labels_are_smoothed_over_all_classes() -> None:
    trainer, batch = trainer_of(recipe={"label_smoothing": 0.2}), batch_of()
    logs = trainer.model(batch.images).log_softmax(dim=1)
    expected = -(0.8 * logs[torch.arange(4), batch.labels] + 0.2 * logs.mean(dim=1)).mean()
    assert trainer.losses(batch, 0, 0)[0].item() == pytest.approx(expected.item(), rel=1e-5)


def test_gradients_are_clipped_to_the_norm_of_all_of_them() -> None:
    trainer = trainer_of(recipe={"clip_gradient": 0.01})
    before = [value.detach().clone() for value in trainer.model.parameters()]
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
    trainer.epoch(0, [batch_of()])
    rate = trainer.optimizer.param_groups[0]["lr"]
    steps = [(value - old) / rate for value, old in zip(trainer.model.parameters(), before, strict=True)]
    assert torch.cat([step.flatten() for step in steps]).norm().item() == pytest.approx(0.01, rel=1e-2)


def test_fedprox_adds_its_pull_to_the_gradient() -> None:
    trainer = trainer_of()
    anchor = {name: value.detach() + 0.1 for name, value in trainer.model.named_parameters()}
    loss, localisation = trainer.losses(batch_of(), 0, 0)
    totals = [trainer._total(loss, localisation, 0, each) for each in (None, Anchor(anchor, 0.5))]
    size = sum(value.numel() for value in anchor.values())
    assert (totals[1] - totals[0]).item() == pytest.approx(0.25 * 0.01 * size, rel=1e-3)


def test_the_learning_rate_warms_up_and_falls_as_a_cosine() -> None:
    trainer = trainer_of(recipe={"warmup_epochs": 1, "learning_rate": 0.512, "final_learning_rate": 0.0})
    rates = []
    for epoch in range(4):
        for step in range(2):
            trainer._scheduler.step_update(epoch * 2 + step)
            rates.append(trainer.optimizer.param_groups[0]["lr"])
    top = 0.512 * 4 / 512
    first = 5e-7 * 4 / 512
    expected = [first, (first + top) / 2] + [top * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(2, 8)]
    assert rates == pytest.approx(expected, rel=1e-6)


def test_the_weight_of_localisation_follows_the_official_schedule() -> None:
    network = build(ModelConfig.parse(MODEL | MJP))
    recipe = Recipe.parse(LIGHT | {"epochs": 30, "warmup_epochs": 5})
    learning = Learning(recipe=recipe, puzzle=OFFICIAL_CODE)
    trainer = Trainer(network, learning, Pipeline(), schedule=Schedule(30, 2), seed=0)
    warm = np.linspace(0, 0.01, 5)
    after = 0.005 + 0.5 * (0.01 - 0.005) * (1 + np.cos(np.pi * np.arange(25) / 25))
    found = [trainer.localisation_weight(epoch) for epoch in range(30)]
    assert found == pytest.approx(np.concatenate([warm, after]).tolist())
    assert trainer_of(model=MJP).localisation_weight(3) == 0.01


@pytest.mark.parametrize("names", [("index", "index_embedding"), ("unknown", "unknown_embedding")])
def test_what_mjp_adds_is_trained(names: tuple[str, str]) -> None:
    trainer = trainer_of("mjp:mask_ratio=0.5", model={"index_embedding": True})
    before = dict(trainer.model.named_parameters())[names[1]].detach().clone()
    trainer.epoch(0, [batch_of()])
    assert not torch.equal(dict(trainer.model.named_parameters())[names[1]], before)


def test_a_loss_that_is_not_finite_ends_the_run() -> None:
    trainer = trainer_of(recipe={"learning_rate": 1000, "batch_size": 2**40, "warmup_epochs": 0, "clip_gradient": 0})
    with pytest.raises(TrainingError, match=r"lower recipe\.learning_rate"):
        trainer.epoch(0, [batch_of()] * 4)


def test_a_single_picture_cannot_train_batch_normalisation() -> None:
    network = build(ModelConfig(name="resnet50", image_size=32, patch_size=16, classes=10))
    trainer = Trainer(network, Learning.parse({"recipe": LIGHT}), Pipeline(), schedule=Schedule(4, 2), seed=0)
    with pytest.raises(TrainingError, match="batch of one picture"):
        trainer.epoch(0, [batch_of(1)])
    parts = Learning.parse({"recipe": LIGHT | {"at_once": 2}})
    trainer = Trainer(network, parts, Pipeline(), schedule=Schedule(4, 2), seed=0)
    with pytest.raises(TrainingError, match=r"a batch in parts \(at_once=2\)"):
        trainer.epoch(0, [batch_of(4)])


def test_a_history_cut_off_by_a_kill_is_read_as_far_as_it_is_whole(tmp_path: Path) -> None:
    history = History(tmp_path / "history.csv", tmp_path / "tensorboard")
    for text, rows in (("", 0), ("epoch,lo", 0), ("epoch,loss\n", 0), ("epoch,loss\n1,2.5\n1", 1)):
        (tmp_path / "history.csv").write_text(text)
        assert len(history.rows()) == rows
    history.keep_until(1)
    assert (tmp_path / "history.csv").read_text() == "epoch,loss\n1,2.5\n"
    history.keep_until(0)
    assert not (tmp_path / "history.csv").exists()


def test_drop_path_and_mixup_depend_on_seed_epoch_and_step_alone() -> None:
    model = build(ModelConfig.parse(MODEL), drop_path=0.5).train()
    trainer = Trainer(model, Learning.parse({"recipe": WHOLE}), Pipeline(), schedule=Schedule(4, 2), seed=0)
    first = trainer.losses(batch_of(), 1, 0)[0]
    torch.rand(17)
    assert trainer.losses(batch_of(), 1, 0)[0] == first
    assert trainer.losses(batch_of(), 1, 1)[0] != first


def test_the_gradients_of_single_pictures_are_those_that_a_defence_clips() -> None:
    """Against one picture at a time: clipped to the norm, summed, divided by the batch; the noise is known."""
    trainer, plain = trainer_of("dp_sgd:clipping_norm=0.5,batch_size=4"), trainer_of()
    batch = batch_of()
    found, _ = trainer.gradient(batch, 0, 0)
    (defence,) = trainer._pipeline.defences
    source: SeededRandomness = trainer.puzzles.randomness(0, 0).of("step", 0).of(0)
    expected = {name: torch.zeros_like(value) for name, value in found.items()}
    for place in range(4):
        own = slice(place, place + 1)
        one = Batch(batch.images[own], batch.labels[own], batch.indices[own])
        single, _ = plain.gradient(one, 0, 0)
        norm = math.sqrt(sum(float(value.double().square().sum()) for value in single.values()))
        for name, value in single.items():
            expected[name] += value * min(1.0, 0.5 / norm) / 4
    for name, value in found.items():
        bits = source.bits(name, value.shape).numpy()
        normal = -ndtri(((bits >> 1 & 2**63 - 1) + 0.5) * 2.0**-64) * (1 - 2 * (bits & 1))
        noise = defence.multiplier * 0.5 / 4 * torch.from_numpy(normal).float()
        assert torch.allclose(value - noise, expected[name], atol=1e-5), name


def test_an_epoch_under_differential_privacy_moves_the_weights_and_is_repeatable() -> None:
    found = []
    for _ in range(2):
        trainer = trainer_of("dp_sgd:epsilon=50,batch_size=4", recipe={"learning_rate": 0.1, "warmup_epochs": 0})
        report = trainer.epoch(0, [batch_of()])
        assert math.isfinite(report.loss)
        found.append({name: value.detach().clone() for name, value in trainer.model.named_parameters()})
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    before = dict(trainer_of().model.named_parameters())
    assert not torch.equal(found[0]["backbone.head.weight"], before["backbone.head.weight"])


def test_epsilon_is_of_all_epochs_of_a_central_run(tmp_path: Path) -> None:
    config = config_of(defences=["dp_sgd:epsilon=5"], recipe=LIGHT | {"epochs": 2})
    train(config, TrainingFolder(tmp_path), TrainingEvents())
    first, last = History(tmp_path / "history.csv", tmp_path / "tensorboard").rows()["epsilon"]
    accountant = PLDAccountant()
    steps = 2 * len(open_pictures(config.data, 1000).train) // 4  # of four of the eight bundled pictures each
    accountant.compose(SelfComposedDpEvent(GaussianDpEvent(math.sqrt(steps) * get_sigma_gaussian(5, 1e-5)), steps // 2))
    assert first == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)
    assert last == pytest.approx(5, rel=1e-6)


def test_what_is_withheld_is_frozen_whatever_the_decay() -> None:
    trainer = trainer_of("withhold:roles=patch_embedding", recipe={"weight_decay": 0.5, "learning_rate": 0.1})
    before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    trainer.epoch(0, [batch_of()] * 2)
    kept = {name for name, value in trainer.model.named_parameters() if torch.equal(value, before[name])}
    assert kept == {"backbone.patch_embed.proj.weight", "backbone.patch_embed.proj.bias"}
    assert set(trainer.gradient(batch_of(), 0, 0)[0]) == set(before) - kept
    later = Trainer(trainer.model, Learning.parse({"recipe": LIGHT}), Pipeline(), schedule=Schedule(4, 2), seed=0)
    assert set(later.gradient(batch_of(), 0, 0)[0]) == set(before), "the next trainer of the model has it all"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"defences": ["clip"]}, "clip acts on what leaves a client, and nothing leaves here"),
        ({"defences": ["secure_sum"]}, "secure_sum acts on what leaves a client"),
        ({"defences": ["dp_sgd"]}, "dp_sgd protects single pictures, and mixed ones are of two"),
        ({"defences": ["mjp:mask_ratio=0.01"]}, "mask ratio 0.01 of 64 patches moves none"),
        ({"defences": ["mjpp"]}, "Unknown defence 'mjpp'"),
        (
            {"recipe": {"epochs": 10}},
            "leaves nothing of epochs=10: set a smaller recipe.warmup_epochs",
        ),
        ({"puzzle": {"probability": 0}}, "probability = 0"),
        ({"recpie": {}}, "did you mean 'recipe'"),
    ],
)
def test_configurations_that_make_no_sense_are_told(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainingConfig.parse({"model": MODEL} | values)

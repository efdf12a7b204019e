"""Servers that change weights: what they send, what their uploads show, and that every wire carries the same."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from fedmjp.attacks import ATTACKS
from fedmjp.attacks.adversary import Adversary
from fedmjp.attacks.token_imprint import by_picture, read_tokens
from fedmjp.benchmarks.campaign.spec import Campaign
from fedmjp.benchmarks.federation.simulation import RunFolder
from fedmjp.benchmarks.plan.experiment import Experiment
from fedmjp.benchmarks.plan.planning import plan
from fedmjp.cli import app
from fedmjp.data.pictures import LabelledPicture, PictureEntry
from fedmjp.data.selection import select_for
from fedmjp.errors import ConfigError
from fedmjp.exchange import Exchange
from fedmjp.metrics.pictures import psnr
from fedmjp.models import names
from fedmjp.models.build import blueprint, build_vit, with_weights
from fedmjp.patches import to_patches
from fedmjp.private import PrivateBatch
from fedmjp.records import Upload, record_name
from fedmjp.scenario import Scenario, make_run_config
from fedmjp.server.loop import Federation
from fedmjp.threat import SCOPE, ThreatModel
from fedmjp.training.run_folder import TrainingFolder
from fedmjp.updates import gradient
from fedmjp.wire import evaluator_folder, uploads_folder
from tests.boards import attack_board
from tests.conftest import SMALL, small_scenario
from tests.federations import MICRO, PLAIN, InProcess, play
from tests.federations import scenario_of as federation_of

SERVERS = ["class_fishing", "feature_fishing", "suppression", "token_imprint"]


def scenario_of(server: str, batch: int = 4, **values: object) -> Scenario:
    return small_scenario(server=server, batch_size=batch, pictures_per_client=batch, **values)


def pictures_of(scenario: Scenario, labels: list[int] | None = None) -> list[LabelledPicture]:
    """As many as are behind one upload; labels may be others than their own."""
    selection = select_for(scenario)
    loaded = [selection.load(entry) for batch in selection.batches(scenario)[:1] for entry in batch]
    return [replace(picture, label=label) for picture, label in zip(loaded, labels, strict=True)] if labels else loaded


def attacked(scenario: Scenario, made: Exchange, attack: str = "patch_embedding") -> Tensor:
    """What an attack recovers, (pictures, 3, size, size)."""
    model = with_weights(build_vit(scenario.network), made.changed[0])
    adversary = Adversary(model, scenario.threat, 0)
    return adversary.reconstruct(attack, [made.upload], {}, on_progress=lambda *_: None)[0].images


def scores(images: Tensor, pictures: list[LabelledPicture]) -> list[float]:
    return [float(psnr(images, picture.image[None])[0]) for picture in pictures]


@pytest.mark.parametrize(
    ("server", "defences", "steps"),
    [
        *((server, defences, {}) for server in SERVERS for defences in ("none", ["mjp", "secure_sum:clients=2"])),
        ("class_fishing", "mjp", {"update": "delta", "local_optimiser": "adamw", "local_learning_rate": 1e-3}),
    ],
    ids=str,
)
def test_the_loop_sends_and_records_what_direct_mode_computes(
    server: str, defences: object, steps: dict[str, object], tmp_path: Path
) -> None:
    scenario = Scenario.parse(
        {
            "model": MICRO | {"classes": 1000}, "clients": 2, "pictures_per_client": 4, "batch_size": 2,
            "defences": defences, "server": server, **steps,
        }
    )  # fmt: skip
    folder, grid = RunFolder(tmp_path), InProcess(scenario, TrainingFolder(tmp_path))
    grid.run = make_run_config([scenario], uploads_folder=str(folder.uploads), evaluator_folder=str(folder.evaluator))
    assert Federation(grid, scenario, grid.run).play() == []  # type: ignore[arg-type]
    selection = select_for(scenario)
    for batch in selection.batches(scenario):
        paths = folder.index(scenario)[tuple(entry.name for entry in batch)]
        assert len(paths) == scenario.probes + 1
        direct = scenario.exchange([selection.load(entry) for entry in batch])
        _, recorded = folder.record(scenario, paths[-1])
        assert recorded.weights == direct.upload.weights
        assert all(torch.equal(recorded.tensors[name], tensor) for name, tensor in direct.upload.tensors.items())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_fished_batch_leaves_the_gradient_of_one_picture(smoothing: float) -> None:
    """Against torch's own gradient of that picture alone, under the weights that were sent."""
    scenario = scenario_of("class_fishing", label_smoothing=smoothing)
    pictures = pictures_of(scenario, [7, 3, 9, 7])
    made = scenario.exchange(pictures)
    model = with_weights(build_vit(scenario.network), made.changed[0])
    loss = torch.nn.functional.cross_entropy(
        model(pictures[1].image[None]), torch.tensor([3]), label_smoothing=smoothing
    )
    (alone,) = torch.autograd.grad(loss, [model.get_parameter(names.PATCH_WEIGHT)])
    uploaded = 4 * made.upload.tensors[names.PATCH_WEIGHT]
    assert float((uploaded - alone).norm() / alone.norm()) < 1e-4
    assert scores(attacked(scenario, made), pictures)[1] > 60
    assert scenario.wanted([7, 3, 9, 7]) == [1], "the first label that occurs once"


def test_breaching_reads_the_feature_of_the_wanted_picture_from_a_fished_upload() -> None:
    breaching = pytest.importorskip("breaching.cases.malicious_modifications.classattack_utils")
    scenario = scenario_of("class_fishing:class=9")
    pictures = pictures_of(scenario, [7, 3, 9, 7])
    made = scenario.exchange(pictures)
    head = [made.upload.tensors[name] for name in (names.HEAD_WEIGHT, names.HEAD_BIAS)]
    feature = breaching.reconstruct_feature({"gradients": head}, 9)
    expected = build_vit(scenario.network).features(pictures[2].image[None])[0]
    assert torch.allclose(feature, expected, atol=1e-4)


def test_a_class_is_fished_out_of_a_sum_and_out_of_weights_after_an_epoch() -> None:
    summed = scenario_of("class_fishing", batch=2, defences="secure_sum:clients=2", clients=2)
    pictures = pictures_of(summed, [7, 3, 9, 7])
    assert scores(attacked(summed, summed.exchange(pictures)), pictures)[1] > 60
    epoch = scenario_of(
        "class_fishing", update="delta", local_steps=2, local_batch_size=2, local_momentum=0.9,
    )  # fmt: skip
    assert scores(attacked(epoch, epoch.exchange(pictures)), pictures)[1] > 55
    decayed = scenario_of("class_fishing", update="delta", local_weight_decay=0.05)
    assert scores(attacked(decayed, decayed.exchange(pictures)), pictures)[1] > 55


def test_feature_fishing_takes_one_of_two_pictures_of_a_class() -> None:
    scenario = scenario_of("feature_fishing")
    pictures = pictures_of(scenario, [7, 3, 9, 7])
    best, other = sorted(scores(attacked(scenario, scenario.exchange(pictures)), pictures)[k] for k in (0, 3))[::-1]
    assert best > 60 > 20 > other
    assert scenario.wanted([7, 3, 9, 7]) == [0, 3]


def test_suppression_makes_a_sum_the_upload_of_the_first_client() -> None:
    summed = scenario_of("suppression", batch=1, defences="secure_sum:clients=4", clients=4)
    alone = scenario_of("suppression", batch=1, clients=4)
    pictures = pictures_of(summed)
    sent, expected = summed.exchange(pictures).upload.tensors, alone.exchange(pictures[:1]).upload.tensors
    mixed = [name for name in sent if not torch.allclose(4 * sent[name], expected[name], rtol=1e-4, atol=1e-9)]
    assert mixed == [names.HEAD_BIAS]
    steps = {"update": "delta", "local_steps": 3, "local_learning_rate": 0.1}
    after = scenario_of("suppression", batch=1, defences="secure_sum:clients=2", clients=2, **steps)
    expected = scenario_of("suppression", batch=1, **steps).exchange(pictures[:1]).upload.tensors
    sent = after.exchange(pictures[:2]).upload.tensors
    assert all(torch.allclose(2 * sent[name], expected[name], atol=1e-7) for name in sent if name != names.HEAD_BIAS)


def test_printed_tokens_are_given_in_their_pictures_and_places() -> None:
    """As many as are alone in a bin where tokens fall anywhere, and not one that is wrong."""
    scenario = scenario_of("token_imprint")
    pictures = pictures_of(scenario)
    made = scenario.exchange(pictures)
    model = with_weights(build_vit(scenario.network), made.changed[0])
    printed = read_tokens(made.upload, model)
    images = torch.stack([picture.image for picture in pictures])
    truth = to_patches((images - model.mean) / model.std, model.patch_size).double()
    embedding = model.get_parameter(names.PATCH_WEIGHT).detach().flatten(1).double()
    kept = truth @ embedding.T @ torch.linalg.pinv(embedding).T
    placed = 0
    for members in by_picture(printed, 4):
        errors = (printed.patches[members] - kept[:, printed.places[members]]).square().mean(dim=2)
        picture = int(errors.median(dim=1).values.argmin())
        assert float(errors[picture].max()) < 1e-3, "a wrong patch is given"
        placed += len(members)
    assert placed > 0.85 * 4 * 64


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"server": "class_fishing", "defences": "withhold:roles=head"}, "head, which withhold keeps at the client"),
        ({"server": "class_fishing:class=1000"}, "class 1000 was asked for, the model knows 1000"),
        ({"server": "feature_fishing", "label_smoothing": 0.1}, "label smoothing is 0.1"),
        ({"server": "feature_fishing", "crop_scale": 0.5}, "clients show other crops of it in every upload"),
        ({"server": "token_imprint", "update": "delta"}, "drowns in the rounding"),
        ({"server": "token_imprint", "name": "deit_tiny_without_positions"}, "does not have"),
    ],
)
def test_what_a_scenario_cannot_carry_is_refused_at_planning(values: dict[str, object], reason: str) -> None:
    scenario = small_scenario(**values)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=reason):
        scenario.require_server(blueprint(scenario.network))
    experiment = Experiment.parse({"scenario": scenario, "attacks": [{"name": "grey"}], "settings": ["a"]})
    (cell,) = plan([experiment], [[(PictureEntry("one", 0, "0"),)]], uploads="direct").cells
    assert cell.refusal is not None
    assert reason in cell.refusal


def test_only_wanted_pictures_are_planned_and_attacks_are_asked_about_one_picture() -> None:
    scenario = scenario_of("class_fishing")
    tried = [{"name": name} for name in ("patch_embedding", "gradient_matching", "token_imprint")]
    experiment = Experiment.parse({"scenario": scenario, "attacks": tried, "settings": ["a"]})
    batch = tuple(PictureEntry(f"{place}.png", label, "0") for place, label in enumerate([7, 3, 9, 7]))
    planned = plan([experiment], [[batch]], uploads="direct")
    assert [trial.picture.name for trial in planned.tasks] == ["1.png"]
    exact, matching, imprint = planned.cells
    assert (exact.refusal, exact.caveat, exact.left_out) == (None, None, 0), "one picture is no mixture"
    assert "all pictures of an upload" in str(matching.refusal)
    assert "not those of class_fishing" in str(imprint.refusal)


def test_an_honest_threat_model_reads_as_before() -> None:
    assert "server" not in ThreatModel().model_dump()
    assert "sends nothing malicious" in ThreatModel().sentence()
    malicious = ThreatModel.parse({"server": "class_fishing:class=3", "defences": "gaussian"})
    assert "sends weights of its own making (class_fishing:class=3:" in malicious.sentence()
    assert SCOPE in malicious.sentence()
    assert malicious.undefended.server == malicious.server
    assert malicious.digest() != ThreatModel.parse({"defences": "gaussian"}).digest()


def test_a_campaign_names_a_server_and_a_table_says_which(tmp_path: Path) -> None:
    grid = {"models": ["deit_tiny"], "defences": ["none"], "attacks": ["grey"], "settings": ["a"]}
    campaign = Campaign.parse({"name": "fishing", "grids": [grid | {"server": {"name": "class_fishing", "class": 3}}]})
    (experiment,) = campaign.experiments(device="cpu")
    assert experiment.scenario.threat.server is not None
    assert experiment.scenario.threat.server.text == "class_fishing:class=3"
    size = ["--model", "deit_tiny", "--image-size", str(SMALL["image_size"]), "--patch-size", str(SMALL["patch_size"])]
    asked = ["attack", "--attack", "patch_embedding", "--server", "class_fishing", "--batch-size", "4", "--limit", "4"]
    result = CliRunner().invoke(app, [*asked, *size, "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert " ".join(SCOPE.split()) in " ".join(result.output.split())
    rows = attack_board(tmp_path).set_index("attack")
    assert rows.loc["patch_embedding", "threat_server"] == "class_fishing"
    assert (rows.loc["patch_embedding", "n"], rows.loc["patch_embedding", "exact"]) == (1, 1.0)


def test_an_unknown_server_is_refused_with_the_nearest_names() -> None:
    result = CliRunner().invoke(app, ["record", "--server", "class_fisher"])
    assert result.exit_code != 0
    assert "class_fishing" in str(result.exception or result.output)


def test_steps_with_momentum_on_parts_of_a_batch_are_those_of_torch() -> None:
    values = {"update": "delta", "local_steps": 3, "local_momentum": 0.9, "local_batch_size": 2}
    scenario = small_scenario("deit_micro", batch_size=4, pictures_per_client=4, local_learning_rate=0.05, **values)
    pictures = pictures_of(scenario)
    model, sent = build_vit(scenario.network), scenario.exchange(pictures).upload.tensors
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for first in (0, 2, 0):
        part = pictures[first : first + 2]
        logits = model(torch.stack([picture.image for picture in part]))
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(logits, torch.tensor([picture.label for picture in part])).backward()
        optimiser.step()
    for name, value in model.named_parameters():
        assert torch.allclose(value - before[name], sent[name], atol=1e-6), name
    weights = Counter({step: sum(0.9**later for later in range(3 - step)) for step in range(3)})
    assert scenario.threat.gradients_in_delta == pytest.approx(sum(weights.values()))
    assert "momentum 0.9" in scenario.threat.sentence()
    refusal = ATTACKS.get("gradient_matching")().refusal(model, scenario.threat)
    assert refusal is not None
    assert "not momentum" in refusal


def test_a_training_run_is_changed_in_recorded_rounds_alone_and_learns_nothing_from_them(tmp_path: Path) -> None:
    recipe = PLAIN | {"label_smoothing": 0, "drop_path": 0}
    asked = {"strategy": "fedsgd", "rounds": 2, "records": (2,), "server_learning_rate": 0.1, "recipe": recipe}
    honest, _ = play(federation_of(**asked | {"rounds": 1, "records": (1,)}), tmp_path / "honest")
    sums = {"defences": "secure_sum:clients=2", "server": "suppression"}
    weights, grid = play(federation_of(**asked, **sums), tmp_path / "suppressed")
    assert all(torch.allclose(weights[name], honest[name], atol=1e-7) for name in honest)
    (scenario,) = grid.scenarios
    folder = uploads_folder(TrainingFolder(tmp_path / "suppressed").records, 2) / scenario.folder
    private = evaluator_folder(TrainingFolder(tmp_path / "suppressed").records, 2) / scenario.folder
    model = build_vit(scenario.network)
    model.load_state_dict(weights)
    alone = gradient(model, PrivateBatch.load(private / record_name(2, 0)))
    sent = Upload.load(folder / record_name(2, 0)).tensors
    assert torch.allclose(2 * sent[names.PATCH_WEIGHT], alone[names.PATCH_WEIGHT], rtol=1e-3, atol=1e-6)
    with pytest.raises(ConfigError, match="state the class"):
        play(federation_of(**asked, server="class_fishing"), tmp_path / "fished")

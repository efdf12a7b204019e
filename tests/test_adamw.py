"""Clients that take a step of AdamW: torch's own, what it shows of a gradient, and a server that makes it show all."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedmjp.attacks import ATTACKS
from fedmjp.attacks.adamw import gradient_behind, magnitude, moves
from fedmjp.attacks.adversary import Adversary
from fedmjp.data.pictures import LabelledPicture
from fedmjp.data.selection import select_for
from fedmjp.errors import AttackFailedError, AttackNotApplicableError, ConfigError
from fedmjp.exchange import Exchange
from fedmjp.metrics.pictures import psnr
from fedmjp.models import names
from fedmjp.models.build import blueprint, build_vit, with_weights
from fedmjp.records import Disclosure, Features, Reconstruction, Upload
from fedmjp.scenario import Scenario
from fedmjp.threat import ThreatModel
from tests.conftest import SMALL, small_model, small_scenario

STEP = {"update": "delta", "local_optimiser": "adamw", "local_learning_rate": 1e-3, "local_weight_decay": 0.05}
LABELS = [7, 3, 9, 7]


def scenario_of(batch: int = 4, **values: object) -> Scenario:
    return small_scenario(**{**STEP, "batch_size": batch, "pictures_per_client": batch, **values})  # type: ignore[arg-type]


def pictures_of(scenario: Scenario) -> list[LabelledPicture]:
    selection = select_for(scenario)
    (batch,) = selection.batches(scenario)[:1]
    loaded = [selection.load(entry) for entry in batch]
    return [replace(picture, label=label) for picture, label in zip(loaded, LABELS, strict=False)]


def attacked(scenario: Scenario, made: Exchange, attack: str) -> Disclosure:
    model = with_weights(build_vit(scenario.network), made.changed[0] if made.changed else {})
    adversary = Adversary(model, scenario.threat, 0)
    return adversary.reconstruct(attack, [made.upload], {}, on_progress=lambda *_: None)[0]


def decibels(disclosure: Disclosure, picture: LabelledPicture) -> float:
    assert isinstance(disclosure, Reconstruction)
    return float(psnr(disclosure.images, picture.image[None])[0])


@pytest.mark.parametrize("steps", [1, 3])
def test_delta_equals_torchs_adamw(steps: int) -> None:
    scenario = scenario_of(local_steps=steps)
    pictures, model = pictures_of(scenario), build_vit(scenario.network)
    sent = scenario.exchange(pictures).upload.tensors
    trained = copy.deepcopy(model)
    optimiser = torch.optim.AdamW(trained.parameters(), lr=1e-3, weight_decay=0.05)
    for _ in range(steps):
        optimiser.zero_grad()
        F.cross_entropy(trained(torch.stack([picture.image for picture in pictures])), torch.tensor(LABELS)).backward()
        optimiser.step()
    before = dict(model.named_parameters())
    for name, parameter in trained.named_parameters():
        assert torch.allclose(sent[name], (parameter - before[name]).detach(), atol=1e-7), name


def stepped(gradient: Tensor, model: torch.nn.Module, name: str) -> Upload:
    """What torch's AdamW makes of a gradient of one tensor."""
    weight = torch.nn.Parameter(model.get_parameter(name).detach().clone())
    before, weight.grad = weight.detach().clone(), gradient
    torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.05).step()
    return Upload({name: weight.detach() - before}, "delta", 1, 1, 0, "")


def test_a_step_bounds_every_entry_of_its_gradient_and_shows_small_ones() -> None:
    model, threat = small_model(), ThreatModel.parse(STEP)
    name = names.PATCH_WEIGHT
    generator = torch.Generator().manual_seed(0)
    shape = model.get_parameter(name).shape
    sizes = 10 ** (10 * torch.rand(shape, generator=generator) - 12)  # 1e-12 to 1e-2
    gradient = sizes * torch.randn(shape, generator=generator).sign()
    gradient[0] = 0
    sent = stepped(gradient, model, name)
    moved, shown = moves(sent, name, model, threat), gradient_behind(sent, model, threat, signs=True).tensors[name]
    share = moved.share.abs()
    some = gradient != 0
    assert bool((magnitude((share - moved.error).clamp(min=0), threat) <= sizes)[some].all())
    assert bool((magnitude(share + moved.error, threat) >= sizes)[some].all())
    assert not shown[0].any(), "weight decay alone is no gradient"
    near = (sizes > 1e-9) & (sizes < 1e-6) & some
    assert float((shown / gradient - 1).abs()[near].max()) < 2e-3
    assert bool((shown.sign() == gradient.sign())[(sizes > 1e-7) & some].all())


def test_a_gradient_that_a_step_hides_is_not_taken_for_one() -> None:
    model, threat = small_model(), ThreatModel.parse(STEP)
    gradient = 0.1 * torch.randn(
        model.get_parameter(names.PATCH_WEIGHT).shape, generator=torch.Generator().manual_seed(0)
    )
    sent = stepped(gradient, model, names.PATCH_WEIGHT)
    with pytest.raises(AttackFailedError, match=r"too little of the gradient of backbone.patch_embed.*sign"):
        gradient_behind(sent, model, threat)
    assert torch.equal(
        gradient_behind(sent, model, threat, signs=True).tensors[names.PATCH_WEIGHT].sign(), gradient.sign()
    )


def test_before_an_honest_server_labels_show_and_pictures_do_not() -> None:
    scenario = scenario_of()
    made = scenario.exchange(pictures_of(scenario))
    told = attacked(scenario, made, "labels")
    assert isinstance(told, Features)
    assert set(told.labels.tolist()) == {3, 7, 9}
    with pytest.raises(AttackFailedError, match="a step of AdamW shows too little"):
        attacked(scenario, made, "patch_embedding")


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_picture_is_fished_out_of_a_batch_and_labels_are_counted(smoothing: float) -> None:
    scenario = scenario_of(server="class_fishing", label_smoothing=smoothing)
    pictures = pictures_of(scenario)
    made = scenario.exchange(pictures)
    assert made.changed[0][names.HEAD_WEIGHT][3].any(), "the first label that occurs once, and 7 occurs twice"
    model = with_weights(build_vit(scenario.network), made.changed[0])
    loss = F.cross_entropy(model(pictures[1].image[None]), torch.tensor([3]), label_smoothing=smoothing)
    (alone,) = torch.autograd.grad(loss, [model.get_parameter(names.PATCH_WEIGHT)])
    server = scenario.server.build()  # type: ignore[union-attr]
    shown = server.isolate(made.upload, model, scenario.threat).tensors[names.PATCH_WEIGHT]
    assert float((4 * shown - alone).norm() / alone.norm()) < 1e-4
    assert decibels(attacked(scenario, made, "patch_embedding"), pictures[1]) > 50


def test_the_probe_counts_labels_where_classes_are_fewer_than_dimensions() -> None:
    scenario = scenario_of(model={"name": "deit_micro", "image_size": 32, "patch_size": 8, "classes": 10})
    fishing = Scenario.parse({**scenario.model_dump(), "server": "class_fishing"})
    server = fishing.server.build()  # type: ignore[union-attr]
    whole = pictures_of(scenario_of())
    pictures = [replace(picture, image=picture.image[:, ::2, ::2].contiguous()) for picture in whole]
    model = build_vit(fishing.network)
    sent = scenario.exchange(pictures, model=with_weights(model, server.probe(model, fishing.threat))).upload
    assert server.learn(sent, model, fishing.threat) == (3, 7, 7, 9)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    ("steps", "least"),
    [
        ({"local_steps": 2, "local_batch_size": 2}, 50),  # an epoch
        ({"local_steps": 6, "local_batch_size": 2}, 25),  # three
        ({"local_steps": 5}, 25),  # again and again
    ],
    ids=["epoch", "epochs", "steps"],
)
def test_a_picture_is_fished_out_of_the_weights_after_several_steps(
    steps: dict[str, int], least: float, smoothing: float
) -> None:
    scenario = scenario_of(server="class_fishing", label_smoothing=smoothing, **steps)
    pictures = pictures_of(scenario)
    made = scenario.exchange(pictures)
    assert made.changed[0][names.HEAD_WEIGHT][3].any(), "the first label that occurs once, and 7 occurs twice"
    assert decibels(attacked(scenario, made, "patch_embedding"), pictures[1]) > least


def test_no_step_makes_a_feature_or_leaves_label_smoothing() -> None:
    scenario = scenario_of(server="class_fishing", label_smoothing=0.1, local_steps=5)
    pictures = pictures_of(scenario)
    trained = with_weights(build_vit(scenario.network), scenario.exchange(pictures).changed[0])
    images = torch.stack([picture.image for picture in pictures])
    optimiser = torch.optim.AdamW(trained.parameters(), lr=1e-3, weight_decay=0.05)
    for _ in range(5):
        optimiser.zero_grad()
        F.cross_entropy(trained(images), torch.tensor(LABELS), label_smoothing=0.1).backward()
        optimiser.step()
    assert not trained.features(images).any()
    target = 0.1 / scenario.model.classes
    assert trained(images).softmax(dim=1)[:, 3].tolist() == pytest.approx([target] * 4, rel=0.05)


def test_an_epoch_without_the_tensors_that_tell_its_steps_is_not_read() -> None:
    scenario = scenario_of(server="class_fishing", defences="withhold", local_steps=2, local_batch_size=2)
    made = scenario.exchange(pictures_of(scenario))
    model = with_weights(build_vit(scenario.network), made.changed[0])
    with pytest.raises(AttackFailedError, match="the upload lacks backbone"):
        scenario.server.build().isolate(made.upload, model, scenario.threat)  # type: ignore[union-attr]


@pytest.mark.parametrize(("steps", "classes", "smoothing"), [(4, 1000, 0.0), (16, 10, 0.1)])
def test_the_dead_head_of_a_probe_says_how_often_labels_come_in_epochs(
    steps: int, classes: int, smoothing: float
) -> None:
    scenario = scenario_of(
        local_steps=steps,
        local_batch_size=2,
        label_smoothing=smoothing,
        model={"name": "deit_tiny", "classes": classes, **SMALL},
    )
    server = Scenario.parse({**scenario.model_dump(), "server": "class_fishing"}).server.build()  # type: ignore[union-attr]
    model, pictures = build_vit(scenario.network), pictures_of(scenario_of())
    for labels, told in (([7, 3, 9, 7], (3, 7, 7, 9)), ([5, 5, 1, 2], (1, 2, 5, 5)), ([6, 8, 8, 6], (6, 6, 8, 8))):
        batch = [replace(picture, label=label) for picture, label in zip(pictures, labels, strict=True)]
        sent = scenario.exchange(batch, model=with_weights(model, server.probe(model, scenario.threat))).upload
        assert server.learn(sent, model, scenario.threat) == told


def test_masked_rows_are_empty_after_an_epoch_with_weight_decay() -> None:
    scenario = scenario_of(
        server="class_fishing", defences="mjp", uploads_per_picture=6, local_steps=2, local_batch_size=2
    )
    pictures = pictures_of(scenario)
    made = scenario.exchange(pictures)
    assert decibels(attacked(scenario, made, "mjp_intersection"), pictures[1]) > 40
    assert decibels(attacked(scenario, made, "mjp_prior"), pictures[1]) < 40


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"local_steps": 5}, "reads one step of AdamW, not 5"),
        ({"defences": "gaussian:noise=1e-3"}, "to their last digits, which gaussian changes"),
        ({"defences": "secure_sum:clients=2", "clients": 2}, "which secure_sum changes"),
    ],
)
def test_steps_that_do_not_come_apart_are_refused(values: dict[str, object], reason: str) -> None:
    scenario = scenario_of(2, **values)
    model = build_vit(scenario.network)
    for name in ("labels", "class_token"):
        refusal = ATTACKS.get(name)().refusal(model, scenario.threat)
        assert refusal is not None
        assert reason in refusal
    assert ATTACKS.get("grey")().refusal(model, scenario.threat) is None


def test_a_bound_is_of_gradients_alone() -> None:
    scenario = scenario_of(1)
    model, made = build_vit(scenario.network), scenario.exchange(pictures_of(scenario)[:1])
    attack = ATTACKS.get("oracle_patch_embedding")()
    with pytest.raises(AttackNotApplicableError, match="not beside a step of AdamW"):
        attack.run([made.upload], model, scenario.threat, generator=torch.Generator())


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"update": "gradient"}, "local_optimiser adamw is of local steps: set update to delta"),
        ({"local_momentum": 0.9}, "local_momentum 0.9 is of SGD"),
        ({"local_optimiser": "sgd", "update": "gradient"}, "local_weight_decay is of local steps"),
        ({"local_optimiser": "adam"}, "adamw"),
        ({"local_weight_decay": 1.0}, "local_weight_decay"),
    ],
)
def test_contradictions_are_told_in_one_line(values: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as told:
        scenario_of(2, **values)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"server": "feature_fishing"}, "its probe is read from a step of SGD"),
        ({"server": "class_fishing", "defences": "secure_sum:clients=2", "clients": 2}, "do not come apart"),
        ({"server": "class_fishing", "defences": "gaussian:noise=1e-3"}, "which gaussian changes"),
        ({"server": "class_fishing", "defences": "withhold:roles=position_embedding"}, "which withhold keeps"),
    ],
)
def test_servers_that_cannot_read_steps_of_adamw_are_refused(values: dict[str, object], reason: str) -> None:
    scenario = scenario_of(2, **values)
    with pytest.raises(ConfigError, match=reason):
        scenario.require_server(blueprint(scenario.network))


def test_a_threat_model_says_which_optimiser() -> None:
    assert "1 AdamW step (learning rate 0.001, weight decay 0.05)" in scenario_of(2).threat.sentence()
    assert not {"local_optimiser", "local_weight_decay"} & ThreatModel(update="delta").model_dump().keys()
    assert not {"local_optimiser", "local_weight_decay"} & small_scenario().model_dump().keys()

"""The first linear layer's inputs against the true ones, pictures from them, and the audit's control on any network."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedmjp.attacks import ATTACKS
from fedmjp.attacks.linear_inputs.separate import LayerGradient, separate
from fedmjp.attacks.testing import CHECKS, AttackTrial
from fedmjp.benchmarks.audit.attacking import Attempt, attempt_all
from fedmjp.benchmarks.audit.control import make_control
from fedmjp.benchmarks.audit.evaluating import Private, scored, summarise_records
from fedmjp.benchmarks.audit.network import take_in
from fedmjp.errors import AttackNotApplicableError
from fedmjp.facade import bundled_pictures
from fedmjp.metrics import metric
from fedmjp.models.layers import LayeredNetwork, inputs_of
from fedmjp.records import Features, Reconstruction, Upload
from fedmjp.threat import ThreatModel

EXACT = 1e-6


class Quickstart(nn.Module):
    """Flower's quickstart CNN for 32 x 32 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x))).view(-1, 400)
        x = F.relu(self.fc1(x))
        return self.fc3(F.relu(self.fc2(x)))  # type: ignore[no-any-return]


def table(width: int = 64, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    return nn.Sequential(nn.Linear(12, width), activation(), nn.Linear(width, 5))


def drawn(make: Callable[[], nn.Module]) -> nn.Module:
    """Make a module with weights as torch draws them: uniform, within one over the root of a layer's inputs."""
    module, generator = make(), torch.Generator().manual_seed(0)
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            bound = layer.weight[0].numel() ** -0.5
            for parameter in layer.parameters():
                nn.init.uniform_(parameter, -bound, bound, generator=generator)
    return module


def gradient(module: nn.Module, records: Tensor, *, train: bool = False) -> dict[str, Tensor]:
    module.train(train)
    loss = F.cross_entropy(module(records), torch.arange(len(records)) % 5)
    parameters = dict(module.named_parameters())
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    return dict(zip(parameters, gradients, strict=True))


def read(module: nn.Module, records: Tensor, tensors: dict[str, Tensor], name: str = "linear_inputs") -> Features:
    network = LayeredNetwork(module, tuple(records.shape[1:]), frozenset(tensors))
    upload = Upload(tensors, "gradient", len(records), 1, 0, "")
    threat = ThreatModel(batch_size=len(records))
    (disclosed,) = ATTACKS.get(name)().run([upload], network, threat, generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    assert isinstance(disclosed, Features)
    return disclosed


def errors(disclosed: Features, true: Tensor) -> Tensor:
    assert disclosed.features is not None
    distances = torch.cdist(true.double(), disclosed.features, compute_mode="donot_use_mm_for_euclid_dist")
    return distances.min(1).values / true.double().norm(dim=1)


def records_of(count: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn((count, *shape), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [1, 8])
def test_the_quickstarts_features_are_exact(count: int) -> None:
    module, pictures = drawn(Quickstart), torch.stack([picture.image for picture in bundled_pictures(8, size=32)])
    pictures = (pictures[:count] - 0.5) / 0.5
    disclosed = read(module, pictures, gradient(module, pictures))
    assert disclosed.layer == "fc1"
    assert disclosed.diagnostics["certified_pictures"] == count
    assert float(errors(disclosed, inputs_of(module, "fc1", pictures).detach()).max()) < EXACT


def test_rows_of_a_table_are_exact_where_spear_says_so_and_refused_where_it_cannot() -> None:
    records = records_of(10, 12)
    module = drawn(lambda: table(96))
    disclosed = read(module, records, gradient(module, records))
    assert disclosed.diagnostics["certified"] == 1
    assert float(errors(disclosed, records).max()) < EXACT
    narrow = drawn(lambda: table(8))
    with pytest.raises(AttackNotApplicableError, match="8 neurons: its gradient has at most that rank"):
        read(narrow, records, gradient(narrow, records))
    smooth = drawn(lambda: table(96, nn.Tanh))
    with pytest.raises(AttackNotApplicableError, match="no ReLU"):
        read(smooth, records, gradient(smooth, records))
    assert float(errors(read(smooth, records[:1], gradient(smooth, records[:1])), records[:1]).max()) < EXACT


def test_a_batch_that_hardly_comes_apart_is_not_certified() -> None:
    """A submatrix of 23 rows is all zero in a column once in 2 ** 23 draws: only single neurons tell records."""
    records = records_of(24, 40)
    module = drawn(lambda: nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 5)))
    disclosed = read(module, records, gradient(module, records))
    certified = disclosed.facts["certified"]
    assert int(certified.sum()) < 24
    assert disclosed.features is not None
    told = disclosed.features[certified]
    assert bool((torch.cdist(told, records.double()).min(1).values < 1e-4 * told.norm(dim=1)).all())


def test_neurons_of_one_record_alone_separate_more_records_than_submatrices_could() -> None:
    """Each of 30 records has two neurons that no other activates: planted, with the formula for the gradient."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((30, 50), generator=generator, dtype=torch.float64)
    slopes = torch.eye(30, dtype=torch.float64).repeat(1, 2) * torch.rand(60, generator=generator, dtype=torch.float64)
    layer_weight = torch.cat([rows, rows]) / 50
    layer = LayerGradient(slopes.mT @ rows, slopes.sum(0), layer_weight, torch.full((60,), -0.5, dtype=torch.float64))
    inputs = separate(layer, 30, samples=2048, generator=generator)
    assert inputs.rank == 30
    assert float(torch.cdist(rows, inputs.rows).min(1).values.max()) < EXACT


def test_what_a_step_sends_and_a_head_alone_are_read_too() -> None:
    module, pictures = drawn(Quickstart), records_of(1, 3, 32, 32)
    tensors = gradient(module, pictures)
    head = {name: tensors[name] for name in ("fc3.weight", "fc3.bias")}
    disclosed = read(module, pictures, head)
    assert disclosed.layer == "fc3"
    assert float(errors(disclosed, inputs_of(module, "fc3", pictures).detach()).max()) < EXACT
    with pytest.raises(AttackNotApplicableError, match="not both sent"):
        read(module, pictures, {"conv1.weight": tensors["conv1.weight"]})
    network = LayeredNetwork(module, (3, 32, 32), frozenset(tensors))
    step = Upload({name: -0.1 * tensor for name, tensor in tensors.items()}, "delta", 1, 1, 0, "")
    threat = ThreatModel(update="delta", local_learning_rate=0.1)
    (moved,) = ATTACKS.get("linear_inputs")().run([step], network, threat, generator=torch.Generator())  # type: ignore[arg-type]
    assert isinstance(moved, Features)
    assert float(errors(moved, inputs_of(module, "fc1", pictures).detach()).max()) < EXACT


@pytest.mark.parametrize(("count", "certified"), [(2, 2), (8, 3)])
def test_a_change_of_rounded_weights_is_read_as_well_as_rounding_leaves_it(count: int, certified: int) -> None:
    """A step in float32 that is taken as weights less weights: its rank is of records, not of rounding.

    Of eight records three to six were certified, by what was drawn and how gradients were rounded. Their rows were off
    by 1.4 % at most, and other records are 75 % away or more.
    """
    module, pictures = drawn(Quickstart), torch.stack([picture.image for picture in bundled_pictures(8, size=32)])
    pictures = (pictures[:count] - 0.5) / 0.5
    parameters = dict(module.named_parameters())
    changes = {
        name: (parameters[name].detach() - 0.01 * slope) - parameters[name].detach()
        for name, slope in gradient(module, pictures).items()
    }
    network = LayeredNetwork(module, (3, 32, 32), frozenset(changes))
    threat = ThreatModel(update="delta", local_learning_rate=0.01, batch_size=count)
    upload = Upload(changes, "delta", count, 1, 0, "")
    true = inputs_of(module, "fc1", pictures).detach()
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        (moved,) = ATTACKS.get("linear_inputs")().run([upload], network, threat, generator=generator)  # type: ignore[arg-type]
        assert isinstance(moved, Features)
        assert moved.features is not None
        assert moved.diagnostics["rank"] == count
        rows = moved.features[moved.facts["certified"]]
        assert len(rows) >= certified
        distances = torch.cdist(rows, true.double(), compute_mode="donot_use_mm_for_euclid_dist")
        assert float((distances / true.double().norm(dim=1)).amin(dim=1).max()) < 0.02


def test_layers_are_told_by_what_they_do() -> None:
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 6, 6), nn.ReLU(inplace=True),
        nn.Flatten(), nn.Linear(6, 3),
    )  # fmt: skip
    network = LayeredNetwork(module, (1, 8, 8), frozenset(name for name, _ in module.named_parameters()))
    assert [(layer.module, layer.width, layer.rectified) for layer in network.layers] == [
        ("3", 144, True),
        ("6", 6, False),
    ]
    pictures = records_of(1, 1, 8, 8)
    tensors = gradient(module, pictures, train=True)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    disclosed = read(module, pictures, tensors)
    assert disclosed.features is not None
    assert disclosed.features.shape == (1, 144)
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in state.items())


def test_the_quickstarts_picture_is_searched_for_and_a_table_has_none() -> None:
    module, picture = drawn(Quickstart), bundled_pictures(1, size=32)[0].image[None]
    tensors = gradient(module, (picture - 0.5) / 0.5)
    half = torch.full((3, 1, 1), 0.5)
    network = LayeredNetwork(module, (3, 32, 32), frozenset(tensors), half, half)
    attack = ATTACKS.get("feature_inversion")({"iterations": 250, "restarts": 1})
    upload = Upload(tensors, "gradient", 1, 1, 0, "")
    (back,) = attack.run([upload], network, ThreatModel(), generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    assert isinstance(back, Reconstruction)
    blank = picture.mean((2, 3), keepdim=True).expand_as(picture)
    assert float(metric("ssim").function(back.images, picture)) > 0.25 > float(metric("ssim").function(blank, picture))
    rows = LayeredNetwork(drawn(table), (12,), frozenset(dict(drawn(table).named_parameters())))
    assert "pictures" in str(attack.refusal(rows, ThreatModel()))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["linear_inputs", "feature_inversion"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Callable[[AttackTrial], None], name: str) -> None:
    options = {"iterations": 1, "restarts": 1} if name == "feature_inversion" else {}
    check(AttackTrial(ATTACKS.get(name)(options), "deit_micro", gain=None, tolerance=1e-2, patch_size=16))


def audited(module: nn.Module, private: Private) -> tuple[dict[str, object], list[Attempt]]:
    network = take_in(module, {}, mean=[0.5] * 3, std=[0.5] * 3, side=1, record=torch.zeros_like(private.entered[0][0]))
    control = make_control(network, private)
    attempts = [one for one in attempt_all(network, control.update, control.threat) if one.ran or not one.applies]
    rows = [
        {"attack": one.attack, "role": one.role, **scored(one, control.private, network)} for one in attempts if one.ran
    ]
    reasons = {one.attack: one.reason for one in attempts if not one.applies}
    return summarise_records([row for row in rows if len(row) > 2], reasons), attempts


def test_the_audits_control_is_a_record_of_the_apps_own_kind() -> None:
    rows, _ = audited(drawn(table), Private((records_of(20, 12) * 5 + 3,), None, None))
    assert (rows["came_back"], rows["of"], rows["kind"], rows["attack"]) == (1, 1, "rows", "linear_inputs")
    assert (rows["floor"], rows["unit"]) == (1.0, "relative error")
    unread, _ = audited(nn.Sequential(nn.Linear(12, 5, bias=False)), Private((records_of(20, 12),), None, None))
    assert unread["attack"] is None
    assert "bias" in str(unread["why"])
    tokens = Private((torch.arange(28).reshape(4, 7) // 4,), None, None)
    named, _ = audited(nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(28, 5)), tokens)
    assert (named["came_back"], named["kind"], named["attack"]) == (named["of"], "tokens", "embedding_rows")

"""Uploads have one birthplace: parts, sums and single pictures agree with the whole."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from timm.data import Mixup
from torch import Tensor

from fedmjp.benchmarks.plan.experiment import Experiment
from fedmjp.benchmarks.uploads.direct import DirectUploads
from fedmjp.data.selection import Selection, select_for
from fedmjp.errors import BadInputError, ConfigError, DefenceError
from fedmjp.exchange import Exchange, compute_update, prepare_private
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.private import PrivateBatch
from fedmjp.records import Upload
from fedmjp.scenario import Scenario
from fedmjp.updates import gradient
from tests.conftest import small_scenario

PIPELINES = [
    "none", "jigsaw", "mjp", "mjp:shuffle=false", "clip:norm=0.1", "gaussian", "laplace", "prune", "quantise",
    "round:precision=bfloat16", "sign", "withhold:roles=head", "local_dp", "dp_sgd", "soteria",
    ["mjp", "gaussian", "round"], ["clip", "quantise"], ["dp_sgd", "withhold:roles=head"],
]  # fmt: skip


def loaded(scenario: Scenario) -> tuple[Selection, list[object]]:
    selection = select_for(scenario)
    return selection, [selection.load(entry) for entry in selection.entries[: scenario.threat.pictures]]


def direct(scenario: Scenario, attack: object = "grey") -> Exchange:
    setting = "a" if scenario.gradient_of == "clean" else "b"
    experiment = Experiment.parse({"scenario": scenario, "attacks": [attack], "settings": [setting]})
    selection = select_for(scenario)
    batch = tuple(entry.name for entry in selection.batches(scenario)[0])
    made = DirectUploads(experiment, selection).uploads([batch])[batch]
    assert isinstance(made, Exchange), made
    return made


@pytest.mark.parametrize("defences", PIPELINES, ids=str)
def test_direct_mode_gives_what_an_exchange_gives_to_the_last_bit(defences: object) -> None:
    scenario = small_scenario(defences=defences, pictures_per_client=2)
    _, pictures = loaded(scenario)
    whole = scenario.exchange(pictures).upload
    assert same(direct(scenario).upload, whole, whole.tensors)


@pytest.mark.parametrize("defences", ["none", "mjp", "gaussian", ["mjp", "round"], "clip:norm=0.1"], ids=str)
def test_what_attacks_read_is_the_same_as_in_the_whole_update(defences: object) -> None:
    scenario = small_scenario(defences=defences)
    _, pictures = loaded(scenario)
    part, whole = direct(scenario, "patch_embedding").upload, scenario.exchange(pictures).upload
    assert len(part.tensors) < 5 < len(whole.tensors)
    assert all(torch.allclose(part.tensors[name], whole.tensors[name], rtol=1e-3, atol=1e-7) for name in part.tensors)


def same(one: Upload, other: Upload, names: object) -> bool:
    return all(torch.equal(one.tensors[name], other.tensors[name]) for name in names)  # type: ignore[attr-defined]


def test_a_sum_is_the_mean_of_what_each_client_would_have_sent() -> None:
    together = small_scenario(defences=["clip:norm=0.1", "secure_sum:clients=2"], clients=2)
    alone = small_scenario(defences="clip:norm=0.1", clients=2)
    selection, pictures = loaded(together)
    summed = together.exchange(pictures).upload
    assert (summed.num_examples, together.threat.pipeline.clients, together.uploads) == (2, 2, 1)
    assert [[entry.name for entry in batch] for batch in selection.batches(together)] == [
        [picture.name for picture in pictures]
    ]
    single = [alone.exchange([picture]).upload.tensors for picture in pictures]
    for name, tensor in summed.tensors.items():
        assert torch.allclose(tensor, (single[0][name] + single[1][name]) / 2, atol=1e-9)


def test_without_defences_an_upload_is_the_plain_gradient() -> None:
    scenario = small_scenario()
    made = scenario.exchange(loaded(scenario)[1])
    plain = gradient(build_vit(scenario.network), made.private)
    assert all(torch.equal(made.upload.tensors[name], plain[name]) for name in plain)


def test_what_is_withheld_is_absent_and_frozen_in_a_delta() -> None:
    values = {"update": "delta", "local_steps": 3, "local_learning_rate": 0.1}
    scenario = small_scenario(defences="withhold:roles=head", **values)
    pictures = loaded(scenario)[1]
    sent = scenario.exchange(pictures).upload.tensors
    free = small_scenario(**values).exchange(pictures).upload.tensors
    assert set(free) - set(sent) == {"backbone.head.weight", "backbone.head.bias"}
    qkv = "backbone.blocks.0.attn.qkv.weight"
    assert not torch.allclose(sent[qkv], free[qkv], rtol=1e-4), "steps with a frozen head are other steps"


def test_noise_of_dp_sgd_falls_on_every_step_and_clipping_on_every_picture() -> None:
    """Against per-example gradients made one by one, with noise too small to see."""
    scenario = small_scenario(
        defences="dp_sgd:epsilon=1e8,clipping_norm=0.01,batch_size=2", pictures_per_client=2, batch_size=2
    )
    pictures = loaded(scenario)[1]
    sent = scenario.exchange(pictures).upload.tensors
    model = build_vit(scenario.network)
    expected = mean_of_clipped(model, prepare_private(scenario, pictures, 0), 0.01)
    for name, tensor in sent.items():
        assert torch.allclose(tensor, expected[name], atol=2e-5), name


def mean_of_clipped(model: VitClassifier, private: PrivateBatch, norm: float) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for place in range(len(private.pictures)):
        found = gradient(model, private.part(place, place + 1))
        length = torch.stack([each.square().sum() for each in found.values()]).sum().sqrt()
        for name, each in found.items():
            total[name] = total.get(name, torch.zeros_like(each)) + each * min(1.0, norm / float(length))
    return {name: each / len(private.pictures) for name, each in total.items()}


def test_masks_are_the_same_whatever_defends_besides() -> None:
    plain, noised = small_scenario(defences="mjp"), small_scenario(defences=["mjp", "gaussian"], name="deit_micro")
    pictures = loaded(plain)[1]
    assert torch.equal(prepare_private(plain, pictures, 0).mask, prepare_private(noised, pictures, 0).mask)
    assert not torch.equal(prepare_private(plain, pictures, 0).source, prepare_private(plain, pictures, 1).source)


def test_every_upload_of_a_picture_has_noise_and_masks_of_its_own() -> None:
    scenario = small_scenario(defences=["mjp", "gaussian"], uploads_per_picture=3)
    upload = scenario.exchange(loaded(scenario)[1]).upload
    assert len(upload.others) == 2
    first, second = upload.tensors["backbone.head.bias"], upload.others[0].tensors["backbone.head.bias"]
    assert not torch.equal(first, second)


def test_more_pictures_than_an_upload_is_of_are_refused() -> None:
    scenario = small_scenario(pictures_per_client=2)
    selection = select_for(scenario)
    with pytest.raises(BadInputError, match="2 pictures were given, an upload of this scenario is of 1"):
        scenario.exchange([selection.load(entry) for entry in selection.entries])


def test_an_update_that_cannot_be_protected_does_not_leave() -> None:
    scenario = small_scenario(defences="withhold:roles=position_embedding", name="deit_tiny_without_positions")
    private = prepare_private(scenario, loaded(scenario)[1], 0)
    with pytest.raises(DefenceError, match="no tensors with the role position_embedding"):
        compute_update(scenario, build_vit(scenario.network), private, 0)


def test_labels_come_with_an_upload_only_where_the_server_knows_them() -> None:
    scenario = small_scenario()
    pictures = loaded(scenario)[1]
    assert scenario.exchange(pictures).upload.labels is None
    known = small_scenario(labels_known=True).exchange(pictures).upload.labels
    assert known == (pictures[0].label,)  # type: ignore[attr-defined]


def test_mixup_is_timms_with_one_share_for_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = small_scenario(batch_size=4, pictures_per_client=4, mixup=0.8, label_smoothing=0.1)
    _, pictures = loaded(scenario)
    made, again = (scenario.exchange(pictures, number=number) for number in (0, 1))
    made.private.save(tmp_path / "private")
    private = PrivateBatch.load(tmp_path / "private")
    assert private.mixed is not None
    assert private.shares is not None
    share = float(private.shares[0, private.labels[0]])
    assert share != float(again.private.targets[0, private.labels[0]]), "drawn anew for every upload"
    timms = Mixup(mixup_alpha=0.8, label_smoothing=0.1, num_classes=scenario.model.classes)  # type: ignore[no-untyped-call]
    monkeypatch.setattr(timms, "_params_per_batch", lambda: (share, False))
    images, targets = timms(private.clean.clone(), private.labels)
    torch.testing.assert_close(private.mixed, images)
    model = build_vit(scenario.network)
    (expected,) = torch.autograd.grad(F.cross_entropy(model(images), targets), model.backbone.head.weight)
    torch.testing.assert_close(made.upload.tensors["backbone.head.weight"], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"batch_size": 3}, "which 3 pictures are not: set an even batch_size"),
        ({"update": "delta", "local_steps": 2}, "mixup is of one step, not of 2"),
        ({"defences": "dp_sgd"}, "protects single pictures, and mixed ones are of two"),
        ({"server": "class_fishing"}, "isolates single pictures, and mixed ones are of two"),
    ],
)
def test_batches_that_cannot_be_mixed_are_refused(values: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        small_scenario(**{"batch_size": 2, "pictures_per_client": 6, "mixup": 0.8, **values})

"""Attacks: against breaching as an oracle, and the contract that all of them keep."""

import copy
import inspect
import warnings
from types import SimpleNamespace

import pytest
import torch

from attacks import ATTACKS
from attacks.base import Attack
from attacks.grey import Grey
from fedmjp.data.selection import Selection
from fedmjp.errors import AttackNotApplicableError, RecordError, UnknownNameError
from fedmjp.metrics import METRICS
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Reconstruction, Upload
from fedmjp.settings import Picture
from fedmjp.threat import ThreatModel
from tests.conftest import batch_of, small_model, upload_of

MODEL_OF = {"april": "deit_tiny_april", "patch_embedding": "deit_tiny", "grey": "deit_tiny"}


@pytest.fixture(scope="module")
def breaching_april() -> type:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from breaching.attacks.analytic_attack import AprilAttacker
    return AprilAttacker


@pytest.mark.parametrize("index", range(4))
def test_april_equals_breachings_closed_form(
    breaching_april: type, pictures: Selection, threat: ThreatModel, generator: torch.Generator, index: int
) -> None:
    model = small_model("deit_tiny_april")
    upload = upload_of(model, batch_of(pictures, Picture.CLEAN, index))
    # breaching wants the timm model in a container and gradients at fixed positions of a list.
    gradients = [None, upload.tensors[names.POSITION_EMBEDDING], None, None, upload.tensors[names.FIRST_QKV_WEIGHT]]
    patches = breaching_april.closed_form_april(SimpleNamespace(model=model.backbone), {"gradients": gradients})
    theirs = model.denormalise(breaching_april.recover_patch(patches)).float()
    ours = ATTACKS.get("april")().reconstruct([upload], model, threat, generator=generator)[0]
    assert (ours.images[0] - theirs).norm() / theirs.norm() < 1e-6


def test_april_inverts_exactly_in_float64_where_the_embedding_is_square(
    pictures: Selection, threat: ThreatModel, generator: torch.Generator
) -> None:
    model = small_model("deit_tiny_april").double()  # 192 x 192: no rank limit
    batch = batch_of(pictures, Picture.CLEAN)
    loss = torch.nn.functional.cross_entropy(model(batch.clean.double()), batch.labels)
    named = dict(model.named_parameters())
    gradients = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
    upload = Upload(gradients, "gradient", 1, 1, 0, "weights")
    made = ATTACKS.get("april")().reconstruct([upload], model, threat, generator=generator)[0]
    assert METRICS["psnr"].function(made.images, batch.clean).item() > 60


@pytest.mark.parametrize("name", list(ATTACKS))
@pytest.mark.parametrize("defence", ["none", "mjp"])
def test_every_attack_keeps_the_contract(name: str, defence: str, pictures: Selection, threat: ThreatModel) -> None:
    model = small_model(MODEL_OF[name], defence)
    uploads = [upload_of(model, batch_of(pictures, Picture.SHUFFLED, index)) for index in range(2)]
    before = copy.deepcopy([dict(upload.tensors) for upload in uploads])
    weights = copy.deepcopy(model.state_dict())
    attack = ATTACKS.get(name)()
    runs = [attack.reconstruct(uploads, model, threat, generator=torch.Generator().manual_seed(0)) for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first.images, second.images), "same generator, same result"
        assert first.images.shape == (1, 3, 64, 64)
    alone = attack.reconstruct(uploads[1:], model, threat, generator=torch.Generator().manual_seed(0))[0]
    assert torch.allclose(alone.images, runs[0][1].images), "independent of the rest of the stack"
    for upload, tensors in zip(uploads, before, strict=True):
        assert all(torch.equal(upload.tensors[key], tensors[key]) for key in tensors), "uploads are not changed"
    assert all(torch.equal(model.state_dict()[key], weights[key]) for key in weights), "the model is not changed"


@pytest.mark.parametrize("name", list(ATTACKS))
def test_every_attack_reads_only_the_tensors_it_declares(
    name: str, pictures: Selection, threat: ThreatModel, generator: torch.Generator
) -> None:
    model = small_model(MODEL_OF[name], "mjp")
    upload = upload_of(model, batch_of(pictures, Picture.SHUFFLED))
    attack = ATTACKS.get(name)()
    declared = attack.tensors(model) or [names.PATCH_BIAS]
    kept = {key: upload.tensors[key] for key in declared}
    reduced = Upload(kept, upload.kind, upload.num_examples, 1, 0, upload.weights)
    full, partial = (attack.reconstruct([each], model, threat, generator=generator)[0] for each in (upload, reduced))
    assert torch.equal(full.images, partial.images)


@pytest.mark.parametrize("name", list(ATTACKS))
def test_no_attack_has_a_parameter_for_private_data(name: str) -> None:
    parameters = inspect.signature(ATTACKS.get(name).reconstruct).parameters
    assert list(parameters) == ["self", "uploads", "model", "threat", "generator"]
    assert ATTACKS.get(name).reconstruct is Attack.reconstruct, "the checks of the contract cannot be left out"


def test_april_refuses_a_deployed_architecture(
    undefended: VitClassifier, pictures: Selection, threat: ThreatModel, generator: torch.Generator
) -> None:
    upload = upload_of(undefended, batch_of(pictures, Picture.CLEAN))
    with pytest.raises(AttackNotApplicableError, match="_april variant"):
        ATTACKS.get("april")().reconstruct([upload], undefended, threat, generator=generator)


def test_patch_embedding_refuses_an_underdetermined_model(threat: ThreatModel, generator: torch.Generator) -> None:
    from fedmjp.config import ModelConfig
    from fedmjp.models.build import build

    model = build(ModelConfig(name="deit_tiny"))  # 196 patches, dim 192
    with pytest.raises(AttackNotApplicableError, match="196 patches are more unknowns than the 192"):
        ATTACKS.get("patch_embedding")().reconstruct([], model, threat, generator=generator)


@pytest.mark.parametrize("name", ["april", "patch_embedding"])
def test_closed_forms_refuse_batches(name: str, generator: torch.Generator) -> None:
    with pytest.raises(AttackNotApplicableError, match="single picture"):
        ATTACKS.get(name)().reconstruct([], small_model(MODEL_OF[name]), ThreatModel(batch_size=2), generator=generator)


@pytest.mark.parametrize(("kind", "examples"), [("delta", 1), ("gradient", 4)])
@pytest.mark.parametrize("name", list(ATTACKS))
def test_uploads_that_the_threat_model_does_not_speak_of_are_refused(
    name: str, kind: str, examples: int, pictures: Selection, threat: ThreatModel, generator: torch.Generator
) -> None:
    model = small_model(MODEL_OF[name])
    upload = upload_of(model, batch_of(pictures, Picture.CLEAN))
    other = Upload(upload.tensors, kind, examples, 1, 0, "weights")
    with pytest.raises(AttackNotApplicableError, match="the threat model speaks of"):
        ATTACKS.get(name)().reconstruct([other], model, threat, generator=generator)


@pytest.mark.parametrize("name", ["april", "patch_embedding"])
def test_closed_forms_refuse_weight_deltas_and_empty_gradients(
    name: str, pictures: Selection, threat: ThreatModel, generator: torch.Generator
) -> None:
    model = small_model(MODEL_OF[name])
    attack = ATTACKS.get(name)()
    with pytest.raises(AttackNotApplicableError, match="not a delta after 5 steps"):
        attack.reconstruct([], model, ThreatModel(update="delta", local_steps=5), generator=generator)
    upload = upload_of(model, batch_of(pictures, Picture.CLEAN))
    nothing = Upload({key: value * 0 for key, value in upload.tensors.items()}, "gradient", 1, 1, 0, "weights")
    with pytest.raises(AttackNotApplicableError, match="zero for every patch"):
        attack.reconstruct([nothing], model, threat, generator=generator)


class Dice(Grey):
    """A random attack, to see where its randomness comes from."""

    def _reconstruct_one(
        self, upload: Upload, model: VitClassifier, threat: ThreatModel, *, generator: torch.Generator
    ) -> Reconstruction:
        return Reconstruction(torch.rand(1, 3, 64, 64, generator=generator))

    def tensors(self, model: VitClassifier) -> list[str]:
        return [names.PATCH_BIAS]


def test_a_random_attack_does_not_depend_on_the_rest_of_the_stack(
    undefended: VitClassifier, pictures: Selection, threat: ThreatModel
) -> None:
    uploads = [upload_of(undefended, batch_of(pictures, Picture.CLEAN, index)) for index in range(2)]
    stack = Dice().reconstruct(uploads, undefended, threat, generator=torch.Generator().manual_seed(5))
    alone = Dice().reconstruct(uploads[1:], undefended, threat, generator=torch.Generator().manual_seed(5))
    other = Dice().reconstruct(uploads[1:], undefended, threat, generator=torch.Generator().manual_seed(6))
    assert torch.equal(stack[1].images, alone[0].images)
    assert not torch.equal(stack[0].images, stack[1].images)
    assert not torch.equal(alone[0].images, other[0].images)


def test_upload_without_a_needed_tensor_is_named(
    undefended: VitClassifier, pictures: Selection, threat: ThreatModel, generator: torch.Generator
) -> None:
    upload = upload_of(undefended, batch_of(pictures, Picture.CLEAN))
    rest = {key: value for key, value in upload.tensors.items() if key != names.PATCH_WEIGHT}
    broken = Upload(rest, "gradient", 1, 1, 0, "weights")
    with pytest.raises(AttackNotApplicableError, match=r"no tensor 'backbone\.patch_embed\.proj\.weight'"):
        ATTACKS.get("patch_embedding")().reconstruct([broken], undefended, threat, generator=generator)


def test_upload_of_another_model_is_named(
    undefended: VitClassifier, pictures: Selection, threat: ThreatModel, generator: torch.Generator
) -> None:
    upload = upload_of(undefended, batch_of(pictures, Picture.CLEAN))
    cut = {**upload.tensors, names.POSITION_EMBEDDING: upload.tensors[names.POSITION_EMBEDDING][:, :10]}
    with pytest.raises(AttackNotApplicableError, match=r"shape \(1, 10, 192\)"):
        ATTACKS.get("patch_embedding")().reconstruct(
            [Upload(cut, "gradient", 1, 1, 0, "weights")], undefended, threat, generator=generator
        )


def test_unknown_attack_offers_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="april"):
        ATTACKS.get("apirl")


def test_a_reconstruction_with_nan_is_no_reconstruction() -> None:
    with pytest.raises(RecordError, match="NaN"):
        Reconstruction(torch.full((1, 3, 8, 8), float("nan")))

"""The intersection of MJP uploads: exact once every patch was seen, and honest before."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from fedmjp.attacks import ATTACKS
from fedmjp.attacks.mjp.linking import same_but_for_noise
from fedmjp.attacks.testing import CHECKS, AttackTrial
from fedmjp.data.selection import Selection, select_for
from fedmjp.metrics import METRICS
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.private import PrivateBatch
from fedmjp.records import Reconstruction, Upload
from fedmjp.scenario import Scenario
from fedmjp.settings import Picture
from fedmjp.threat import ThreatModel
from tests.attacks import protected
from tests.conftest import private_batch, small_model, upload_of


def puzzles(pictures: Selection, count: int, index: int = 0, mask_ratio: float = 0.27) -> list[PrivateBatch]:
    """One picture under several masks."""
    loaded = [pictures.load(pictures.entries[index])]
    return [
        private_batch(loaded, grid=8, mask_ratio=mask_ratio, gradient_of=Picture.SHUFFLED, seed=0, number=number)
        for number in range(count)
    ]


def attack(uploads: list[Upload], model: VitClassifier, threat: ThreatModel | None = None) -> Reconstruction:
    """Attack the first upload, the others being kept beside it."""
    generator = torch.Generator().manual_seed(0)
    given = [replace(uploads[0], others=tuple(uploads[1:]))]
    made = ATTACKS.get("mjp_intersection")().run(given, model, threat or ThreatModel(), generator=generator)
    return made[0]


def psnr(made: Reconstruction, batch: PrivateBatch) -> float:
    return METRICS["psnr"].function(made.images, batch.clean).item()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Callable[[AttackTrial], None]) -> None:
    check(AttackTrial(ATTACKS.get("mjp_intersection")(), "deit_tiny", gain=25.0))


def test_a_picture_is_exact_once_every_patch_was_seen(pictures: Selection) -> None:
    batches = puzzles(pictures, 6)
    assert not torch.cat([batch.mask for batch in batches]).all(dim=0).any()
    # Weights move between the uploads, as they do in training.
    uploads = [upload_of(small_model(defence="mjp", seed=seed), batch) for seed, batch in enumerate(batches)]
    made = attack(uploads, small_model(defence="mjp"))
    assert made.diagnostics["uploads_linked"] == 6
    assert made.diagnostics["masked_in_all"] == made.diagnostics["unknowns_per_patch"] == 0
    assert psnr(made, batches[0]) > 60


def test_as_many_patches_as_dimensions_are_exact_from_a_few_uploads_more() -> None:
    """64 of 64: each upload lacks one direction of its span, which two leave open and eight tell."""
    sizes = {"image_size": 32, "patch_size": 4}
    scenario = Scenario.parse({"model": {"name": "deit_micro", **sizes}, "defences": "mjp", "clients": 2})
    model, selection = build_vit(scenario.network), select_for(scenario)
    shown, other = puzzles(selection, 8), puzzles(selection, 1, index=1)
    uploads = [upload_of(model, batch) for batch in shown]
    few, many = (attack(kept, model) for kept in (uploads[:2], [*uploads, upload_of(model, other[0])]))
    assert (few.diagnostics["uploads_linked"], many.diagnostics["uploads_linked"]) == (2, 8)
    assert psnr(few, shown[0]) == pytest.approx(psnr(attack(uploads[:1], model), shown[0]))
    assert psnr(many, shown[0]) > 60


def test_every_upload_leaves_less_open(defended: VitClassifier, pictures: Selection) -> None:
    batches = puzzles(pictures, 3, mask_ratio=0.5)
    uploads = [upload_of(defended, batch) for batch in batches]
    found = [attack(uploads[:count], defended) for count in (1, 2, 3)]
    always = [int(torch.cat([batch.mask for batch in batches[:count]]).all(dim=0).sum()) for count in (1, 2, 3)]
    assert [made.diagnostics["unknowns_per_patch"] for made in found] == [count - 1 for count in always]
    assert always[2] > 1
    gains = [psnr(made, batches[0]) for made in found]
    assert gains[0] < gains[1] < gains[2]


def test_uploads_of_other_pictures_change_nothing(defended: VitClassifier, pictures: Selection) -> None:
    mine = [upload_of(defended, batch) for batch in puzzles(pictures, 2)]
    theirs = [upload_of(defended, batch) for index in (1, 2, 3) for batch in puzzles(pictures, 2, index)]
    alone, among = attack(mine, defended), attack([mine[0], *theirs, mine[1]], defended)
    assert among.diagnostics["uploads_kept"] == 8
    assert among.diagnostics["uploads_linked"] == 2
    assert torch.allclose(alone.images, among.images, atol=1e-6)


def test_undefended_uploads_of_one_picture_are_averaged(undefended: VitClassifier, pictures: Selection) -> None:
    batches = puzzles(pictures, 2)
    made = attack([upload_of(undefended, replace(batch, gradient_of=Picture.CLEAN)) for batch in batches], undefended)
    assert made.diagnostics["uploads_linked"] == 2
    assert psnr(made, batches[0]) > 60


def test_uploads_of_which_pruning_left_nothing_are_a_guess(undefended: VitClassifier, pictures: Selection) -> None:
    batch = replace(puzzles(pictures, 1)[0], gradient_of=Picture.CLEAN)
    upload = upload_of(undefended, batch)
    nothing = replace(upload, tensors={name: torch.zeros_like(tensor) for name, tensor in upload.tensors.items()})
    made = attack([nothing, nothing], undefended, ThreatModel(defences="prune:kept=0.01"))
    assert psnr(made, batch) < 20


def test_uploads_that_are_the_same_but_for_noise_are_averaged(undefended: VitClassifier, pictures: Selection) -> None:
    threat = ThreatModel(defences="gaussian:noise=1e-2")
    batch = replace(puzzles(pictures, 1)[0], gradient_of=Picture.CLEAN)
    noisy = [protected(upload_of(undefended, batch), undefended, threat, seed=number) for number in range(8)]
    one, all_ = (attack(noisy[:count], undefended, threat) for count in (1, 8))
    assert all_.diagnostics["uploads_linked"] == 8
    assert psnr(all_, batch) > psnr(one, batch) + 1.5


def test_under_noise_that_hides_the_difference_random_crops_are_not_averaged(
    undefended: VitClassifier, pictures: Selection
) -> None:
    threat = ThreatModel(defences="gaussian:noise=10")
    batches = [replace(puzzles(pictures, 1, index)[0], gradient_of=Picture.CLEAN) for index in (0, 1)]
    uploads = [protected(upload_of(undefended, batch), undefended, threat, seed=1) for batch in batches]
    for crop_scale, linked in ((None, 2), (0.5, 1)):
        made = attack(uploads, undefended, threat.model_copy(update={"crop_scale": crop_scale}))
        assert made.diagnostics["uploads_linked"] == linked


def test_uploads_of_the_same_weights_are_the_same_but_for_noise_or_are_not(
    undefended: VitClassifier, pictures: Selection
) -> None:
    threat = ThreatModel(defences="gaussian:noise=1e-2")
    batches = [replace(puzzles(pictures, 1, index)[0], gradient_of=Picture.CLEAN) for index in (0, 0, 1)]
    brighter = replace(batches[0], clean=batches[0].clean + 2 / 255)
    first, second, other, copy = (
        protected(upload_of(undefended, batch), undefended, threat, seed=number)
        for number, batch in enumerate((*batches, brighter))
    )
    assert same_but_for_noise(first, second, threat)
    assert not same_but_for_noise(first, other, threat)
    assert not same_but_for_noise(first, copy, threat)
    assert not same_but_for_noise(first, replace(second, weights="others"), threat)


def test_a_copy_whose_stamp_one_mask_hides_leaves_the_group(defended: VitClassifier, pictures: Selection) -> None:
    """The first upload and the copy agree; what both hide, others show."""
    batches = puzzles(pictures, 5)
    hidden = int((batches[0].mask & batches[4].mask & ~batches[1].mask)[0].nonzero()[0])
    row, column = 8 * (hidden // 8), 8 * (hidden % 8)
    loaded = pictures.load(pictures.entries[0])
    image = loaded.image.clone()
    image[:, row : row + 8, column : column + 8] = 1
    copy = private_batch(
        [replace(loaded, image=image)], grid=8, mask_ratio=0.27, gradient_of=Picture.SHUFFLED, seed=0, number=4
    )
    uploads = [upload_of(defended, batch) for batch in (*batches[:4], copy)]
    without, among = attack(uploads[:4], defended), attack(uploads, defended)
    assert attack([uploads[0], uploads[4]], defended).diagnostics["uploads_linked"] == 2
    assert (among.diagnostics["uploads_linked"], among.diagnostics["uploads_undecided"]) == (4, 1)
    assert psnr(among, batches[0]) == pytest.approx(psnr(without, batches[0]), abs=0.5)


def test_noise_is_averaged_over_uploads(defended: VitClassifier, pictures: Selection) -> None:
    threat = ThreatModel(defences="gaussian:noise=1e-4")
    batches = puzzles(pictures, 4)
    uploads = [upload_of(defended, batch) for batch in batches]
    noisy = [protected(upload, defended, threat, seed=number) for number, upload in enumerate(uploads)]
    one, all_ = (psnr(attack(noisy[:count], defended, threat), batches[0]) for count in (1, 4))
    assert all_ > one + 3

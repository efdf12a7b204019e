"""Reassembly: puzzles that were made by the defence, seam distances one pixel at a time, and as a stage."""

import numpy as np
import pytest
import torch
from scipy.spatial.distance import mahalanobis
from torch import Tensor

from fedmjp.attacks.adversary import Adversary
from fedmjp.attacks.reassembly import _misfit, _Puzzle, _seam_distances, reassemble
from fedmjp.attacks.stages import TENSORS
from fedmjp.benchmarks.plan.experiment import AttackConfig
from fedmjp.data.selection import Selection
from fedmjp.errors import ConfigError, UnknownNameError
from fedmjp.jigsaw import draw
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import to_patches
from fedmjp.records import Upload
from fedmjp.settings import Picture
from fedmjp.stacked import entrance_gradients
from fedmjp.threat import ThreatModel
from tests.conftest import batch_of

GREY_LEVEL = 1 / 255


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def puzzle(selection: Selection, seed: int, ratio: float) -> tuple[Tensor, Tensor, Tensor]:
    """Patches of a clean picture, their shuffled order, and the hole."""
    image = selection.load(selection.entries[seed % len(selection.entries)]).image
    clean = to_patches(image[None], 8)[0]
    jigsaw = draw(8, ratio, generator=seeded(seed))
    return clean, jigsaw.source[0], jigsaw.mask[0]


@pytest.mark.parametrize("ratio", [0.27, 0.9])
def test_shuffled_patches_return_to_their_places(pictures: Selection, ratio: float) -> None:
    right = []
    for seed in range(4):
        clean, shuffled, hole = puzzle(pictures, seed, ratio)
        source = reassemble(clean[shuffled], hole, 8, 8, generator=seeded(0))
        assert sorted(source.tolist()) == list(range(64))
        assert (source[~hole] == torch.arange(64)[~hole]).all()
        right.append((clean[shuffled][source] == clean)[hole].all(dim=1).float().mean())
    assert float(torch.stack(right).mean()) > 0.9  # chance: 1 of 17, 1 of 57


def test_noise_that_covers_every_seam_is_survived(pictures: Selection) -> None:
    clean, shuffled, hole = puzzle(pictures, 0, 0.9)
    noise = torch.randn(clean.shape, generator=seeded(1))
    source = reassemble((clean[shuffled] + noise).clamp(0, 1), hole, 8, 8, generator=seeded(0))
    assert sorted(source.tolist()) == list(range(64))


def test_the_result_follows_from_patches_and_generator(pictures: Selection) -> None:
    clean, shuffled, hole = puzzle(pictures, 1, 0.9)
    first, second = (reassemble(clean[shuffled], hole, 8, 8, generator=seeded(3)) for _ in range(2))
    assert torch.equal(first, second)


def test_more_tries_fit_better_where_one_does_not_find_the_order() -> None:
    """Patches of noise, whose misfit has many minima."""
    hole, patches = torch.ones(16, dtype=torch.bool), torch.rand(16, 48, generator=seeded(0))
    pieces = patches.double().numpy().reshape(-1, 3, 4, 4).transpose(0, 2, 3, 1)
    judge = _Puzzle(4, _misfit(pieces), _misfit(pieces.transpose(0, 2, 1, 3)))

    def misfits(tries: int) -> list[float]:
        orders = [reassemble(patches, hole, 4, 4, generator=seeded(seed), tries=tries) for seed in range(2)]
        return [float(judge._misfit_at(order.numpy()).sum()) for order in orders]

    once, often = misfits(1), misfits(3)
    assert all(many <= one for many, one in zip(often, once, strict=True))
    assert sum(often) < sum(once)


@pytest.mark.parametrize("missing", [0, 1])
def test_without_two_open_places_there_is_nothing_to_find(missing: int) -> None:
    hole = torch.arange(16) < missing
    source = reassemble(torch.rand(16, 48, generator=seeded(0)), hole, 4, 4, generator=seeded(0))
    assert torch.equal(source, torch.arange(16))


def test_a_picture_of_one_colour_has_an_order_too() -> None:
    source = reassemble(torch.full((16, 48), 0.5), torch.ones(16, dtype=torch.bool), 4, 4, generator=seeded(0))
    assert sorted(source.tolist()) == list(range(16))


def test_pieces_of_two_pixels_have_an_order_too() -> None:
    hole = torch.ones(16, dtype=torch.bool)
    source = reassemble(torch.rand(16, 12, generator=seeded(0)), hole, 4, 2, generator=seeded(0))
    assert sorted(source.tolist()) == list(range(16))


def test_seam_distances_equal_mahalanobis_distances_pixel_by_pixel() -> None:
    pieces = np.random.default_rng(0).random((3, 5, 4, 3))
    few = GREY_LEVEL * np.array(
        [[0, 0, 0], [1, 1, 1], [-1, -1, -1], *np.eye(3).tolist(), *(-np.eye(3)).tolist()], dtype=np.float64
    )

    def surprise(jumps: np.ndarray, inside: np.ndarray) -> float:
        covariance = np.cov(np.concatenate([inside, few]), rowvar=False) + 1e-6 * np.eye(3)
        return sum(mahalanobis(jump, inside.mean(axis=0), np.linalg.inv(covariance)) for jump in jumps)

    made = _seam_distances(pieces)
    for i, left in enumerate(pieces):
        for j, right in enumerate(pieces):
            jumps = right[:, 0] - left[:, -1]
            expected = surprise(jumps, left[:, -1] - left[:, -2]) + surprise(-jumps, right[:, 0] - right[:, 1])
            assert made[i, j] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "tried",
    [
        AttackConfig(name="grey"),
        AttackConfig(name="grey", then="reassembly"),
        AttackConfig(name="patch_embedding", options={"reading": "zeros"}, then="reassembly"),
    ],
    ids=lambda tried: tried.label,
)
def test_a_label_names_attack_options_and_stage(tried: AttackConfig) -> None:
    assert AttackConfig.of_label(tried.label) == tried


def test_other_labels_are_refused() -> None:
    with pytest.raises(ConfigError, match="then"):
        AttackConfig.of_label("grey then coffee")
    with pytest.raises(UnknownNameError):
        AttackConfig.of_label("gray then reassembly")


def test_the_stage_needs_one_picture_per_upload(defended: VitClassifier, undefended: VitClassifier) -> None:
    tried = AttackConfig(name="patch_embedding", then="reassembly")
    assert tried.refusal(defended, ThreatModel()) is None
    assert "of 2, no upload tells" in (tried.refusal(defended, ThreatModel(batch_size=2)) or "")
    hidden = ThreatModel(defences=["gaussian", "prune"])
    assert "gaussian and prune together hide the zeros" in (tried.refusal(defended, hidden) or "")
    assert "not the sum" in (tried.refusal(defended, ThreatModel(defences="secure_sum:clients=2")) or "")
    assert "none is put elsewhere" in (tried.caveat(undefended, ThreatModel()) or "")


def test_a_server_reassembles_what_its_attack_made(
    defended: VitClassifier, undefended: VitClassifier, pictures: Selection
) -> None:
    tried = AttackConfig(name="oracle_patch_embedding", then="reassembly")
    for model in (defended, undefended):
        batch = batch_of(pictures, Picture.SHUFFLED)
        tensors = entrance_gradients(model, [batch], {*tried.build().tensors(model), *TENSORS})[0]
        assert names.POSITION_EMBEDDING in tensors
        upload = Upload(tensors, "gradient", 1, 1, 0, "weights")
        before, after = (
            Adversary(model, ThreatModel(), 0).reconstruct(
                tried.name, [upload], {}, then=then, on_progress=lambda *_: None
            )[0]
            for then in (None, tried.then)
        )
        assert (before.images - batch.shuffled).abs().max() < 1e-2
        expected = batch.clean if model.defended else batch.shuffled  # whose mask nobody can read
        assert (after.images - expected).abs().mean() < 1e-2

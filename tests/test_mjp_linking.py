"""Which uploads are of one picture: what is joined is right, and what cannot be told apart is not joined."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import Tensor

from fedmjp.attacks.mjp.facts import LinearFacts, linear_facts
from fedmjp.attacks.mjp.linking import Statement, Verdict, compare, groups, link
from fedmjp.data.pictures import LabelledPicture
from fedmjp.data.selection import Selection, select_for
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.scenario import Scenario
from fedmjp.settings import Picture
from tests.conftest import private_batch, small_model, small_scenario, upload_of

UPLOADS = 3


@pytest.fixture(scope="module")
def crops() -> Selection:
    """All eight bundled pictures, two crops each of four photographs."""
    return select_for(small_scenario(clients=2, pictures_per_client=4))


def facts_of(
    model: VitClassifier, loaded: Sequence[LabelledPicture], number: int, mask_ratio: float = 0.27
) -> LinearFacts:
    batch = private_batch(
        loaded, grid=model.grid, mask_ratio=mask_ratio, gradient_of=Picture.SHUFFLED, seed=0, number=number
    )
    return linear_facts(upload_of(model, batch), model)


@pytest.fixture(scope="module")
def facts(crops: Selection) -> list[list[LinearFacts]]:
    """Per picture, of several uploads, each with other weights."""
    models = [small_model(defence="mjp", seed=seed) for seed in range(UPLOADS)]
    pictures = [crops.load(entry) for entry in crops.entries]
    return [[facts_of(model, [picture], number) for number, model in enumerate(models)] for picture in pictures]


def verdict(one: LinearFacts, other: LinearFacts) -> Verdict:
    return compare(Statement.of([one]), Statement.of([other])).verdict


def test_uploads_of_two_pictures_are_never_joined(facts: list[list[LinearFacts]]) -> None:
    pairs = [(one, other) for first, second in combinations(facts, 2) for one in first for other in second]
    assert len(pairs) > 250
    assert all(verdict(one, other) is Verdict.DIFFERENT for one, other in pairs)


def test_uploads_of_one_picture_are_joined(facts: list[list[LinearFacts]]) -> None:
    assert all(verdict(*pair) is Verdict.SAME for uploads in facts for pair in combinations(uploads, 2))


def brighter(image: Tensor) -> Tensor:
    return (image + 1 / 255).clamp(0, 1)


def redder(image: Tensor) -> Tensor:
    return (image + torch.tensor([4 / 255, 0, 0]).view(3, 1, 1)).clamp(0, 1)


def stamped(image: Tensor) -> Tensor:
    copy = image.clone()
    copy[:, 24:32, 24:32] = 1  # one patch
    return copy


@pytest.mark.parametrize("change", [brighter, redder, stamped])
def test_copies_that_differ_in_one_direction_are_told_apart(
    facts: list[list[LinearFacts]], crops: Selection, change: Callable[[Tensor], Tensor]
) -> None:
    model = small_model(defence="mjp", seed=UPLOADS)
    for index in (0, 2, 5):
        picture = crops.load(crops.entries[index])
        copy = replace(picture, image=change(picture.image))
        of_copy = facts_of(model, [copy], UPLOADS)
        hidden = [bool((other.mask & of_copy.mask)[27]) for other in facts[index]]  # where the stamp is
        told = [verdict(other, of_copy) for other in facts[index]]
        assert all(one is Verdict.DIFFERENT for one, unseen in zip(told, hidden, strict=True) if not unseen)


def test_under_large_masks_another_exposure_is_told_by_what_all_patches_differ_by(crops: Selection) -> None:
    """Pictures of which two masks of a half nearly span all that is even; uploads of the picture itself stay joined."""
    models = [small_model(defence="mjp", seed=seed) for seed in range(3)]
    for index in (5, 7):
        picture = crops.load(crops.entries[index])
        copy = replace(picture, image=brighter(picture.image))
        one, other = (facts_of(models[number], [picture], number, mask_ratio=0.5) for number in (0, 1))
        assert verdict(one, other) is Verdict.SAME
        assert verdict(one, facts_of(models[2], [copy], 2, mask_ratio=0.5)) is Verdict.DIFFERENT


VALUES = 192


def unmasked(patches: Tensor, span: Tensor, generator: torch.Generator) -> LinearFacts:
    """What an upload would state of patches outside of a span (open, values), with white noise of 0.01."""
    noisy = patches + 0.01 * torch.randn(patches.shape, generator=generator, dtype=torch.float64)
    known = noisy - (noisy @ span.mT) @ span
    return LinearFacts(
        mask=torch.zeros(len(patches), dtype=torch.bool),
        basis=span,
        outside=known,
        level=torch.zeros(VALUES, dtype=torch.float64),
        contrast=1.0,
        open=span,
        stated=known,
        leak=torch.zeros(len(span), 1, dtype=torch.float64),
        covariance=1e-4 * torch.eye(len(patches), dtype=torch.float64),
        variance=torch.full((len(patches),), 1e-4, dtype=torch.float64),
        unexplained=0.01 * torch.randn(200, VALUES, generator=generator, dtype=torch.float64),
    )


EVEN = torch.ones(1, VALUES, dtype=torch.float64) / VALUES**0.5
REDDER = torch.nn.functional.normalize(torch.tensor([[2.0, -1, -1]], dtype=torch.float64).repeat_interleave(64, dim=1))


@pytest.mark.parametrize("hidden", [0.0, 0.9, 0.999])
def test_the_exposure_that_may_go_unnoticed_is_told(hidden: float) -> None:
    """A span holds that share of what is even; a mean over 100 patches has noise of 0.01 / sqrt(19,200)."""
    generator = torch.Generator().manual_seed(0)
    span = hidden * EVEN + (1 - hidden**2) ** 0.5 * REDDER
    picture = torch.rand(100, VALUES, generator=generator, dtype=torch.float64)
    first = Statement.of([unmasked(picture, span, generator)])
    unnoticed = compare(first, Statement.of([unmasked(picture, span, generator)])).unnoticed
    deviation = 0.01 * (2 / 19_200) ** 0.5 / (1 - hidden**2) ** 0.5
    assert 5 * deviation < unnoticed < 15 * deviation
    copies = [Statement.of([unmasked(picture + share * unnoticed, span, generator)]) for share in (0.1, 1.2)]
    assert [compare(first, copy).verdict for copy in copies] == [Verdict.SAME, Verdict.DIFFERENT]


def test_a_copy_that_the_first_upload_cannot_tell_leaves_the_group_that_can() -> None:
    generator = torch.Generator().manual_seed(0)
    picture = torch.rand(100, VALUES, generator=generator, dtype=torch.float64)
    first = unmasked(picture, EVEN, generator)
    others = [unmasked(shown, REDDER, generator) for shown in (picture, picture, picture + 0.001)]
    assert link([first, others[2]]).same == [0, 1]
    assert link([first, others[2]]).unnoticed > 1e6
    links = link([first, *others])
    assert (links.same, links.undecided) == ([0, 1, 2], [3])


def test_an_upload_agrees_or_not_with_a_whole_group(facts: list[list[LinearFacts]]) -> None:
    group = Statement.of(facts[0][:2])
    assert compare(group, Statement.of([facts[0][2]])).verdict is Verdict.SAME
    assert compare(group, Statement.of([facts[1][2]])).verdict is Verdict.DIFFERENT


def test_all_uploads_of_a_client_are_grouped_by_picture(facts: list[list[LinearFacts]]) -> None:
    mixed = [facts[picture][number] for number in range(UPLOADS) for picture in range(8)]
    assert groups(mixed) == [[picture, picture + 8, picture + 16] for picture in range(8)]


def test_an_upload_that_agrees_with_two_pictures_joins_neither_to_the_other(facts: list[list[LinearFacts]]) -> None:
    # It states nothing at all: every direction is open.
    empty = replace(
        facts[0][0],
        mask=torch.ones_like(facts[0][0].mask),
        open=torch.eye(192, dtype=torch.float64),
        stated=torch.zeros_like(facts[0][0].stated),
        leak=torch.zeros(192, 1, dtype=torch.float64),
    )
    assert verdict(empty, facts[0][0]) is Verdict.UNDECIDED
    links = link([facts[0][0], empty, facts[1][1], facts[0][2]])
    assert (links.same, links.undecided) == ([0, 3], [1])
    assert groups([empty, facts[0][0], facts[1][1]]) == [[0], [1], [2]]


def test_noise_as_large_as_what_is_stated_leaves_it_undecided(facts: list[list[LinearFacts]]) -> None:
    blurred = [replace(each, covariance=1e6 * torch.eye(64, dtype=torch.float64)) for each in facts[0]]
    assert verdict(*blurred[:2]) is Verdict.UNDECIDED
    assert link(blurred).same == [0]


def test_patches_of_few_values_are_not_guessed_at() -> None:
    """Two masks of 0.9 leave none of the 48 values of a patch to compare."""
    sizes = {"image_size": 32, "patch_size": 4}
    scenario = Scenario.parse({"model": {"name": "deit_micro", **sizes}, "defences": "mjp"})
    model, pictures = build_vit(scenario.network), select_for(scenario)
    picture = pictures.load(pictures.entries[0])
    uploads = [facts_of(model, [picture], number, mask_ratio=0.9) for number in range(3)]
    comparison = compare(Statement.of(uploads[:1]), Statement.of(uploads[1:2]))
    assert comparison.directions == 0
    assert comparison.verdict is Verdict.UNDECIDED
    assert link(uploads).same == [0]

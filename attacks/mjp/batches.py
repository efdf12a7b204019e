"""Uploads of several pictures: what a client shows in changing company, it shows.

An upload of B pictures x, y, ... sums over the tokens of all, and what it states is found as for one
(``fedmjp.attacks.mjp.facts``). For a place t that some of them show unmasked, the position embedding's gradient is
the sum of their d_t. The space orthogonal to all such sums holds

    the patches at masked places, and the differences x_t - y_t of pictures that both show t;

together B n - V directions, V being the number of places that anybody shows. Outside of their span P,

    (I - P) x_t = (I - P) y_t = e_t

is exact for every picture that shows t, as long as the B n tokens are fewer than the d dimensions of a
token, and the B n - V directions than the p values of a patch. It is a *mixture* only along P. A further
upload with x, but with other company, leaves x open along another span, and the intersection is as for one
picture. A batch that recurs as a whole stays a mixture.

Which uploads share a picture, and where each shows it, is told by agreement: outside of the joint span of two
uploads, e_t^(r) = e_t^(s) if both state the same patch. With one mask for the whole batch they agree everywhere; if
every picture has a mask of its own, e_t is of x only where x shows t, and they agree where both do. Two uploads
are joined if they agree at more than a few places, three if the places at which they agree are the same. The
joint span must leave something: 2 (B n - V) < p. Places that look like another one of the same picture, as
black bars and blown-out skies do, are no evidence: they look so in other pictures, too. A textured overlay that
many pictures share, pixel for pixel, would still pass for one picture.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from fedmjp.attacks.mjp.affine import of_several_uploads
from fedmjp.attacks.mjp.closing import close
from fedmjp.attacks.mjp.facts import LinearFacts
from fedmjp.attacks.mjp.linking import APART, Statement
from fedmjp.models import names
from fedmjp.models.entrance import Entrance, count_patches

# Share of the places at which two uploads must agree to share a picture. Masks of 0.5 for each picture leave a quarter.
SHARED = 0.1
# Share of the places of which uploads agree on one patch at which a further one does, if it shows the picture.
TOGETHER = 0.3
# Share of the places that uploads must agree on to be asked together whether a further one shows their picture.
MANY = 0.3


@dataclass(frozen=True)
class Member:
    """A picture of the batch as several uploads state it."""

    patches: Tensor  # (patches, values) float64, in the network's input space
    uploads: int  # that show it
    open: float  # mean number of directions along which a patch is left open by the uploads that agree on it


def members(facts: Sequence[LinearFacts], pictures: int, model: Entrance) -> list[Member]:
    """Return the pictures of the first upload as all uploads of its client state them.

    Of a picture that no other company shows there is what one upload, or all uploads of the same batch, state: a
    mixture. Pictures without a group of uploads come last.

    Args:
        facts: Those of all uploads of a client.
        pictures: The number of pictures in an upload.
        model: States the sizes.
    """
    statements = [Statement.of([fact]) for fact in facts]
    sharing = [index for index in range(1, len(facts)) if _shared(statements[0], statements[index]) >= SHARED]
    sharers = [facts[index] for index in (0, *sharing)]
    agreeing = _agreements([statements[index] for index in (0, *sharing)])
    groups = _companies(sharers, agreeing, pictures)
    batch = [_member([sharers[place] for place in group], agreeing[group][:, group], model) for group in groups]
    if len(batch) < pictures:
        batch += [_member(sharers[:1], agreeing[:1, :1], model)] * (pictures - len(batch))
    return batch


def refusal(model: Entrance, pictures: int) -> str | None:
    """Say why uploads of so many pictures cannot be told by whom they show, even without a mask; None if they can.

    Args:
        model: States the sizes.
        pictures: The number of pictures in an upload.
    """
    patches, values = count_patches(model), 3 * model.patch_size**2
    dimensions = model.get_parameter(names.POSITION_EMBEDDING).shape[-1]
    if pictures * patches >= dimensions:
        return f"{pictures * patches} patches are not fewer than the {dimensions} dimensions of a token"
    if 2 * (pictures - 1) * patches >= values:
        return (
            f"two uploads of {pictures} pictures leave {2 * (pictures - 1) * patches} directions open, and a patch has "
            f"{values} values: nothing tells whether they share a picture"
        )
    return None


def _agree(former: Statement, latter: Statement) -> Tensor:
    """Return where two statements state the same patch, (patches,) bool; where neither shows any, they do.

    The same patch leaves a difference of the noise, another one a difference of the energy that patches have
    outside of the joint span. The bound between is their geometric mean (``fedmjp.attacks.mjp.linking``). Where one
    has the place masked and the other states next to nothing, they agree: the patch is in the span.
    """
    spans = torch.cat([former.basis, latter.basis])
    silent = former.unseen & latter.unseen
    directions = spans.shape[1] - len(spans)
    if directions <= 0:
        return silent
    joint = torch.linalg.qr(spans.mT).Q
    first, second = (statement.stated - (statement.stated @ joint) @ joint.mT for statement in (former, latter))
    noise = directions * (former.variance + latter.variance)
    energy = first[~former.unseen].square().sum(dim=1).mean() + second[~latter.unseen].square().sum(dim=1).mean()
    difference = (first - second).square().sum(dim=1)
    same: Tensor = (energy >= APART * noise) & (difference.square() < noise * energy)
    return same | silent


def _distinctive(statement: Statement) -> Tensor:
    """Return the places that state another patch than every other place, and masked ones, (patches,) bool.

    Two places count as equal by the same bound as two uploads at one place.
    """
    directions = statement.stated.shape[1] - len(statement.basis)
    noise = directions * (statement.variance[:, None] + statement.variance)
    energy = 2 * statement.stated[~statement.unseen].square().sum(dim=1).mean()
    equal = (
        torch.cdist(statement.stated, statement.stated, compute_mode="donot_use_mm_for_euclid_dist") ** 4
        < noise * energy
    )
    equal &= ~statement.unseen[:, None] & ~statement.unseen
    return ~equal.fill_diagonal_(False).any(dim=1)


def _shared(former: Statement, latter: Statement) -> float:
    """Return the share of the distinctive places that either shows at which two agree."""
    telling = _distinctive(former) & _distinctive(latter) & ~(former.unseen & latter.unseen)
    return float(_agree(former, latter)[telling].double().mean()) if telling.any() else 0.0


def _agreements(statements: Sequence[Statement]) -> Tensor:
    """Return the agreement of all pairs, (uploads, uploads, patches) bool; each agrees with itself."""
    agreeing = statements[0].unseen.new_ones(len(statements), len(statements), len(statements[0].unseen))
    for row, column in combinations(range(len(statements)), 2):
        agreeing[row, column] = agreeing[column, row] = _agree(statements[row], statements[column])
    return agreeing


def _companies(facts: Sequence[LinearFacts], agreeing: Tensor, most: int) -> list[list[int]]:
    """Group the uploads that show one picture of the first, itself included: at most ``most`` groups, at least one."""
    companies: list[list[int]] = []
    pending = list(range(1, len(facts)))
    while pending and len(companies) < most:
        candidates = [*pending[1:], *(index for index in range(1, len(facts)) if index not in pending)]
        companies.append(_company(facts, agreeing, pending[0], candidates))
        pending = [index for index in pending if index not in companies[-1]]
    return companies or [[0]]


def _company(facts: Sequence[LinearFacts], agreeing: Tensor, seed: int, candidates: Sequence[int]) -> list[int]:
    """List all that show what the first upload and ``seed`` show together, ascending.

    If these share several pictures, the first to join decides which of them is meant: what the group states
    together is asked each time, at places of which all agree on the patch, as long as these are many.
    """
    group, core, telling = [0, seed], [0, seed], _distinctive(Statement.of([facts[0]]))
    stated, places = _common(facts, agreeing, core)
    for candidate in candidates:
        alone = Statement.of([facts[candidate]])
        compared = places & telling & ~(stated.unseen & alone.unseen)
        if not compared.any() or float(_agree(stated, alone)[compared].double().mean()) < TOGETHER:
            continue
        group.append(candidate)
        wider = _common(facts, agreeing, [*core, candidate])
        if float(wider[1].double().mean()) >= MANY:
            core, (stated, places) = [*core, candidate], wider
    return sorted(group)


def _common(facts: Sequence[LinearFacts], agreeing: Tensor, core: list[int]) -> tuple[Statement, Tensor]:
    """Return what uploads state together, and the places (patches,) of which they all agree on one patch."""
    return Statement.of([facts[index] for index in core]), agreeing[core][:, core].all(dim=1).all(dim=0)


def _member(facts: Sequence[LinearFacts], agreeing: Tensor, model: Entrance) -> Member:
    """Solve for a picture patch by patch from the uploads that agree on it.

    What these leave open of a patch is as all uploads of the picture have it, taken together: next to right
    where one of them misleads, or where pictures so alike were shown together that rounding hides their difference.
    """
    joint = of_several_uploads(facts)
    whole = close(joint, model)
    subsets, which = torch.unique(_stating(agreeing), dim=0, return_inverse=True)
    if subsets.all():
        return Member(whole, len(facts), len(joint.basis))
    patches, open_ = torch.zeros_like(whole), 0.0
    for index, subset in enumerate(subsets):
        places = which == index
        affine = of_several_uploads([facts[place] for place in subset.nonzero().flatten()])
        patches[places] = (affine.fixed + whole @ affine.basis.mT @ affine.basis)[places]
        open_ += len(affine.basis) * float(places.double().mean())
    return Member(patches, len(facts), open_)


def _stating(agreeing: Tensor) -> Tensor:
    """Return, for each place, uploads that all agree with each other (greedy search), (patches, uploads) bool.

    Who agrees with two others that do not agree with each other states a place that two pictures show.
    """
    relation = agreeing.permute(2, 0, 1).double()
    places = torch.arange(len(relation), device=relation.device)
    clique = torch.ones_like(relation[:, 0])
    while True:
        partners = (relation @ clique[..., None])[..., 0].where(clique.bool(), torch.inf)
        torn = partners.amin(dim=1) < clique.sum(dim=1)
        if not torn.any():
            return clique.bool()
        clique[places[torn], partners[torn].argmin(dim=1)] = 0

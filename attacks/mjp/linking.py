"""Which uploads of a client are of one picture.

Upload r states e_t = (I - P_r) x_t for every patch t in its true place (``attacks.mjp.facts``), masked
patches included. Let P be the projector on what P_r and P_s leave open together. Outside of it both uploads
state the same patches in full: if they are of one picture,

    (I - P) (e_t^(r) - e_t^(s)) = 0 for every t,

up to noise. Its covariance between patches is known from the facts, so that the difference can be made white over the
patches. Copies of a picture that differ in brightness, in one colour or at one patch differ in a single direction of
the patches and of their values. A mean over all of them does not see that. So the largest singular values are held
against the largest that noise alone has, each in units of the noise that the uploads show in its own direction.

Pictures that differ by more are told apart. That uploads are of one picture is said where another picture, of the
same patches in other places, would have differed by far more. Where it would not, as under loud noise, nor where a
joint span leaves no direction outside (patches of few values, large masks), nothing is decided, and what is not
decided is not joined. It is then compared with all that the group states together, which leaves less open, so that
members that did join let more be decided. What differs where both uploads of a pair have it masked, a third may
show: members that contradict what the group states are then compared pair by pair, and those that contradict most
others leave it.

Under loud noise all of this decides nothing. But uploads of the same weights and picture without a mask are the same
but for noise, of a variance that the server is told: a difference of any other kind is louder.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import combinations

import torch
from torch import Tensor

from attacks.mjp.affine import Stack
from attacks.mjp.facts import LinearFacts
from fedmjp.records import Upload
from fedmjp.threat import ThreatModel

# In units of the largest square that noise alone has: from here on a difference is none of noise. On DeiT-S it was at
# most 0.9 between uploads of one picture, and at least 21 between a picture and a copy with other values in one pixel.
BEYOND = 4.0
# Two explanations are told apart if they expect squares this far apart.
APART = 10.0
# Where one equation alone tells the noise (fact 10) it does not tell in which directions noise is loud. Squares may be
# this much larger then. Among 30 pictures on a trained model they were at most 1,700 between uploads of one picture,
# and at least 40,000 between those of two.
UNSURE = 2500.0
# Of the mean variance of a patch: no combination of patches is stated more exactly.
RIDGE = 1e-6
# A group states a direction if its members do so at least half as surely as one upload alone.
SURELY = 0.5
DEVIATIONS = 8.0  # of the mean square of normal noise, from which on a difference between uploads is more than that


class Verdict(Enum):
    """What a comparison says."""

    SAME = "same"
    DIFFERENT = "different"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Comparison:
    """How two uploads, or groups of them, agree outside of their joint span, in units of what noise reaches there."""

    difference: float  # square of the largest difference in a single direction
    unlike: float  # the same, had one of them shown its patches in other places
    directions: int  # outside of the joint span

    @property
    def verdict(self) -> Verdict:
        """Different beyond noise; the same if another picture would have been, and by far more."""
        if self.difference >= BEYOND:
            return Verdict.DIFFERENT
        return Verdict.SAME if self.unlike >= max(BEYOND, APART * self.difference) else Verdict.UNDECIDED


@dataclass(frozen=True)
class Statement:
    """What uploads of one picture state about it."""

    known: Tensor  # (patches, values) float64
    basis: Tensor  # (open, values) float64, orthonormal rows that span what ``known`` says nothing about
    covariance: Tensor  # (patches, patches) of the errors of a value of ``known``
    variance: Tensor  # (patches,) the same of single patches
    unexplained: Tensor  # (equations, values), noise alone
    unseen: Tensor  # (patches,) bool, True where the patch was masked in every upload
    errs: int = 0  # directions in which ``known`` is wrong (fact 10)

    @staticmethod
    def of(facts: Sequence[LinearFacts]) -> "Statement":
        """What they state together."""
        unseen = torch.stack([upload.mask for upload in facts]).all(dim=0)
        unexplained = torch.cat([upload.unexplained for upload in facts])
        if len(facts) == 1:
            (fact,) = facts
            return Statement(fact.stated, fact.open, fact.covariance, fact.variance, unexplained, unseen, fact.errs)
        stack = Stack.of(facts)
        covariance = torch.stack([upload.covariance for upload in facts]).mean(dim=0) / SURELY
        variance = torch.stack([upload.variance for upload in facts]).amax(dim=0) / SURELY
        errs = sum(fact.errs for fact in facts)
        return Statement(*stack.solve(stack.strengths < SURELY), covariance, variance, unexplained, unseen, errs)


def compare(one: Statement, other: Statement) -> Comparison:
    """Compare what is stated outside of the joint span of what both leave open."""
    spans = torch.cat([one.basis, other.basis])
    errs = one.errs + other.errs
    directions = spans.shape[1] - len(spans)
    seen = ~(one.unseen & other.unseen)
    covariance = (one.covariance + other.covariance)[seen][:, seen]
    if directions <= errs or not covariance.any() or not covariance.isfinite().all():
        return Comparison(0.0, 0.0, 0)
    joint = torch.linalg.qr(spans.mT).Q
    noise = [rest - (rest @ joint) @ joint.mT for rest in (one.unexplained, other.unexplained)]
    ridge = RIDGE * covariance.diagonal().mean() * torch.eye(len(covariance)).to(covariance)
    root = torch.linalg.cholesky(covariance + ridge)

    def largest(difference: Tensor) -> float:
        """Square of its largest singular value, white over the patches, over what noise has in its direction.

        Those in which the statements err by fact 10 are left out.
        """
        outside = difference - (difference @ joint) @ joint.mT
        white = torch.linalg.solve_triangular(root, outside, upper=False)
        _, singular, along = torch.linalg.svd(white, full_matrices=False)
        louder = torch.stack([(rest @ along.mT).square().mean(0) / _mean_square(rest, directions) for rest in noise])
        reach = (len(white) ** 0.5 + directions**0.5) ** 2
        relative = singular.square() / louder.amax(dim=0).clamp(min=1)
        square = relative.sort(descending=True).values[errs : errs + 1].sum() / reach
        return float(square / UNSURE if errs else square)

    first, second = one.known[seen], other.known[seen]
    elsewhere = torch.randperm(len(second), generator=torch.Generator().manual_seed(0)).to(second.device)
    return Comparison(largest(first - second), largest(first - second[elsewhere]), directions)


def _mean_square(rest: Tensor, directions: int) -> Tensor:
    """Of noise in each of so many directions; the smallest number keeps exactness from being divided by."""
    return (rest.square().sum() / (len(rest) * directions)).clamp(min=torch.finfo(rest.dtype).tiny)


@dataclass(frozen=True)
class Links:
    """Uploads by how they compare with the first, ascending."""

    same: list[int]  # of its picture, itself included
    undecided: list[int]  # perhaps of its picture


def same_but_for_noise(one: Upload, other: Upload, threat: ThreatModel) -> bool:
    """Whether uploads of the same weights differ by no more than the noise that the server is told of."""
    if one.weights != other.weights:
        return False
    for name, tensor in one.tensors.items():
        variance = threat.noise_on(tensor) ** 2 + threat.noise_on(other.tensors[name]) ** 2
        loudest = variance * (1 + DEVIATIONS * (2 / tensor.numel()) ** 0.5)
        if float((tensor.double() - other.tensors[name].double()).square().mean()) > loudest:
            return False
    return True


def link(facts: Sequence[LinearFacts], same: Sequence[int] = ()) -> Links:
    """Which uploads are of the same picture as the first, as ``same`` are, and of which that cannot be told."""
    alone = [Statement.of([upload]) for upload in facts]
    group, pending = [0, *same], [index for index in range(1, len(facts)) if index not in same]
    stated = Statement.of([facts[index] for index in group])
    while pending:
        verdicts = {index: compare(stated, alone[index]).verdict for index in pending}
        joined = [index for index, verdict in verdicts.items() if verdict is Verdict.SAME]
        pending = [index for index, verdict in verdicts.items() if verdict is Verdict.UNDECIDED]
        group += joined
        if not joined:
            break
        stated = Statement.of([facts[index] for index in group])
    if any(compare(stated, alone[index]).verdict is Verdict.DIFFERENT for index in group):
        agreeing = _agreeing([alone[index] for index in group])
        pending = sorted(pending + [index for place, index in enumerate(group) if place not in agreeing])
        group = [group[place] for place in agreeing]
    return Links(sorted(group), pending)


def _agreeing(members: Sequence[Statement]) -> list[int]:
    """Places of members, the first among them, that contradict none of the others: who contradicts most goes first."""
    contradict = torch.zeros(len(members), len(members))
    for one, other in combinations(range(len(members)), 2):
        if compare(members[one], members[other]).verdict is Verdict.DIFFERENT:
            contradict[one, other] = contradict[other, one] = 1
    left = list(range(len(members)))
    while contradict.any():
        worst = 1 + int(contradict[1:].sum(dim=1).argmax())
        contradict[worst] = contradict[:, worst] = 0
        left.remove(worst)
    return left


def groups(facts: Sequence[LinearFacts]) -> list[list[int]]:
    """All uploads of a client by picture; those that cannot be joined to others are groups of their own."""
    ungrouped, pictures = list(range(len(facts))), []
    while ungrouped:
        members = [ungrouped[place] for place in link([facts[index] for index in ungrouped]).same]
        pictures.append(members)
        ungrouped = [index for index in ungrouped if index not in members]
    return pictures

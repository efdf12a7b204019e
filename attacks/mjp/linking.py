"""Which uploads of a client are of one picture.

Upload r states e_t = (I - P_r) x_t for every patch t in its true place (``fedmjp.attacks.mjp.facts``), masked
patches included. Let P be the projector on what P_r and P_s leave open together. Outside of it both uploads
state the same patches in full: if they are of one picture,

    (I - P) (e_t^(r) - e_t^(s)) = 0 for every t,

up to noise. Its covariance between patches is known from the facts, so that the difference can be made white over the
patches. Copies of a picture that differ in brightness, in one colour or at one patch differ in a single direction of
the patches and of their values. A mean over all of them does not see that. So the largest singular values are held
against the largest that noise alone has, each in units of the noise that the uploads show in its own direction.

Over all directions noise reaches far. In one that is known beforehand it does not: another exposure and a cast
of one colour change all patches alike, evenly over the pixels of a channel. In that combination of patches and pixels
noise is told by the difference itself, as what the same patches differ by in other directions, and others in the same.
Where the joint span nearly holds what is even, as under large masks, no test sees an exposure: by how much a copy may
then differ unnoticed is said of every comparison.

Pictures that differ by more are told apart. That uploads are of one picture is said where another picture, of the
same patches in other places, would have differed by far more. Where it would not, as under loud noise, nor where a
joint span leaves no direction outside (patches of few values, large masks), nothing is decided, and what is not
decided is not joined. It is then compared with all that the group states together, which leaves less open, so that
members that did join let more be decided. A third upload may show what two hide: each member is compared with what
all others state together, and what they contradict most leaves the group.

Under loud noise all of this decides nothing. But uploads of the same weights and picture without a mask are the same
but for noise, of a variance that the server is told: a difference of any other kind is louder.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from fedmjp.attacks.mjp.affine import Stack
from fedmjp.attacks.mjp.facts import LinearFacts
from fedmjp.records import Upload
from fedmjp.threat import ThreatModel

# In units of the largest square that noise alone has: from here on a difference is none of noise. Between uploads of
# one picture on DeiT-S and ``zoo:coarse-mjp-0`` it was at most 3.6 but for 3 of 2,100 pairs (results/linking), and at
# least 21 between a picture and a copy with other values in one pixel.
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
CHANNELS = 3
TELLING = 12  # patches, and directions, that tell how loud noise is in a few of them
DEVIATIONS = 8.0  # of the mean square of normal noise, from which on a difference between uploads is more than that


class Verdict(Enum):
    """The outcome of a comparison."""

    SAME = "same"
    DIFFERENT = "different"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Comparison:
    """The agreement of two uploads, or groups, outside of their joint span, in units of the noise there."""

    difference: float  # square of the largest difference in a single direction
    unlike: float  # the same, had one of them shown its patches in other places
    directions: int  # outside of the joint span
    exposed: float = 0.0  # square of the difference if one had been exposed by 1, in the network's input space

    @property
    def verdict(self) -> Verdict:
        """Return different beyond noise, and the same if another picture would have been different, and by far more."""
        if self.difference >= BEYOND:
            return Verdict.DIFFERENT
        return Verdict.SAME if self.unlike >= max(BEYOND, APART * self.difference) else Verdict.UNDECIDED

    @property
    def unnoticed(self) -> float:
        """Return the exposure, in the network's input space, by which a copy may differ unnoticed."""
        return (1 + math.sqrt(BEYOND)) / math.sqrt(self.exposed) if self.exposed else math.inf


@dataclass(frozen=True)
class Statement:
    """The statement of one or several uploads about their picture."""

    stated: Tensor  # (patches, values) float64
    basis: Tensor  # (open, values) float64, orthonormal rows that span what ``stated`` says nothing about
    covariance: Tensor  # (patches, patches) of the errors of a value of ``stated``
    variance: Tensor  # (patches,) the same of single patches
    unexplained: Tensor  # (equations, values), noise alone
    unseen: Tensor  # (patches,) bool, True where the patch was masked in every upload
    errs: int = 0  # directions in which ``stated`` is wrong (fact 10)
    uneven: bool = False  # whether errors may be far louder in some directions than in others

    @staticmethod
    def of(facts: Sequence[LinearFacts]) -> "Statement":
        """Join the facts of uploads of one picture.

        Args:
            facts: One or more.
        """
        unseen = torch.stack([upload.mask for upload in facts]).all(dim=0)
        unexplained = torch.cat([upload.unexplained for upload in facts])
        if len(facts) == 1:
            (fact,) = facts
            fields = (fact.stated, fact.open, fact.covariance, fact.variance)
            return Statement(*fields, unexplained, unseen, fact.errs, fact.uneven)
        stack = Stack.of(facts)
        covariance = torch.stack([upload.covariance for upload in facts]).mean(dim=0) / SURELY
        variance = torch.stack([upload.variance for upload in facts]).amax(dim=0) / SURELY
        errs, uneven = sum(fact.errs for fact in facts), any(fact.uneven for fact in facts)
        fields = (*stack.solve(stack.strengths < SURELY), covariance, variance)
        return Statement(*fields, unexplained, unseen, errs, uneven)


@dataclass(frozen=True)
class _Outside:
    """The space outside of the joint span of what two statements leave open, and the noise there."""

    joint: Tensor  # (span, values) orthonormal rows
    root: Tensor  # (patches, patches) of the covariance of the differences of seen patches
    noise: list[Tensor]  # per statement (equations, values), noise alone
    directions: int
    errs: int  # of these, in which the statements err by fact 10
    uneven: bool  # whether noise may be far louder in some of them than in others

    def project(self, rows: Tensor) -> Tensor:
        """Remove the part of rows along the joint span.

        Args:
            rows: (any, values).
        """
        return rows - (rows @ self.joint.mT) @ self.joint

    def whiten(self, patches: Tensor) -> Tensor:
        """Combine patches so that noise has the same variance in each combination.

        Args:
            patches: (patches, any).
        """
        white: Tensor = torch.linalg.solve_triangular(self.root, patches, upper=False)
        return white

    def louder(self, along: Tensor) -> Tensor:
        """Return how much louder than in other directions noise is along rows, (any,), at least 1.

        Args:
            along: (any, values).
        """
        squares = [
            (sample @ along.mT).square().mean(0) / _mean_square(sample, self.directions) for sample in self.noise
        ]
        return torch.stack(squares).amax(dim=0).clamp(min=1)


def compare(former: Statement, latter: Statement) -> Comparison:
    """Compare two statements outside of the joint span of what both leave open.

    Args:
        former: The statement of one or several uploads.
        latter: The statement of other uploads of the client.
    """
    outside = _outside(former, latter)
    if outside is None:
        return Comparison(0.0, 0.0, 0)
    visible = ~(former.unseen & latter.unseen)
    first, second = outside.project(former.stated[visible]), outside.project(latter.stated[visible])
    elsewhere = torch.randperm(len(second), generator=torch.Generator().manual_seed(0)).to(second.device)
    difference = outside.whiten(first - second)
    largest, even = _largest(difference, outside), _even(difference, outside)
    unlike = _largest(outside.whiten(first - second[elsewhere]), outside)
    exposed = max(even[1], _exposed(outside))
    return Comparison(max(largest, even[0]), unlike, outside.directions, exposed)


def _outside(former: Statement, latter: Statement) -> _Outside | None:
    """Return what lies outside; None if nothing does, or the loudness of the noise there is not known."""
    spans = torch.cat([former.basis, latter.basis])
    directions, errs = spans.shape[1] - len(spans), former.errs + latter.errs
    visible = ~(former.unseen & latter.unseen)
    covariance = (former.covariance + latter.covariance)[visible][:, visible]
    if directions <= errs or not covariance.any() or not covariance.isfinite().all():
        return None
    joint = torch.linalg.qr(spans.mT).Q.mT
    noise = [sample - (sample @ joint.mT) @ joint for sample in (former.unexplained, latter.unexplained)]
    ridge = RIDGE * covariance.diagonal().mean() * torch.eye(len(covariance)).to(covariance)
    root = torch.linalg.cholesky(covariance + ridge)
    return _Outside(joint, root, noise, directions, errs, former.uneven or latter.uneven)


def _largest(white: Tensor, outside: _Outside) -> float:
    """Return the square of the largest singular value over the noise in its direction, in units of what noise reaches.

    Those in which the statements err by fact 10 are left out.
    """
    _, singular, along = torch.linalg.svd(white, full_matrices=False)
    relative = (singular.square() / outside.louder(along)).sort(descending=True).values
    square = relative[outside.errs : outside.errs + 1].sum() / _reach(len(white), outside.directions)
    return float(square / UNSURE if outside.errs else square)


def _even(white: Tensor, outside: _Outside) -> tuple[float, float]:
    """Return the square of what all patches differ by alike, evenly over a channel, in units of what noise reaches.

    Noise is what the same combination of the patches differs by in other directions, or what other combinations differ
    by in the same, whichever is louder. Second, the square that an exposure of 1 in the network's input space has. Both
    are zero where noise is not told so.
    """
    patches, values = white.shape
    if outside.errs or outside.uneven or min(patches, outside.directions) < TELLING:
        return 0.0, 0.0
    channels = outside.project(torch.eye(CHANNELS).to(white).repeat_interleave(values // CHANNELS, dim=1))
    along = torch.linalg.qr(channels.mT).Q.mT
    uniform = outside.whiten(white.new_ones(patches, 1))[:, 0]
    combined = uniform @ white / uniform.norm()
    even = along @ combined
    same_patches = outside.louder(along) * _mean_square((combined - even @ along)[None], outside.directions - CHANNELS)
    same_direction = ((white @ along.mT).square().sum(dim=0) - even.square()) / (patches - 1)
    loud = torch.maximum(same_patches, same_direction) * _reach(1, CHANNELS)
    exposure = uniform.norm() * (along @ channels.sum(dim=0))
    return float((even.square() / loud).sum()), float((exposure.square() / loud).sum())


def _exposed(outside: _Outside) -> float:
    """Return the square that an exposure of 1 has among all directions, in units of what noise reaches there.

    Zero where the statements err (fact 10): the exposure may pass for such an error.
    """
    if outside.errs:
        return 0.0
    patches, values = len(outside.root), outside.joint.shape[1]
    uniform = outside.whiten(outside.root.new_ones(patches, 1))
    exposure = outside.project(outside.root.new_ones(1, values))
    loud = outside.louder(torch.nn.functional.normalize(exposure)) * _reach(patches, outside.directions)
    return float(uniform.square().sum() * exposure.square().sum() / loud)


def _reach(patches: int, directions: int) -> float:
    """Return the largest square that white noise has in a single direction of so many patches and values."""
    return (math.sqrt(patches) + math.sqrt(directions)) ** 2


def _mean_square(sample: Tensor, directions: int) -> Tensor:
    """Return the mean square of noise in each of so many directions, bounded away from zero for a division."""
    return (sample.square().sum() / (len(sample) * directions)).clamp(min=torch.finfo(sample.dtype).tiny)


@dataclass(frozen=True)
class Links:
    """Uploads by how they compare with the first, ascending."""

    same: list[int]  # of its picture, itself included
    undecided: list[int]  # perhaps of its picture
    unnoticed: float = 0.0  # ``Comparison.unnoticed`` of the member of ``same`` of which it is largest


def same_but_for_noise(former: Upload, latter: Upload, threat: ThreatModel) -> bool:
    """Say whether uploads of the same weights differ by no more than the noise that the server is told of.

    Args:
        former: An upload.
        latter: Another of the client.
        threat: States the noise.
    """
    if former.weights != latter.weights:
        return False
    for name, tensor in former.tensors.items():
        variance = threat.noise_on(tensor) ** 2 + threat.noise_on(latter.tensors[name]) ** 2
        loudest = variance * (1 + DEVIATIONS * (2 / tensor.numel()) ** 0.5)
        if float((tensor.double() - latter.tensors[name].double()).square().mean()) > loudest:
            return False
    return True


def link(facts: Sequence[LinearFacts], same: Sequence[int] = ()) -> Links:
    """Find the uploads of the same picture as the first, and those of which that stays undecided.

    Args:
        facts: Those of all uploads of a client.
        same: Indices of uploads that are of the first's picture in any case.
    """
    statements = [Statement.of([upload]) for upload in facts]
    group, pending = [0, *same], [index for index in range(1, len(facts)) if index not in same]
    while pending:
        stated = Statement.of([facts[index] for index in group])
        verdicts = {index: compare(stated, statements[index]).verdict for index in pending}
        joined = [index for index, verdict in verdicts.items() if verdict is Verdict.SAME]
        pending = [index for index, verdict in verdicts.items() if verdict is Verdict.UNDECIDED]
        group += joined
        if not joined:
            break
    agreeing, unnoticed = _agreeing(facts, group)
    doubtful = [index for index in group if index not in agreeing]
    return Links(agreeing, sorted(pending + doubtful), unnoticed)


def _agreeing(facts: Sequence[LinearFacts], group: Sequence[int]) -> tuple[list[int], float]:
    """Return the members, ascending, that agree with what all others state, and the largest ``unnoticed`` of these.

    Who is contradicted most goes first. If that is the first upload, it stays alone.
    """
    remaining = sorted(group)
    while len(remaining) > 1:
        compared = {}
        for index in remaining:
            joint = Statement.of([facts[member] for member in remaining if member != index])
            compared[index] = compare(joint, Statement.of([facts[index]]))
        worst = max(remaining, key=lambda index: compared[index].difference)
        if compared[worst].verdict is not Verdict.DIFFERENT:
            return remaining, max(comparison.unnoticed for comparison in compared.values())
        remaining = [index for index in remaining if index != worst] if worst else [worst]
    return remaining, 0.0


def groups(facts: Sequence[LinearFacts]) -> list[list[int]]:
    """Group all uploads of a client by picture; those that cannot be joined to others are groups of their own.

    Args:
        facts: Those of all uploads of a client.
    """
    ungrouped, pictures = list(range(len(facts))), []
    while ungrouped:
        members = [ungrouped[place] for place in link([facts[index] for index in ungrouped]).same]
        pictures.append(members)
        ungrouped = [index for index in ungrouped if index not in members]
    return pictures

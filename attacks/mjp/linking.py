"""Which uploads of a client are of one picture.

Upload r states e_t = (I - P_r) x_t for every patch t in its true place (``attacks.mjp.facts``), masked
patches included, for which e_t = 0. Let P be the projector on what P_r and P_s span together. Outside
of it both uploads state the same patches in full: if they are of one picture,

    (I - P) (e_t^(r) - e_t^(s)) = 0 for every t,

up to noise, whose variance the facts estimate patch by patch. In units of that noise the mean square of
the difference is then about one. If they are of two pictures, it is as large as the patches themselves.
Of these two explanations the nearer one is taken, on a logarithmic scale: the bound between them is the
geometric mean of the two. On clean uploads they lie five to ten orders of magnitude apart. Pictures that
differ by less than that bound, as those of a burst may, count as one.

Two explanations that expect about the same are no ground for a decision, nor is a joint span that
leaves no direction outside (patches of few values, large masks). Then nothing is decided, and what is
not decided is not joined. It is then compared with all that the group states together, which leaves less
open, so that members that did join let more be decided.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from attacks.mjp.affine import Stack
from attacks.mjp.facts import LinearFacts

# Two explanations are told apart if they expect squares this far apart, which is how far off the noise's estimate
# may be. Uploads of two pictures then have a difference above a third of what it would be without likeness.
APART = 10.0
# A group states a direction if its members do so at least half as surely as one upload alone.
SURELY = 0.5


class Verdict(Enum):
    """What a comparison says."""

    SAME = "same"
    DIFFERENT = "different"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Comparison:
    """How two uploads, or groups of them, agree outside of their joint span, in units of the noise expected there."""

    difference: float  # mean square of the difference of what they state
    energy: float  # mean square of what each states, summed: the difference that two pictures are expected to have
    directions: int  # outside of the joint span

    @property
    def verdict(self) -> Verdict:
        """The nearer explanation, if they can be told apart."""
        if not self.directions or self.energy < APART:
            return Verdict.UNDECIDED
        return Verdict.SAME if self.difference**2 < self.energy else Verdict.DIFFERENT


@dataclass(frozen=True)
class Statement:
    """What uploads of one picture state about it."""

    known: Tensor  # (patches, values) float64
    basis: Tensor  # (open, values) float64, orthonormal rows that span what ``known`` says nothing about
    variance: Tensor  # (patches,) of the error of each value of ``known``
    unseen: Tensor  # (patches,) bool, True where the patch was masked in every upload

    @staticmethod
    def of(facts: Sequence[LinearFacts]) -> "Statement":
        """What they state together."""
        unseen = torch.stack([fact.mask for fact in facts]).all(dim=0)
        if len(facts) == 1:
            return Statement(facts[0].known, facts[0].basis, facts[0].variance, unseen)
        stack = Stack.of(facts)
        variance = torch.stack([fact.variance for fact in facts]).amax(dim=0)
        return Statement(*stack.solve(stack.strengths < SURELY), variance / SURELY, unseen)


def compare(one: Statement, other: Statement) -> Comparison:
    """Compare what is stated outside of the joint span of what both leave open."""
    spans = torch.cat([one.basis, other.basis])
    directions = spans.shape[1] - len(spans)
    seen = ~(one.unseen & other.unseen)
    if directions <= 0 or not seen.any():
        return Comparison(0.0, 0.0, 0)
    joint = torch.linalg.qr(spans.mT).Q

    noise = (one.variance + other.variance)[seen, None].sqrt()

    def outside(known: Tensor) -> Tensor:
        rest: Tensor = (known[seen] - (known[seen] @ joint) @ joint.mT) / noise
        return rest

    first, second = outside(one.known), outside(other.known)
    values = directions * int(seen.sum())
    return Comparison(
        difference=float((first - second).square().sum()) / values,
        energy=float(first.square().sum() + second.square().sum()) / values,
        directions=directions,
    )


def linked(facts: Sequence[LinearFacts]) -> list[int]:
    """Which uploads are of the same picture as the first, itself included, ascending."""
    alone = [Statement.of([fact]) for fact in facts]
    group, pending, stated = [0], list(range(1, len(facts))), alone[0]
    while pending:
        verdicts = {index: compare(stated, alone[index]).verdict for index in pending}
        joined = [index for index, verdict in verdicts.items() if verdict is Verdict.SAME]
        pending = [index for index, verdict in verdicts.items() if verdict is Verdict.UNDECIDED]
        group += joined
        if not joined:
            break
        if pending:
            stated = Statement.of([facts[index] for index in group])
    return sorted(group)


def groups(facts: Sequence[LinearFacts]) -> list[list[int]]:
    """All uploads of a client by picture; those that cannot be joined to others are groups of their own."""
    ungrouped, by_picture = list(range(len(facts))), []
    while ungrouped:
        members = [ungrouped[place] for place in linked([facts[index] for index in ungrouped])]
        by_picture.append(members)
        ungrouped = [index for index in ungrouped if index not in members]
    return by_picture

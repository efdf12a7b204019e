"""What a search found, its tokens put where they stand."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedmjp.attacks.first_block.places import TokenEmbedding
from fedmjp.attacks.gauss_newton.complete import PatchPosterior
from fedmjp.attacks.gauss_newton.evidence import DOUBT, Evidence
from fedmjp.attacks.gauss_newton.levenberg import Minimum
from fedmjp.attacks.gauss_newton.picked import KnownEntries, PickedResiduals
from fedmjp.attacks.gauss_newton.placing import PlacementCost, off
from fedmjp.attacks.gauss_newton.space import OpenSpace
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier

LIKELY = 20  # orders of those that are drawn, the likeliest by ``placing``, that ``evidence`` compares
TRIED = 3  # orders in doubt, the likeliest, from which another search may start
EXPLAINED = 3.0  # residual from which on a search has not arrived, and nothing is made of it


@dataclass(frozen=True)
class StartPoint:
    """Where a search begins.

    Attributes:
        unknowns: (unknowns,) float64.
        gram: (unknowns, unknowns), how the cost curves there, if that is known already.
        below: Cost from which on nothing will be made of what is found.
    """

    unknowns: Tensor
    gram: Tensor | None = None
    below: float = math.inf


@dataclass(frozen=True)
class SearchResult:
    """Where a search ended."""

    minimum: Minimum
    space: OpenSpace  # that was searched
    residuals: PickedResiduals  # that it compared, or what makes the gradients of candidates
    count: int  # entries that it compared
    residual: float  # their root mean square there

    @property
    def arrived(self) -> bool:
        """Whether it explains the upload."""
        return self.residual < EXPLAINED

    @property
    def learned(self) -> float:
        """The share of what was not known of the unknowns that entries told."""
        unsure = torch.cholesky_inverse(torch.linalg.cholesky(self.minimum.gram))
        return float(1 - unsure.diagonal().mean())

    @cached_property
    def spectrum(self) -> tuple[Tensor, Tensor]:
        """(unknowns,) eigenvalues of how the cost curves, and (unknowns, unknowns) vectors in columns."""
        strengths, axes = torch.linalg.eigh(self.minimum.gram)
        return strengths.clamp(min=1.0), axes  # the prior's is 1: rounding makes less of it

    def after(self, steps: int) -> "SearchResult":
        """The same after so many steps of other searches."""
        return replace(self, minimum=replace(self.minimum, steps=self.minimum.steps + steps))


@dataclass(frozen=True)
class OrderedTokens:
    """Tokens in an order.

    Attributes:
        stated: Of patches in that order.
        unscaled: By what the clients' gradient is larger than what they scaled.
        moved: Whether a token stands elsewhere than where it was found.
    """

    stated: PatchPosterior
    unscaled: float
    moved: bool


@dataclass(frozen=True)
class OrderedResult:
    """A search, and the order of its tokens, if it is known already.

    Attributes:
        found: By the search.
        ordered: Its tokens.
        sure: Whether the position embedding's entries leave no doubt of their order.
    """

    found: SearchResult
    ordered: OrderedTokens | None = None
    sure: bool = False

    def after(self, steps: int) -> "OrderedResult":
        """The same after so many steps of other searches."""
        return replace(self, found=self.found.after(steps))


@dataclass(frozen=True)
class Ordering:
    """Puts the tokens of searches for one upload in order.

    Attributes:
        space: That is searched.
        entrance: Of the model.
        known: Entries of both embeddings' gradients.
        model: With the weights of the upload.
        generator: Draws orders to begin with.
    """

    space: OpenSpace
    entrance: TokenEmbedding
    known: Mapping[str, KnownEntries]
    model: VitClassifier
    generator: torch.Generator

    def of(self, found: SearchResult, until: float) -> list[OrderedTokens]:
        """What was found, in orders that are in doubt, the likeliest first; as found where no entry of a place is left.

        Orders are drawn until ``until``, of ``time.thread_time()``.
        """
        here = self.as_found(found)
        stated, unscaled = here.stated, here.unscaled
        patch_weight, positions = (
            self.known[name].scaled(unscaled) for name in (names.PATCH_WEIGHT, names.POSITION_EMBEDDING)
        )
        if not positions.values.any():
            return [here]
        unsure = _unsure(found)
        placing = PlacementCost.of(
            stated, unsure, self.space, self.entrance, patch_weight, positions, self.model.prefix_tokens
        )
        patches = found.space.patches(found.minimum.point)[0]
        standing = torch.arange(len(patches), device=patches.device)
        natural = self.entrance.by_prior(self.entrance.tokens(patches), self.model)
        likely = placing.best((standing, natural), self.generator, until, LIKELY)
        evidence = Evidence.of(stated, self.space, self.entrance, patch_weight, positions, self.model.prefix_tokens)
        orders = evidence.likeliest(likely, placing.swaps, until)[:TRIED]
        return [
            here
            if torch.equal(order, standing)
            else OrderedTokens(stated.moved(order, self.space.basis, self.entrance), unscaled, moved=True)
            for order in orders
        ]

    def sure(self, found: SearchResult) -> bool:
        """Whether any two tokens in each other's places would be further from the entries there, beyond doubt."""
        patches = found.space.patches(found.minimum.point)[0]
        positions = self.known[names.POSITION_EMBEDDING].scaled(1 / found.residuals.scale(patches))
        slopes = found.residuals.factors(patches).at_tokens[0, self.model.prefix_tokens :]
        apart = off(slopes, positions, self.model.prefix_tokens)
        stands = apart.diagonal()
        more = apart + apart.mT - stands[:, None] - stands
        return bool((more.fill_diagonal_(torch.inf) > DOUBT).all())

    def as_found(self, found: SearchResult) -> OrderedTokens:
        """What was found, as it was found."""
        patches = found.space.patches(found.minimum.point)[0]
        slopes = found.residuals.factors(patches).at_tokens[0, self.model.prefix_tokens :]
        stated = PatchPosterior.of(found.space, found.minimum.point, found.spectrum, slopes)
        return OrderedTokens(stated, 1 / found.residuals.scale(patches), moved=False)

    def begin(self, ordered: OrderedTokens, below: float) -> StartPoint:
        """Of tokens in their order, in the space of whole pictures, where it is known of them how the cost curves."""
        return StartPoint(self._unknowns(ordered), ordered.stated.gram(self.space), below)

    def start(self, found: SearchResult, until: float) -> StartPoint:
        """From which the next search begins: where the last one ended, its tokens in order if it arrived."""
        if found.space is self.space:
            return StartPoint(found.minimum.point)
        if found.arrived:  # without places, how the cost curves was not known of all
            return StartPoint(self._unknowns(self.of(found, until)[0]))
        return StartPoint(self.space.unknowns(found.space.patches(found.minimum.point)))

    def _unknowns(self, ordered: OrderedTokens) -> Tensor:
        return self.space.unknowns((ordered.stated.along @ self.space.basis)[None])


def _unsure(found: SearchResult) -> Tensor:
    """(rank, rank): how far off what a search says of a token may be, on average over tokens."""
    strengths, axes = found.spectrum
    halves = found.space.root @ (axes / strengths.sqrt())
    tokens = halves.view(len(found.space.natural), len(found.space.basis), -1)
    return torch.einsum("aiu,aju->ij", tokens, tokens) / len(tokens)

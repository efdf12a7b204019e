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
        """Tell whether it explains the upload."""
        return self.residual < EXPLAINED

    @property
    def learned(self) -> float:
        """Return the share of the unknowns' prior uncertainty that entries removed."""
        unsure = torch.cholesky_inverse(torch.linalg.cholesky(self.minimum.gram))
        return float(1 - unsure.diagonal().mean())

    @cached_property
    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Return eigenvalues (unknowns,) of how the cost curves, and eigenvectors (unknowns, unknowns) in columns."""
        strengths, axes = torch.linalg.eigh(self.minimum.gram)
        return strengths.clamp(min=1.0), axes  # the prior's is 1: rounding makes less of it

    def after(self, steps: int) -> "SearchResult":
        """Add the steps of preceding searches."""
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
        result: Of the search.
        ordered: Its tokens.
        sure: Whether the position embedding's entries leave no doubt of their order.
    """

    result: SearchResult
    ordered: OrderedTokens | None = None
    sure: bool = False

    def after(self, steps: int) -> "OrderedResult":
        """Add the steps of preceding searches."""
        return replace(self, result=self.result.after(steps))


@dataclass(frozen=True)
class Ordering:
    """Puts the tokens of searches for one upload in order.

    Attributes:
        space: That is searched.
        entrance: Of the model.
        known_entries: Entries of both embeddings' gradients.
        model: With the weights of the upload.
        generator: Draws orders to begin with.
    """

    space: OpenSpace
    entrance: TokenEmbedding
    known_entries: Mapping[str, KnownEntries]
    model: VitClassifier
    generator: torch.Generator

    def of(self, result: SearchResult, until: float) -> list[OrderedTokens]:
        """Return the result in the orders that are in doubt, the likeliest first; as it is where no entry tells places.

        Args:
            result: Of a search.
            until: Of ``time.thread_time()``, after which no order is drawn.
        """
        standing_order = self.as_found(result)
        stated, unscaled = standing_order.stated, standing_order.unscaled
        patch_weight, positions = (
            self.known_entries[name].scaled(unscaled) for name in (names.PATCH_WEIGHT, names.POSITION_EMBEDDING)
        )
        if not positions.values.any():
            return [standing_order]
        unsure = _unsure(result)
        placing = PlacementCost.of(
            stated, unsure, self.space, self.entrance, patch_weight, positions, self.model.prefix_tokens
        )
        patches = result.space.patches(result.minimum.point)[0]
        standing = torch.arange(len(patches), device=patches.device)
        natural = self.entrance.by_prior(self.entrance.tokens(patches), self.model)
        likely = placing.best((standing, natural), self.generator, until, LIKELY)
        evidence = Evidence.of(stated, self.space, self.entrance, patch_weight, positions, self.model.prefix_tokens)
        orders = evidence.likeliest(likely, placing.swaps, until)[:TRIED]
        return [
            standing_order
            if torch.equal(order, standing)
            else OrderedTokens(stated.moved(order, self.space.basis, self.entrance), unscaled, moved=True)
            for order in orders
        ]

    def sure(self, result: SearchResult) -> bool:
        """Tell whether any two tokens in each other's places would fit the entries there worse, beyond doubt."""
        patches = result.space.patches(result.minimum.point)[0]
        positions = self.known_entries[names.POSITION_EMBEDDING].scaled(1 / result.residuals.scale(patches))
        slopes = result.residuals.factors(patches).at_tokens[0, self.model.prefix_tokens :]
        distances = off(slopes, positions, self.model.prefix_tokens)
        stands = distances.diagonal()
        more = distances + distances.mT - stands[:, None] - stands
        return bool((more.fill_diagonal_(torch.inf) > DOUBT).all())

    def as_found(self, result: SearchResult) -> OrderedTokens:
        """Return the tokens of a result where they stand."""
        patches = result.space.patches(result.minimum.point)[0]
        slopes = result.residuals.factors(patches).at_tokens[0, self.model.prefix_tokens :]
        stated = PatchPosterior.of(result.space, result.minimum.point, result.spectrum, slopes)
        return OrderedTokens(stated, 1 / result.residuals.scale(patches), moved=False)

    def begin(self, ordered: OrderedTokens, below: float) -> StartPoint:
        """Build the start at ordered tokens in the space of whole pictures, where it is known how the cost curves.

        Args:
            ordered: Tokens.
            below: Cost from which on nothing will be made of the result.
        """
        return StartPoint(self._unknowns(ordered), ordered.stated.gram(self.space), below)

    def start(self, result: SearchResult, until: float) -> StartPoint:
        """Build the start of the next search: where the last one ended, its tokens in order if it arrived.

        Args:
            result: Of the last search.
            until: Of ``time.thread_time()``, after which no order is drawn.
        """
        if result.space is self.space:
            return StartPoint(result.minimum.point)
        if result.arrived:  # without places, how the cost curves was not known of all
            return StartPoint(self._unknowns(self.of(result, until)[0]))
        return StartPoint(self.space.unknowns(result.space.patches(result.minimum.point)))

    def _unknowns(self, ordered: OrderedTokens) -> Tensor:
        return self.space.unknowns((ordered.stated.along @ self.space.basis)[None])


def _unsure(result: SearchResult) -> Tensor:
    """Return (rank, rank): how far off what a search says of a token may be, on average over tokens."""
    strengths, axes = result.spectrum
    halves = result.space.root @ (axes / strengths.sqrt())
    tokens = halves.view(len(result.space.natural), len(result.space.basis), -1)
    return torch.einsum("aiu,aju->ij", tokens, tokens) / len(tokens)

"""The network's equations where defences degraded the entries of gradients."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedmjp.attacks.base import Attack, picture
from fedmjp.attacks.entries import COARSE, unread
from fedmjp.attacks.first_block.places import TokenEmbedding
from fedmjp.attacks.gauss_newton.body import shown_directions
from fedmjp.attacks.gauss_newton.complete import complete
from fedmjp.attacks.gauss_newton.levenberg import Minimum, StoppingRule, minimise
from fedmjp.attacks.gauss_newton.ordered import OrderedResult, OrderedTokens, Ordering, SearchResult, StartPoint
from fedmjp.attacks.gauss_newton.picked import PickedResiduals, UploadedEntries, anywhere, largest, some
from fedmjp.attacks.gauss_newton.residuals import compared_tensors
from fedmjp.attacks.gauss_newton.residuals import refusal as residuals_refusal
from fedmjp.attacks.gauss_newton.sides import NARROW, WIDE, SignConstraints
from fedmjp.attacks.gauss_newton.sides import search as by_sides
from fedmjp.attacks.gauss_newton.space import OpenSpace, Prior
from fedmjp.attacks.gauss_newton.whole import FullSearch
from fedmjp.attacks.joint_posterior import PicturePrior
from fedmjp.attacks.labels import labels_of
from fedmjp.attacks.patch_embedding_degraded import PatchEmbeddingDegraded, different, further, is_clean
from fedmjp.config import Config
from fedmjp.defences.base import Mark
from fedmjp.errors import AttackFailedError
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import to_patches
from fedmjp.records import Reconstruction, Upload
from fedmjp.threat import ThreatModel

SEARCHED = 0.9  # of the seconds: the others are for the order of tokens
RESTART = 0.5  # standard deviations of the prior by which a further start is moved
NOISE: frozenset[Mark] = frozenset({"noisy", "rounded"})
SCALED: frozenset[Mark] = frozenset({"scaled"})
HARD = 0.5  # of ``most_unknowns``: those searched for where what pruning kept is exact, or signs alone are left
LITTLE = 0.05  # of the unknowns: where entries tell less, nothing is made of it
FINE = 0.05  # of the gains that count elsewhere: a search along a curved valley gains little by little
USUAL = 100.0  # seconds of one core, on the board of defences
GAIN = 1.0  # of the cost: an order of tokens that gains less is as good as the one before
BRIEF = 2  # slow steps with some entries, before all are compared
LEAST = (0.1, 0.05, 0.02, 0.01)  # of the noise of random rounding, in squared steps: the less, the better it is known
FEWER = (8, 3)  # of so many directions one is searched before all are: those in which pictures vary most

Find = Callable[[OpenSpace, StartPoint], SearchResult]


@dataclass(frozen=True)
class SearchMethod:
    """From a start to what it finds.

    Attributes:
        find: In a space, from a start.
        find_again: From the tokens that it found, in another order; None of a search where all patches are alike.
    """

    find: Find
    find_again: Find | None


class NetworkDegradedOptions(Config):
    """Budget of ``network_degraded``."""

    starts: int = Field(2, ge=1, description="searches at most: where one does not arrive, another with noise")
    steps: int = Field(400, ge=1, description="Jacobians of one search at most")
    seconds: float = Field(
        300.0,
        gt=0,
        allow_inf_nan=False,
        description="of work of one core, the last tenth for the order of tokens, after which no step is begun",
    )
    most_unknowns: int = Field(
        3200,
        ge=1,
        description="unknowns at most, half as many of pruned entries and signs; memory and time of a Jacobian grow "
        "with them",
    )


class NetworkDegraded(Attack[VitClassifier]):
    """Search for the picture whose gradients have the entries that defences left.

    A picture has far fewer values than a gradient has entries, so that a hundredth of these determines all that tokens
    show of it, whatever the other entries were. Levenberg-Marquardt searches all patches at once, along the directions
    that their tokens show, from the picture of ``patch_embedding_degraded`` on: entries that are known are compared
    one by one, each in units of its noise, and a prior of natural pictures weighs as much as it says. What was pruned
    is left out. A candidate's gradients are scaled as they fit best, where clients scaled theirs. Where noise is on
    entries, some of each tensor lead near the picture, and all of them, by first derivatives, to it (``whole``); where
    that leaves doubt of where tokens stand, another search begins without places. Of signs a candidate's entries are to
    be on the same sides of zero (``sides``).

    Further uploads of the same picture at the same weights differ in noise and random rounding alone: their mean has
    less of both. Which they are is told as in ``patch_embedding_degraded``; those at other weights help in the start.

    An upload that nothing degraded is given to ``patch_embedding``, as there.

    Where a search does not arrive, another starts near by. Where none does, the picture that they began with is the
    answer.

    The network takes tokens as a set, so that a search can find them and not where they stand. What is left of both
    embeddings' gradients tells their order (``placing``, ``evidence``), and the search goes on from there. What random
    rounding put on an entry follows at last from where the candidate has it between two levels. Then the
    slopes at the tokens are known, and what tokens do not show of a patch follows from the patch embedding's gradient
    (``complete``).

    ``residual`` is in units of the noise that is told: about 1 where the picture explains the upload; of signs less.
    """

    name = "network_degraded"
    paper = "ours: Gauss-Newton (Levenberg-Marquardt) on the entries that are left, with a prior of pictures"
    summary = "second-order search on what pruning, quantising, noise and rounding leave of all gradients"
    requires = (
        "the gradient, or the weight delta of one step, of embeddings and network, of one small picture without MJP: "
        "patches times the values that a token shows at most ``most_unknowns``, of pruned entries and signs half of "
        "that; an image size that the prior knows"
    )
    exploits = "the few entries that are left of gradients at all depths determine the picture"
    options_type = NetworkDegradedOptions
    stack = 1
    reads_others = True
    optimises = True
    uses_natural_patches = True

    @property
    def usual_seconds(self) -> float:
        """Return what a search for the 1,008 unknowns of a small model takes on average; few need all of theirs."""
        return min(USUAL, float(self.options.seconds))

    def tensors(self, model: VitClassifier) -> Sequence[str]:
        """Name the gradients of the embeddings, of linear layers in four blocks, and of the head."""
        return compared_tensors(model)

    def requirement(self, model: VitClassifier, threat: ThreatModel) -> str | None:
        """Require one step on one picture, entries that are known but for noise, and few unknowns."""
        if threat.update == "delta" and threat.local_steps > 1:
            return f"compares one gradient, not the sum of {threat.local_steps} steps"
        if reason := PatchEmbeddingDegraded().requirement(model, threat) or residuals_refusal(model):
            return reason
        dimensions, values = model.get_parameter(names.PATCH_WEIGHT).flatten(1).shape
        unknowns = model.grid**2 * min(dimensions - 1, values)
        most = self.options.most_unknowns
        if unknowns > most:
            return f"{unknowns} unknowns are to be found, and most_unknowns is {most}"
        hard = "signs" in threat.marks or ("pruned" in threat.marks and "noisy" not in threat.marks)
        if hard and unknowns > HARD * most:
            return (
                f"{unknowns} unknowns are to be found of pruned entries or signs, and half of most_unknowns, which is "
                f"{most}, is the most: searches for more were seen not to arrive"
            )
        return None

    def handles(self, model: VitClassifier, threat: ThreatModel) -> frozenset[Mark]:
        """Account for degraded entries that no further defence hides, and for scaling except of signs."""
        del model
        if unread(threat) is not None:
            return frozenset()
        return COARSE | NOISE if "signs" in threat.marks else COARSE | NOISE | SCALED

    @override
    def reconstruct(
        self, upload: Upload, model: VitClassifier, threat: ThreatModel, generator: torch.Generator
    ) -> Reconstruction:
        began = time.thread_time()
        (first_result,) = PatchEmbeddingDegraded().run([upload], model, threat, generator=generator)
        if is_clean(upload, threat):
            return first_result
        embedding, prior = TokenEmbedding.of(model), Prior.of(model)
        space = OpenSpace.of_shown(shown_directions(embedding), prior)
        first = (first_result.images.to(model.mean.device) - model.mean) / model.std
        start = space.unknowns(to_patches(first.double(), model.patch_size))
        label = torch.tensor(labels_of(upload, model, threat), device=first.device)
        repeats = [
            upload_of_picture
            for upload_of_picture in further(upload, PicturePrior(model), model, threat)
            if upload_of_picture.weights == upload.weights
        ]
        sent = UploadedEntries.of(different([upload, *repeats]), self.tensors(model), threat, model)
        known_entries = sent.known()
        if not any(len(entries.rows) for name, entries in known_entries.items() if name != names.PATCH_WEIGHT):
            raise AttackFailedError(f"{self.name}: no entry is left of any gradient")
        until = began + SEARCHED * self.options.seconds
        entries = partial(PickedResiduals, model, label, threat=threat)
        chains: list[list[SearchMethod]]
        stepped: FullSearch | None = None
        if "signs" in threat.marks:
            sides = SignConstraints.of(sent.gradients(), entries({}))
            near = partial(self._by_sides, sides, NARROW, until)
            wide = partial(self._by_sides, sides.anywhere, WIDE, until)
            chains = [[SearchMethod(wide, None), SearchMethod(near, near), SearchMethod(near, near)]]
        elif threat.marks & NOISE:
            few = some(known_entries, len(start), generator)
            placeless = FullSearch(entries(anywhere(known_entries)), entries(anywhere(few)))
            whole = FullSearch(entries(known_entries), entries(few))
            near = partial(self._by_all, whole, until)
            wide = partial(self._by_some, placeless, until)
            chains = [
                [SearchMethod(partial(self._by_some, whole, until), near)],
                [SearchMethod(wide, None), SearchMethod(near, near)],
            ]
            stepped = whole if any(entries.step for entries in known_entries.values()) else None
        else:
            exact = entries(largest(known_entries, len(start)))
            ends = StoppingRule(enough=float(len(start)), fine=FINE, until=until)
            near = partial(self._by_entries, exact, ends)
            chains = [[SearchMethod(near, near)]]
        ordering = Ordering(space, embedding, known_entries, model, generator)
        ordered_result = self._nearest(chains, ordering, start, until)
        if stepped and ordered_result.result.arrived and ordered_result.result.learned > LITTLE:
            ordered_result = self._by_steps(stepped, ordering, ordered_result, until)
        images, result = first_result.images, ordered_result.result
        if result.arrived and result.learned > LITTLE:
            ordered = ordered_result.ordered or ordering.of(result, began + self.options.seconds)[0]
            patch_weight = sent.said_of(names.PATCH_WEIGHT, ordered.unscaled)
            images = picture(complete(ordered.stated, space.basis, prior, patch_weight), model)
        diagnostics = {
            "residual": result.residual,
            "entries": float(result.count),
            "unknowns": float(len(start)),
            "steps": float(result.minimum.steps),
        }
        return Reconstruction(images, {**diagnostics, "uploads_averaged": float(sent.uploads)})

    def _by_entries(
        self, residuals: PickedResiduals, ends: StoppingRule, space: OpenSpace, start: StartPoint
    ) -> SearchResult:
        """Search by second derivatives."""
        return _found(self._minimum(residuals, space, start.unknowns, ends), space, residuals)

    def _by_some(self, whole: FullSearch, until: float, space: OpenSpace, start: StartPoint) -> SearchResult:
        """Search by second derivatives of some entries, then by first derivatives of all, if these tell anything."""
        unknowns = start.unknowns
        ends = StoppingRule(enough=float(whole.some.count + len(unknowns)), patience=BRIEF, until=until)
        for share in FEWER:
            coarse, begin = space.coarse(unknowns, len(unknowns) // share)
            minimum = self._minimum(whole.some, coarse, begin, replace(ends, patience=1))
            unknowns = space.unknowns(coarse.patches(minimum.point))
        near = self._minimum(whole.some, space, unknowns, ends)
        near = replace(near, gram=whole.of_all(near.gram))
        result = _found(near, space, whole.some)
        if result.learned < LITTLE or time.thread_time() > until:
            return result
        minimum = whole.search(space, near.point, near.gram, until, self.on_progress)
        return _found(minimum, space, whole.every).after(near.steps)

    def _by_all(self, whole: FullSearch, until: float, space: OpenSpace, start: StartPoint) -> SearchResult:
        """Search by first derivatives of all entries."""
        gram = whole.gram(space, start.unknowns) if start.gram is None else start.gram
        minimum = whole.search(space, start.unknowns, gram, until, self.on_progress, start.below)
        return _found(minimum, space, whole.every)

    def _by_steps(self, whole: FullSearch, ordering: Ordering, settled: OrderedResult, until: float) -> OrderedResult:
        """Search on, knowing that random rounding left the less noise the nearer an entry was to a level.

        Where that is, the last candidate says. So costs of two orders do not compare, and the likeliest is taken.
        """
        space, start, result = ordering.space, ordering.start(settled.result, until), settled.result
        for least in LEAST:
            if time.thread_time() > until:
                return settled
            near = whole.near(space.patches(start.unknowns)[0], least)
            result = self._by_all(near, until, space, start).after(result.minimum.steps)
            start, settled = StartPoint(result.minimum.point, result.minimum.gram), OrderedResult(result)
        return replace(settled, ordered=ordering.as_found(result)) if ordering.sure(result) else settled

    def _by_sides(
        self, sides: SignConstraints, widths: Sequence[float], until: float, space: OpenSpace, start: StartPoint
    ) -> SearchResult:
        """Search by first derivatives, where only the signs of entries are known."""
        minimum = by_sides(sides, space, start.unknowns, widths, until, self.on_progress)
        return SearchResult(minimum, space, sides.residuals, sides.count, math.sqrt(minimum.cost / sides.count))

    def _nearest(
        self, chains: Sequence[Sequence[SearchMethod]], ordering: Ordering, start: Tensor, until: float
    ) -> OrderedResult:
        """Run several searches; return the first that arrives, or the nearest."""
        settled = self._search(chains, ordering, StartPoint(start), until)
        for _ in range(self.options.starts - 1):
            if settled.result.arrived or time.thread_time() > until:
                break
            noise = torch.randn(len(start), generator=ordering.generator, dtype=start.dtype).to(start.device)
            further = self._search(chains, ordering, StartPoint(start + RESTART * noise), until)
            settled = min((settled, further), key=lambda made: made.result.residual)
        return settled

    def _search(
        self, chains: Sequence[Sequence[SearchMethod]], ordering: Ordering, start: StartPoint, until: float
    ) -> OrderedResult:
        """Run chains; return the first that leaves no doubt of places, or the one that explains the upload best."""
        first, *alternatives = chains
        settled = self._chain(first, ordering, start, until)
        for chain in alternatives:
            if settled.sure or settled.result.learned < LITTLE or time.thread_time() > until:
                break
            alternative = self._chain(chain, ordering, start, until).after(settled.result.minimum.steps)
            if (
                alternative.result.space is ordering.space
                and alternative.result.minimum.cost < settled.result.minimum.cost
            ):
                settled = alternative
        return settled

    def _chain(
        self, searches: Sequence[SearchMethod], ordering: Ordering, start: StartPoint, until: float
    ) -> OrderedResult:
        """Run searches one after the other, each from where the last one ended, while there is time."""
        first, *later = searches
        settled = self._settled(first, ordering, start, until)
        for search in later:
            if time.thread_time() > until or settled.result.learned < LITTLE:
                break
            following = self._settled(search, ordering, ordering.start(settled.result, until), until)
            settled = following.after(settled.result.minimum.steps)
        return settled

    def _settled(self, search: SearchMethod, ordering: Ordering, start: StartPoint, until: float) -> OrderedResult:
        """Search, and search again from the ordered tokens, until they stand in order or nothing is gained."""
        if search.find_again is None:
            placeless = ordering.space.alike
            return OrderedResult(
                search.find(placeless, StartPoint(placeless.unknowns(ordering.space.patches(start.unknowns))))
            )
        result = search.find(ordering.space, start)
        while result.arrived and result.learned > LITTLE and time.thread_time() < until:
            if ordering.sure(result):
                return OrderedResult(result, ordering.as_found(result), sure=True)
            orders = ordering.of(result, until)
            if not (better := self._better(search.find_again, ordering, result, orders, until)):
                return OrderedResult(result, orders[0] if not orders[0].moved else ordering.as_found(result))
            result = better
        return OrderedResult(result)

    def _better(
        self, find: Find, ordering: Ordering, result: SearchResult, orders: Sequence[OrderedTokens], until: float
    ) -> SearchResult | None:
        """Return the first search from one of these orders that explains the upload better; None if none does."""
        steps, below = result.minimum.steps, result.minimum.cost - GAIN
        for ordered in (order for order in orders if order.moved):
            if time.thread_time() > until:
                break
            further = find(ordering.space, ordering.begin(ordered, below)).after(steps)
            if further.minimum.cost < below:
                return further
            steps = further.minimum.steps
        return None

    def _minimum(self, residuals: PickedResiduals, space: OpenSpace, start: Tensor, ends: StoppingRule) -> Minimum:
        """Find the most likely picture near a start."""
        steps = self.options.steps
        eye, began = torch.eye(len(start), device=start.device), time.thread_time()

        def tell(step: int, cost: float) -> None:
            now = time.thread_time()
            within = step * (max(now, ends.until) - began) / (now - began)  # steps in all, as long as there is time
            self.on_progress(step, math.ceil(min(steps, within)), cost)

        return minimise(
            lambda unknowns: torch.cat([residuals(space.patches(unknowns)[0]), unknowns]),
            start,
            steps=steps,
            slopes=lambda unknowns: torch.cat([residuals.slopes(residuals.compared, space, unknowns), eye], dim=1),
            ends=ends,
            on_step=tell,
        )


def _found(minimum: Minimum, space: OpenSpace, residuals: PickedResiduals) -> SearchResult:
    remainders = residuals(space.patches(minimum.point)[0])
    return SearchResult(minimum, space, residuals, residuals.count, float(remainders.square().mean().sqrt()))

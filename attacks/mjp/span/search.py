"""The masked patches: zeros are collected from many starts, then told apart, until every one is found."""

import time
from dataclasses import replace

import torch
from torch import Tensor

from fedmjp.attacks.mjp.span.apart import SeparationMerit
from fedmjp.attacks.mjp.span.counts import with_copies
from fedmjp.attacks.mjp.span.equations import Attended, PatchEquations, PatchSet, attended
from fedmjp.attacks.mjp.span.free import coefficients_of, free
from fedmjp.attacks.mjp.span.joint import solve_jointly
from fedmjp.attacks.mjp.span.minimise import Steps, Zeros, minimise
from fedmjp.attacks.mjp.span.naturalness import Naturalness
from fedmjp.attacks.mjp.span.separation import polished, separate
from fedmjp.attacks.mjp.span.starts import Kind, starts
from fedmjp.attacks.mjp.span.tokens import settle, suffice
from fedmjp.attacks.mjp.span.unseen import CompletePatches
from fedmjp.attacks.mjp.span.visible import SMALL, VisiblePatches, good_patches, judged, restarted, solve_visible

STARTS = 48  # per round
FAR = Steps(14, damping=1e-2)
PLAUSIBLE = 3.0  # times the median residual of the visible: more is no zero
SAME = 0.05  # of the residual: starts that ended nearer to each other are not both looked into
APART = 0.3  # of the residual: proven zeros that differ by less are one
FOREIGN = 1.0  # a pixel that far outside of [0, 1] is of no picture
PROVEN = 3.0  # times what rounding makes of a true token's residual: a freed token with less is true
CYCLE: tuple[Kind | None, ...] = ("seen", "outside", "outside", None, "mixed", None)  # None: from anywhere, apart
COLLECTED = 0.5  # of the time, at most, for patches from anywhere; the rest is for those that resemble them
DRY = 2 * len(CYCLE)  # rounds without a new patch after which the search is given up
REFRESH, FINISH = 4, 6  # steps of the joint iteration
NEAR = Steps(10, damping=1e-4)


class SpanSearch:
    """One attempt on one upload, from the tokens (met, dim) that it states, or from a natural picture.

    ``start`` are that picture's coefficients (visible, unknowns). ``visible`` and ``masked`` are what is known of the
    picture, masked patches in no particular order. ``proofs`` are the same as zeros of the freed equations, without
    any assumption on the attention.
    """

    def __init__(
        self,
        equations: PatchEquations,
        naturalness: Naturalness,
        start: Tensor,
        tokens: Tensor,
        generator: torch.Generator,
    ) -> None:
        self.equations, self.naturalness, self.generator = equations, naturalness, generator
        self.natural = start
        self.masked, self.proofs = Zeros.at(start[:0]), Zeros.at(equations.freed.directions[:0])
        began = time.thread_time()
        self.stated = suffice(equations, tokens)
        self.apart: CompletePatches | None = None
        if self.stated:
            self._begin_at(tokens, start)
        else:
            self.visible = solve_visible(equations, naturalness, start, generator)
        self.reserve = time.thread_time() - began

    def go(self) -> tuple[PatchSet, int]:
        """Return all visible patches and, unless none was found, all masked ones; and how many were found.

        The last ones are stand-ins or copies of those that were. The search leaves as much time as it took to begin, in
        which everything is solved together.
        """
        deadline = self.equations.until - self.reserve
        leveled = bool(self.equations.level.any())  # it holds masked patches to their size; noise may blur it away
        if leveled and not self.stated:
            self._collect(time.thread_time() + COLLECTED * (deadline - time.thread_time()))
        if leveled and len(self.masked) < self.equations.unknowns:
            limited, begun = replace(self.equations, until=deadline), self.masked.coefficients
            separated = separate(limited, self.naturalness, self.visible, begun, self.natural, self.generator)
            # Where attention is far off, patches come out that no picture has: then nothing is told apart.
            if 0 < len(begun) <= len(separated.masked):
                self.apart = polished(self.equations, separated)
                self.visible, self.masked = self.apart.visible, Zeros.at(self.apart.masked)
        return self._finished(), len(self.masked)

    def _collect(self, deadline: float) -> None:
        """Collect masked patches from many starts, until all are found or rounds add nothing any more."""
        whole, self.equations = self.equations, replace(self.equations, until=deadline)
        size, dry, pending = self.equations.unknowns, 0, 0
        while len(self.masked) < size and dry < DRY and not self.equations.time_is_up():
            new = self._round(CYCLE[dry % len(CYCLE)])
            dry, pending = (0 if new else dry + 1), pending + new
            if pending and (dry or pending >= size // 4 or len(self.masked) == size):
                self._refresh()
                pending = 0
        self.equations = whole

    def _begin_at(self, tokens: Tensor, start: Tensor) -> None:
        """Take patches from tokens, visible ones without a token from ``start``, and solve them together."""
        equations, settled = self.equations, settle(self.equations, tokens)
        coefficients, good = start.clone(), torch.zeros_like(equations.visible, dtype=torch.bool)
        coefficients[settled.rows], good[settled.rows] = settled.known.visible, True
        residual = equations.at(settled.attended(equations.tokens(coefficients, equations.visible))).cost.sqrt()
        self.visible = VisiblePatches(coefficients, residual, good)
        slots = equations.hole[:1].expand(len(settled.known.masked))
        possible = self.naturalness.excess(settled.known.masked, slots) < FOREIGN
        masked, slots = settled.known.masked[possible], slots[possible]
        with_attention = settled.attended(equations.tokens(masked, slots))
        point = equations.at(with_attention)
        self.masked = Zeros(masked, point.cost.sqrt(), equations.normal(point, masked, slots)[0])
        self.proofs = free(equations, with_attention)
        self._refresh()

    def _round(self, kind: Kind | None) -> int:
        """Add masked patches that one set of starts leads to; return how many."""
        equations, masked = self.equations, self.masked
        good_visible = self.visible.coefficients[self.visible.good]
        begun = starts(kind or "anywhere", STARTS, equations.level, good_visible, masked.coefficients, self.generator)
        known_patches = good_patches(equations, self.visible, masked.coefficients)
        with_attention = attended(equations, known_patches)
        slots = equations.hole[:1].expand(len(begun))
        merit = SeparationMerit.of(equations, known_patches, with_attention) if kind is None else None
        ended = minimise(equations, begun, slots, with_attention, FAR, merit)
        ended = ended[ended.residual < PLAUSIBLE * max(self.visible.median, SMALL)]
        ended = ended[ended.distinct(masked, SAME)]
        return self._prove(ended, with_attention) if len(ended) else 0

    def _prove(self, ended: Zeros, with_attention: Attended) -> int:
        """Add those that stand on their own, differ from the known ones, and are possible patches; return how many."""
        equations = self.equations
        slots = equations.hole[:1].expand(len(ended))
        tokens = equations.tokens(ended.coefficients, slots)
        attended_tokens = with_attention(tokens)
        freed = free(equations, attended_tokens)
        released = freed.coefficients @ equations.freed.directions.T
        coefficients = coefficients_of(equations, slots, released, attended_tokens - tokens)
        stands = freed.residual < PROVEN * equations.noise(equations.at(released))
        stands &= self.naturalness.excess(coefficients, slots) < FOREIGN
        rows = stands.nonzero().flatten()
        new = rows[freed[rows].distinct(self.proofs, APART)][: equations.unknowns - len(self.masked)]
        self.masked = self.masked.joined(Zeros(coefficients[new], freed.residual[new], ended.curvature[new]))
        self.proofs = self.proofs.joined(freed[new])
        return len(new)

    def _refresh(self) -> None:
        """Solve everything known together, then outliers again."""
        equations, visible = self.equations, self.visible
        known_patches = good_patches(equations, visible, self.masked.coefficients)
        solved, residual = solve_jointly(equations, known_patches, steps=REFRESH)
        coefficients, residuals = visible.coefficients.clone(), visible.residual.clone()
        coefficients[visible.good] = solved.visible
        residuals[visible.good] = residual[: len(solved.visible)]
        visible = judged(equations, self.naturalness, coefficients, residuals, attended(equations, solved))
        self.masked = Zeros(solved.masked, residual[len(solved.visible) :], self.masked.curvature)
        with_attention = attended(equations, good_patches(equations, visible, solved.masked))
        self.visible = restarted(equations, self.naturalness, visible, with_attention, self.generator)

    def _finished(self) -> PatchSet:
        """Return all visible patches, outliers or not, and the masked ones, with nothing else in the attention."""
        equations, masked = self.equations, self.masked.coefficients
        if self.apart is not None:  # what is nearly alike would become one if it were solved together
            return self.apart.all(equations)
        patches = with_copies(equations, PatchSet(equations.visible, self.visible.coefficients, masked))
        patches, _ = solve_jointly(equations, patches, steps=FINISH)
        with_attention = attended(equations, patches)
        moved = minimise(equations, patches.coefficients, patches.all_places(equations), with_attention, NEAR)
        return solve_jointly(equations, patches.moved(moved.coefficients), steps=FINISH)[0]

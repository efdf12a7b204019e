"""The masked patches: zeros are collected from many starts until every one is found."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks.mjp.span.attended import Attended, Known, attended
from attacks.mjp.span.deadline import Deadline
from attacks.mjp.span.equations import Equations
from attacks.mjp.span.free import coefficients_of, free
from attacks.mjp.span.joint import solve_jointly
from attacks.mjp.span.minimise import Deflation, Steps, Zeros, minimise
from attacks.mjp.span.naturalness import Naturalness
from attacks.mjp.span.starts import Kind, starts
from attacks.mjp.span.visible import SMALL, Visible, judged, known, restarted, solve_visible

STARTS = 48  # per round
FAR = Steps(14, damping=1e-2)
PLAUSIBLE = 3.0  # times the median residual of the visible: more is no zero
SAME = 0.05  # of the residual: starts that ended nearer to each other are not both looked into
APART = 0.3  # of the residual: proven zeros that differ by less are one
FOREIGN = 1.0  # a pixel that far outside of [0, 1] is of no picture
PROVEN = 3.0  # times what rounding makes of a true token's residual: a freed token with less is true
CYCLE: tuple[Kind | None, ...] = ("outside", "outside", None, "mixed", None)  # None: from anywhere, deflated
DRY = 2 * len(CYCLE)  # rounds without a new patch after which the search is given up
REFRESH, FINISH = 4, 6  # steps of the joint iteration
NEAR = Steps(10, damping=1e-4)
SAMPLE = 24  # visible patches that choose among stand-ins


@dataclass(frozen=True)
class Progress:
    """What is known of the picture.

    Attributes:
        visible: The patches that are not masked.
        masked: Those that are, as far as found, in no particular order.
        proofs: The same as zeros of the freed equations, without any assumption on the attention.
    """

    visible: Visible
    masked: Zeros
    proofs: Zeros


@dataclass(frozen=True)
class Solution:
    """Where a search ended.

    Attributes:
        patches: All visible ones, and as many masked ones as there are, unless none was found.
        found: How many of the masked ones were found; the last ones stand in for the others.
    """

    patches: Known
    found: int


class Search:
    """One attempt on one upload.

    Args:
        equations: Of the upload.
        naturalness: Of patches.
        deadline: For all that is done.
        generator: Source of randomness.
    """

    def __init__(
        self, equations: Equations, naturalness: Naturalness, deadline: Deadline, generator: torch.Generator
    ) -> None:
        self.equations, self.naturalness = equations, naturalness
        self.deadline, self.generator = deadline, generator

    def go(self, start: Tensor) -> Solution:
        """From the coefficients (visible, unknowns) of a natural picture."""
        equations, size = self.equations, self.equations.unknowns
        nothing, unproven = Zeros.at(start[:0]), Zeros.at(equations.freed.directions[:0])
        visible = solve_visible(equations, self.naturalness, start, self.generator)
        now = Progress(visible, nothing, unproven)
        dry = pending = 0
        leveled = bool(equations.level.any())  # starts are scaled by the level, which noise may blur away
        while leveled and len(now.masked) < size and dry < DRY and not self.deadline.passed:
            before = len(now.masked)
            now = self._round(now, dry)
            new = len(now.masked) - before
            dry, pending = (0 if new else dry + 1), pending + new
            if pending and (dry or pending >= size // 4 or len(now.masked) == size):
                now, pending = self._refresh(now), 0
        return self._finish(now)

    def _round(self, now: Progress, dry: int) -> Progress:
        """Add masked patches that one set of starts leads to."""
        equations, found = self.equations, now.masked
        kind = CYCLE[dry % len(CYCLE)]
        begun = starts(kind or "anywhere", STARTS, equations.level, found.coefficients, self.generator)
        deflation = Deflation.of(found, begun) if kind is None and len(found) else None
        with_attention = attended(equations, known(equations, now.visible, found.coefficients))
        slots = equations.hole[:1].expand(len(begun))
        ended = minimise(equations, begun, slots, with_attention, FAR, deflation)
        if deflation is not None:
            ended = minimise(equations, ended.coefficients, slots, with_attention, FAR)
        ended = ended[ended.residual < PLAUSIBLE * max(now.visible.median, SMALL)]
        ended = ended[torch.tensor(ended.distinct(found, SAME), dtype=torch.int64)]
        return self._prove(ended, with_attention, now) if len(ended) else now

    def _prove(self, ended: Zeros, with_attention: Attended, now: Progress) -> Progress:
        """Add those that stand on their own, differ from those known, and are possible patches."""
        equations = self.equations
        slots = equations.hole[:1].expand(len(ended))
        tokens = equations.tokens(ended.coefficients, slots)
        after = with_attention(tokens)
        freed = free(equations, after)
        coefficients = coefficients_of(equations, freed.attended, after - tokens)
        stands = freed.zeros.residual < PROVEN * equations.noise(equations.at(freed.attended))
        stands &= self.naturalness.excess(coefficients, slots) < FOREIGN
        rows = stands.nonzero().flatten()
        new = rows[torch.tensor(freed.zeros[rows].distinct(now.proofs, APART), dtype=torch.int64)][
            : equations.unknowns - len(now.masked)
        ]
        masked = Zeros(coefficients[new], freed.zeros.residual[new], ended.curvature[new])
        return Progress(now.visible, now.masked.joined(masked), now.proofs.joined(freed.zeros[new]))

    def _finish(self, now: Progress) -> Solution:
        """All visible patches, outliers or not, and the masked ones, with nothing else in the attention."""
        equations, found = self.equations, now.masked.coefficients
        masked = torch.cat([found, self._stand_ins(now)]) if len(found) else found
        seen = Known(equations.visible, now.visible.coefficients, masked)
        seen, _ = solve_jointly(equations, seen, steps=FINISH)
        places = torch.cat([seen.places, equations.hole[: len(masked)]])
        values = torch.cat([seen.visible, seen.masked])
        values = minimise(equations, values, places, attended(equations, seen), NEAR).coefficients
        split = len(seen.places)
        seen, _ = solve_jointly(equations, Known(seen.places, values[:split], values[split:]), steps=FINISH)
        return Solution(seen, len(found))

    def _stand_ins(self, now: Progress) -> Tensor:
        """(missing, unknowns): the masked patch found that explains best what the visible ones attend to.

        What is not found in many rounds is nearly equal to something that is.
        """
        equations, found = self.equations, now.masked.coefficients
        missing = equations.unknowns - len(found)
        visible = Known(equations.visible, now.visible.coefficients, found)
        places = equations.visible[:: max(len(equations.visible) // SAMPLE, 1)]
        tokens = equations.tokens(now.visible.coefficients[:: max(len(equations.visible) // SAMPLE, 1)], places)

        def cost(copied: Tensor) -> float:
            seen = replace(visible, masked=torch.cat([found, copied.expand(missing, -1)]))
            return float(equations.at(attended(equations, seen)(tokens)).cost.median())

        costs = [cost(each[None]) for each in found] if missing else [0.0]
        return found[costs.index(min(costs))].expand(missing, -1)

    def _refresh(self, now: Progress) -> Progress:
        """Everything known solved together, then outliers again."""
        equations = self.equations
        seen = known(equations, now.visible, now.masked.coefficients)
        solved, residual = solve_jointly(equations, seen, steps=REFRESH)
        coefficients, residuals = now.visible.coefficients.clone(), now.visible.residual.clone()
        coefficients[now.visible.good] = solved.visible
        residuals[now.visible.good] = residual[: len(solved.visible)]
        visible = judged(equations, self.naturalness, coefficients, residuals, attended(equations, solved))
        masked = Zeros(solved.masked, residual[len(solved.visible) :], now.masked.curvature)
        return Progress(
            restarted(equations, self.naturalness, visible, masked.coefficients, self.generator), masked, now.proofs
        )

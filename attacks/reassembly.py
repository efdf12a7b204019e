"""Put shuffled patches back in order: a jigsaw puzzle of square pieces, some of which are in place.

Two steps. *Misfit* of two patches side by side: the Mahalanobis distance of the jump across the seam from
the jumps that either patch shows just inside of its edge, after Gallagher's MGC, but its root instead of
its square (a real seam with one odd pixel is no wrong seam); relative to the eighth of all candidates
that fits either patch best, and bounded.

*Search* for the order with the least misfit over all seams, a quadratic assignment problem. Mean-field
annealing: a doubly stochastic matrix says how far each patch is believed to be at each place; each place
prefers the patches that fit what is believed of its neighbours; the preference sharpens. Patches outside of the
hole are certain from the start, and the picture grows from them. Then parts of the hole, around seams
that fit badly, are opened and annealed again; what lowers the misfit is kept.

References:
    Gallagher, "Jigsaw puzzles with pieces of unknown orientation", CVPR 2012 (MGC); Gold and Rangarajan, "A
    graduated assignment algorithm for graph matching", PAMI 1996 (the search, there for graphs).
"""

import math
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]

# Jumps that every patch is taken to have inside, so that a flat one has a covariance: Gallagher's, of one grey level.
_FEW = np.concatenate([np.zeros((1, 3)), np.ones((1, 3)), -np.ones((1, 3)), np.eye(3), -np.eye(3)]) / 255
_LEAST_VARIANCE = 1e-6  # of a jump in a direction of colour; a quarter of a grey level, squared
_FITTING_SHARE = 1 / 8  # of all patches: the best of them set the scale that misfits are relative to
_LEAST_SCALE = 1e-9  # many flat patches of one colour have seams of distance 0

_HOTTEST, _COLDEST = 0.3, 0.02  # temperatures, in units of the misfit
_STEPS, _STEPS_AGAIN = 100, 60
_BALANCINGS = 10  # Sinkhorn iterations per step
_LEAST_BELIEF = 1e-100
_ROUNDS, _PATIENCE = 100, 30  # of reopening; it ends after so many without gain
_SMALLEST_PART, _LARGEST_PART = 0.3, 0.8  # of the hole, that is opened again
_MOST_CENTRES = 3


def reassemble(
    patches: Tensor,
    hole: Tensor,
    grid: int,
    patch_size: int,
    *,
    generator: torch.Generator,
    tries: int = 1,
    until: float = math.inf,
) -> Tensor:
    """Find the order in which patches fit together.

    Args:
        patches: (grid * grid, 3 * patch_size ** 2) in [0, 1], as ``fedmjp.patches`` has them; exact or not.
        hole: (grid * grid,) bool, True where the patch may belong elsewhere in the hole.
        grid: Patches per side.
        patch_size: At least 2.
        generator: On the CPU.
        tries: The number of times that parts are opened from the first arrangement on; the least misfit is kept.
        until: Value of ``time.thread_time()`` after which no further try begins.

    Returns:
        ``source``, (grid * grid,) int64: place i shows ``patches[source[i]]``, its own outside of the hole.
    """
    places = hole.cpu().nonzero().flatten().numpy()
    source = np.arange(grid * grid)
    if len(places) > 1:
        pieces = patches.detach().double().cpu().numpy().reshape(-1, 3, patch_size, patch_size).transpose(0, 2, 3, 1)
        puzzle = _Puzzle(grid, _misfit(pieces), _misfit(pieces.transpose(0, 2, 1, 3)))
        seed = int(torch.randint(2**62, (), generator=generator))
        source = puzzle.solve(places, np.random.default_rng(seed), tries, until)
    return torch.from_numpy(source)


def _misfit(pieces: Floats) -> Floats:
    """Return [i, j]: how badly piece j of (pieces, rows, columns, 3) fits to the right of piece i, from 0 to 2."""
    distances = _seam_distances(pieces)
    rank = int(len(distances) * _FITTING_SHARE)
    scale_of_left = np.partition(distances, rank, axis=1)[:, rank, None] / 2 + _LEAST_SCALE
    scale_of_right = np.partition(distances, rank, axis=0)[None, rank] / 2 + _LEAST_SCALE
    misfit: Floats = 2 - np.exp(-distances / scale_of_left) - np.exp(-distances / scale_of_right)
    np.fill_diagonal(misfit, 2)  # a piece is not its own neighbour
    return misfit


def _seam_distances(pieces: Floats) -> Floats:
    """Return [i, j]: distance of the jumps from i to j on its right from those inside of both, summed over rows."""
    right_edge, left_edge = pieces[:, :, -1], pieces[:, :, 0]
    jump = left_edge[None] - right_edge[:, None]
    mean, root = _jumps_inside(right_edge - pieces[:, :, -2])
    total: Floats = np.linalg.norm((jump - mean[:, None, None]) @ root[:, None], axis=-1).sum(-1)
    mean, root = _jumps_inside(left_edge - pieces[:, :, 1])
    total += np.linalg.norm((-jump - mean[None, :, None]) @ root[None], axis=-1).sum(-1)
    return total


def _jumps_inside(jumps: Floats) -> tuple[Floats, Floats]:
    """Return the mean (pieces, 3) of a piece's jumps (pieces, rows, 3), and a root of their inverse covariance."""
    widened = np.concatenate([jumps, np.broadcast_to(_FEW, (len(jumps), *_FEW.shape))], axis=1)
    centred = widened - widened.mean(axis=1, keepdims=True)
    covariance = centred.transpose(0, 2, 1) @ centred / (widened.shape[1] - 1)
    root: Floats = np.linalg.cholesky(np.linalg.inv(covariance + _LEAST_VARIANCE * np.eye(3)))
    return jumps.mean(axis=1), root


@dataclass(frozen=True)
class _Puzzle:
    """A quadratic assignment problem on a grid: misfits [i, j] of piece j to the right of piece i, and below it."""

    grid: int
    across: Floats
    down: Floats

    def solve(self, hole: Places, random: np.random.Generator, tries: int, until: float) -> Places:
        """Arrange the pieces in the hole; entry i is the piece at place i.

        Args:
            hole: Places that may change.
            random: Draws the parts that are opened again.
            tries: At least 1.
            until: Value of ``time.thread_time()``.
        """
        first = self._anneal(np.arange(self.grid**2), hole, _STEPS)
        ends = [self._reopened(first, hole, random)]
        while len(ends) < tries and time.thread_time() < until:
            ends.append(self._reopened(first, hole, random))
        return min(ends, key=lambda source: float(self._misfit_at(source).sum()))

    def _reopened(self, source: Places, hole: Places, random: np.random.Generator) -> Places:
        """Open parts of the hole and anneal them again, as long as it helps."""
        least, idle = float(self._misfit_at(source).sum()), 0
        for _ in range(_ROUNDS):
            candidate = self._anneal(source, self._doubtful_part(source, hole, random), _STEPS_AGAIN)
            misfit = float(self._misfit_at(candidate).sum())
            idle = 0 if misfit < least else idle + 1
            if misfit < least:
                source, least = candidate, misfit
            if idle == _PATIENCE:
                break
        return source

    def _misfit_at(self, source: Places) -> Floats:
        """Return the misfit (places,) of the seams of each place."""
        pieces = source.reshape(self.grid, self.grid)
        misfit = np.zeros(pieces.shape)
        across, down = self.across[pieces[:, :-1], pieces[:, 1:]], self.down[pieces[:-1], pieces[1:]]
        misfit[:, :-1] += across
        misfit[:, 1:] += across
        misfit[:-1] += down
        misfit[1:] += down
        return misfit.ravel()

    def _doubtful_part(self, source: Places, hole: Places, random: np.random.Generator) -> Places:
        """Draw the places of the hole that are nearest to one, two or three that fit badly."""
        misfit = self._misfit_at(source)[hole] + np.finfo(np.float64).tiny
        centres = random.choice(hole, random.integers(1, _MOST_CENTRES + 1), p=misfit / misfit.sum())
        at, of_centres = np.divmod(hole, self.grid), np.divmod(centres, self.grid)
        down, across = (np.subtract.outer(place, its) for place, its in zip(at, of_centres, strict=True))
        nearness = np.hypot(down, across).min(axis=1) + 0.01 * random.random(len(hole))
        size = max(2, round(len(hole) * random.uniform(_SMALLEST_PART, _LARGEST_PART)))
        return np.sort(hole[np.argsort(nearness)[:size]])

    def _anneal(self, source: Places, free: Places, steps: int) -> Places:
        """Arrange the pieces at the free places anew."""
        from scipy.optimize import linear_sum_assignment  # noqa: PLC0415 (takes a quarter of a second to import)

        certain, sides = self._surroundings(source, free)
        belief = np.full((len(free) + 1, len(free)), 1 / len(free))
        belief[-1] = 0  # stands for a neighbour that is certain, or none
        for temperature in np.geomspace(_HOTTEST, _COLDEST, steps):
            cost = certain + sum(belief[neighbours] @ misfit for neighbours, misfit in sides)
            belief[:-1] += _balanced(-cost / temperature)
            belief[:-1] /= 2  # half of the old: without it, neighbours swap pieces back and forth
        rows, columns = linear_sum_assignment(belief[:-1], maximize=True)
        arranged = source.copy()
        arranged[free[rows]] = source[free[columns]]
        return arranged

    def _surroundings(self, source: Places, free: Places) -> tuple[Floats, list[tuple[Places, Floats]]]:
        """Return the misfit (places, pieces) of free places with certain neighbours, and what is on their four sides.

        Per side, that is the free place at it, or the number of them for none, and the misfit [its piece, own piece].
        """
        rows, columns = np.divmod(free, self.grid)
        numbers = np.full(self.grid**2, len(free))
        numbers[free] = np.arange(len(free))
        square = (self.grid, self.grid)
        numbers = np.pad(numbers.reshape(square), 1, constant_values=len(free))
        pieces = np.pad(source.reshape(square), 1, constant_values=-1)
        free_pieces = source[free]
        certain = np.zeros((len(free), len(free)))
        sides = []
        neighbours = (0, -1, self.across), (0, 1, self.across.T), (-1, 0, self.down), (1, 0, self.down.T)
        for down, across, misfit in neighbours:
            neighbour = rows + 1 + down, columns + 1 + across
            fixed = (numbers[neighbour] == len(free)) & (pieces[neighbour] >= 0)
            certain[fixed] += misfit[pieces[neighbour][fixed]][:, free_pieces]
            sides.append((numbers[neighbour], np.ascontiguousarray(misfit[np.ix_(free_pieces, free_pieces)])))
        return certain, sides


def _balanced(logits: Floats) -> Floats:
    """Balance the exponentials to a doubly stochastic matrix, by Sinkhorn's iteration."""
    weights: Floats = np.exp(logits - logits.max(axis=1, keepdims=True)) + _LEAST_BELIEF
    for _ in range(_BALANCINGS):
        weights /= weights.sum(axis=0)
        weights /= weights.sum(axis=1, keepdims=True)
    return weights

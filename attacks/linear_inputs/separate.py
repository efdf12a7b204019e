"""Inputs X of a linear layer, one row per record, from its gradients G = D^T X (weight) and g = D^T 1 (bias).

With A = [G | g] = D^T [X | 1] of rank B, the factor D^T = L Q and [X | 1] = Q^-1 R follow from any rank factorisation
A = L R and a matrix Q (B, B). Three rules find Q, the cheap ones first:

- One record: every row of G is a multiple of x, and g says which (Geiping et al., NeurIPS 2020, proposition 3.1).
- A neuron that one record alone activates: its row of A is that record's. Two such rows are parallel, which no other
  two are.
- In front of a ReLU, column i of D is zero wherever record i does not activate a neuron. B - 1 rows of L that are all
  zero in D_i determine q_i, and every row that is zero besides confirms it. Rows are drawn at random (SPEAR: Dimitrov
  et al., NeurIPS 2024).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

ROUNDING = 1e-7  # of float32, relative to the largest singular value
ABOVE_NOISE = 1.5  # of the largest singular value of noise alone, above which one is of records
PARALLEL = 1e-5  # sine of the angle between rows that are one record's
BY_CHANCE = 1.0  # rows that may be so near to another one without being the same record's
CLOSE = 1e-3  # entry of a column of D that counts as zero at first, relative to its row of L
QUIET = 1e-2  # of noise, relative to its size, up to which a row is used
AGREES = 0.99  # share of neurons that a certified record activates exactly where its column of D is not zero
CHUNK = 2048  # submatrices at once
MOST_SEPARATED = 16  # records; of 16 one submatrix in 6,000 is all zero in a column


@dataclass(frozen=True)
class LayerGradient:
    """A linear layer with what an upload says of it, in float64, up to a factor that all its tensors share."""

    weight: Tensor  # (outputs, inputs) gradient
    bias: Tensor  # (outputs,) gradient
    layer_weight: Tensor  # (outputs, inputs), as the server sent it
    layer_bias: Tensor  # (outputs,)
    noise: float = 0.0  # standard deviation of an entry of the weight's gradient, as rounding of sent weights leaves


@dataclass(frozen=True)
class LayerInputs:
    """Inputs of the layer, one row per record in any order, and the gradients at its outputs."""

    rows: Tensor  # (records, inputs)
    slopes: Tensor  # (records, outputs)
    certified: Tensor  # (records,) bool
    misfit: float  # of the gradient, relative to its size
    rank: int  # of the gradient, up to its noise; above the number of records where more is in it


def separate(gradient: LayerGradient, records: int, *, samples: int, generator: torch.Generator) -> LayerInputs:
    """Separate the records' inputs; rows that are not found are zero and not certified.

    Args:
        gradient: Of the layer.
        records: Behind the upload.
        samples: Submatrices that are drawn at most.
        generator: Draws them, on the CPU.
    """
    scale = gradient.weight.norm() / gradient.bias.norm().clamp_min(torch.finfo(torch.float64).tiny)
    whole = torch.cat([gradient.weight, scale * gradient.bias[:, None]], 1)
    left_vectors, values, right_vectors = torch.linalg.svd(whole, full_matrices=False)
    rank, noise = _rank(values, whole.shape, gradient.noise)
    if records == 1 or rank <= 1:
        return _single(gradient, records, rank)
    if rank > records:  # what exceeds the records, as several steps leave it, is taken for noise
        noise = max(noise, float(values[records]) / (whole.shape[0] ** 0.5 + whole.shape[1] ** 0.5))
    factor, rows = left_vectors[:, : min(rank, records)] * values[: min(rank, records)], right_vectors[:records]
    search = _Search(factor, noise, generator)
    assemble = partial(_assembled, replace(gradient, noise=noise), factor, rows[: search.rank], records, float(scale))
    inputs = _search_rows(search, assemble, samples)
    return inputs if rank <= records else replace(inputs, certified=torch.zeros_like(inputs.certified), rank=rank)


def _search_rows(
    search: "_Search", assemble: Callable[[Tensor, Tensor | None], LayerInputs], samples: int
) -> LayerInputs:
    """Search for rows of single neurons first, then for columns unless there are too many of them."""
    own_rows = _parallel_rows(search)
    peeled = assemble(own_rows, None)
    if len(own_rows) == search.rank:
        return assemble(own_rows, torch.linalg.inv(own_rows))
    if search.rank > MOST_SEPARATED:
        return peeled
    searched = _searched(search, assemble, samples)
    return searched if int(searched.certified.sum()) > int(peeled.certified.sum()) else peeled


def _searched(search: "_Search", assemble: Callable[[Tensor, Tensor | None], LayerInputs], samples: int) -> LayerInputs:
    """Search for columns; once some are certified, search for the others in what their rows leave open."""
    rank, factor = search.rank, search.factor
    basis, fixed = torch.eye(rank).to(factor), factor.new_zeros(rank, 0)
    best, certified = assemble(factor.new_zeros(0, rank), None), 0
    while certified < rank:
        for directions in _Search(factor @ basis, search.noise, search.generator).columns(samples):
            columns = torch.cat([fixed, basis @ directions], 1)
            inverse = torch.linalg.inv(columns)
            solution = assemble(inverse, columns)
            is_certified = solution.certified[:rank]
            if int(is_certified.sum()) > certified:
                best, certified = solution, int(is_certified.sum())
                fixed = columns[:, is_certified]
                basis = torch.linalg.svd(inverse[is_certified]).Vh[certified:].mT
                break
        else:
            break
    return best


def _rank(values: Tensor, shape: torch.Size, least: float) -> tuple[int, float]:
    """Return the rank up to noise, and the noise's standard deviation in an entry, by the gap of singular values.

    Noise of a standard deviation s alone has singular values of up to s (m^.5 + n^.5).
    """
    edge, floor = shape[0] ** 0.5 + shape[1] ** 0.5, ROUNDING * float(values[0])
    logs = values.clamp_min(max(floor, edge * least)).log()
    rank = int((logs[:-1] - logs[1:]).argmax()) + 1 if len(values) > 1 else 1
    if float(values[min(rank, len(values) - 1)]) > 0.03 * float(values[rank - 1]):  # no gap: it has full rank
        rank = int((values > max(30 * floor, ABOVE_NOISE * edge * least)).sum())
    remainder = float(values[rank]) if rank < len(values) else 0.0
    return max(rank, 1), max(remainder / edge, floor / (shape[0] * shape[1]) ** 0.25, least)


def _single(gradient: LayerGradient, records: int, rank: int) -> LayerInputs:
    """Read one record by the bias rule: the multiple of g, as least squares have it, that every column of G is."""
    length = gradient.bias.square().sum().clamp_min(torch.finfo(torch.float64).tiny)
    row = gradient.weight.mT @ gradient.bias / length
    misfit = float((gradient.weight - torch.outer(gradient.bias, row)).norm() / gradient.weight.norm())
    rows, slopes = torch.zeros(records, len(row)).to(row), torch.zeros(records, len(gradient.bias)).to(row)
    rows[0], slopes[0] = row, gradient.bias
    certified = torch.arange(records, device=row.device).eq(0) & (records == 1) & (misfit < QUIET)
    return LayerInputs(rows, slopes, certified, misfit, rank)


def _parallel_rows(search: "_Search") -> Tensor:
    """Return the directions (at most rank, rank) that rows share which one record alone activates.

    In few dimensions and under noise, rows of several records look parallel by chance: then none is returned.
    """
    units = search.units
    sines = torch.stack([(units - (units @ unit)[:, None] * unit).norm(dim=1) for unit in units])
    noise = search.tolerance.clamp_min(PARALLEL)
    limits = torch.maximum(noise[:, None], noise)
    pairs = sines < limits
    directions: list[Tensor] = []
    if float(limits.pow(search.rank - 1).sum()) > BY_CHANCE:
        return search.factor[:0]
    free = torch.ones(len(units), dtype=torch.bool, device=units.device)
    for place in pairs.sum(1).argsort(descending=True).tolist():
        members = pairs[place] & free
        if free[place] and int(members.sum()) > 1:
            signs = (units[members] @ units[place]).sign()
            directions.append((signs[:, None] * search.factor[members]).sum(0))
            free &= ~members
    return torch.stack(directions[: search.rank]) if directions else units.new_zeros(0, units.shape[1])


class _Search:
    """A search for columns q of Q: directions that are orthogonal to many rows of the factor L (outputs, rank)."""

    def __init__(self, factor: Tensor, noise: float, generator: torch.Generator) -> None:
        self.rank, self.noise, self.generator = factor.shape[1], noise, generator
        norms = factor.norm(dim=1, keepdim=True)
        loud = norms[:, 0] > noise * self.rank**0.5 / QUIET
        self.factor, norms = factor[loud], norms[loud]
        self.units = self.factor / norms
        self.tolerance = 30 * noise / norms[:, 0]

    def columns(self, samples: int) -> Iterator[Tensor]:
        """Yield Q (rank, rank), columns of length 1, each time that drawn submatrices gave another one.

        Args:
            samples: Submatrices that are drawn at most.
        """
        if self.rank == 1:
            yield self.units.new_ones(1, 1)
            return
        if len(self.units) < 2 * self.rank:
            return
        pool, selection = self.units.new_zeros(0, self.rank), self.units.new_zeros(0, self.rank)
        for _ in range(max(1, samples // CHUNK)):
            drawn = self._drawn()
            if not len(drawn):
                continue
            pool = self._merged(torch.cat([pool, drawn]))
            previous, selection = selection, self._independent(pool)
            if len(selection) == self.rank and not torch.equal(previous, selection):
                yield selection.mT

    def _drawn(self) -> Tensor:
        """Draw submatrices of rank - 1 rows and return the directions orthogonal to them that have many zeros."""
        keys = torch.rand((CHUNK, len(self.units)), generator=self.generator)
        places = keys.topk(self.rank - 1, dim=1).indices.to(self.units.device)
        matrices = self.units[places]
        solved, singular = torch.linalg.solve_ex(matrices[..., :-1], -matrices[..., -1:])
        directions = torch.cat([solved[..., 0], torch.ones_like(solved[:, :1, 0])], 1)
        directions = torch.nn.functional.normalize(directions, dim=1)
        usable = torch.isfinite(directions).all(1) & (singular == 0)
        directions = directions[usable]
        return directions[self._zeros(directions, CLOSE).sum(1) > self.rank]

    def _zeros(self, directions: Tensor, least: float = 0.0) -> Tensor:
        """Tell (directions, outputs) where the columns L q are zero, up to noise and at least up to so much."""
        zeros: Tensor = (directions @ self.units.mT).abs() <= self.tolerance.clamp_min(least)
        return zeros

    def _merged(self, pool: Tensor) -> Tensor:
        """Solve for each direction with all its zeros; return the distinct ones, those with most zeros first."""
        for least in (CLOSE, CLOSE / 10, CLOSE / 100, CLOSE / 1000, 0.0):
            zeros = self._zeros(pool, least).to(self.units)
            grams = torch.einsum("dk,ki,kj->dij", zeros, self.units, self.units)
            pool = torch.linalg.eigh(grams).eigenvectors[..., 0]
        directions = pool[self._zeros(pool).sum(1).argsort(descending=True, stable=True)]
        repeats = (directions @ directions.mT).abs() > 1 - 1e-8
        return directions[~repeats.tril(-1).any(1)][: 64 * self.rank]

    def _independent(self, pool: Tensor) -> Tensor:
        """Take directions with most zeros that are independent of those before."""
        basis: list[Tensor] = []
        selection: list[Tensor] = []
        for direction in pool:
            remainder = direction.clone()
            for unit in basis:
                remainder -= (remainder @ unit) * unit
            if float(remainder.norm()) > 1e-4:
                basis.append(remainder / remainder.norm())
                selection.append(direction)
            if len(selection) == self.rank:
                break
        return torch.stack(selection) if selection else pool


def _assembled(
    gradient: LayerGradient,
    factor: Tensor,
    row_basis: Tensor,
    records: int,
    scale: float,
    inverse: Tensor,
    columns: Tensor | None,
) -> LayerInputs:
    """Scale rows so that the bias's entry is 1, and certify those that activate the neurons that their slopes say."""
    weight, solved = gradient.layer_weight, inverse @ row_basis
    device = solved.device
    rows = torch.zeros(records, weight.shape[1], dtype=torch.float64, device=device)
    slopes = torch.zeros(records, len(weight), dtype=torch.float64, device=device)
    certified = torch.zeros(records, dtype=torch.bool, device=device)
    constants = solved[:, -1:] / scale
    count = len(solved)
    rows[:count] = torch.where(constants.abs() > 0, solved[:, :-1] / constants, 0)
    logits = rows[:count] @ weight.mT + gradient.layer_bias
    if columns is None:  # rows of single neurons: two that are parallel are their own certificate
        certified[:count] = True
        return LayerInputs(rows, slopes, certified, 1.0, factor.shape[1])
    slopes[:count] = (factor @ columns).mT * constants
    explained = slopes.mT @ rows
    misfit = float((gradient.weight - explained).norm() / gradient.weight.norm())
    least = (PARALLEL * slopes[:count].abs().amax(1, keepdim=True)).maximum(10 * gradient.noise * constants.abs())
    live = gradient.weight.norm(dim=1) > QUIET * 1e-3 * gradient.weight.norm(dim=1).max()
    nonzero = slopes[:count].abs() > least
    near = logits.abs() < 1e-3 * logits.abs().amax(1, keepdim=True)
    agree = ((nonzero == (logits > 0)) | near)[:, live].double().mean(1)
    certified[:count] = (agree >= AGREES) & (misfit < QUIET)
    return LayerInputs(rows, slopes, certified, misfit, factor.shape[1])

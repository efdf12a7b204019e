"""How far the gradients of a candidate are from what an upload says of single entries, in units of noise."""

import math
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedmjp.attacks.entries import EVEN, Entries, read_entries, step_of
from fedmjp.attacks.gauss_newton.factors import FactoredModel, Factors
from fedmjp.attacks.gauss_newton.levenberg import jacobian
from fedmjp.attacks.gauss_newton.moving import PlainFactors
from fedmjp.attacks.gauss_newton.residuals import compared_layers
from fedmjp.attacks.gauss_newton.space import OpenSpace
from fedmjp.attacks.gradient_at_tokens import is_plain
from fedmjp.attacks.matching_gradients import soft_targets
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.threat import ThreatModel

COMPUTED = 15 * 2.0**-24  # of a tensor's root mean square: what float32 arithmetic leaves between two gradients
HALF = math.pi / 2 - 1  # of the squared mean: the variance of a normal variable on one side of its mean
WHOLE = 0.25  # share of a weight's entries from which on its gradient is formed, and entries are not made one by one


def said_of(matrix: Tensor, threat: ThreatModel, uploads: int) -> Entries:
    """What the entries of a tensor (rows, columns), the mean of uploaded ones, say of those that a candidate has."""
    entries = read_entries(matrix, threat, uploads)
    arithmetic = COMPUTED * matrix[matrix != 0].double().square().mean().sqrt()
    return replace(entries, variance=entries.variance + arithmetic.square())


@dataclass(frozen=True)
class KnownEntries:
    """Entries of one tensor that are known, but for noise, row by row."""

    rows: Tensor  # (entries,) int64
    columns: Tensor  # (entries,) int64, 0 of a vector
    values: Tensor  # (entries,) float64
    precision: Tensor  # (entries,) float64, over the variance of the noise
    of: int  # entries of the tensor
    step: float = 0.0  # between levels that entries were rounded to at random; 0 where they were not
    averaged: int = 1  # over so many tensors whose rounding is independent
    crossing: tuple[Tensor, Tensor] | None = None  # rows and columns, where entries are all that these share, in order

    @staticmethod
    def read(tensor: Tensor, threat: ThreatModel, uploads: int = 1) -> "KnownEntries":
        """Those that a pipeline leaves of a tensor (rows,) or (rows, columns), the mean of so many uploaded ones.

        None of one that is all zeros.

        Of signs, the mean of what normal entries are on that side.
        """
        matrix = tensor.view(len(tensor), -1)
        entries = said_of(matrix, threat, uploads)
        width = entries.high - entries.low
        one_sided = width.isinf()
        stated = torch.full_like(width, entries.peaked, dtype=torch.bool) | (width == 0) | one_sided
        rows, columns = (stated & matrix.any()).nonzero().T
        spread = torch.where(one_sided, HALF * matrix.double().square(), EVEN * (width / 2).square())
        variance = entries.variance + spread
        values = torch.where(one_sided, matrix.double(), (entries.low + entries.high) / 2)
        precision = 1 / variance[rows, columns]
        step = step_of(matrix, threat)
        return KnownEntries(rows, columns, values[rows, columns], precision, matrix.numel(), step, uploads)

    def some(self, most: int, generator: torch.Generator) -> "KnownEntries":
        """So many of them at most, drawn alike."""
        return self._chosen(torch.randperm(len(self.rows), generator=generator)[:most])

    def crossed(self, most: int, generator: torch.Generator) -> "KnownEntries":
        """About so many, those of some rows in some columns, drawn alike: a candidate's are quick to make.

        There are as many rows as columns, or all of either. Where not all entries are known, ``some`` of them.
        """
        if len(self.rows) < self.of:
            return self.some(most, generator)
        height = int(self.rows[-1]) + 1
        width = self.of // height
        across = min(width, math.isqrt(most))
        down = min(height, most // across)
        across = min(width, most // down)
        rows, columns = (
            torch.randperm(length, generator=generator)[:count].sort().values.to(self.rows.device)
            for length, count in ((height, down), (width, across))
        )
        chosen = (rows[:, None] * width + columns).flatten()
        return replace(self._chosen(chosen), crossing=(rows, columns))

    def largest(self, most: int) -> "KnownEntries":
        """So many of them at most, the largest."""
        return self._chosen(self.values.abs().argsort(descending=True)[:most])

    def scaled(self, factor: float) -> "KnownEntries":
        """All entries times a factor."""
        precision, step = self.precision / factor**2, self.step * abs(factor)
        return replace(self, values=self.values * factor, precision=precision, step=step)

    def near(self, made: Tensor, least: float) -> "KnownEntries":
        """With the noise that random rounding to levels puts on a candidate's entries: the less, the nearer to a level.

        Args:
            made: (entries,) of the candidate.
            least: Of that noise, in squared steps, as candidates are not the picture.
        """
        within = (made.double().abs() / (self.step or torch.inf)) % 1
        noise = (within * (1 - within)).clamp(min=least) - EVEN
        return replace(self, precision=1 / (1 / self.precision + self.step**2 / self.averaged * noise))

    def apart(self, made: Tensor) -> Tensor:
        """(entries,) of variance 1, from those of a candidate."""
        return (made - self.values.to(made.dtype)) * self._weight.to(made.dtype)

    def overlap(self, made: Tensor) -> Tensor:
        """(2,): of a candidate's entries with these, and with themselves, in units of noise."""
        weight = self._weight.to(made.dtype)
        weighted = made * weight
        return torch.stack([weighted @ (self.values.to(made.dtype) * weight), weighted @ weighted])

    @cached_property
    def _weight(self) -> Tensor:
        return self.precision.sqrt()

    def _chosen(self, chosen: Tensor) -> "KnownEntries":
        chosen = chosen.sort().values.to(self.rows.device)
        rows, columns, values, precision = (
            each[chosen] for each in (self.rows, self.columns, self.values, self.precision)
        )
        return replace(self, rows=rows, columns=columns, values=values, precision=precision, crossing=None)


class PickedResiduals:
    """The residuals of candidates for one picture's upload: called with their patches."""

    def __init__(
        self, model: VitClassifier, label: Tensor, known: Mapping[str, KnownEntries], threat: ThreatModel
    ) -> None:
        """Compare the gradients of layers and of the position embedding.

        Args:
            model: With the weights of the upload; not changed.
            label: (1,) int64.
            known: By tensor; those of the patch embedding are not used.
            threat: The clients' loss, and whether the update was scaled.
        """
        layers = compared_layers(model)
        self._label, self._factored = label, FactoredModel(model, layers, threat.label_smoothing)
        self._moving = None
        if is_plain(model.backbone):
            networks = {dtype: self._factored.network(dtype) for dtype in (torch.float32, torch.float64)}
            target = soft_targets(label, model.backbone.num_classes, threat.label_smoothing, torch.float64)
            self._moving = PlainFactors(networks, layers, target)
        self._scaled = "scaled" in threat.marks
        self._known = {name: entries for name, entries in known.items() if name != names.PATCH_WEIGHT}

    @property
    def count(self) -> int:
        """How many entries are compared."""
        return sum(len(entries.rows) for entries in self._known.values())

    def __call__(self, patches: Tensor) -> Tensor:
        """Compare (patches, values) in the network's input space, float32 or float64: (entries,), about 1 each."""
        return self.compared(self.factors(patches))

    def compared(self, factors: Factors) -> Tensor:
        """The same of a candidate's factors."""
        made = self._entries(factors)
        scale = self._scale(made)
        return torch.cat([entries.apart(made[name] * scale) for name, entries in self._known.items()])

    def near(self, patches: Tensor, least: float) -> "PickedResiduals":
        """The same, with the noise that random rounding to levels puts on this candidate's entries, or ``least``."""
        made = self._entries(self.factors(patches))
        scale, nearer = self._scale(made), copy(self)
        nearer._known = {name: entries.near(made[name] * scale, least) for name, entries in self._known.items()}
        return nearer

    def slopes(self, of: Callable[[Factors], Tensor], space: OpenSpace, unknowns: Tensor) -> Tensor:
        """(unknowns, results) float32: row i is the derivative of a function of a candidate's factors by unknown i."""
        if self._moving is not None:
            return self._moving.slopes(of, space, unknowns)
        return jacobian(lambda point: of(self.factors(space.patches(point)[0])), unknowns)

    def scale(self, patches: Tensor) -> float:
        """The factor that a candidate's update was likely scaled by; 1 where it was not, or signs do not tell."""
        return float(self._scale(self._entries(self.factors(patches))))

    def factors(self, patches: Tensor) -> Factors:
        """What gradients of a candidate (patches, values) are products of."""
        if self._moving is not None:
            return self._moving(patches)
        positions = self._factored.network(patches.dtype).get_parameter(names.POSITION_EMBEDDING)
        return self._factored(patches[None], self._label, 1, positions)

    def _entries(self, factors: Factors) -> dict[str, Tensor]:
        return {name: made_entries(name, entries, factors) for name, entries in self._known.items()}

    def _scale(self, made: Mapping[str, Tensor]) -> Tensor:
        """That which leaves the least squares, and is positive."""
        if not self._scaled:
            return torch.ones(())
        overlaps = [entries.overlap(made[name]) for name, entries in self._known.items()]
        with_these, with_itself = torch.stack(overlaps).sum(dim=0).unbind()
        return (with_these / with_itself).clamp(min=torch.finfo(with_itself.dtype).eps)


def made_entries(name: str, entries: KnownEntries, factors: Factors) -> Tensor:
    """Entries of a candidate's gradient."""
    if name == names.POSITION_EMBEDDING or name.endswith(".bias") or len(entries.rows) > WHOLE * entries.of:
        gradient = factors.gradient(name)
        if len(entries.rows) == entries.of:  # in their order
            return gradient.flatten()
        return gradient.view(len(gradient), -1)[entries.rows, entries.columns]
    layer = name.removesuffix(".weight")
    outputs, inputs = factors.outputs[layer], factors.inputs[layer]
    if entries.crossing is not None:
        rows, columns = entries.crossing
        return (outputs[:, rows].mT @ inputs[:, columns]).flatten()
    made: Tensor = (outputs[:, entries.rows] * inputs[:, entries.columns]).sum(dim=0)
    return made

"""How far the gradients of a candidate are from what an upload says of single entries, in units of noise."""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedmjp.attacks.entries import EVEN, Entries, coarse, read_entries, step_of
from fedmjp.attacks.gauss_newton.factors import FactoredModel, Factors
from fedmjp.attacks.gauss_newton.levenberg import jacobian
from fedmjp.attacks.gauss_newton.moving import PlainFactors
from fedmjp.attacks.gauss_newton.residuals import compared_layers
from fedmjp.attacks.gauss_newton.space import OpenSpace
from fedmjp.attacks.gradient_at_tokens import is_plain
from fedmjp.attacks.matching_gradients import soft_targets
from fedmjp.defences.quantise import Quantise
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Upload
from fedmjp.threat import ThreatModel

COMPUTED = 15 * 2.0**-24  # of a tensor's root mean square: what float32 arithmetic leaves between two gradients
HALF = math.pi / 2 - 1  # of the squared mean: the variance of a normal variable on one side of its mean
WHOLE = 0.25  # share of a weight's entries from which on its gradient is formed, and entries are not made one by one


def said_of(matrix: Tensor, threat: ThreatModel, uploads: int) -> Entries:
    """Read what a tensor's entries say of those that a candidate has.

    Args:
        matrix: (rows, columns), the mean of uploaded tensors.
        threat: What the attacker is granted.
        uploads: How many it is the mean of.
    """
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
        """Read the entries that a pipeline leaves of a tensor, none of one that is all zeros.

        A sign is read as the mean of normal entries on its side.

        Args:
            tensor: (rows,) or (rows, columns), the mean of uploaded tensors.
            threat: What the attacker is granted.
            uploads: How many it is the mean of.
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
        """Draw entries uniformly.

        Args:
            most: At most so many.
            generator: On the CPU.
        """
        return self._chosen(torch.randperm(len(self.rows), generator=generator)[:most])

    def crossed(self, most: int, generator: torch.Generator) -> "KnownEntries":
        """Draw the entries that some rows share with some columns, which are quick to compute of a candidate.

        There are as many rows as columns, or all of either. Where not all entries are known, ``some`` of them.

        Args:
            most: About so many.
            generator: On the CPU.
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
        indices = (rows[:, None] * width + columns).flatten()
        return replace(self._chosen(indices), crossing=(rows, columns))

    def largest(self, most: int) -> "KnownEntries":
        """Select the largest entries."""
        return self._chosen(self.values.abs().argsort(descending=True)[:most])

    def scaled(self, factor: float) -> "KnownEntries":
        """Scale all entries."""
        precision, step = self.precision / factor**2, self.step * abs(factor)
        return replace(self, values=self.values * factor, precision=precision, step=step)

    def near(self, computed: Tensor, least: float) -> "KnownEntries":
        """Set the noise that random rounding puts on a candidate's entries: the less, the nearer they are to a level.

        Args:
            computed: (entries,) of the candidate.
            least: Of that noise, in squared steps, as candidates are not the picture.
        """
        within = (computed.double().abs() / (self.step or torch.inf)) % 1
        noise = (within * (1 - within)).clamp(min=least) - EVEN
        return replace(self, precision=1 / (1 / self.precision + self.step**2 / self.averaged * noise))

    def apart(self, computed: Tensor) -> Tensor:
        """Return (entries,) differences of variance 1.

        Args:
            computed: (entries,) of a candidate.
        """
        return (computed - self.values.to(computed.dtype)) * self._weight.to(computed.dtype)

    def overlap(self, computed: Tensor) -> Tensor:
        """Return (2,): a candidate's inner products with these entries and with itself, in units of noise.

        Args:
            computed: (entries,) of a candidate.
        """
        weight = self._weight.to(computed.dtype)
        weighted = computed * weight
        return torch.stack([weighted @ (self.values.to(computed.dtype) * weight), weighted @ weighted])

    @cached_property
    def _weight(self) -> Tensor:
        return self.precision.sqrt()

    def _chosen(self, indices: Tensor) -> "KnownEntries":
        indices = indices.sort().values.to(self.rows.device)
        rows, columns, values, precision = (
            column[indices] for column in (self.rows, self.columns, self.values, self.precision)
        )
        return replace(self, rows=rows, columns=columns, values=values, precision=precision, crossing=None)


class PickedResiduals:
    """The residuals of candidates for one picture's upload: called with their patches."""

    def __init__(
        self, model: VitClassifier, label: Tensor, known_entries: Mapping[str, KnownEntries], threat: ThreatModel
    ) -> None:
        """Compare the gradients of layers and of the position embedding.

        Args:
            model: With the weights of the upload; not changed.
            label: (1,) int64.
            known_entries: By tensor; those of the patch embedding are not used.
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
        self._known = {name: entries for name, entries in known_entries.items() if name != names.PATCH_WEIGHT}

    @property
    def count(self) -> int:
        """Count the entries that are compared."""
        return sum(len(entries.rows) for entries in self._known.values())

    def __call__(self, patches: Tensor) -> Tensor:
        """Compare (patches, values) in the network's input space, float32 or float64: (entries,), about 1 each."""
        return self.compared(self.factors(patches))

    def compared(self, factors: Factors) -> Tensor:
        """Compare a candidate's factors: (entries,), about 1 each."""
        computed = self._entries(factors)
        scale = self._scale(computed)
        return torch.cat([entries.apart(computed[name] * scale) for name, entries in self._known.items()])

    def near(self, patches: Tensor, least: float) -> "PickedResiduals":
        """Copy this, with the noise that random rounding to levels puts on a candidate's entries.

        Args:
            patches: (patches, values) of the candidate.
            least: Of that noise, in squared steps.
        """
        computed = self._entries(self.factors(patches))
        scale, nearer = self._scale(computed), copy(self)
        nearer._known = {name: entries.near(computed[name] * scale, least) for name, entries in self._known.items()}
        return nearer

    def slopes(self, of: Callable[[Factors], Tensor], space: OpenSpace, unknowns: Tensor) -> Tensor:
        """Differentiate a function of a candidate's factors: (unknowns, results) float32, row i by unknown i.

        Args:
            of: The function.
            space: That the unknowns are of.
            unknowns: (unknowns,) of the candidate.
        """
        if self._moving is not None:
            return self._moving.slopes(of, space, unknowns)
        return jacobian(lambda point: of(self.factors(space.patches(point)[0])), unknowns)

    def scale(self, patches: Tensor) -> float:
        """Estimate the factor that a candidate's update was scaled by; 1 where it was not, or signs do not tell.

        Args:
            patches: (patches, values) of the candidate.
        """
        return float(self._scale(self._entries(self.factors(patches))))

    def factors(self, patches: Tensor) -> Factors:
        """Compute the factors that a candidate's gradients are products of.

        Args:
            patches: (patches, values) in the network's input space, float32 or float64.
        """
        if self._moving is not None:
            return self._moving(patches)
        positions = self._factored.network(patches.dtype).get_parameter(names.POSITION_EMBEDDING)
        return self._factored(patches[None], self._label, 1, positions)

    def _entries(self, factors: Factors) -> dict[str, Tensor]:
        return {name: made_entries(name, entries, factors) for name, entries in self._known.items()}

    def _scale(self, computed: Mapping[str, Tensor]) -> Tensor:
        """Return the factor that leaves the least squares, and is positive."""
        if not self._scaled:
            return torch.ones(())
        overlaps = [entries.overlap(computed[name]) for name, entries in self._known.items()]
        with_these, with_itself = torch.stack(overlaps).sum(dim=0).unbind()
        return (with_these / with_itself).clamp(min=torch.finfo(with_itself.dtype).eps)


def made_entries(name: str, entries: KnownEntries, factors: Factors) -> Tensor:
    """Compute entries of a candidate's gradient.

    Args:
        name: Of the parameter.
        entries: Which.
        factors: Of the candidate.
    """
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
    products: Tensor = (outputs[:, entries.rows] * inputs[:, entries.columns]).sum(dim=0)
    return products


SOME = 0.4  # times the unknowns: entries of a tensor that noise is on
ENOUGH = 2.0  # times the unknowns: exact entries, the largest, of all tensors together. With more a search gets stuck.


def some(by_tensor: Mapping[str, KnownEntries], unknowns: int, generator: torch.Generator) -> dict[str, KnownEntries]:
    """Draw so many entries of each tensor that a search for so many unknowns can begin with them.

    Args:
        by_tensor: Known entries.
        unknowns: How many.
        generator: On the CPU.
    """
    most = math.ceil(SOME * unknowns)
    return {
        name: entries.crossed(most, generator) if name.endswith(".weight") else entries.some(most, generator)
        for name, entries in by_tensor.items()
    }


def largest(by_tensor: Mapping[str, KnownEntries], unknowns: int) -> dict[str, KnownEntries]:
    """Select the largest entries, as many as a search for so many unknowns needs."""
    share = ENOUGH * unknowns / sum(entries.of for entries in by_tensor.values())
    return {name: entries.largest(math.ceil(share * entries.of)) for name, entries in by_tensor.items()}


def anywhere(by_tensor: Mapping[str, KnownEntries]) -> dict[str, KnownEntries]:
    """Drop the entries that tell where a token stands."""
    return {name: entries for name, entries in by_tensor.items() if name != names.POSITION_EMBEDDING}


@dataclass(frozen=True)
class UploadedEntries:
    """Tensors of uploads of one picture on the model's device, and what makes gradients of them.

    Attributes:
        tensors: (rows,) or (rows, columns) each, the mean of the uploads.
        factor: Of a gradient over what was sent.
        threat: What was done to the entries.
        uploads: How many they are the mean of.
    """

    tensors: Mapping[str, Tensor]
    factor: float
    threat: ThreatModel
    uploads: int

    @staticmethod
    def of(
        uploads: Sequence[Upload], names: Sequence[str], threat: ThreatModel, model: VitClassifier
    ) -> "UploadedEntries":
        """Average uploads that differ in their noise alone; take the first where others leave no mean.

        Args:
            uploads: Of one picture, at the same weights.
            names: Of the tensors.
            threat: What the attacker is granted.
            model: Whose device is used.
        """
        averaged = uploads if all(isinstance(defence, Quantise) for defence in coarse(threat)) else uploads[:1]
        factor = 1.0 if averaged[0].kind == "gradient" else -1 / threat.local_learning_rate
        tensors = {name: _mean([upload.tensors[name] for upload in averaged]).to(model.mean.device) for name in names}
        return UploadedEntries(tensors, factor, threat, len(averaged))

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients as they were sent."""
        return {name: tensor * self.factor for name, tensor in self.tensors.items()}

    def said_of(self, name: str, scaled: float) -> Entries:
        """Read what is said of a gradient (rows, columns).

        Args:
            name: Of the tensor.
            scaled: By what it is larger than what clients sent.
        """
        matrix = self.tensors[name].flatten(1) * math.copysign(1.0, self.factor)
        return said_of(matrix, self.threat, self.uploads).scaled(abs(self.factor) * scaled)

    def known(self) -> dict[str, KnownEntries]:
        """Read the entries of gradients that are known but for noise."""
        return {
            name: KnownEntries.read(tensor, self.threat, self.uploads).scaled(self.factor)
            for name, tensor in self.tensors.items()
        }


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    """Average tensors in their own precision, which tells how they were rounded."""
    return torch.stack([tensor.double() for tensor in tensors]).mean(dim=0).to(tensors[0].dtype).squeeze(0)

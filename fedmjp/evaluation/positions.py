"""What a model's table of position embeddings holds: its spectrum, and how well places can be read from it.

MJP's Tables 6 and 8 and Fig. 4. The table is the rows of the patches, without class token and unknown embedding.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

from fedmjp.errors import BadInputError
from fedmjp.models import names
from fedmjp.models.classifier import Classifier
from fedmjp.seeds import numpy_generator

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

COMPONENTS = (3, 4, 5, 6, 7)  # of Table 6
FOLDS, REPETITIONS, CONFIDENCE = 5, 20, 0.95
# What "explained variance" may mean, for Table 6 does not say: whether rows are centred, and the power of the singular
# values. The first is that of a principal component analysis.
READINGS: Mapping[str, tuple[bool, int]] = {
    "centred, squared": (True, 2),
    "centred": (True, 1),
    "not centred, squared": (False, 2),
    "not centred": (False, 1),
}
# Ren et al., CVPR 2023, of DeiT-S: Table 6 in per cent by component, and Table 8 by target.
PAPER_VARIANCE = {"none": (54.61, 68.55, 77.95, 85.54, 90.74), "mjp": (46.74, 58.36, 69.10, 78.13, 84.55)}
PAPER_REGRESSION = {
    ("none", "none"): (0.945, 0.076),
    ("mjp", "linear"): (0.566, 0.042),
    ("mjp", "nonlinear"): (1.301, 0.134),
}
# By name: whether of two patches, whether by rows and columns, and whether differences of these wrap.
TARGETS = {
    "absolute 1-D": (False, False, False),
    "absolute 2-D": (False, True, False),
    "relative 1-D": (True, False, False),
    "relative 2-D": (True, True, False),
    "relative 2-D, wraps": (True, True, True),
}
WRAPS = 256  # an unsigned byte


@dataclass(frozen=True)
class PositionTable:
    """The position embeddings of a model's patches, row by row of the grid."""

    name: str
    rows: Floats  # (patches, dim)

    @property
    def grid(self) -> int:
        """Patches per side."""
        return math.isqrt(len(self.rows))

    @property
    def places(self) -> Integers:
        """(patches, 2) row and column of each patch."""
        index = np.arange(len(self.rows))
        return np.stack([index // self.grid, index % self.grid], axis=1)


def positions_of(model: Classifier, name: str) -> PositionTable:
    """Read the table of a model; BadInputError if it has none.

    Args:
        model: Trained or not.
        name: Of the run, for what is said of it.
    """
    if not model.has_positions:
        raise BadInputError(f"{name}: its model has no absolute position embeddings, so there are none to study")
    rows = model.get_parameter(names.POSITION_EMBEDDING).detach()[0, model.backbone.num_prefix_tokens :]
    return PositionTable(name, rows.double().cpu().numpy())


def explained_variance(rows: Floats) -> pd.DataFrame:
    """Table 6, in all four readings: what share the first k components have, as (reading, k, share)."""
    made = []
    for reading, (centred, power) in READINGS.items():
        values = _singular_values(rows - rows.mean(axis=0) if centred else rows) ** power
        shares = values.cumsum() / values.sum()
        made += [{"reading": reading, "k": k, "share": shares[k - 1]} for k in COMPONENTS if k <= len(shares)]
    return pd.DataFrame(made)


def nearest_reading(variance: pd.DataFrame, defence: str) -> str:
    """The reading whose shares are nearest to those that the paper reports under a defence (``PAPER_VARIANCE``)."""
    printed = dict(zip(COMPONENTS, PAPER_VARIANCE[defence], strict=True))
    gap = (100 * variance["share"] - variance["k"].map(printed)).abs()
    return str(gap.groupby(variance["reading"], sort=False).mean().idxmin())


def energy(rows: Floats) -> pd.DataFrame:
    """Fig. 4: the share of all singular values that the k largest have, for every k."""
    values = _singular_values(rows)
    return pd.DataFrame({"k": np.arange(1, len(values) + 1), "share": values.cumsum() / values.sum()})


def position_regression(table: PositionTable, *, seed: int, repetitions: int = REPETITIONS) -> pd.DataFrame:
    """Table 8: the mean absolute error with which a linear map tells places, five-fold, over random orders of the rows.

    Targets are the index of a patch (1-D), or its row and column (2-D); of one patch (absolute), or how far two random
    patches are apart, from the difference of their rows (relative). The official script has differences of rows and
    columns in unsigned bytes, so that -1 is 255: ``wraps`` is what it prints.

    Returns:
        A row per target: mean, 95 % interval of the mean (Student's, over the orders), and standard deviation.
    """
    made = []
    for target in TARGETS:
        generators = (numpy_generator(seed, "positions", target, number) for number in range(repetitions))
        errors = np.array([_cross_validated(*_drawn(table, target, generator)) for generator in generators])
        half = float(stats.sem(errors) * stats.t.ppf((1 + CONFIDENCE) / 2, repetitions - 1))
        mean, deviation = float(errors.mean()), float(errors.std(ddof=1))
        made.append({"target": target, "error": mean, "low": mean - half, "high": mean + half, "deviation": deviation})
    return pd.DataFrame(made)


def similarities(rows: Floats) -> Floats:
    """(patches, patches) cosines of all pairs of rows; a row of zeros resembles none."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    directions = rows / np.where(lengths > 0, lengths, 1)
    cosines: Floats = directions @ directions.T
    return cosines


def principal(rows: Floats, dimensions: int) -> Floats:
    """(patches, dimensions) coordinates along the first principal components, each with its largest value positive."""
    left, values, _ = np.linalg.svd(rows - rows.mean(axis=0), full_matrices=False)
    found = left[:, :dimensions] * values[:dimensions]
    largest = np.abs(found).argmax(axis=0)
    turned: Floats = found * np.sign(found[largest, np.arange(dimensions)])
    return turned


def _singular_values(rows: Floats) -> Floats:
    values: Floats = np.linalg.svd(rows, compute_uv=False).astype(np.float64)
    if not values.any():
        raise BadInputError("the position embeddings are all zero: nothing can be said of their spectrum")
    return values


def _cross_validated(inputs: Floats, targets: Integers) -> float:
    """As the official scripts have it: least squares of minimum norm, five folds in the order of the rows."""
    from sklearn.linear_model import LinearRegression  # noqa: PLC0415 (of an extra)
    from sklearn.model_selection import cross_val_score  # noqa: PLC0415

    scored = cross_val_score(LinearRegression(), inputs, targets, cv=FOLDS, scoring=_mean_absolute_error)
    return float(scored.mean())


def _mean_absolute_error(model: Any, inputs: Floats, targets: Integers) -> float:
    return float(np.abs(model.predict(inputs) - targets).mean())


def _drawn(table: PositionTable, target: str, generator: np.random.Generator) -> tuple[Floats, Integers]:
    """What a place is to be told from, and what is to be told, patch by patch in a random order."""
    relative, by_axes, wraps = TARGETS[target]
    places = table.places if by_axes else np.arange(len(table.rows))
    order = generator.permutation(len(table.rows))
    if not relative:
        return table.rows[order], places[order]
    other = generator.permutation(len(table.rows))
    apart = places[order] - places[other]
    return table.rows[order] - table.rows[other], apart % WRAPS if wraps else np.abs(apart)

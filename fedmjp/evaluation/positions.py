"""The information in a model's table of position embeddings: its spectrum, and places read from it.

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
# Possible meanings of "explained variance" in Table 6: whether rows are centred, and the power of the singular values.
# The first is that of a principal component analysis.
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
# By name: whether two patches are compared, whether by rows and columns, and whether differences of these wrap.
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
        """Return the patches per side."""
        return math.isqrt(len(self.rows))

    @property
    def places(self) -> Integers:
        """Return row and column of each patch, (patches, 2)."""
        index = np.arange(len(self.rows))
        return np.stack([index // self.grid, index % self.grid], axis=1)


def read_positions(model: Classifier, name: str) -> PositionTable:
    """Read the table of a model.

    Args:
        model: Trained or not.
        name: Of the run, for error messages.

    Raises:
        BadInputError: If it has no absolute position embeddings.
    """
    if not model.has_positions:
        raise BadInputError(f"{name}: its model has no absolute position embeddings, so there are none to study")
    rows = model.get_parameter(names.POSITION_EMBEDDING).detach()[0, model.backbone.num_prefix_tokens :]
    return PositionTable(name, rows.double().cpu().numpy())


def compute_explained_variance(rows: Floats) -> pd.DataFrame:
    """Compute Table 6 of rows (patches, dim) in all four readings: the share of the first k components."""
    records = []
    for reading, (centred, power) in READINGS.items():
        values = _compute_singular_values(rows - rows.mean(axis=0) if centred else rows) ** power
        shares = values.cumsum() / values.sum()
        records += [{"reading": reading, "k": k, "share": shares[k - 1]} for k in COMPONENTS if k <= len(shares)]
    return pd.DataFrame(records)


def find_nearest_reading(variance: pd.DataFrame, defence: str) -> str:
    """Find the reading whose shares are nearest to the paper's (``PAPER_VARIANCE``).

    Args:
        variance: As of ``compute_explained_variance``.
        defence: none or mjp.
    """
    printed = dict(zip(COMPONENTS, PAPER_VARIANCE[defence], strict=True))
    gap = (100 * variance["share"] - variance["k"].map(printed)).abs()
    return str(gap.groupby(variance["reading"], sort=False).mean().idxmin())


def compute_energy(rows: Floats) -> pd.DataFrame:
    """Compute Fig. 4 of rows (patches, dim): the share of all singular values that the k largest have."""
    values = _compute_singular_values(rows)
    return pd.DataFrame({"k": np.arange(1, len(values) + 1), "share": values.cumsum() / values.sum()})


def measure_position_regression(table: PositionTable, *, seed: int, repetitions: int = REPETITIONS) -> pd.DataFrame:
    """Measure Table 8: the mean absolute error of a linear map from rows to places, five-fold, over random orders.

    Targets are the index of a patch (1-D), or its row and column (2-D); of one patch (absolute), or the distance of two
    random patches, from the difference of their rows (relative). The official script has differences of rows and
    columns in unsigned bytes, so that -1 is 255: ``wraps`` gives its figure.

    Args:
        table: To read places from.
        seed: Of the orders.
        repetitions: Orders, at least 2.

    Returns:
        A row per target: mean, 95 % interval of the mean (Student's, over the orders), and standard deviation.
    """
    rows = []
    for target in TARGETS:
        generators = (numpy_generator(seed, "positions", target, number) for number in range(repetitions))
        errors = np.array([_cross_validate(*_draw_targets(table, target, generator)) for generator in generators])
        half = float(stats.sem(errors) * stats.t.ppf((1 + CONFIDENCE) / 2, repetitions - 1))
        mean, deviation = float(errors.mean()), float(errors.std(ddof=1))
        rows.append({"target": target, "error": mean, "low": mean - half, "high": mean + half, "deviation": deviation})
    return pd.DataFrame(rows)


def compute_similarities(rows: Floats) -> Floats:
    """Compute the cosines of all pairs of rows (patches, dim); 0 for a row of zeros."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    directions = rows / np.where(lengths > 0, lengths, 1)
    cosines: Floats = directions @ directions.T
    return cosines


def project_on_principal_axes(rows: Floats, dimensions: int) -> Floats:
    """Project rows on their first principal components, each with its largest value positive, (patches, dimensions).

    Args:
        rows: (patches, dim).
        dimensions: Number of components.
    """
    left_vectors, values, _ = np.linalg.svd(rows - rows.mean(axis=0), full_matrices=False)
    coordinates = left_vectors[:, :dimensions] * values[:dimensions]
    largest = np.abs(coordinates).argmax(axis=0)
    turned: Floats = coordinates * np.sign(coordinates[largest, np.arange(dimensions)])
    return turned


def _compute_singular_values(rows: Floats) -> Floats:
    values: Floats = np.linalg.svd(rows, compute_uv=False).astype(np.float64)
    if not values.any():
        raise BadInputError("the position embeddings are all zero: nothing can be said of their spectrum")
    return values


def _cross_validate(inputs: Floats, targets: Integers) -> float:
    """Fit least squares of minimum norm in five folds in the order of the rows, as the official scripts do."""
    from sklearn.linear_model import LinearRegression  # noqa: PLC0415 (of an extra)
    from sklearn.model_selection import cross_val_score  # noqa: PLC0415

    scored = cross_val_score(LinearRegression(), inputs, targets, cv=FOLDS, scoring=_compute_absolute_error)
    return float(scored.mean())


def _compute_absolute_error(model: Any, inputs: Floats, targets: Integers) -> float:
    return float(np.abs(model.predict(inputs) - targets).mean())


def _draw_targets(table: PositionTable, target: str, generator: np.random.Generator) -> tuple[Floats, Integers]:
    """Draw inputs and targets of the regression, patch by patch in a random order."""
    relative, by_axes, wraps = TARGETS[target]
    places = table.places if by_axes else np.arange(len(table.rows))
    order = generator.permutation(len(table.rows))
    if not relative:
        return table.rows[order], places[order]
    partners = generator.permutation(len(table.rows))
    offsets = places[order] - places[partners]
    return table.rows[order] - table.rows[partners], offsets % WRAPS if wraps else np.abs(offsets)

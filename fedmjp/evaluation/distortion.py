"""What corruptions of pictures are made of: blurs, zooms, smears, clouds, and samples between pixels."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import ndimage, sparse

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int_]
Pixels = npt.NDArray[np.uint8]
SMALL = 8  # pixels: the radius up to which a disk is softened by one pixel, not by two
NEGLIGIBLE = 1e-6  # of a weight: a thousandth of a grey level
ROUGHNESS = 100.0


def between(matrix: Floats, image: Floats) -> Floats:
    """Apply a linear map to the rows and to the columns of an image with or without channels."""
    down = np.tensordot(matrix, image, axes=1)
    return np.moveaxis(np.tensordot(matrix, down, axes=(1, 1)), 0, 1)


@lru_cache(maxsize=256)
def gaussian_matrix(side: int, sigma: float, mode: str, truncate: float) -> Floats:
    """A blur of a row, with the mode of scipy at its ends and cut so many deviations away."""
    if not sigma:
        return np.eye(side)
    smooth: Floats = ndimage.gaussian_filter1d(np.eye(side), sigma, axis=0, mode=mode, truncate=truncate)
    return smooth


@lru_cache(maxsize=256)
def zoom_matrix(side: int, factor: float) -> Floats:
    """The middle of a row enlarged to its length, by linear interpolation."""
    kept = int(np.ceil(side / factor))
    enlarged = round(kept * factor)
    places = (np.arange(side) + (enlarged - side) // 2) * ((kept - 1) / max(enlarged - 1, 1))
    below = np.clip(places.astype(int), 0, max(kept - 2, 0))
    matrix, first = np.zeros((side, side)), (side - kept) // 2
    matrix[np.arange(side), first + below] = 1 - (places - below)
    matrix[np.arange(side), first + np.minimum(below + 1, kept - 1)] += places - below
    return matrix


@lru_cache(maxsize=64)
def zoom_matrices(side: int, farthest: float, step: float) -> tuple[sparse.csr_array, sparse.csr_array]:
    """Enlargements by all factors, one below the other for the rows and one beside the other for the columns."""
    matrices = [zoom_matrix(side, float(factor)) for factor in np.arange(1, farthest, step)]
    return sparse.csr_array(np.vstack(matrices)), sparse.csr_array(np.hstack(matrices))


@lru_cache(maxsize=64)
def disk(radius: float, softness: float) -> Floats:
    """A disk's share of each pixel, without the rows that are empty."""
    reach, taps = (SMALL, 1) if radius <= SMALL else (int(np.ceil(radius)), 2)
    places = np.arange(-reach, reach + 1)
    inside = (places[:, None] ** 2 + places**2 <= radius**2).astype(np.float64)
    bell = np.exp(-(np.arange(-taps, taps + 1) ** 2) / (2 * softness**2))
    kernel: Floats = inside / inside.sum()
    for axis in (0, 1):
        kernel = ndimage.correlate1d(kernel, bell / bell.sum(), axis=axis, mode="mirror")
    used = int(np.abs(places[kernel.any(axis=0)]).max())
    return kernel[reach - used : reach + used + 1, reach - used : reach + used + 1]


def take_from_nearby(picture: Pixels, reach: int, generator: np.random.Generator) -> Pixels:
    """Copy into each pixel, from the last to the first, one that is near it, as it is at that moment."""
    side = len(picture)
    scanned = np.arange(side - reach, reach, -1)
    rows, columns = (places.ravel() for places in np.meshgrid(scanned, scanned, indexing="ij"))
    steps = generator.integers(-reach, reach, size=(len(rows), 2))
    here, there = rows * side + columns, (rows + steps[:, 1]) * side + columns + steps[:, 0]
    # Who takes from a pixel that was overwritten before takes what that one took: follow until one that was not.
    count = side * side
    as_it_was = np.arange(count) + count
    turn = np.full(count, len(here))
    turn[here] = np.arange(len(here))
    source = np.concatenate([as_it_was, as_it_was])
    source[here] = np.where(turn[there] < turn[here], there, as_it_was[there])
    while (source < count).any():
        source = source[source]
    taken: Pixels = picture.reshape(count, -1)[source[:count] - count].reshape(picture.shape)
    return taken


def smear(image: Pixels, radius: float, sigma: float, degrees: float) -> Pixels:
    """Average pixels along a ray, the nearest most, as ImageMagick's motion blur does.

    It rounds to 16 bits and cuts that to 8.
    """
    taps = np.arange(2 * int(np.ceil(radius)) + 1)
    weights = np.exp(-(taps**2) / (2 * sigma**2))
    weights /= weights.sum()
    angle = np.deg2rad(degrees)
    right, down = (np.ceil(taps * step - 0.5).astype(int) for step in (np.cos(angle), np.sin(angle)))
    used = weights > NEGLIGIBLE
    reach = int(max(np.abs(right[used]).max(), np.abs(down[used]).max()))
    edges = [(reach, reach), (reach, reach), *[(0, 0)] * (image.ndim - 2)]
    padded, side = np.pad(image.astype(np.float64), edges, mode="edge"), len(image)
    total = np.full(image.shape, 0.5 / 257)
    for weight, x, y in zip(weights[used], right[used] + reach, down[used] + reach, strict=True):
        total += weight * padded[y : y + side, x : x + side]
    return total.astype(np.uint8)


def clouds(side: int, decay: float, generator: np.random.Generator) -> Floats:
    """A plasma fractal by the diamond-square algorithm, (side, side) from 0 to 1, that repeats at its edges."""
    field, rough = np.zeros((side, side)), ROUGHNESS
    step = side
    while step >= 2:
        half = step // 2
        corners = field[::step, ::step]
        sums = corners + np.roll(corners, -1, axis=0)
        sums = sums + np.roll(sums, -1, axis=1)
        field[half::step, half::step] = _roughened(sums, rough, generator)
        middles = field[half::step, half::step]
        beside = middles + np.roll(middles, 1, axis=0) + corners + np.roll(corners, -1, axis=1)
        field[::step, half::step] = _roughened(beside, rough, generator)
        above = middles + np.roll(middles, 1, axis=1) + corners + np.roll(corners, -1, axis=0)
        field[half::step, ::step] = _roughened(above, rough, generator)
        step, rough = half, rough / decay
    field -= field.min()
    field /= field.max()
    return field


def _roughened(sums: Floats, rough: float, generator: np.random.Generator) -> Floats:
    return sums / 4 + rough * generator.uniform(-rough, rough, size=sums.shape)


def sampled(image: Floats, rows: Floats, columns: Floats, edge: int) -> Floats:
    """Values of an image between its pixels, linearly, mirrored at its edge; ``edge`` says how often it counts."""
    top, left = np.floor(rows).astype(int), np.floor(columns).astype(int)
    below, right = (rows - top)[:, :, None], (columns - left)[:, :, None]
    side = len(image)
    (above, under), (before, behind) = (
        [_mirrored(places + step, side, edge) for step in (0, 1)] for places in (top, left)
    )
    upper = image[above, before] * (1 - right) + image[above, behind] * right
    lower = image[under, before] * (1 - right) + image[under, behind] * right
    between_rows: Floats = upper * (1 - below) + lower * below
    return between_rows


def _mirrored(places: Integers, side: int, edge: int) -> Integers:
    """Places in a row that is continued by its mirror image, whose first pixel is the last or the one before."""
    period = 2 * (side - 1) + 2 * (edge - 1)
    folded = np.mod(places, period)
    mirrored: Integers = np.minimum(folded, period - (edge - 1) - folded)
    return mirrored

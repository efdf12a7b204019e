"""Building blocks of corruptions of pictures: blurs, zooms, smears, clouds, and samples between pixels."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import ndimage, sparse

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int_]
Pixels = npt.NDArray[np.uint8]
SMALL = 8  # pixels: the radius up to which a disk is softened by one pixel, not by two
NEGLIGIBLE = 1e-6  # a weight: a thousandth of a grey level
ROUGHNESS = 100.0


def apply_to_both_axes(matrix: Floats, image: Floats) -> Floats:
    """Apply a linear map to the rows and to the columns of an image.

    Args:
        matrix: (side, side).
        image: (side, side) or (side, side, channels).
    """
    down = np.tensordot(matrix, image, axes=1)
    return np.moveaxis(np.tensordot(matrix, down, axes=(1, 1)), 0, 1)


@lru_cache(maxsize=256)
def build_gaussian_matrix(side: int, sigma: float, mode: str, truncate: float) -> Floats:
    """Build the matrix (side, side) of a Gaussian blur of a row.

    Args:
        side: Pixels of the row.
        sigma: Deviation in pixels.
        mode: Of scipy, at the ends of the row.
        truncate: Deviations after which the bell is cut.
    """
    if not sigma:
        return np.eye(side)
    smooth: Floats = ndimage.gaussian_filter1d(np.eye(side), sigma, axis=0, mode=mode, truncate=truncate)
    return smooth


@lru_cache(maxsize=256)
def build_zoom_matrix(side: int, factor: float) -> Floats:
    """Build the matrix (side, side) that enlarges the middle of a row to its length, by linear interpolation.

    Args:
        side: Pixels of the row.
        factor: Of the enlargement, at least 1.
    """
    cropped = int(np.ceil(side / factor))
    enlarged = round(cropped * factor)
    places = (np.arange(side) + (enlarged - side) // 2) * ((cropped - 1) / max(enlarged - 1, 1))
    below = np.clip(places.astype(int), 0, max(cropped - 2, 0))
    matrix, first = np.zeros((side, side)), (side - cropped) // 2
    matrix[np.arange(side), first + below] = 1 - (places - below)
    matrix[np.arange(side), first + np.minimum(below + 1, cropped - 1)] += places - below
    return matrix


@lru_cache(maxsize=64)
def build_zoom_matrices(side: int, farthest: float, step: float) -> tuple[sparse.csr_array, sparse.csr_array]:
    """Build the matrices of all enlargements, stacked below each other for the rows and side by side for the columns.

    Args:
        side: Pixels of a row.
        farthest: Factor before which to end; factors begin at 1.
        step: Between two factors.
    """
    matrices = [build_zoom_matrix(side, float(factor)) for factor in np.arange(1, farthest, step)]
    return sparse.csr_array(np.vstack(matrices)), sparse.csr_array(np.hstack(matrices))


@lru_cache(maxsize=64)
def build_disk(radius: float, softness: float) -> Floats:
    """Build a blur kernel: a softened disk's share of each pixel, without empty rows.

    Args:
        radius: In pixels.
        softness: Deviation in pixels of the blur of its edge.
    """
    reach, taps = (SMALL, 1) if radius <= SMALL else (int(np.ceil(radius)), 2)
    places = np.arange(-reach, reach + 1)
    inside = (places[:, None] ** 2 + places**2 <= radius**2).astype(np.float64)
    bell = np.exp(-(np.arange(-taps, taps + 1) ** 2) / (2 * softness**2))
    kernel: Floats = inside / inside.sum()
    for axis in (0, 1):
        kernel = ndimage.correlate1d(kernel, bell / bell.sum(), axis=axis, mode="mirror")
    used = int(np.abs(places[kernel.any(axis=0)]).max())
    return kernel[reach - used : reach + used + 1, reach - used : reach + used + 1]


def copy_from_nearby(picture: Pixels, reach: int, generator: np.random.Generator) -> Pixels:
    """Copy into each pixel, from the last to the first, a nearby pixel in its state at that moment.

    Args:
        picture: (side, side, 3).
        reach: Pixels to each side that a copy may come from.
        generator: Draws the distances.
    """
    side = len(picture)
    scanned = np.arange(side - reach, reach, -1)
    rows, columns = (places.ravel() for places in np.meshgrid(scanned, scanned, indexing="ij"))
    steps = generator.integers(-reach, reach, size=(len(rows), 2))
    targets, sources = rows * side + columns, (rows + steps[:, 1]) * side + columns + steps[:, 0]
    # A copy of an overwritten pixel is a copy of that pixel's source: follow sources to a pixel still unchanged.
    count = side * side
    unchanged = np.arange(count) + count
    turn = np.full(count, len(targets))
    turn[targets] = np.arange(len(targets))
    source = np.concatenate([unchanged, unchanged])
    source[targets] = np.where(turn[sources] < turn[targets], sources, unchanged[sources])
    while (source < count).any():
        source = source[source]
    copied: Pixels = picture.reshape(count, -1)[source[:count] - count].reshape(picture.shape)
    return copied


def smear(image: Pixels, radius: float, sigma: float, degrees: float) -> Pixels:
    """Average pixels along a ray, the nearest most, as ImageMagick's motion blur does.

    It rounds to 16 bits and cuts that to 8.

    Args:
        image: (side, side) or (side, side, channels).
        radius: Half the length of the ray in pixels.
        sigma: Deviation of the weights in pixels.
        degrees: Direction of the ray, clockwise from the right.
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


def draw_clouds(side: int, decay: float, generator: np.random.Generator) -> Floats:
    """Draw a plasma fractal by the diamond-square algorithm, (side, side) from 0 to 1, that repeats at its edges.

    Args:
        side: A power of two.
        decay: What the roughness is divided by at each scale.
        generator: Of the heights.
    """
    field, rough = np.zeros((side, side)), ROUGHNESS
    step = side
    while step >= 2:
        half = step // 2
        corners = field[::step, ::step]
        sums = corners + np.roll(corners, -1, axis=0)
        sums = sums + np.roll(sums, -1, axis=1)
        field[half::step, half::step] = _add_roughness(sums, rough, generator)
        middles = field[half::step, half::step]
        beside = middles + np.roll(middles, 1, axis=0) + corners + np.roll(corners, -1, axis=1)
        field[::step, half::step] = _add_roughness(beside, rough, generator)
        above = middles + np.roll(middles, 1, axis=1) + corners + np.roll(corners, -1, axis=0)
        field[half::step, ::step] = _add_roughness(above, rough, generator)
        step, rough = half, rough / decay
    field -= field.min()
    field /= field.max()
    return field


def _add_roughness(sums: Floats, rough: float, generator: np.random.Generator) -> Floats:
    return sums / 4 + rough * generator.uniform(-rough, rough, size=sums.shape)


def interpolate(image: Floats, rows: Floats, columns: Floats, edge: int) -> Floats:
    """Interpolate an image linearly between its pixels, mirrored at its edge.

    Args:
        image: (side, side, channels).
        rows: Where to read, (side, side), in pixels.
        columns: The same, across.
        edge: How often the pixel at the edge counts in the mirror: 1 or 2.
    """
    top, leftmost = np.floor(rows).astype(int), np.floor(columns).astype(int)
    below, right = (rows - top)[:, :, None], (columns - leftmost)[:, :, None]
    side = len(image)
    (upper_rows, lower_rows), (near, far) = (
        [_mirror(places + step, side, edge) for step in (0, 1)] for places in (top, leftmost)
    )
    upper = image[upper_rows, near] * (1 - right) + image[upper_rows, far] * right
    lower = image[lower_rows, near] * (1 - right) + image[lower_rows, far] * right
    values: Floats = upper * (1 - below) + lower * below
    return values


def _mirror(places: Integers, side: int, edge: int) -> Integers:
    """Fold places into a row continued by its mirror image, with the pixel at the edge counted ``edge`` times."""
    period = 2 * (side - 1) + 2 * (edge - 1)
    folded = np.mod(places, period)
    mirrored: Integers = np.minimum(folded, period - (edge - 1) - folded)
    return mirrored

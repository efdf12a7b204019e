"""The fifteen corruptions of ImageNet-C in numpy, with a random generator as an argument.

Written after Hendrycks and Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and
Perturbations", ICLR 2019, and held to the values that their code gives for the same draws. Its deviations from its own
description are kept: ``glass_blur`` copies pixels where it means to swap them, the fog's roughness is squared, and
values are cut to whole numbers, not rounded.

``frost`` deviates. The official one lays photographs of frost over the picture, which are not ours to ship: here it is
a drawn texture with the photographs' brightness, contrast and spectrum, laid over in the same way.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from io import BytesIO

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image
from scipy import ndimage, sparse

from fedmjp.evaluation.severities import Strength, look_up_strength

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int_]
Pixels = npt.NDArray[np.uint8]
SMALL = 8  # pixels: the radius up to which a disk is softened by one pixel, not by two
NEGLIGIBLE = 1e-6  # a weight: a thousandth of a grey level
ROUGHNESS = 100.0
GREY = np.array([0.299, 0.587, 0.114])  # of red, green and blue
WHITE = 255
JPEG_QUALITY = 85  # of the official pictures
# Measured on crops of the official photographs of frost: grey level, its deviation, the tint, and the exponent by
# which the power of the spectrum falls.
FROST_LEVEL, FROST_DEVIATION, FROST_TINT, FROST_SLOPE = (110, 205), (15, 33), np.array([-15.0, 0.0, 12.0]), -1.6


def corrupt(picture: Pixels, corruption: str, severity: int, generator: np.random.Generator) -> Pixels:
    """Corrupt a picture as ImageNet-C does, before it is saved.

    Args:
        picture: (side, side, 3) uint8, red, green and blue.
        corruption: One of ``fedmjp.evaluation.severities.NAMES``.
        severity: From 1 to 5.
        generator: Of everything random.

    Raises:
        UnknownNameError: If there is no such corruption.
        BadInputError: If there is no such severity.

    Example:
        >>> corrupt(np.full((64, 64, 3), 100, np.uint8), "brightness", 1, np.random.default_rng(0))[0, 0]
        array([125, 125, 125], dtype=uint8)
    """
    strength = look_up_strength(corruption, severity, len(picture))
    return np.clip(CORRUPTIONS[corruption](picture, strength, generator), 0, WHITE).astype(np.uint8)


def save_as_jpeg(picture: Pixels, quality: int = JPEG_QUALITY) -> Pixels:
    """Save a picture as JPEG and read it again.

    Args:
        picture: (side, side, 3).
        quality: From 1 to 95.
    """
    content = BytesIO()
    Image.fromarray(picture).save(content, "JPEG", quality=quality)
    return np.asarray(Image.open(content))


def _add_gaussian_noise(picture: Pixels, strength: Strength, generator: np.random.Generator) -> Floats:
    """Add Gaussian noise to each value."""
    return WHITE * (picture / WHITE + generator.normal(scale=strength[0], size=picture.shape))


def _count_photons(picture: Pixels, strength: Strength, generator: np.random.Generator) -> Floats:
    """Draw each value from a Poisson distribution of the photons that it stands for."""
    (photons,) = strength
    return WHITE * (generator.poisson(picture / WHITE * photons) / photons)


def _set_black_or_white(picture: Pixels, strength: Strength, generator: np.random.Generator) -> Floats:
    """Make a share of the values black or white."""
    hit = generator.random(picture.shape) <= strength[0]
    white = generator.random(picture.shape) <= 0.5
    return np.where(hit, WHITE * white, picture).astype(np.float64)


def _defocus(picture: Pixels, strength: Strength, _: np.random.Generator) -> Floats:
    """Spread each pixel over a disk of a radius, whose edge is softened."""
    kernel = _build_disk(*strength)
    reach = len(kernel) // 2
    padded = np.pad(picture.astype(np.float32), ((reach, reach), (reach, reach), (0, 0)), mode="reflect")
    channels = torch.from_numpy(padded).permute(2, 0, 1)[:, None]
    spread = F.conv2d(channels, torch.from_numpy(kernel.astype(np.float32))[None, None])
    return spread[:, 0].permute(1, 2, 0).double().numpy()


def _blur_through_glass(picture: Pixels, strength: Strength, generator: np.random.Generator) -> Floats:
    """Blur, take pixels from nearby, and blur again."""
    sigma, reach, rounds = strength[0], max(1, round(strength[1])), int(strength[2])
    side = len(picture)
    blurred = _apply_to_both_axes(_build_gaussian_matrix(side, sigma, "nearest", 4.0), picture / WHITE)
    moved = (blurred * WHITE).astype(np.uint8)
    for _ in range(rounds):
        moved = _copy_from_nearby(moved, reach, generator)
    return WHITE * _apply_to_both_axes(_build_gaussian_matrix(side, sigma, "nearest", 4.0), moved / WHITE)


def _blur_along_motion(picture: Pixels, strength: Strength, generator: np.random.Generator) -> Pixels:
    """Smear in one direction, at most 45 degrees from the horizontal."""
    radius, sigma = strength
    return _smear(picture, radius, sigma, generator.uniform(-45, 45))


def _average_zooms(picture: Pixels, strength: Strength, _: np.random.Generator) -> Floats:
    """Average enlargements of the middle, the picture itself twice among them."""
    side, (farthest, step) = len(picture), strength
    down, across = _build_zoom_matrices(side, farthest, step)
    count = down.shape[0] // side
    taller = (down @ picture.reshape(side, -1)).reshape(count, side, side, 3)
    enlarged = across @ taller.swapaxes(1, 2).reshape(count * side, -1)
    mean: Floats = (picture + enlarged.reshape(side, side, 3).swapaxes(0, 1)) / (count + 1)
    return mean


def _let_snow_fall(picture: Pixels, strength: Strength, generator: np.random.Generator) -> Floats:
    """Let flakes fall twice, the second time upside down, over a picture that is whitened."""
    level, deviation, zoom, least, radius, sigma, opacity = strength
    image = picture / WHITE
    flakes = generator.normal(level, deviation, size=picture.shape[:2])
    flakes = _apply_to_both_axes(_build_zoom_matrix(len(picture), zoom), flakes)
    flakes[flakes < least] = 0
    fallen = (np.clip(flakes, 0, 1) * WHITE).astype(np.uint8)
    streaks = _smear(fallen, radius, sigma, generator.uniform(-135, -45))[:, :, None] / WHITE
    whitened = np.maximum(image, (image @ GREY)[:, :, None] * 1.5 + 0.5)
    snowed: Floats = WHITE * (opacity * image + (1 - opacity) * whitened + streaks + np.rot90(streaks, 2))
    return snowed


def _cover_with_frost(picture: Pixels, strength: Strength, generator: np.random.Generator) -> Floats:
    """Lay a drawn texture of frost over the picture; the official one lays a photograph."""
    return lay_frost(picture, draw_frost_texture(len(picture), generator), strength)


def lay_frost(picture: Pixels, texture: npt.NDArray[np.generic], strength: Strength) -> Floats:
    """Add shares of a picture and of a texture, both (side, side, 3) from 0 to 255."""
    return strength[0] * picture + strength[1] * texture.astype(np.float64)


def draw_frost_texture(side: int, generator: np.random.Generator) -> Floats:
    """Draw a texture of frost, (side, side, 3) from 0 to 255.

    It has no needles and no stars: only brightness, contrast, tint and spectrum are those of photographs.

    Args:
        side: In pixels.
        generator: Of brightness, contrast and pattern.
    """
    level, deviation = generator.uniform(*FROST_LEVEL), generator.uniform(*FROST_DEVIATION)
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side))
    frequency[0, 0] = np.inf
    white = np.fft.rfft2(generator.normal(size=(side, side)))
    field = np.fft.irfft2(white * frequency ** (FROST_SLOPE / 2), (side, side))
    texture: Floats = level + deviation * (field / field.std())[:, :, None] + FROST_TINT
    return np.clip(texture, 0, WHITE)


def _add_fog(picture: Pixels, strength: Strength, generator: np.random.Generator) -> Floats:
    """Add clouds of a fractal, and darken the sum to the brightest value of the picture."""
    amount, decay = strength
    image, side = picture / WHITE, len(picture)
    sky = _draw_clouds(1 << (side - 1).bit_length(), decay, generator)[:side, :side, None]
    brightest = image.max()
    hazy: Floats = WHITE * (image + amount * sky) * brightest / (brightest + amount)
    return hazy


def _brighten(picture: Pixels, strength: Strength, _: np.random.Generator) -> Floats:
    """Raise the greatest value of each pixel, with its hue and saturation unchanged."""
    greatest = picture.max(axis=2, keepdims=True).astype(np.float64)
    raised = np.minimum(greatest + WHITE * strength[0], WHITE)
    raised_picture: Floats = np.where(greatest > 0, picture * (raised / np.maximum(greatest, 1)), raised)
    return raised_picture


def _lower_contrast(picture: Pixels, strength: Strength, _: np.random.Generator) -> Floats:
    """Draw each channel nearer to its mean."""
    means = picture.mean(axis=(0, 1))
    flat: Floats = (picture - means) * strength[0] + means
    return flat


def _deform(picture: Pixels, strength: Strength, generator: np.random.Generator) -> Floats:
    """Move three points of the picture and all between them, then each pixel by a smooth random field."""
    amplitude, sigma, jump = strength
    side = len(picture)
    middle, third = side // 2, side // 3
    corners = middle + third * np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])  # x and y
    moved = corners + generator.uniform(-jump, jump, size=corners.shape)
    back = np.linalg.solve(np.column_stack([moved, np.ones(3)]), corners)
    rows, columns = np.mgrid[:side, :side].astype(np.float64)
    from_x, from_y = (columns * back[0, axis] + rows * back[1, axis] + back[2, axis] for axis in (0, 1))
    turned = _interpolate(picture / WHITE, from_y, from_x, edge=1)
    smooth = _build_gaussian_matrix(side, sigma, "reflect", 3.0)
    across, down = (amplitude * _apply_to_both_axes(smooth, generator.uniform(-1, 1, size=(side, side))) for _ in "xy")
    return WHITE * _interpolate(turned, rows + down, columns + across, edge=2)


def _pixelate(picture: Pixels, strength: Strength, _: np.random.Generator) -> Pixels:
    """Make the picture smaller, and large again."""
    side = len(picture)
    small = Image.fromarray(picture).resize((int(side * strength[0]), int(side * strength[0])), Image.Resampling.BOX)
    return np.asarray(small.resize((side, side), Image.Resampling.BOX))


def _compress(picture: Pixels, strength: Strength, _: np.random.Generator) -> Pixels:
    """Save the picture as a JPEG of a low quality."""
    return save_as_jpeg(picture, int(strength[0]))


def _apply_to_both_axes(matrix: Floats, image: Floats) -> Floats:
    """Apply a matrix (side, side) to the rows and to the columns of an image (side, side[, channels])."""
    down = np.tensordot(matrix, image, axes=1)
    return np.moveaxis(np.tensordot(matrix, down, axes=(1, 1)), 0, 1)


@lru_cache(maxsize=256)
def _build_gaussian_matrix(side: int, sigma: float, mode: str, truncate: float) -> Floats:
    """Build the matrix of a Gaussian blur of a row, with scipy's mode at its ends, cut after some deviations."""
    if not sigma:
        return np.eye(side)
    smooth: Floats = ndimage.gaussian_filter1d(np.eye(side), sigma, axis=0, mode=mode, truncate=truncate)
    return smooth


@lru_cache(maxsize=256)
def _build_zoom_matrix(side: int, factor: float) -> Floats:
    """Build the matrix that enlarges the middle of a row to its length, by linear interpolation."""
    cropped = int(np.ceil(side / factor))
    enlarged = round(cropped * factor)
    places = (np.arange(side) + (enlarged - side) // 2) * ((cropped - 1) / max(enlarged - 1, 1))
    below = np.clip(places.astype(int), 0, max(cropped - 2, 0))
    matrix, first = np.zeros((side, side)), (side - cropped) // 2
    matrix[np.arange(side), first + below] = 1 - (places - below)
    matrix[np.arange(side), first + np.minimum(below + 1, cropped - 1)] += places - below
    return matrix


@lru_cache(maxsize=64)
def _build_zoom_matrices(side: int, farthest: float, step: float) -> tuple[sparse.csr_array, sparse.csr_array]:
    """Build the matrices of enlargements by all factors, stacked for the rows and side by side for the columns."""
    matrices = [_build_zoom_matrix(side, float(factor)) for factor in np.arange(1, farthest, step)]
    return sparse.csr_array(np.vstack(matrices)), sparse.csr_array(np.hstack(matrices))


@lru_cache(maxsize=64)
def _build_disk(radius: float, softness: float) -> Floats:
    """Build a blur kernel: the share of each pixel in a disk with a softened edge, without empty rows."""
    reach, taps = (SMALL, 1) if radius <= SMALL else (int(np.ceil(radius)), 2)
    places = np.arange(-reach, reach + 1)
    inside = (places[:, None] ** 2 + places**2 <= radius**2).astype(np.float64)
    bell = np.exp(-(np.arange(-taps, taps + 1) ** 2) / (2 * softness**2))
    kernel: Floats = inside / inside.sum()
    for axis in (0, 1):
        kernel = ndimage.correlate1d(kernel, bell / bell.sum(), axis=axis, mode="mirror")
    used = int(np.abs(places[kernel.any(axis=0)]).max())
    return kernel[reach - used : reach + used + 1, reach - used : reach + used + 1]


def _copy_from_nearby(picture: Pixels, reach: int, generator: np.random.Generator) -> Pixels:
    """Copy into each pixel, from the last to the first, a pixel at most ``reach`` away in its state at that moment."""
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


def _smear(image: Pixels, radius: float, sigma: float, degrees: float) -> Pixels:
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


def _draw_clouds(side: int, decay: float, generator: np.random.Generator) -> Floats:
    """Draw a plasma fractal by the diamond-square algorithm, (side, side) from 0 to 1, that repeats at its edges."""
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


def _interpolate(image: Floats, rows: Floats, columns: Floats, edge: int) -> Floats:
    """Interpolate an image linearly between its pixels; its mirror counts the edge ``edge`` times, 1 or 2."""
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


CORRUPTIONS: Mapping[str, Callable[[Pixels, Strength, np.random.Generator], npt.NDArray[np.float64 | np.uint8]]] = {
    "gaussian_noise": _add_gaussian_noise, "shot_noise": _count_photons, "impulse_noise": _set_black_or_white,
    "defocus_blur": _defocus, "glass_blur": _blur_through_glass, "motion_blur": _blur_along_motion,
    "zoom_blur": _average_zooms, "snow": _let_snow_fall, "frost": _cover_with_frost, "fog": _add_fog,
    "brightness": _brighten, "contrast": _lower_contrast, "elastic_transform": _deform, "pixelate": _pixelate,
    "jpeg_compression": _compress,
}  # fmt: skip

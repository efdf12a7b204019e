"""The fifteen corruptions of ImageNet-C in numpy, with a random generator as an argument.

Written after Hendrycks and Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and
Perturbations", ICLR 2019, and held to the values that their code gives for the same draws. Its deviations from
its own description are kept: ``glass_blur`` copies pixels where it means to swap them, the fog's
roughness is squared, and values are cut to whole numbers, not rounded.

``frost`` deviates. The official one lays photographs of frost over the picture, which are not ours to ship: here it is
a drawn texture with the photographs' brightness, contrast and spectrum, laid over in the same way.
"""

from collections.abc import Callable, Mapping
from io import BytesIO

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image

from fedmjp.evaluation.distortion import (
    Floats,
    Pixels,
    apply_to_both_axes,
    build_disk,
    build_gaussian_matrix,
    build_zoom_matrices,
    build_zoom_matrix,
    copy_from_nearby,
    draw_clouds,
    interpolate,
    smear,
)
from fedmjp.evaluation.severities import Strength, look_up_strength

GREY = np.array([0.299, 0.587, 0.114])  # of red, green and blue
WHITE = 255
JPEG_QUALITY = 85  # of the official pictures
# Measured on crops of the official photographs of frost: grey level, its deviation, the tint, and the exponent by
# which the power of the spectrum falls.
FROST_LEVEL, FROST_DEVIATION, FROST_TINT, FROST_SLOPE = (110, 205), (15, 33), np.array([-15.0, 0.0, 12.0]), -1.6


def corrupt(picture: Pixels, corruption: str, severity: int, generator: np.random.Generator) -> Pixels:
    """Corrupt a picture as ImageNet-C does, before it is saved.

    Args:
        picture: (side, side, 3), red, green and blue.
        corruption: One of ``fedmjp.evaluation.severities.NAMES``.
        severity: From 1 to 5.
        generator: Of everything random.

    Returns:
        (side, side, 3), uint8.

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
    kernel = build_disk(*strength)
    reach = len(kernel) // 2
    padded = np.pad(picture.astype(np.float32), ((reach, reach), (reach, reach), (0, 0)), mode="reflect")
    channels = torch.from_numpy(padded).permute(2, 0, 1)[:, None]
    spread = F.conv2d(channels, torch.from_numpy(kernel.astype(np.float32))[None, None])
    return spread[:, 0].permute(1, 2, 0).double().numpy()


def _blur_through_glass(picture: Pixels, strength: Strength, generator: np.random.Generator) -> Floats:
    """Blur, take pixels from nearby, and blur again."""
    sigma, reach, rounds = strength[0], max(1, round(strength[1])), int(strength[2])
    side = len(picture)
    blurred = apply_to_both_axes(build_gaussian_matrix(side, sigma, "nearest", 4.0), picture / WHITE)
    moved = (blurred * WHITE).astype(np.uint8)
    for _ in range(rounds):
        moved = copy_from_nearby(moved, reach, generator)
    return WHITE * apply_to_both_axes(build_gaussian_matrix(side, sigma, "nearest", 4.0), moved / WHITE)


def _blur_along_motion(picture: Pixels, strength: Strength, generator: np.random.Generator) -> Pixels:
    """Smear in one direction, at most 45 degrees from the horizontal."""
    radius, sigma = strength
    return smear(picture, radius, sigma, generator.uniform(-45, 45))


def _average_zooms(picture: Pixels, strength: Strength, _: np.random.Generator) -> Floats:
    """Average enlargements of the middle, the picture itself twice among them."""
    side, (farthest, step) = len(picture), strength
    down, across = build_zoom_matrices(side, farthest, step)
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
    flakes = apply_to_both_axes(build_zoom_matrix(len(picture), zoom), flakes)
    flakes[flakes < least] = 0
    fallen = (np.clip(flakes, 0, 1) * WHITE).astype(np.uint8)
    streaks = smear(fallen, radius, sigma, generator.uniform(-135, -45))[:, :, None] / WHITE
    whitened = np.maximum(image, (image @ GREY)[:, :, None] * 1.5 + 0.5)
    snowed: Floats = WHITE * (opacity * image + (1 - opacity) * whitened + streaks + np.rot90(streaks, 2))
    return snowed


def _cover_with_frost(picture: Pixels, strength: Strength, generator: np.random.Generator) -> Floats:
    """Lay a drawn texture of frost over the picture; the official one lays a photograph."""
    return lay_frost(picture, draw_frost_texture(len(picture), generator), strength)


def lay_frost(picture: Pixels, texture: npt.NDArray[np.generic], strength: Strength) -> Floats:
    """Add shares of a picture and of a texture, both from 0 to 255.

    Args:
        picture: (side, side, 3).
        texture: (side, side, 3).
        strength: The two shares.
    """
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
    sky = draw_clouds(1 << (side - 1).bit_length(), decay, generator)[:side, :side, None]
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
    turned = interpolate(picture / WHITE, from_y, from_x, edge=1)
    smooth = build_gaussian_matrix(side, sigma, "reflect", 3.0)
    across, down = (amplitude * apply_to_both_axes(smooth, generator.uniform(-1, 1, size=(side, side))) for _ in "xy")
    return WHITE * interpolate(turned, rows + down, columns + across, edge=2)


def _pixelate(picture: Pixels, strength: Strength, _: np.random.Generator) -> Pixels:
    """Make the picture smaller, and large again."""
    side = len(picture)
    small = Image.fromarray(picture).resize((int(side * strength[0]), int(side * strength[0])), Image.Resampling.BOX)
    return np.asarray(small.resize((side, side), Image.Resampling.BOX))


def _compress(picture: Pixels, strength: Strength, _: np.random.Generator) -> Pixels:
    """Save the picture as a JPEG of a low quality."""
    return save_as_jpeg(picture, int(strength[0]))


CORRUPTIONS: Mapping[str, Callable[[Pixels, Strength, np.random.Generator], npt.NDArray[np.float64 | np.uint8]]] = {
    "gaussian_noise": _add_gaussian_noise,
    "shot_noise": _count_photons,
    "impulse_noise": _set_black_or_white,
    "defocus_blur": _defocus,
    "glass_blur": _blur_through_glass,
    "motion_blur": _blur_along_motion,
    "zoom_blur": _average_zooms,
    "snow": _let_snow_fall,
    "frost": _cover_with_frost,
    "fog": _add_fog,
    "brightness": _brighten,
    "contrast": _lower_contrast,
    "elastic_transform": _deform,
    "pixelate": _pixelate,
    "jpeg_compression": _compress,
}

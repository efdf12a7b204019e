"""Writes imagenet_c.npz: what the official generators of ImageNet-C, Tiny-ImageNet-C and CIFAR-10-C make of a picture.

They are those of hendrycks/robustness at 8190fe329f5f072a06e3a2aea02bb5dda69aed9f, in ``ImageNet-C/create_c``:

    python tests/golden/imagenet_c.py CREATE_C

ran with numpy 1.26.4, scipy 1.11.4, scikit-image 0.20.0, opencv 4.9.0, Pillow 11.3.0, Wand with ImageMagick
6.9.11-60 Q16. Draws are those of ``numpy.random.seed(severity)``; ``random_noise`` of scikit-image draws from
``default_rng(severity)``, and its ``multichannel`` has a new name. The photographs of frost are replaced by
``photograph``, which is not made smaller. Kept are the pixels at the places ``kept`` of rows and of columns.
"""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
from PIL import Image

GENERATORS = {32: "make_cifar_c.py", 64: "make_tinyimagenet_c.py", 224: "make_imagenet_c.py"}
FUNCTIONS = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow",
    "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
)  # fmt: skip
END = "# /////////////// End Distortions"  # below it they read ImageNet


def picture(side):
    """Waves, a chessboard, a cone and a disk, in every colour."""
    y, x = np.mgrid[:side, :side] / side
    red = 127 + 90 * np.sin(14 * x + 5 * y) + 35 * ((np.floor(x * 8) + np.floor(y * 8)) % 2)
    green = 255 * np.hypot(x - 0.5, y - 0.4) * 1.4
    blue = 255 * y * x + 60 * (np.hypot(x - 0.3, y - 0.6) < 0.2)
    return np.clip(np.stack([red, green, blue], 2), 0, 255).astype(np.uint8)


def photograph(*_):
    """What stands for each photograph of frost, blue, green and red."""
    y, x = np.mgrid[:300, :400]
    return np.stack([(x * 3 + y) % 256, (x + y * 2) % 256, (x * y // 50) % 256], 2).astype(np.uint8)


def kept(side):
    """Rows, and columns, that are kept: both edges, and some between."""
    return np.unique(np.r_[0, 1, np.linspace(2, side - 3, 4).astype(int), side - 2, side - 1])


def official(path):
    """The functions of a generator, by name."""
    import cv2
    import skimage.filters
    import skimage.util

    gaussian, noise = skimage.filters.gaussian, skimage.util.random_noise
    seed = SimpleNamespace(value=0)

    def with_channels(image, sigma=1, multichannel=False, **options):
        return gaussian(image, sigma, channel_axis=-1 if multichannel else None, **options)

    def seeded(image, mode, amount):
        return noise(image, mode=mode, amount=amount, seed=np.random.default_rng(seed.value))

    skimage.filters.gaussian, skimage.util.random_noise = with_channels, seeded
    for name in ("torch", "torch.utils", "torch.utils.data", "torchvision", "torchvision.datasets"):
        sys.modules[name] = ModuleType(name)
    sys.modules["torchvision.transforms"] = ModuleType("torchvision.transforms")
    sys.modules["torch"].utils, sys.modules["torch.utils"].data = (
        sys.modules[name] for name in ("torch.utils", "torch.utils.data")
    )
    sys.modules["torch.utils.data"].Dataset = object
    for part in ("datasets", "transforms"):
        setattr(sys.modules["torchvision"], part, sys.modules[f"torchvision.{part}"])
    functions = {"__name__": "official"}
    exec(compile(path.read_text().split(END)[0], str(path), "exec"), functions)
    skimage.filters.gaussian, skimage.util.random_noise = gaussian, noise
    about = {name: getattr(cv2, name) for name in dir(cv2)}
    functions["cv2"] = SimpleNamespace(**about | {"imread": photograph, "resize": lambda image, *_, **__: image})
    functions["sk"] = SimpleNamespace(color=functions["sk"].color, util=SimpleNamespace(random_noise=seeded))
    return functions, seed


def main(folder):
    arrays = {}
    for side, name in GENERATORS.items():
        functions, seed = official(folder / name)
        shown, places = Image.fromarray(picture(side)), kept(side)
        made = []
        for function in FUNCTIONS:
            for severity in range(1, 6):
                seed.value = severity
                np.random.seed(severity)  # noqa: NPY002, TID251 (what the official code draws from)
                corrupted = np.uint8(functions[function](shown.copy(), severity))
                made.append(corrupted[np.ix_(places, places)])
        arrays[str(side)] = np.stack(made).reshape(len(FUNCTIONS), 5, len(places), len(places), 3)
    np.savez_compressed(Path(__file__).with_suffix(".npz"), **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

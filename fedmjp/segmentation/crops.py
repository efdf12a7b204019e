"""What a segmentation network is trained on and tried on: crops of scenes, and whole ones, normalised."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import InterpolationMode
from torchvision.transforms import v2 as transforms

from fedmjp.errors import DataError
from fedmjp.seeds import derive, numpy_generator, scoped_randomness
from fedmjp.segmentation.config import SegmentationRecipe
from fedmjp.segmentation.scenes import IGNORED, Scenes

# As mmsegmentation trains on ADE20K.
SMALLEST, LARGEST = 0.5, 2.0  # of the size at which a picture is shown
LONGER = 4  # a resized picture's longer side is at most so many crops
HALF = 0.5  # of the crops are mirrored
ATTEMPTS, MOST = 10, 0.75  # to find a crop in which no class has more than this share
MEAN, DEVIATION = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]  # of ImageNet
COLOURS = transforms.Compose(
    [
        transforms.RandomApply([transforms.ColorJitter(**{what: by})], p=0.5)
        for what, by in (("brightness", 0.125), ("contrast", 0.5), ("saturation", 0.5), ("hue", 0.05))
    ]
)


# Pictures (batch, 3, crop, crop) and labels (batch, crop, crop), or why there are none.
Read = tuple[Tensor, Tensor] | str


class Crops(Dataset[Read]):
    """The batches of a training, in order; what is drawn for a crop depends on the seed and its place alone."""

    def __init__(self, scenes: Scenes, recipe: SegmentationRecipe, seed: int) -> None:
        self._scenes, self._recipe, self._seed = scenes, recipe, seed

    def __len__(self) -> int:
        return self._recipe.iterations

    def __getitem__(self, step: int) -> Read:
        size = self._recipe.batch_size
        try:  # the loader would tell an error in many lines
            crops = [self._crop(place) for place in range(step * size, (step + 1) * size)]
        except DataError as error:
            return str(error)
        images, labels = zip(*crops, strict=True)
        return torch.stack(images), torch.stack(labels)

    def _crop(self, place: int) -> tuple[Tensor, Tensor]:
        epoch, turn = divmod(place, len(self._scenes))
        order = numpy_generator(self._seed, "order", epoch).permutation(len(self._scenes))
        image, labels = self._scenes.load(int(order[turn]))
        with scoped_randomness(derive(self._seed, "crop", place)):
            return training_crop(image, labels, self._recipe.crop)


def training_crop(image: Tensor, labels: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """A random crop of a resized picture, perhaps mirrored, with other colours; drawn from the global generators.

    Args:
        image: (3, height, width) uint8.
        labels: (height, width) uint8.
        size: Pixels per side; smaller pictures are filled up below and on the right.

    Returns:
        The crop, normalised, (3, size, size), and its labels (size, size) int64.
    """
    share = float(torch.empty(()).uniform_(SMALLEST, LARGEST))
    image, labels = _resized(image, share * size), _resized(labels[None], share * size, nearest=True)[0]
    top, left = _place(labels, size)
    image, labels = (part[..., top : top + size, left : left + size] for part in (image, labels))
    if torch.rand(()) < HALF:
        image, labels = image.flip(-1), labels.flip(-1)
    below, right = size - labels.shape[0], size - labels.shape[1]
    shown = F.pad(normalised(COLOURS(image)), (0, right, 0, below))
    return shown, F.pad(labels.long(), (0, right, 0, below), value=IGNORED)


def whole(image: Tensor, size: int, multiple: int) -> tuple[Tensor, tuple[int, int]]:
    """A picture (3, height, width) uint8 as it is tried: its shorter side ``size``, as training shows it on average.

    Returns:
        It, normalised and filled up below and on the right to a ``multiple`` of pixels, and its height and width.
    """
    resized = _resized(image, size)
    height, width = resized.shape[1:]
    return F.pad(normalised(resized), (0, -width % multiple, 0, -height % multiple)), (height, width)


def normalised(image: Tensor) -> Tensor:
    """From uint8 to what the network reads."""
    shown: Tensor = transforms.functional.normalize(image.float() / 255, MEAN, DEVIATION)
    return shown


def _resized(image: Tensor, shorter: float, *, nearest: bool = False) -> Tensor:
    """With that shorter side, or a longer one of ``LONGER`` times as much where that is less."""
    height, width = image.shape[1:]
    factor = min(shorter / min(height, width), LONGER * shorter / max(height, width))
    sides = [max(1, round(height * factor)), max(1, round(width * factor))]
    how = InterpolationMode.NEAREST if nearest else InterpolationMode.BILINEAR
    resized: Tensor = transforms.functional.resize(image, sides, interpolation=how)
    return resized


def _place(labels: Tensor, size: int) -> tuple[int, int]:
    """Where a crop begins in which no class has too great a share, if one is found."""
    for _ in range(ATTEMPTS):
        top, left = (int(torch.randint(max(side - size, 0) + 1, ())) for side in labels.shape)
        inside = labels[top : top + size, left : left + size]
        counts = torch.bincount(inside[inside != IGNORED].flatten().int())
        if (counts > 0).sum() > 1 and counts.max() < MOST * counts.sum():
            break
    return top, left

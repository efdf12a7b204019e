"""Mean intersection over union and mean accuracy of a segmentation network."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedmjp.arithmetic import computing
from fedmjp.segmentation.crops import whole
from fedmjp.segmentation.network import PATCH, UperNet
from fedmjp.segmentation.scenes import CLASSES, IGNORED, Scenes


@dataclass(frozen=True)
class SegmentationFigures:
    """What a network's labels of all pixels come to; pixels of no class do not count.

    Attributes:
        overlaps: (classes,), of each class the pixels that are and are called so over those that are or are called so;
            NaN where there are none.
        accuracies: (classes,), of its pixels the share that is called so; NaN where it has none.
        pixels: (classes,) int64, of each class.
        accuracy: Share of all pixels that are called what they are.
    """

    overlaps: Tensor
    accuracies: Tensor
    pixels: Tensor
    accuracy: float

    @property
    def mean_overlap(self) -> float:
        """MIoU, over the classes that occur or are said to."""
        return self.overlaps.nanmean().item()

    @property
    def mean_accuracy(self) -> float:
        """MAcc, over the classes that occur."""
        return self.accuracies.nanmean().item()


def count(labels: Tensor, predicted: Tensor, classes: int = CLASSES) -> Tensor:
    """How many pixels of each class (row) are called each class (column), int64; ``IGNORED`` ones do not count."""
    known = labels != IGNORED
    pairs = labels[known].long() * classes + predicted[known].long()
    return torch.bincount(pairs, minlength=classes**2).view(classes, classes)


def figures_of(counts: Tensor) -> SegmentationFigures:
    """The figures of such counts over all pictures."""
    right, actual, said = counts.diag().double(), counts.sum(dim=1), counts.sum(dim=0)
    return SegmentationFigures(
        right / (actual + said - right), right / actual, actual, (right.sum() / counts.sum()).item()
    )


def predict(network: UperNet, image: Tensor, size: int) -> Tensor:
    """The class of each pixel of a picture (3, height, width) uint8, (height, width) int64.

    It is shown whole, its shorter side ``size`` pixels, and logits are resized back to its own size.
    """
    shown, (height, width) = whole(image, size, PATCH)
    device = next(network.parameters()).device
    with torch.no_grad(), computing("float32", device):
        logits = network(shown[None].to(device))[..., :height, :width]
        resized = F.interpolate(logits, size=image.shape[1:], mode="bilinear", align_corners=False)
    return resized[0].argmax(dim=0).cpu()


def evaluate(
    network: UperNet, scenes: Scenes, indices: Iterable[int], size: int, on_picture: Callable[[], None]
) -> SegmentationFigures:
    """Label pictures and count; DataError if one cannot be read."""
    counts = torch.zeros(CLASSES, CLASSES, dtype=torch.int64)
    for index in indices:
        image, labels = scenes.load(index)
        counts += count(labels, predict(network, image, size))
        on_picture()
    return figures_of(counts)

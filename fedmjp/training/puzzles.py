"""What defences do to a batch of training pictures, and when."""

from torch import Tensor

from fedmjp.defences.base import Arranged
from fedmjp.defences.pipeline import Pipeline
from fedmjp.learning import Puzzle
from fedmjp.randomness import Randomness


def arrange(
    images: Tensor, pipeline: Pipeline, puzzle: Puzzle, *, grid: int, epoch: int, randomness: Randomness
) -> Arranged | None:
    """A batch as the network sees it, on the images' device; None where it sees the pictures as they are.

    Args:
        images: (batch, 3, size, size).
        pipeline: Says how pictures are changed.
        puzzle: Says when, and whether each picture has a mask of its own.
        grid: Patches per side.
        epoch: From 0.
        randomness: Of this batch.
    """
    if not pipeline.of_stage("pictures").configs or epoch < puzzle.warmup_epochs:
        return None
    if randomness.of("applied").uniform("applied", ()).item() >= puzzle.probability:
        return None
    shared = randomness.of("batch")
    sources = [shared if puzzle.masks == "batch" else randomness.of("picture", place) for place in range(len(images))]
    return pipeline.arrange(images, grid, randomness=sources)

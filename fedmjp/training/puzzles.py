"""When pictures of a training are shuffled, and how."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fedmjp.defences.base import Arranged, Drawn
from fedmjp.defences.pipeline import Pipeline
from fedmjp.learning import Puzzle
from fedmjp.randomness import Randomness, SeededRandomness


@dataclass(frozen=True)
class TrainingPuzzles:
    """The part of a run's pipeline that changes the pictures of its steps.

    Most of it can be drawn before the pictures are there: processes that read them do so, as a GPU takes a step in less
    time than its puzzles are drawn in.

    Attributes:
        pipeline: Says how pictures are changed.
        puzzle: Says when, by epochs from 0, and whether each has its own mask, which then depends on its place in the
            batch.
        grid: Patches per side.
        seed: Of the run.
        purpose: Names that tell this run's randomness from others' of the same seed.
    """

    pipeline: Pipeline
    puzzle: Puzzle
    grid: int
    seed: int
    purpose: tuple[str | int, ...] = ()

    def randomness(self, epoch: int, step: int) -> SeededRandomness:
        """Return the randomness of a step's defences.

        Args:
            epoch: From 0.
            step: From 0.
        """
        return SeededRandomness(self.seed, ("training", *self.purpose, epoch, step))

    def ahead(self, epoch: int, step: int, places: Sequence[int]) -> Drawn | None:
        """Draw what defences need before the pictures are there.

        Args:
            epoch: From 0.
            step: From 0.
            places: Of the pictures in the step's whole batch.

        Returns:
            Masks and sources, each (pictures, patches); None if nothing can be drawn without the pictures.
        """
        sources = self._sources(epoch, step, places)
        if not sources:
            return None
        if self.puzzle.masks == "picture":
            return self.pipeline.ahead(self.grid, randomness=sources)
        if (shared := self.pipeline.ahead(self.grid, randomness=sources[:1])) is None:
            return None
        mask, source = (values.repeat(len(sources), 1) for values in shared)
        return mask, source

    def arrange(
        self, images: Tensor, epoch: int, step: int, places: Sequence[int], drawn: Drawn | None = None
    ) -> Arranged | None:
        """Arrange a batch as the network sees it, on the images' device; None if pictures stay as they are.

        Args:
            images: At these places of the step's batch.
            epoch: From 0.
            step: From 0.
            places: In the step's whole batch.
            drawn: What ``ahead`` gave for them.
        """
        if drawn is not None:
            return self.pipeline.shown(images, drawn)
        sources = self._sources(epoch, step, places)
        return None if sources is None else self.pipeline.arrange(images, self.grid, randomness=sources)

    def _sources(self, epoch: int, step: int, places: Sequence[int]) -> list[Randomness] | None:
        """List each picture's randomness; None if pictures stay as they are."""
        if not self.pipeline.of_stage("pictures").configs or epoch < self.puzzle.warmup_epochs:
            return None
        randomness = self.randomness(epoch, step).of("puzzle")
        if randomness.of("applied").uniform("applied", ()).item() >= self.puzzle.probability:
            return None
        shared = randomness.of("batch")
        return [shared if self.puzzle.masks == "batch" else randomness.of("picture", place) for place in places]

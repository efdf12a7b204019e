"""What a client leaves for the evaluator in the rounds of a training run that are recorded."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from fedmjp.data.datasets import LabelledDataset
from fedmjp.data.loading import Batch
from fedmjp.private import PrivateBatch
from fedmjp.records import record_name
from fedmjp.settings import Picture
from fedmjp.training.config import FederatedConfig
from fedmjp.training.loop import Trainer
from fedmjp.wire import evaluator_of_round


@dataclass(frozen=True)
class PrivateRecords:
    """Leaves the pictures behind an upload as they went into the network.

    Attributes:
        records: Folder of all rounds; None leaves nothing.
        config: Of the run; names the rounds.
        client: Its number.
        pictures: Gives them their names.
    """

    records: Path | None
    config: FederatedConfig
    client: int
    pictures: LabelledDataset

    def leave(self, batch: Batch, trainer: Trainer, server_round: int, epoch: int, step: int) -> None:
        """Leave a batch that an upload was computed from."""
        if self.records is None or server_round not in self.config.uploads:
            return
        shown, _ = trainer.shown(batch, epoch, step)
        places = trainer.model.grid**2
        puzzle = shown.jigsaw
        private = PrivateBatch(
            clean=batch.images,
            shuffled=shown.images.cpu(),
            mask=torch.zeros(len(batch.labels), places, dtype=torch.bool) if puzzle is None else puzzle.mask,
            source=torch.arange(places).repeat(len(batch.labels), 1) if puzzle is None else puzzle.source,
            labels=batch.labels,
            pictures=tuple(self.pictures.key(index) for index in batch.indices),
            gradient_of=Picture.SHUFFLED if self.config.training.puzzle.shuffle == "jigsaw" else Picture.CLEAN,
        )
        folder = evaluator_of_round(self.records, server_round) / self.config.training.model.label
        private.save(folder / record_name(server_round, self.client))

    def watch(
        self, batches: Iterable[Batch], trainer: Trainer, server_round: int, epoch: int, single_step: bool
    ) -> Iterator[Batch]:
        """Hand batches through; leave the batch where it alone is behind the upload and a record can describe it."""
        recipe, puzzle = self.config.training.recipe, self.config.training.puzzle
        # Mixed pictures are of two labels, erased ones outside [0, 1], moved pixels no patches.
        described = not (recipe.mixup or recipe.cutmix or recipe.random_erasing or puzzle.shuffle == "pixels")
        for batch in batches:
            if single_step and described:
                self.leave(batch, trainer, server_round, epoch, 0)
            yield batch

"""What a client leaves for the evaluator in the rounds of a training run that are recorded."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fedmjp.data.datasets import LabelledDataset
from fedmjp.data.loading import Batch
from fedmjp.learning import Training
from fedmjp.private import PrivateBatch
from fedmjp.records import record_name
from fedmjp.scenario import Scenario
from fedmjp.training.loop import Trainer
from fedmjp.wire import evaluator_of_round


@dataclass(frozen=True)
class PrivateRecords:
    """Leaves the pictures behind an upload as they went into the network.

    Attributes:
        records: Folder of all rounds; None leaves nothing.
        scenario: Of the run.
        training: Its part; names the rounds.
        client: Its number.
        pictures: Gives them their names.
    """

    records: Path | None
    scenario: Scenario
    training: Training
    client: int
    pictures: LabelledDataset

    def leave(self, batch: Batch, trainer: Trainer, server_round: int, epoch: int, step: int) -> None:
        """Leave a batch that an upload was computed from."""
        if self.records is None or server_round not in self.training.records:
            return
        shown = trainer.shown(batch, epoch, step).arranged
        private = PrivateBatch(
            clean=batch.images,
            shuffled=shown.images.cpu(),
            mask=shown.mask,
            source=shown.source,
            labels=batch.labels,
            pictures=tuple(self.pictures.key(index) for index in batch.indices),
            gradient_of=self.scenario.gradient_of,
        )
        folder = evaluator_of_round(self.records, server_round) / self.scenario.folder
        private.save(folder / record_name(server_round, self.client))

    def watch(
        self, batches: Iterable[Batch], trainer: Trainer, server_round: int, epoch: int, single_step: bool
    ) -> Iterator[Batch]:
        """Hand batches through; leave the batch where it alone is behind the upload and a record can describe it."""
        recipe = self.training.recipe
        # Mixed pictures are of two labels, erased ones outside [0, 1].
        described = not (recipe.mixup or recipe.cutmix or recipe.random_erasing)
        for batch in batches:
            if single_step and described:
                self.leave(batch, trainer, server_round, epoch, 0)
            yield batch

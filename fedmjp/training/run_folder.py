"""What a training run leaves in its folder, and how it is found again."""

import json
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmjp.config import Checkpoint, ModelConfig
from fedmjp.errors import BadInputError, CheckpointError, ConfigError, DataError, OutputError
from fedmjp.files import read_file, remove_files
from fedmjp.wire import EVENTS, RECORD_FILES

if TYPE_CHECKING:
    from fedmjp.scenario import TrainingScenario
    from fedmjp.training.config import TrainingConfig

# What `fedmjp evaluate` writes.
EVALUATION_FILES = r"evaluation\.(csv|json)|corruptions\.(csv|npz)|(table|robustness)\.md|sweep\.png|manifest\.json"
LARGEST = 100_000_000  # bytes of a manifest


class TrainingFolder:
    """The folder of a central or a federated training run, and the places of what is in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifest = root / "manifest.json"  # kind, configuration, versions, hardware
        self.history = root / "history.csv"  # one line per epoch or round
        self.figure = root / "history.png"
        self.weights = root / "weights.safetensors"  # the last ones
        self.state = root / "state.pt"  # everything that a run needs to go on from its last checkpoint
        self.classes = root / "classes.txt"  # names in the order of the labels, one per line
        self.evaluation = root / "evaluation"  # what `fedmjp train --row` measures at the end
        self.tensorboard = root / "tensorboard"
        # Of federated runs: which client has which pictures, whose replies were refused, recorded rounds, events.
        self.partition, self.partition_figure = root / "partition.npz", root / "partition.png"
        self.refused, self.records, self.events = root / "refused.csv", root / "records", root / EVENTS

    def clear(self) -> None:
        """Remove what a former run wrote, by its names, and nothing else."""
        files = (self.manifest, self.history, self.figure, self.weights, self.state, self.classes)
        for path in (*files, self.partition, self.partition_figure, self.refused, self.events):
            path.unlink(missing_ok=True)
        remove_files(self.tensorboard, r"events\.out\.tfevents\..*")
        remove_files(self.evaluation, EVALUATION_FILES)
        remove_files(self.records, rf"manifest\.json|{RECORD_FILES}")

    def check_own(self) -> None:
        """Refuse a folder of other results than a training run's, as OutputError."""
        if self.manifest.exists() and not self.holds_run():
            raise OutputError(f"{self.root} holds other results than a training run's; name another --output")

    def holds_run(self) -> bool:
        """Tell whether the folder is a training run's."""
        try:
            return self._about().get("kind") in ("central", "federated")
        except BadInputError:
            return False

    def keep_classes(self, names: Sequence[str]) -> None:
        """Write the names of the classes.

        Args:
            names: In the order of the labels.
        """
        self.classes.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")

    def kept_classes(self) -> list[str]:
        """Read the names of the classes; an empty list if there is no such file."""
        return self.classes.read_text(encoding="utf-8").splitlines() if self.classes.exists() else []

    def check_classes(self, names: Sequence[str]) -> None:
        """Refuse pictures whose labels mean other classes than in the training.

        Without ``classes.txt`` beside the weights there is nothing to compare with.

        Args:
            names: Classes of the pictures, in the order of their labels.

        Raises:
            DataError: At the first difference.
        """
        if not self.classes.exists():
            return
        for label, (trained, present) in enumerate(zip_longest(self.kept_classes(), names)):
            if trained != present:
                raise DataError(
                    f"label {label} is {present or 'no class'} in these pictures, but {trained or 'no class'} in the "
                    f"training of {self.root}: take pictures of the same classes"
                )

    def check_pictures(self, digest: str | None) -> None:
        """Refuse to go on with other pictures than the run began on, as CheckpointError.

        Args:
            digest: Of the pictures.
        """
        begun = self._about().get("pictures") if self.manifest.exists() else None
        if begun not in (None, digest):
            raise CheckpointError(
                f"{self.root} is of a run on other pictures: restore them as they were, or give --fresh"
            )

    def config(self) -> "TrainingConfig | TrainingScenario":
        """Read the run's configuration; BadInputError if the folder holds no training run."""
        # They need torch, the places of files do not.
        from fedmjp.scenario import TrainingScenario  # noqa: PLC0415
        from fedmjp.training.config import TrainingConfig  # noqa: PLC0415

        about = self._about()
        kinds: dict[str, type[TrainingConfig | TrainingScenario]] = {
            "central": TrainingConfig,
            "federated": TrainingScenario,
        }
        try:
            return kinds[about["kind"]].parse(about["config"])
        except (KeyError, TypeError, ConfigError) as error:
            raise BadInputError(f"{self.manifest} is not that of a training run: {error}") from None

    def trained(self) -> ModelConfig:
        """Return the model with the run's last weights; CheckpointError if it has none yet."""
        return self.config().network.model_copy(update={"weights": Checkpoint.of(self.weights)})

    def _about(self) -> dict[str, Any]:
        try:
            about: dict[str, Any] = json.loads(read_file(self.manifest, LARGEST))
        except (OSError, ValueError, RecursionError) as error:
            raise BadInputError(f"{self.root} holds no training run: {error}") from None
        return about

"""What `fedmjp record` or `fedmjp simulate --uploads` left in a folder, opened to be attacked."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedmjp.benchmarks.federation.round_records import ROUND_OF_TRAINING
from fedmjp.benchmarks.federation.simulation import RECORDS, RunFolder
from fedmjp.benchmarks.plan.experiment import Experiment
from fedmjp.benchmarks.uploads.source import Batch, RecordedUploads, UploadSource
from fedmjp.data.pictures import PictureEntry
from fedmjp.errors import BadInputError, FedmjpError
from fedmjp.files import read_file
from fedmjp.models.build import build_vit
from fedmjp.private import PrivateBatch
from fedmjp.records import Upload
from fedmjp.scenario import Scenario

LARGEST = 100_000_000  # bytes of a manifest


@dataclass(frozen=True)
class Recording:
    """A folder of records and the scenarios that they were made of.

    ``sha256`` is by picture. ``of_training`` says whether it is a round of a training run; clients whose gradient
    held a localisation loss have its weight in ``localisation_weights``.
    """

    folder: RunFolder
    scenarios: tuple[Scenario, ...]
    sha256: dict[str, str]
    of_training: bool
    localisation_weights: dict[str, float]

    @staticmethod
    def open(folder: Path) -> "Recording":
        """Read the manifest.

        Args:
            folder: Of the records.

        Raises:
            BadInputError: If the folder holds no records, or holds weight changes that no attack can read.
        """
        try:
            about = json.loads(read_file(folder / "manifest.json", LARGEST))
            recording = Recording(
                RunFolder(folder),
                tuple(Scenario.parse(values) for values in about["scenarios"]),
                dict(about["pictures"]),
                about.get("kind") == ROUND_OF_TRAINING,
                dict(about.get("localisation_weights", {})),
            )
        except (OSError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise BadInputError(f"{folder} holds no records of `fedmjp record`: {error}") from None
        if "recipe" in about:
            raise BadInputError(
                f"{folder} holds weight changes of AdamW with the training recipe; attacks invert gradients and plain "
                "SGD: record with `fedmjp simulate --strategy fedsgd`"
            )
        return recording

    def attacked(self, model: str | None, *, device: str) -> list[Scenario]:
        """Return the recorded scenarios; those of one model where it is named.

        Args:
            model: Name, or None.
            device: Where attacks run.

        Raises:
            BadInputError: If it was not recorded.
        """
        scenarios = [scenario for scenario in self.scenarios if model in (None, scenario.model.name)]
        if not scenarios:
            recorded = ", ".join(dict.fromkeys(scenario.model.name for scenario in self.scenarios))
            raise BadInputError(f"model {model!r} was not recorded in {self.folder.root}: {recorded}")
        return [scenario.model_copy(update={"device": device}) for scenario in scenarios]

    def source(self, experiment: Experiment) -> UploadSource:
        """Return what gives an experiment these uploads.

        Args:
            experiment: Any.
        """
        return RecordedUploads(experiment, self.folder)

    def batches(self, scenario: Scenario) -> list[tuple[PictureEntry, ...]]:
        """List the pictures behind each upload, from the evaluator's records.

        Args:
            scenario: Of the recording.

        Raises:
            BadInputError: If there is no readable one.
        """
        entries: dict[Batch, tuple[PictureEntry, ...]] = {}
        for names, (path, *_) in self.folder.index(scenario).items():
            entries |= self.entries(scenario, names, path)
        if not entries:
            raise BadInputError(f"{self.folder.evaluator} holds no readable record of pictures that the manifest names")
        return list(entries.values())

    def entries(self, scenario: Scenario, names: Batch, path: Path) -> dict[Batch, tuple[PictureEntry, ...]]:
        """Describe the pictures in a private record; nothing if it, or the manifest, does not show them.

        Args:
            scenario: Of the recording.
            names: Of the pictures.
            path: Of the record.
        """
        try:
            labels = self.folder.private(scenario, path).labels.tolist()
        except FedmjpError:
            return {}  # told as a problem
        if not all(name in self.sha256 for name in names):
            return {}
        pairs = zip(names, labels, strict=True)
        return {names: tuple(PictureEntry(name, label, self.sha256[name]) for name, label in pairs)}

    def digest(self) -> str:
        """Digest all records with SHA-256: changed records make new trials."""
        digest = hashlib.sha256()
        for path in sorted(self.folder.root.glob("*/*/*.safetensors")):
            with path.open("rb") as file:
                digest.update(str(path.relative_to(self.folder.root)).encode())
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    def problems(self, experiment: Experiment) -> list[str]:
        """List each record that cannot be used: its file, and what is wrong with it.

        Args:
            experiment: Its attacks read the records.
        """
        scenario = experiment.scenario
        model = build_vit(scenario.network)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        read = {name: shapes[name] for name in experiment.tensors_read(model) if name in shapes}
        uploads, private = self.folder.uploads / scenario.folder, self.folder.evaluator / scenario.folder
        names = sorted({path.name for folder in (uploads, private) for path in folder.glob(RECORDS)})
        sent: set[str] = set()
        problems: list[str] = []
        for name in names:
            if not self.folder.stands_for_group(scenario, private / name):
                continue
            try:
                batch = self.folder.private(scenario, private / name)
            except FedmjpError as error:
                problems.append(f"{private / name}: {error}")
                continue
            try:
                upload = Upload.load(uploads / name)
                problem = _problem(upload, read, scenario, batch)
                sent.add(upload.weights)
            except FedmjpError as error:
                problem = str(error)
            if problem:
                problems.append(f"{uploads / name}: {problem}")
        for digest in sorted(sent):
            try:
                self.folder.upload_folder(scenario.folder).weights(digest)
            except FedmjpError as error:
                problems.append(f"{uploads}: the weights that had been sent: {error}")
        return problems


def _problem(
    upload: Upload, shapes: Mapping[str, tuple[int, ...]], scenario: Scenario, batch: PrivateBatch
) -> str | None:
    if upload.kind != scenario.update:
        return f"of kind {upload.kind}, but the run was of {scenario.update}s"
    if upload.num_examples != len(batch.pictures):
        return f"reports {upload.num_examples} pictures, the client had {len(batch.pictures)}"
    for name, shape in shapes.items():
        if name not in upload.tensors:
            return f"no tensor {name!r}"
        if tuple(upload.tensors[name].shape) != shape:
            return f"tensor {name!r} has shape {tuple(upload.tensors[name].shape)}, the model's has {shape}"
    return None

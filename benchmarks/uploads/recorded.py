"""What `fedmjp record` or `fedmjp simulate --uploads` left in a folder, opened to be attacked."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.federation.round_records import ROUND_OF_TRAINING
from benchmarks.federation.simulation import RECORDS, RunFolder
from benchmarks.plan.experiment import Experiment
from benchmarks.uploads.source import RecordedUploads, UploadSource, tensors_read
from fedmjp.config import Checkpoint, FederationConfig, ModelConfig
from fedmjp.data.pictures import PictureEntry
from fedmjp.errors import BadInputError, FedmjpError
from fedmjp.models.build import build_vit
from fedmjp.private import PrivateBatch
from fedmjp.records import Upload


@dataclass(frozen=True)
class Recording:
    """A folder of records and the configuration that they were made with.

    Attributes:
        folder: Where they lie.
        config: What was run.
        sha256: Of each picture.
        of_training: Whether it is a round of a training run.
        localisation_weights: Of the localisation loss in each client's gradient, by node, where there was one.
    """

    folder: RunFolder
    config: FederationConfig
    sha256: dict[str, str]
    of_training: bool
    localisation_weights: dict[str, float]

    @staticmethod
    def open(folder: Path) -> "Recording":
        """Read the manifest.

        Raises:
            BadInputError: If the folder holds no records, or holds weight changes that no attack can read.
        """
        try:
            about = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
            recording = Recording(
                RunFolder(folder),
                FederationConfig.parse(about["config"]),
                dict(about["pictures"]),
                about.get("kind") == ROUND_OF_TRAINING,
                dict(about.get("localisation_weights", {})),
            )
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise BadInputError(f"{folder} holds no records of `fedmjp record`: {error}") from None
        if "recipe" in about:
            raise BadInputError(
                f"{folder} holds weight changes of AdamW with the training recipe; attacks invert gradients and plain "
                "SGD: record with `fedmjp simulate --strategy fedsgd`"
            )
        return recording

    def arms(self, model: str | None, defence: str | None, *, device: str) -> FederationConfig:
        """The configuration, reduced to a model and a defence where they are named.

        Raises:
            BadInputError: If they were not recorded.
        """
        for what, name, recorded in (("model", model, self.config.models), ("defence", defence, self.config.defences)):
            if name is not None and name not in recorded:
                raise BadInputError(f"{what} {name!r} was not recorded in {self.folder.root}: {', '.join(recorded)}")
        reduced = {
            "models": self.config.models if model is None else (model,),
            "defences": self.config.defences if defence is None else (defence,),
            "device": device,
        }
        return FederationConfig.parse(self.config.model_dump() | reduced)

    def checkpoints(self, federation: FederationConfig) -> dict[str, Checkpoint]:
        """Weights in files: none, they were drawn from the seed."""
        del federation
        return {}

    def source(self, experiment: Experiment) -> UploadSource:
        """What gives an experiment these uploads."""
        return RecordedUploads(experiment, self.folder)

    def batches(self, federation: FederationConfig) -> list[tuple[PictureEntry, ...]]:
        """The pictures behind each upload, from the evaluator's records of all arms.

        Raises:
            BadInputError: If there is no readable one.
        """
        found: dict[tuple[str, ...], tuple[PictureEntry, ...]] = {}
        for arm in federation.arms:
            for (names, _), (path, *_) in self.folder.index(arm).items():
                if names not in found:
                    found |= self.entries(names, path)
        if not found:
            raise BadInputError(f"{self.folder.evaluator} holds no readable record of pictures that the manifest names")
        return list(found.values())

    def entries(self, names: tuple[str, ...], path: Path) -> dict[tuple[str, ...], tuple[PictureEntry, ...]]:
        """The pictures in a private record, by their names; nothing if it, or the manifest, does not show them."""
        try:
            labels = PrivateBatch.load(path).labels.tolist()
        except FedmjpError:
            return {}  # told as a problem
        if not all(name in self.sha256 for name in names):
            return {}
        pairs = zip(names, labels, strict=True)
        return {names: tuple(PictureEntry(name, label, self.sha256[name]) for name, label in pairs)}

    def digest(self) -> str:
        """SHA-256 over all records: changed records make new trials."""
        digest = hashlib.sha256()
        for path in sorted(self.folder.root.glob("*/*/*.safetensors")):
            with path.open("rb") as file:
                digest.update(str(path.relative_to(self.folder.root)).encode())
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    def problems(self, experiment: Experiment) -> list[str]:
        """Each record that cannot be used: its file, and what is wrong with it."""
        return [
            f"{path}: {problem}"
            for arm in experiment.federation.arms
            for path, problem in self._problems(experiment, arm)
        ]

    def _problems(self, experiment: Experiment, arm: ModelConfig) -> list[tuple[Path, str]]:
        model = build_vit(arm)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        read = {name: shapes[name] for name in tensors_read(experiment, arm, model) if name in shapes}
        uploads, private = self.folder.uploads / arm.label, self.folder.evaluator / arm.label
        names = sorted({path.name for folder in (uploads, private) for path in folder.glob(RECORDS)})
        sent: set[str] = set()
        found = []
        for name in names:
            try:
                batch = PrivateBatch.load(private / name)
            except FedmjpError as error:
                found.append((private / name, str(error)))
                continue
            try:
                upload = Upload.load(uploads / name)
                problem = _problem(upload, read, experiment, len(batch.pictures))
                sent.add(upload.weights)
            except FedmjpError as error:
                problem = str(error)
            if problem:
                found.append((uploads / name, problem))
        return found + self._weights_problems(arm, sent)

    def _weights_problems(self, arm: ModelConfig, sent: set[str]) -> list[tuple[Path, str]]:
        found = []
        for digest in sorted(sent):
            try:
                self.folder.upload_folder(arm).weights(digest)
            except FedmjpError as error:
                found.append((self.folder.uploads / arm.label, f"the weights that had been sent: {error}"))
        return found


def _problem(
    upload: Upload, shapes: Mapping[str, tuple[int, ...]], experiment: Experiment, pictures: int
) -> str | None:
    if upload.kind != experiment.federation.update:
        return f"a {upload.kind}, but the run was of {experiment.federation.update}s"
    if upload.num_examples != pictures:
        return f"reports {upload.num_examples} pictures, the client had {pictures}"
    for name, shape in shapes.items():
        if name not in upload.tensors:
            return f"no tensor {name!r}"
        if tuple(upload.tensors[name].shape) != shape:
            return f"tensor {name!r} has shape {tuple(upload.tensors[name].shape)}, the model's has {shape}"
    return None

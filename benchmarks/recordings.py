"""What `fedmjp simulate` left in a folder, opened to be attacked."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.campaign import Experiment
from benchmarks.federation.simulation import RunFolder
from benchmarks.sources import tensors_read
from fedmjp.config import FederationConfig, ModelConfig
from fedmjp.data.pictures import PictureEntry
from fedmjp.errors import BadInputError, FedmjpError
from fedmjp.models.build import build
from fedmjp.private import PrivateBatch
from fedmjp.records import Upload


@dataclass(frozen=True)
class Recording:
    """A folder of records and the configuration that they were made with."""

    folder: RunFolder
    config: FederationConfig
    sha256: dict[str, str]

    @staticmethod
    def open(folder: Path) -> "Recording":
        """Read the manifest.

        Raises:
            BadInputError: If the folder holds no records of `fedmjp simulate`.
        """
        try:
            about = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
            return Recording(RunFolder(folder), FederationConfig.parse(about["config"]), dict(about["pictures"]))
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise BadInputError(f"{folder} holds no records of `fedmjp simulate`: {error}") from None

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

    def batches(self, federation: FederationConfig) -> list[tuple[PictureEntry, ...]]:
        """The pictures behind each upload, from the evaluator's records."""
        found: dict[tuple[str, ...], tuple[PictureEntry, ...]] = {}
        for (names, _), path in self.folder.index(federation.arms[0]).items():
            if names not in found:
                labels = PrivateBatch.load(path).labels.tolist()
                found[names] = tuple(
                    PictureEntry(name, label, self.sha256[name]) for name, label in zip(names, labels, strict=True)
                )
        if not found:
            raise BadInputError(f"{self.folder.evaluator} holds no readable record of the clients' pictures")
        return list(found.values())

    def problems(self, experiment: Experiment) -> list[str]:
        """Each upload that cannot be attacked: its file, and what is wrong with it."""
        return [
            f"{path}: {problem}"
            for arm in experiment.federation.arms
            for path, problem in self._problems(experiment, arm)
        ]

    def _problems(self, experiment: Experiment, arm: ModelConfig) -> list[tuple[Path, str]]:
        model = build(arm)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        read = tensors_read(experiment, arm, model)
        found = []
        for path in self.folder.index(arm).values():
            upload = self.folder.uploads / arm.label / path.name
            try:
                problem = _problem(Upload.load(upload), {name: shapes[name] for name in read if name in shapes})
            except FedmjpError as error:
                problem = str(error)
            if problem:
                found.append((upload, problem))
        return found


def _problem(upload: Upload, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    for name, shape in shapes.items():
        if name not in upload.tensors:
            return f"no tensor {name!r}"
        if tuple(upload.tensors[name].shape) != shape:
            return f"tensor {name!r} has shape {tuple(upload.tensors[name].shape)}, the model's has {shape}"
    return None

"""Configuration models: frozen, unknown keys refused with a suggestion, digest for provenance."""

import difflib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from fedmjp.errors import CheckpointError, ConfigError
from fedmjp.settings import Picture

Defence = Literal["none", "jigsaw", "mjp"]
UpdateKind = Literal["gradient", "delta"]
Localisation = Literal["none", "pca", "linear", "nonlinear"]
Precision = Literal["float32", "float16", "bfloat16"]
MAX_CLASSES = 1_000_000  # more than any data set has, and a head that still fits into memory
MAX_SEED = 2**63 - 1  # what Flower's run-config can carry
DIGEST = "digest"  # context of a dump that is to be hashed
MaskRatio = Annotated[float, Field(ge=0.0, le=1.0)]


def _split(value: object) -> object:
    """Comma-separated text, as Flower's run-config carries it, into a tuple."""
    return tuple(part for part in value.split(",") if part) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_split)]
Numbers = Annotated[tuple[int, ...], BeforeValidator(_split)]


class Config(BaseModel):
    """Base of all configuration models."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Validate ``values``.

        Raises:
            ConfigError: On an unknown key (with the nearest known one) or a value out of range,
                in one line.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError("; ".join(cls._explain(dict(detail)) for detail in error.errors())) from None

    @classmethod
    def _explain(cls, detail: dict[str, Any]) -> str:
        key = ".".join(str(part) for part in detail["loc"])
        if detail["type"] == "extra_forbidden":
            near = difflib.get_close_matches(key, cls.model_fields, n=1)
            return f"unknown key {key!r}" + (f", did you mean {near[0]!r}?" if near else "")
        if not key:
            return str(detail["msg"]).removeprefix("Value error, ")
        return f"{key.replace('_', '-')} = {detail['input']!r}: {detail['msg'].removeprefix('Value error, ')}"

    def digest(self) -> str:
        """SHA-256 of the resolved values, as hex."""
        values = self.model_dump(mode="json", context=DIGEST)
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _require_whole_patches(image_size: int, patch_size: int) -> None:
    if image_size % patch_size:
        raise ValueError(f"image-size {image_size} is not a multiple of patch-size {patch_size}")


class Checkpoint(Config):
    """Trained weights in a file. Its content identifies it, wherever it lies."""

    path: str
    sha256: str = Field(pattern="^[0-9a-f]{64}$")

    @classmethod
    def of(cls, path: str | Path) -> Self:
        """The checkpoint in a file.

        Raises:
            CheckpointError: If the file cannot be read.
        """
        try:
            with Path(path).open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        return cls(path=str(Path(path).absolute()), sha256=sha256)

    @model_serializer(mode="wrap")
    def _content_alone(self, dump: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        """Where the file lies is no part of any digest."""
        values: dict[str, Any] = dump(self)
        return {"sha256": values["sha256"]} if info.context == DIGEST else values


class ModelConfig(Config):
    """Which network, with which initial weights.

    ``defence`` "mjp" adds MJP's shared unknown position embedding to the network. "jigsaw" is MJP
    without it: shuffled patches keep the position embeddings of their places, and the network is
    that of "none". ``seed`` draws the initial weights, which those of ``weights`` replace if given.

    ``localisation`` adds MJP's regressor of positions (DAL), which training needs and logits do not;
    ``localisation_layers`` is the depth of the nonlinear one: three in the paper (section 5.3), two in the
    official code. ``index_embedding`` adds a second, never masked embedding of positions (IDX, Table 4).
    """

    name: str
    defence: Defence = "none"
    index_embedding: bool = False
    localisation: Localisation = "none"
    localisation_layers: Literal[2, 3] = 3
    image_size: int = Field(224, ge=1)
    patch_size: int = Field(16, ge=1)
    classes: int = Field(1000, ge=2, le=MAX_CLASSES)
    seed: int = Field(0, ge=0, le=MAX_SEED)
    weights: Checkpoint | None = None

    @model_validator(mode="after")
    def _whole_patches(self) -> Self:
        _require_whole_patches(self.image_size, self.patch_size)
        return self

    @property
    def label(self) -> str:
        """Name for folders and log lines, such as ``deit_small-mjp``."""
        return f"{self.name}-{self.defence}"

    @property
    def grid(self) -> int:
        """Patches per side."""
        return self.image_size // self.patch_size


class Turn(NamedTuple):
    """What a client uploads in a round.

    Attributes:
        batch: Which of its batches, from 0.
        version: Of the pictures.
        number: How often it has uploaded this batch in this version before.
    """

    batch: int
    version: Picture
    number: int


class FederationConfig(Config):
    """One federated run: which models, which pictures, how many clients, what goes into the gradients.

    The run plays one arm after another: each of ``models`` with each of ``defences``, from its
    initial weights. In an arm every client uploads, round after round, the update of one batch of
    its pictures: first of all its pictures in the first version of ``inputs``, then in the next. An
    update is the batch's gradient, or the weight delta after some steps of plain SGD on it. With
    several ``uploads_per_picture`` the client goes through its pictures so often in each version, every
    time under masks drawn anew. ``kept``, ``noise`` and ``precision`` are what it does to an update
    before it leaves (``fedmjp.degradation``).

    The configuration travels to Flower as flat run-config keys (``pictures-per-client``; several values
    comma-separated), because those may only be numbers, text and booleans.
    """

    models: Names = ("deit_small",)
    defences: Annotated[tuple[Defence, ...], BeforeValidator(_split)] = ("mjp",)
    mask_ratio: MaskRatio = 0.27
    image_size: int = Field(224, ge=1)
    patch_size: int = Field(16, ge=1)
    classes: int = Field(1000, ge=2)
    index_embedding: bool = False
    localisation: Localisation = "none"
    localisation_layers: Literal[2, 3] = 3
    data: str = Field("bundled", description="'bundled' or a folder of CLASS/picture files, absolute")
    clients: int = Field(2, ge=1)
    pictures_per_client: int = Field(1, ge=1)
    batch_size: int = Field(1, ge=1, description="pictures behind one upload")
    uploads_per_picture: int = Field(1, ge=1, description="in each version, under masks drawn independently")
    inputs: Annotated[tuple[Picture, ...], BeforeValidator(_split)] = (Picture.SHUFFLED,)
    update: UpdateKind = "gradient"
    local_steps: int = Field(1, ge=1, description="SGD steps behind one weight delta, all on the same batch")
    local_learning_rate: float = Field(0.01, gt=0, allow_inf_nan=False, description="of these steps")
    precision: Precision = Field("float32", description="that uploads are rounded to")
    noise: float = Field(0.0, ge=0, allow_inf_nan=False, description="added to uploads, relative to each tensor's RMS")
    kept: float = Field(1.0, gt=0, le=1, description="share of each tensor that pruning by magnitude leaves")
    server_learning_rate: float = Field(
        0.0, ge=0.0, allow_inf_nan=False, description="0 keeps the weights: every picture meets the same"
    )
    seed: int = Field(0, ge=0, le=MAX_SEED)
    device: Literal["cpu", "cuda"] = "cpu"

    @model_validator(mode="after")
    def _can_be_run(self) -> Self:
        _require_whole_patches(self.image_size, self.patch_size)
        if self.pictures_per_client % self.batch_size:
            raise ValueError(
                f"batch-size {self.batch_size} does not divide the {self.pictures_per_client} pictures per client"
            )
        if self.update == "gradient" and self.local_steps > 1:
            raise ValueError(f"{self.local_steps} local steps make a weight delta: set update to delta")
        for name in ("models", "defences", "inputs"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must be at least one, each named once, got {', '.join(values) or 'none'}")
        return self

    @property
    def arms(self) -> list[ModelConfig]:
        """What each arm trains, in the order of the run."""
        names = ("image_size", "patch_size", "classes", "index_embedding", "localisation", "localisation_layers")
        shared = {name: getattr(self, name) for name in names}
        return [self._arm(model, defence, shared) for model in self.models for defence in self.defences]

    def _arm(self, model: str, defence: Defence, shared: Mapping[str, Any]) -> ModelConfig:
        return ModelConfig.parse({"name": model, "defence": defence, "seed": self.seed, **shared})

    @property
    def rounds(self) -> int:
        """Rounds of an arm: until every client has uploaded each of its pictures in each version, as often as asked."""
        return self.batches_per_client * self.uploads_per_picture * len(self.inputs)

    @property
    def batches_per_client(self) -> int:
        """Uploads that a client's pictures make in one version, each once."""
        return self.pictures_per_client // self.batch_size

    def turn(self, server_round: int) -> Turn:
        """What a client uploads in a round (from 1)."""
        passes, batch = divmod(server_round - 1, self.batches_per_client)
        version, number = divmod(passes, self.uploads_per_picture)
        return Turn(batch, self.inputs[version], number)

    def round_of(self, turn: Turn) -> int:
        """The round of a turn: the inverse of ``turn``."""
        passes = self.inputs.index(turn.version) * self.uploads_per_picture + turn.number
        return passes * self.batches_per_client + turn.batch + 1


class RecordingConfig(Config):
    """Where a federated run leaves records, one sub-folder per arm; empty text means nowhere.

    ``evaluator_folder`` is for clients only: they leave the private pictures there, beside the run.
    Server-side code never opens it. ``upload_tensors`` keeps only those tensors of each
    upload; empty keeps all.
    """

    uploads_folder: str = ""
    evaluator_folder: str = ""
    upload_tensors: Names = ()


class TrainingRun(Config):
    """A federated training run, as Flower's run-config carries it; empty text means that the run only records.

    ``training`` is a ``fedmjp.training.config.FederatedConfig`` as JSON, ``output_folder`` where the server
    leaves history and weights, ``partition_file`` which pictures each client has, and ``share_sizes`` how
    many (comma-separated): where they are given, no client can claim more.
    """

    training: str = ""
    output_folder: str = ""
    partition_file: str = ""
    share_sizes: Numbers = ()


C = TypeVar("C", bound=Config)


def to_run_config(*configs: Config) -> dict[str, str | int | float | bool]:
    """Flatten into Flower's run-config: kebab-case keys, scalars only."""
    flat: dict[str, str | int | float | bool] = {}
    for config in configs:
        for key, value in config.model_dump(mode="json").items():
            flat[key.replace("_", "-")] = ",".join(map(str, value)) if isinstance(value, list) else value
    return flat


def from_run_config(config: type[C], run_config: Mapping[str, Any]) -> C:
    """Read the keys of ``config`` out of Flower's run-config, which holds those of several."""
    keys = {key.replace("_", "-"): key for key in config.model_fields}
    return config.parse({keys[key]: value for key, value in run_config.items() if key in keys})

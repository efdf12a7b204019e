"""Configuration models: frozen, unknown keys refused with a suggestion, digest for provenance."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from fedmjp.errors import CheckpointError, ConfigError, suggestion
from fedmjp.files import require_regular
from fedmjp.zoo import PREFIX, zoo_model

UpdateKind = Literal["gradient", "delta"]
LocalOptimiser = Literal["sgd", "adamw"]
Localisation = Literal["none", "pca", "linear", "nonlinear"]
MAX_CLASSES = 1_000_000  # more than any data set has, and a head that still fits into memory
MAX_IMAGE_SIZE = 4096  # pixels per side: more than any model here was made for, and pictures that still fit into memory
MAX_PATCHES = 128**2  # one block's attention to more would take gigabytes
MAX_COUNT = 1_000_000  # of clients and epochs: beyond what ends
MAX_ROUNDS = 100_000
QUOTED = 200  # letters of a value that a message quotes
MAX_SEED = 2**63 - 1  # what Flower's run-config can carry
NO_NUMBER = "{} is no number; YAML reads yes, no, on and off as true and false: write a number"
DIGEST = "digest"  # context of a dump that is to be hashed
MaskRatio = Annotated[float, Field(ge=0.0, le=1.0)]


def _split(value: object) -> object:
    """Comma-separated text, as Flower's run-config carries it, into a tuple."""
    return tuple(part for part in value.split(",") if part) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_split)]
Numbers = Annotated[tuple[int, ...], BeforeValidator(_split)]


def _short(value: object) -> str:
    """Quote a value for a message, in one line of bearable length."""
    text = repr(value)
    return text if len(text) <= QUOTED else f"{text[:QUOTED]}..."


def _truths(annotation: Any, value: object, location: tuple[int | str, ...]) -> list[dict[str, Any]]:
    """Find true and false in the place of numbers in the value of one field, also in lists and groups of keys."""
    kinds = _kinds(annotation)
    if isinstance(value, bool):
        if bool in kinds or not kinds & {int, float}:
            return []
        return [{"type": "truth", "loc": location, "input": value, "msg": NO_NUMBER.format(str(value).lower())}]
    details = []
    if isinstance(value, Mapping):
        for kind in kinds:
            details += kind.find_truths(value, location) if issubclass(kind, Config) else []
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    return details + [detail for key, entry in pairs for detail in _truths(annotation, entry, (*location, key))]


def _kinds(annotation: Any) -> set[type[Any]]:
    """Collect the types that an annotation is made of."""
    inner = get_args(annotation)
    return set().union(*map(_kinds, inner)) if inner else {annotation} if isinstance(annotation, type) else set()


def _without_folders(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_folders(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_without_folders(entry) for entry in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def digest_of(values: object) -> str:
    """Compute the SHA-256 of values as JSON, with sorted keys, as hex.

    Args:
        values: That JSON can hold.
    """
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


class Config(BaseModel):
    """Base of all configuration models."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def parse(cls, values: Mapping[str, Any] | str) -> Self:
        """Read and check values.

        Args:
            values: By the names of the fields; text only where the model takes any.

        Raises:
            ConfigError: On an unknown key (with the nearest known one) or a value out of range, in one line.
        """
        if truths := cls.find_truths(values):
            raise ConfigError("; ".join(map(cls._explain, truths)))
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise cls.explain_error(error) from None

    @classmethod
    def find_truths(cls, values: object, location: tuple[int | str, ...] = ()) -> list[dict[str, Any]]:
        """Find true and false in the place of numbers, which pydantic would read as 1 and 0.

        Args:
            values: As for ``parse``.
            location: Of the values in others.

        Returns:
            The details of each, as pydantic has them of an error.
        """
        groups = values if isinstance(values, Mapping) else {}
        fields = ((name, field) for name, field in cls.model_fields.items() if name in groups)
        return [
            detail for name, field in fields for detail in _truths(field.annotation, groups[name], (*location, name))
        ]

    def published(self) -> dict[str, Any]:
        """Dump the values for a manifest: files and folders of this machine are shown by their names alone."""
        return dict(_without_folders(self.model_dump(mode="json")))

    @classmethod
    def explain_error(cls, error: ValidationError) -> ConfigError:
        """Explain what is wrong with the values of this model, as commands print it.

        Args:
            error: Of pydantic.
        """
        return ConfigError("; ".join(cls._explain(dict(detail)) for detail in error.errors()))

    @classmethod
    def _explain(cls, detail: dict[str, Any]) -> str:
        key = ".".join(str(part) for part in detail["loc"])
        if detail["type"] == "extra_forbidden":
            return f"unknown key {key!r}, {suggestion(key, cls.keys())}"
        message = str(detail["msg"]).removeprefix("Value error, ")
        value = "" if isinstance(detail["input"], Mapping) else f" = {_short(detail['input'])}"
        return f"{key}{value}: {message}" if key else message

    @classmethod
    def keys(cls) -> list[str]:
        """List the keys that can be set, those of groups as ``group.key``."""
        settable = list(cls.model_fields)
        for name, field in cls.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Config):
                settable += [f"{name}.{key}" for key in field.annotation.keys()]  # noqa: SIM118 (no mapping)
        return settable

    def digest(self, exclude: Mapping[str, Any] | None = None) -> str:
        """Compute the SHA-256 of the resolved values, as hex.

        Args:
            exclude: Fields to leave out, as pydantic takes them.
        """
        values = self.model_dump(mode="json", context=DIGEST, exclude=exclude)
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


class Checkpoint(Config):
    """Trained weights in a file. Its content identifies it, wherever it lies."""

    path: str
    sha256: str = Field(pattern="^[0-9a-f]{64}$")

    @classmethod
    def of(cls, path: str | Path) -> Self:
        """Identify the checkpoint in a file.

        Args:
            path: Of the file, or ``zoo:NAME``.

        Raises:
            CheckpointError: If it cannot be read, or is not the file that the zoo states.
            UnknownNameError: If the zoo has none of that name.
            WeightsMissingError: If it is in the zoo, but not on this machine.
        """
        zoo = zoo_model(str(path)) if str(path).startswith(PREFIX) else None
        path = zoo.file() if zoo else Path(path)
        try:
            require_regular(path)
            with path.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        if zoo:
            zoo.check(path, sha256)
        return cls(path=str(path.absolute()), sha256=sha256)

    @model_serializer(mode="wrap")
    def _content_alone(self, dump: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        """Leave the place of the file out of digests."""
        values: dict[str, Any] = dump(self)
        return {"sha256": values["sha256"]} if info.context == DIGEST else values


class ModelConfig(Config):
    """Which network, with which initial weights.

    ``seed`` draws the initial weights, which those of ``weights`` replace if given. ``unknown_embedding`` adds MJP's
    shared unknown position embedding, which the defence of that name switches on.

    ``localisation`` adds MJP's regressor of positions (DAL), which training needs and logits do not;
    ``localisation_layers`` is the depth of the nonlinear one: three in the paper (section 5.3), two in the
    official code. ``index_embedding`` adds a second, never masked embedding of positions (IDX, Table 4).
    """

    name: str
    unknown_embedding: bool = False
    index_embedding: bool = False
    localisation: Localisation = "none"
    localisation_layers: Literal[2, 3] = 3
    image_size: int = Field(224, ge=1, le=MAX_IMAGE_SIZE)
    patch_size: int = Field(16, ge=1, le=MAX_IMAGE_SIZE)
    classes: int = Field(1000, ge=2, le=MAX_CLASSES)
    seed: int = Field(0, ge=0, le=MAX_SEED)
    weights: Checkpoint | None = None

    @model_validator(mode="after")
    def _whole_patches(self) -> Self:
        if self.image_size % self.patch_size:
            raise ValueError(f"image size {self.image_size} is not a multiple of patch size {self.patch_size}")
        if self.grid**2 > MAX_PATCHES:
            raise ValueError(
                f"image size {self.image_size} and patch size {self.patch_size} make {self.grid**2} patches, of which "
                f"there may be {MAX_PATCHES}: take larger patches"
            )
        return self

    @property
    def grid(self) -> int:
        """Count the patches per side."""
        return self.image_size // self.patch_size


class RunConfig(Config):
    """Flower's run-config: the scenarios of a run as JSON, and the folders in which its parties leave files.

    Empty text means nowhere. ``evaluator_folder`` is for clients only: they leave the private pictures there, beside
    the run. Server-side code never opens it.
    """

    scenarios: str = ""  # a JSON list of ``fedmjp.scenario.Scenario``, played one after another; of a training run, one
    uploads_folder: str = ""  # where the server keeps uploads
    evaluator_folder: str = ""  # where clients leave what is behind them
    upload_tensors: Names = ()  # the only tensors of each upload that are kept; empty keeps all
    output_folder: str = ""  # where the server of a training run leaves history and weights
    events_file: str = ""  # to which the server's app appends its events, a JSON line each
    partition_file: str = ""  # which pictures each client of a training run has
    share_sizes: Numbers = ()  # how many each has: where they are given, no client can claim more
    class_names: str = ""  # a JSON list in the order of the labels, by which everybody's classes are checked
    node_keys: Names = ()  # SHA-256 of each node's public key, in the order of clients; empty asks nodes for numbers

    @field_validator("class_names")
    @classmethod
    def _are_names(cls, text: str) -> str:
        cls._read_names(text)
        return text

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the names of the classes, in the order of the labels; none where the run does not say them."""
        return self._read_names(self.class_names)

    @staticmethod
    def _read_names(text: str) -> tuple[str, ...]:
        try:
            names = json.loads(text or "[]")
        except ValueError:
            names = None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError('must be a JSON list of names, such as ["benign", "malignant"]')
        if repeated := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"names the class {repeated[0]!r} twice")
        return tuple(names)

    def flat(self) -> dict[str, str | int | float | bool]:
        """Write it as Flower takes it: kebab-case keys, scalars only."""
        values = self.model_dump(mode="json")
        return {
            key.replace("_", "-"): ",".join(map(str, value)) if isinstance(value, list) else value
            for key, value in values.items()
        }

    @classmethod
    def read(cls, run_config: Mapping[str, Any]) -> Self:
        """Read what ``flat`` wrote; keys of other apps are passed over.

        Args:
            run_config: As Flower hands it over.
        """
        keys = {key.replace("_", "-"): key for key in cls.model_fields}
        return cls.parse({keys[key]: value for key, value in run_config.items() if key in keys})

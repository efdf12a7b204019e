"""The errors that fedmjp raises on purpose: one line that says what was wrong and what to do."""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

# In what Python, torch, CUDA, Ray and the system say of it.
SIGNS_OF_MEMORY = ("memoryerror", "out of memory", "outofmemory", "allocate memory", "not enough memory")
LOWER = "close other programs, or lower what the command has of --image-size, --batch-size, --clients and --workers"
OUT_OF_MEMORY = f"out of memory: {LOWER}"
KILLED = f"was killed, as the system does where memory is short: {LOWER}"
GAVE_UP = "the attack gave up: "  # how the error of a trial begins that fails however often it is tried
LISTED = 40  # names that a message lists at most


def suggestion(name: str, candidates: Iterable[str], *, most: int = 1, write: Callable[[str], str] = repr) -> str:
    """Suggest the names that were probably meant: "did you mean 'seed'?"; list them all where none is near.

    Args:
        name: As it was given.
        candidates: All names that there are.
        most: Names that are suggested at most.
        write: How a name is written.
    """
    names = sorted(map(str, candidates))
    near = difflib.get_close_matches(str(name), names, n=most, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(map(write, near))}?"
    if not names:
        return "there is none"
    return f"known: {', '.join(names)}" if len(names) <= LISTED else f"none of {len(names)} names is near it"


def out_of_memory(error: BaseException | str) -> bool:
    """Tell whether an error means that no memory was left.

    Args:
        error: Itself, or the line of a log about it.
    """
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return isinstance(error, MemoryError) or any(sign in text.lower() for sign in SIGNS_OF_MEMORY)


@dataclass(frozen=True)
class Failure:
    """The reason why one of many pieces of work gave no result, returned in its place so that the others go on."""

    reason: str

    def __str__(self) -> str:
        return self.reason


class FedmjpError(Exception):
    """Base of all errors raised on purpose. The command line prints the line and ends with ``exit_code``."""

    exit_code = 1


class BadInputError(FedmjpError):
    """Input of the user that cannot be used. Remedy: change the argument that the message names."""

    exit_code = 2


class UnknownNameError(BadInputError):
    """A name that no registry knows. Remedy: use one of the names that the message lists."""

    def __init__(self, kind: str, name: str, candidates: Iterable[str]) -> None:
        hint = suggestion(name, candidates, most=3, write=str)
        super().__init__(f"Unknown {kind} {name!r}. {hint[0].upper()}{hint[1:]}")


class ConfigError(BadInputError):
    """A configuration value out of its range, or a key that does not exist."""


class DataError(BadInputError):
    """Pictures that are missing, unreadable or too few. Remedy: name another folder or fewer pictures."""


class DeviceError(BadInputError):
    """A device that this machine does not have. Remedy: --device cpu."""


class OutputError(BadInputError):
    """A folder that cannot be written. Remedy: name another with --output."""


class OutputGoneError(FedmjpError):
    """The folder of results went away during a run. Remedy: the message says what is kept, and where."""


class MissingExtraError(BadInputError):
    """A package that this needs is not installed. Remedy: the command that the message ends with."""

    def __init__(self, purpose: str, package: str, extra: str) -> None:
        super().__init__(f"{purpose} needs {package}, which is not installed; pip install 'fedmjp[{extra}]'")


class RecordError(FedmjpError):
    """A record (batch, upload, reconstruction) that is malformed or damaged on disk."""


class StoreError(FedmjpError):
    """The trials database failed while it was used. Remedy: see to disk, lock or server, and run again."""


class PluginError(FedmjpError):
    """Another package adds a name that cannot be loaded. Remedy: mend or uninstall that package."""


class AttackNotApplicableError(BadInputError):
    """An attack was given a model, upload or threat model that it cannot exploit by construction."""


class AttackFailedError(FedmjpError):
    """An attack that applies broke down. Remedy: read its own error in the message."""


class DefenceError(FedmjpError):
    """A defence cannot protect an update, which then does not leave. Remedy: read the reason in the message."""


class CheckpointError(BadInputError):
    """Trained weights that cannot be read, or do not fit the model. Remedy: see the message."""


class WeightsMissingError(FedmjpError):
    """Weights that have to be fetched by hand. Remedy: see `fedmjp doctor`."""


class FederationError(FedmjpError):
    """The Flower run failed. Remedy: read the client's or server's error in the message."""


class QuorumError(FederationError):
    """Too few clients gave an update that can be used. Remedy: read the last client's reason in the message."""

    exit_code = 3


class AppError(BadInputError):
    """Somebody's Flower app that cannot be audited. Remedy: see the message; what was seen is kept."""


class TrainingError(FedmjpError):
    """Training broke down. Remedy: see the message; the last checkpoint is kept."""

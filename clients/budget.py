"""What a site's uploads have cost in privacy, in a file that outlives restarts."""

import fcntl
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pydantic import ConfigDict, Field

from fedmjp.config import Config
from fedmjp.defences.accounting import composed_epsilon
from fedmjp.errors import ConfigError, DefenceError
from fedmjp.files import replacing


class Uploads(Config):
    """Uploads with the same noise."""

    model_config = ConfigDict(strict=True)

    multiplier: float = Field(gt=0, allow_inf_nan=False, description="standard deviation over sensitivity")
    count: int = Field(ge=1)


class Spendings(Config):
    """What lies in the file."""

    model_config = ConfigDict(strict=True)

    uploads: list[Uploads]


class Ledger:
    """Counts uploads with Gaussian noise and composes their epsilon, however noise changes between them.

    n releases with noise multiplier z cost what one with z / sqrt(n) costs, and releases with z and z' what one with
    (z**-2 + z'**-2) ** -0.5 costs. An upload is charged before it leaves: a crash in between costs privacy budget,
    never privacy. Several processes may share the file. Whoever deletes it starts from zero.

    Args:
        path: Of the file; its folder exists. A lock file lies beside it.
        delta: At which epsilon is stated.
        budget: Epsilon that must not be exceeded; None only counts.

    Raises:
        ConfigError: If the folder does not exist, or the budget is no positive number.
    """

    def __init__(self, path: str | Path, *, delta: float, budget: float | None = None) -> None:
        self.path, self.delta, self.budget = Path(path), delta, budget
        if not self.path.absolute().parent.is_dir():
            raise ConfigError(f"ledger {str(path)!r}: its folder does not exist; make it first")
        if budget is not None and not (budget > 0 and math.isfinite(budget)):
            raise ConfigError(f"budget = {budget!r}: must be an epsilon greater than 0")

    def charge(self, multiplier: float) -> float:
        """Count one more upload.

        Args:
            multiplier: Standard deviation of the upload's noise over what one client can change.

        Returns:
            Epsilon of all uploads so far, this one included.

        Raises:
            DefenceError: If the budget does not allow it, or the file is damaged or cannot be written. Nothing is
                counted then, and the upload must not leave.
        """
        try:
            with self._locked():
                counts = self._read()
                counts[multiplier] = counts.get(multiplier, 0) + 1
                epsilon = self._epsilon(counts)
                if self.budget is not None and epsilon > self.budget:
                    raise DefenceError(f"the privacy budget, epsilon {self.budget:g}, does not allow another upload")
                self._write(counts)
        except OSError as error:
            raise DefenceError(f"the ledger cannot be used: {error.strerror}") from error
        return epsilon

    def epsilon(self) -> float:
        """Compose epsilon of all uploads so far.

        Raises:
            DefenceError: If the file is damaged or cannot be read.
        """
        try:
            return self._epsilon(self._read())
        except OSError as error:
            raise DefenceError(f"the ledger cannot be used: {error.strerror}") from error

    def _epsilon(self, counts: Mapping[float, int]) -> float:
        inverse = sum(count / multiplier**2 for multiplier, count in counts.items())
        return composed_epsilon(inverse**-0.5, self.delta, 1) if inverse else 0.0

    def _read(self) -> dict[float, int]:
        try:
            uploads = Spendings.model_validate_json(self.path.read_bytes()).uploads
            if len({spending.multiplier for spending in uploads}) < len(uploads):
                raise ValueError("one noise multiplier twice")
        except FileNotFoundError:
            return {}
        except ValueError as error:  # no text, no JSON, or not these fields
            raise DefenceError(
                "the ledger is damaged, so nobody knows what was spent; restore it from a copy, or start a new one"
            ) from error
        return {spending.multiplier: spending.count for spending in uploads}

    def _write(self, counts: Mapping[float, int]) -> None:
        spendings = Spendings(uploads=[Uploads(multiplier=z, count=count) for z, count in counts.items()])
        with replacing(self.path) as partial, partial.open("w") as file:
            file.write(spendings.model_dump_json() + "\n")
            file.flush()
            os.fsync(file.fileno())
        descriptor = os.open(self.path.absolute().parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self.path.with_name(self.path.name + ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed
            yield

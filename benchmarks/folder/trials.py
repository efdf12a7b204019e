"""Trials that were run, and who can be read for them: without a database, which the store adds."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import pandas as pd

START_OVER = "to start over, run the command that made it again with --fresh"
MEASURED = ("mask_ratio", "realised_ratio", "attack_seconds")  # columns of floats


@dataclass(kw_only=True)
class TrialResult:
    """One attack on one picture, scored in one setting; or the error that it ended with.

    ``key`` digests everything that determines the trial. ``status`` is "ok" or "failed". Metrics that could not be
    computed on the machine have null for a score; ``COLOUR`` stands among them. ``environment`` holds versions,
    revision and hardware; in the database it stands once, and trials name its digest. ``recorded_at`` is UTC.
    """

    key: str
    status: str
    error: str | None = None
    model: str
    defence: str
    mask_ratio: float
    attack: str
    setting: str
    protocol: str
    picture: str
    picture_sha256: str
    seed: int
    realised_ratio: float | None = None
    weights_sha256: str | None = None
    attack_seconds: float | None = None
    scores: dict[str, Any] = field(default_factory=dict)
    diagnostics: dict[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any]
    recorded_at: datetime = field(default_factory=lambda: datetime.now(UTC).replace(tzinfo=None))


class RecordedTrials(Protocol):
    """Trials that can be read: those of a database, or of a published study."""

    def frame(self, keys: Collection[str] | None = None) -> "pd.DataFrame":
        """Return trials as one row each with the columns of ``TrialResult``, in the order of their keys.

        ``scores`` and ``diagnostics`` are dictionaries; ``environment_sha256`` is a key of ``environments()``.

        Args:
            keys: Of the trials; all if None.
        """

    def environments(self) -> dict[str, dict[str, Any]]:
        """Return versions, revision and hardware by digest."""


# Of a table of trials; the environments stand beside it.
TRIAL_COLUMNS = tuple(
    "environment_sha256" if column.name == "environment" else column.name for column in fields(TrialResult)
)


@dataclass(frozen=True)
class StudyTrials:
    """The trials of a published study."""

    rows: "pd.DataFrame"
    made_in: Mapping[str, dict[str, Any]]

    def frame(self, keys: Collection[str] | None = None) -> "pd.DataFrame":
        """Return trials as ``RecordedTrials`` has them.

        Args:
            keys: Of the trials; all if None.
        """
        return self.rows if keys is None else self.rows[self.rows["key"].isin(set(keys))].reset_index(drop=True)

    def environments(self) -> dict[str, dict[str, Any]]:
        """Return environments as ``RecordedTrials`` has them."""
        return dict(self.made_in)


def frame_of(rows: Sequence[tuple[Any, ...]]) -> "pd.DataFrame":
    """Make a table of rows.

    Args:
        rows: Their values stand in the order of ``TRIAL_COLUMNS``.
    """
    import pandas as pd  # noqa: PLC0415 (a writer of trials does without)

    table = pd.DataFrame(rows, columns=TRIAL_COLUMNS)
    return table.astype(dict.fromkeys(MEASURED, float))

"""The leaderboard's records: one typed entry per cell, numbers as numbers, enough to rebuild every table."""

import hashlib
import json
from collections.abc import Iterable
from functools import cached_property
from importlib import resources
from typing import Any, Literal, Self

from pydantic import Field, TypeAdapter, model_validator

from fedmjp.benchmarks.leaderboard.record import SCHEMA_VERSION, Record
from fedmjp.benchmarks.plan.trial_plan import IDENTITY, Cell
from fedmjp.defences.pipeline import Defences, Pipeline, pipeline_of
from fedmjp.errors import UnknownNameError
from fedmjp.metrics import RECOGNISABLE
from fedmjp.settings import Protocol, Reveals, Role, Setting
from fedmjp.threat import ThreatModel

# For pictures; ``fedmjp.benchmarks.leaderboard.measures`` has the metrics of all else that can be revealed.
LEAKAGE = "psnr"  # in dB against the private picture, higher reveals more; other metrics stand beside it
FLAT = 25.0  # dB that a picture's own mean colour scores, from which on recovering it says nothing of an attack

# fedmjp.benchmarks.report.legend explains each. None of them says "private": no experiment can.
Verdict = Literal[
    "leaks", "reduced", "withstood", "naive attack failed", "inconclusive", "no leak seen", "incomplete", "refused",
    "floor", "bound",
]  # fmt: skip
Origin = Literal["reproduced", "submitted"]  # here, or by a third party: never mixed, nor with what papers report
Check = Literal["recomputed", "recomputed in part", "claimed"]  # what a board did about a submitted entry


class Statistics(Record):
    """One metric over pictures, each picture with the mean over its seeds.

    ``low`` and ``high`` bound the mean (95 % percentile bootstrap over uploads); none below two uploads. ``p95`` is
    the 95th percentile towards revealing (for MSE the 5th). ``worst`` is the most revealing single trial.
    """

    mean: float
    low: float | None
    high: float | None
    median: float
    p95: float
    worst: float


class Difference(Record):
    """Paired difference of leakage, this cell minus another, over the pictures that both have, in its own unit.

    ``p_value`` is that of the two-sided Wilcoxon signed-rank test on the means of uploads; none below two uploads.
    """

    mean: float
    low: float | None
    high: float | None
    p_value: float | None = Field(ge=0, le=1)
    n: int = Field(ge=1)


class Marginal(Record):
    """Contribution of one defence among several: leakage of the cell minus that of ``twin``, the entry without it."""

    defence: str
    twin: str
    difference: Difference | None


class Share(Record):
    """Share of pictures with a 95 % Wilson interval, of as many trials as there are uploads."""

    share: float = Field(ge=0, le=1)
    low: float = Field(ge=0, le=1)
    high: float = Field(ge=0, le=1)


class Utility(Record):
    """Usefulness of the model: top-1 accuracy in percent, and the source of that number."""

    top1: float = Field(ge=0, le=100)
    source: str


class Cost(Record):
    """``attack_seconds`` per picture, on the hardware of the provenance; ``upload_bytes`` of a whole float32 update."""

    attack_seconds: float | None = Field(ge=0)
    upload_bytes: int | None = Field(ge=0)


class Provenance(Record):
    """Origin of an entry's numbers.

    ``pictures_sha256`` digests the sorted digests of the pictures; ``weights_sha256`` are those of the tensors that
    were sent; ``environments`` are versions, revision and hardware, one if all trials ran alike; times are UTC.
    ``battery`` is the name and version of the battery of attacks, where there was one.
    """

    campaign: str
    battery: str = ""
    config_sha256: str
    data: str
    pictures_sha256: str
    weights_sha256: tuple[str, ...]
    seeds: tuple[int, ...]
    environments: tuple[dict[str, Any], ...]
    first: str | None
    last: str | None


class Submitter(Record):
    """Person who answers for submitted entries."""

    name: str = Field(min_length=1)
    contact: str = Field(min_length=1)
    link: str = Field(pattern=r"^https?://\S+$")


class BoardEntry(Record):
    """One cell: the attacked model and setting, the attack, its threat model, the figures and their provenance.

    Fields of ``Cell`` mean the same here; ``defence`` is the label of ``defences``.

    - ``check`` says of a submitted entry whether its figures were computed again here; those of a board always were.
    - ``n`` counts pictures with a score, ``trials`` and ``failures`` are finished and failed ones, ``missing`` those
      not run yet.
    - ``scores`` holds each metric's value per picture, the mean over its seeds: ``metrics`` and all other figures
      follow from it.
    - ``flat`` holds the PSNR of pictures of nearly one colour: they count in no figure, ``n`` included. It is None
      where they were not recorded, and all pictures count.
    - ``together`` maps each picture with a score to the number of its upload; uploads that share a picture have one
      number. It is empty where no two pictures share one. Intervals and tests are over uploads.
    - ``exact`` is the share that is recovered with 40 dB or more.
    - ``over_floor`` compares with the grey guess, ``over_twin`` with the undefended twin: the same model, attack,
      pictures, seeds and server where clients defend nothing, in setting a. ``floor`` and ``twin`` are ids of entries.
    - ``exposed`` counts pictures that are recognisable and at least 3 dB better than the guess.

    This holds for cells that reveal pictures. Features and labels have other metrics, thresholds and guesses:
    see ``fedmjp.benchmarks.leaderboard.measures``.
    """

    schema_version: Literal[4] = SCHEMA_VERSION
    origin: Origin = "reproduced"
    submitter: Submitter | None = None
    check: Check | None = None
    id: str
    model: str
    weights: str
    defences: Defences
    defence: str
    mask_ratio: float = Field(ge=0, le=1)
    attack: str
    role: Role
    adapted: bool
    setting: Setting
    protocol: Protocol
    threat: ThreatModel
    reveals: Reveals = "pictures"
    verdict: Verdict
    reason: str
    n: int = Field(ge=0)
    trials: int = Field(ge=0)
    failures: int = Field(ge=0)
    missing: int = Field(ge=0)
    left_out: int = Field(ge=0)
    errors: tuple[str, ...] = ()
    metrics: dict[str, Statistics]
    scores: dict[str, dict[str, float]]
    flat: dict[str, float] | None = None
    together: dict[str, int] = Field(default_factory=dict)
    exact: Share | None = None
    recognisable: Share | None
    exposed: int = Field(ge=0)
    realised_ratio: float | None = Field(ge=0, le=1)
    over_floor: Difference | None
    over_twin: Difference | None
    floor: str | None
    twin: str | None
    marginal: tuple[Marginal, ...] = ()
    utility: Utility | None
    cost: Cost
    caveat: str | None = None
    provenance: Provenance

    @model_validator(mode="after")
    def _labelled_as_configured(self) -> Self:
        if self.defence != self.pipeline.label:
            raise ValueError(f"defence is {self.defence!r}, but its defences make {self.pipeline.label!r}")
        return self

    @property
    def pipeline(self) -> Pipeline:
        """Return the defences as a pipeline, in order."""
        return pipeline_of(self.defences)

    @property
    def uploads(self) -> int:
        """Count the uploads that the pictures with a score were behind."""
        return len(set(self.together.values())) or self.n

    @property
    def server(self) -> ThreatModel:
        """Return the threat model without defences, by which cells of one server are grouped."""
        return self.threat.undefended

    @property
    def cell(self) -> Cell:
        """Return the cell that this entry describes."""
        return Cell(**{name: getattr(self, name) for name in IDENTITY})


def entry_id(cell: Cell, campaign: str, pictures_sha256: str, origin: Origin) -> str:
    """Derive an entry's id, the same for the same cell on the same pictures whatever its figures.

    Args:
        cell: The cell.
        campaign: Name of the campaign.
        pictures_sha256: Digest of the pictures.
        origin: Whether it was measured here or submitted.

    Returns:
        Sixteen hexadecimal digits.
    """
    configured = {"threat": cell.threat.digest(), "defences": [config.text for config in cell.defences]}
    identity = cell.identity | configured | {"campaign": campaign, "pictures": pictures_sha256, "origin": origin}
    if cell.reveals == "pictures":
        del identity["reveals"]  # ids are older than this field
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def entry_id_of(cell: Cell, provenance: Provenance, submitter: Submitter | None) -> str:
    """Derive the id of an entry: those of third parties differ from ours and from each other.

    Args:
        cell: The cell.
        provenance: Names the campaign and the pictures.
        submitter: Who submitted it; None for an entry that was measured here.
    """
    if submitter is None:
        return entry_id(cell, provenance.campaign, provenance.pictures_sha256, "reproduced")
    return entry_id(cell, f"{submitter.name} {provenance.campaign}", provenance.pictures_sha256, "submitted")


class Claim(Record):
    """A submitted entry's own figures, which the board did not compute again, or not all of them.

    They have no verdict and no rank. ``exact`` counts the pictures recovered exactly of ``n``, ``middle`` is the median
    PSNR in dB or the mean share of the leakage; None without a score. ``reason`` says why the board did not compute
    more, or what it computed.
    """

    submitter: Submitter
    check: Check
    reason: str
    model: str
    defence: str
    attack: str
    setting: Setting
    server: str
    reveals: Reveals
    n: int = Field(ge=0)
    exact: int = Field(ge=0)
    middle: float | None


class Standing(Record):
    """A model with its defences before one server and in one setting, judged by the strongest attack of a kind.

    ``rank`` 1 leaks least; none where the verdict forbids ranking (inconclusive, incomplete, refused), and for a third
    party's, unless it was recomputed on all pictures of the board. ``strongest`` is the attack that decided and
    ``entry`` the id of its cell; ``attacks`` counts those that ran; ``adapted``: one of them takes the defence into
    account.
    """

    rank: int | None
    origin: Origin
    threat: ThreatModel
    setting: Setting
    protocol: Protocol
    reveals: Reveals = "pictures"
    model: str
    weights: str
    defences: Defences
    defence: str
    mask_ratio: float
    strongest: str
    entry: str
    attacks: int
    adapted: bool
    verdict: Verdict
    reason: str

    @property
    def server(self) -> ThreatModel:
        """Return the threat model without defences."""
        return self.threat.undefended


class ReportedRow(Record):
    """One row of a paper's table, as printed there; never mixed with what was measured here."""

    source: str
    row: str
    model: str
    defence: str
    setting: Setting
    attack: str
    n: int
    top1: float | None
    metrics: dict[str, float]
    compares_with: str | None = Field(description="model of ours that comes nearest; none if there is none")
    differs: str


_REPORTED = TypeAdapter(tuple[ReportedRow, ...])


def read_reported(names: Iterable[str]) -> tuple[ReportedRow, ...]:
    """Read the rows of papers' tables.

    Args:
        names: Names of tables, such as ``mjp_table5``.

    Raises:
        UnknownNameError: If there is no such table.
    """
    folder = resources.files(__package__).joinpath("reported")
    tables = {file.name.removesuffix(".json"): file for file in folder.iterdir()}
    rows: list[ReportedRow] = []
    for name in names:
        if name not in tables:
            raise UnknownNameError("reported table", name, tables)
        rows += _REPORTED.validate_json(tables[name].read_bytes())
    return tuple(rows)


class Board(Record):
    """A whole leaderboard, in the order in which it is shown; ``about`` is the manifest."""

    schema_version: Literal[4] = SCHEMA_VERSION
    name: str
    title: str
    question: str
    recognisable_at: float = RECOGNISABLE
    metrics: tuple[str, ...]
    entries: tuple[BoardEntry, ...]
    standings: tuple[Standing, ...]
    claims: tuple[Claim, ...] = ()
    reported: tuple[ReportedRow, ...]
    notes: tuple[str, ...]
    about: dict[str, Any]

    @property
    def reproduced(self) -> "Board":
        """Return the part of the board that was measured here, without any third party's entries."""
        return self.model_copy(
            update={
                "entries": tuple(entry for entry in self.entries if entry.origin == "reproduced"),
                "standings": tuple(standing for standing in self.standings if standing.origin == "reproduced"),
                "claims": (),
            }
        )

    def revealing(self, *kinds: Reveals) -> "Board":
        """Return the part of the board about attacks that reveal certain things.

        Args:
            kinds: The kinds of things.
        """
        return self.model_copy(
            update={
                "entries": tuple(entry for entry in self.entries if entry.reveals in kinds),
                "standings": tuple(standing for standing in self.standings if standing.reveals in kinds),
            }
        )

    @cached_property
    def by_id(self) -> dict[str | None, BoardEntry]:
        """Map the id of each entry to it, to look up floors and twins."""
        return {entry.id: entry for entry in self.entries}

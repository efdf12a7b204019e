"""Cells of an experiment: what one row of the leaderboard stands for."""

from dataclasses import dataclass
from typing import Any

from fedmjp.attacks import Reveals, Role
from fedmjp.defences.pipeline import Defences, Pipeline, pipeline_of
from fedmjp.metrics.protocol import Protocol
from fedmjp.settings import Setting
from fedmjp.threat import ThreatModel


@dataclass(frozen=True)
class Cell:
    """What one row of the leaderboard stands for.

    ``mask_ratio`` is the share of patches that were to be shuffled or masked in what went into the gradient.
    ``weights`` is "untrained" or the SHA-256 of the checkpoint. ``attack`` is the label, options included; what it
    ``reveals`` says what a cell is scored by.
    """

    model: str
    weights: str
    defences: Defences
    mask_ratio: float
    attack: str
    role: Role
    setting: Setting
    protocol: Protocol
    threat: ThreatModel
    reveals: Reveals = "pictures"

    @property
    def pipeline(self) -> Pipeline:
        """The defences themselves, in order."""
        return pipeline_of(self.defences)

    @property
    def defence(self) -> str:
        """The pipeline's label."""
        return self.pipeline.label

    @property
    def columns(self) -> dict[str, Any]:
        """What a trial's row says of it."""
        names = ("model", "defence", "mask_ratio", "attack", "protocol")
        return {"setting": str(self.setting), **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True)
class PlannedCell:
    """A cell, and what is known of it before anything is run.

    ``refusal`` says why the attack does not apply: such a cell has no trials and stays in every table.
    ``left_out`` counts pictures that are not attacked because the attack's own prior was made of them.
    ``adapted`` says whether the attack takes the cell's defence into account. ``caveat`` is what its
    scores must not be read without. ``upload_bytes`` is the size of one whole float32 update.
    """

    cell: Cell
    refusal: str | None
    left_out: int
    adapted: bool
    caveat: str | None
    upload_bytes: int

"""Cells of a plan: what one row of the leaderboard stands for, and what is known of it before anything is run."""

from dataclasses import dataclass, field, fields
from typing import Any

from fedmjp.defences.pipeline import Defences, Pipeline, pipeline_of
from fedmjp.settings import Protocol, Reveals, Role, Setting
from fedmjp.threat import ThreatModel


@dataclass(frozen=True)
class Cell:
    """What one row of the leaderboard stands for, and what is known of it before anything is run.

    Cells are the same where their first fields are (``identity``): ``refusal`` and what follows only describes them.

    Attributes:
        model: Name of the architecture.
        weights: "untrained", or the SHA-256 of the checkpoint.
        defences: Of the clients, in order.
        mask_ratio: Share of patches that were to be shuffled or masked in what went into the gradient.
        attack: Its label, options included.
        role: Attack, floor or bound.
        setting: Which picture is attacked, and which it is compared with.
        protocol: In which precision pictures are scored.
        threat: What the server sees.
        reveals: What the cell is scored by: pictures, features or labels.
        refusal: Why the attack does not apply: such a cell has no trials and stays in every table.
        left_out: Number of pictures that are not attacked because the attack's own prior was made of them.
        adapted: Whether the attack takes the cell's defences into account.
        caveat: What its scores must not be read without.
        upload_bytes: Size of one whole float32 update.
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
    refusal: str | None = field(default=None, compare=False)
    left_out: int = field(default=0, compare=False)
    adapted: bool = field(default=False, compare=False)
    caveat: str | None = field(default=None, compare=False)
    upload_bytes: int = field(default=0, compare=False)

    @property
    def identity(self) -> dict[str, Any]:
        """Return the fields that make two cells the same."""
        return {name: getattr(self, name) for name in IDENTITY}

    @property
    def pipeline(self) -> Pipeline:
        """Return the defences themselves, in order."""
        return pipeline_of(self.defences)

    @property
    def defence(self) -> str:
        """Return the label of the defences."""
        return self.pipeline.label

    @property
    def columns(self) -> dict[str, Any]:
        """Return what the row of a trial says of its cell."""
        names = ("model", "defence", "mask_ratio", "attack", "protocol")
        return {"setting": str(self.setting), **{name: getattr(self, name) for name in names}}


IDENTITY = tuple(field.name for field in fields(Cell) if field.compare)

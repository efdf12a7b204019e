"""Which cells a cell is held against: the guess, and the same attack where clients do less to defend themselves."""

from collections.abc import Sequence
from operator import eq
from typing import Any

from fedmjp.benchmarks.leaderboard.listing import grouped
from fedmjp.benchmarks.leaderboard.measures import MEASURES
from fedmjp.benchmarks.plan.cells import Cell
from fedmjp.defences.pipeline import Defences, pipeline_of
from fedmjp.settings import Picture, Setting

_UPLOAD = ("model", "weights", "defences", "mask_ratio", "setting", "threat")


class Pairs:
    """What each cell of a board or a submission is held against among the others.

    A defended model may have a checkpoint of its own. Its twin is then the cell of the model's name, if there is
    exactly one.
    """

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._floors = [cell for cell in cells if cell.role == "floor"]
        self._on_upload = grouped(self._floors, _upload)  # a board of thousands of cells is too long to search
        self._alike = grouped(cells, lambda cell: _key(cell, cell.defences))

    def floor(self, cell: Cell) -> Cell | None:
        """The guess at the same pictures; none for a guess itself.

        A guess uses nothing of the upload, so one serves all models, defences and threat models. It has to
        be held against the same version of the pictures, and to reveal what the attack does. The one whose cell is
        most alike is taken.
        """
        if cell.role == "floor":
            return None
        alike = [other for other in self._on_upload.get(_upload(cell), []) if _same_target(cell, other)]
        floors = alike or [other for other in self._floors if _same_target(cell, other)]
        return max(floors, key=lambda other: sum(map(eq, _upload(cell), _upload(other))), default=None)

    def twin(self, cell: Cell) -> Cell | None:
        """The same attack on the same uploads where clients do nothing to defend themselves, in setting a."""
        return self._with(cell, ()) if cell.defences else None

    def without_each(self, cell: Cell) -> dict[str, Cell]:
        """Of several defences, the same cell without one of them, by that one's label; those that are there."""
        if len(cell.defences) < 2:
            return {}
        twins = {
            config.label: self._with(cell, tuple(other for other in cell.defences if other is not config))
            for config in cell.defences
        }
        return {label: twin for label, twin in twins.items() if twin is not None}

    def _with(self, cell: Cell, defences: Defences) -> Cell | None:
        twins = self._alike.get(_key(cell, defences), [])
        same = [other for other in twins if other.weights == cell.weights]
        candidates = same or twins
        return candidates[0] if len(candidates) == 1 else None


def _upload(cell: Cell) -> tuple[Any, ...]:
    return tuple(getattr(cell, name) for name in _UPLOAD)


def _key(cell: Cell, defences: Defences) -> tuple[Any, ...]:
    """What the same cell with only some of its defences agrees in, weights aside."""
    done = tuple(config for config in cell.threat.defences if config in defences)
    threat = cell.threat.model_copy(update={"defences": done})
    # Where what is left does not shuffle, the picture itself goes into the network, and is what is compared with.
    shuffled = pipeline_of(defences).shuffles
    setting = cell.setting if shuffled or defences == cell.defences else Setting.A
    return cell.model, cell.attack, cell.protocol, threat, defences, setting


def _same_target(cell: Cell, other: Cell) -> bool:
    versions = {side.setting.compared_with for side in (cell, other)}
    shuffled_alike = versions == {Picture.CLEAN} or cell.mask_ratio == other.mask_ratio
    revealed = other.reveals in MEASURES[cell.reveals].guesses
    return revealed and len(versions) == 1 and shuffled_alike and cell.protocol == other.protocol

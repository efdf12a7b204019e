"""Which cells a cell is held against: the guess, and the same attack on the undefended model."""

from collections.abc import Sequence

from benchmarks.plan.experiment import Cell
from fedmjp.settings import Picture, Setting

_UPLOAD = ("model", "weights", "defence", "mask_ratio", "setting", "threat")
_SAME_ATTACK = ("model", "attack", "protocol", "threat")


def is_control(cell: Cell) -> bool:
    """Whether nothing protects the pictures: no defence, and nothing shuffled."""
    return cell.defence == "none" and cell.setting is Setting.A


def floor_of(cell: Cell, cells: Sequence[Cell]) -> Cell | None:
    """The guess at the same pictures; none for a guess itself.

    A guess uses nothing of the upload, so one serves all models, defences and threat models. It has to
    be held against the same version of the pictures. The one whose cell is most alike is taken.
    """
    if cell.role == "floor":
        return None
    floors = [other for other in cells if other.role == "floor" and _same_target(cell, other)]
    return max(floors, key=lambda other: sum(getattr(cell, f) == getattr(other, f) for f in _UPLOAD), default=None)


def twin_of(cell: Cell, cells: Sequence[Cell]) -> Cell | None:
    """The same attack on the undefended model in setting a.

    A defended model may have a checkpoint of its own. The twin is then the undefended cell of the
    model's name, if there is exactly one.
    """
    if cell.role == "floor" or is_control(cell):
        return None
    twins = [other for other in cells if is_control(other) and _alike(cell, other, _SAME_ATTACK)]
    same = [other for other in twins if other.weights == cell.weights]
    found = same or twins
    return found[0] if len(found) == 1 else None


def _same_target(cell: Cell, other: Cell) -> bool:
    versions = {each.setting.compared_with for each in (cell, other)}
    shuffled_alike = versions == {Picture.CLEAN} or cell.mask_ratio == other.mask_ratio
    return len(versions) == 1 and shuffled_alike and cell.protocol == other.protocol


def _alike(cell: Cell, other: Cell, fields: Sequence[str]) -> bool:
    return all(getattr(cell, field) == getattr(other, field) for field in fields)

"""References of a cell: the guess, and the same attack where clients defend themselves less."""

from collections.abc import Sequence
from operator import eq
from typing import Any

from fedmjp.benchmarks.leaderboard.listing import grouped
from fedmjp.benchmarks.leaderboard.measures import MEASURES
from fedmjp.benchmarks.plan.trial_plan import Cell
from fedmjp.defences.pipeline import Defences, pipeline_of
from fedmjp.settings import Picture, Setting

_UPLOAD = ("model", "weights", "defences", "mask_ratio", "setting", "threat")


class Pairs:
    """References of each cell of a board or a submission.

    A defended model may have a checkpoint of its own. Its twin is then the cell of the model's name, if there is
    exactly one.
    """

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._floors = [cell for cell in cells if cell.role == "floor"]
        self._on_upload = grouped(self._floors, _upload)  # a board of thousands of cells is too long to search
        self._by_key = grouped(cells, lambda cell: _key(cell, cell.defences))

    def floor(self, cell: Cell) -> Cell | None:
        """Return the guess at the same pictures.

        A guess uses nothing of the upload, so one serves all models, defences and threat models. It has to be compared
        with the same version of the pictures, and to reveal what the attack does. The one whose cell is most similar is
        taken.

        Args:
            cell: A cell of these.

        Returns:
            The cell of the guess; None for a guess itself, or where there is none.
        """
        if cell.role == "floor":
            return None
        same_upload = [
            candidate for candidate in self._on_upload.get(_upload(cell), []) if _same_target(cell, candidate)
        ]
        floors = same_upload or [candidate for candidate in self._floors if _same_target(cell, candidate)]
        return max(floors, key=lambda candidate: sum(map(eq, _upload(cell), _upload(candidate))), default=None)

    def twin(self, cell: Cell) -> Cell | None:
        """Return the same attack on the same uploads where clients defend nothing, in setting a.

        Args:
            cell: A cell of these; one without defences has no twin.
        """
        return self._with(cell, ()) if cell.defences else None

    def without_each(self, cell: Cell) -> dict[str, Cell]:
        """Map the label of each of several defences to the same cell without that defence.

        Args:
            cell: A cell of these.

        Returns:
            The cells that exist; none for a cell of fewer than two defences.
        """
        if len(cell.defences) < 2:
            return {}
        twins = {
            config.label: self._with(cell, tuple(defence for defence in cell.defences if defence is not config))
            for config in cell.defences
        }
        return {label: twin for label, twin in twins.items() if twin is not None}

    def _with(self, cell: Cell, defences: Defences) -> Cell | None:
        twins = self._by_key.get(_key(cell, defences), [])
        same = [twin for twin in twins if twin.weights == cell.weights]
        candidates = same or twins
        return candidates[0] if len(candidates) == 1 else None


def _upload(cell: Cell) -> tuple[Any, ...]:
    return tuple(getattr(cell, name) for name in _UPLOAD)


def _key(cell: Cell, defences: Defences) -> tuple[Any, ...]:
    """Return the fields, weights aside, that a cell shares with itself under only some of its defences."""
    upload_defences = tuple(config for config in cell.threat.defences if config in defences)
    threat = cell.threat.model_copy(update={"defences": upload_defences})
    # If the remaining defences do not shuffle, the network gets the picture itself, and the attack is compared with it.
    shuffled = pipeline_of(defences).shuffles
    setting = cell.setting if shuffled or defences == cell.defences else Setting.A
    return cell.model, cell.attack, cell.protocol, threat, defences, setting


def _same_target(cell: Cell, guess: Cell) -> bool:
    versions = {side.setting.compared_with for side in (cell, guess)}
    shuffled_alike = versions == {Picture.CLEAN} or cell.mask_ratio == guess.mask_ratio
    revealed = guess.reveals in MEASURES[cell.reveals].guesses
    return revealed and len(versions) == 1 and shuffled_alike and cell.protocol == guess.protocol

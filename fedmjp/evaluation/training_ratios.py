"""Table 3's arrangement: trainings that differ in their mask ratio alone, side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedmjp.evaluation.figures import Line

DEFENCES, RATIO = "defences", "mask_ratio"


@dataclass(frozen=True)
class Family:
    """Trainings with a jigsaw that differ in its mask ratio alone, and what they have in common, in words."""

    name: str
    trained_with: Sequence[float]  # ascending; one without a jigsaw has 0
    lines: Mapping[float, Sequence[Line]]  # in that order, by the ratio of x~


def families(lines: Sequence[Line]) -> list[Family]:
    """Those with two trainings or more."""
    shared: dict[str, dict[str, Any]] = {}
    for line in lines:
        settings = {key: value for key, value in line.example.settings.items() if key != RATIO}
        if line.example.settings.get(RATIO) and settings not in shared.values():
            shared[_name(line)] = settings
    found = [_family(name, settings, lines) for name, settings in shared.items()]
    return [family for family in found if len(family.trained_with) > 1]


def _name(line: Line) -> str:
    """Its kind without the mask ratio."""
    ratio = f" {line.example.settings[RATIO]:g}"
    return str(replace(line.kind, defence=line.kind.defence.replace(ratio, "", 1)))


def _family(name: str, settings: Mapping[str, Any], lines: Sequence[Line]) -> Family:
    placed = [(ratio, line) for line in lines if (ratio := _trained_with(line, settings)) is not None]
    placed.sort(key=lambda each: each[0])
    by_ratio = {
        ratio: [line for _, line in placed if line.ratio == ratio] for ratio in sorted({line.ratio for line in lines})
    }
    return Family(name, list(dict.fromkeys(ratio for ratio, _ in placed)), by_ratio)


def _trained_with(line: Line, shared: Mapping[str, Any]) -> float | None:
    """The mask ratio that a model was trained with; None if more than that sets it apart from the family."""
    own = dict(line.example.settings)
    ratio = own.pop(RATIO, None)
    if not own.get(DEFENCES):
        ratio, own = 0.0, own | {DEFENCES: shared[DEFENCES]}
    return ratio if own == shared else None

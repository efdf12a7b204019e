"""The rows of MJP's Tables 1, 3 and 4 as training configurations, with what the paper reports of them.

Ren et al., "Masked Jigsaw Puzzle: A Versatile Position Embedding for Vision Transformers", CVPR 2023. All of them
were trained on ImageNet-1K at 224 x 224 for 300 epochs with the recipe of its Table 7, the defaults of
``Recipe`` (its code trains Swin-T with drop path 0.2 instead of 0.1).

What the paper leaves open, or where it contradicts itself:

- The ratio of the x~ behind Diff. Norm. and Consistency is missing in our copy of its text (section 5.1, "we use
  ... to create"), and no table states it; the official ``consistency.py`` has 0.5. It is not 0.27, or the x~ are
  others: of DeiT-S 79.8 % are right on x and 64.3 % of the predictions stay the same, so at least
  79.8 - 35.7 = 44.1 % are right on x~; Table 5, whose x~ have 0.27, reports 36.0 %.
- Tables 1 and 3 report 16.21 and 16.56 as Diff. Norm. of what seems to be the same DeiT-S. Table 3's column 0 has the
  accuracy and the consistency of Table 4's row D (80.0, 64.0), not those of row A (79.8, 64.3): it was trained with
  DAL and without a puzzle, and is taken as that here.
- Rows E to J of Table 4 do not say their mask ratio. J has the figures of Table 3's column 0.03, so 0.03 is
  taken for all of them. So it is for the MJP rows of Table 1: that of DeiT-S is the same again.
- "Increases from 3 % to 27 %, further increasing ..." (section 5.3) speaks of ratios that Table 3 does not have.
- Whether DAL was used with Swin-T is not said; section 4.2 has it "for all experiments".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedmjp.config import ModelConfig
from fedmjp.defences.pipeline import Pipeline
from fedmjp.errors import UnknownNameError
from fedmjp.training.config import TrainingConfig

PAPER = "Ren et al., CVPR 2023"
SETTING = "ImageNet-1K, 224 x 224, 300 epochs"
SHUFFLED_RATIO = 0.27  # of Table 5's x~


@dataclass(frozen=True)
class Reported:
    """Figures that a paper prints, with table and row; accuracies and consistency in per cent."""

    source: str
    top1: float  # on x
    difference: float | None = None  # Diff. Norm., of x~ with an unknown mask ratio
    consistency: float | None = None  # of the same x~
    top1_shuffled: float | None = None  # on x~ of mask ratio ``SHUFFLED_RATIO``, from Table 5


@dataclass(frozen=True)
class Row:
    """A row of a table: keys of ``ModelConfig``, defences as the command line takes them, what the paper reports."""

    name: str
    model: Mapping[str, Any]
    defences: Sequence[str]
    reported: Reported

    @property
    def values(self) -> dict[str, Any]:
        """Return the row as keys of ``TrainingConfig``."""
        return {"model": dict(self.model), "defences": list(self.defences)}


_NONE: Sequence[str] = ()
_JIGSAW = ("jigsaw:mask_ratio=0.03",)
_MJP = ("mjp:mask_ratio=0.03",)
_DEIT = {"name": "deit_small"}
_SWIN = {"name": "swin_tiny", "patch_size": 4}
_DAL = {"localisation": "nonlinear"}


def _table1(name: str, model: Mapping[str, Any], defences: Sequence[str], *figures: float) -> Row:
    return Row(f"table1-{name}", model, defences, Reported(f"MJP, Table 1, {name}", *figures))


def _table3(ratio: float, *figures: float) -> Row:
    reported = Reported(f"MJP, Table 3, {ratio:g}", *figures)
    if not ratio:
        return Row("table3-0", {**_DEIT, **_DAL}, _NONE, reported)
    return Row(f"table3-{ratio:g}", {**_DEIT, **_DAL}, (f"mjp:mask_ratio={ratio}",), reported)


def _table4(letter: str, changes: Mapping[str, Any], defences: Sequence[str], top1: float, consistency: float) -> Row:
    reported = Reported(f"MJP, Table 4, {letter}", top1, consistency=consistency)
    return Row(f"table4-{letter}", {**_DEIT, **changes}, defences, reported)


# In this order: the first row that a run corresponds to has most figures.
_ROWS = (
    _table1("resnet50", {"name": "resnet50"}, _NONE, 79.3, 11.77, 51.5),
    _table1("resnet50-mjp", {"name": "resnet50"}, _JIGSAW, 79.4, 7.11, 69.3),
    _table1("deit_small", _DEIT, _NONE, 79.8, 16.21, 64.3, 36.0),
    _table1("deit_small-mjp", {**_DEIT, **_DAL}, _MJP, 80.5, 8.96, 82.9, 62.9),
    _table1("swin_tiny", _SWIN, _NONE, 81.3, 15.49, 41.5),
    _table1("swin_tiny-mjp", {**_SWIN, **_DAL}, _MJP, 81.3, 12.36, 66.9),
    _table3(0, 80.0, 16.56, 64.0),
    _table3(0.03, 80.5, 8.96, 82.9),
    _table3(0.09, 80.3, 6.36, 88.1),
    _table3(0.15, 80.4, 5.23, 90.5),
    _table3(0.21, 80.2, 4.39, 92.3),
    _table3(0.27, 80.3, 3.97, 93.1),
    _table4("A", {}, _NONE, 79.8, 64.3),
    _table4("B", {"name": "deit_small_without_positions"}, _NONE, 77.5, 100.0),
    _table4("C", {}, ("pixels",), 74.9, 74.8),
    _table4("D", _DAL, _NONE, 80.0, 64.0),
    _table4("E", {}, _JIGSAW, 79.2, 73.8),
    _table4("F", {"index_embedding": True}, _JIGSAW, 79.9, 79.6),
    _table4("G", {}, _MJP, 80.1, 83.8),
    _table4("H", {"localisation": "pca"}, _MJP, 79.9, 83.4),
    _table4("I", {"localisation": "linear"}, _MJP, 80.0, 83.8),
    _table4("J", _DAL, _MJP, 80.5, 82.9),
)
ROWS: Mapping[str, Row] = {published.name: published for published in _ROWS}


def row(name: str) -> Row:
    """Look up a row.

    Args:
        name: Such as ``table1-deit_small-mjp`` or ``table4-J``.

    Raises:
        UnknownNameError: If there is no such row.
    """
    if name not in ROWS:
        raise UnknownNameError("row", name, ROWS)
    return ROWS[name]


def reported(network: ModelConfig, pipeline: Pipeline | None) -> Reported | None:
    """Find what the paper reports of a model that was trained like this; None if nothing.

    Data, picture size and recipe are not compared: a run may have others than ``SETTING``.

    Args:
        network: The model, with what defences add to it.
        pipeline: The defences; None, if unknown, finds the first row of such a network.
    """
    for published in _ROWS:
        config = TrainingConfig.parse(published.values)
        same = _network(config.network) == _network(network)
        if same and (pipeline is None or _defences(config.pipeline) == _defences(pipeline)):
            return published.reported
    return None


def _network(model: ModelConfig) -> tuple[object, ...]:
    return model.name, model.unknown_embedding, model.index_embedding, model.localisation


def _defences(pipeline: Pipeline) -> list[dict[str, object]]:
    return [{"name": defence.name, **defence.options.model_dump()} for defence in pipeline.defences]

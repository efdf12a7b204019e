"""The plot of leakage against uploads per picture."""

import numpy as np
import pytest

from fedmjp.benchmarks.leaderboard.entries import Board, BoardEntry, Standing
from fedmjp.benchmarks.report.curves import plot_upload_counts
from fedmjp.benchmarks.report.plots import plots
from fedmjp.settings import Setting
from fedmjp.threat import ThreatModel
from tests.sample_board import sample_board, sample_entry

COUNTS = (1, 2, 4)
RATIOS = (0.1, 0.5)


def entry_of(count: int, ratio: float, values: list[float], **changes: object) -> BoardEntry:
    given = {
        "id": f"{count}-{ratio}", "model": "deit_tiny", "weights": "untrained",
        "defences": f"mjp:mask_ratio={ratio}", "attack": "mjp_intersection", "role": "attack",
        "setting": Setting.C, "verdict": "leaks", "reason": "", "threat": ThreatModel(uploads_per_picture=count),
        "values": np.array(values),
    }  # fmt: skip
    return sample_entry(**given | changes)


def board_of(entries: list[BoardEntry]) -> Board:
    shared = (
        "origin", "threat", "setting", "protocol", "model", "weights", "defences", "defence", "mask_ratio",
        "verdict", "reason",
    )  # fmt: skip
    standings = tuple(
        Standing(
            rank=1,
            strongest=each.attack,
            entry=each.id,
            attacks=1,
            adapted=True,
            **{name: getattr(each, name) for name in shared},
        )
        for each in entries
    )
    return sample_board(models=[], extra=entries).model_copy(update={"standings": standings})


@pytest.fixture
def entries() -> list[BoardEntry]:
    return [
        entry_of(count, ratio, [10.0 * count + place for place in range(5)]) for count in COUNTS for ratio in RATIOS
    ]


def test_a_line_per_ratio_shows_the_median_over_pictures(entries: list[BoardEntry]) -> None:
    (plot,) = plot_upload_counts(board_of(entries))
    axes = plot.figure.axes[0]
    lines = [line for line in axes.lines if len(line.get_xdata()) == len(COUNTS)]
    assert len(lines) == len(RATIOS)
    for line in lines:
        assert list(line.get_xdata()) == list(COUNTS)
        assert list(line.get_ydata()) == [10.0 * count + 2 for count in COUNTS]
    assert plot.server is None
    assert "with mjp, against" in plot.caption


def test_it_stands_before_the_plots_of_single_threat_models(entries: list[BoardEntry]) -> None:
    assert plots(board_of(entries))[0].name == "uploads-per-picture-1"


def test_other_settings_and_undefended_models_are_left_out(entries: list[BoardEntry]) -> None:
    others = [each.model_copy(update={"setting": Setting.B, "id": f"b{each.id}"}) for each in entries]
    undefended = [each.model_copy(update={"defences": (), "defence": "none", "id": f"n{each.id}"}) for each in entries]
    unshuffled = [entry_of(count, 0.5, [9.0] * 5, defences="mjp:shuffle=False", setting=Setting.A) for count in COUNTS]
    assert plot_upload_counts(board_of([*others, *undefended, *unshuffled])) == []


def test_defences_that_shuffle_nothing_have_a_figure_of_their_own(entries: list[BoardEntry]) -> None:
    noised = [
        entry_of(count, 0, [5.0 * count] * 5, defences="gaussian", setting=Setting.A, id=f"g{count}")
        for count in COUNTS
    ]
    first, second = plot_upload_counts(board_of([*entries, *noised]))
    assert ("with mjp, against" in first.caption, "with gaussian, against" in second.caption) == (True, True)


def test_two_numbers_of_uploads_make_no_line(entries: list[BoardEntry]) -> None:
    assert plot_upload_counts(board_of([each for each in entries if each.threat.uploads_per_picture < 4])) == []


def test_a_line_is_of_one_attack(entries: list[BoardEntry]) -> None:
    once = [entry_of(1, ratio, [99.0] * 5, attack="mjp_span", id=f"span-{ratio}") for ratio in RATIOS]
    (plot,) = plot_upload_counts(board_of([*once, *entries]))
    assert max(max(line.get_ydata()) for line in plot.figure.axes[0].lines if len(line.get_xdata()) == 3) < 60

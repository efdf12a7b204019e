"""`fedmjp compare`: one line per run, from what the run itself wrote down."""

import sys
from pathlib import Path

import pandas as pd
import pytest

from fedmjp.cli import main
from fedmjp.evaluation.plots import draw_convergence, read_history

RUNS = Path(__file__).parents[1] / "results" / "learning" / "runs"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["fedmjp", "compare", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_lines_are_the_runs_own_histories() -> None:
    names = ("central30-none-0", "central30-mjp-0")
    (axes,) = draw_convergence({name: read_history(RUNS / name) for name in names}).axes
    for line, name in zip(axes.get_lines(), names, strict=True):
        written = pd.read_csv(RUNS / name / "history.csv")
        assert line.get_xdata().tolist() == written["epoch"].tolist()
        assert line.get_ydata().tolist() == pytest.approx((100 * written["top1"]).tolist())
        assert line.get_label() == name


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_figure_is_where_it_was_asked_for(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = tmp_path / "new" / f"figure{suffix}"
    assert run(monkeypatch, RUNS / "iid-none-0", RUNS / "iid-mjp-0", "--output", figure) == 0
    assert figure.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")
    best = 100 * pd.read_csv(RUNS / "iid-mjp-0" / "history.csv")["top1"].max()
    assert f"{best:.1f} % at best" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([RUNS / "iid-none-0", RUNS / "central-none-0"], "compare runs that count the same"),
        ([RUNS / "nothing"], "there is no folder"),
        ([RUNS], "name the folder of a training run"),
        ([RUNS / "iid-none-0", "--output", "figure.pdf"], "ends in .png or .svg"),
    ],
    ids=["epochs and rounds", "no folder", "no run", "no figure"],
)
def test_what_cannot_be_compared_is_told_in_one_line(
    arguments: list[object], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *arguments) == 2
    told = capsys.readouterr().err
    assert said in " ".join(told.split())
    assert "Traceback" not in told

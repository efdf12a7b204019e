"""What defences change in training, over seeds: from the table that ``fedmjp evaluate`` leaves of several runs.

``python results/learning/seeds.py --evaluation FOLDER``

Runs of one seed meet the same pictures in the same order, so that they are compared seed by seed. Intervals are
Student's over the seeds: of as many trainings as there are, on the same validation pictures.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer
from rich.console import Console
from scipy import stats

from fedmjp.benchmarks.folder.output import write_text
from fedmjp.errors import BadInputError
from fedmjp.running import run_function

MEASURES = {"top1": "Top-1 %", "difference": "Diff. Norm.", "consistency": "Consistency %"}
DIGITS = {"top1": 1, "difference": 3, "consistency": 1}
NONE, CONFIDENCE = "none", 0.95


def main(
    evaluation: Annotated[Path, typer.Option(help="Folder of evaluation.csv; seeds.md goes there.", metavar="FOLDER")],
) -> None:
    """Print each defence's means over seeds and differences to no defence, with intervals."""
    rows = pd.read_csv(evaluation / "evaluation.csv")
    tables = [table(same).assign(ratio=ratio) for ratio, same in rows.groupby("mask_ratio")]
    found = pd.concat(tables).to_markdown(index=False)
    write_text(evaluation / "seeds.md", f"{found}\n")
    Console().print(found, highlight=False, markup=False, soft_wrap=True)


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """Build a line per training and defence; what was trained once is left out.

    Args:
        rows: A run each, at one mask ratio.

    Raises:
        BadInputError: If a defence has other seeds than no defence, or nothing was trained twice.
    """
    lines = []
    for (training, defence), runs in rows.groupby(["training", "defence"], sort=False):
        if len(runs) == 1:
            continue
        line = {"training": training, "defence": defence, "seeds": len(runs)}
        without = rows[(rows["training"] == training) & (rows["defence"] == NONE)].set_index("seed")
        runs = runs.set_index("seed")
        if sorted(runs.index) != sorted(without.index):
            raise BadInputError(
                f"{training}, {defence} has the seeds {sorted(runs.index)}, without a defence {sorted(without.index)}: "
                "evaluate runs of the same seeds"
            )
        for measure, name in MEASURES.items():
            digits = DIGITS[measure]
            line[name] = _interval(runs[measure].to_numpy(), digits)
            if defence != NONE:
                apart = (runs[measure] - without[measure]).to_numpy()
                line[f"{name}, against none"] = _interval(apart, digits, sign="+")
        lines.append(line)
    if not lines:
        raise BadInputError("no training has two seeds, of which an interval could be told: evaluate more runs")
    return pd.DataFrame(lines).fillna("")


def _interval(values: np.ndarray, digits: int, sign: str = "") -> str:
    mean = float(values.mean())
    half = float(stats.sem(values) * stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    return f"{mean:{sign}.{digits}f} ({mean - half:{sign}.{digits}f} to {mean + half:{sign}.{digits}f})"


if __name__ == "__main__":
    run_function(main)

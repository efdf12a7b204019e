"""Kill processes of a case for long: ``python -m tests.faults CASE --kills 50 --output DIR``."""

from pathlib import Path
from typing import Annotated

import typer

from fedmjp.benchmarks.scripts import keep_table
from fedmjp.errors import UnknownNameError
from fedmjp.running import run_function
from tests.faults.cases import CASES
from tests.faults.harness import play

HELD = "the results are the same to the last bit, and no process is left"


def main(
    case: Annotated[str, typer.Argument(help=f"One of {', '.join(CASES)}.")],
    output: Annotated[Path, typer.Option(help="Folder for the table.", metavar="FOLDER")],
    kills: Annotated[int, typer.Option(help="Processes to kill.", min=0)] = 50,
    size: Annotated[int | None, typer.Option(help="Rounds, or draws of weights, of a run.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Of moments and victims.", min=0)] = 0,
) -> None:
    """Kill, and compare with an undisturbed run."""
    if case not in CASES:
        raise UnknownNameError("case", case, CASES)
    make, usual = CASES[case]
    report = play(make(size or usual), kills, seed)
    victims = report.rows["victim"].value_counts().to_dict() if len(report.rows) else {}
    about = {"kills": len(report.rows), "runs": report.runs, "size": size or usual, "seconds": report.seconds}
    keep_table(output, report.rows, {**about, "victims": victims, "wrong": report.faults})
    typer.echo(f"{len(report.rows)} kills in {report.runs} runs: {victims}")
    typer.echo("; ".join(report.faults) or HELD)
    raise typer.Exit(1 if report.faults else 0)


if __name__ == "__main__":
    run_function(main)

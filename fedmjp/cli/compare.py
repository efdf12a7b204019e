"""`fedmjp compare`."""

from pathlib import Path
from typing import Annotated

import typer

from fedmjp.cli.console import tell, wide_console
from fedmjp.cli.options import RUN

KINDS = (".png", ".svg")


def compare(
    folders: Annotated[list[Path], typer.Argument(help="Folders of training runs.", metavar="RUN...")],
    output: Annotated[Path, typer.Option(help="The figure, .png or .svg.", metavar="FILE", rich_help_panel=RUN)] = Path(
        "results/compare.png"
    ),
) -> None:
    """Draw Top-1 per epoch or round of several runs into one figure (MJP's Fig. 6)."""
    import numpy as np

    from fedmjp.drawings import save_plot
    from fedmjp.errors import OutputError
    from fedmjp.evaluation.plots import draw_convergence, read_history
    from fedmjp.files import replacing

    if output.suffix not in KINDS:
        raise OutputError(f"--output {output}: a figure ends in {' or '.join(KINDS)}")
    histories = {str(folder): read_history(folder) for folder in folders}
    if len({folder.name for folder in folders}) == len(histories):
        histories = {folder.absolute().name: rows for folder, rows in zip(folders, histories.values(), strict=True)}
    figure = draw_convergence(histories)
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.suffix == ".png":
        save_plot(figure, output, dots_per_inch=150)
    else:
        with replacing(output) as partial:
            figure.savefig(partial, format="svg")
    for name, rows in histories.items():
        counter, shares = rows.iloc[:, 0].to_numpy(), 100 * rows["top1"].to_numpy(float)
        best = int(np.nanargmax(shares))
        last = f"{shares[-1]:.1f} % after {rows.columns[0]} {counter[-1]}"
        tell(wide_console(), f"{name}: Top-1 {last}, {shares[best]:.1f} % at best, after {counter[best]}")
    tell(wide_console(), f"Written to {output}.")

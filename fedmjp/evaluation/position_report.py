"""A study of position embeddings as files: tables as CSV and Markdown, figures as PNG and SVG, one page."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure
from tabulate import tabulate

from fedmjp.drawings import save_plot
from fedmjp.evaluation.positions import (
    COMPONENTS,
    PAPER_REGRESSION,
    PAPER_VARIANCE,
    REPETITIONS,
    PositionTable,
    energy,
    explained_variance,
    nearest_reading,
    position_regression,
)
from fedmjp.files import replacing
from fedmjp.texts import guard, printable
from fedmjp.training.rows import PAPER

DOTS_PER_INCH = 150
PAPERS_MODEL = "deit_small"  # whose figures the paper has


@dataclass(frozen=True)
class Studied:
    """A model whose table was read, and what the paper has to compare it with."""

    table: PositionTable
    model: str
    defence: str  # "none" or "mjp"
    localisation: str

    @property
    def papers_variance(self) -> Sequence[float] | None:
        """Table 6 of such a model."""
        return PAPER_VARIANCE.get(self.defence) if self.model == PAPERS_MODEL else None

    @property
    def papers_regression(self) -> Mapping[str, float]:
        """Table 8 of such a model, by target."""
        found = PAPER_REGRESSION.get((self.defence, self.localisation)) if self.model == PAPERS_MODEL else None
        return dict(zip(("absolute 1-D", "absolute 2-D"), found or (), strict=False))


@dataclass(frozen=True)
class Sheet:
    """A table of the report, and what has to be said of it."""

    title: str
    about: str
    rows: pd.DataFrame


@dataclass(frozen=True)
class Study:
    """What was measured of several models: long tables for CSV, and what they are shown as."""

    variance: pd.DataFrame
    regression: pd.DataFrame
    energy: pd.DataFrame
    sheets: list[Sheet]
    spectra: dict[str, pd.DataFrame] = field(repr=False)


def study(models: Sequence[Studied], *, seed: int) -> Study:
    """Measure the tables of models; the paper's figures stand beside those that have any."""
    variances = {one.table.name: explained_variance(one.table.rows) for one in models}
    spectra = {one.table.name: energy(one.table.rows) for one in models}
    regressions = {one.table.name: position_regression(one.table, seed=seed) for one in models}
    for one in models:
        measured = variances[one.table.name]
        measured["nearest"] = (
            measured["reading"] == nearest_reading(measured, one.defence) if one.papers_variance else False
        )
        regressions[one.table.name]["paper"] = (
            regressions[one.table.name]["target"].map(dict(one.papers_regression)).astype(float)
        )
    return Study(
        variance=_joined(variances),
        regression=_joined(regressions),
        energy=_joined(spectra),
        sheets=[_variance_sheet(models, variances), _regression_sheet(regressions)],
        spectra=spectra,
    )


def write(folder: Path, made: Study, figures: Mapping[str, Figure], more: Sequence[Sheet]) -> list[str]:
    """Write everything, and give the names of the files.

    Args:
        folder: That exists.
        made: The measured tables.
        figures: By the name of their file, in the order of the page.
        more: Further tables of the page.
    """
    sheets = [*made.sheets, *more]
    tables = {"explained_variance": made.variance, "position_regression": made.regression, "energy": made.energy}
    texts = {f"{name}.csv": printable(rows.map(guard).to_csv(index=False)) for name, rows in tables.items()}
    texts["tables.md"] = "\n".join(["# Position embeddings\n", *map(_markdown, sheets)])
    texts["report.html"] = _page(sheets, list(figures))
    for name, text in texts.items():
        with replacing(folder / name) as partial:
            partial.write_text(text, encoding="utf-8")
    for name, figure in figures.items():
        save_plot(figure, folder / f"{name}.png", dots_per_inch=DOTS_PER_INCH)
        with replacing(folder / f"{name}.svg") as partial:
            figure.savefig(partial, format="svg")
    return [*texts, *(f"{name}.{kind}" for name in figures for kind in ("png", "svg"))]


def _joined(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    return pd.concat([rows.assign(run=name) for name, rows in tables.items()], ignore_index=True)


def _variance_sheet(models: Sequence[Studied], variances: Mapping[str, pd.DataFrame]) -> Sheet:
    lines = []
    for one in models:
        measured = variances[one.table.name]
        for reading, rows in measured.groupby("reading", sort=False):
            mark = " (nearest to the paper)" if bool(rows["nearest"].any()) else ""
            shares = {f"k = {k}": f"{100 * share:.1f}" for k, share in zip(rows["k"], rows["share"], strict=True)}
            lines.append({"run": one.table.name, "reading": f"{reading}{mark}", **shares})
        if one.papers_variance:
            printed = {f"k = {k}": f"{share:.1f}" for k, share in zip(COMPONENTS, one.papers_variance, strict=True)}
            lines.append({"run": PAPER, "reading": "not said", **printed})
    about = (
        "Share in per cent that the first k components have of the position embeddings (the paper's Table 6). It does "
        "not say whether rows are centred, nor whether singular values are squared: all four readings are here."
    )
    return Sheet("Explained variance", about, pd.DataFrame(lines).fillna("-"))


def _regression_sheet(regressions: Mapping[str, pd.DataFrame]) -> Sheet:
    lines = [
        {
            "run": name,
            "target": row["target"],
            "mean absolute error (95 %)": f"{row['error']:.3f} ({row['low']:.3f} to {row['high']:.3f})",
            "paper": "-" if math.isnan(row["paper"]) else f"{row['paper']:.3f}",
        }
        for name, rows in regressions.items()
        for row in rows.to_dict("records")
    ]
    about = (
        "How well a linear map, fitted on four fifths of the patches, tells the places of the others (Table 8), over "
        f"{REPETITIONS} random orders; smaller says that the table holds more of the places. Errors are in patches: "
        "those of grids of different size do not compare. The official script has differences of unsigned bytes, "
        "which wrap."
    )
    return Sheet("Position regression", about, pd.DataFrame(lines))


def _markdown(sheet: Sheet) -> str:
    rows = tabulate(sheet.rows.map(_cell).values.tolist(), headers=list(sheet.rows.columns), tablefmt="pipe")
    return f"## {sheet.title}\n\n{sheet.about}\n\n{rows}\n"


def _cell(value: object) -> str:
    return printable(str(value)).replace("|", "\\|")


def _page(sheets: Sequence[Sheet], figures: Sequence[str]) -> str:
    environment = Environment(
        loader=PackageLoader("fedmjp.evaluation", "."), autoescape=True, undefined=StrictUndefined
    )
    shown = [(sheet, Markup(sheet.rows.to_html(index=False, border=0, escape=True))) for sheet in sheets]  # noqa: S704
    return environment.get_template("positions.html.jinja").render(sheets=shown, figures=figures)

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
from fedmjp.evaluation import positions
from fedmjp.evaluation.positions import COMPONENTS, PAPER_REGRESSION, PAPER_VARIANCE, REPETITIONS, PositionTable
from fedmjp.files import replacing
from fedmjp.texts import guard, printable
from fedmjp.training.rows import PAPER

DOTS_PER_INCH = 150
PAPERS_MODEL = "deit_small"  # of the paper's figures


@dataclass(frozen=True)
class StudiedModel:
    """A model with its table, and the paper's figures of such a model."""

    table: PositionTable
    model: str
    defence: str  # "none" or "mjp"
    localisation: str

    @property
    def papers_variance(self) -> Sequence[float] | None:
        """Return Table 6 of such a model."""
        return PAPER_VARIANCE.get(self.defence) if self.model == PAPERS_MODEL else None

    @property
    def papers_regression(self) -> Mapping[str, float]:
        """Return Table 8 of such a model, by target."""
        errors = PAPER_REGRESSION.get((self.defence, self.localisation)) if self.model == PAPERS_MODEL else None
        return dict(zip(("absolute 1-D", "absolute 2-D"), errors or (), strict=False))


@dataclass(frozen=True)
class Sheet:
    """A table of the report with its explanation."""

    title: str
    about: str
    rows: pd.DataFrame


@dataclass(frozen=True)
class PositionStudy:
    """The measurements of several models: long tables for CSV, and sheets for the page."""

    variance: pd.DataFrame
    regression: pd.DataFrame
    energy: pd.DataFrame
    sheets: list[Sheet]
    spectra: dict[str, pd.DataFrame] = field(repr=False)


def measure_positions(models: Sequence[StudiedModel], *, seed: int) -> PositionStudy:
    """Measure the tables of models, with the paper's figures beside them where it has any.

    Args:
        models: To compare.
        seed: Of the regression's random orders.
    """
    variances = {model.table.name: positions.compute_explained_variance(model.table.rows) for model in models}
    spectra = {model.table.name: positions.compute_energy(model.table.rows) for model in models}
    regressions = {model.table.name: positions.measure_position_regression(model.table, seed=seed) for model in models}
    for model in models:
        measured = variances[model.table.name]
        nearest = positions.find_nearest_reading(measured, model.defence) if model.papers_variance else None
        measured["nearest"] = measured["reading"] == nearest
        regressions[model.table.name]["paper"] = (
            regressions[model.table.name]["target"].map(dict(model.papers_regression)).astype(float)
        )
    return PositionStudy(
        variance=_join(variances),
        regression=_join(regressions),
        energy=_join(spectra),
        sheets=[_build_variance_sheet(models, variances), _build_regression_sheet(regressions)],
        spectra=spectra,
    )


def write_report(folder: Path, study: PositionStudy, figures: Mapping[str, Figure], more: Sequence[Sheet]) -> list[str]:
    """Write tables, figures and page, and return the names of the files.

    Args:
        folder: That exists.
        study: The measured tables.
        figures: By the name of their file, in the order of the page.
        more: Further tables of the page.
    """
    sheets = [*study.sheets, *more]
    tables = {"explained_variance": study.variance, "position_regression": study.regression, "energy": study.energy}
    texts = {f"{name}.csv": printable(rows.map(guard).to_csv(index=False)) for name, rows in tables.items()}
    texts["tables.md"] = "\n".join(["# Position embeddings\n", *map(_render_markdown, sheets)])
    texts["report.html"] = _render_page(sheets, list(figures))
    for name, text in texts.items():
        with replacing(folder / name) as partial:
            partial.write_text(text, encoding="utf-8")
    for name, figure in figures.items():
        save_plot(figure, folder / f"{name}.png", dots_per_inch=DOTS_PER_INCH)
        with replacing(folder / f"{name}.svg") as partial:
            figure.savefig(partial, format="svg")
    return [*texts, *(f"{name}.{kind}" for name in figures for kind in ("png", "svg"))]


def _join(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    return pd.concat([rows.assign(run=name) for name, rows in tables.items()], ignore_index=True)


def _build_variance_sheet(models: Sequence[StudiedModel], variances: Mapping[str, pd.DataFrame]) -> Sheet:
    lines = []
    for model in models:
        measured = variances[model.table.name]
        for reading, rows in measured.groupby("reading", sort=False):
            mark = " (nearest to the paper)" if bool(rows["nearest"].any()) else ""
            shares = {f"k = {k}": f"{100 * share:.1f}" for k, share in zip(rows["k"], rows["share"], strict=True)}
            lines.append({"run": model.table.name, "reading": f"{reading}{mark}", **shares})
        if model.papers_variance:
            printed = {f"k = {k}": f"{share:.1f}" for k, share in zip(COMPONENTS, model.papers_variance, strict=True)}
            lines.append({"run": PAPER, "reading": "not said", **printed})
    about = (
        "Share in per cent that the first k components have of the position embeddings (the paper's Table 6). It does "
        "not say whether rows are centred, nor whether singular values are squared: all four readings are here."
    )
    return Sheet("Explained variance", about, pd.DataFrame(lines).fillna("-"))


def _build_regression_sheet(regressions: Mapping[str, pd.DataFrame]) -> Sheet:
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


def _render_markdown(sheet: Sheet) -> str:
    rows = tabulate(sheet.rows.map(_format_cell).values.tolist(), headers=list(sheet.rows.columns), tablefmt="pipe")
    return f"## {sheet.title}\n\n{sheet.about}\n\n{rows}\n"


def _format_cell(value: object) -> str:
    return printable(str(value)).replace("|", "\\|")


def _render_page(sheets: Sequence[Sheet], figures: Sequence[str]) -> str:
    environment = Environment(
        loader=PackageLoader("fedmjp.evaluation", "."), autoescape=True, undefined=StrictUndefined
    )
    rendered = [(sheet, Markup(sheet.rows.to_html(index=False, border=0, escape=True))) for sheet in sheets]  # noqa: S704
    return environment.get_template("positions.html.jinja").render(sheets=rendered, figures=figures)

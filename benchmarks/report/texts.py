"""A board as CSV, Markdown and LaTeX, through pandas' writers."""

import json
import re
from collections.abc import Iterable

import pandas as pd

from fedmjp.benchmarks.leaderboard.frame import DERIVED
from fedmjp.benchmarks.report.advice import write_advice
from fedmjp.benchmarks.report.claimed import CAVEAT, CLAIMS, claimed_table
from fedmjp.benchmarks.report.columns import TEXT, filled
from fedmjp.benchmarks.report.legend import (
    AGAINST_HEADING,
    AGAINST_NONE,
    DISCLOSED,
    EXACT_FEATURES,
    EXACT_HEADING,
    FEATURE_ERROR,
    LEAKAGE_HEADING,
    MEDIAN_HEADING,
    SHARES,
    explain_columns,
    explain_disclosed,
    explain_verdicts,
)
from fedmjp.benchmarks.report.reported import reported_table
from fedmjp.benchmarks.report.tables import Report
from fedmjp.texts import guard, printable

LATEX = (
    "rank", "model", "weights", "defence", "mask ratio", "setting", "verdict", "strongest attack", "n",
    EXACT_HEADING, MEDIAN_HEADING, LEAKAGE_HEADING, AGAINST_HEADING, "top-1 %",
)  # fmt: skip
LATEX_DISCLOSED = (
    "rank", "model", "weights", "attack", "defence", "server sees", "setting", "verdict", "n", EXACT_FEATURES,
    FEATURE_ERROR, *SHARES, AGAINST_NONE,
)  # fmt: skip
_SPECIAL = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        '"': r"\textquotedbl{}",
        **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    }
)


def csv_text(report: Report) -> str:
    """Write one line per entry, every number at full precision, empty where there is no value.

    Args:
        report: A board's report.
    """
    frame = report.frame.drop(columns=DERIVED)
    if not frame.empty:
        frame["marginal"] = [
            json.dumps([gain.model_dump() for gain in gains]) if gains else None for gains in frame["marginal"]
        ]
    return printable(frame.map(guard).to_csv(index=False, lineterminator="\n"))


def markdown_text(report: Report) -> str:
    """Write standings and cells per server, reported figures, meanings and notes.

    Args:
        report: A board's report.
    """
    board = report.board
    parts = [f"# {_escape_markdown(board.title)}", *map(_escape_markdown, [board.question, *write_advice(board)])]
    for section in report.sections:
        parts += [f"## {_escape_markdown(section.title)}", _escape_markdown(section.sentence)]
        parts += [_listing(section.findings)] if section.findings else []
        parts.append(_escape_markdown(section.summary))
        for title, table in section.rankings.items():
            parts += [f"### Standings, {title}", _markdown(table)]
        parts += ["### All cells", _markdown(section.cells)]
    if not report.disclosed.empty:
        parts += [f"## {DISCLOSED}", *map(_escape_markdown, report.disclosed_sentences), _markdown(report.disclosed)]
        parts.append(_meanings(explain_disclosed()))
    if board.claims:
        parts += [f"## {CLAIMS}", CAVEAT, _markdown(claimed_table(board))]
    if board.reported:
        parts += ["## Reported in papers, not measured here", _markdown(reported_table(board))]
    parts += ["## Verdicts", _meanings(explain_verdicts(board)), "## Columns", _meanings(explain_columns(board))]
    parts += ["## Notes", _listing(board.notes)]
    return "\n\n".join(parts) + "\n"


def _meanings(texts: dict[str, str]) -> str:
    return _listing(f"{name}: {text}." for name, text in texts.items())


def _listing(texts: Iterable[str]) -> str:
    return "\n".join(f"- {_escape_markdown(text)}" for text in texts)


def _markdown(table: pd.DataFrame) -> str:
    table = filled(table)
    alignment = ["left" if name in TEXT else "right" for name in table]
    texts = table.map(_escape_markdown)
    return texts.to_markdown(index=False, tablefmt="pipe", disable_numparse=True, colalign=alignment)


def _escape_markdown(text: str) -> str:
    """Escape text so that GitHub shows it as it is; underscores inside words are no markup, and stay readable."""
    plain = re.sub(r"\s+", " ", text).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*|\[\]~$]|(?<!\w)_|_(?!\w))", r"\\\1", plain)


def latex_text(report: Report) -> str:
    r"""Write one table per server and version of the picture that is compared with, and one of labels and features.

    Args:
        report: A board's report.

    Returns:
        Tables for ``\input`` in a paper that loads the packages named at the head.
    """
    tables = [
        _latex(report, table, LATEX, f"{title.capitalize()}, {{pictures}}. {section.sentence}")
        for section in report.sections
        for title, table in section.rankings.items()
    ]
    if not report.disclosed.empty:
        caption = " ".join([f"{DISCLOSED}, {{pictures}}.", *report.disclosed_sentences])
        tables.append(_latex(report, report.disclosed, LATEX_DISCLOSED, caption))
    return "\n".join(["% \\usepackage[T1]{fontenc}", "% \\usepackage{booktabs,graphicx}", *tables])


def _latex(report: Report, table: pd.DataFrame, names: Iterable[str], caption: str) -> str:
    """Write the columns that hold something; the caption says of how many ``{pictures}``."""
    figures = report.frame.loc[table.index]
    pictures = f"n = {_range(figures['n'])} pictures"
    if (figures["uploads"] != figures["n"]).any():
        pictures += f" of {_range(figures['uploads'])} uploads"
    table = filled(table)
    table = table[[name for name in names if name in table]].reset_index(drop=True)
    styler = table.map(escape_latex).rename(columns=escape_latex).style.hide(axis="index")
    text = styler.to_latex(
        column_format="".join("l" if name in TEXT else "r" for name in table),
        hrules=True,
        position_float="centering",
        caption=escape_latex(caption.replace("{pictures}", pictures)),
    )
    scaled = text.replace(r"\begin{tabular}", "\\resizebox{\\linewidth}{!}{%\n\\begin{tabular}")
    return scaled.replace(r"\end{tabular}", r"\end{tabular}}")


def _range(counts: "pd.Series[int]") -> str:
    """Write the range of some counts: ``8``, or ``8 to 64``."""
    return " to ".join(map(str, dict.fromkeys([counts.min(), counts.max()])))


def escape_latex(text: str) -> str:
    """Escape text so that LaTeX prints it as it is.

    Args:
        text: Any text; white space becomes single spaces.
    """
    return " ".join(text.split()).translate(_SPECIAL)

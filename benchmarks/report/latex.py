r"""The standings as LaTeX tables, to be read into a paper with ``\input``."""

from collections.abc import Sequence

from benchmarks.leaderboard.entries import Board
from benchmarks.report.legend import LEAKAGE_HEADING
from benchmarks.report.rows import TEXT, Ranking, Row, Section, sections
from benchmarks.report.tables import filled

COLUMNS = (
    "rank", "model", "weights", "defence", "mask ratio", "setting", "verdict", "strongest attack", "n",
    LEAKAGE_HEADING, "worst", "against no defence, dB", "top-1 %",
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


def latex_text(board: Board) -> str:
    """One table per server and version of the picture that is compared with."""
    tables = [_table(section, ranking) for section in sections(board) for ranking in section.rankings]
    return "\n".join(["% \\usepackage[T1]{fontenc}", "% \\usepackage{booktabs,graphicx}", *tables])


def _table(section: Section, ranking: Ranking) -> str:
    rows = ranking.rows
    shown = filled(rows)
    columns = [name for name in COLUMNS if name in shown]
    alignment = "".join("l" if name in TEXT else "r" for name in columns)
    body = [_line([row.values[name].text for name in columns]) for row in rows]
    caption = f"{ranking.title.capitalize()}, {_counts(rows)}. {section.sentence}"
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{escaped(caption)}}}",
            r"\resizebox{\linewidth}{!}{%",
            rf"\begin{{tabular}}{{{alignment}}}",
            r"\toprule",
            _line(columns),
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}}",
            r"\end{table}",
            "",
        ]
    )


def _counts(rows: Sequence[Row]) -> str:
    counts = sorted({row.entry.n for row in rows if row.entry})
    if not counts:
        return "no picture scored"
    return f"n = {counts[0]} pictures" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]} pictures"


def _line(texts: Sequence[str]) -> str:
    return " & ".join(map(escaped, texts)) + r" \\"


def escaped(text: str) -> str:
    """Text that LaTeX prints as it is."""
    return " ".join(text.split()).translate(_SPECIAL)

r"""The standings as LaTeX tables, to be read into a paper with ``\input``."""

from collections.abc import Sequence

from benchmarks.leaderboard.entries import Board
from benchmarks.report.legend import EXACT_HEADING, LEAKAGE_HEADING, MEDIAN_HEADING
from benchmarks.report.rows import TEXT, Ranking, Section, sections
from benchmarks.report.tables import filled

COLUMNS = (
    "rank", "model", "weights", "defence", "mask ratio", "setting", "verdict", "strongest attack", "n",
    EXACT_HEADING, MEDIAN_HEADING, LEAKAGE_HEADING, "against no defence, dB", "top-1 %",
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
    shown = filled(ranking.rows)
    columns = [name for name in COLUMNS if name in shown]
    body = "\n".join(_line([row.values[name].text for name in columns]) for row in ranking.rows)
    counts = sorted({row.entry.n for row in ranking.rows if row.entry})
    pictures = " to ".join(map(str, dict.fromkeys([counts[0], counts[-1]])))
    caption = f"{ranking.title.capitalize()}, n = {pictures} pictures. {section.sentence}"
    return rf"""\begin{{table}}
\centering
\caption{{{escaped(caption)}}}
\resizebox{{\linewidth}}{{!}}{{%
\begin{{tabular}}{{{"".join("l" if name in TEXT else "r" for name in columns)}}}
\toprule
{_line(columns)}
\midrule
{body}
\bottomrule
\end{{tabular}}}}
\end{{table}}
"""


def _line(texts: Sequence[str]) -> str:
    return " & ".join(map(escaped, texts)) + r" \\"


def escaped(text: str) -> str:
    """Text that LaTeX prints as it is."""
    return " ".join(text.split()).translate(_SPECIAL)

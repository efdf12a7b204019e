r"""The standings as LaTeX tables, to be read into a paper with ``\input``."""

from collections.abc import Iterable, Sequence

from fedmjp.benchmarks.leaderboard.entries import Board
from fedmjp.benchmarks.report import disclosed
from fedmjp.benchmarks.report.legend import EXACT_HEADING, LEAKAGE_HEADING, MEDIAN_HEADING
from fedmjp.benchmarks.report.rows import TEXT, Row, sections
from fedmjp.benchmarks.report.tables import filled

COLUMNS = (
    "rank", "model", "weights", "defence", "mask ratio", "setting", "verdict", "strongest attack", "n",
    EXACT_HEADING, MEDIAN_HEADING, LEAKAGE_HEADING, "against no defence, dB", "top-1 %",
)  # fmt: skip
DISCLOSED_COLUMNS = (
    "rank", "model", "weights", "attack", "defence", "server sees", "setting", "verdict", "n", disclosed.EXACTLY,
    disclosed.ERROR, *disclosed.FOUND, disclosed.AGAINST,
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
    """One table per server and version of the picture that is compared with, and one of labels and features."""
    tables = [
        _table(ranking.rows, COLUMNS, f"{ranking.title.capitalize()}, {{pictures}}. {section.sentence}")
        for section in sections(board)
        for ranking in section.rankings
    ]
    if others := disclosed.rows(board):
        caption = " ".join([f"{disclosed.TITLE}, {{pictures}}.", *disclosed.sentences(board)])
        tables.append(_table(others, DISCLOSED_COLUMNS, caption))
    return "\n".join(["% \\usepackage[T1]{fontenc}", "% \\usepackage{booktabs,graphicx}", *tables])


def _table(rows: Sequence[Row], names: Sequence[str], caption: str) -> str:
    """A table of the columns that hold something; the caption says of how many ``{pictures}``."""
    shown = filled(rows)
    columns = [name for name in names if name in shown]
    body = "\n".join(_line([row.values[name].text for name in columns]) for row in rows)
    entries = [row.entry for row in rows if row.entry]
    pictures = f"n = {_ranged(entry.n for entry in entries)} pictures"
    if any(entry.together for entry in entries):
        pictures += f" of {_ranged(entry.uploads for entry in entries)} uploads"
    alignment = "".join("l" if name in (*TEXT, *disclosed.TEXTS) else "r" for name in columns)
    return rf"""\begin{{table}}
\centering
\caption{{{escaped(caption.replace("{pictures}", pictures))}}}
\resizebox{{\linewidth}}{{!}}{{%
\begin{{tabular}}{{{alignment}}}
\toprule
{_line(columns)}
\midrule
{body}
\bottomrule
\end{{tabular}}}}
\end{{table}}
"""


def _ranged(counts: Iterable[int]) -> str:
    """``8``, or ``8 to 64``."""
    ordered = sorted(counts)
    return " to ".join(map(str, dict.fromkeys([ordered[0], ordered[-1]])))


def _line(texts: Sequence[str]) -> str:
    return " & ".join(map(escaped, texts)) + r" \\"


def escaped(text: str) -> str:
    """Text that LaTeX prints as it is."""
    return " ".join(text.split()).translate(_SPECIAL)

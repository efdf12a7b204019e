"""The leaderboard as CSV, Markdown and a terminal table."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attacks.base import Role
from benchmarks.output import write_text
from fedmjp.metrics import metric

# Errors span ten powers of ten: two significant digits, so that a small one does not read as none.
FORMATS = {"psnr": ".1f", "mse": ".2g", "fft2d": ".2g"}
TEXT_COLUMNS = ("model", "defence", "attack", "setting")
# What a narrow terminal can do without, in this order.
DISPENSABLE = ("n", "MSE", "FFT2D", "95 % interval", "mask ratio", "LPIPS", "worst")
UNLIMITED = 10_000
HEADINGS = {"psnr": "PSNR dB", "mse": "MSE", "ssim": "SSIM", "fft2d": "FFT2D", "lpips_alex": "LPIPS"}


def write_csv(board: pd.DataFrame, path: Path) -> None:
    """Every column, full precision, empty where there is no value."""
    write_text(path, board.to_csv(index=False))


def write_markdown(board: pd.DataFrame, metrics: Sequence[str], notes: Sequence[str], path: Path) -> None:
    """Means with intervals, and the notes that the table must not be read without."""
    table = display(board, metrics).to_markdown(index=False, disable_numparse=True)
    write_text(path, f"{table}\n\n" + "".join(f"- {note}\n" for note in notes))


def display(board: pd.DataFrame, metrics: Sequence[str]) -> pd.DataFrame:
    """Cells as text: the mean, for PSNR with its interval and the most revealing picture."""
    shown = pd.DataFrame(
        {
            "model": board["model"],
            "defence": board["defence"],
            "mask ratio": board["mask_ratio"].map("{:g}".format),
            "attack": [_marked(attack, role) for attack, role in zip(board["attack"], board["role"], strict=True)],
            "setting": board["setting"],
            "n": board["n"],
            "failed": board["failures"],
        }
    )
    for name in metrics:
        shown[HEADINGS.get(name, name)] = [_number(value, name) for value in board[f"{name}_mean"]]
        if name == "psnr":
            bounds = zip(board["psnr_low"], board["psnr_high"], strict=True)
            shown["95 % interval"] = [_interval(low, high) for low, high in bounds]
            shown["worst"] = [_number(value, name) for value in board["psnr_worst"]]
    return shown


def print_table(board: pd.DataFrame, metrics: Sequence[str], console: Console) -> None:
    """One table, floors and bounds dimmed. A terminal that is too narrow gets fewer columns, and is told."""
    shown = display(board, metrics)
    empty = [column for column in shown.columns if (shown[column] == "").all()]
    without_failures = ["failed"] if (board["failures"] == 0).all() else []
    shown = shown.drop(columns=empty + without_failures)
    left_out: list[str] = []
    unlimited = console.options.update(max_width=UNLIMITED)
    dimmed = [role != "attack" for role in board["role"]]
    table = _terminal_table(shown, dimmed)
    for column in DISPENSABLE:
        if console.measure(table, options=unlimited).maximum <= console.width:
            break
        if column in shown.columns:
            left_out.append(column)
            shown = shown.drop(columns=column)
            table = _terminal_table(shown, dimmed)
    console.print(table)
    if left_out:
        console.print(f"Left out for want of width: {', '.join(left_out)}. The report has every column.\n")


def _terminal_table(shown: pd.DataFrame, dimmed: Sequence[bool]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title="Leakage, mean over pictures", title_justify="left")
    for column in shown.columns:
        table.add_column(column, justify="left" if column in TEXT_COLUMNS else "right", no_wrap=True)
    former = ("", "")
    for row, dim in zip(shown.to_dict("records"), dimmed, strict=True):
        group = (row["model"], row["defence"])
        if group == former:
            row |= {"model": "", "defence": ""}
        elif table.row_count:
            table.add_section()
        table.add_row(*(escape(str(value)) for value in row.values()), style="dim" if dim else "")
        former = group
    return table


def _marked(attack: str, role: Role) -> str:
    """What is no attack says so in its own row."""
    return attack if role == "attack" else f"{attack} ({role})"


def missing_metrics(metrics: Sequence[str]) -> dict[str, str]:
    """Metrics that this machine cannot compute, and why."""
    reasons = {name: metric(name).missing() for name in metrics}
    return {name: reason for name, reason in reasons.items() if reason}


def _number(value: float | None, name: str) -> str:
    return "" if value is None or pd.isna(value) else f"{value:{FORMATS.get(name, '.3f')}}"


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None or pd.isna(low) else f"{low:.1f} to {high:.1f}"

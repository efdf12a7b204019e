"""The leaderboard as CSV, Markdown and a terminal table."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table

from attacks import ATTACKS
from fedmjp.metrics import metric

DIGITS = {"psnr": 1, "mse": 4, "ssim": 3, "fft2d": 4, "lpips_alex": 3}
HEADINGS = {"psnr": "PSNR dB", "mse": "MSE", "ssim": "SSIM", "fft2d": "FFT2D", "lpips_alex": "LPIPS"}


def write_csv(board: pd.DataFrame, path: Path) -> None:
    """Every column, full precision, empty where there is no value."""
    _write(path, board.to_csv(index=False))


def write_markdown(board: pd.DataFrame, metrics: Sequence[str], notes: Sequence[str], path: Path) -> None:
    """Means with intervals, and the notes that the table must not be read without."""
    table = display(board, metrics).to_markdown(index=False, disable_numparse=True)
    _write(path, f"{table}\n\n" + "".join(f"- {note}\n" for note in notes))


def display(board: pd.DataFrame, metrics: Sequence[str]) -> pd.DataFrame:
    """Cells as text: the mean, for PSNR with its interval and the most revealing picture."""
    shown = pd.DataFrame(
        {
            "model": board["model"],
            "defence": board["defence"],
            "mask ratio": board["mask_ratio"].map("{:g}".format),
            "attack": board["attack"],
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
    """One table; a rule between models and defences, the floor dimmed."""
    shown = display(board, metrics)
    table = Table(title="Leakage per cell (mean over pictures)", title_justify="left", header_style="bold")
    text_columns = {"model", "defence", "attack", "setting"}
    for column in shown.columns:
        table.add_column(column, justify="left" if column in text_columns else "right", no_wrap=True)
    groups = list(zip(shown["model"], shown["defence"], shown["attack"], strict=True))
    for index, row in enumerate(shown.itertuples(index=False)):
        last_of_group = index + 1 == len(groups) or groups[index][:2] != groups[index + 1][:2]
        floor = ATTACKS.get(groups[index][2]).floor
        table.add_row(*map(str, row), end_section=last_of_group, style="dim" if floor else "")
    console.print(table)


def missing_metrics(metrics: Sequence[str]) -> dict[str, str]:
    """Metrics that this machine cannot compute, and why."""
    reasons = {name: metric(name).missing() for name in metrics}
    return {name: reason for name, reason in reasons.items() if reason}


def _number(value: float | None, name: str) -> str:
    return "" if value is None or pd.isna(value) else f"{value:.{DIGITS.get(name, 3)}f}"


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None or pd.isna(low) else f"{low:.1f} to {high:.1f}"


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)

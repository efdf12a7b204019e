"""The figure of reconstructions: what the attacker got, beside what the client had."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont

from fedmjp.benchmarks.folder.trials import TrialResult
from fedmjp.benchmarks.plan.trial_plan import Cell
from fedmjp.drawings import JPEG
from fedmjp.files import replacing

if TYPE_CHECKING:
    from fedmjp.benchmarks.plan.trial_plan import PlannedTrial

COLUMNS = 8
LABEL_LETTERS = 26
# In pixels: a picture, the space behind it, the caption below it, and the labels before each row.
PICTURE, GAP, CAPTION, LABELS = 112, 4, 18, 150
LABEL_FONT, CAPTION_FONT = 10.5, 9.5


@dataclass(frozen=True)
class _Row:
    label: str
    files: dict[str, Path] = field(default_factory=dict)
    captions: dict[str, str] = field(default_factory=dict)


def write_figure(planned: Sequence[PlannedTrial], trials: Sequence[TrialResult], pictures: Path, path: Path) -> None:
    """Draw original, shuffled and reconstructed pictures: a column per picture, a row per attack and defence.

    Only the first pictures are shown. Defences that shuffle are shown in settings b and c, which share one upload,
    unless only a was run. Under each reconstruction stands its PSNR per setting.

    Args:
        planned: Trials of an experiment.
        trials: What was recorded of them.
        pictures: The folder of kept pictures.
        path: The figure, a JPEG file.
    """
    one_each = {plan.picture.name: plan for plan in planned}
    shuffled = {p.picture.name: p for p in planned if p.cell.pipeline.shuffles or p.cell.setting != "a"}
    names = list(one_each)[:COLUMNS]
    rows = [_Row("original x", {n: pictures / plan.files["clean"] for n, plan in one_each.items()})]
    if shuffled:
        rows.append(_Row("shuffled x~", {n: pictures / plan.files["shuffled"] for n, plan in shuffled.items()}))
    rows += _reconstruction_rows(planned, trials, pictures)
    width, height = PICTURE + GAP, PICTURE + CAPTION
    figure = Image.new("RGB", (LABELS + width * len(names), height * len(rows)), "white")
    draw, label_font, caption_font = ImageDraw.Draw(figure), *map(ImageFont.load_default, (LABEL_FONT, CAPTION_FONT))
    for top, row in zip(itertools.count(0, height), rows, strict=False):
        middle = top + PICTURE / 2
        draw.text((LABELS - 2 * GAP, middle), row.label, "black", label_font, anchor="rm", align="right")
        for left, name in zip(itertools.count(LABELS, width), names, strict=False):
            centre = left + PICTURE / 2
            if name in row.files and row.files[name].exists():
                with Image.open(row.files[name]) as picture:  # a pixel that grows keeps its edges
                    figure.paste(picture.resize((PICTURE, PICTURE), Image.Resampling.BOX), (left, top))
            else:
                draw.text((centre, middle), "no picture", "black", caption_font, anchor="mm")
            draw.text((centre, top + PICTURE + 2), row.captions.get(name, ""), "black", caption_font, anchor="ma")
    with replacing(path) as partial:
        figure.save(partial, format="JPEG", **JPEG)


def _reconstruction_rows(planned: Sequence[PlannedTrial], trials: Sequence[TrialResult], pictures: Path) -> list[_Row]:
    finished = {trial.key: trial.scores for trial in trials if trial.status == "ok"}
    shuffled = {(plan.cell.model, plan.cell.defence) for plan in planned if plan.cell.pipeline.shuffles}
    rows: dict[str, _Row] = {}
    for plan in planned:
        cell, name = plan.cell, plan.picture.name
        is_shown = cell.pipeline.shuffles or (cell.model, cell.defence) not in shuffled
        if cell.role == "floor" or plan.key not in finished or not is_shown:
            continue
        row = rows.setdefault(_label(cell), _Row(_label(cell)))
        row.files[name] = pictures / plan.files["reconstruction"]
        if "psnr" in finished[plan.key]:
            psnr = f"{cell.setting} {finished[plan.key]['psnr']:.1f}"
            row.captions[name] = f"{row.captions[name]} | {psnr}" if name in row.captions else psnr
    return list(rows.values())


def _label(cell: Cell) -> str:
    defence = cell.defence if cell.defences else "no defence"
    defence += f", mask ratio {cell.mask_ratio:g}" if cell.mask_ratio else ""
    attack = textwrap.fill(cell.attack, LABEL_LETTERS)
    count = cell.threat.uploads_per_picture
    uploads = f"\n{count} uploads of each" if count > 1 else ""
    return f"{attack}{uploads}\n{cell.model}\n{defence}\nsetting, PSNR in dB"

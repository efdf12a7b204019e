"""Saved figures show what was drawn, in the form that their names promise."""

from pathlib import Path

import numpy as np
import pytest
import skimage.data
from matplotlib.figure import Figure
from PIL import Image

from fedmjp.drawings import save_photographs, save_plot

DOTS = 50


def as_drawn(figure: Figure, path: Path) -> np.ndarray:
    figure.savefig(path, format="png", dpi=DOTS)
    return np.asarray(Image.open(path).convert("RGB")).astype(float)


def error(path: Path, wanted: np.ndarray) -> float:
    """Root mean square, in levels of 255."""
    return float(np.sqrt(np.mean((np.asarray(Image.open(path).convert("RGB")) - wanted) ** 2)))


def test_a_plot_keeps_its_colours_and_its_size_in_a_palette(tmp_path: Path) -> None:
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    for number in range(6):
        axes.plot([0, 1], [number, 5 - number])
        axes.fill_between([0, 1], [number - 1, 4 - number], [number + 1, 6 - number], alpha=0.2)
    wanted = as_drawn(figure, tmp_path / "wanted.png")
    save_plot(figure, tmp_path / "plot.png", dots_per_inch=DOTS)
    saved = Image.open(tmp_path / "plot.png")
    assert (saved.format, saved.mode) == ("PNG", "P")
    assert error(tmp_path / "plot.png", wanted) < 2
    assert (tmp_path / "plot.png").stat().st_size < (tmp_path / "wanted.png").stat().st_size


def test_photographs_keep_their_colours_at_full_resolution(tmp_path: Path) -> None:
    figure = Figure(figsize=(4, 4))
    figure.subplots().imshow(skimage.data.coffee())
    wanted = as_drawn(figure, tmp_path / "wanted.png")
    save_photographs(figure, tmp_path / "shown.jpg", dots_per_inch=DOTS)
    saved = Image.open(tmp_path / "shown.jpg")
    assert saved.format == "JPEG"
    assert {layer[1:3] for layer in saved.layer} == {(1, 1)}, "no colour is halved"
    assert error(tmp_path / "shown.jpg", wanted) < 8


def test_a_figure_that_cannot_be_drawn_leaves_the_former_one(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    path.write_bytes(b"former")
    figure = Figure()
    figure.text(0, 0, "$\\broken$")
    for save in (save_plot, save_photographs):
        with pytest.raises(ValueError, match="broken"):
            save(figure, path, dots_per_inch=DOTS)
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("plot.png", b"former")]

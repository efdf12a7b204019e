"""Pictures, names and files that nobody wants: read rightly, or refused in a line, and never opened to wait."""

import csv
import io
import os
import socket
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from rich.console import Console

from fedmjp.benchmarks.campaign.file import read_campaign
from fedmjp.benchmarks.folder.study import holds_plan, keep_rows, problems_of_rows, read_study
from fedmjp.benchmarks.plan.trial_plan import TrialPlan
from fedmjp.benchmarks.report.tables import Report
from fedmjp.benchmarks.report.terminal import print_answer, print_table
from fedmjp.benchmarks.report.texts import csv_text
from fedmjp.benchmarks.running.verify import compare_with_published
from fedmjp.benchmarks.uploads.rounds import open_records
from fedmjp.config import Checkpoint
from fedmjp.data.selection import open_source, select
from fedmjp.errors import ConfigError, DataError, FedmjpError, OutputError
from fedmjp.records import Upload
from fedmjp.server.refusals import Refusal, RefusalFile
from tests.boards import Row, board, cell, grey, ledger_of, near
from tests.hostile import within
from tests.test_fuzz import CAMPAIGN

SECONDS = 5  # of which nothing here takes one
FORMULA = '=HYPERLINK("http://example.org")'
MARKUP = "[bold]$\\frac$[/nope]"


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_of(width: int, height: int) -> bytes:
    """A file of a few bytes that claims a size."""
    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, pytest.MonkeyPatch.context() as patch:
        patch.chdir(path.parent)  # names of sockets are short
        made.bind(path.name)


def cut(path: Path) -> None:
    Image.fromarray(noise(64, 64, 3)).save(path)
    path.write_bytes(path.read_bytes()[:500])


NOT_READ: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "pipe, socket or device"),
    "socket": (bind, "pipe, socket or device"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "pipe, socket or device"),
    "loop": (lambda path: path.symlink_to(path.name), "Too many levels"),
    "dangling": (lambda path: path.symlink_to("nowhere"), "No such file"),
    "folder": (Path.mkdir, "Is a directory"),
    "empty": (Path.touch, "cannot identify"),
    "truncated": (cut, "truncated"),
    "bomb": (lambda path: path.write_bytes(png_of(30_000, 30_000)), "exceeds limit|too many"),
    "half a bomb": (lambda path: path.write_bytes(png_of(13_000, 13_000)), "13000 x 13000 pixels are too many"),
    "thread": (lambda path: path.write_bytes(png_of(1, 40_000)), "1 x 40000 pixels"),
    "nothing": (lambda path: path.write_bytes(png_of(0, 0)), "cannot identify"),
    "program": (lambda path: path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), "cannot identify"),
}


@pytest.mark.parametrize("kind", NOT_READ)
def test_what_is_no_picture_is_skipped_with_a_word_and_never_waited_for(tmp_path: Path, kind: str) -> None:
    make, reason = NOT_READ[kind]
    (tmp_path / "class").mkdir()
    Image.fromarray(noise(40, 40, 3)).save(tmp_path / "class" / "good.png")
    make(tmp_path / "class" / "odd.png")
    with within(SECONDS):
        source = open_source(str(tmp_path), size=32, classes=2)
        with pytest.raises(DataError, match=f"class/odd.png in .* cannot be read as a picture: .*({reason})"):
            source.load("class/odd.png")
        assert [entry.name for entry in select(source, 1, seed=0).entries] == ["class/good.png"]


TRUTH = np.repeat(np.repeat(np.array([[250, 10], [60, 180]], dtype=np.uint8), 16, 0), 16, 1)


def save_palette(path: Path) -> None:
    Image.fromarray(TRUTH).convert("P").save(path, transparency=b"\xff" * 20)


def save_turned(path: Path) -> None:
    picture = Image.fromarray(np.rot90(TRUTH))  # anticlockwise; orientation 6 says: turn it clockwise
    exif = picture.getexif()
    exif[0x0112] = 6
    picture.save(path, exif=exif)


def save_animated(path: Path) -> None:
    Image.fromarray(TRUTH).save(path, save_all=True, append_images=[Image.fromarray(255 - TRUTH)], lossless=True)


READ: dict[str, Callable[[Path], object]] = {
    "grey.png": lambda path: Image.fromarray(TRUTH).save(path),
    "sixteen.png": lambda path: Image.fromarray(TRUTH.astype(np.uint16) * 257).save(path),
    "palette.png": save_palette,
    "cmyk.tif": lambda path: Image.fromarray(TRUTH).convert("RGB").convert("CMYK").save(path),
    "turned.png": save_turned,
    "still.gif": lambda path: Image.fromarray(TRUTH).save(path),
    "animated.gif": save_animated,
    "animated.webp": save_animated,
    "animated.png": save_animated,
    "wrong.jpg": lambda path: Image.fromarray(TRUTH).save(path, format="PNG"),
    "one.png": lambda path: Image.fromarray(TRUTH[:1, :1]).save(path),
}


@pytest.mark.parametrize("name", READ)
def test_odd_pictures_are_read_rightly(tmp_path: Path, name: str) -> None:
    (tmp_path / "class").mkdir()
    READ[name](tmp_path / "class" / name)
    image = open_source(str(tmp_path), size=32, classes=2).load(f"class/{name}").image
    corners = (image[:, 4, 4], image[:, 4, -4], image[:, -4, 4], image[:, -4, -4])
    expected = [250, 250, 250, 250] if name == "one.png" else [250, 10, 60, 180]
    for corner, value in zip(corners, expected, strict=True):
        assert corner.mul(255).tolist() == pytest.approx([value] * 3, abs=3)


def pipe_in(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    os.mkfifo(folder / name)
    return folder / name


@pytest.mark.parametrize(
    "use",
    [
        lambda place: read_campaign(pipe_in(place, "campaign.yaml")),
        lambda place: Checkpoint.of(pipe_in(place, "weights.safetensors")),
        lambda place: Upload.load(pipe_in(place, "round-00001-node-0.safetensors")),
        lambda place: open_records(pipe_in(place, "manifest.json").parent),
        lambda place: read_study(pipe_in(place, "trials.parquet").parent),
        lambda place: TrialPlan.load(pipe_in(place, "plan.json").parent),
        lambda place: open_source(str(pipe_in(place, "validation.parquet").parent), size=32, classes=2),
    ],
    ids=["campaign", "weights", "upload", "manifest", "study", "plan", "data"],
)
def test_a_pipe_in_the_place_of_a_file_is_refused_in_a_line(tmp_path: Path, use: Callable[[Path], object]) -> None:
    with within(SECONDS), pytest.raises(FedmjpError, match="pipe, socket or device") as caught:
        use(tmp_path / "place")
    assert "\n" not in str(caught.value)


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 12)
)
BRACKETS = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("added", "reason"),
    [
        (BOMB, "line 16: with aliases, 66,429 values 6 deep|with aliases, 597,871 values"),
        ("question: &a [*a]", "an alias contains itself"),
        (f"question: {BRACKETS}", "more than 50 values stand in each other|maximum nesting depth"),  # or PyYAML's own
        (f"seeds: [{'9' * 5000}]", "a number of 5,000 characters"),
        (f"seeds: [{':'.join(['59'] * 2000)}]", "a number of 5,999 characters"),
        ("seeds: [yes]", r"line \d+: seeds.0 = True: true is no number; YAML reads yes.* write a number"),
        ("seeds: [1:30]", r"line \d+: YAML reads 1:30 as 90, to the base 60: write 90, or '1:30' in quotes"),
        ("seeds: [010]", "YAML reads 010 as 8, to the base 8: write 8"),
        ("recognisable_at: 1:30.5", "YAML reads 1:30.5 as 90.5, to the base 60"),
        ("image_size: on", "image_size = True: true is no number"),
        ("question: !!python/object/apply:os.system [ls]", "os.system' is no text, number"),
        ("question: !!binary aGVsbG8=", "'binary' is no text, number"),
        ("question: 2001-99-99", "'timestamp' is no text, number"),
        ("question: !!bool x", "'x' is no value of the kind 'bool'"),
        ("question: !!float ''", "'' is no value of the kind 'float'"),
        ("? [a]\n: 1", "the key of several values is no text"),
        ("1: 2", "the key 1 is no text"),
        ("title: B", "key 'title' was given before, in line 3"),
        ('question: "\\0"', "characters that cannot be printed"),
        ('question: "\\e[31m"', "characters that cannot be printed"),
        ("question: \0", "is not YAML"),
        (b"question: \xff\xfe", "codec can't decode"),
        (b"# " + b"x" * 2_000_000, "larger than the 1,000,000 bytes"),
        ("seeds: [" + "x, " * 20 + "x]", "and 11 more"),
        ("image_size: 100000000", "less than or equal to 4096"),
        ("weights: {deit_tiny: /dev/zero}", None),
    ],
)
def test_yaml_of_evil_intent_is_refused_in_a_line(tmp_path: Path, added: str | bytes, reason: str | None) -> None:
    content = CAMPAIGN.replace("seeds: [0, 1]\n", "").replace("image_size: 64\n", "").replace("weights: {}\n", "")
    path = tmp_path / "campaign.yaml"
    path.write_bytes(content.encode() + (added if isinstance(added, bytes) else added.encode()) + b"\n")
    with within(SECONDS), pytest.raises(FedmjpError, match=reason) as caught:
        read_campaign(path).experiments(device="cpu")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 3000


def test_a_grid_that_nobody_could_run_is_refused_at_once(tmp_path: Path) -> None:
    numbers = ", ".join(map(str, range(1, 1001)))
    threats = f"    threats: [{{local_learning_rate: [{numbers}], uploads_per_picture: [{numbers}]}}]\n"
    path = tmp_path / "campaign.yaml"
    path.write_text(f"name: a\ngrids:\n  - models: [deit_tiny]\n    attacks: [grey]\n{threats}")
    with within(SECONDS), pytest.raises(ConfigError, match="6,000,000 cells, a grid has at most 100,000"):
        read_campaign(path)


def formulas(text: str) -> list[str]:
    """Cells of a CSV file that a spreadsheet would run."""
    cells = [value for row in csv.reader(io.StringIO(text)) for value in row]
    return [value for value in cells if value.startswith(("=", "+", "-", "@", "\t", "\r")) and not is_number(value)]


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", [FORMULA, "+1", "-1+1", "@SUM(1)", "\t=1", "\r=1", "＝1", "'=1"])
def test_no_name_is_a_formula_and_numbers_stay_numbers(tmp_path: Path, name: str) -> None:
    rows = (Row(cell("april", "mjp", model=name), near(15)), Row(cell("april", "none", model=name), near(25)))
    shown = csv_text(Report(board(*rows, data=name)))
    assert formulas(shown) == []
    assert "-10.0" in shown, "a difference below zero"
    ledger, _ = ledger_of(rows)
    ledger.trials["picture"] = [f"{name}{number % 8}" for number in range(16)]
    ledger.save(tmp_path)
    assert formulas((tmp_path / "plan.csv").read_bytes().decode()) == []
    assert TrialPlan.load(tmp_path).trials["picture"].tolist() == ledger.trials["picture"].tolist()
    refused = RefusalFile(tmp_path / "refused.csv")
    refused.add([Refusal(1, 0, name)])
    assert formulas(refused.path.read_bytes().decode()) == []
    assert refused.read() == [Refusal(1, 0, name)]


def test_a_terminal_shows_names_and_obeys_none() -> None:
    made = board(*(each.on(model=f"{MARKUP}\x1b[31m") for each in (Row(cell(), near(25)), grey())))
    shown = io.StringIO()
    print_table(Report(made), Console(file=shown, width=300))
    assert f"{MARKUP}\ufffd[31m" in shown.getvalue()
    answered = io.StringIO()
    print_answer(made, Console(file=answered, width=300))
    assert f"{MARKUP}\ufffd[31m" in answered.getvalue()
    assert "\x1b" not in shown.getvalue() + answered.getvalue()


@pytest.mark.parametrize("damage", [lambda text: text[:-200], lambda text: text.replace("p1,", "p2,"), lambda _: ""])
def test_a_plan_that_was_cut_or_changed_is_told(tmp_path: Path, damage: Callable[[str], str]) -> None:
    ledger_of([Row(cell(), near(25))])[0].save(tmp_path)
    path = tmp_path / "plan.csv"
    path.write_text(damage(path.read_text()))
    with pytest.raises(OutputError, match=r"plan\.csv was changed or damaged; to start over, run the command"):
        TrialPlan.load(tmp_path)


@pytest.mark.parametrize("content", ["{", "3", "[" * 100_000, None], ids=["cut", "number", "deep", "pipe"])
def test_a_published_study_with_a_damaged_manifest_is_told(tmp_path: Path, content: str | None) -> None:
    keep_rows(tmp_path, pd.DataFrame({"x": [1.0]}), {})
    assert problems_of_rows(tmp_path) == []
    manifest = tmp_path / "manifest.json"
    manifest.unlink()
    os.mkfifo(manifest) if content is None else manifest.write_text(content)
    with within(SECONDS):
        assert "missing or damaged" in problems_of_rows(tmp_path)[0]
        assert "missing or damaged" in compare_with_published(tmp_path, {"about": {}, "entries": []}, rendered=False)[0]


@pytest.mark.parametrize("kept", [0, 4, 100, -10])
def test_damaged_rows_of_a_study_are_told_in_a_line(tmp_path: Path, kept: int) -> None:
    keep_rows(tmp_path, pd.DataFrame({"x": [1.0]}), {})
    path = tmp_path / "trials.parquet"
    path.write_bytes(path.read_bytes()[:kept])
    for read in (read_study, holds_plan):
        with pytest.raises(OutputError, match=r"trials\.parquet is damaged.*put a whole copy in its place") as caught:
            read(tmp_path)
        assert "\n" not in str(caught.value)

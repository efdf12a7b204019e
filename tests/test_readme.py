"""Every README: its Python blocks run as they stand, its commands are understood, its links lead somewhere."""

import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import click
import pytest
import typer

from fedmjp.cli import app
from tests.studies import load_study

ROOT = Path(__file__).parents[1]
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
OURS = ("fedmjp ", "python -m tests.", "python results/", "python benchmarks/")
OTHERS = "my_package"  # stands for a package of the reader's
NUMBERS = {"N", "ROUND"}  # stand for numbers of the reader's
WORDS = {  # by page, at most
    "README.md": 1500,
    "attacks/README.md": 3400,
    "clients/README.md": 1950,
    "clients/gate/README.md": 1300,
    "server/README.md": 1500,
    "benchmarks/README.md": 1500,
    "fedmjp/defences/README.md": 750,
    "results/defences/README.md": 1890,
}
MOST_NUMBERS = 2  # of a sentence; three make a table
MOST_SENTENCES = 4  # of a paragraph
NOT_PROSE = re.compile(r"^```.*?^```|^\|.*?$|^!\[.*?$|^#.*?$", re.MULTILINE | re.DOTALL)
YEAR = re.compile(r"\b(?:19|20)\d\d\b")
FIGURE = re.compile(
    r"(?<![\w.,-])[\d.,]*\d(?:(?: (?:x|of|to) |/)[\d.,]*\d)*(?![\w-])"
)  # a range or a share is one number
TOO_LONG: dict[str, str] = {}

LOST = {"named": {False}, "rebuilt": {False}, "lost": {True}, "mixed": {False, True}}


def pages() -> list[Path]:
    rooms = ("attacks", "benchmarks", "clients", "clients/checks", "clients/gate", "fedmjp/defences", "server")
    return [
        ROOT / "README.md",
        ROOT / ".github" / "CONTRIBUTING.md",
        *(ROOT / room / "README.md" for room in rooms),
        *sorted((ROOT / "results").rglob("*.md")),
    ]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT).parent)


def blocks() -> list[tuple[str, str]]:
    return [
        (f"{named(page)} {number}", block)
        for page in pages()
        for number, block in enumerate(PYTHON.findall(page.read_text(encoding="utf-8")))
        if OTHERS not in block
    ]


def commands() -> list[str]:
    """Commands of ours, in blocks and between the lines."""
    found = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        lines = [line for block in SHELL.findall(text) for line in block.splitlines()]
        spans = [" ".join(span.split()) for span in CODE.findall(re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))]
        for line in [*lines, *spans]:
            parts = [re.sub(r"^([A-Z_]+=\S+ )+", "", part) for part in re.split(r" && |;", line)]
            found += [part for part in parts if part.startswith(OURS)]
    return sorted(set(found))


@pytest.mark.parametrize("block", [block for _, block in blocks()], ids=[name for name, _ in blocks()])
def test_a_python_block_runs(block: str) -> None:
    command = [sys.executable, "-c", block]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    if '"mjp_prior"' in block:
        psnr = float(re.findall(r"\d+\.\d+", done.stdout)[0])
        assert 13 < psnr < 40, "more than the grey guess of that picture, and not exact"
    if "adopt" in block:
        error = float(re.findall(r"tensor\((.*)\)", done.stdout)[0])
        assert error < 1e-3, "exact up to rounding"


@pytest.mark.parametrize("line", commands())
def test_a_command_is_understood(line: str) -> None:
    words = ["1" if word in NUMBERS else word for word in shlex.split(line, comments=True)]
    if words[0] == "fedmjp":
        parse(typer.main.get_command(app), words[1:])
    elif words[1] == "-m":
        parse(script(importlib.import_module(f"{words[2]}.__main__")), words[3:])
    elif words[1] == "benchmarks/performance/run.py":
        parse(script(importlib.import_module("fedmjp.benchmarks.performance.run")), words[2:])
    else:
        parse(script(load_study(words[1].removeprefix("results/"))), words[2:])


def script(module: ModuleType) -> click.Command:
    """The command of a script, or the group of its commands."""
    several = getattr(module, "app", None)
    if several is None:
        several = typer.Typer()
        several.command()(module.main)
    return typer.main.get_command(several)


def parse(command: click.Command, words: list[str]) -> None:
    """Read words as the command would, without beginning; a command that is only named need not be whole."""
    if isinstance(command, click.Group):
        _, chosen, rest = command.resolve_command(click.Context(command), words)
        assert chosen is not None
        if rest:
            parse(chosen, rest)
    elif words:
        command.make_context(command.name, words)


def links() -> Iterator[tuple[Path, str]]:
    for page in pages():
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                yield page, target


def test_links_lead_to_files_and_headings_that_exist() -> None:
    for page, target in links():
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {heading.lower().replace(" ", "-") for heading in headings}, f"{page}: {target}"


@pytest.mark.parametrize(("page", "most"), WORDS.items())
def test_a_page_is_short(page: str, most: int) -> None:
    words = len((ROOT / page).read_text(encoding="utf-8").split())
    assert (words <= most) is (page not in TOO_LONG), words


def paragraphs(page: str) -> list[list[str]]:
    """The sentences of each paragraph and item of a page, without code, tables, links' addresses and brackets."""
    text = NOT_PROSE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "Code", text))
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)", text)
    prose = [re.sub(r"^(?:[-*]|\d+\.)\s", "", " ".join(part.split())) for part in parts if part.strip()]
    return [re.split(r"(?<=[.?!])\s+(?=[A-Z*`\[\d])", part) for part in prose]


@pytest.mark.parametrize("page", [page for page in WORDS if page not in TOO_LONG])
def test_three_numbers_make_a_table_and_a_paragraph_ends(page: str) -> None:
    for sentences in paragraphs(page):
        assert len(sentences) <= MOST_SENTENCES, sentences
        for sentence in sentences:
            assert len(FIGURE.findall(YEAR.sub("", sentence))) <= MOST_NUMBERS, sentence


def test_what_results_says_of_a_studys_commit_is_what_its_manifest_says() -> None:
    index = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    for line in index.splitlines():
        said = line.rstrip(" |").rpartition("| ")[2]
        for target in LINK.findall(line) if said in LOST else []:
            manifests = sorted((ROOT / "results" / target).parent.rglob("manifest.json"))
            assert {"commit_lost" in path.read_text(encoding="utf-8") for path in manifests} == LOST[said], target

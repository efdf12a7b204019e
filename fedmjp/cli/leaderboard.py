"""`fedmjp leaderboard DIR` and `fedmjp leaderboard add ENTRY.json`."""

from pathlib import Path
from typing import Annotated, Any

import click
import typer
from typer.core import TyperGroup

from fedmjp.cli.campaign_options import Weights
from fedmjp.cli.console import tell, wide_console
from fedmjp.cli.options import Device, examples
from fedmjp.cli.runs import choose, located

SHOW = "show"
FEWEST = 10  # pictures of a sample, as fedmjp.benchmarks.running.recompute has it
SITE_HELP = "Write a site of all studies here: a new folder, or a former site."


class _ShowsByDefault(TyperGroup):
    """Command group that takes a first word which is no command for the folder to show."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a first word that is no command to the command that shows a folder."""
        is_command = args and (args[0] in self.commands)
        return super().resolve_command(ctx, args if is_command else [SHOW, *args])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Options of the hidden command may come first: fedmjp leaderboard --format csv DIR.
        """Parse options that come before the folder as those of the command that shows it."""
        options = args and args[0].startswith("-") and args[0] not in ("--help",)
        return super().parse_args(ctx, [SHOW, *args] if options else args)


leaderboard = typer.Typer(
    cls=_ShowsByDefault,
    no_args_is_help=True,
    help="Make the leaderboard of a folder of results (fedmjp leaderboard DIR), a site of several (fedmjp leaderboard "
    "DIR... --site FOLDER), pack an entry, or add a third party's.",
)


@leaderboard.command(SHOW, epilog=examples("fedmjp leaderboard results/mine --format html --format csv"))
def show(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="DIR...", help="What a run wrote; one, or several for a site.")
    ] = None,
    formats: Annotated[list[str], typer.Option("--format", help="html, md, csv, json or latex; may be repeated.")] = [],
    output: Annotated[Path | None, typer.Option(help="Where it goes; the folder itself if not given.")] = None,
    pictures: Annotated[bool, typer.Option("--pictures/--no-pictures", help="Show kept pictures on the page.")] = True,
    database: Annotated[str, typer.Option(envvar="FEDMJP_DATABASE", help="postgresql://..., as in the run.")] = "",
    site: Annotated[Path | None, typer.Option(help=SITE_HELP, show_default=False)] = None,
) -> None:
    """Make tables, page and manifest from what a run wrote. `fedmjp leaderboard DIR` is short for this.

    `fedmjp leaderboard DIR... --site FOLDER` writes one site of all studies in these folders, or in results/ if none is
    named: a page for each study, attack and defence, ready to be served as static files, or to be opened from the disk.
    """
    from fedmjp.errors import BadInputError

    if site is not None:
        if formats or output:
            raise BadInputError("--site writes pages, CSV and JSON of its own; leave out --format and --output")
        _write_site(folders or [Path("results")], site, pictures=pictures, database=database)
        return
    if not folders or len(folders) > 1:
        raise BadInputError(
            f"name one folder of results, got {len(folders or [])}; with --site FOLDER several make a site"
        )
    (folder,) = folders
    _show(folder, formats, output, pictures=pictures, database=database)


def _write_site(folders: list[Path], site: Path, *, pictures: bool, database: str) -> None:
    from fedmjp.benchmarks.report.site.build import write_site
    from fedmjp.running import BAD_INPUT

    console = wide_console()
    left_out = write_site(folders, site, pictures=pictures, database=database, tell=lambda line: tell(console, line))
    tell(console, f"Written: {site / 'index.html'}")
    if left_out:
        raise typer.Exit(BAD_INPUT)


def _show(folder: Path, formats: list[str], output: Path | None, *, pictures: bool, database: str) -> None:
    from fedmjp.benchmarks.folder.output import OutputFolder, write_json
    from fedmjp.benchmarks.folder.scores import holds_scores
    from fedmjp.benchmarks.folder.study import TRIALS, open_results
    from fedmjp.benchmarks.plan.trial_plan import ABOUT
    from fedmjp.benchmarks.report.publish import FORMATS, publish
    from fedmjp.benchmarks.report.render import board_in, gallery_in
    from fedmjp.benchmarks.report.tables import Report
    from fedmjp.benchmarks.report.terminal import print_table
    from fedmjp.errors import OutputError, UnknownNameError

    console = wide_console()
    for name in formats:
        if name not in FORMATS:
            raise UnknownNameError("format", name, FORMATS)
    selection: Any = tuple(formats) or FORMATS
    results = OutputFolder(folder)
    ledger, store = open_results(results, database)
    board = board_in(ledger, store, folder)
    target = output or folder
    if target.resolve() != folder.resolve() and ((target / TRIALS).exists() or (target / ABOUT).exists()):
        raise OutputError(f"{target} holds other results than {folder}; name another --output")
    gallery = gallery_in(ledger, store, board, results) if pictures else None
    try:
        target.mkdir(parents=True, exist_ok=True)
        written = publish(board, target, formats=selection, pictures=gallery)
        if not holds_scores(target):  # whose manifest says what its rows are
            write_json(target / "manifest.json", board.about)
    except OSError as error:
        raise OutputError(f"{target} cannot be written: {error.strerror or error}; name another --output") from None
    print_table(Report(board), console)
    tell(console, f"Written: {', '.join(map(str, written))}")


@leaderboard.command(
    epilog=examples(
        'fedmjp leaderboard pack results/mine --name "A. Author" --contact a@example.org --link https://example.org/a'
    )
)
def pack(
    folder: Annotated[Path, typer.Argument(help="What `fedmjp campaign run` wrote.", show_default=False)],
    name: Annotated[str, typer.Option(help="Who answers for the entry.", show_default=False)],
    contact: Annotated[str, typer.Option(help="How to reach them.", show_default=False)],
    link: Annotated[str, typer.Option(help="https://..., where code or paper can be read.", show_default=False)],
    output: Annotated[Path, typer.Option(help="The file that is written.")] = Path("entry.json"),
    database: Annotated[str, typer.Option(envvar="FEDMJP_DATABASE", help="postgresql://..., as in the run.")] = "",
) -> None:
    """Write the cells of your campaign, and what it takes to run them again, into a file for another's board."""
    from fedmjp.benchmarks.folder.output import OutputFolder, write_text
    from fedmjp.benchmarks.folder.study import open_results
    from fedmjp.benchmarks.leaderboard.entries import Submitter
    from fedmjp.benchmarks.leaderboard.packing import pack_entries
    from fedmjp.benchmarks.report.render import board_in
    from fedmjp.errors import OutputError

    submitter = Submitter.parse({"name": name, "contact": contact, "link": link})
    plan, store = open_results(OutputFolder(folder), database)
    submission = pack_entries(plan, board_in(plan, store, folder).entries, submitter)
    try:
        write_text(output, submission.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise OutputError(f"{output} cannot be written: {error.strerror or error}; name another --output") from None
    tell(
        wide_console(),
        f"Written: {output}, {len(submission.entries)} cells. `fedmjp leaderboard add {output} --to DIR` adds them to "
        "the board in DIR.",
    )


@leaderboard.command(
    epilog=examples(
        "fedmjp leaderboard add entry.json --to results/mine",
        "fedmjp leaderboard add entry.json --to results/mine --data pictures --weights deit_small=theirs.safetensors",
    )
)
def add(
    entry: Annotated[Path, typer.Argument(help="A submission, as `fedmjp leaderboard pack` writes it.")],
    to: Annotated[Path, typer.Option("--to", help="The folder of results whose board it joins.")],
    pictures: Annotated[
        int, typer.Option(help="Pictures of each cell to run again, at least; drawn here.", min=FEWEST)
    ] = FEWEST,
    data: Annotated[str, typer.Option(help="Its pictures: a folder; not needed for the bundled ones.")] = "",
    weights: Weights = [],
    device: Device = "auto",
) -> None:
    """Run a sample of a third party's entry again and add it to a board, marked as submitted.

    What agrees is shown as recomputed, with the figures of the pictures that were run again. What cannot be run here
    (a plug-in, pictures or weights are missing) is shown as a claim, in a table apart, without verdict and rank. Scores
    that come out otherwise are refused.

    This runs the code of plug-ins that you installed, with your rights, and does what the entry's campaign asks for,
    however long it takes. Nothing is downloaded or installed: read a plug-in's code before you install it.
    """
    from fedmjp.benchmarks.leaderboard.admission import admit
    from fedmjp.benchmarks.leaderboard.claims import figures_text
    from fedmjp.benchmarks.running.recompute import Recomputer
    from fedmjp.errors import BadInputError
    from fedmjp.overrides import parse_pairs
    from fedmjp.zoo import PREFIX

    console = wide_console()
    files = {
        label: path if path.startswith(PREFIX) else str(Path(path).absolute())
        for label, path in parse_pairs(weights, "--weights").items()
    }
    for path in [*files.values(), *([located(data)] if data else [])]:
        if Path(path).is_absolute() and not Path(path).exists():
            raise BadInputError(
                f"{path} does not exist: name pictures with --data FOLDER, weights with --weights MODEL=FILE"
            )
    recomputer = Recomputer(
        data=located(data) if data else "",
        weights=files,
        pictures=pictures,
        device=choose(device),
        tell=lambda line: tell(console, line),
    )
    admitted = admit(entry, to, recomputer)
    for cell in admitted.entries:
        words = f"{cell.model}, {cell.defence}, {cell.attack}, setting {cell.setting}"
        tell(console, f"Admitted, {cell.check}: {words}: {cell.verdict}, {cell.reason}")
    for claim in admitted.claims:
        words = f"{claim.model}, {claim.defence}, {claim.attack}, setting {claim.setting}"
        tell(console, f"Claim, {claim.check}: {words}: {figures_text(claim)}; {claim.reason}")
    tell(console, f"`fedmjp leaderboard {to}` shows it.")

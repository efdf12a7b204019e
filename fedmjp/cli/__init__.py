"""The command line. Each command lives in a file of its own and imports what is heavy when it runs."""

import sys

import typer
from rich.console import Console

from fedmjp.cli.catalogue import catalogue
from fedmjp.cli.doctor import doctor
from fedmjp.cli.quickstart import quickstart
from fedmjp.cli.simulate import simulate
from fedmjp.errors import FedmjpError

INTERRUPTED = 130

app = typer.Typer(
    help="Federated-learning privacy benchmark: MJP vision transformers under gradient inversion.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(quickstart)
app.command()(simulate)
app.command("list")(catalogue)
app.command()(doctor)


def main() -> None:
    """Run a command; an error raised on purpose becomes one line and its exit code."""
    try:
        app()
    except FedmjpError as error:
        Console(stderr=True).print(f"[bold red]Error:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        Console(stderr=True).print("Interrupted. Finished trials are kept; run the same command to go on.")
        sys.exit(INTERRUPTED)

"""The command line. Each command lives in a file of its own and imports what is heavy when it runs."""

import sys

import click
import typer
from rich.console import Console
from rich.text import Text

from fedmjp.cli.attack import attack
from fedmjp.cli.campaign import campaign
from fedmjp.cli.catalogue import catalogue
from fedmjp.cli.doctor import doctor
from fedmjp.cli.evaluate import evaluate
from fedmjp.cli.leaderboard import leaderboard
from fedmjp.cli.quickstart import quickstart
from fedmjp.cli.record import record
from fedmjp.cli.simulate import simulate
from fedmjp.cli.train import train
from fedmjp.cli.weights import weights
from fedmjp.errors import FedmjpError

BAD_INPUT = 2
INTERRUPTED = 130  # how typer ends a command on Ctrl-C

app = typer.Typer(
    help="Federated-learning privacy benchmark: MJP vision transformers under gradient inversion.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(quickstart)
app.command()(train)
app.command()(simulate)
app.command()(record)
app.command()(evaluate)
app.command()(attack)
app.add_typer(campaign, name="campaign")
app.add_typer(leaderboard, name="leaderboard")
app.command("list")(catalogue)
app.add_typer(weights, name="weights")
app.command()(doctor)


def main() -> None:
    """Run a command; an error raised on purpose becomes one line and its exit code."""
    try:
        code = app(standalone_mode=False)
    except FedmjpError as error:
        code = _tell(str(error), error.exit_code)
    except OSError as error:
        code = _tell(f"{error.filename or 'input/output'}: {error.strerror or error}", BAD_INPUT)
    except click.exceptions.NoArgsIsHelpError as error:
        code = error.exit_code  # the help was printed
    except click.ClickException as error:
        code = _tell(error.format_message(), error.exit_code)
    if code == INTERRUPTED:
        _tell("interrupted; whatever was finished is kept", INTERRUPTED)
    sys.exit(code)


def _tell(error: str, code: int) -> int:
    Console(stderr=True).print(Text("Error: ", "bold red") + Text(error), soft_wrap=True)
    return code

"""The command line. Each command lives in a file of its own and imports what is heavy when it runs."""

import typer

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
from fedmjp.running import run

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
    """The command line ``fedmjp``."""
    run(app)

"""The command line. Each command lives in a file of its own and imports what is heavy when it runs."""

from typing import Annotated

import typer

import fedmjp
from fedmjp.cli.attack import attack
from fedmjp.cli.audit import audit
from fedmjp.cli.benchmark import benchmark
from fedmjp.cli.campaign import campaign
from fedmjp.cli.catalogue import catalogue
from fedmjp.cli.compare import compare
from fedmjp.cli.deploy import deploy
from fedmjp.cli.doctor import doctor
from fedmjp.cli.evaluate import evaluate
from fedmjp.cli.gate import gate, supernode
from fedmjp.cli.keys import SIMULATED, TRAINED
from fedmjp.cli.leaderboard import leaderboard
from fedmjp.cli.options import examples
from fedmjp.cli.quickstart import quickstart
from fedmjp.cli.record import record
from fedmjp.cli.simulate import simulate
from fedmjp.cli.study import study
from fedmjp.cli.train import train
from fedmjp.cli.weights import weights
from fedmjp.running import run

app = typer.Typer(
    epilog=examples("fedmjp quickstart", "fedmjp list attacks", "fedmjp attack --help"),
    no_args_is_help=True,
    suggest_commands=False,  # click does
    pretty_exceptions_enable=False,
)
MEASURE, TRAIN, DEPLOY, KNOW = "Measure what leaks", "Train", "Defend a deployment", "Know what there is"
app.command(rich_help_panel=MEASURE, epilog=examples("fedmjp quickstart --output results/first"))(quickstart)
app.command(
    rich_help_panel=MEASURE,
    epilog=examples(
        "fedmjp attack --attack patch_embedding --limit 4",
        "fedmjp attack --attack mjp_prior --defence mjp:mask_ratio=0.27",
        "fedmjp attack --attack mjp_prior --defence mjp --weights zoo:coarse-mjp-0 --data FOLDER",
        "fedmjp attack --attack mjp_intersection --defence mjp --uploads-per-picture 4",
        "fedmjp attack --attack mjp_prior --uploads results/record",
    ),
)(attack)
app.command(
    rich_help_panel=MEASURE,
    epilog=examples("fedmjp audit APP_DIR --output results/audit", "fedmjp audit APP_DIR --stand-in --rounds 3"),
)(audit)
app.command(
    rich_help_panel=MEASURE,
    epilog=examples(
        "fedmjp benchmark --model deit_tiny --image-size 64 --patch-size 8 --defence prune:kept=0.1",
        "fedmjp benchmark --battery standard --weights zoo:wide-none-0 --data FOLDER --pictures 64 --defence clip",
    ),
)(benchmark)
app.command(
    rich_help_panel=MEASURE,
    epilog=examples("fedmjp record --clients 4", "fedmjp record --data FOLDER --defence mjp --defence round"),
)(record)
app.add_typer(campaign, name="campaign", rich_help_panel=MEASURE)
app.add_typer(leaderboard, name="leaderboard", rich_help_panel=MEASURE)
app.command(
    rich_help_panel=TRAIN,
    epilog=examples(
        "fedmjp train --data FOLDER --defence mjp recipe.epochs=20 recipe.batch_size=64",
        "fedmjp train --row table4-J --data FOLDER model.name=deit_micro",
        "torchrun --nproc-per-node 8 -m fedmjp train --data FOLDER --row table4-J",
        keys=TRAINED,
    ),
)(train)
app.command(
    rich_help_panel=TRAIN,
    epilog=examples(
        "fedmjp simulate --data FOLDER --defence mjp --rounds 10 recipe.batch_size=64",
        "fedmjp simulate --partition dirichlet --alpha 0.3 --strategy fedavgm",
        "fedmjp simulate --strategy fedsgd --uploads 1",
        keys=SIMULATED,
    ),
)(simulate)
app.command(
    rich_help_panel=TRAIN,
    epilog=examples(
        "fedmjp evaluate results/train --data FOLDER",
        "fedmjp evaluate results/train --data FOLDER --corruptions --workers 2",
        "fedmjp evaluate --data FOLDER --weights FILE --model name=deit_small",
        "fedmjp evaluate --weights FILE --model name=deit_small --imagenet-a DIR --imagenet-o DIR --imagenet DIR",
    ),
)(evaluate)
app.command(rich_help_panel=TRAIN, epilog=examples("fedmjp compare results/train-none results/train-mjp"))(compare)
app.add_typer(study, name="study", rich_help_panel=TRAIN)
app.command(
    rich_help_panel=DEPLOY,
    epilog=examples(
        "fedmjp supernode --policy policy.yaml -- --superlink 127.0.0.1:9092 --insecure --node-config 'partition-id=0'"
    ),
)(supernode)
app.add_typer(gate, name="gate", rich_help_panel=DEPLOY)
app.add_typer(deploy, name="deploy", rich_help_panel=DEPLOY)
app.command(
    "list",
    rich_help_panel=KNOW,
    epilog=examples("fedmjp list attacks", "fedmjp list attacks mjp_prior", "fedmjp list defences --json"),
)(catalogue)
app.add_typer(weights, name="weights", rich_help_panel=KNOW)
app.command(rich_help_panel=KNOW, epilog=examples("fedmjp doctor"))(doctor)


def _tell_version(wants_version: bool) -> None:
    if wants_version:
        typer.echo(f"fedmjp {fedmjp.__version__}")
        raise typer.Exit


@app.callback()
def run_before_commands(
    _version: Annotated[
        bool, typer.Option("--version", help="Tell the version and exit.", callback=_tell_version, is_eager=True)
    ] = False,
) -> None:
    """Federated-learning privacy benchmark: MJP vision transformers under gradient inversion."""


def main() -> None:
    """Run the command line ``fedmjp``."""
    run(app)

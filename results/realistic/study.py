"""What attacks recover of training as it is done: batches, train mode, local steps, and weights of every age.

``python results/realistic/study.py RUN --data FOLDER --output FOLDER``, after
``fedmjp simulate --config benchmarks/training/realistic.yaml --data FOLDER --output RUN``.

The same pictures, of the validation split, are attacked at the weights that the server sent in each round that was
recorded. ``step`` says what the client did:

- ``gradient``: FedSGD in evaluation mode without label smoothing, as attacks are usually measured;
- ``train``: FedSGD with the recipe's drop path and label smoothing;
- ``mixup``: FedSGD with label smoothing on pictures mixed in pairs, as the recipe says; scores are of mixed pictures;
- ``steps``: the weight change of five SGD steps on the batch;
- ``epochs``: the weight change of two epochs of SGD with momentum, four pictures a step;
- ``adamw``: the weight change of five steps of AdamW on the batch;
- ``adamw_train``: the same with drop path, and ``adamw_smoothed`` with label smoothing as well;
- ``adamw_epochs``: the weight change of two epochs of AdamW, four pictures a step;
- ``adamw_epochs_train``: the same with drop path and label smoothing;
- ``adamw_as_sgd``: the weight change of five steps of AdamW by the recipe's own loop, with drop path and label
  smoothing, before a server that takes them for SGD's: its attacks and its ``class_fishing`` are those made for SGD.

A row per picture, or per refusal, with its reason. A search is slow: it has fewer pictures and rounds.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import pandas as pd
import torch
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedmjp import facade, records
from fedmjp.attacks import ATTACKS
from fedmjp.benchmarks.report.drawing import CEILING, STYLE, Scale
from fedmjp.benchmarks.scripts import Pictures, keep_table, load_unseen
from fedmjp.config import Checkpoint, ModelConfig
from fedmjp.data.loading import Batch
from fedmjp.data.pictures import LabelledPicture
from fedmjp.errors import AttackFailedError, BadInputError, ConfigError, RecordError
from fedmjp.exchange import Exchange, compute_update, make_upload, prepare_private
from fedmjp.learning import Learning, Recipe
from fedmjp.metrics import EXACT, RECOGNISABLE
from fedmjp.models.build import build, build_vit, with_weights
from fedmjp.models.classifier import Classifier, VitClassifier
from fedmjp.private import PrivateBatch
from fedmjp.running import run_function
from fedmjp.scenario import Scenario
from fedmjp.seeds import derive, scoped_randomness
from fedmjp.server.uploads import WEIGHTS
from fedmjp.training.loop import Schedule, Trainer

SEED = 0
BATCHES = (1, 4, 16)
LOCAL_STEPS = 5
GALLERY = 256  # pictures among which features are looked up
# What matters of a few steps; what the server is told of it stands with the steps.
RECIPE = Recipe(label_smoothing=0.1, drop_path=0.1, mixup=0, cutmix=0, warmup_epochs=0)
Upload = Callable[[Scenario, list[LabelledPicture], VitClassifier], Exchange]


@dataclass(frozen=True)
class Approach:
    """What a server does: an attack, behind weights of its own making or not."""

    attack: str
    options: Mapping[str, Any] = field(default_factory=dict)
    server: str | None = None

    @property
    def name(self) -> str:
        """As tables have it."""
        return f"{self.server}, {self.attack}" if self.server else self.attack


@dataclass(frozen=True)
class Step:
    """What a client does: as the scenario tells the server, and what it uploads."""

    told: Mapping[str, Any]
    upload: Upload
    smallest: int = 1  # pictures of a batch


CLOSED = (
    Approach("patch_embedding"),
    Approach("patch_embedding_wiener"),
    Approach("mjp_prior"),
    Approach("class_token"),
    Approach("patch_embedding", server="class_fishing"),
    Approach("grey"),
)
SEARCHES = (Approach("gradient_matching", {"iterations": 100}),)
SEARCHED = 16  # pictures, at the first and the last of the rounds


def main(
    run: Annotated[Path, typer.Argument(help="Folder of the training run.", metavar="RUN")],
    data: Pictures,
    pictures: Annotated[int, typer.Option(help=f"A multiple of {max(BATCHES)}.")] = 64,
    output: Annotated[Path, typer.Option(help="Folder for the table and the figure.", metavar="FOLDER")] = Path(
        "results/realistic"
    ),
) -> None:
    """Attack the same pictures at the weights of every recorded round."""
    torch.set_num_threads(1)
    if pictures % max(BATCHES):
        raise BadInputError(f"--pictures {pictures} make no whole batches: take a multiple of {max(BATCHES)}")
    ages = weights_sent(run)
    first = next(iter(ages.values()))
    chosen = load_unseen(data, max(pictures, GALLERY), first.model, SEED)
    rounds = sorted(ages)
    searched = {rounds[0], rounds[-1]}
    table = pd.DataFrame(
        {"round": number, **row}
        for number in rounds
        for approach in [*CLOSED, *(SEARCHES if number in searched else ())]
        for row in rows_of(ages[number], chosen[: SEARCHED if approach in SEARCHES else pictures], approach, chosen)
    )
    keep_table(output, table, {"seed": SEED, "pictures": pictures, "gallery": len(chosen), "local_steps": LOCAL_STEPS})
    with mpl.rc_context(STYLE):
        figure(table).savefig(output / "over_training.svg", metadata={"Date": None})
    typer.echo(summary(table).to_string())


def weights_sent(run: Path) -> dict[int, Scenario]:
    """By recorded round, a scenario of single gradients at the weights that the server had sent.

    Raises:
        BadInputError: If no round was recorded.
    """
    model = ModelConfig.parse(json.loads((run / "manifest.json").read_text(encoding="utf-8"))["config"]["model"])
    files = sorted((run / "records").glob(f"round-*/uploads/*/{WEIGHTS}"))
    if not files:
        raise BadInputError(f"{run} holds no recorded round: run fedmjp simulate with records=[...]")
    return {
        int(path.parts[-4].removeprefix("round-")): Scenario.parse(
            {"model": model.model_copy(update={"weights": Checkpoint.of(path)})}
        )
        for path in files
    }


def rows_of(
    age: Scenario, pictures: Sequence[LabelledPicture], approach: Approach, others: Sequence[LabelledPicture]
) -> Iterator[dict[str, Any]]:
    """Return what one approach makes of every step and size of batch; features are looked up among others."""
    network = build_vit(age.network)
    gallery = [prepare_private(age, [picture], 0) for picture in others]
    for name, step in STEPS.items():
        for size in BATCHES:
            if size < step.smallest:
                continue
            values = {"pictures_per_client": size, "batch_size": size, **step.told}
            if approach.server:
                values["server"] = approach.server
            about = {"step": name, "batch": size, "attack": approach.name}
            try:
                scenario = Scenario.parse({"model": age.model, **values})
            except ConfigError as error:
                yield {**about, "refusal": str(error)}
                continue
            attack = ATTACKS.get(approach.attack)(dict(approach.options))
            if reason := attack.refusal(network, scenario.threat.isolated):
                yield {**about, "refusal": reason}
                continue
            for start in range(0, len(pictures) - size + 1, size):
                batch = list(pictures[start : start + size])
                try:
                    exchange = step.upload(scenario, batch, network)
                except RecordError as error:  # weights of a server's making may break a client's steps down
                    wanted = [batch[place] for place in scenario.wanted([picture.label for picture in batch])]
                    yield from ({**about, "picture": picture.name, "error": str(error)} for picture in wanted)
                    continue
                for scored in attacked(scenario, approach, exchange, network, gallery):
                    yield {**about, **scored}


def attacked(
    scenario: Scenario, approach: Approach, exchange: Exchange, network: VitClassifier, gallery: Sequence[PrivateBatch]
) -> Iterator[dict[str, Any]]:
    """Scores of each picture that the server is after, or the attack's failure."""
    sent = with_weights(network, exchange.changed[0] if exchange.changed else {})
    private = exchange.private.of_places(scenario.wanted(exchange.private.labels.tolist()))
    about = [{"picture": name, "picture_sha256": private.sha256(place)} for place, name in enumerate(private.pictures)]
    try:
        disclosed = facade.attack(approach.attack, exchange.upload, scenario, options=approach.options, model=sent)
    except AttackFailedError as error:
        yield from ({**one, "error": str(error)} for one in about)
        return
    scores = facade.score(disclosed, private, metrics=("psnr",), model=sent, gallery=gallery)
    for place, one in enumerate(about):
        yield {**one, **{name: float(values[place]) for name, values in scores.items()}}


def stated(scenario: Scenario, pictures: list[LabelledPicture], network: VitClassifier) -> Exchange:
    """Return the upload that the scenario itself describes."""
    return scenario.exchange(pictures, model=network)


def trained(scenario: Scenario, pictures: list[LabelledPicture], network: VitClassifier) -> Exchange:
    """Return the gradient of a client in train mode."""
    plain, trainer, batch = _client(scenario, pictures, network)
    gradients, _ = trainer.gradient(batch, 0, 0)
    return _with(plain, {name: value.detach().clone() for name, value in gradients.items()})


def stepped(scenario: Scenario, pictures: list[LabelledPicture], network: VitClassifier) -> Exchange:
    """Return the weight change of a client that takes steps of AdamW in train mode, as the recipe has them."""
    plain, trainer, batch = _client(scenario, pictures, network)
    before = _weights(trainer.model)
    trainer.epoch(0, [batch] * LOCAL_STEPS)
    return _with(plain, {name: value - before[name] for name, value in _weights(trainer.model).items()})


def dropping(scenario: Scenario, pictures: list[LabelledPicture], network: VitClassifier) -> Exchange:
    """Return the upload that the scenario describes, of a client that drops paths, also while a server probes it."""
    client = build_vit(scenario.network, drop_path=RECIPE.drop_path).train()
    private = prepare_private(scenario, pictures, 0)

    def upload(changed: Sequence[Mapping[str, torch.Tensor]]) -> records.Upload:
        digest = records.weights_digest({**network.state_dict(), **(changed[0] if changed else {})})
        sent = compute_update(scenario, client, private, 0, changed)
        return make_upload(scenario, sent, private, server_round=1, node=0, weights=digest)

    changed: Sequence[Mapping[str, torch.Tensor]] = ()
    with scoped_randomness(derive(SEED, "drop path", *private.pictures)):
        if scenario.server is not None:
            server, threat = scenario.server.build(), scenario.threat
            known = server.learn(upload([server.probe(network, threat)]), network, threat)
            changed = server.weights(network, threat, known)
        return Exchange(private, upload(changed), tuple(changed))


def _client(
    scenario: Scenario, pictures: list[LabelledPicture], network: VitClassifier
) -> tuple[Exchange, Trainer, Batch]:
    """Make an exchange of these pictures, and a client in train mode that has them, and the weights that were sent."""
    plain = stated(scenario, pictures, network)
    recipe = RECIPE.model_copy(update={"batch_size": len(pictures)})
    model = build(scenario.network, drop_path=recipe.drop_path)
    model.load_state_dict({**model.state_dict(), **(plain.changed[0] if plain.changed else {})})
    trainer = Trainer(model, Learning(recipe=recipe), scenario.pipeline, schedule=Schedule(1, LOCAL_STEPS), seed=SEED)
    return plain, trainer, Batch(plain.private.clean, plain.private.labels, tuple(range(len(pictures))))


def _weights(model: Classifier) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def _with(exchange: Exchange, tensors: Mapping[str, torch.Tensor]) -> Exchange:
    return replace(exchange, upload=replace(exchange.upload, tensors=dict(tensors)))


SMOOTHED = {"label_smoothing": RECIPE.label_smoothing}
SEVERAL = {"update": "delta", "local_steps": LOCAL_STEPS}
EPOCHS = {"update": "delta", "local_steps": 8, "local_batch_size": 4}
ADAMW = {"local_optimiser": "adamw", "local_learning_rate": 1e-3, "local_weight_decay": 0.05}
STEPS: Mapping[str, Step] = {
    "gradient": Step({}, stated),
    "train": Step(SMOOTHED, trained),
    "mixup": Step(SMOOTHED | {"mixup": 0.8}, stated, smallest=2),
    "steps": Step(SEVERAL, stated),
    "epochs": Step(EPOCHS | {"local_momentum": 0.9}, stated, smallest=16),
    "adamw": Step(SEVERAL | ADAMW, stated),
    "adamw_train": Step(SEVERAL | ADAMW, dropping),
    "adamw_smoothed": Step(SEVERAL | ADAMW | SMOOTHED, dropping),
    "adamw_epochs": Step(EPOCHS | ADAMW, stated, smallest=16),
    "adamw_epochs_train": Step(EPOCHS | ADAMW | SMOOTHED, dropping, smallest=16),
    "adamw_as_sgd": Step(SEVERAL | SMOOTHED, stepped),
}


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """By step, batch and attack, over the rounds: pictures, exact ones, median; labels and pictures told; a refusal."""
    cells = table.assign(exact=table["psnr"] >= EXACT).groupby(["step", "batch", "attack"], sort=False)
    figures = cells.agg(n=("picture", "count"), exact=("exact", "sum"), median=("psnr", "median"))
    figures[["labels", "rank1"]] = cells[["label_accuracy", "rank1"]].mean().round(3)
    for reason in {"refusal", "error"} & set(table):
        figures[reason] = cells[reason].first()
    return figures.round(3)


def figure(table: pd.DataFrame) -> Figure:
    """Attack the same pictures over the rounds, in train mode: median PSNR by batch size, shares found by features."""
    drawn = Figure(figsize=(9.6, 3.2), layout="constrained")
    *panels, found = drawn.subplots(1, len(BATCHES) + 1)
    trained_on = table[table["step"] == "train"]
    names = trained_on.dropna(subset="psnr")["attack"].unique()
    colours = {name: f"C{place}" for place, name in enumerate(names)}
    for axes, size in zip(panels, BATCHES, strict=True):
        shown = trained_on[trained_on["batch"] == size].dropna(subset="psnr")
        for name, rows in shown.groupby("attack", sort=False):
            medians = rows.groupby("round")["psnr"].median().clip(upper=CEILING)
            axes.plot(medians.index, medians, colours[name], marker="o", markersize=3, linewidth=1.2, label=str(name))
        Scale("y", RECOGNISABLE, table["psnr"].dropna().tolist(), {}).draw(axes, "a")
        axes.set(title=f"batches of {size}", xlabel="round", ylabel="median PSNR in dB" if size == BATCHES[0] else "")
    drawn.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=len(names), fontsize=7)
    _shares(found, trained_on.dropna(subset="rank1"))
    return drawn


def _shares(axes: Axes, rows: pd.DataFrame) -> None:
    """Draw the share of pictures that their features find, a line per size of batch."""
    for size, members in rows.groupby("batch"):
        shares = 100 * members.groupby("round")["rank1"].mean()
        axes.plot(shares.index, shares, marker="o", markersize=3, linewidth=1.2, label=f"batches of {size}")
    axes.set(title="class_token: found first", xlabel="round", ylabel="% of pictures", ylim=(0, 103))
    axes.legend(fontsize=6)


if __name__ == "__main__":
    run_function(main)

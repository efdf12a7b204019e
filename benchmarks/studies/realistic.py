"""What attacks recover of training as it is done: batches, train mode, local steps, and weights of every age.

``python -m benchmarks.studies.realistic RUN --data FOLDER --output FOLDER``, after
``fedmjp simulate --config benchmarks/training/realistic.yaml --data FOLDER --output RUN``.

The same pictures, of the validation split, are attacked at the weights that the server sent in each round that was
recorded. ``step`` says what the client did:

- ``gradient``: FedSGD in evaluation mode without label smoothing, as attacks are usually measured;
- ``train``: FedSGD with the recipe's drop path and label smoothing;
- ``mixup``: the same on pictures mixed in pairs, as the recipe says;
- ``steps``: the weight change of five SGD steps.

A row per picture, or per refusal, with its reason. A search is slow: it has fewer pictures and rounds.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import pandas as pd
import torch
import typer
from matplotlib.figure import Figure

from attacks import ATTACKS
from attacks.base import Attack, showing_pictures
from benchmarks.leaderboard.entries import EXACT, RECOGNISABLE
from benchmarks.report.drawing import CEILING, STYLE, Scale
from benchmarks.running import evaluator
from benchmarks.scripts import Pictures, keep_table, timed, unseen
from fedmjp.config import Checkpoint, ModelConfig
from fedmjp.data.loading import Batch
from fedmjp.data.pictures import LabelledPicture
from fedmjp.errors import BadInputError
from fedmjp.exchange import Exchange
from fedmjp.learning import Learning, Recipe
from fedmjp.metrics import metric
from fedmjp.models.build import build, build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Reconstruction
from fedmjp.running import run_function
from fedmjp.scenario import Scenario
from fedmjp.seeds import torch_generator
from fedmjp.training.loop import Schedule, Trainer
from server.uploads import WEIGHTS

SEED = 0
BATCHES = (1, 4, 16)
LOCAL_STEPS = 5
RECIPE = Recipe(label_smoothing=0.1, drop_path=0.1, mixup=0, cutmix=0)  # of one gradient, nothing else matters
CLOSED: Mapping[str, Mapping[str, Any]] = {
    "patch_embedding": {},
    "patch_embedding_wiener": {},
    "mjp_prior": {},
    "grey": {},
}
SEARCHES: Mapping[str, Mapping[str, Any]] = {"gradient_matching": {"iterations": 100}}
SEARCHED = 16  # pictures, at the first and the last of the rounds
Step = Callable[[Scenario, list[LabelledPicture], VitClassifier], Exchange]


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
    chosen = unseen(data, pictures, first.model, SEED)
    rounds = sorted(ages)
    searched = {rounds[0], rounds[-1]}
    table = pd.DataFrame(
        {"round": number, **row}
        for number in rounds
        for name, options in {**CLOSED, **(SEARCHES if number in searched else {})}.items()
        for row in rows_of(ages[number], chosen[: SEARCHED if name in SEARCHES else pictures], name, options)
    )
    keep_table(output, table, {"seed": SEED, "pictures": pictures, "local_steps": LOCAL_STEPS})
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
    age: Scenario, pictures: list[LabelledPicture], name: str, options: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """What one attack makes of every step and size of batch."""
    network = build_vit(age.network)
    for step, (update, upload) in STEPS.items():
        for size in BATCHES:
            if step == "mixup" and size == 1:
                continue  # pictures are mixed in pairs
            values = {"pictures_per_client": size, "batch_size": size, **update}
            scenario = Scenario.parse({"model": age.model, **values})
            about = {"step": step, "batch": size, "attack": name}
            attack = showing_pictures(ATTACKS.get(name)(dict(options)))
            if reason := attack.refusal(network, scenario.threat):
                yield {**about, "refusal": reason}
                continue
            batches = [pictures[start : start + size] for start in range(0, len(pictures) - size + 1, size)]
            exchanges = [upload(scenario, batch, network) for batch in batches]
            shown = [picture for batch in batches for picture in batch]
            for picture, scored in zip(shown, attacked(scenario, attack, exchanges, network), strict=True):
                yield {**about, "picture": picture.name, "picture_sha256": picture.digest(), **scored}


def attacked(
    scenario: Scenario, attack: Attack[VitClassifier, Reconstruction], exchanges: list[Exchange], network: VitClassifier
) -> Iterator[dict[str, float]]:
    """PSNR of each picture of some uploads, and the seconds that the attack took per upload."""
    uploads, generator = [exchange.upload for exchange in exchanges], torch_generator(SEED, "realistic")
    made, seconds = timed(partial(attack.reconstruct, uploads, network, scenario.threat, generator=generator))
    for reconstruction, exchange in zip(made, exchanges, strict=True):
        clean = exchange.private.clean
        matched = reconstruction.images[evaluator.match(reconstruction.images, clean)]
        for psnr in metric("psnr").function(matched, clean).tolist():
            yield {"psnr": psnr, "seconds": seconds / len(uploads)}


def stated(scenario: Scenario, pictures: list[LabelledPicture], network: VitClassifier) -> Exchange:
    """The upload that the scenario itself describes."""
    return scenario.exchange(pictures, model=network)


def trained(
    scenario: Scenario, pictures: list[LabelledPicture], network: VitClassifier, *, mixup: float = 0.0
) -> Exchange:
    """The gradient of a client in train mode, whose private pictures are those before they are mixed."""
    plain = stated(scenario, pictures, network)
    recipe = RECIPE.model_copy(update={"mixup": mixup, "batch_size": len(pictures)})
    model = build(scenario.network, drop_path=recipe.drop_path)
    trainer = Trainer(model, Learning(recipe=recipe), scenario.pipeline, schedule=Schedule(recipe.epochs, 1), seed=SEED)
    batch = Batch(plain.private.clean, plain.private.labels, tuple(range(len(pictures))))
    gradients, _ = trainer.gradient(batch, 0, 0)
    tensors = {name: value.detach().clone() for name, value in gradients.items()}
    return replace(plain, upload=replace(plain.upload, tensors=tensors))


STEPS: Mapping[str, tuple[Mapping[str, Any], Step]] = {
    "gradient": ({}, stated),
    "train": ({}, trained),
    "mixup": ({}, partial(trained, mixup=0.8)),
    "steps": ({"update": "delta", "local_steps": LOCAL_STEPS}, stated),
}


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """By step, batch and attack, over the rounds: pictures, exact ones, median; of refusals the reason."""
    cells = table.assign(exact=table["psnr"] >= EXACT).groupby(["step", "batch", "attack"], sort=False)
    figures = cells.agg(n=("psnr", "count"), exact=("exact", "sum"), median=("psnr", "median"))
    return figures.round(1).assign(refusal=cells["refusal"].first()) if "refusal" in table else figures.round(1)


def figure(table: pd.DataFrame) -> Figure:
    """Median PSNR of the same pictures over the rounds, in train mode: a panel per size of batch, a line per attack."""
    drawn = Figure(figsize=(7.4, 2.8))
    panels = drawn.subplots(1, len(BATCHES), sharey=True)
    for axes, size in zip(panels, BATCHES, strict=True):
        shown = table[(table["step"] == "train") & (table["batch"] == size)].dropna(subset="psnr")
        for name, rows in shown.groupby("attack", sort=False):
            medians = rows.groupby("round")["psnr"].median().clip(upper=CEILING)
            axes.plot(medians.index, medians, marker="o", markersize=3, linewidth=1.2, label=str(name))
        Scale("y", RECOGNISABLE, table["psnr"].dropna().tolist(), {}).draw(axes, "a")
        axes.set(title=f"batches of {size}", xlabel="round", ylabel="median PSNR in dB" if size == BATCHES[0] else "")
    panels[0].legend(fontsize=7)
    return drawn


if __name__ == "__main__":
    run_function(main)

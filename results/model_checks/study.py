"""How often a client's checks notice a model that was made to leak, and how often they raise a false alarm.

``python results/model_checks/study.py --data FOLDER --output FOLDER``, with pictures of 32 classes. Real
clients
and Flower's own strategies train together in this process, message for message without an engine between them. In every
round each client examines what arrives (``fedmjp.clients.checks``) before it trains: an alarm is then false. In some
rounds it
also examines, in the place of the honest weights and with the same history, what servers make of them. A row per model
and client. ``case`` is the server, or ``honest``; limits come of ``fedmjp.clients.checks`` and were set on other seeds.

- ``first`` rows are of a first round: nothing earlier to compare with;
- ``quiet`` is class fishing without zero rows: all rows but one are scaled by 1e-3, and the bias is -30;
- ``slow`` is the same in steps from honest weights, over ``SLOW`` rounds, of a client alone that trains on it;
- ``breaching_*`` are made by breaching's code: on the transformer its class and feature attacks, on a network of linear
  layers and ReLU its trap weights and its imprint block;
- ``trap`` are trap weights as Boenisch et al. define them. breaching draws what should be negative with either sign, so
  that its own isolate no picture. Both are made for pixels that are not negative: that network is played on pixels in
  [0, 1], and on normalised ones.

References:
    Boenisch et al., "When the curious abandon honesty: Federated learning is not private", EuroS&P 2023.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
import typer
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor, nn

import fedmjp
from fedmjp.benchmarks.leaderboard.statistics import share
from fedmjp.benchmarks.scripts import Pictures, keep_table
from fedmjp.clients.checks import Finding, Incoming, examine_model, remember
from fedmjp.clients.training import LocalTraining
from fedmjp.data.datasets import open_dataset
from fedmjp.data.partitions import partition
from fedmjp.data.pictures import LabelledDataset, LabelledPicture, to_image
from fedmjp.exchange import change_weights
from fedmjp.learning import Training
from fedmjp.models import names
from fedmjp.models.build import build, build_vit, with_weights
from fedmjp.models.classifier import VitClassifier
from fedmjp.running import run_function
from fedmjp.scenario import AnyScenario, Scenario, TrainingScenario
from fedmjp.seeds import numpy_generator, scoped_randomness, torch_generator
from fedmjp.server.aggregation import Aggregator
from fedmjp.server.shelf import Shelf
from fedmjp.wire import ARRAYS, EXAMPLES, METRICS
from fedmjp.yaml_files import read_yaml

CONFIG = Path(fedmjp.__file__).parent / "benchmarks" / "training" / "coarse_federated.yaml"
STRATEGIES = (
    ("fedavg", "iid"),
    ("fedavgm", "iid"),
    ("fedadam", "iid"),
    ("fedavg", "dirichlet"),
    ("fedavg", "pathological"),
)
DEFENCES = ("none", "mjp:mask_ratio=0.27")
ROUNDS, CLIENTS = 50, 4
SHARE = 96  # pictures of a client, at most
EXAMINED = 16  # of them, that it examines models with; a server fishes in another batch of so many
CHANGED = (1, 10, 30, 50)  # rounds in which servers change the weights
SERVERS = ("class_fishing", "feature_fishing", "suppression", "token_imprint")
BREACHING = ("breaching_class", "breaching_feature")
TRAPS = ("trap", "breaching_trap", "breaching_imprint")
TRAP_SCALE, TRAP_DEVIATION = 0.95, 0.5  # breaching's
CENTRE, WIDTH = 0.5, 0.25  # of normalised pixels
SLOW_FROM, SLOW = 10, 40  # the round before the first step, and their number
QUIET, BIAS = 1e-3, -30.0
HIDDEN = 256  # units of the network of linear layers


class Arm(NamedTuple):
    """A federation: the model, the strategy, how pictures are dealt, the defence of pictures."""

    model: str
    strategy: str
    partition: str
    defence: str


@dataclass
class Site:
    """What a client keeps between rounds."""

    images: Tensor
    labels: Tensor
    batch: list[LabelledPicture]  # that a server fishes in
    history: dict[str, list[float]] = field(default_factory=dict)
    previous: Mapping[str, Tensor] | None = None
    update: Mapping[str, Tensor] | None = None

    def examine(self, model: nn.Module, weights: Mapping[str, Tensor]) -> list[Finding]:
        """Return what the checks say of weights that arrive."""
        model.load_state_dict(weights)
        incoming = Incoming(model, weights, self.previous, self.update, self.images, self.labels, self.history)
        return examine_model(incoming)


Train = Callable[[int, int, Mapping[str, Tensor]], tuple[dict[str, Tensor], int]]
Servers = Callable[[Mapping[str, Tensor], Site], Iterator[tuple[str, Mapping[str, Tensor]]]]


def main(
    data: Pictures,
    output: Annotated[Path, typer.Option(help="Folder for the table.", metavar="FOLDER")] = Path(
        "results/model_checks"
    ),
    seed: Annotated[int, typer.Option(help="Of weights, shares and batches.", min=0)] = 0,
    rounds: Annotated[int, typer.Option(help="Of every federation.", min=1)] = ROUNDS,
) -> None:
    """Train, examine, and keep a row per examined model."""
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    dataset = open_dataset(data, "train", classes=32)
    about = {"seed": seed, "rounds": rounds, "clients": CLIENTS, "pictures_per_client": SHARE}
    rows: list[dict[str, Any]] = []
    dense = (_dense(dataset, seed, rounds, normalised=normalised) for normalised in (True, False))
    parts = (*dense, *_transformers(dataset, data, seed, rounds), _small(dataset))
    for part in parts:
        rows += part
        table = pd.DataFrame(rows)
        keep_table(output, table, about)  # as far as it is: federations take minutes
        typer.echo(f"{' '.join(table.iloc[-1][list(Arm._fields)])}: done")
    for counted in summary(table):
        typer.echo(counted.to_markdown(index=False, disable_numparse=True) + "\n")


def summary(table: pd.DataFrame) -> list[pd.DataFrame]:
    """Report false alarms by federation; what is noticed by server, with and without a history."""
    honest = table[table["case"] == "honest"]
    alarms = [
        {
            "federation": " ".join(map(str, key)),
            "models examined": str(len(rows)),
            "false alarms, %": _percent(rows["suspicious"]),
            "rounds": str(rows["round"].nunique()),
            "rounds with one, %": _percent(rows.groupby("round")["suspicious"].any()),
        }
        for key, rows in honest.groupby(list(Arm._fields), sort=False)
    ]
    changed = table[~table["case"].isin(["honest", "slow"])]
    noticed = [
        {
            "model": str(key[0]),
            "server": str(key[1]),
            "first round, %": _percent(rows.loc[rows["round"] == 1, "suspicious"]),
            "later, %": _percent(rows.loc[rows["round"] > 1, "suspicious"]),
        }
        for key, rows in changed.groupby(["model", "case"], sort=False)
    ]
    return [pd.DataFrame(alarms), pd.DataFrame(noticed)]


def _percent(noticed: "pd.Series[bool]") -> str:
    if noticed.empty:
        return "not run"
    counted = share(int(noticed.sum()), len(noticed))
    return f"{100 * counted.share:.1f} ({100 * counted.low:.1f} to {100 * counted.high:.1f}), n {len(noticed)}"


def _transformers(dataset: LabelledDataset, data: str, seed: int, rounds: int) -> Iterator[Iterator[dict[str, Any]]]:
    for defence, (strategy, scheme) in itertools.product(DEFENCES, STRATEGIES):
        scenario = _scenario(data, strategy, scheme, defence, seed, rounds)
        arm, shares = Arm(scenario.model.name, strategy, scheme, defence), _shares(dataset, scenario)
        model, train = build_vit(scenario.network), _trained(scenario, dataset, shares)
        sites = [_site(dataset, indices, scenario.model.image_size) for indices in shares]
        yield _played(arm, scenario, model, sites, train, _servers_of(scenario, model), rounds)
    scenario = _scenario(data, *STRATEGIES[0], DEFENCES[0], seed, rounds)
    yield _slowly(Arm(scenario.model.name, *STRATEGIES[0], DEFENCES[0]), scenario, dataset, rounds)


def _scenario(data: str, strategy: str, scheme: str, defence: str, seed: int, rounds: int) -> TrainingScenario:
    values = dict(read_yaml(CONFIG)[1])
    training = {name: values.pop(name) for name in list(values) if name in Training.model_fields}
    training |= {"strategy": strategy, "rounds": rounds, "partition": {**training["partition"], "scheme": scheme}}
    regressed = "none" if defence == "none" else "nonlinear"
    return TrainingScenario.parse(
        {
            **values,
            "model": {**values.pop("model"), "seed": seed, "localisation": regressed},
            "data": data,
            "clients": CLIENTS,
            "defences": () if defence == "none" else (defence,),
            "seed": seed,
            "training": training,
        }
    )


def _shares(dataset: LabelledDataset, scenario: TrainingScenario) -> list[np.ndarray]:
    """Each client's pictures, at most so many of those that it was dealt."""
    config = scenario.training.partition
    dealt = partition(dataset.labels, config, clients=CLIENTS, seed=scenario.seed)
    generator = numpy_generator(scenario.seed, "share")
    return [generator.permutation(indices)[:SHARE] for indices in dealt.shares]


def _site(dataset: LabelledDataset, indices: np.ndarray, size: int) -> Site:
    def loaded(index: int) -> LabelledPicture:
        image = to_image(dataset.photograph(index), size, crop_share=1.0)
        return LabelledPicture(dataset.key(index), image, int(dataset.labels[index]))

    own = [loaded(int(index)) for index in indices[:EXAMINED]]
    batch = [loaded(int(index)) for index in indices[EXAMINED : 2 * EXAMINED]]
    return Site(torch.stack([one.image for one in own]), torch.tensor([one.label for one in own]), batch)


def _trained(scenario: TrainingScenario, dataset: LabelledDataset, shares: Sequence[np.ndarray]) -> Train:
    aggregator = Aggregator(scenario, [name for name, _ in build(scenario.network).named_parameters()])

    def train(server_round: int, client: int, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], int]:
        training, seed = scenario.training, scenario.seed
        local = LocalTraining(scenario, training, client, server_round, dataset, shares[client], seed)
        answer = local.answer(RecordDict({**aggregator.records(weights), "config": ConfigRecord({})}))
        return answer.array_records[ARRAYS].to_torch_state_dict(), len(shares[client])

    return train


def _played(
    arm: Arm,
    scenario: TrainingScenario,
    model: nn.Module,
    sites: Sequence[Site],
    train: Train,
    servers: Servers,
    rounds: int,
) -> Iterator[dict[str, Any]]:
    """Every round of a federation: examined by each client, then trained and aggregated."""
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # no engine gives messages their identity
    aggregator, shelf = Aggregator(scenario, [name for name, _ in model.named_parameters()]), Shelf()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    for server_round in range(1, rounds + 1):
        nodes = list(range(1, len(sites) + 1))
        messages = aggregator.messages(server_round, aggregator.records(weights), nodes)
        updates = []
        for client, (site, message) in enumerate(zip(sites, messages, strict=True)):
            arrived = message.content.array_records[ARRAYS].to_torch_state_dict()
            place = {**arm._asdict(), "round": server_round, "client": client}
            if server_round in CHANGED:
                for server, changed in servers(arrived, site):
                    yield {**place, "case": server, **_row(site.examine(model, {**arrived, **changed}))}
            findings = site.examine(model, arrived)
            yield {**place, "case": "honest", **_row(findings)}
            update, examples = train(server_round, client, arrived)
            site.history, site.previous, site.update = remember(site.history, findings), arrived, update
            updates.append(shelf.keep(_reply(message, update, examples)))
        stepped = aggregator.aggregate(server_round, weights, updates)
        shelf.clear()
        if stepped is not None:
            weights = stepped


def _reply(message: Message, update: Mapping[str, Tensor], examples: int) -> Message:
    message.metadata.__dict__["_message_id"] = f"message-{message.metadata.dst_node_id}"
    content = RecordDict({ARRAYS: ArrayRecord(dict(update)), METRICS: MetricRecord({EXAMPLES: examples})})
    return Message(content=content, reply_to=message)


def _row(findings: Sequence[Finding]) -> dict[str, Any]:
    """Whether anything is suspicious, what, and every value."""
    alarms = [finding.check for finding in findings if finding.suspicious]
    values = {finding.check: finding.value for finding in findings if finding.ran}
    limits = {f"{finding.check}, limit": finding.limit for finding in findings if finding.ran}
    return {"suspicious": bool(alarms), "alarms": ", ".join(alarms), **values, **limits}


def _servers_of(scenario: AnyScenario, model: VitClassifier) -> Servers:
    """Return what servers make of a transformer's honest weights; nothing where they refuse, or learn nothing."""

    def servers(weights: Mapping[str, Tensor], site: Site) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
        if len(site.batch) < EXAMINED:
            return
        model.load_state_dict(weights)
        for server in SERVERS:
            if changed := _changed(scenario, model, server, site.batch):
                yield server, changed
        yield "quiet", _quiet(weights, site.batch[0].label)
        for attack in BREACHING:
            yield attack, _by_breaching(model, attack, site.batch)

    return servers


def _changed(
    scenario: AnyScenario, model: VitClassifier, server: str, batch: Sequence[LabelledPicture]
) -> Mapping[str, Tensor]:
    """Return what a server sends to a client that shows this batch; to one that it silences, of suppression."""
    count = len(batch)
    defences = [config for config in scenario.defences if config.name == "mjp"]
    values: dict[str, Any] = {"model": scenario.model, "server": server, "defences": defences}
    if server == "suppression":
        values |= {"defences": [*defences, "secure_sum:clients=2"], "clients": 2}
        count //= 2
    asked = Scenario.parse({**values, "batch_size": count, "pictures_per_client": count, "seed": scenario.seed})
    return change_weights(asked, model, batch)[-1]


def _quiet(weights: Mapping[str, Tensor], wanted: int) -> dict[str, Tensor]:
    head, bias = QUIET * weights[names.HEAD_WEIGHT], QUIET * weights[names.HEAD_BIAS]
    head[wanted] = weights[names.HEAD_WEIGHT][wanted]
    bias[wanted] = BIAS
    return {names.HEAD_WEIGHT: head, names.HEAD_BIAS: bias}


def _by_breaching(model: VitClassifier, attack: str, batch: Sequence[LabelledPicture]) -> dict[str, Tensor]:
    from breaching.cases.malicious_modifications import (  # type: ignore[import-untyped]  # noqa: PLC0415 (seconds)
        classattack_utils,
    )

    changed = with_weights(model, {names.HEAD_BIAS: model.get_parameter(names.HEAD_BIAS).detach().clone()})
    wanted = {"cls_to_obtain": batch[0].label}
    classattack_utils.reconfigure_class_parameter_attack(
        changed.backbone, model.backbone, "cls_attack", extra_info=wanted
    )
    if attack == "breaching_feature":
        # As its server sets them: a direction, the value there, and a multiplier of 300.
        with torch.no_grad():
            feature = model.features(batch[0].image[None])[0]
        place = int(feature.argmax())
        found = {"feat_to_obtain": place, "feat_value": float(feature[place]), "multiplier": 300}
        classattack_utils.reconfigure_class_parameter_attack(
            changed.backbone, model.backbone, "feature_attack", extra_info=wanted | found
        )
    return {name: changed.get_parameter(name).detach() for name in (names.HEAD_WEIGHT, names.HEAD_BIAS)}


def _slowly(arm: Arm, scenario: TrainingScenario, dataset: LabelledDataset, rounds: int) -> Iterator[dict[str, Any]]:
    """Quiet class fishing in steps, for each client alone: what it trains on is what it was sent."""
    shares, model = _shares(dataset, scenario), build_vit(scenario.network)
    train = _trained(scenario, dataset, shares)
    for client, indices in enumerate(shares):
        site = _site(dataset, indices, scenario.model.image_size)
        if len(site.batch) < EXAMINED:
            continue
        weights = {name: value.clone() for name, value in build_vit(scenario.network).state_dict().items()}
        for server_round in range(1, min(rounds, SLOW_FROM + SLOW) + 1):
            part = max(0, server_round - SLOW_FROM) / SLOW
            quiet = _quiet(weights, site.batch[0].label)
            sent = {**weights, **{name: (1 - part) * weights[name] + part * quiet[name] for name in quiet}}
            findings = site.examine(model, sent)
            place = {**arm._asdict(), "round": server_round, "client": client, "case": "slow", "part": part}
            yield {**place, **_row(findings)}
            update, _ = train(server_round, client, sent)
            site.history, site.previous, site.update = remember(site.history, findings), sent, update
            weights = {name: value + update.get(name, torch.zeros(())) for name, value in weights.items()}


def _dense(dataset: LabelledDataset, seed: int, rounds: int, *, normalised: bool) -> Iterator[dict[str, Any]]:
    """Linear layers and ReLU, trained with SGD: what trap weights are made for."""
    arm = Arm("linear layers" if normalised else "linear layers, pixels in [0, 1]", "fedavg", "iid", "none")
    centre, width = (CENTRE, WIDTH) if normalised else (0.0, 1.0)
    scenario = _scenario("bundled", "fedavg", "iid", "none", seed, rounds)
    shares = _shares(dataset, scenario)
    size = scenario.model.image_size
    sites = [_site(dataset, indices, size) for indices in shares]
    with scoped_randomness(seed):
        model = nn.Sequential(
            nn.Flatten(),
            nn.Linear(3 * size**2, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, 128),
            nn.ReLU(),
            nn.Linear(128, 32),
        )
    pictures = [
        torch.stack(
            [(to_image(dataset.photograph(int(index)), size, crop_share=1.0) - centre) / width for index in indices]
        )
        for indices in shares
    ]
    for site in sites:
        site.images = (site.images - centre) / width

    def train(server_round: int, client: int, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], int]:
        model.load_state_dict(weights)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        labels = torch.from_numpy(dataset.labels[shares[client]])
        order = torch.randperm(len(labels), generator=torch_generator(seed, "order", client, server_round))
        for batch in torch.split(order, 32):
            optimizer.zero_grad()
            F.cross_entropy(model(pictures[client][batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return {name: value.detach() - weights[name] for name, value in model.named_parameters()}, len(labels)

    yield from _played(arm, scenario, model, sites, train, _trap, rounds)


def _trap(weights: Mapping[str, Tensor], site: Site) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """Trap weights, and the first layers of breaching's blocks, in the place of the network's own."""
    from breaching.cases.malicious_modifications import imprint  # noqa: PLC0415 (seconds, for what needs it)

    shape = tuple(site.images.shape[1:])
    with scoped_randomness(0):
        trap = imprint.CuriousAbandonHonesty(shape, HIDDEN)
        block = imprint.ImprintBlock(shape, HIDDEN, gain=1.0, linfunc="fourier", mode=32)
    yield TRAPS[0], {"1.weight": _trap_rows(*weights["1.weight"].shape), "1.bias": torch.zeros(HIDDEN)}
    yield TRAPS[1], {"1.weight": trap.linear0.weight.detach(), "1.bias": trap.linear0.bias.detach()}
    second = weights["3.weight"]
    imprinted = {"1.weight": block.linear0.weight.detach(), "1.bias": block.linear0.bias.detach()}
    yield TRAPS[2], {**imprinted, "3.weight": block.linear2.weight.detach()[: len(second), : second.shape[1]]}


def _trap_rows(units: int, values: int) -> Tensor:
    """(units, values): of each row a random half is negative, the other half the same numbers, scaled and positive."""
    generator = torch_generator(0, "trap")
    drawn = TRAP_DEVIATION * torch.randn(units, values // 2, generator=generator).abs()
    places = torch.rand(units, values, generator=generator).argsort(dim=1)
    return torch.empty(units, values).scatter_(1, places, torch.cat([-drawn, TRAP_SCALE * drawn], dim=1))


def _small(dataset: LabelledDataset) -> Iterator[dict[str, Any]]:
    """DeiT-S as it is drawn, at 224 x 224: one client in its first round."""
    scenario = Scenario.parse({"model": "deit_small"})
    model = build_vit(scenario.network)
    indices = numpy_generator(scenario.seed, "small").permutation(len(dataset))
    site = _site(dataset, indices, scenario.model.image_size)
    site.batch[-1] = replace(site.batch[-1], label=site.batch[0].label)  # a class that occurs twice
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    place = {**Arm("deit_small", "none", "none", "none")._asdict(), "round": 1, "client": 0}
    yield {**place, "case": "honest", **_row(site.examine(model, weights))}
    for server, changed in _servers_of(scenario, model)(weights, site):
        yield {**place, "case": server, **_row(site.examine(model, {**weights, **changed}))}


if __name__ == "__main__":
    run_function(main)

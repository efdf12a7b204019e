"""Which labels updates tell, and what statistics of private batches BatchNorm layers send along."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedmjp.attacks.labels import LastLayer, count_labels
from fedmjp.benchmarks.audit.answers import unanswered
from fedmjp.benchmarks.audit.app_loss import CLASSIFICATION, read_examples
from fedmjp.benchmarks.audit.evaluating import read_private
from fedmjp.benchmarks.audit.intervals import rate_interval, rounded
from fedmjp.benchmarks.audit.recipe import as_one_group, threat_of
from fedmjp.benchmarks.audit.rerunning import resize_recipe, run_steps
from fedmjp.benchmarks.audit.running import Records, lines
from fedmjp.errors import FedmjpError
from fedmjp.threat import ThreatModel

COUNTED = "counts from the last layer's gradient"
RAISED = "the ways that the last layer's bias went"
FEWEST, SKEWED = 4, 3  # known records of the frequent class in a control, and how many of it come to another one


@dataclass(frozen=True)
class LabelCase:
    """One update whose labels are counted, by the names of the app's network."""

    message: str  # identifier of the training message
    module: nn.Module  # with the weights that the server sent
    update: Mapping[str, Tensor]  # gradient, or change of the weights as one parameter group would make it
    sent: Mapping[str, Tensor]  # the update as it was sent
    threat: ThreatModel
    is_readable: bool  # as gradients; else its signs alone say something
    is_gradient: bool


def judge_labels(cases: Sequence[LabelCase], records: Records, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Answer which labels are behind updates, under the report's keys.

    The interval is of as many labels as one round has, pooled over clients; the share is of all rounds.

    Args:
        cases: Of every client and round.
        records: Folders of the watched run.
        recipe: Of the clients' training.
    """
    values = unanswered()["labels"]
    if cases:
        values["batch_norm"] = _describe_batch_norm(cases[0], records, recipe)
    if cases and recipe.get("loss") and _copies_inputs(cases[0], records, recipe["loss"]):
        return {**values, "answered": True, "targets_are_inputs": True}
    if reason := _refusal(cases, recipe):
        return {**values, "why": reason}
    watched = {line["id"]: line for line in lines(records.evaluator / "seen.jsonl")}
    examples, right, guessed, reasons = 0, 0.0, 0.0, list[str]()
    for case in cases:
        line = watched[case.message]
        labels = {int(label): int(count) for label, count in (line.get("labels") or {}).items()}
        try:
            counts, values["attack"] = count_update(case, sum(labels.values()), recipe)
        except FedmjpError as error:
            reasons.append(str(error))
            continue
        except (RuntimeError, ValueError, LookupError) as error:  # of numbers that no audit chose
            reasons.append(f"the count broke down: {(str(error).splitlines() or [type(error).__name__])[0]}")
            continue
        classes, drawn = len(counts), sum(labels.values())
        passes = max(drawn / max(line["examples"], 1), 1)  # one that enters again counts once
        examples += round(drawn / passes)
        right += sum(min(int(counts[label]), count) for label, count in labels.items() if label < classes) / passes
        guessed += sum(min(count, drawn / classes) for count in labels.values()) / passes
        values["classes"] = classes
    if not examples:
        return {**values, "why": reasons[0] if reasons else "no labels were seen that could be compared"}
    # Rounds show the same records again: their number is that of one round.
    rounds = len(cases) / len({watched[case.message]["node"] for case in cases})
    records_seen = max(1, round(examples / rounds))
    interval = rounded(rate_interval(min(round(right / rounds), records_seen), records_seen))
    shares = {"right": round(right / examples, 4), "guess": round(guessed / examples, 4)}
    values |= {**shares, "answered": True, "interval": interval, "examples": examples}
    if interval[0] > shares["guess"]:
        return dict(values)
    control = _run_control(cases[0], records, recipe)
    if control is None or (
        rate_interval(round(control["right"] * control["examples"]), control["examples"])[0] <= control["guess"]
    ):
        figures = f"{shares['right']:.0%} of {examples} labels, where a guess gets {shares['guess']:.0%}"
        outcome = "could not be made" if control is None else f"gets {control['right']:.0%} of known ones"
        return {**values, "answered": False, "why": f"attacks read {figures}, and their control {outcome}"}
    return {**values, "control": control}


def _run_control(case: LabelCase, records: Records, recipe: Mapping[str, Any]) -> dict[str, Any] | None:
    """Count known labels, three in four of one class, behind the app's own steps without defence; None if it cannot."""
    kind = "gradient" if case.is_gradient else "weights"
    examples = read_examples(records.evaluator / f"{case.message}.npz")
    if examples is None or "groups" not in recipe:
        return None
    examples = examples.distinct(set())
    labels = examples.target.flatten().long()
    if len(labels) != len(examples):
        return None
    frequent = int(labels.mode().values)
    several = (labels == frequent).nonzero().flatten()
    mixed = torch.cat([several, (labels != frequent).nonzero().flatten()[: len(several) // SKEWED]])
    batch, true = examples[mixed], labels[mixed]
    if len(several) < FEWEST or len(mixed) == len(several):
        return None
    size = min(recipe["batch_size"], len(batch))
    resized = resize_recipe(recipe, len(batch), size, recipe["passes"])
    try:
        # In turns, as an app that shuffles has them.
        order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
        update = run_steps(case.module, batch[order], resized, kind)
        if case.is_readable and not case.is_gradient:
            update = as_one_group(update, case.module.state_dict(), resized)
        update = {name: update[name] for name in case.update if name in update}
        rerun = replace(case, update=update, threat=threat_of(resized, kind))
        counts, _ = count_update(rerun, len(batch), resized)
    except (FedmjpError, RuntimeError, ValueError, LookupError, TypeError):  # of somebody else's module
        return None
    histogram = torch.bincount(true, minlength=len(counts))[: len(counts)].double()
    return {
        "right": round(float(torch.minimum(counts.double(), histogram).sum()) / len(batch), 4),
        "guess": round(float(histogram.clamp_max(len(batch) / len(counts)).sum()) / len(batch), 4),
        "examples": len(batch),
    }


def count_update(case: LabelCase, examples: int, recipe: Mapping[str, Any]) -> tuple[Tensor, str]:
    """Count the labels (classes,) behind an update, and name the attack.

    Args:
        case: The update.
        examples: Labels that are counted, an example once in each pass.
        recipe: Of the clients' training.

    Raises:
        AttackNotApplicableError: If nothing was sent of the last layer, or examples are unknown.
    """
    rows = max((recipe["loss"].get("shape") or [0])[1:2], default=1)
    weight, bias = find_head(case.module, rows)
    state = case.module.state_dict()
    if not examples or weight is None or not {weight, bias} & set(case.update):
        raise FedmjpError("the last linear layer, whose gradient tells labels, is not sent")
    old_bias = state.get(bias)
    if not case.is_readable or case.threat.local_optimiser != "sgd":  # a step of Adam is little more than signs
        if bias not in case.update:
            raise FedmjpError("the update is no sum of gradients, and the last layer's bias was not sent")
        return _share_by_way(-case.update[bias] if case.is_gradient else case.update[bias], examples, recipe), RAISED
    factor = 1.0
    if not case.is_gradient:
        factor = -1 / (case.threat.gradients_in_delta * case.threat.local_learning_rate)
    gradients = {name: factor * case.update[name].double() for name in (weight, bias) if name in case.update}
    middle = 0.0 if case.is_gradient else 0.5  # of the way that the weights went
    weights, biases = (
        None if old is None else old.double() + middle * case.update.get(name, torch.zeros_like(old)).double()
        for name, old in ((weight, state[weight]), (bias, old_bias))
    )
    assert weights is not None  # noqa: S101 (it is in the state)
    layer = LastLayer(weights, biases, gradients.get(weight), gradients.get(bias))
    return count_labels(layer, examples, case.threat.label_smoothing), COUNTED


def find_head(module: nn.Module, rows: int) -> tuple[str | None, str]:
    """Name the last matrix with a row for each output, and the bias that it may have.

    Args:
        module: The app's; PEFT keeps an original of the head that it does not train.
        rows: Outputs of the network.
    """
    matrices = [
        name
        for name, value in module.named_parameters()
        if value.ndim == 2 and len(value) == rows and ".original_module." not in name and ".lora_" not in name
    ]
    weight = matrices[-1] if matrices else None
    return weight, "" if weight is None else weight.removesuffix("weight") + "bias"


def _share_by_way(change: Tensor, examples: int, recipe: Mapping[str, Any]) -> Tensor:
    """Share examples equally, less half where the bias fell as far as it could; those go to classes whose bias rose.

    A class whose bias rises has more examples than the network expects, and the other way round, by any optimiser; how
    many is not in signs. All to those that rose are too many (half right of two equal classes).
    """
    ways = change.double()
    if len(ways) == 1:
        ways = torch.cat([-ways, ways])
    reach = float(ways.abs().max())
    if str(recipe.get("optimiser")).startswith("Adam"):
        reach = max(reach, max(recipe["learning_rates"]) * recipe["steps"])
    raised = ways.clamp_min(0)
    if not raised.any() or not math.isfinite(reach):
        return torch.full_like(ways, examples / len(ways)).round().long()
    equal = torch.full_like(ways, 1 / len(ways))
    moved = equal * (ways.clamp_max(0).abs() / reach) / 2
    shares = equal - moved + raised / raised.sum() * moved.sum()
    return (shares * examples).round().long()


def _copies_inputs(case: LabelCase, records: Records, loss: Mapping[str, Any]) -> bool:
    """Tell whether the loss compares with the inputs themselves, as an autoencoder's does."""
    examples = read_examples(records.evaluator / f"{case.message}.npz")
    if examples is None or loss["name"] in ("cross_entropy", "nll_loss"):
        return False
    target = examples.target.reshape(len(examples), -1).float()
    inputs = [values.reshape(len(examples), -1) for values in examples.inputs.values() if values.is_floating_point()]
    return any(target.shape == values.shape and torch.allclose(target, values) for values in inputs)


def _refusal(cases: Sequence[LabelCase], recipe: Mapping[str, Any]) -> str | None:
    """Explain why no labels can be counted; None if they can."""
    loss = recipe.get("loss") or {}
    if not cases:
        return "nothing that was sent could be read as weights or as a gradient"
    if not loss:
        return "no loss of torch.nn.functional was seen, so nobody knows the labels to compare with"
    if loss["name"] not in CLASSIFICATION:
        return f"the app's loss is {loss['name']}: its targets are numbers, and no classes"
    outputs = (loss.get("shape") or [0] * 3)[1:]
    if loss["name"].startswith("binary") and outputs not in ([], [1]):
        return "each example has several labels of its own, and attacks here count one for each example"
    if len(outputs) > 1:
        return "each example has a label for every pixel or token, and attacks here count one for each example"
    return None


def batch_statistics(old: Tensor, change: Tensor, momentum: float | None, batches: int, tracked: int) -> Tensor:
    """Solve running statistics for those of the batches: of one exactly, of several their weighted mean.

    After k batches running = (1 - m)^k old + (1 - (1 - m)^k) mean, in which batch i weighs m (1 - m)^(k - i); without
    momentum all that ever came weigh the same.

    Args:
        old: Running statistics (channels,) that the server sent.
        change: What came back less these.
        momentum: Of the layer.
        batches: That the client trained on, at least 1.
        tracked: Batches that the layer had tracked when it was sent.
    """
    weight = batches / (tracked + batches) if momentum is None else 1 - (1 - momentum) ** batches
    return old.double() + change.double() / weight


def _describe_batch_norm(case: LabelCase, records: Records, recipe: Mapping[str, Any]) -> str | None:
    """State what running statistics tell of private batches; None where none were sent, or none moved."""
    state, batches = case.module.state_dict(), max(int(recipe["forwards"]), 1)
    solved: dict[str, tuple[Tensor, Tensor]] = {}
    for name, layer in case.module.named_modules():
        names = [f"{name}.{statistic}" for statistic in ("running_mean", "running_var")]
        moved = all(key in case.sent and bool(case.sent[key].any()) for key in names)
        if isinstance(layer, _BatchNorm) and moved and layer.momentum != 0:
            tracked = int(state.get(f"{name}.num_batches_tracked", torch.zeros(())))
            mean, variance = (
                batch_statistics(state[key], case.sent[key], layer.momentum, batches, tracked) for key in names
            )
            solved[name] = (mean, variance)
    if not solved or case.is_gradient:
        return None
    numbers = 2 * sum(len(mean) for mean, _ in solved.values())
    start = f"Running statistics of {len(solved)} BatchNorm layers were sent: {numbers} means and variances"
    if batches > 1:
        return f"{start} of private data, averaged over {batches} batches in which the last count most."
    private = read_private(records.evaluator, case.message, [0.0] * 3, [1.0] * 3)
    error = None if private is None or not private.entered else _deviation(case.module, private.entered[0], solved)
    checked = "not compared with what entered" if error is None else f"off by {error:.1e} of what hooks saw"
    return f"{start} of the one private batch follow exactly ({checked})."


def _deviation(module: nn.Module, batch: Tensor, solved: Mapping[str, tuple[Tensor, Tensor]]) -> float | None:
    """Compute the largest relative error of statistics, against the network's own layers in training."""
    inputs: dict[str, Tensor] = {}
    hooks = [
        module.get_submodule(name).register_forward_pre_hook(
            lambda _layer, entered, name=name: inputs.update({name: entered[0].detach().double()})
        )
        for name in solved
    ]
    values = {name: value.clone() for name, value in module.state_dict().items()}
    try:
        with torch.no_grad():
            module.train()(batch)
    except Exception:  # noqa: BLE001 (somebody else's module)
        return None
    finally:
        for hook in hooks:
            hook.remove()
        module.eval().load_state_dict(values)
    errors = []
    for name, entered in inputs.items():
        channels = entered.transpose(0, 1).flatten(1)
        for statistic, value in zip((channels.mean(1), channels.var(1)), solved[name], strict=True):
            errors.append(float((statistic - value).norm() / statistic.norm().clamp_min(1e-30)))
    return max(errors, default=None)

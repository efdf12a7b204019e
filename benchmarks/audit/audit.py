"""One audit from an app's folder to a report: run it, attack what it sent, hold it against what it was made of."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedmjp.benchmarks.audit import verbatim
from fedmjp.benchmarks.audit.advice import AuditedUpdate, advise
from fedmjp.benchmarks.audit.answers import unanswered
from fedmjp.benchmarks.audit.app import read_app
from fedmjp.benchmarks.audit.app_loss import read_examples
from fedmjp.benchmarks.audit.attacking import BROKE, LATE, NOT_RUN, Attempt, attempt_all, classes_held, decay_in_loss
from fedmjp.benchmarks.audit.cheating import play_servers
from fedmjp.benchmarks.audit.control import Control, make_control
from fedmjp.benchmarks.audit.counterfactual import Rerun, trace_curve
from fedmjp.benchmarks.audit.evaluating import (
    Private,
    leaking,
    read_private,
    returned_levels,
    score_classes,
    scored,
    summarise_records,
)
from fedmjp.benchmarks.audit.labels import LabelCase, judge_labels
from fedmjp.benchmarks.audit.membership import ClientUpdate, judge_membership
from fedmjp.benchmarks.audit.network import Network, by_name, draw_unsent, load_network, take_in
from fedmjp.benchmarks.audit.noise import Repeats, measure_change, measure_repeats
from fedmjp.benchmarks.audit.protections import SECURE_SUM, is_masked, read_mods, verify
from fedmjp.benchmarks.audit.recipe import (
    as_one_group,
    channels,
    departure_of,
    read_recipe,
    step_of,
    threat_of,
    unreadable,
)
from fedmjp.benchmarks.audit.running import AppRun, Records, RunOptions, lines, one_line, play
from fedmjp.benchmarks.audit.sums import SUM, read_sum
from fedmjp.benchmarks.audit.wire import Answer, leaves, read_answers, server_controls
from fedmjp.benchmarks.audit.wording import figure
from fedmjp.benchmarks.federation.superlink import PrivateSuperLink
from fedmjp.errors import BadInputError
from fedmjp.facade import bundled_pictures
from fedmjp.records import Reconstruction
from fedmjp.tensors import without_decay
from fedmjp.threat import ThreatModel

BUNDLED = 8
ALONE = {
    "what": "an upload is of one example alone",
    "evidence": "by rule: published attacks read one example out of most networks, whether or not those here do",
}
# What no audit looks at; it stands in every report.
NEVER_TESTED = (
    "what many rounds together give away: as many were watched as the report says, of two clients each",
    "attacks that train a decoder, and searches that take longer than minutes",
    "the deployment: who reaches the SuperLink, its certificates and keys, and what stays on its disks",
    "private data that is used in evaluation alone, and whatever the app writes or prints",
    "an app that forges what was seen of it, or behaves otherwise while watched, as hooks, timing and /proc tell",
)
NEITHER = (
    "the update is no gradient of one step: what was sent is neither the last gradient nor the change of the weights "
    "that the server had sent, as a sum over batches or a change from another base is"
)
ATTACKED = 2  # answers of each round whose pictures are searched for


@dataclass
class Findings:
    """What an audit found, in plain values under the names of ``report.json``, and pictures for its page."""

    report: dict[str, Any]
    log: tuple[str, ...] = ()  # the end of Flower's log, where there is a problem
    strips: list[tuple[str, Sequence[Tensor]]] = field(default_factory=list)  # a title, and pictures side by side


@dataclass(frozen=True)
class Attacked:
    """One answer with what attacks made of it and what is behind it."""

    answer: Answer
    network: Network
    private: Private | None
    attempts: list[Attempt]
    update: Mapping[str, Tensor]
    threat: ThreatModel
    multiple: float  # of the weights, that was taken off the update
    departure: str | None  # how the update differs from gradients of the loss that attacks know
    refusal: str | None  # why no attack can read the update, whatever the network

    @property
    def is_of_network(self) -> bool:
        """Tell whether the answer is weights or a gradient."""
        return self.answer.kind in ("weights", "gradient")

    @cached_property
    def best_recovery(self) -> float:
        """Return the best PSNR of a picture that came back, in dB; 0 where none did."""
        if self.private is None:
            return 0.0
        attempts = [attempt for attempt in self.attempts if attempt.ran and attempt.role == "attack"]
        values = [scored(attempt, self.private, self.network) for attempt in attempts]
        return max((value["psnr_worst_case"] for value in values if leaking(value)), default=0.0)


def audit(
    folder: Path,
    *,
    stand_in: bool,
    rounds: int,
    options: RunOptions,
    on_stage: Callable[[str], None] = lambda _: None,
) -> Findings:
    """Audit a Flower app; nothing in its folder is changed.

    Args:
        folder: Of the app.
        stand_in: Whether bundled pictures and drawn weights stand in for data and weights that cannot be loaded.
        rounds: That are watched.
        options: How it is run.
        on_stage: Called with what begins.

    Raises:
        AppError: If the folder holds no app, or a value of the node's config has no key.
    """
    app = read_app(folder)
    with PrivateSuperLink() as superlink:
        on_stage(f"{app.name}: {rounds} rounds on a SuperLink of its own")
        pictures = superlink.home / "pictures.npz"
        np.savez(pictures, pictures=_bundled())
        records = Records(superlink.home / "run")
        settings = {"rounds": rounds, "stand_in": stand_in, "pictures": str(pictures)}
        run = play(superlink, app, records, settings, options)
        findings = examine(app.name, records, run, stand_in=stand_in, on_stage=on_stage)
        findings.report["run_config"] = list(options.run_config)
        return findings


def _bundled() -> np.ndarray[Any, Any]:
    images = [picture.image.permute(1, 2, 0) for picture in bundled_pictures(BUNDLED, size=224)]
    return np.stack([(image * 255).round().byte().numpy() for image in images])


def examine(
    name: str,
    records: Records,
    run: AppRun,
    *,
    stand_in: bool,
    on_stage: Callable[[str], None] = lambda _: None,
) -> Findings:
    """Attack what was sent in a watched run and hold it against what it was made of.

    Args:
        name: Of the app.
        records: Folders of the watched run.
        run: How it went.
        stand_in: Whether data and weights may have been stand-ins.
        on_stage: Called with what begins.
    """
    recipe, answers = read_recipe(records), read_answers(records)
    report: dict[str, Any] = {
        "app": name,
        "clients": run.clients,
        "rounds": max((int(line["round"]) for line in records.wire()), default=0),
        "seconds": round(run.seconds, 1),
        "stand_ins": records.stand_ins() if stand_in else [],
        "leaves": leaves(records, answers),
        "server_controls": server_controls(records, recipe),
        "recipe": recipe,
        "attacks": [],
        "recovered": [],
        "leaks": [],
        "not_tested": list(NEVER_TESTED),
        "unusual": [],
        "cheating": [],
        "departures": [],
        "refused": [],
        "taken_off": None,
        "protections": [],
        "mods": read_mods(records),
        "advice": None,
        "sum_of_clients": None,
        "problem": run.problem,
        "control": None,
        "counterfactual": [],
        "step": step_of(recipe),
        **unanswered(),
        "network_uploads": any(answer.kind in ("weights", "gradient") for answer in answers),
    }
    findings = Findings(report, run.log)
    report["leaks"] += [*_one_per_record(records), *_private_in_clear(records, answers, report)]
    report["protections"] = [asdict(protection) for protection in verify(records, recipe, answers)]
    if recipe["trains"]:
        on_stage("attacks on what was sent")
        is_in_clear = any((row["protection"], row["verified"]) == (SECURE_SUM, "no") for row in report["protections"])
        takes_sum = is_masked(records) and not (report["network_uploads"] or is_in_clear)
        summed = read_sum(records) if takes_sum else None
        if summed is None:
            _attack(records, answers, findings)
        else:
            report["sum_of_clients"] = summed[2]
            _attack(summed[0], [summed[1]], findings)
        drowned = any(protection["drowns"] for protection in report["protections"])
        # A batch whose stand-ins are all the same, as of a tokenizer that knows no word, is no single example.
        alone = recipe["examples"] == 1 and (recipe["batch_size"] == 1 or not report["stand_ins"])
        if alone and report["network_uploads"] and not drowned:
            report["leaks"].append(ALONE)
    else:
        report["not_tested"].append(f"attacks on uploads: {recipe['why']}")
    return findings


def _private_in_clear(records: Records, answers: Sequence[Answer], report: dict[str, Any]) -> list[dict[str, Any]]:
    """Find private examples in what leaves, of each client against its own."""
    mean, std = channels(report["recipe"])
    behind: dict[str, Private] = {}
    first: dict[int, Private] = {}  # of each client, for answers to other messages
    for line in records.wire():
        private = read_private(records.evaluator, line["id"], mean, std) if line["way"] == "down" else None
        if private is not None:
            behind[line["id"]] = private
            first.setdefault(int(line["node"]), private)
    leaks: dict[tuple[str, str, str], dict[str, Any]] = {}
    large: dict[tuple[str, str], int] = {}

    def compare(message: str, record: str, values: Mapping[str, Any], private: Private | None) -> None:
        for value, correlation in verbatim.find_private(values, [private] if private else []):
            leaks.setdefault((message, record, value), _clear(message, record, value, correlation))

    for line in records.wire():
        for record, described in line.get("records", {}).items() if line["way"] == "up" else ():
            for value, size in verbatim.unusual(described):
                large[record, value] = max(size, large.get((record, value), 0))
            private = behind.get(line["reply_to"], first.get(int(line["node"])))
            compare(line["type"], record, described.get("values", {}), private)
    report["unusual"] = [{"record": record, "name": name, "size": size} for (record, name), size in large.items()]
    for answer in answers:
        compare("train", "arrays", verbatim.as_values(answer.arrays, answer.sent), behind.get(answer.message))
    return list(leaks.values())


def _clear(message: str, record: str, value: str, correlation: float) -> dict[str, Any]:
    return {
        "what": f"the answer to {message} holds a private example, or a part of one, as it is: {value} of {record}",
        "evidence": f"correlation {correlation:.4f} with an example of the client's own batch",
        "in_clear": True,
    }


def _one_per_record(records: Records) -> list[dict[str, Any]]:
    """Name arrays in answers to any message that have a row for each record, by rule."""
    wire = records.wire()
    questions = {line["id"]: line for line in wire if line["way"] == "down"}
    entering = {int(line["node"]): max(line["sizes"], default=0) for line in lines(records.evaluator / "seen.jsonl")}
    leaks: dict[str, dict[str, Any]] = {}
    for line in wire:
        question, entered = questions.get(line.get("reply_to", ""), {}), entering.get(int(line["node"]), 0)
        arrays = verbatim.find_one_per_record(line, question, entered) if line["way"] == "up" else ()
        for record, name, count in arrays:
            what = f"the answer to {line['type']} holds a row for each record: {name} of {record}"
            evidence = f"by rule: it has as many rows as {count}; values were not compared"
            leaks.setdefault(what, {"what": what, "evidence": evidence, "in_clear": True})
    return list(leaks.values())


def _attack(records: Records, answers: Sequence[Answer], findings: Findings) -> None:
    """Attack answers of every round; what the page says of one upload alone is of the one that gives most away."""
    report, recipe = findings.report, findings.report["recipe"]
    if not answers:
        report["not_tested"].append("attacks on uploads: answers hold no arrays that could be kept")
        for question in ("labels", "membership"):
            report[question]["why"] = "no answer to training holds arrays that could be read"
        return
    rounds, repeats = sorted({answer.server_round for answer in answers}), measure_repeats(records, answers)
    try:
        attacked = [
            case
            for number in rounds
            for case in _attack_round(
                [reply for reply in answers if reply.server_round == number], records, recipe, repeats
            )
        ]
    except BadInputError as error:
        report["not_tested"].append(f"attacks on uploads: {error}")
        return
    report["labels"] = judge_labels([_label_case(case) for case in attacked if case.is_of_network], records, recipe)
    report["membership"] = judge_membership(_updates_of_rounds(attacked), records, recipe)
    # Where nothing leaks, of the last round: in the first one a head may still be zero, which no gradient passes.
    worst = max(reversed(attacked), key=lambda case: case.best_recovery)
    network = worst.network
    report["network"] = {
        "class": type(network.module).__name__,
        "read_as": "whole" if network.whole else type(network.seen).__name__,
        "why_not_whole": network.why,
    }
    report["attacks"] = [
        {
            "attack": attempt.attack, "reveals": attempt.reveals, "role": attempt.role, "applies": attempt.applies,
            "reason": attempt.reason, "seconds": round(attempt.seconds, 2),
        }
        for attempt in worst.attempts
    ]  # fmt: skip
    nodes = list(dict.fromkeys(answer.node for answer in answers))
    for case in sorted(attacked, key=lambda case: -case.best_recovery):
        client = "the sum" if case.answer.message == SUM else f"client {1 + nodes.index(case.answer.node)}"
        where = f"{client}, round {case.answer.server_round}"
        _report_recovered(where, case, findings)
    reasons = {row["attack"]: row["reason"] for row in report["attacks"] if not row["applies"]}
    report["records"] = summarise_records(report["recovered"], reasons)
    attempts = [attempt for case in attacked for attempt in case.attempts]
    if searches := [row["attack"] for row in report["attacks"] if row["reason"] == NOT_RUN and row["role"] == "attack"]:
        report["not_tested"].append(f"searches that apply, of minutes to hours each: {', '.join(searches)}")
    failed = dict.fromkeys((attempt.attack, attempt.reason) for attempt in attempts)
    report["not_tested"] += [f"{name} {why}" for name, why in failed if BROKE in why or why == LATE]
    if taken_off := [case for case in attacked if case.multiple]:
        report["taken_off"] = f"{taken_off[0].multiple:.3g} times the weights, as of a penalty on their squares"
    report["refused"] = list(dict.fromkeys(case.refusal for case in attacked if case.refusal))
    report["departures"] = list(dict.fromkeys(case.departure for case in attacked if case.departure))
    report["counterfactual"] = _trace_curve(attacked[0], records, recipe)
    first = _before_noise(attacked)
    report["cheating"] = play_servers(first, recipe, worst.answer.kind, _in_the_way(report))
    control = _report_control(worst, first, findings)
    if control is not None:
        same_round = [case for case in attacked if case.answer.server_round == worst.answer.server_round]
        report["advice"] = _advise(first, same_round, control)


def _trace_curve(case: Attacked, records: Records, recipe: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Trace what fewer records and steps of a client would have given away; nothing where its records are unknown."""
    examples = read_examples(records.evaluator / f"{case.answer.message}.npz")
    if examples is None or case.private is None or not case.is_of_network:
        return []
    examples = examples.distinct(set())
    if len(examples) != sum(map(len, case.private.entered)):
        return []
    return trace_curve(Rerun(case.network, recipe, case.answer.kind, examples, case.private))


def _before_noise(attacked: Sequence[Attacked]) -> Network:
    """Return the network of the first round whose head passes gradients on, before clients' noise has spoilt it."""
    heads = [(case.network, case.network.head) for case in attacked]
    passing = (network for network, head in heads if head is None or network.module.get_parameter(head[0]).any())
    return next(passing, attacked[-1].network)


def _in_the_way(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """List what stands between training and a cheating server: mods, and noise that no mod of ours explains."""
    names = {protection["protection"] for protection in report["protections"] if protection["adds_noise"]}
    explained = any(mod["defences"] for mod in report["mods"])
    return [*report["mods"], *({"mod": name, "defences": []} for name in sorted(names) if not explained)]


def _attack_round(
    answers: Sequence[Answer], records: Records, recipe: Mapping[str, Any], repeats: Repeats | None
) -> list[Attacked]:
    """Attack answers of one round with the weights that the server had sent in it.

    Raises:
        BadInputError: If the network cannot be loaded.
    """
    mean, std = channels(recipe)
    private = read_private(records.evaluator, answers[0].message, mean, std)
    side = private.side if private else 0
    module = load_network(records.model, records.code)
    sent = by_name(module.state_dict(), answers[0].sent)
    record = torch.zeros_like(private.entered[0][0]) if private and private.entered else None
    unsent = draw_unsent(module, sent.keys(), recipe["moved"])
    network = take_in(module, sent, mean=mean, std=std, side=max(side, 1), record=record)
    attacked = [_attack_answer(answer, network, records, repeats) for answer in answers[:ATTACKED]]
    sentence = f"{', '.join(unsent)} are trained and never sent, so attacks take drawn ones" if unsent else None
    return [replace(case, departure=case.departure or sentence) for case in attacked]


def _label_case(case: Attacked) -> LabelCase:
    """Take from an attacked answer what labels are counted of."""
    module, is_gradient = case.network.module, case.answer.kind == "gradient"
    sent = by_name(module.state_dict(), case.answer.update)
    return LabelCase(case.answer.message, module, case.update, sent, case.threat, case.refusal is None, is_gradient)


def _updates_of_rounds(attacked: Sequence[Attacked]) -> list[tuple[nn.Module, list[ClientUpdate]]]:
    """List the network of each round with the updates of it, as they were sent."""
    rounds: dict[int, tuple[nn.Module, list[ClientUpdate]]] = {}
    for case in attacked:
        answer, module = case.answer, case.network.module
        if case.is_of_network:
            update = by_name(module.state_dict(), answer.update)
            is_gradient = answer.kind == "gradient"
            sent = ClientUpdate(answer.message, answer.node, answer.server_round, is_gradient, update)
            rounds.setdefault(answer.server_round, (module, []))[1].append(sent)
    return list(rounds.values())


def _advise(network: Network, attacked: Sequence[Attacked], control: Control) -> Any:
    """Advise on what the app sends where that leaks, else on the control, which is of the given network."""
    leaks = [case for case in attacked if case.best_recovery]
    if len(leaks) > 1:
        pair = [AuditedUpdate(case.update, case.threat, case.private) for case in leaks[:2] if case.private is not None]
        return advise(leaks[0].network, pair[0], pair[1], "On an upload of the app's, and again on another client's.")
    if control.private.pictures is None:
        return None
    second = make_control(network, control.private, number=1)
    pair = [AuditedUpdate(case.update, case.threat, case.private) for case in (control, second)]
    return advise(network, pair[0], pair[1], "On the control, since no attack read pictures out of the app's uploads.")


def _attack_answer(
    answer: Answer,
    network: Network,
    records: Records,
    repeats: Repeats | None,
) -> Attacked:
    state, recipe = network.module.state_dict(), read_recipe(records, answer.message)
    update, why = by_name(state, answer.update), unreadable(recipe, answer.kind)
    threat, departure, multiple = threat_of(recipe, answer.kind), departure_of(recipe), 0.0
    if why is None and answer.kind == "weights":
        change = measure_change(answer, records.evaluator)
        factor = change.factor if change is not None and change.is_scaled else 1.0
        update = as_one_group(update, by_name(state, answer.sent), recipe, factor=factor)
        departure = departure or (change.departure(repeats) if change is not None else None)
    elif answer.kind == "gradient" and recipe["sends_neither"] and not (repeats is not None and repeats.is_noisy):
        departure = departure or NEITHER
    if why is None:
        multiple, shifted = decay_in_loss(network, update, threat)
        if multiple:
            update = {name: without_decay(tensor, state[name], 1 + multiple) for name, tensor in update.items()}
        departure = departure or shifted
    attempts = attempt_all(network, update, threat, unreadable=why, change=by_name(state, answer.update))
    private = read_private(records.evaluator, answer.message, *channels(recipe))
    return Attacked(answer, network, private, attempts, update, threat, multiple, departure, why)


def _report_recovered(where: str, attacked: Attacked, findings: Findings) -> None:
    report, private = findings.report, attacked.private
    if private is None:
        report["not_tested"].append(f"{where}: nothing is known of what is behind its upload, so nothing is scored")
        return
    leaks: list[dict[str, Any]] = []  # of attacks that give pictures
    for attempt in attacked.attempts:
        values = scored(attempt, private, attacked.network) if attempt.ran else {}
        if not values:
            continue
        about = {"upload": where, "attack": attempt.attack, "role": attempt.role, "reveals": attempt.reveals}
        report["recovered"].append({**about, **values})
        if attempt.role == "attack" and leaking(values):
            leaks.append({"attack": attempt.attack, **values})
        if isinstance(attempt.made, Reconstruction) and private.pictures is not None and attempt.role == "attack":
            pair = [private.pictures[0], attempt.made.images[0]]
            findings.strips.append((f"{where}, {attempt.attack}", pair))
    if leaks:
        best = max(leaks, key=lambda row: (row["above_floor"], row["psnr_worst_case"]))
        level = figure(best["psnr_worst_case"], best["floor_of_best"], "dB").removeprefix("best ")
        report["leaks"].append(
            {
                "what": f"{best['above_floor']} of {best['pictures']} pictures of {where} come back",
                "evidence": f"{best['attack']}: {level}",
            }
        )
    raised_classes = classes_held(attacked.network, attacked.update, is_gradient=attacked.answer.kind == "gradient")
    if raised_classes is not None and private.labels is not None and attacked.network.head is not None:
        classes = len(attacked.update[attacked.network.head[1]])
        counts = score_classes(raised_classes, private.labels, classes)
        about = {"upload": where, "attack": "signs of the head's bias", "role": "attack", "reveals": "classes"}
        report["recovered"].append({**about, **counts})


def _report_control(worst: Attacked, network: Network, findings: Findings) -> Control | None:
    """Attack an undefended update of one known record, of the tensors that the app sends."""
    report = findings.report
    try:
        control = make_control(network, worst.private, sent=worst.update.keys() or None)
    except BadInputError as error:
        report["control"] = {
            "made": False,
            "reason": one_line(str(error)),
            "leaks": [],
            "network_read": False,
            "levels": [],
        }
        return None
    attempts = attempt_all(network, control.update, control.threat)
    rows = []
    for attempt in attempts:
        values = scored(attempt, control.private, network) if attempt.ran else {}
        if values:
            rows.append({"attack": attempt.attack, "reveals": attempt.reveals, "role": attempt.role, **values})
        pictures = control.private.pictures
        if isinstance(attempt.made, Reconstruction) and attempt.role == "attack" and pictures is not None:
            pair = [pictures[0], attempt.made.images[0]]
            findings.strips.append((f"control: one known picture, undefended, {attempt.attack}", pair))
    kinds = {row["reveals"] for row in rows if row["role"] == "attack" and _succeeded(row)}
    levels = returned_levels(rows)
    reason = None
    if not levels:
        reasons = {attempt.attack: attempt.reason for attempt in attempts if not attempt.applies}
        reason = summarise_records(rows, reasons)["why"] or "no attack gets a known record's undefended update back"
    report["control"] = {
        "made": True, "rows": rows, "leaks": sorted(kinds), "network_read": bool(levels), "levels": levels,
        "reason": reason,
    }  # fmt: skip
    return control


def _succeeded(row: Mapping[str, Any]) -> bool:
    return leaking(row) or row.get("labels_right") == 1.0 or bool(row.get("features_near"))

"""What would help: the published board's defences, each measured on what the app sends, and what to switch on."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from fedmjp.attacks import ATTACKS as REGISTERED
from fedmjp.benchmarks.audit.attacking import attempt
from fedmjp.benchmarks.audit.evaluating import Private, scored
from fedmjp.benchmarks.audit.network import Network
from fedmjp.defences.base import Client
from fedmjp.defences.pipeline import DefenceConfig, Pipeline
from fedmjp.errors import FedmjpError
from fedmjp.models.roles import roles_of
from fedmjp.randomness import SeededRandomness
from fedmjp.records import Upload
from fedmjp.threat import ThreatModel


class BoardRow(NamedTuple):
    """A defence on the published board (results/defences): one gradient of a trained ViT with 16 tokens."""

    defence: str
    recovered: str  # by the strongest attack that knows it: withstood, or exact pictures of all and the median in dB
    top1: float | None  # in percent, after five rounds of eight clients


WITHSTOOD = "withstood"
# In the order of what to switch on first. A test compares each row with the board, and its costs.
NO_DEFENCE = BoardRow("none", "64/64, 136.1", 12.8)
BOARD = (
    BoardRow("local_dp", WITHSTOOD, 3.2),
    BoardRow("local_dp:epsilon=1.0", WITHSTOOD, None),
    BoardRow("withhold", "0/8, 31.6", 13.8),
    BoardRow("withhold:roles=position_embedding", "8/8, 98.1", None),
    BoardRow("quantise:bits=4", "0/8, 25.1", 12.7),
    BoardRow("sign", "0/8, 28.7", 11.8),
    BoardRow("prune:kept=0.01", "0/8, 32.5", 9.8),
    BoardRow("prune", "6/8, 42.5", 10.9),
    BoardRow("gaussian", "6/8, 41.0", 12.6),
    BoardRow("round:precision=bfloat16", "8/8, 61.6", None),
    BoardRow("clip", "64/64, 134.8", 11.3),
)
CHANCE = 3.1
SWITCH_ON = 'ClientApp(mods=[defence_mod("local_dp", epsilon=8.0, clipping_norm=1.0, rounds=10)])'
COST = (
    "On the published board no attack on pictures that knows it got one; at epsilon 8 a server that changes weights "
    "read one label of 32 in 12 % of uploads (chance is 3 %). The price there: eight clients learned nothing "
    f"in five rounds (Top-1 {BOARD[0].top1} % in place of {NO_DEFENCE.top1} %, chance is {CHANCE} %)."
)
ATTACKS = ("patch_embedding", "patch_embedding_wiener")


@dataclass(frozen=True)
class AuditedUpdate:
    """An update as it is before any defence, and what is behind it."""

    update: Mapping[str, Tensor]
    threat: ThreatModel
    private: Private


def advise(network: Network, first: AuditedUpdate, second: AuditedUpdate, about: str) -> dict[str, Any] | None:
    """Measure the board's defences, in its order, on two updates; None where quick attacks read nothing.

    Args:
        network: The app's, with the weights that the server sent.
        first: Update that each defence is measured on.
        second: Another update, for a second measurement.
        about: Sentence about where the updates are from.
    """
    try:
        uploads = [_read_alone(network.upload(case.update, case.threat), network) for case in (first, second)]
    except FedmjpError:
        return None
    if _best(network, first, uploads[0], None)[0] is None:
        return None
    rows = []
    for row in (NO_DEFENCE, *BOARD):
        text = None if row is NO_DEFENCE else row.defence
        psnr, why = _best(network, first, uploads[0], text)
        repeat_psnr, _ = _best(network, second, uploads[1], text)
        board = row.recovered if row.recovered == WITHSTOOD else f"pictures come back: {row.recovered} dB"
        rows.append(
            {"defence": row.defence, "psnr": psnr, "again": repeat_psnr, "why": why, "board": board, "top1": row.top1}
        )
    caveat = (
        f"{about} Measured with {' and '.join(ATTACKS)} alone, with default options and the same network; the board's "
        "attacks know the defence and search. Its column has pictures recovered exactly and the median, on another "
        "network; Top-1 is of five rounds of eight clients there."
    )
    return {"about": caveat, "rows": rows}


def _best(network: Network, case: AuditedUpdate, upload: Upload, text: str | None) -> tuple[float | None, str]:
    """Measure the best PSNR of a picture under a defence, in dB; None, with reasons, where no attack applies."""
    try:
        configs = () if text is None else (DefenceConfig.parse(text),)
        threat = case.threat.model_copy(update={"defences": configs})
        client = Client(case.threat.update, roles_of(network.seen), case.threat.pictures)
        randomness = SeededRandomness(0, ("audit", "advice"))
        protected = Pipeline(configs).protect(upload.tensors, client, randomness=randomness)
        attempts = [attempt(name, network, replace(upload, tensors=protected), threat) for name in ATTACKS]
    except FedmjpError as error:
        return None, str(error)
    values = [scored(outcome, case.private, network) for outcome in attempts if outcome.ran]
    levels = [value["psnr_worst_case"] for value in values if value]
    return (max(levels), "") if levels else (None, "no quick attack applies")


def _read_alone(upload: Upload, network: Network) -> Upload:
    """Keep the tensors that the attacks read: defences of whole updates then differ by a factor, which these ignore."""
    read = {name for attack in ATTACKS for name in REGISTERED.get(attack)({}).tensors(network.seen)}  # type: ignore[arg-type]
    return replace(upload, tensors={name: tensor for name, tensor in upload.tensors.items() if name in read})


def actions(report: Mapping[str, Any], honest: str, cheating: str) -> list[str]:
    """Say what to switch on, and what it costs, for the verdicts on both servers.

    Args:
        report: As ``report.json`` holds it.
        honest: Verdict on the server that keeps to the protocol.
        cheating: Verdict on the one that changes weights.
    """
    sentences = []
    if any(leak.get("in_clear") for leak in report["leaks"]):
        sentences.append(
            "Take the values named above out of the answers. The upload gate refuses answers with more than 64 numbers "
            "in clear, and arrays in other answers than those to train (fedmjp supernode)."
        )
    if any(not leak.get("in_clear") for leak in report["leaks"]):
        sentences.append(f"Switch on differential privacy at each site: {SWITCH_ON}. {COST}")
        sentences.append(
            "Cheaper, and without a guarantee: put more examples behind each update. Honest batches of eight gave no "
            "attack on the board a picture; labels come back all the same."
        )
    elif honest == "UNKNOWN" and not report["problem"]:
        sentences.append(
            f"Nobody can tell what this app gives away. Differential privacy has a bound that holds for every attack: "
            f"{SWITCH_ON}. {COST}"
        )
    elif cheating != "HOLDS" and not report["problem"]:
        sentences.append(
            "Against a server that keeps to the protocol, records need nothing more. Against one that changes "
            f"weights, switch on differential privacy, in the app or by the upload gate's defend: always: {SWITCH_ON}. "
            f"{COST}"
        )
    return sentences or ["Nothing: see what was not tested."]

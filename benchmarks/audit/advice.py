"""What would help: defences of this project on what the app sends, each measured with the same quick attacks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

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

TRIED = (
    "withhold:roles=patch_embedding+position_embedding", "withhold:roles=position_embedding", "gaussian:noise=0.1",
    "gaussian:noise=0.01", "prune:kept=0.01", "prune:kept=0.1", "sign", "quantise:bits=4", "round", "clip:norm=1.0",
)  # fmt: skip
ATTACKS = ("patch_embedding", "patch_embedding_wiener")


@dataclass(frozen=True)
class AuditedUpdate:
    """An update as it is before any defence, and what is behind it."""

    update: Mapping[str, Tensor]
    threat: ThreatModel
    private: Private


def advise(network: Network, first: AuditedUpdate, second: AuditedUpdate, about: str) -> dict[str, Any] | None:
    """Rank defences by what they leave of the first update, and measure each on the second; None if nothing is read.

    Args:
        network: The app's, with the weights that the server sent.
        first: Update that ranks the defences.
        second: Another update, which checks the ranks.
        about: Sentence about where the updates are from.
    """
    try:
        uploads = [_read_alone(network.upload(case.update, case.threat), network) for case in (first, second)]
    except FedmjpError:
        return None
    if _best(network, first, uploads[0], None)[0] is None:
        return None
    rows = []
    for text in (None, *TRIED):
        psnr, why = _best(network, first, uploads[0], text)
        repeat_psnr, _ = _best(network, second, uploads[1], text)
        rows.append({"defence": text or "none", "psnr": psnr, "again": repeat_psnr, "why": why})
    # That the quick attacks do not apply is no effect that was measured: such rows come last.
    rows.sort(key=lambda row: math.inf if row["psnr"] is None else row["psnr"])
    caveat = (
        f"{about} Measured with {' and '.join(ATTACKS)} alone, with default options and the same network: a defence "
        "that stops these may fall to a search. Accuracy was not measured."
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

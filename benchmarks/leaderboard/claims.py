"""Figures that third parties claim and a board did not compute again: what of them is shown, apart from all else."""

import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from fedmjp.attacks import ATTACKS
from fedmjp.benchmarks.leaderboard.entries import Check, Claim, Submitter
from fedmjp.benchmarks.leaderboard.headline import server_name
from fedmjp.benchmarks.leaderboard.measures import MEASURES
from fedmjp.benchmarks.leaderboard.submissions import LONGEST_NAME
from fedmjp.defences import DEFENCES
from fedmjp.errors import ConfigError
from fedmjp.metrics import metric
from fedmjp.registry import Registry
from fedmjp.threat import SERVERS, ThreatModel


class MissingPlugIn(NamedTuple):
    """An attack, a defence or a server that is not installed here."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name[:LONGEST_NAME]!a} is not installed here"


def missing_plug_ins(content: Any) -> list[MissingPlugIn]:
    """List what a submission names and is not installed here; nothing is imported.

    Args:
        content: The submission, as parsed JSON of any form.
    """
    missing: dict[MissingPlugIn, None] = {}
    for entry in _entries(content):
        defences, threat = entry.get("defences"), entry.get("threat")
        names: list[tuple[Registry[Any], Any]] = [
            (DEFENCES, defence) for defence in (defences if isinstance(defences, list) else ())
        ]
        if isinstance(threat, Mapping) and threat.get("server") is not None:
            names.append((SERVERS, threat["server"]))
        if isinstance(entry.get("attack"), str):
            names.append((ATTACKS, entry["attack"].partition(" ")[0]))
        for registry, value in names:
            name = value.get("name") if isinstance(value, Mapping) else str(value).partition(":")[0]
            if isinstance(name, str) and name not in set(registry):
                missing[MissingPlugIn(registry.kind, name)] = None
    return list(missing)


def read_claim(entry: Mapping[str, Any], submitter: Submitter, check: Check, reason: str) -> Claim:
    """Read what is shown of a claimed entry, whose attack and defences need not be installed.

    Args:
        entry: As parsed JSON.
        submitter: Who submitted it.
        check: What the board did about it.
        reason: Why the board did not compute more, or what it computed.

    Raises:
        ConfigError: If it has not the form of an entry.
    """
    try:
        measure = MEASURES[entry.get("reveals", "pictures")]
        scores = entry["scores"]
        leakage = list(scores.get(measure.leakage, {}).values())
        centre = statistics.median if measure.centre == "median" else statistics.fmean
        if outside := [value for value in leakage if not _possible(measure.leakage, value)]:
            raise ConfigError(f"{measure.leakage} is {outside[0]!r:.40}; it can be {metric(measure.leakage).bounds}")
        server = entry["threat"].get("server")
        installed = server is None or server["name"] in set(SERVERS)
        threat = ThreatModel.model_validate(
            {**entry["threat"], "defences": (), "server": server if installed else None}
        )
        return Claim.model_validate(
            {name: entry[name] for name in ("model", "defence", "attack", "setting")}
            | {
                "submitter": submitter,
                "check": check,
                "reason": reason,
                "server": server_name(threat) if installed else str(server["name"]),
                "reveals": entry.get("reveals", "pictures"),
                "n": len(leakage),
                "exact": measure.exact.passed(scores.get(measure.exact.metric, {}).values()),
                "middle": centre(leakage) if leakage else None,
            }
        )
    except ValidationError as error:
        raise ConfigError(f"an entry is of another form: {ThreatModel.explain_error(error)}") from None
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"an entry is of another form ({type(error).__name__}: {error})") from None


def read_claims(content: Mapping[str, Any], submitter: Submitter, reason: str) -> tuple[Claim, ...]:
    """Read the attacks of a submission as claims; floors and bounds are none of their own.

    Args:
        content: The submission, as parsed JSON.
        submitter: Who submitted it.
        reason: Why the board computed nothing.
    """
    attacks = [entry for entry in _entries(content) if entry.get("role") == "attack"]
    return tuple(read_claim(entry, submitter, "claimed", reason) for entry in attacks)


def _possible(name: str, value: float) -> bool:
    return metric(name).lowest <= value <= metric(name).highest


def figures_text(claim: Claim) -> str:
    """Write the claimed figures: ``12 of 46 exactly, median 20.1 dB``.

    Args:
        claim: The claim.
    """
    if claim.middle is None:
        return "no figures"
    measure = MEASURES[claim.reveals]
    return measure.exactly.format(count=claim.exact, n=claim.n) + measure.middle.format(
        value=measure.scale * claim.middle
    )


def _entries(content: Any) -> list[Mapping[str, Any]]:
    entries = content.get("entries") if isinstance(content, Mapping) else None
    return [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []

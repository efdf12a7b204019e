"""What the page says of an entry beyond the tables, and what it says once because it holds for all entries."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedmjp.benchmarks.leaderboard.entries import Board, BoardEntry, Difference, Marginal, Share
from fedmjp.benchmarks.leaderboard.headline import pictures
from fedmjp.benchmarks.leaderboard.measures import MEASURES
from fedmjp.benchmarks.report import numbers

Facts = list[tuple[str, str]]


def list_facts(board: Board) -> tuple[dict[str, Facts], Facts]:
    """List what the page says of entries beyond the tables.

    Args:
        board: The board.

    Returns:
        The facts about each entry alone, by its id, and the facts that hold for all entries.
    """
    environments = list_environments(board)
    by_id = {entry.id: [*_facts(entry), *_provenance(entry, environments)] for entry in board.entries}
    common = set.intersection(*map(set, by_id.values())) if len(by_id) > 1 else set()
    shared = [fact for fact in next(iter(by_id.values()), []) if fact in common]
    return {name: [fact for fact in entry_facts if fact not in common] for name, entry_facts in by_id.items()}, shared


def list_environments(board: Board) -> list[dict[str, Any]]:
    """List the environments that trials were run with, each once.

    Args:
        board: The board.
    """
    environments = (environment for entry in board.entries for environment in entry.provenance.environments)
    return list({json.dumps(environment, sort_keys=True): environment for environment in environments}.values())


def _facts(entry: BoardEntry) -> Facts:
    cost, utility, unit = entry.cost, entry.utility, MEASURES[entry.reveals].unit
    seconds = numbers.seconds(cost.attack_seconds)
    pairs = [
        ("Threat model", entry.threat.sentence([entry.pipeline])),
        ("Caveat", entry.caveat),
        ("Defences, as configured", ", then ".join(config.text for config in entry.defences)),
        (f"Against no defence, {unit}", _difference(entry, entry.over_twin)),
        *((f"Adds, {marginal.defence}, {unit}", _added(entry, marginal)) for marginal in entry.marginal),
        (f"Over {MEASURES[entry.reveals].floor}, {unit}", _difference(entry, entry.over_floor)),
        ("Recognisable pictures", _share(entry.recognisable) if entry.recognisable else None),
        (
            "Recognisable and 3 dB over the guess",
            f"{entry.exposed} of {entry.n} pictures" if entry.recognisable else None,
        ),
        ("Top-1 accuracy", f"{utility.top1:g} %, {utility.source}" if utility else None),
        ("Attack", "adapted to the defence" if entry.adapted else "not adapted to any defence"),
        ("Time of the attack", f"{seconds} s per picture" if seconds else None),
        ("Size of an upload", numbers.size(cost.upload_bytes)),
        ("Flat pictures, which no figure counts", str(len(entry.flat)) if entry.flat else None),
        ("Trials", _trials(entry)),
        ("Mask ratio, realised", None if entry.realised_ratio is None else f"{entry.realised_ratio:.3f}"),
        ("Errors", "; ".join(entry.errors)),
    ]
    return [(term, text) for term, text in pairs if text]


def _difference(entry: BoardEntry, gain: Difference | None) -> str | None:
    scale = MEASURES[entry.reveals].scale
    return numbers.difference(gain.mean, gain.low, gain.high, gain.p_value, scale) if gain else None


def _share(share: Share) -> str:
    return numbers.share(share.share, share.low, share.high)


def _added(entry: BoardEntry, gain: Marginal) -> str:
    added = _difference(entry, gain.difference) or "not measured"
    return f"{added}; entry without it: {gain.twin}"


def _trials(entry: BoardEntry) -> str:
    parts = {
        f"{entry.trials} finished over {pictures(entry)}": True,
        f"{entry.failures} failed": True,
        f"{entry.missing} missing": entry.missing,
        f"{entry.left_out} pictures left out, being the attack's own prior": entry.left_out,
    }
    return ", ".join(part for part, applies in parts.items() if applies)


def _provenance(entry: BoardEntry, environments: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    source = entry.provenance
    if entry.submitter:
        yield "Submitted by", f"{entry.submitter.name}, {entry.submitter.link}; {entry.check or 'claimed'}"
    yield "Weights", ("" if entry.weights == "untrained" else "checkpoint ") + entry.weights
    yield "Scored as", entry.protocol
    yield "Campaign", source.campaign
    yield "Pictures", source.data
    yield "SHA-256 of the pictures", source.pictures_sha256
    yield "SHA-256 of the weights", ", ".join(source.weights_sha256)
    yield "SHA-256 of the configuration", source.config_sha256
    yield "Seeds", ", ".join(map(str, source.seeds))
    yield "Environment", ", ".join(str(environments.index(environment) + 1) for environment in source.environments)
    yield "Run", f"{source.first} to {source.last}" if source.first else "not run"
    yield "Entry", entry.id


def write_words(content: Any) -> str:
    """Write whatever was recorded of an environment in words.

    Args:
        content: Nested values; a third party's need not look like ours.
    """
    if isinstance(content, Mapping):
        return ", ".join(f"{name}: {write_words(value)}" for name, value in content.items())
    if isinstance(content, (list, tuple)):
        return ", ".join(map(write_words, content)) or "none"
    if content is None:
        return "unknown"
    return ("yes" if content else "no") if isinstance(content, bool) else str(content)

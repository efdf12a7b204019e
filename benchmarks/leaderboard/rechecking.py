"""Entries computed again from their own data: figures from leakage per picture, verdicts from the rules."""

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import pandas as pd

from benchmarks.leaderboard.assembly import exposed, recognisable
from benchmarks.leaderboard.entries import (
    LEAKAGE,
    RECOGNISABLE,
    Difference,
    Entry,
    Marginal,
    Record,
    Statistics,
    Submission,
    entry_id,
)
from benchmarks.leaderboard.pairing import Pairs
from benchmarks.leaderboard.statistics import Floats, difference, intervals, statistics
from benchmarks.leaderboard.verdicts import judge
from benchmarks.plan.experiment import AttackConfig, Cell
from fedmjp.config import ModelConfig
from fedmjp.defences.pipeline import NONE, Defences
from fedmjp.errors import BadInputError, UnknownNameError
from fedmjp.metrics import metric
from fedmjp.models.build import blueprint
from fedmjp.settings import Picture

EXACT = 1e-6
MONTE_CARLO = 0.2  # standard errors of the mean by which two bootstrap intervals may differ


class AdmissionError(BadInputError):
    """Entries that the rules do not admit. Remedy: mend what the message names."""


def checked(submission: Submission) -> Submission:
    """The same with every figure, id and verdict as computed here.

    Raises:
        AdmissionError: If figures do not follow from the leakage per picture, a verdict does not follow
            from the rules, or the manifest is not complete.
        BadInputError: If there is no such metric, defence or option.
    """
    claimed = {entry.cell: entry for entry in submission.entries}
    if len(claimed) < len(submission.entries):
        raise AdmissionError("two entries are of the same cell; merge or remove one")
    ids = {
        cell: entry_id(
            cell,
            f"{submission.submitter.name} {entry.provenance.campaign}",
            entry.provenance.pictures_sha256,
            "submitted",
        )
        for cell, entry in claimed.items()
    }
    for entry in submission.entries:
        _check_manifest(entry)
        _check_defences(entry)
        _check_attack(entry)
    cells = Pairs(list(claimed))
    pairs = {cell: (_entry_of(cells.floor(cell), claimed), _entry_of(cells.twin(cell), claimed)) for cell in claimed}
    figured = {}
    for cell, entry in claimed.items():
        floor, twin = pairs[cell]
        without = {label: claimed[other] for label, other in cells.without_each(cell).items()}
        own = {
            "origin": "submitted",
            "submitter": submission.submitter,
            "id": ids[cell],
            "floor": floor and ids[floor.cell],
            "twin": twin and ids[twin.cell],
            "marginal": tuple(
                Marginal(defence=label, twin=ids[without[label].cell], difference=added)
                for label, added in _marginal(entry, without).items()
                if label in without
            ),
        }
        figured[cell] = _figured(entry, floor, twin).model_copy(update=own)
    entries = tuple(
        _judged(entry, *(other and figured[other.cell] for other in pairs[cell])) for cell, entry in figured.items()
    )
    return submission.model_copy(update={"entries": entries})


def _entry_of(cell: Cell | None, entries: Mapping[Cell, Entry]) -> Entry | None:
    return entries[cell] if cell else None


def _check_manifest(entry: Entry) -> None:
    if entry.verdict == "refused":
        raise AdmissionError(f"{_named(entry)}: an attack that was not run has nothing to show; leave the entry out")
    missing = [
        name
        for name in ("campaign", "config_sha256", "data", "pictures_sha256", "weights_sha256", "seeds", "environments")
        if not getattr(entry.provenance, name)
    ]
    if missing or not all(entry.provenance.environments):
        raise AdmissionError(f"{_named(entry)}: its provenance lacks {', '.join(missing or ['an environment'])}")


def _check_defences(entry: Entry) -> None:
    """What the clients did must not be told one way to pair cells, and another to show them."""
    pipeline = entry.pipeline
    seen = pipeline.of_stage("examples", "update", "aggregate").configs
    if entry.threat.defences != seen:
        raise AdmissionError(
            f"{_named(entry)}: its threat model names {_texts(entry.threat.defences)} on the uploads, but its defences "
            f"make {_texts(seen)}"
        )
    if pipeline.shuffles is not (entry.setting.gradient_of is Picture.SHUFFLED):
        done = "shuffle" if pipeline.shuffles else "do not shuffle"
        raise AdmissionError(f"{_named(entry)}: its defences {done} the picture, which is not setting {entry.setting}")
    if entry.mask_ratio != pipeline.mask_ratio:
        raise AdmissionError(
            f"{_named(entry)}: its mask ratio is {entry.mask_ratio:g}, but that of its defences {pipeline.mask_ratio:g}"
        )


def _texts(defences: Defences) -> str:
    return " + ".join(config.text for config in defences) or NONE


def _check_attack(entry: Entry) -> None:
    """What we know of an attack, nobody may claim otherwise; references have to be ones that we know."""
    try:
        tried = AttackConfig.of_label(entry.attack)
    except UnknownNameError:
        if entry.role == "attack" and not entry.adapted:
            return
        if entry.role == "attack":
            raise AdmissionError(
                f"{_named(entry)}: {entry.attack!r} is not known here, so that nobody can see whether it takes the "
                "defence into account; set adapted to false"
            ) from None
        raise AdmissionError(f"{_named(entry)}: {entry.attack!r} is no {entry.role} that is known here") from None
    role = tried.made().role
    if role != entry.role:
        raise AdmissionError(f"{_named(entry)}: its role is {role}, not {entry.role}")
    if entry.adapted and not _takes_into_account(tried, entry):
        raise AdmissionError(f"{_named(entry)}: {entry.attack} does not take the defence {entry.defence} into account")


def _takes_into_account(tried: AttackConfig, entry: Entry) -> bool:
    """As a plan of ours would say it of a model of that name."""
    if not entry.defences:
        return False
    try:
        model = _blueprint(entry.pipeline.change_model(ModelConfig(name=entry.model)))
    except UnknownNameError:
        raise AdmissionError(
            f"{_named(entry)}: the model {entry.model!r} is not known here, so that nobody can see whether "
            f"{entry.attack} takes the defence into account; set adapted to false"
        ) from None
    return tried.adapted(entry.pipeline, model, entry.threat, entry.setting)


_blueprint = lru_cache(maxsize=16)(blueprint)


def _figured(entry: Entry, floor: Entry | None, twin: Entry | None) -> Entry:
    """The entry with figures made of its leakage per picture, which its own have to agree with."""
    if entry.n != len(entry.leakage) or not entry.n <= entry.trials <= entry.n * len(entry.provenance.seeds):
        raise AdmissionError(
            f"{_named(entry)}: n = {entry.n} and trials = {entry.trials} do not fit {len(entry.leakage)} pictures "
            f"with leakage and {len(entry.provenance.seeds)} seeds"
        )
    for name in entry.metrics:
        metric(name)
    leakage = pd.Series(entry.leakage, dtype=float)
    over_floor, over_twin = _over(leakage, floor), _over(leakage, twin)
    share = recognisable(leakage, RECOGNISABLE)
    found = {
        "over_floor": _difference(entry, "over_floor", entry.over_floor, over_floor),
        "over_twin": _difference(entry, "over_twin", entry.over_twin, over_twin),
        "recognisable": share,
        "exposed": exposed(leakage, over_floor, RECOGNISABLE),
        "metrics": {**entry.metrics, **_leakage(entry, np.asarray(leakage, dtype=np.float64))},
    }
    if share is not None:
        _agree(entry, "recognisable", entry.recognisable, share)
    if entry.exposed != found["exposed"]:
        raise AdmissionError(_off(entry, "exposed", entry.exposed, found["exposed"]))
    return entry.model_copy(update=found)


def _over(leakage: "pd.Series[float]", other: Entry | None) -> "pd.Series[float]":
    return (leakage - pd.Series(other.leakage if other else {}, dtype=float)).dropna()


def _marginal(entry: Entry, without: Mapping[str, Entry]) -> dict[str, Difference | None]:
    """What each defence adds, by its label; claims have to agree."""
    leakage = pd.Series(entry.leakage, dtype=float)
    claimed = {each.defence: each.difference for each in entry.marginal}
    return {
        label: _difference(entry, f"marginal of {label}", claimed.get(label), _over(leakage, without.get(label)))
        for label in {**claimed, **without}
    }


def _leakage(entry: Entry, values: Floats) -> dict[str, Statistics]:
    if not len(values):
        return {}
    claimed = entry.metrics.get(LEAKAGE)
    if claimed is None or claimed.worst < values.max() - EXACT:
        raise AdmissionError(_off(entry, f"{LEAKAGE} worst", claimed and claimed.worst, values.max()))
    found = statistics(values, intervals([values])[0], worst=claimed.worst, higher_leaks=True)
    _agree(entry, LEAKAGE, claimed, found, spread=_standard_error(values))
    return {LEAKAGE: found}


def _difference(entry: Entry, name: str, claimed: Difference | None, over: "pd.Series[float]") -> Difference | None:
    values = np.asarray(over, dtype=np.float64)
    found = difference(values, intervals([values])[0]) if len(values) else None
    if found is None and claimed is not None:
        raise AdmissionError(f"{_named(entry)}: {name.replace('_', ' ')} is given, but not the entry to compare with")
    if found is not None:
        _agree(entry, name, claimed, found, spread=_standard_error(values))
    return found


def _standard_error(values: Floats) -> float:
    return float(values.std() / np.sqrt(len(values)))


def _agree(entry: Entry, name: str, claimed: Record | None, found: Record, *, spread: float = 0.0) -> None:
    for field, ours in found.model_dump().items():
        theirs = getattr(claimed, field, None)
        tolerance = EXACT + (MONTE_CARLO * spread if field in ("low", "high") else 0)
        if (ours is None) != (theirs is None) or (ours is not None and abs(ours - theirs) > tolerance):
            raise AdmissionError(_off(entry, f"{name} {field}", theirs, ours))


def _off(entry: Entry, name: str, theirs: object, ours: object) -> str:
    return f"{_named(entry)}: {name} is {theirs}, but its leakage per picture gives {ours}"


def _judged(entry: Entry, floor: Entry | None, twin: Entry | None) -> Entry:
    judgement = judge(entry, floor, twin)
    if judgement.verdict != entry.verdict:
        raise AdmissionError(
            f"{_named(entry)} claims {entry.verdict!r}, but the rules say {judgement.verdict!r}: {judgement.reason}"
        )
    return entry.model_copy(update=judgement._asdict())


def _named(entry: Entry) -> str:
    return f"{entry.model}, {entry.defence}, {entry.attack}, setting {entry.setting}"

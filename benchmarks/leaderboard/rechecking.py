"""Entries computed again from their own data: figures from leakage per picture, verdicts from the rules."""

from collections.abc import Mapping
from functools import lru_cache

import pandas as pd

from benchmarks.leaderboard.entries import LEAKAGE, RECOGNISABLE, Entry, Record, Submission, entry_id
from benchmarks.leaderboard.figures import Figures, judged, marginal_name
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
    for entry in submission.entries:
        _check_manifest(entry)
        _check_defences(entry)
        _check_attack(entry)
        _check_pictures(entry)
    figures = Figures(
        ids={cell: _id(cell, entry, submission.submitter.name) for cell, entry in claimed.items()},
        pictures={cell: pd.DataFrame({LEAKAGE: entry.leakage}, dtype=float) for cell, entry in claimed.items()},
        worst={cell: {name: each.worst for name, each in entry.metrics.items()} for cell, entry in claimed.items()},
        recognisable_at=RECOGNISABLE,
    )
    entries = judged(
        _figured(entry, cell, figures).model_copy(update={"origin": "submitted", "submitter": submission.submitter})
        for cell, entry in claimed.items()
    )
    for theirs, ours in zip(submission.entries, entries, strict=True):
        if theirs.verdict != ours.verdict:
            raise AdmissionError(
                f"{_named(theirs)} claims {theirs.verdict!r}, but the rules say {ours.verdict!r}: {ours.reason}"
            )
    return submission.model_copy(update={"entries": tuple(entries)})


def _id(cell: Cell, entry: Entry, submitter: str) -> str:
    provenance = entry.provenance
    return entry_id(cell, f"{submitter} {provenance.campaign}", provenance.pictures_sha256, "submitted")


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


def _check_pictures(entry: Entry) -> None:
    """What cannot be computed again has to fit to what can."""
    if entry.n != len(entry.leakage) or not entry.n <= entry.trials <= entry.n * len(entry.provenance.seeds):
        raise AdmissionError(
            f"{_named(entry)}: n = {entry.n} and trials = {entry.trials} do not fit {len(entry.leakage)} pictures "
            f"with leakage and {len(entry.provenance.seeds)} seeds"
        )
    for name in entry.metrics:
        metric(name)
    most, claimed = max(entry.leakage.values(), default=None), entry.metrics.get(LEAKAGE)
    if most is not None and (claimed is None or claimed.worst < most - EXACT):
        raise AdmissionError(_off(entry, f"{LEAKAGE} worst", claimed and claimed.worst, most))


def _figured(entry: Entry, cell: Cell, figures: Figures) -> Entry:
    """The entry with figures made of its leakage per picture, which its own have to agree with."""
    found = figures.of(cell)
    ours = entry.model_copy(update=found | {"metrics": {**entry.metrics, **found["metrics"]}})
    theirs, spreads = _claims(entry), figures.standard_errors(cell)
    for name, figure in {**dict.fromkeys(theirs), **_claims(ours)}.items():
        _agree(entry, name, theirs.get(name), figure, spread=spreads.get(name, 0.0))
    if entry.exposed != ours.exposed:
        raise AdmissionError(_off(entry, "exposed", entry.exposed, ours.exposed))
    return ours


def _claims(entry: Entry) -> Mapping[str, Record | None]:
    """Figures that follow from leakage per picture, as messages and samples name them."""
    return {
        LEAKAGE: entry.metrics.get(LEAKAGE),
        "recognisable": entry.recognisable if entry.leakage else None,
        "over_floor": entry.over_floor,
        "over_twin": entry.over_twin,
        **{marginal_name(each.defence): each.difference for each in entry.marginal},
    }


def _agree(entry: Entry, name: str, theirs: Record | None, ours: Record | None, *, spread: float) -> None:
    if ours is None and theirs is not None:
        raise AdmissionError(f"{_named(entry)}: {name.replace('_', ' ')} is given, but not the entry to compare with")
    for field, value in (ours.model_dump() if ours else {}).items():
        claimed = getattr(theirs, field, None)
        tolerance = EXACT + (MONTE_CARLO * spread if field in ("low", "high") else 0)
        if (value is None) != (claimed is None) or (value is not None and abs(value - claimed) > tolerance):
            raise AdmissionError(_off(entry, f"{name} {field}", claimed, value))


def _off(entry: Entry, name: str, theirs: object, ours: object) -> str:
    return f"{_named(entry)}: {name} is {theirs}, but its leakage per picture gives {ours}"


def _named(entry: Entry) -> str:
    return f"{entry.model}, {entry.defence}, {entry.attack}, setting {entry.setting}"

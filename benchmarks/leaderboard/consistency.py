"""Whether an entry agrees with itself: figures with its scores per picture, verdicts with the rules, data with data."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set

import pandas as pd

from fedmjp.benchmarks.leaderboard.entries import BoardEntry, Difference, entry_id_of
from fedmjp.benchmarks.leaderboard.figures import BoardFigures, judge_entries, marginal_name
from fedmjp.benchmarks.leaderboard.measures import MEASURES, computable_metric, needed_metrics
from fedmjp.benchmarks.leaderboard.pairing import Pairs
from fedmjp.benchmarks.leaderboard.plausible import (
    ROUNDING,
    contradictions_with,
    impossible_figures,
    impossible_origin,
)
from fedmjp.benchmarks.leaderboard.record import Record
from fedmjp.benchmarks.leaderboard.statistics import UploadSample
from fedmjp.benchmarks.leaderboard.submissions import Submission
from fedmjp.benchmarks.plan.trial_plan import Cell
from fedmjp.defences.pipeline import NONE
from fedmjp.errors import BadInputError, UnknownNameError
from fedmjp.metrics import RECOGNISABLE
from fedmjp.settings import Picture

MONTE_CARLO = 0.2  # standard errors of the mean by which two bootstrap intervals may differ


class AdmissionError(BadInputError):
    """Entries that the rules do not admit. Remedy: mend what the message names."""


def check_consistency(submission: Submission) -> Submission:
    """Return the submission with every figure, id and verdict as its own scores give them; nothing is run.

    Args:
        submission: As it was read.

    Raises:
        AdmissionError: If figures do not follow from the scores per picture, a verdict not from the rules, or the
            provenance is not complete.
    """
    claimed = {entry.cell: entry for entry in submission.entries}
    if len(claimed) < len(submission.entries):
        raise AdmissionError("two entries are of the same cell; merge or remove one")
    flat = {(entry.provenance.pictures_sha256, name) for entry in submission.entries for name in entry.flat or ()}
    for entry in submission.entries:
        _refuse(entry, _contradictions(entry))
        _refuse(entry, _flat_ones(entry, flat))
        _refuse(entry, impossible_figures(entry))
        _refuse(entry, impossible_origin(entry))
    figures = BoardFigures(
        ids={cell: entry_id_of(cell, entry.provenance, submission.submitter) for cell, entry in claimed.items()},
        pictures={cell: _scores(entry) for cell, entry in claimed.items()},
        worst={cell: {name: figure.worst for name, figure in entry.metrics.items()} for cell, entry in claimed.items()},
        together={cell: entry.together for cell, entry in claimed.items()},
        recognisable_at=RECOGNISABLE,
    )
    computed = []
    for cell, entry in claimed.items():
        derived = figures.of(cell) | {"origin": "submitted", "submitter": submission.submitter, "check": None}
        computed_entry = entry.model_copy(update=derived)
        _refuse(entry, _differences(entry, computed_entry, figures.samples[cell]))
        computed.append(computed_entry)
        _refuse(entry, _against_references(cell, claimed, figures.pairs))
    entries = judge_entries(computed)
    for claimed_entry, computed_entry in zip(submission.entries, entries, strict=True):
        if claimed_entry.verdict != computed_entry.verdict:
            raise AdmissionError(
                f"{name_entry(claimed_entry)} claims {claimed_entry.verdict!r}, but the rules say "
                f"{computed_entry.verdict!r}: {computed_entry.reason}"
            )
    return submission.model_copy(update={"entries": tuple(entries)})


def _scores(entry: BoardEntry) -> pd.DataFrame:
    """Tabulate scores, a row per picture; needed columns exist even where no picture counts."""
    names = dict.fromkeys([*entry.scores, *needed_metrics(entry.reveals)])
    return pd.DataFrame(entry.scores, columns=list(names), dtype=float)


def _flat_ones(entry: BoardEntry, flat: Set[tuple[str, str]]) -> Iterator[str]:
    """Yield pictures that count in this entry, but are flat in another of the same pictures, or in itself."""
    measure = MEASURES[entry.reveals]
    for name in entry.scores.get(measure.leakage, {}) if measure.colour_tells else ():
        if (entry.provenance.pictures_sha256, name) in flat:
            yield f"{name} counts, but is flat in another entry or in this one"


def _against_references(cell: Cell, claimed: Mapping[Cell, BoardEntry], pairs: Pairs) -> Iterator[str]:
    """Yield what an entry contradicts in its references."""
    for reference in (pairs.floor(cell), pairs.twin(cell), *pairs.without_each(cell).values()):
        if reference is not None:
            yield from contradictions_with(claimed[cell], claimed[reference])


def _refuse(entry: BoardEntry, reasons: Iterable[str]) -> None:
    for reason in reasons:
        raise AdmissionError(f"{name_entry(entry)}: {reason}")


def _contradictions(entry: BoardEntry) -> Iterator[str]:
    """Yield what an entry says against itself or against known facts, without computing anything."""
    if entry.verdict == "refused":
        yield "an attack that was not run has nothing to show; leave the entry out"
    provenance = entry.provenance
    required = ("campaign", "config_sha256", "data", "pictures_sha256", "weights_sha256", "seeds", "environments")
    missing = [name for name in required if not getattr(provenance, name)]
    if missing or not all(provenance.environments):
        yield f"its provenance lacks {', '.join(missing or ['an environment'])}"
    yield from _of_defences(entry)
    yield from _of_attack(entry)
    yield from _of_scores(entry)
    yield from _of_uploads(entry)


def _of_scores(entry: BoardEntry) -> Iterator[str]:
    """Yield metrics that are not of the same pictures, and lacking metrics that verdicts follow from."""
    measure, flat, seeds = MEASURES[entry.reveals], entry.flat or {}, entry.provenance.seeds
    for name in {**entry.scores, **entry.metrics}:
        if not computable_metric(name, entry.reveals):
            yield f"{name} says nothing of an attack that reveals {entry.reveals}; leave it out"
        if not entry.scores.get(name) or name not in entry.metrics:
            yield f"{name} has no {'statistics' if entry.scores.get(name) else 'scores per picture'}"
    pictures = entry.scores.get(measure.leakage, {})
    if lacking := sorted(needed_metrics(entry.reveals) - entry.scores.keys() if entry.n else ()):
        yield f"it reveals {entry.reveals}, and has no scores per picture of {', '.join(lacking)}"
    for name, values in entry.scores.items():
        if values.keys() != pictures.keys():
            counts = f"{len(values)} and {len(pictures)} have scores"
            yield f"{name} is not of the same pictures as {measure.leakage}: {counts}"
    if flat and not measure.colour_tells:
        yield f"it names flat pictures, which count as others where {entry.reveals} are revealed; leave flat out"
    scored = entry.n + len(flat)
    if entry.n != len(pictures) or not scored <= entry.trials <= scored * len(seeds):
        yield (
            f"n = {entry.n} and trials = {entry.trials} do not fit {len(pictures)} pictures with scores, "
            f"{len(flat)} flat ones and {len(seeds)} seeds"
        )


def _of_uploads(entry: BoardEntry) -> Iterator[str]:
    """Yield contradictions about which pictures were behind which upload.

    The threat model gives the number of pictures per upload; ``together`` says which came in one.
    """
    upload_numbers, behind = entry.together, entry.threat.isolated.pictures
    if upload_numbers and upload_numbers.keys() != entry.scores.get(MEASURES[entry.reveals].leakage, {}).keys():
        yield "together is not of the pictures with scores: name each of them, and no others"
    planned = entry.trials + entry.failures + entry.missing
    if entry.uploads * behind > planned:
        yield (
            f"{behind} pictures are behind each upload, so that {planned} trials are of {planned // behind} uploads at "
            f"most, not of {entry.uploads}: say in together, by picture, the number of the upload that it was behind"
        )
    scored_once = entry.trials == entry.n + len(entry.flat or ())
    largest = max(Counter(upload_numbers.values()).values(), default=0)
    if scored_once and largest > entry.threat.pictures:
        yield f"together names {largest} pictures of one upload, which is of {entry.threat.pictures}"


def _of_defences(entry: BoardEntry) -> Iterator[str]:
    """Yield contradictions between the defences by which cells are paired and those that are shown."""
    pipeline = entry.pipeline
    upload_defences = pipeline.of_stage("examples", "update", "aggregate").configs
    if entry.threat.defences != upload_defences:
        claimed, actual = (
            " + ".join(config.text for config in configs) or NONE
            for configs in (entry.threat.defences, upload_defences)
        )
        yield f"its threat model names {claimed} on the uploads, but its defences make {actual}"
    if pipeline.shuffles is not (entry.setting.gradient_of is Picture.SHUFFLED):
        shuffling = "shuffle" if pipeline.shuffles else "do not shuffle"
        yield f"its defences {shuffling} the picture, which is not setting {entry.setting}"
    if entry.mask_ratio != pipeline.mask_ratio:
        yield f"its mask ratio is {entry.mask_ratio:g}, but that of its defences {pipeline.mask_ratio:g}"


def _of_attack(entry: BoardEntry) -> Iterator[str]:
    """Yield claims about an attack that differ from its registration; references must be registered.

    Whether it takes the defence into account follows from the model, when trials are run again.
    """
    from fedmjp.benchmarks.plan.experiment import AttackConfig  # noqa: PLC0415 (it brings torch)

    try:
        attack = AttackConfig.of_label(entry.attack).build()
    except UnknownNameError:
        if entry.role != "attack":
            yield f"{entry.attack!r} is no {entry.role} that is known here"
        return
    for verb, registered, claimed in (
        ("has the role", attack.role, entry.role),
        ("reveals", attack.reveals, entry.reveals),
    ):
        if registered != claimed:
            yield f"{entry.attack} {verb} {registered}, not {claimed}"
    if entry.adapted and not entry.defences:
        yield f"{entry.attack} does not take the defence {entry.defence} into account"


def _differences(
    submission_entry: BoardEntry, computed_entry: BoardEntry, samples: Mapping[str, UploadSample]
) -> Iterator[str]:
    """Yield claimed figures that do not follow from the scores per picture."""
    spreads = {name: float(sample.means.std() / len(sample.means) ** 0.5) for name, sample in samples.items()}
    claims, figures = _figures(submission_entry), _figures(computed_entry)
    if submission_entry.exact is None:
        del figures["exact"]  # may be left out, because it follows
    for name in {**claims, **figures}:
        claim, figure = claims.get(name), figures.get(name)
        if figure is None and claim is not None:
            lacking = "the entry to compare with" if isinstance(claim, Difference) else "scores that it follows from"
            yield f"{name.replace('_', ' ')} is given, but not {lacking}"
        for field, value in (figure.model_dump() if figure else {}).items():
            claimed = getattr(claim, field, None)
            tolerance = ROUNDING + (MONTE_CARLO * spreads.get(name, 0.0) if field in ("low", "high") else 0)
            if (value is None) != (claimed is None) or (value is not None and abs(value - claimed) > tolerance):
                yield _off(f"{name} {field}", claimed, value)
    if submission_entry.exposed != computed_entry.exposed:
        yield _off("exposed", submission_entry.exposed, computed_entry.exposed)


def _figures(entry: BoardEntry) -> dict[str, Record | None]:
    """Map figures by the names that messages and samples use."""
    return {
        **entry.metrics,
        "exact": entry.exact,
        "recognisable": entry.recognisable,
        "over_floor": entry.over_floor,
        "over_twin": entry.over_twin,
        **{marginal_name(marginal.defence): marginal.difference for marginal in entry.marginal},
    }


def _off(name: str, claimed: object, computed: object) -> str:
    return f"{name} is {claimed}, but its scores per picture give {computed}"


def name_entry(entry: BoardEntry) -> str:
    """Name an entry in messages: model, defence, attack and setting.

    Args:
        entry: A cell.
    """
    return f"{entry.model}, {entry.defence}, {entry.attack}, setting {entry.setting}"

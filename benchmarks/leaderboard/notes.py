"""What a board must not be read without."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.leaderboard.entries import Entry, Reported
from fedmjp.metrics import metric

SETTINGS = (
    "Settings: (a) gradient of x, compared with x; (b) gradient of x~, compared with x~; (c) gradient of x~, compared "
    "with x."
)
MASKED = "In (a) nothing is shuffled: of {defences} only the rest is done to the patches that would be."
CONTROL = "{defences} shuffles and does nothing else: the control of what shuffling alone achieves."
APRIL = "Models named _april have a first block without first norm and residuals, which APRIL's closed form needs."
BOUND = "Rows marked bound were given more than any server sees. They limit what attacks can reach and are not ranked."
STATISTICS = (
    "95 % percentile bootstrap interval of the mean over pictures, too narrow where they are few or alike; worst is "
    "the most revealing single trial."
)
BUNDLED = "The bundled pictures are two crops each of four photographs."
NAIVE = (
    "No attack here is adapted to {defences}. A low score against it is their failure, not yet its protection; nothing "
    "below the grey row says anything about privacy."
)
UNTRAINED = "Weights of {models} are initial ones drawn from the seed (untrained)."
TWINS = "The twin of {models} is an undefended model of other weights: the difference is that of both."
SKIPPED = "{count} pictures of the data were skipped because they cannot be read; others took their places."
REPORTED = "Figures reported in {source} are as printed there; what they differ in from ours stands beside each row."


def notes(entries: Sequence[Entry], about: Mapping[str, Any], reported: Sequence[Reported]) -> list[str]:
    """Those that apply to this board, each once."""
    ours = [entry for entry in entries if entry.origin == "reproduced"]
    return [
        SETTINGS,
        *_on_cells(ours),
        *_on_shuffling(ours),
        *_on_defences(ours),
        *_on_weights(ours),
        *_once(_sentence(entry.caveat) for entry in ours if entry.caveat),
        f"Protocol: {_listed(entry.protocol for entry in ours)}, pictures in [0, 1]. {STATISTICS}",
        *([BUNDLED] if about["data"] == "bundled" else []),
        *([SKIPPED.format(count=len(about["skipped"]))] if about["skipped"] else []),
        *_on_trials(ours),
        *_on_metrics(ours, about["metrics"]),
        *_once(REPORTED.format(source=each.source) for each in reported),
        *about["notes"],
    ]


def _on_cells(entries: Sequence[Entry]) -> list[str]:
    applies = {
        APRIL: any(entry.model.endswith("_april") for entry in entries),
        BOUND: any(entry.role == "bound" for entry in entries),
    }
    return [note for note, true in applies.items() if true]


def _on_shuffling(entries: Sequence[Entry]) -> list[str]:
    made = [each for entry in entries if not entry.pipeline.shuffles for each in entry.pipeline.made]
    held_back = {each.name for each in made if each.mask_ratio}
    alone = {entry.defence for entry in entries if entry.pipeline.marks == {"shuffled"}}
    named = {MASKED: _listed(held_back) if held_back else "", CONTROL: _listed(alone) if alone else ""}
    return [note.format(defences=defences) for note, defences in named.items() if defences]


def _on_defences(entries: Sequence[Entry]) -> list[str]:
    ran = [entry for entry in entries if entry.role == "attack" and entry.verdict != "refused"]
    defended = {entry.defence for entry in ran if entry.defences}
    defences = defended - {entry.defence for entry in ran if entry.adapted}
    return [NAIVE.format(defences=_listed(defences, "or"))] if defences else []


def _on_weights(entries: Sequence[Entry]) -> list[str]:
    by_id = {entry.id: entry for entry in entries}
    untrained = {entry.model for entry in entries if entry.weights == "untrained"}
    twinned = {
        f"{entry.model}-{entry.defence}"
        for entry in entries
        if entry.twin in by_id and by_id[entry.twin].weights != entry.weights
    }
    every = untrained == {entry.model for entry in entries}
    return [
        *([UNTRAINED.format(models="all models" if every else _listed(untrained))] if untrained else []),
        *([TWINS.format(models=_listed(twinned))] if twinned else []),
    ]


def _on_trials(entries: Sequence[Entry]) -> list[str]:
    left_out = {entry.attack: entry.left_out for entry in entries if entry.left_out}
    found = [
        f"{attack} is not run on {count} pictures that its prior was made of." for attack, count in left_out.items()
    ]
    failures, missing = (sum(getattr(entry, name) for entry in entries) for name in ("failures", "missing"))
    if failures:
        found.append(f"{failures} trials failed; their errors are in the database, and no mean includes them.")
    if missing:
        found.append(f"{missing} trials are not run yet.")
    return found


def _on_metrics(entries: Sequence[Entry], metrics: Sequence[str]) -> list[str]:
    ran = [entry for entry in entries if entry.n]
    empty = [name for name in metrics if ran and not any(name in entry.metrics for entry in ran)]
    return [
        f"{name} is empty: {metric(name).missing() or 'it could not be computed where the trials were run'}; "
        "`fedmjp doctor` says what to do."
        for name in empty
    ]


def _once(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def _listed(names: Iterable[str], last: str = "and") -> str:
    *others, final = sorted(set(names))
    return f"{', '.join(others)} {last} {final}" if others else final


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:].removesuffix('.')}."

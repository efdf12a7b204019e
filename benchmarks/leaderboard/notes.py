"""Notes without which a board would be misread."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fedmjp.benchmarks.leaderboard.entries import FLAT, BoardEntry, ReportedRow
from fedmjp.benchmarks.leaderboard.listing import listed
from fedmjp.metrics import metric

SETTINGS = (
    "Settings: (a) gradient of x, compared with x; (b) gradient of x~, compared with x~; (c) gradient of x~, compared "
    "with x."
)
APRIL = "Models named _april have a first block without first norm and residuals, which APRIL's closed form needs."
BOUND = "Rows marked bound were given more than any server sees. They limit what attacks can reach and are not ranked."
STATISTICS = (
    "95 % percentile bootstrap interval of the mean, which resamples uploads, not pictures of one; too narrow where "
    "uploads are few or alike. Worst is the most revealing single trial."
)


def collect_notes(
    entries: Sequence[BoardEntry], about: Mapping[str, Any], reported: Sequence[ReportedRow]
) -> list[str]:
    """Collect the notes that apply to a board, each once.

    Args:
        entries: All cells of the board.
        about: The plan's manifest.
        reported: Rows of papers beside the board.
    """
    reproduced = [entry for entry in entries if entry.origin == "reproduced"]
    return [
        SETTINGS,
        *_on_attacks(reproduced),
        *_on_weights(reproduced),
        *dict.fromkeys(_sentence(entry.caveat) for entry in reproduced if entry.caveat),
        f"Protocol: {_names(entry.protocol for entry in reproduced)}, pictures in [0, 1]. {STATISTICS}",
        *_on_pictures(about, reproduced),
        *_on_trials(reproduced),
        *_on_metrics(reproduced, about["metrics"]),
        *dict.fromkeys(
            f"Figures reported in {row.source} are as printed there; what they differ in from ours stands beside each "
            "row."
            for row in reported
        ),
        *about["notes"],
    ]


def _on_attacks(entries: Sequence[BoardEntry]) -> Iterator[str]:
    if any(entry.model.endswith("_april") for entry in entries):
        yield APRIL
    if any(entry.role == "bound" for entry in entries):
        yield BOUND
    unshuffled = [defence for entry in entries if not entry.pipeline.shuffles for defence in entry.pipeline.defences]
    if held_back := _names(defence.name for defence in unshuffled if defence.mask_ratio):
        yield f"In (a) nothing is shuffled: of {held_back} only the rest is done to the patches that would be."
    if alone := _names(entry.defence for entry in entries if entry.pipeline.marks == {"shuffled"}):
        yield f"{alone} shuffles and does nothing else: the control of what shuffling alone achieves."
    ran = [entry for entry in entries if entry.role == "attack" and entry.verdict != "refused" and entry.defences]
    unknown = {entry.defence for entry in ran} - {entry.defence for entry in ran if entry.adapted}
    if unknown:
        yield (
            f"No attack here is adapted to {_names(unknown, 'or')}. A low score against it is their failure, not yet "
            "its protection; nothing below the grey row says anything about privacy."
        )


def _on_weights(entries: Sequence[BoardEntry]) -> Iterator[str]:
    by_id = {entry.id: entry for entry in entries}
    untrained = {entry.model for entry in entries if entry.weights == "untrained"}
    if untrained:
        models = "all models" if untrained == {entry.model for entry in entries} else _names(untrained)
        yield f"Weights of {models} are initial ones drawn from the seed (untrained)."
    twinned = _names(
        f"{entry.model}-{entry.defence}"
        for entry in entries
        if entry.twin in by_id and by_id[entry.twin].weights != entry.weights
    )
    if twinned:
        yield f"The twin of {twinned} is an undefended model of other weights: the difference is that of both."


def _on_pictures(about: Mapping[str, Any], entries: Sequence[BoardEntry]) -> Iterator[str]:
    if flat := {name for entry in entries for name in entry.flat or ()}:
        alone = f"whose mean colour alone scores {FLAT:g} dB or more"
        yield f"Flat pictures, {len(flat)} here, {alone}, count in no figure and decide no verdict."
    if any(entry.flat is None for entry in entries):
        yield "These trials do not say which pictures are flat: all count."
    if about["data"] == "bundled":
        yield "The bundled pictures are two crops each of four photographs."
    if skipped := len(about["skipped"]):
        yield f"{skipped} pictures of the data were skipped because they cannot be read; others took their places."


def _on_trials(entries: Sequence[BoardEntry]) -> Iterator[str]:
    for attack, count in {entry.attack: entry.left_out for entry in entries if entry.left_out}.items():
        yield f"{attack} is not run on {count} pictures that its prior was made of."
    if failures := sum(entry.failures for entry in entries):
        yield f"{failures} trials failed; their errors are in the database, and no mean includes them."
    if missing := sum(entry.missing for entry in entries):
        yield f"{missing} trials are not run yet."


def _on_metrics(entries: Sequence[BoardEntry], metrics: Sequence[str]) -> Iterator[str]:
    ran = [entry for entry in entries if entry.n]
    for name in metrics:
        scored = [entry for entry in ran if (entry.reveals == "pictures") is (metric(name).of == "pictures")]
        if not scored or any(name in entry.metrics for entry in scored):
            continue
        if metric(name).of == "pictures":
            reason = metric(name).missing() or "it could not be computed where the trials were run"
            yield f"{name} is empty: {reason}; `fedmjp doctor` says what to do."
        elif any(entry.reveals == metric(name).of for entry in scored):
            yield f"{name} is empty: every picture that was attacked is behind the same upload."


def _names(names: Iterable[str], last: str = "and") -> str:
    """Join different names in alphabetical order."""
    return listed(sorted(set(names)), last)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:].removesuffix('.')}."

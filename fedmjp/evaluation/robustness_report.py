"""Robustness as tables, beside the figures of MJP's paper, which contradict each other (Tables 2 and 10)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from fedmjp.evaluation.consistency import Booleans, Floats
from fedmjp.evaluation.figures import Estimate, estimate_mean, estimate_share
from fedmjp.evaluation.natural import AdversarialScore, Detection
from fedmjp.evaluation.robustness import ALEXNET, Hits, compute_picture_errors
from fedmjp.evaluation.severities import NAMES, SEVERITIES
from fedmjp.evaluation.tables import NOTHING, TextTable, format_estimate
from fedmjp.training.rows import PAPER

# Errors of DeiT-S and of DeiT-S with MJP in Table 10, per cent; the paper leaves five corruptions out.
TABLE_10: Mapping[str, tuple[float, float]] = {
    "gaussian_noise": (41.0, 39.9), "shot_noise": (42.7, 41.8), "impulse_noise": (42.8, 41.2),
    "defocus_blur": (50.5, 49.9), "glass_blur": (59.4, 58.6), "motion_blur": (45.5, 47.4), "contrast": (36.1, 34.5),
    "elastic_transform": (43.0, 43.3), "pixelate": (42.4, 40.0), "jpeg_compression": (36.6, 35.8),
}  # fmt: skip
TABLE_10_MEANS = ("44.0", "41.5")  # as they are printed
TABLE_2_MJP = ("51.6", "40.78")  # in the poster, and in the text on arXiv
TABLE_2 = ("54.6", " or ".join(TABLE_2_MJP))
MODELS = ("DeiT-S", "DeiT-S + MJP")
MCE = {"normalised": "mce", "unnormalised": "mce_unnormalised"}  # names of the means over all fifteen


@dataclass(frozen=True)
class Robustness:
    """The robustness of one run; parts that were not measured are None."""

    run: str
    clean: Booleans | None = None  # whether each picture is classified right without corruption
    adversarial: AdversarialScore | None = None
    detection: Detection | None = None


@dataclass(frozen=True)
class Means:
    """Means of a run over corruptions and severities, in per cent, with intervals over the pictures."""

    clean_error: Estimate | None
    unnormalised: Estimate | None
    normalised: Estimate | None  # by AlexNet's errors
    excess_error: Estimate | None  # the error that corruption adds
    against_first: Estimate | None  # the unnormalised mean less that of the first run, picture by picture
    excess_against_first: Estimate | None  # the same for the excess error


def compute_means(runs: Sequence[Robustness], hits: Hits) -> list[Means]:
    """Compute the means of each run over the corruptions; empty without corruptions.

    Args:
        runs: To compare; the first is the reference.
        hits: By corruption, (runs, pictures, severities).
    """
    if not hits:
        return []
    errors = [compute_picture_errors(hits, place, normalised=False) for place in range(len(runs))]
    clean = [_compute_clean_errors(run, len(errors[0])) for run in runs]
    excess = [None if wrong is None else plain - wrong for plain, wrong in zip(errors, clean, strict=True)]
    return [
        Means(
            clean_error=_estimate(clean[place]),
            unnormalised=estimate_mean(errors[place]),
            normalised=estimate_mean(compute_picture_errors(hits, place, normalised=True)),
            excess_error=_estimate(excess[place]),
            against_first=_estimate(_subtract(errors[place], errors[0])) if place else None,
            excess_against_first=_estimate(_subtract(excess[place], excess[0])) if place else None,
        )
        for place in range(len(runs))
    ]


def _compute_clean_errors(run: Robustness, pictures: int) -> Floats | None:
    """Give each picture 100 if it is wrong without corruption; None if other pictures were measured."""
    if run.clean is None or len(run.clean) != pictures:
        return None
    return 100.0 * (~run.clean).astype(np.float64)


def _subtract(values: Floats | None, first: Floats | None) -> Floats | None:
    return None if values is None or first is None else values - first


def _estimate(values: Floats | None) -> Estimate | None:
    return None if values is None else estimate_mean(values)


def build_frame(runs: Sequence[Robustness], hits: Hits) -> pd.DataFrame:
    """Build a frame of errors in per cent per run, corruption and severity, with Wilson's interval over the pictures.

    Args:
        runs: As in ``hits``.
        hits: By corruption, (runs, pictures, severities).
    """
    return pd.DataFrame(
        [
            {
                "run": run.run,
                "corruption": corruption,
                "severity": severity,
                "error": error.value,
                "low": error.low,
                "high": error.high,
                "pictures": correct.shape[1],
            }
            for place, run in enumerate(runs)
            for corruption, correct in hits.items()
            for severity, error in zip(SEVERITIES, map(estimate_share, ~correct[place].T), strict=True)
        ]
    )


def build_content(runs: Sequence[Robustness], hits: Hits) -> dict[str, Any]:
    """Build the content of evaluation.json, all shares in per cent, intervals of 95 % over the pictures.

    Means are called mCE only where all fifteen corruptions are in.

    Args:
        runs: As in ``hits``.
        hits: By corruption, (runs, pictures, severities).
    """
    words = MCE if len(hits) == len(NAMES) else {}
    about: Sequence[Means | None] = compute_means(runs, hits) or [None] * len(runs)
    lines: list[dict[str, Any]] = []
    for place, (run, run_means) in enumerate(zip(runs, about, strict=True)):
        line: dict[str, Any] = {"run": run.run}
        for name, estimate in vars(run_means).items() if run_means else ():
            if estimate is not None:
                key = words.get(name, name)
                line |= {key: estimate.value, f"{key}_interval": [estimate.low, estimate.high]}
        if hits:
            line["errors"] = {name: 100 * float((~correct[place]).mean()) for name, correct in hits.items()}
        parts = {"imagenet_a": run.adversarial, "imagenet_o": run.detection}
        lines.append(line | {name: asdict(part) for name, part in parts.items() if part is not None})
    return {
        "runs": lines,
        "corruptions": list(hits),
        "reported": {
            "source": PAPER,
            "table_2": dict(zip(MODELS, TABLE_2, strict=True)),
            "table_10": _summarise_table_10(),
        },
    }


def build_tables(runs: Sequence[Robustness], hits: Hits, data: str) -> list[TextTable]:
    """Tabulate errors by corruption, ImageNet-A and -O, and the paper's figures.

    Args:
        runs: As in ``hits``.
        hits: By corruption, (runs, pictures, severities).
        data: Name of the pictures.
    """
    tables = []
    if hits:
        tables.append(_tabulate_corruptions(runs, hits, data))
    if any(run.adversarial or run.detection for run in runs):
        tables.append(_tabulate_natural(runs))
    return [*tables, _tabulate_reported()]


def collect_remarks(hits: Hits) -> list[str]:
    """Collect the explanations of the figures, and of the paper's.

    Args:
        hits: By corruption.
    """
    remarks = []
    if hits:
        remarks.append(
            "Errors are means over five severities, intervals of 95 % over the pictures. Unnormalised is the mean of "
            "the errors, as in MJP's code; normalised divides each by AlexNet's on ImageNet-C at 224 pixels, as in the "
            "literature, and is a mean with these weights on other pictures."
        )
    if "frost" in hits:
        remarks.append("Frost is drawn, not the official photographs: its row does not compare with published ones.")
    if hits and len(hits) < len(NAMES):
        remarks.append(f"Means are over {len(hits)} of {len(NAMES)} corruptions: no mCE.")
    first, second = (_compute_mean_10(place, normalised=False) for place in (0, 1))
    gain, normalised_gain = (_compute_gain(normalised=normalised) for normalised in (False, True))
    remarks.append(
        f"Reported: {PAPER}, ImageNet at 224 x 224, not measured here. Table 10 has ten of fifteen corruptions. The "
        f"mean of its columns is {first:.1f} for DeiT-S, as printed, and {second:.1f} for MJP, where it prints "
        f"{TABLE_10_MEANS[1]}. Table 2 has {TABLE_2[0]} for DeiT-S, near the normalised mean, and for MJP "
        f"{' and '.join(TABLE_2_MJP)} in two versions, which these columns give in neither way. Like for like MJP "
        f"gains {gain:.1f} points unnormalised, {normalised_gain:.1f} normalised."
    )
    return remarks


def _tabulate_corruptions(runs: Sequence[Robustness], hits: Hits, data: str) -> TextTable:
    run_means = compute_means(runs, hits)
    share = "mCE" if len(hits) == len(NAMES) else f"mean of {len(hits)} corruptions"
    rows = [["clean error", *(format_estimate(mean.clean_error, "error") for mean in run_means)]]
    for corruption, correct in hits.items():
        errors = [estimate_mean(100 * (~correct[place]).mean(axis=1)) for place in range(len(runs))]
        rows.append([corruption, *(format_estimate(error, "error") for error in errors)])
    ends = {0, len(rows) - 1}
    for name, words in (
        ("unnormalised", f"{share}, unnormalised"),
        ("normalised", f"{share}, normalised"),
        ("against_first", f"unnormalised, less {runs[0].run}'s"),
        ("excess_error", "unnormalised, less clean"),
        ("excess_against_first", f"the same, less {runs[0].run}'s"),
    ):
        if any(getattr(mean, name) for mean in run_means):
            rows.append([words, *(format_estimate(getattr(mean, name), "error") for mean in run_means)])
    pictures = next(iter(hits.values())).shape[1]
    title = f"Error under corruption, %: {pictures:,} pictures of {data}"
    return TextTable(title, ["corruption", *(run.run for run in runs)], rows, frozenset(), frozenset(ends))


def _tabulate_natural(runs: Sequence[Robustness]) -> TextTable:
    head = ["run", "ImageNet-A", "accuracy %", "AURRA %", "ImageNet-O", "AUPR %", "AUROC %", "FPR95 %"]
    rows = []
    for run in runs:
        adversarial, detection = run.adversarial, run.detection
        row = [run.run]
        row += (
            [f"{adversarial.pictures:,}", f"{adversarial.accuracy:.1f}", f"{adversarial.aurra:.1f}"]
            if adversarial
            else [NOTHING] * 3
        )
        row += (
            [f"{detection.foreign:,} + {detection.familiar:,}"]
            + [f"{value:.1f}" for value in (detection.aupr, detection.auroc, detection.fpr95)]
            if detection
            else [NOTHING] * 4
        )
        rows.append(row)
    return TextTable("ImageNet-A and ImageNet-O", head, rows, frozenset())


def _tabulate_reported() -> TextTable:
    head = ["reported", "Table 2", "Table 10", "mean of its columns", "the same, normalised"]
    rows = [
        [name, TABLE_2[place], TABLE_10_MEANS[place]]
        + [f"{_compute_mean_10(place, normalised=normalised):.1f}" for normalised in (False, True)]
        for place, name in enumerate(MODELS)
    ]
    return TextTable(f"mCE, {PAPER}", head, rows, frozenset(range(len(rows))))


def _summarise_table_10() -> dict[str, Any]:
    return {
        name: {
            "printed": TABLE_10_MEANS[place],
            "mean": _compute_mean_10(place, normalised=False),
            "normalised": _compute_mean_10(place, normalised=True),
        }
        for place, name in enumerate(MODELS)
    }


def _compute_mean_10(place: int, *, normalised: bool) -> float:
    """Average the columns of Table 10."""
    errors = [row[place] / (ALEXNET[name] if normalised else 1) for name, row in TABLE_10.items()]
    return float(np.mean(errors))


def _compute_gain(*, normalised: bool) -> float:
    return _compute_mean_10(0, normalised=normalised) - _compute_mean_10(1, normalised=normalised)

"""Robustness as tables, beside what MJP's paper says of it, which contradicts itself (Tables 2 and 10)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from fedmjp.evaluation.consistency import Booleans, Floats
from fedmjp.evaluation.figures import CONFIDENCE, Estimate, mean_of
from fedmjp.evaluation.natural import Adversarial, Detection
from fedmjp.evaluation.robustness import ALEXNET, Rights, errors_of_pictures
from fedmjp.evaluation.severities import NAMES, SEVERITIES
from fedmjp.evaluation.tables import NOTHING, Sheet, text_of
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
MCE = {"normalised": "mce", "unnormalised": "mce_unnormalised"}  # what means over all fifteen are called


@dataclass(frozen=True)
class Robustness:
    """What was measured of one run; not all of it is asked for at once."""

    run: str
    clean: Booleans | None = None  # whether each picture is right as it is
    adversarial: Adversarial | None = None
    detection: Detection | None = None


@dataclass(frozen=True)
class Means:
    """Means of a run over corruptions and severities, in per cent, with intervals over the pictures."""

    clean_error: Estimate | None
    unnormalised: Estimate | None
    normalised: Estimate | None  # by AlexNet's errors
    excess_error: Estimate | None  # what corruption adds to the error
    against_first: Estimate | None  # the unnormalised mean less that of the first run, picture by picture
    excess_against_first: Estimate | None  # the same of what corruption adds


def means(runs: Sequence[Robustness], rights: Rights) -> list[Means]:
    """Of each run, over the corruptions that there are."""
    if not rights:
        return []
    errors = [errors_of_pictures(rights, place, normalised=False) for place in range(len(runs))]
    clean = [_clean(run, len(errors[0])) for run in runs]
    excess = [None if wrong is None else plain - wrong for plain, wrong in zip(errors, clean, strict=True)]
    return [
        Means(
            clean_error=_mean(clean[place]),
            unnormalised=mean_of(errors[place]),
            normalised=mean_of(errors_of_pictures(rights, place, normalised=True)),
            excess_error=_mean(excess[place]),
            against_first=_mean(_difference(errors[place], errors[0])) if place else None,
            excess_against_first=_mean(_difference(excess[place], excess[0])) if place else None,
        )
        for place in range(len(runs))
    ]


def _clean(run: Robustness, pictures: int) -> Floats | None:
    """Of each picture as it is 100 if it is wrong; None if that is not known of the same pictures."""
    if run.clean is None or len(run.clean) != pictures:
        return None
    return 100.0 * (~run.clean).astype(np.float64)


def _difference(values: Floats | None, first: Floats | None) -> Floats | None:
    return None if values is None or first is None else values - first


def _mean(values: Floats | None) -> Estimate | None:
    return None if values is None else mean_of(values)


def frame(runs: Sequence[Robustness], rights: Rights) -> pd.DataFrame:
    """One row per run, corruption and severity: the error in per cent, with Wilson's interval over the pictures."""
    return pd.DataFrame(
        [
            {
                "run": run.run,
                "corruption": corruption,
                "severity": severity,
                "error": 100 * float(wrong.mean()),
                **_interval(wrong),
                "pictures": len(wrong),
            }
            for place, run in enumerate(runs)
            for corruption, right in rights.items()
            for severity, wrong in zip(SEVERITIES, ~right[place].T, strict=True)
        ]
    )


def content(runs: Sequence[Robustness], rights: Rights) -> dict[str, Any]:
    """What evaluation.json holds, all shares in per cent, intervals of 95 % over the pictures.

    Means are called mCE only where all fifteen corruptions are in.
    """
    words = MCE if len(rights) == len(NAMES) else {}
    about: Sequence[Means | None] = means(runs, rights) or [None] * len(runs)
    lines: list[dict[str, Any]] = []
    for place, (run, found) in enumerate(zip(runs, about, strict=True)):
        line: dict[str, Any] = {"run": run.run}
        for name, estimate in vars(found).items() if found else ():
            if estimate is not None:
                key = words.get(name, name)
                line |= {key: estimate.value, f"{key}_interval": [estimate.low, estimate.high]}
        if rights:
            line["errors"] = {name: 100 * float((~right[place]).mean()) for name, right in rights.items()}
        parts = {"imagenet_a": run.adversarial, "imagenet_o": run.detection}
        lines.append(line | {name: asdict(part) for name, part in parts.items() if part is not None})
    return {
        "runs": lines,
        "corruptions": list(rights),
        "reported": {"source": PAPER, "table_2": dict(zip(MODELS, TABLE_2, strict=True)), "table_10": _table_10()},
    }


def sheets(runs: Sequence[Robustness], rights: Rights, data: str) -> list[Sheet]:
    """Ours by corruption, ImageNet-A and -O, and the paper's."""
    found = []
    if rights:
        found.append(_by_corruption(runs, rights, data))
    if any(run.adversarial or run.detection for run in runs):
        found.append(_natural(runs))
    return [*found, _reported()]


def notes(rights: Rights) -> list[str]:
    """What has to be said of the figures, and of the paper's."""
    remarks = []
    if rights:
        remarks.append(
            "Errors are means over five severities, intervals of 95 % over the pictures. Unnormalised is the mean of "
            "the errors, as in MJP's code; normalised divides each by AlexNet's on ImageNet-C at 224 pixels, as in the "
            "literature, and is a mean with these weights on other pictures."
        )
    if "frost" in rights:
        remarks.append("Frost is drawn, not the official photographs: its row does not compare with published ones.")
    if rights and len(rights) < len(NAMES):
        remarks.append(f"Means are over {len(rights)} of {len(NAMES)} corruptions: no mCE.")
    first, second = (_mean_10(place, normalised=False) for place in (0, 1))
    remarks.append(
        f"Reported: {PAPER}, ImageNet at 224 x 224, not measured here. Table 10 has ten of fifteen corruptions. The "
        f"mean of its columns is {first:.1f} for DeiT-S, as printed, and {second:.1f} for MJP, where it prints "
        f"{TABLE_10_MEANS[1]}. Table 2 has {TABLE_2[0]} for DeiT-S, near the normalised mean, and for MJP "
        f"{' and '.join(TABLE_2_MJP)} in two versions, which these columns give in neither way. Like for like MJP "
        f"gains {_gain(normalised=False):.1f} points unnormalised, {_gain(normalised=True):.1f} normalised."
    )
    return remarks


def _by_corruption(runs: Sequence[Robustness], rights: Rights, data: str) -> Sheet:
    found = means(runs, rights)
    share = "mCE" if len(rights) == len(NAMES) else f"mean of {len(rights)} corruptions"
    rows = [["clean error", *(text_of(each.clean_error, "error") for each in found)]]
    for corruption, right in rights.items():
        errors = [mean_of(100 * (~right[place]).mean(axis=1)) for place in range(len(runs))]
        rows.append([corruption, *(text_of(error, "error") for error in errors)])
    ends = {0, len(rows) - 1}
    for name, words in (
        ("unnormalised", f"{share}, unnormalised"),
        ("normalised", f"{share}, normalised"),
        ("against_first", f"unnormalised, less {runs[0].run}'s"),
        ("excess_error", "unnormalised, less clean"),
        ("excess_against_first", f"the same, less {runs[0].run}'s"),
    ):
        if any(getattr(each, name) for each in found):
            rows.append([words, *(text_of(getattr(each, name), "error") for each in found)])
    pictures = next(iter(rights.values())).shape[1]
    title = f"Error under corruption, %: {pictures:,} pictures of {data}"
    return Sheet(title, ["corruption", *(run.run for run in runs)], rows, frozenset(), frozenset(ends))


def _natural(runs: Sequence[Robustness]) -> Sheet:
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
    return Sheet("ImageNet-A and ImageNet-O", head, rows, frozenset())


def _reported() -> Sheet:
    head = ["reported", "Table 2", "Table 10", "mean of its columns", "the same, normalised"]
    rows = [
        [name, TABLE_2[place], TABLE_10_MEANS[place]]
        + [f"{_mean_10(place, normalised=normalised):.1f}" for normalised in (False, True)]
        for place, name in enumerate(MODELS)
    ]
    return Sheet(f"mCE, {PAPER}", head, rows, frozenset(range(len(rows))))


def _table_10() -> dict[str, Any]:
    return {
        name: {
            "printed": TABLE_10_MEANS[place],
            "mean": _mean_10(place, normalised=False),
            "normalised": _mean_10(place, normalised=True),
        }
        for place, name in enumerate(MODELS)
    }


def _mean_10(place: int, *, normalised: bool) -> float:
    """Over the columns of Table 10."""
    errors = [row[place] / (ALEXNET[name] if normalised else 1) for name, row in TABLE_10.items()]
    return float(np.mean(errors))


def _gain(*, normalised: bool) -> float:
    return _mean_10(0, normalised=normalised) - _mean_10(1, normalised=normalised)


def _interval(hits: Booleans) -> dict[str, float]:
    interval = stats.binomtest(int(hits.sum()), len(hits)).proportion_ci(CONFIDENCE, method="wilson")
    return {"low": 100 * float(interval.low), "high": 100 * float(interval.high)}

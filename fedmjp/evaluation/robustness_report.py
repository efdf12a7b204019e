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
ERRORS = (
    "Errors are means over five severities, intervals of 95 % over the pictures. Unnormalised is the mean of the "
    "errors, as in MJP's code; normalised divides each by AlexNet's on ImageNet-C at 224 pixels, as in the literature, "
    "and is a mean with these weights on other pictures."
)
REPORTED = (
    f"Reported: {PAPER}, ImageNet at 224 x 224, not measured here. Table 10 has ten of fifteen corruptions. The mean "
    "of its columns is {first:.1f} for DeiT-S, as printed, and {second:.1f} for MJP, where it prints "
    f"{TABLE_10_MEANS[1]}. Table 2 has {TABLE_2[0]} for DeiT-S, near the normalised mean, and for MJP "
    f"{' and '.join(TABLE_2_MJP)} in two versions, which these columns give in neither way. Like for like MJP gains "
    "{gain:.1f} points unnormalised, {normalised:.1f} normalised."
)
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


@dataclass(frozen=True)
class RobustnessReport:
    """The robustness of several runs, of which the first is the reference, as tables and files.

    Attributes:
        runs: The measurements of each run.
        hits: By corruption, (runs, pictures, severities).
        data: Name of the corrupted pictures.
    """

    runs: Sequence[Robustness]
    hits: Hits
    data: str = ""

    def compute_means(self) -> list[Means]:
        """Compute the means of each run over the corruptions; empty without corruptions."""
        if not self.hits:
            return []
        places = range(len(self.runs))
        errors = [compute_picture_errors(self.hits, place, normalised=False) for place in places]
        normalised = [compute_picture_errors(self.hits, place, normalised=True) for place in places]
        clean = [_compute_clean_errors(run, len(errors[0])) for run in self.runs]
        excess = [corrupted - wrong for corrupted, wrong in zip(errors, clean, strict=True)]
        return [
            Means(
                clean_error=estimate_mean(clean[place]),
                unnormalised=estimate_mean(errors[place]),
                normalised=estimate_mean(normalised[place]),
                excess_error=estimate_mean(excess[place]),
                against_first=estimate_mean(errors[place] - errors[0]) if place else None,
                excess_against_first=estimate_mean(excess[place] - excess[0]) if place else None,
            )
            for place in places
        ]

    def build_frame(self) -> pd.DataFrame:
        """Build a row per run, corruption and severity: the error in per cent, with Wilson's interval."""
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
                for place, run in enumerate(self.runs)
                for corruption, correct in self.hits.items()
                for severity, error in zip(SEVERITIES, map(estimate_share, ~correct[place].T), strict=True)
            ]
        )

    def build_content(self) -> dict[str, Any]:
        """Build the content of evaluation.json, all shares in per cent, intervals of 95 % over the pictures.

        Means are called mCE only where all fifteen corruptions are in.
        """
        words = MCE if len(self.hits) == len(NAMES) else {}
        about: Sequence[Means | None] = self.compute_means() or [None] * len(self.runs)
        lines: list[dict[str, Any]] = []
        for place, (run, run_means) in enumerate(zip(self.runs, about, strict=True)):
            line: dict[str, Any] = {"run": run.run}
            for name, estimate in vars(run_means).items() if run_means else ():
                if estimate is not None:
                    key = words.get(name, name)
                    line |= {key: estimate.value, f"{key}_interval": [estimate.low, estimate.high]}
            if self.hits:
                line["errors"] = {name: 100 * float((~correct[place]).mean()) for name, correct in self.hits.items()}
            parts = {"imagenet_a": run.adversarial, "imagenet_o": run.detection}
            lines.append(line | {name: asdict(part) for name, part in parts.items() if part is not None})
        table_2, table_10 = dict(zip(MODELS, TABLE_2, strict=True)), _summarise_table_10()
        reported = {"source": PAPER, "table_2": table_2, "table_10": table_10}
        return {"runs": lines, "corruptions": list(self.hits), "reported": reported}

    def build_tables(self) -> list[TextTable]:
        """Tabulate errors by corruption, ImageNet-A and -O, and the paper's figures."""
        tables = [self._tabulate_corruptions()] if self.hits else []
        if any(run.adversarial or run.detection for run in self.runs):
            tables.append(_tabulate_natural(self.runs))
        return [*tables, _tabulate_reported()]

    def collect_remarks(self) -> list[str]:
        """Collect the explanations of the figures, and of the paper's."""
        remarks = []
        if self.hits:
            remarks.append(ERRORS)
        if "frost" in self.hits:
            remarks.append(
                "Frost is drawn, not the official photographs: its row does not compare with published ones."
            )
        if self.hits and len(self.hits) < len(NAMES):
            remarks.append(f"Means are over {len(self.hits)} of {len(NAMES)} corruptions: no mCE.")
        first, second = _summarise_table_10().values()
        gain, normalised_gain = (first[name] - second[name] for name in ("mean", "normalised"))
        reported = REPORTED.format(first=first["mean"], second=second["mean"], gain=gain, normalised=normalised_gain)
        return [*remarks, reported]

    def _tabulate_corruptions(self) -> TextTable:
        run_means, reference = self.compute_means(), self.runs[0].run
        share = "mCE" if len(self.hits) == len(NAMES) else f"mean of {len(self.hits)} corruptions"
        rows = [["clean error", *(format_estimate(mean.clean_error, "error") for mean in run_means)]]
        for corruption, correct in self.hits.items():
            errors = [estimate_mean(100 * (~by_picture).mean(axis=1)) for by_picture in correct]
            rows.append([corruption, *(format_estimate(error, "error") for error in errors)])
        ends = {0, len(rows) - 1}
        for name, words in (
            ("unnormalised", f"{share}, unnormalised"),
            ("normalised", f"{share}, normalised"),
            ("against_first", f"unnormalised, less {reference}'s"),
            ("excess_error", "unnormalised, less clean"),
            ("excess_against_first", f"the same, less {reference}'s"),
        ):
            estimates = [getattr(mean, name) for mean in run_means]
            if any(estimates):
                rows.append([words, *(format_estimate(estimate, "error") for estimate in estimates)])
        pictures = next(iter(self.hits.values())).shape[1]
        title = f"Error under corruption, %: {pictures:,} pictures of {self.data}"
        return TextTable(title, ["corruption", *(run.run for run in self.runs)], rows, frozenset(), frozenset(ends))


def _compute_clean_errors(run: Robustness, pictures: int) -> Floats:
    """Give each picture 100 if it is wrong without corruption; NaN if other pictures were measured."""
    if run.clean is None or len(run.clean) != pictures:
        return np.full(pictures, np.nan)
    return 100.0 * (~run.clean).astype(np.float64)


def _tabulate_natural(runs: Sequence[Robustness]) -> TextTable:
    head = ["run", "ImageNet-A", "accuracy %", "AURRA %", "ImageNet-O", "AUPR %", "AUROC %", "FPR95 %"]
    rows = []
    for run in runs:
        row, score, detection = [run.run], run.adversarial, run.detection
        row += [f"{score.pictures:,}", *_round(score.accuracy, score.aurra)] if score else [NOTHING] * 3
        if detection:
            counts = f"{detection.foreign:,} + {detection.familiar:,}"
            row += [counts, *_round(detection.aupr, detection.auroc, detection.fpr95)]
        rows.append(row + [NOTHING] * (len(head) - len(row)))
    return TextTable("ImageNet-A and ImageNet-O", head, rows, frozenset())


def _round(*shares: float) -> list[str]:
    return [f"{share:.1f}" for share in shares]


def _tabulate_reported() -> TextTable:
    head = ["reported", "Table 2", "Table 10", "mean of its columns", "the same, normalised"]
    rows = [
        [name, table_2, means["printed"], *_round(means["mean"], means["normalised"])]
        for table_2, (name, means) in zip(TABLE_2, _summarise_table_10().items(), strict=True)
    ]
    return TextTable(f"mCE, {PAPER}", head, rows, frozenset(range(len(rows))))


def _summarise_table_10() -> dict[str, Any]:
    """Average the columns of Table 10 by model, with and without AlexNet's errors as divisors."""
    return {
        name: {
            "printed": TABLE_10_MEANS[place],
            "mean": float(np.mean([row[place] for row in TABLE_10.values()])),
            "normalised": float(np.mean([row[place] / ALEXNET[key] for key, row in TABLE_10.items()])),
        }
        for place, name in enumerate(MODELS)
    }

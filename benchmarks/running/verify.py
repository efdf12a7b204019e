"""Does a folder of results hold together: rows, pictures and scores, table, and do trials repeat?"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from fedmjp import provenance
from fedmjp.benchmarks.campaign.prepare import Prepared
from fedmjp.benchmarks.folder.output import OutputFolder
from fedmjp.benchmarks.folder.pictures import load_png
from fedmjp.benchmarks.folder.trials import RecordedTrials
from fedmjp.benchmarks.plan.trial_plan import TrialPlan
from fedmjp.benchmarks.running.again import run_again
from fedmjp.benchmarks.running.retention import extremes
from fedmjp.files import read_file
from fedmjp.metrics import METRICS, metric
from fedmjp.seeds import torch_generator

# Each of two pictures moves by at most half a step of 1/255 when it is rounded, so their distance by a step.
ROUNDING = 1 / 255
TOLERANCE = 1e-6
TABLE = "leaderboard.json"
LARGEST = 2**30  # bytes of what was published
# Of a manifest, what its trials do not say: when it was made, and why its commit cannot be checked out any more.
BESIDES = {"rendered_at", "commit_lost"}


@dataclass
class Verification:
    """What was found: what does not hold, and what was checked, with how many.

    ``differences`` between the machine of then and that of now are no fault, but they can change numbers.
    """

    problems: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)


def verify(folder: OutputFolder, plan: TrialPlan, store: RecordedTrials) -> Verification:
    """Check rows against the plan and kept pictures against scores.

    Args:
        folder: Of the results.
        plan: Its cells and trials.
        store: Their rows.
    """
    verification = Verification()
    rows = store.frame(plan.trials["key"].tolist())
    joined = plan.trials.merge(rows, on="key", how="left", suffixes=("", "_stored"))
    _check_rows(joined, verification)
    _rescore(folder, plan, joined[joined["status"] == "ok"], verification)
    _compare_environments(store.environments(), set(rows["environment_sha256"]), verification)
    return verification


def _check_rows(joined: pd.DataFrame, verification: Verification) -> None:
    missing = int(joined["status"].isna().sum())
    if missing:
        verification.problems.append(f"{missing} of {len(joined)} planned trials have no row: run the campaign again")
    present = joined[joined["status"].notna()]
    for name in present.loc[present["picture_sha256"] != present["picture_sha256_stored"], "picture"].unique():
        verification.problems.append(f"picture {name!r} has another digest in the database than in the plan")
    counts = Counter(present["status"])
    verification.checked.append(f"{len(present)} rows: {counts['ok']} ok, {counts['failed']} failed")


def _rescore(folder: OutputFolder, plan: TrialPlan, finished: pd.DataFrame, verification: Verification) -> None:
    """Score again what lies in the folder of pictures."""
    rescored, owed = 0, _owed(plan, finished)
    for row in finished[["key", "cell", "stem", "scores"]].to_dict("records"):
        files = plan.files_of(row)
        path = folder.kept.path(files["reconstruction"])
        if not path.exists():
            if row["key"] in owed:
                verification.problems.append(
                    f"{files['reconstruction']} is missing, which keep: {plan.about['keep']} promises"
                )
            continue
        cell = plan.cells[row["cell"]]
        try:
            pair = _picture(path), _picture(folder.kept.path(files[str(cell.setting.compared_with)]))
        except OSError as error:
            verification.problems.append(f"{files['reconstruction']}: {error}")
            continue
        if pair[0].shape != pair[1].shape:
            verification.problems.append(f"{files['reconstruction']} is not of the size of the original")
            continue
        problem = _disagreement(pair, row["scores"], rounded=cell.protocol == "8bit")
        if problem:
            verification.problems.append(f"{files['reconstruction']} in setting {cell.setting}: {problem}")
        rescored += 1
    verification.checked.append(f"{rescored} kept reconstructions scored again")


def _owed(plan: TrialPlan, finished: pd.DataFrame) -> set[str]:
    """List the keys of the trials whose pictures must be there."""
    if plan.about["keep"] == "all":
        pictured = {place for place, cell in enumerate(plan.cells) if cell.reveals == "pictures"}
        return set(finished.loc[finished["cell"].isin(pictured), "key"])
    if plan.about["keep"] == "none":
        return set()
    return {key for _, cell in finished.groupby("cell") for key in extremes(cell).values()}


def _picture(path: Path) -> Tensor:
    return torch.from_numpy(load_png(path).copy()).permute(2, 0, 1)[None].float() / 255


def _disagreement(pair: tuple[Tensor, Tensor], scores: Mapping[str, Any], *, rounded: bool) -> str | None:
    """Say how the stored scores contradict the stored pictures, which have 8 bits."""
    # Scores of that protocol must be met exactly. Of float scores only MSE and PSNR can be held against rounded
    # pictures: the root mean square moves by at most one step.
    for name in METRICS.keys() & scores.keys() if rounded else ("mse", "psnr"):
        value = scores.get(name)
        if value is None or metric(name).missing():
            continue
        actual = float(metric(name).function(*pair)[0])
        if rounded and not math.isclose(actual, value, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            return f"{name} is {actual:.6g}, stored is {value:.6g}"
        if not rounded and abs(_distance(name, actual) - _distance(name, value)) > ROUNDING + TOLERANCE:
            return f"{name} is {actual:.6g}, stored is {value:.6g}: more apart than rounding to 8 bits allows"
    return None


def _distance(name: str, value: float) -> float:
    """Return the root mean square error behind a value of MSE or PSNR."""
    return math.sqrt(value) if name == "mse" else 10 ** (-value / 20)


def _compare_environments(
    environments: Mapping[str, Mapping[str, Any]], used: set[str], verification: Verification
) -> None:
    now: Mapping[str, Any] = provenance.environment()
    for sha256 in sorted(used):
        verification.differences += [
            f"{where}: {recorded!r} then, {current!r} now"
            for where, recorded, current in _different(environments[sha256], now)
        ]
    verification.differences = list(dict.fromkeys(verification.differences))


def _different(then: Any, now: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for key in then.keys() | now.keys():
            yield from _different(then.get(key), now.get(key), f"{where} {key}".strip())
    elif then != now:
        yield where, then, now


def repeat(prepared: Prepared, plan: TrialPlan, store: RecordedTrials, count: int) -> Verification:
    """Run finished trials, drawn with a fixed seed, again from their pictures and compare every score.

    Args:
        prepared: The campaign.
        plan: Of the results.
        store: Its rows.
        count: Number of trials.
    """
    verification = Verification()
    finished = store.frame(plan.trials["key"].tolist())
    finished = plan.trials.merge(finished[finished["status"] == "ok"], on="key", suffixes=("", "_stored"))
    order = torch.randperm(len(finished), generator=torch_generator(0, "verify"))[:count].tolist()
    stored = {
        (plan.cells[row["cell"]], row["picture"], row["seed"]): row["scores"]
        for row in finished.iloc[order].to_dict("records")
    }
    keys = [trial.key for trial in prepared.plan.tasks if (trial.cell, trial.picture.name, trial.seed) in stored]
    rerun, _ = run_again(prepared, keys)
    rows = prepared.plan.trials.merge(rerun[rerun["status"] == "ok"], on="key", suffixes=("", "_stored"))
    repeated = {
        (prepared.plan.cells[row["cell"]], row["picture"], row["seed"]): row["scores"]
        for row in rows.to_dict("records")
    }
    for trial, scores in stored.items():
        cell, name, _ = trial
        where = f"{cell.model}, {cell.defence}, {cell.attack}, setting {cell.setting}, {name}"
        if trial not in repeated:
            verification.problems.append(f"{where}: could not be run again")
        verification.problems += [
            f"{where}: {metric_name} is {repeated[trial][metric_name]!r} now, {value!r} was stored"
            for metric_name, value in scores.items()
            if trial in repeated and repeated[trial].get(metric_name) != value
        ]
    verification.checked.append(f"{len(stored)} trials run again from their pictures")
    return verification


def compare_with_published(folder: Path, board: Mapping[str, Any], *, rendered: bool) -> list[str]:
    """List where a published table and manifest contradict the trials.

    Args:
        folder: Where ``leaderboard.json`` and ``manifest.json`` lie.
        board: The board made anew, as JSON-ready values.
        rendered: Whether the table must be there; a study may do without.
    """
    tables = _compare_tables(folder / TABLE, board) if rendered or (folder / TABLE).exists() else []
    return [*tables, *_compare_manifests(folder / "manifest.json", board["about"])]


def _compare_manifests(path: Path, about: Mapping[str, Any]) -> list[str]:
    try:
        published = json.loads(read_file(path, LARGEST))
        keys = (published.keys() | about.keys()) - BESIDES
    except (OSError, ValueError, AttributeError, RecursionError):
        return [f"{path.name} is missing or damaged: `fedmjp leaderboard` makes it"]
    changed = sorted(key for key in keys if not _same(published.get(key), about.get(key)))
    return [f"{path.name}: {', '.join(changed)} not as the trials say"] if changed else []


def _compare_tables(path: Path, board: Mapping[str, Any]) -> list[str]:
    try:
        published = {entry["id"]: entry for entry in json.loads(read_file(path, LARGEST))["entries"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return [f"{path.name} is missing or damaged: `fedmjp leaderboard` makes it"]
    entries = {entry["id"]: entry for entry in board["entries"]}
    changed = [entry_id for entry_id, entry in entries.items() if not _same(published.get(entry_id), entry)]
    return [
        *(f"{path.name}: entry {entry_id} is not that of the trials" for entry_id in changed),
        *(f"{path.name}: entry {entry_id} is in no plan" for entry_id in published.keys() - entries.keys()),
    ]


def _same(first: Any, second: Any) -> bool:
    """Compare values; numbers up to what another linear-algebra library makes of intervals."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    if isinstance(first, float) and isinstance(second, float):
        return math.isclose(first, second, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return bool(first == second)

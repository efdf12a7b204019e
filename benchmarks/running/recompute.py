"""A third party's entry run again on a sample of its pictures, which the board chooses, and held against its claims."""

import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pandas as pd

from fedmjp.arithmetic import Arithmetic
from fedmjp.attacks import ATTACKS
from fedmjp.benchmarks.campaign.prepare import Prepared, prepare
from fedmjp.benchmarks.campaign.spec import Campaign
from fedmjp.benchmarks.leaderboard.admission import Recomputation
from fedmjp.benchmarks.leaderboard.assembly import build_entries
from fedmjp.benchmarks.leaderboard.consistency import AdmissionError, name_entry
from fedmjp.benchmarks.leaderboard.entries import BoardEntry
from fedmjp.benchmarks.leaderboard.submissions import EntryRecipe, PlugIn, Submission
from fedmjp.benchmarks.plan.trial_plan import Cell, TrialPlan
from fedmjp.benchmarks.running.again import run_again
from fedmjp.data.datasets import BUNDLED
from fedmjp.defences import DEFENCES
from fedmjp.errors import ConfigError, FedmjpError
from fedmjp.metrics import RECOGNISABLE

FEWEST_PICTURES = 10  # of a sample; all where an entry has fewer
NOISE_PSNR = 60.0  # dB, from which on a reconstruction differs by little more than float32's own rounding


@dataclass(frozen=True)
class Rounding:
    """How far two computations of a score may lie apart: other processors and numbers of threads round otherwise."""

    decibels: float
    share: float  # of any other score
    absolute: float  # of any other score, where that is more

    def allows(self, metric: str, claimed: float, recomputed: float) -> bool:
        """Tell whether two values of a metric are the same but for rounding.

        Args:
            metric: Its name.
            claimed: One value.
            recomputed: The other.
        """
        if metric == "psnr":
            return abs(min(claimed, NOISE_PSNR) - min(recomputed, NOISE_PSNR)) <= self.decibels
        return abs(claimed - recomputed) <= max(self.share * abs(recomputed), self.absolute)

    def text(self, metric: str) -> str:
        """Write what is allowed of a metric: ``0.1 dB``.

        Args:
            metric: Its name.
        """
        return f"{self.decibels:g} dB" if metric == "psnr" else f"{self.share:.1%} or {self.absolute:g}"


CLOSED_FORM = Rounding(decibels=0.1, share=0.025, absolute=0.005)
SEARCH = Rounding(decibels=2.0, share=0.6, absolute=0.1)  # an optimiser's steps carry rounding on


@dataclass(frozen=True)
class Recomputer:
    """A board's own means of running entries again.

    Attributes:
        data: Where its pictures lie, if they are not the bundled ones.
        weights: Files of trained weights by MODEL or MODEL-DEFENCE.
        pictures: How many pictures of each cell are run again, at least.
        device: Where attacks run.
        tell: Gets a line before trials are run.
    """

    data: str = ""
    weights: Mapping[str, str] = field(default_factory=dict)
    pictures: int = FEWEST_PICTURES
    device: Literal["cpu", "cuda"] = "cpu"
    tell: Callable[[str], object] = lambda _: None

    def __call__(self, submission: Submission, digest: str) -> Recomputation:
        """Run a sample of a submission's trials again and hold their scores against its claims.

        Args:
            submission: Consistent in itself.
            digest: Its SHA-256, from which the sample is drawn, with random digits that nobody knew before.

        Returns:
            The recomputed entries, or the reason why there are none.

        Raises:
            AdmissionError: If a score is not as claimed.
        """
        if submission.recipe is None:
            return Recomputation(reason="it holds no recipe; `fedmjp leaderboard pack` writes one")
        _require_recipe(submission)
        try:
            prepared = self._prepare(submission.recipe, submission.entries[0].threat.arithmetic)
            cells = self._cells(prepared, submission)
        except AdmissionError:
            raise
        except FedmjpError as error:
            return Recomputation(reason=self._publishable(error))
        draw = secrets.token_hex(16)
        table = _sample(prepared.plan, cells, self.pictures, f"{digest} {draw}")
        self.tell(f"Running {len(table)} of its trials again.")
        rows, environments = run_again(prepared, table["key"].tolist())
        failed = rows[rows["status"] != "ok"]
        if len(failed):
            return Recomputation(reason=f"run again, its trials failed: {_one_line(failed['error'].iloc[0])}")
        config_sha256 = submission.entries[0].provenance.config_sha256
        about = {**prepared.plan.about, "config_sha256": config_sha256, "recognisable_at": RECOGNISABLE, "utility": {}}
        entries = build_entries(TrialPlan(tuple(cells), table, about), rows, environments, submission.submitter)
        for entry in entries:
            for fault in _contradictions(cells[entry.cell], entry):
                raise AdmissionError(f"{name_entry(entry)}: {fault}")
        return Recomputation(draw=draw, entries=tuple(_checked(entry, cells[entry.cell]) for entry in entries))

    def _publishable(self, error: FedmjpError) -> str:
        """Write an error in one line, with names of files and folders in place of where they lie on this machine."""
        reason = _one_line(error)
        for path in filter(None, (self.data, *self.weights.values())):
            reason = reason.replace(path, Path(path).name)
        return reason

    def _prepare(self, recipe: EntryRecipe, arithmetic: Arithmetic) -> Prepared:
        """Plan the campaign of a recipe on the pictures and weights of this machine."""
        for plug_in in recipe.plug_ins:
            _require_plug_in(plug_in)
        stated_data, stated_weights = recipe.config.get("data"), recipe.config.get("weights")
        if not isinstance(stated_data, Mapping) or not isinstance(stated_weights, Mapping):
            raise ConfigError("its recipe states no campaign")
        label, weights = str(stated_data.get("source")), self.weights
        if not self.data and label != BUNDLED:
            raise ConfigError(f"its pictures ({label[:80]!a}) are not here: name their folder with --data")
        if lacking := sorted(map(str, stated_weights.keys() - weights.keys())):
            raise ConfigError(f"the trained weights of {lacking[0][:80]!a} are not here: name them with --weights")
        data = {**stated_data, "source": self.data or label, "name": label if self.data else ""}
        usual = {"weights": dict(weights), "keep": "none", "budget": {}, "accuracy": {}, "reported": []}
        campaign = Campaign.parse({**recipe.config, **usual, "data": data})
        return prepare(campaign, device=self.device, command="", arithmetic=arithmetic)

    def _cells(self, prepared: Prepared, submission: Submission) -> dict[Cell, BoardEntry]:
        """Map the planned cells of a submission to their entries; every picture has to be that of the recipe."""
        entries = {entry.cell: entry for entry in submission.entries}
        cells = {cell: entries[cell] for cell in prepared.plan.cells if cell in entries and cell.refusal is None}
        if not cells:
            raise ConfigError("its recipe makes none of its cells here; weights or versions differ")
        pictures = submission.recipe.pictures if submission.recipe else {}
        for trial in prepared.plan.tasks:
            if trial.cell in cells and pictures.get(trial.picture.name) != trial.picture.sha256:
                raise ConfigError(f"its pictures are others than those here: {trial.picture.name[:80]!a} differs")
        for entry in cells.values():
            for config in entry.defences:
                _require_stated(PlugIn.of("defence", config.name, DEFENCES), submission)
            _require_stated(PlugIn.of("attack", entry.attack.partition(" ")[0], ATTACKS), submission)
        return cells


def _require_recipe(submission: Submission) -> None:
    """Refuse a recipe that is not of the campaign that the entries name."""
    recipe = submission.recipe
    sha256 = hashlib.sha256(json.dumps(recipe and recipe.config, sort_keys=True).encode()).hexdigest()
    for entry in submission.entries:
        if entry.provenance.config_sha256 != sha256:
            raise AdmissionError(
                f"{name_entry(entry)}: its config_sha256 is {entry.provenance.config_sha256}, but its recipe has "
                f"{sha256}: pack the entry anew with `fedmjp leaderboard pack`"
            )


def _require_plug_in(stated: PlugIn) -> None:
    """Raise ConfigError unless the same version of a plug-in is installed; nothing is installed for that."""
    installed = PlugIn.of(stated.kind, stated.name, ATTACKS if stated.kind == "attack" else DEFENCES)
    if installed != stated:
        version = f"{installed.package} {installed.version}" if installed else "ours"
        raise ConfigError(
            f"{stated.kind} {stated.name[:80]!a} is {version[:80]!a} here, with other sources than those of "
            f"{stated.package[:80]!a} {stated.version[:80]!a}: install that version to run it again"
        )


def _require_stated(plug_in: PlugIn | None, submission: Submission) -> None:
    if plug_in and plug_in not in (submission.recipe.plug_ins if submission.recipe else ()):
        raise ConfigError(f"its recipe does not say which version of {plug_in.kind} {plug_in.name!r} it was made with")


def _sample(plan: TrialPlan, cells: Mapping[Cell, BoardEntry], count: int, draw: str) -> pd.DataFrame:
    """Choose trials of whole uploads, until each cell has enough pictures; the cells of a plan share the choice.

    Returns:
        The rows of the plan's trials, with ``cell`` as an index into ``cells``.
    """
    places = {cell: place for place, cell in enumerate(cells)}
    planned = plan.trials.assign(upload=plan.uploads)
    planned["cell"] = planned["cell"].map({index: places.get(cell) for index, cell in enumerate(plan.cells)})
    planned = planned.dropna(subset="cell").astype({"cell": int})
    planned["order"] = [hashlib.sha256(f"{draw} {name}".encode()).hexdigest() for name in planned["picture"]]
    drawn = []
    for _, trials in planned.groupby("cell", sort=False):
        # An upload stands where the first of its pictures does; of several seeds all are run.
        ranked = trials.assign(first=trials.groupby(["seed", "upload"], sort=False)["order"].transform("min"))
        pictures = ranked.groupby("first")["picture"].nunique().sort_index().cumsum()
        drawn.append(ranked[ranked["first"].isin(pictures.index[: 1 + int((pictures < count).sum())])])
    return pd.concat(drawn).drop(columns=["upload", "order", "first"]).sort_index().reset_index(drop=True)


def _contradictions(claimed: BoardEntry, recomputed: BoardEntry) -> Iterator[str]:
    """Yield what was claimed otherwise than it comes out: picture, metric, both values and the rounding."""
    if claimed.adapted != recomputed.adapted:
        yield f"adapted is {claimed.adapted} in the entry, but {recomputed.adapted} here"
    attack = claimed.attack.partition(" ")[0]
    rounding = SEARCH if ATTACKS.get(attack).optimises else CLOSED_FORM
    incomplete = claimed.failures or claimed.missing
    stated = {**claimed.scores, "flat": claimed.flat or {}}
    for metric, values in {**recomputed.scores, "flat": recomputed.flat or {}}.items():
        for picture, value in values.items():
            claim = stated.get(metric, {}).get(picture)
            where = f"{metric} of picture {picture[:80]!a}"
            if claim is None and metric in stated and not incomplete:
                yield f"{where} is not in the entry, but {value:.6g} recomputed"
            if claim is not None and not rounding.allows("psnr" if metric == "flat" else metric, claim, value):
                allowed = rounding.text("psnr" if metric == "flat" else metric)
                yield f"{where} is {claim:.6g} in the entry, but {value:.6g} recomputed (rounding: {allowed})"


def _checked(entry: BoardEntry, claimed: BoardEntry) -> BoardEntry:
    """Mark a recomputed entry: in full where it has all pictures that were claimed."""
    pictures = {len(side.flat or ()) + side.n for side in (entry, claimed)}
    return entry.model_copy(update={"check": "recomputed" if len(pictures) == 1 else "recomputed in part"})


def _one_line(reason: object) -> str:
    return " ".join(str(reason).split())[:500]

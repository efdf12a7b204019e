"""Whether an update tells which records it was computed from: scores of records, calibrated on records that were not.

Three scores: how much the loss of a record fell (Yeom et al., CSF 2018), how far its own gradient points along the
update (Nasr et al., S&P 2019), and how much weight it has in the regression of the update on the gradients of all
records in question, which takes out what they have in common (as the whitened likelihood ratio of Leemann et al.,
NeurIPS 2023, with the other records in place of public ones). "Yes" allows for all that were looked at. "No" needs a
control that succeeds, and every score that tells its members within ten points of a coin on the update.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import chi2_contingency
from torch import Tensor, nn

from fedmjp.benchmarks.audit.answers import unanswered
from fedmjp.benchmarks.audit.app_loss import AppLoss, Examples, entries, joined, read_examples
from fedmjp.benchmarks.audit.intervals import LEVEL, Interval, area_interval, area_under_curve, rate_at, rounded
from fedmjp.benchmarks.audit.probe.losses import DIGEST_BYTES
from fedmjp.benchmarks.audit.rerunning import run_steps
from fedmjp.benchmarks.audit.running import Records, lines
from fedmjp.errors import BadInputError

LOSS, COSINE = "fall of the loss", "cosine of the record's gradient with the update"
REGRESSION = "weight of the record's gradient in a regression of the update on all of them"
JOINT = "The server is taken to have all of these records in question, and not to know which are in the data."
ADAPTIVE = frozenset({"Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop"})  # optimisers of torch
LEAST_SIZE = 0.01  # of the median entry's size, by which an entry is divided at least
RIDGE = 0.01  # of the gradients' mean square, that holds the regression's weights down
NOBODY = -1  # trained with these records
EVALUATED = (
    "The others are records that the app evaluates with; one that it trains with in augmented form is among them."
)
FEWEST = 4  # records on each side
SECONDS = 15.0  # of the processors, for the gradients of one round
STEP = 1e-3  # of the weights' length, that is gone along a gradient
OTHER_CLASSES = 0.01  # p value below which two sides are of other classes


@dataclass(frozen=True)
class ClientUpdate:
    """A client's update of one round, by the names of the app's network."""

    message: str  # identifier of the training message
    node: int
    server_round: int
    is_gradient: bool
    update: Mapping[str, Tensor]  # gradient, or change of the weights

    def step(self, module: nn.Module) -> dict[str, Tensor]:
        """Compute what the update does to the weights that were sent: a gradient, a short step.

        Args:
            module: The app's, with these weights.
        """
        state = module.state_dict()
        changes = {name: change for name, change in self.update.items() if name in state}
        return _descend(changes, state) if self.is_gradient else changes


def _descend(gradient: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Take a short step from weights along minus a gradient."""
    lengths = [torch.cat([values[name].flatten() for name in gradient]).norm() for values in (state, gradient)]
    factor = -STEP * float(lengths[0]) / max(float(lengths[1]), 1e-30)
    return {name: factor * change for name, change in gradient.items()}


@dataclass(frozen=True)
class _Control:
    """How well a score tells the members of an undefended update of our own."""

    area: float
    members: int
    negatives: int
    rerun: bool  # of the app's own steps; else one step of all of them

    def succeeds(self, level: float) -> bool:
        """Tell whether the score tells members from others at a level of confidence."""
        return area_interval(self.area, self.members, self.negatives, level)[0] > 0.5


@dataclass(frozen=True)
class _Comparison:
    """One score of members and others, against the client's own update and against another client's."""

    score: str
    members: Tensor
    others: Tensor
    control: _Control
    elsewhere: tuple[Tensor, Tensor] | None  # the same records' scores against the other client's update
    caveats: tuple[str, ...] = ()

    @property
    def area(self) -> float:
        return area_under_curve(self.members, self.others)

    def interval(self, level: float) -> Interval:
        """Compute the area's interval at a level."""
        return area_interval(self.area, len(self.members), len(self.others), level)

    @property
    def area_elsewhere(self) -> float | None:
        return None if self.elsewhere is None else area_under_curve(*self.elsewhere)

    def differs_elsewhere(self, level: float) -> bool:
        """Tell whether the sides come apart by another client's update too, which membership cannot explain."""
        if self.elsewhere is None or self.area_elsewhere is None:
            return False
        low, high = area_interval(self.area_elsewhere, len(self.elsewhere[0]), len(self.elsewhere[1]), level)
        return not low <= 0.5 <= high


class Scorer:
    """Scores of records against what an update does to the weights that the server sent.

    Args:
        loss: Of the app, at these weights.
        records: That are scored; as many as time allows.
        moved: An update that moves the parameters of which gradients are taken.
        is_adaptive: Whether the optimiser divides each entry by its size, as Adam does; the regression then does so.

    Raises:
        BadInputError: If the loss cannot be computed, the update moves no parameter, or time was too short.
    """

    def __init__(
        self, loss: AppLoss, records: Examples, moved: Mapping[str, Tensor], *, is_adaptive: bool = False
    ) -> None:
        self._sent = set(moved)
        self._loss, (self._names, self._stride) = loss, loss.last_trained(moved, len(records))
        if not self._names:
            raise BadInputError("nothing that was sent moves a parameter of the network")
        self._rows = loss.gradients(records, self._names, stride=self._stride, seconds=SECONDS)
        if len(self._rows) < 2 * FEWEST:
            raise BadInputError(
                f"{SECONDS:g} seconds gave gradients of {len(self._rows)} of {len(records)} records: too few"
            )
        self.records = records[: len(self._rows)]
        self._initial = loss.losses(self.records)
        self._scales = torch.ones(self._rows.shape[1])
        if is_adaptive:
            sizes = self._rows.square().mean(0).sqrt()
            least = LEAST_SIZE * float(sizes[sizes > 0].median()) if sizes.any() else 1.0
            self._scales = 1 / (sizes + least)
        scaled = self._rows * self._scales
        products = (scaled @ scaled.mT).double()
        ridge = RIDGE * float(products.diag().mean()) + 1e-30
        self._inverse = torch.linalg.inv(products + ridge * torch.eye(len(products), dtype=torch.double))

    def score(self, step: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Score the records (n,), by the score's name.

        Args:
            step: What an update adds to the weights, by the names of the network.
        """
        state = self._loss.module.state_dict()
        trained = {name: state[name] + change.to(state[name].dtype) for name, change in step.items()}
        direction = -entries(step, self._names, self._stride)
        cosines = torch.nn.functional.cosine_similarity(self._rows, direction[None], dim=1, eps=1e-30)
        # A record's weight, by its standard error: the same as leaving the record out (studentised residuals).
        weights = (
            self._inverse
            @ (self._rows @ (self._scales * direction)).double()
            / self._inverse.diag().clamp_min(1e-30).sqrt()
        )
        fall = self._initial - self._loss.losses(self.records, trained)
        scores = {LOSS: fall, COSINE: cosines.double(), REGRESSION: weights}
        return {name: values.nan_to_num(0.0, 0.0, 0.0) for name, values in scores.items()}

    def control(self, recipe: Mapping[str, Any], kind: str, members: int) -> dict[str, _Control]:
        """Tell some of the records from the others by an undefended update on them: the app's own steps if possible.

        Args:
            recipe: Of the client's training.
            kind: "weights" or "gradient", what the app sends.
            members: Records behind the update, as many as behind the app's.

        Returns:
            How well each score tells them, by its name.
        """
        order = torch.randperm(len(self.records), generator=torch.Generator().manual_seed(0))
        count = min(members, len(order) // 2)
        batch, rerun = self.records[order[:count]], True
        try:
            step = run_steps(self._loss.module, batch, recipe, kind)
        except (
            BadInputError,
            RuntimeError,
            ValueError,
            LookupError,
            TypeError,
        ):  # as of an optimiser that is no torch's
            step, rerun = self._loss.gradient(batch, self._names), False
        step = {name: change for name, change in step.items() if name in self._sent}
        if kind == "gradient" or not rerun:
            step = _descend(step, self._loss.module.state_dict())
        return {
            name: _Control(
                area_under_curve(values[order[:count]], values[order[count:]]), count, len(order) - count, rerun
            )
            for name, values in self.score(step).items()
        }


def judge_membership(
    rounds: Sequence[tuple[nn.Module, Sequence[ClientUpdate]]], records: Records, recipe: Mapping[str, Any]
) -> dict[str, Any]:
    """Answer whether updates tell which records are behind them, under the report's keys.

    Args:
        rounds: For each, the app's network with the weights that were sent, and the updates that came back.
        records: Folders of the watched run.
        recipe: Of the clients' training, with its loss as hooks described it.
    """
    if not rounds:
        return _open("nothing that was sent could be read as weights or as a gradient")
    try:
        compared = [pair for module, updates in rounds for pair in _compare_round(module, updates, records, recipe)]
    except BadInputError as error:
        return _open(str(error))
    except (RuntimeError, ValueError, LookupError, TypeError) as error:  # of somebody else's module
        return _open(f"the scores broke down: {(str(error).splitlines() or [type(error).__name__])[0]}")
    if not compared:
        return _open(
            f"fewer than {FEWEST} records with targets are known on one side: those behind an update, or others"
        )
    level = 1 - (1 - LEVEL) / len(compared)
    working = [entry for entry in compared if entry.control.succeeds(level)]
    if not working:
        control = max((entry.control for entry in compared), key=lambda entry: entry.area)
        area, steps = control.area, "the app's own steps, run again without" if control.rerun else "one step without"
        return _open(
            f"the scores do not tell members of {steps} defence on {control.members} known records (area {area:.2f})",
            control_auc=round(area, 4),
        )
    fair = [entry for entry in working if not entry.differs_elsewhere(level)]
    if not fair:
        area = max(entry.area_elsewhere or 0.0 for entry in working)
        return _open(
            "records that the app trains with and those that it does not come apart by another client's update as well "
            f"(area {area:.2f}): they differ in more than membership",
            other_client_auc=round(area, 4),
        )
    best = max(fair, key=lambda entry: entry.interval(level)[0])
    if best.interval(level)[0] <= 0.5:
        # That no score tells members needs all their intervals to end low; each is a test of its own, with none allowed
        # for (intersection-union tests: Berger, Technometrics, 1982).
        highest = max(fair, key=lambda entry: entry.interval(LEVEL)[1])
        best, level = (highest, LEVEL) if highest.interval(LEVEL)[0] <= 0.5 else (best, level)
    return _answer(best, level, records)


def _open(why: str, **values: float) -> dict[str, Any]:
    """Leave the question open for a reason, with what is known all the same by its key."""
    return {**unanswered()["membership"], "why": why, **values}


def _answer(best: _Comparison, level: float, records: Records) -> dict[str, Any]:
    count, caveats = len(best.others), list(best.caveats)
    if best.score.startswith(REGRESSION):
        caveats.append(JOINT)
    if not best.control.rerun:
        caveats.append("The control took one step, since the app's own cannot be run again.")
    if count < 1000:
        caveats.append(f"The others are {count} records, so no rate of false alarms below 1/{count} can be measured.")
    if best.elsewhere is None:
        caveats.append(
            "No update is known that saw neither side, so a difference between the sides cannot be ruled out."
        )
    if records.stand_ins():
        caveats.append("Stand-ins are much alike; equal records were dropped from both sides.")
    elsewhere = best.area_elsewhere
    return {
        "answered": True,
        "why": None,
        "auc": round(best.area, 4),
        "interval": rounded(best.interval(level)),
        "members": len(best.members),
        "others": count,
        "tpr_at_1_percent": rate_at(best.members, best.others, 0.01),
        "tpr_at_01_percent": rate_at(best.members, best.others, 0.001),
        "score": best.score,
        "control_auc": round(best.control.area, 4),
        "other_client_auc": None if elsewhere is None else round(elsewhere, 4),
        "caveats": caveats,
    }


def _compare_round(
    module: nn.Module, updates: Sequence[ClientUpdate], records: Records, recipe: Mapping[str, Any]
) -> list[_Comparison]:
    """Score the records of one round against each of its updates."""
    sides = _read_sides(updates, records)
    if sum(map(len, sides.values())) < 2 * FEWEST:
        return []
    ordered, sources = _by_turns(sides)
    app_loss = AppLoss(module, recipe["loss"])
    scorer = Scorer(app_loss, ordered, updates[0].update, is_adaptive=recipe.get("optimiser") in ADAPTIVE)
    sources = sources[: len(scorer.records)]
    scores = {update.node: scorer.score(update.step(module)) for update in updates}
    members = max(sources.count(update.node) for update in updates)
    if members < FEWEST:
        return []
    control = scorer.control(recipe, "gradient" if updates[0].is_gradient else "weights", members)
    classes = scorer.records.target.flatten().long() if app_loss.is_of_classes else None
    one_class_each = classes is not None and len(classes) == len(scorer.records)
    return [
        comparison
        for update in updates
        for score in (LOSS, COSINE, REGRESSION)
        if (comparison := _compare(update.node, score, scores, sources, classes if one_class_each else None, control))
    ]


def _by_turns(sides: Mapping[int, Examples]) -> tuple[Examples, list[int]]:
    """Order the records of several sides by turns, so that the first ones are of all; and name the side of each."""
    whole = joined(list(sides.values()))
    places = [(place, side) for side, records in sides.items() for place in range(len(records))]
    if len(places) != len(whole):
        raise BadInputError("records have different shapes, so their losses are not comparable")
    order = sorted(range(len(places)), key=lambda number: places[number][0])
    return whole[order], [places[number][1] for number in order]


def _read_sides(updates: Sequence[ClientUpdate], records: Records) -> dict[int, Examples]:
    """Read the records that each client alone trained with, by client, and those that none did; equal ones go."""
    trained: dict[int, set[bytes]] = {}  # digests by client, of all rounds
    for line in lines(records.evaluator / "seen.jsonl"):
        path = records.evaluator / f"{line['id']}-entered.npy"
        if path.exists():
            rows = np.load(path).reshape(-1, DIGEST_BYTES)
            trained.setdefault(int(line["node"]), set()).update(row.tobytes() for row in rows)
    sides: dict[int, Examples] = {}
    for update in updates:
        elsewhere = set[bytes]().union(*(digests for node, digests in trained.items() if node != update.node))
        examples = read_examples(records.evaluator / f"{update.message}.npz")
        if examples is not None:
            sides[update.node] = examples.distinct(elsewhere)
    parts = [read_examples(path) for path in sorted(records.evaluator.glob("evaluated-*.npz"))]
    if evaluated := [part for part in parts if part is not None]:
        sides[NOBODY] = joined(evaluated).distinct(set[bytes]().union(*trained.values()))
    return {side: examples for side, examples in sides.items() if len(examples)}


def _compare(
    node: int,
    score: str,
    scores: Mapping[int, Mapping[str, Tensor]],
    sources: Sequence[int],
    classes: Tensor | None,
    control: Mapping[str, _Control],
) -> _Comparison | None:
    """Hold a client's records against others by one score; None where there are too few."""
    reference = next((scores[key][score] for key in scores if key != node), None)
    other_client = next((key for key in scores if key != node), None)
    members, nonmembers = (torch.tensor([source == side for source in sources]) for side in (node, NOBODY))
    values, raw, name = scores[node][score], reference, score
    caveats = [EVALUATED]
    if int(nonmembers.sum()) < FEWEST and reference is not None:
        nonmembers = torch.tensor([source == other_client for source in sources])
        values, raw = _standardised(values) - _standardised(reference), None
        name = f"{score}, less that with the other client's update"
        caveats = ["The others are records that another client trained with in the same round."]
    sides = [members, nonmembers]
    if min(int(side.sum()) for side in sides) < FEWEST:
        return None
    if classes is not None and _hold_other_classes(classes, sides):
        caveats.append("The two sides hold classes in other shares, so records are compared within their class.")
        raw = None if raw is None else _within_classes(classes, raw, sides)[0]
        values, sides = _within_classes(classes, values, sides)
        if min(int(side.sum()) for side in sides) < FEWEST:
            return None
    elsewhere = None if raw is None else (raw[sides[0]], raw[sides[1]])
    return _Comparison(name, values[sides[0]], values[sides[1]], control[score], elsewhere, tuple(caveats))


def _standardised(values: Tensor) -> Tensor:
    return (values - values.mean()) / values.std().clamp_min(1e-30)


def _hold_other_classes(classes: Tensor, sides: Sequence[Tensor]) -> bool:
    """Tell whether two sides hold classes in other shares than chance gives them."""
    counts = np.stack([np.bincount(classes[side].numpy(), minlength=int(classes.max()) + 1) for side in sides])
    counts = counts[:, counts.sum(0) > 0]
    return counts.shape[1] > 1 and bool(chi2_contingency(counts).pvalue < OTHER_CLASSES)


def _within_classes(classes: Tensor, values: Tensor, sides: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Take each class's mean off its scores; drop the classes of one side alone (ranks are aligned: Hodges, 1962)."""
    aligned, both = values.clone(), torch.zeros_like(sides[0])
    for number in torch.unique(classes):
        place = classes == number
        if all(bool((place & side).any()) for side in sides):
            both |= place
            aligned[place] -= values[place & (sides[0] | sides[1])].mean()
    return aligned, [side & both for side in sides]

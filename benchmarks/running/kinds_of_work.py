"""The kinds of work that a campaign consists of, each with how often it is done and how one of them is tried."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from fedmjp.benchmarks.campaign.prepare import Prepared
from fedmjp.benchmarks.plan.experiment import AttackConfig, Experiment, Part, PlannedTrial
from fedmjp.benchmarks.running.tries import Scoring, Tried, try_attack, try_building, try_gallery, try_uploads
from fedmjp.benchmarks.uploads.direct import one_upload
from fedmjp.benchmarks.uploads.source import Batch, tensors_read
from fedmjp.config import ModelConfig
from fedmjp.data.selection import Selection
from fedmjp.models.build import blueprint
from fedmjp.scenario import Scenario
from fedmjp.stacked import ENTRANCE

UPLOADS, BUILDING, FEATURES = "uploads", "weights drawn or read", "features of all pictures"


class Nature(IntEnum):
    """Who works, and how: what takes longest last."""

    PARTIES = 0
    SOLVING = 1
    ITERATING = 2


@dataclass(frozen=True, eq=False)
class Work:
    """Work of one kind, which does not depend on seeds, weights, and how much of a defence there is.

    Attributes:
        what: In words.
        network: The model, without seed and weights.
        like: By what others are similar: the more of the first of these agree, the more.
        size: Pictures that one piece of work is about.
        count: Pieces of work.
        measure: Tries one.
        nature: Work of clients and evaluator, of an attack that solves, or of one that iterates.
        allowed: Seconds that an attack takes of those that it is allowed, where it is told to end.
    """

    what: str
    network: str
    like: tuple[Hashable, ...]
    size: int
    count: int
    measure: Callable[[], Tried] = field(repr=False)
    nature: Nature = Nature.PARTIES
    allowed: float | None = None

    @property
    def weight(self) -> int:
        """Roughly how much there is."""
        return self.size * self.count


@dataclass(frozen=True)
class _Kind:
    """Trials of one scenario."""

    experiment: Experiment
    trials: list[PlannedTrial]

    @property
    def scenario(self) -> Scenario:
        return self.experiment.scenario

    def batches(self, tried: AttackConfig | None = None) -> list[Batch]:
        """Those behind the uploads that an attack meets, or any."""
        batches = (trial.batch for trial in self.trials if tried is None or trial.attack == tried)
        return list(dict.fromkeys(batches))


def kinds_of_work(prepared: Prepared, scoring: Scoring) -> list[Work]:
    """Of a campaign; what is tried first of pictures tells ``scoring`` what a score costs."""
    kinds, selection = _kinds(prepared), prepared.selection
    return [
        *_building(kinds),
        *_uploads(kinds, selection),
        *_attacks(kinds, selection, scoring),
        *_galleries(kinds, selection),
    ]


def _kinds(prepared: Prepared) -> list[_Kind]:
    """Uploads of a scenario that several grids attack hold what the attacks of all of them read."""
    parts: defaultdict[Scenario, list[Part]] = defaultdict(list)
    for part in prepared.plan.parts:
        if part.trials:
            parts[part.experiment.scenario].append(part)
    kinds = []
    for shared in parts.values():
        attacks = dict.fromkeys(tried for part in shared for tried in part.experiment.attacks)
        experiment = shared[0].experiment.model_copy(update={"attacks": tuple(attacks)})
        kinds.append(_Kind(experiment, [trial for part in shared for trial in part.trials]))
    return kinds


def _building(kinds: Sequence[_Kind]) -> list[Work]:
    arms: defaultdict[str, set[ModelConfig]] = defaultdict(set)
    for kind in kinds:
        arms[_network(kind.experiment.arm)].add(kind.experiment.arm)
    found = []
    for network, several in arms.items():
        arm = next(kind.experiment.arm for kind in kinds if kind.experiment.arm in several)
        device, what = kinds[0].scenario.device, f"{arm.name}: {BUILDING}"
        measure = _calling(try_building, arm, device)
        found.append(Work(what, network, (BUILDING, network), 1, len(several), measure))
    return found


def _uploads(kinds: Sequence[_Kind], selection: Selection) -> list[Work]:
    """Uploads that scenarios share are computed once, for the one that asks for most of them."""
    asked: dict[Scenario, _Kind] = {}
    for kind in sorted(kinds, key=lambda kind: kind.scenario.uploads_per_picture):
        asked[one_upload(kind.scenario)] = kind
    groups: defaultdict[Hashable, list[_Kind]] = defaultdict(list)
    for kind in asked.values():
        entrance = tensors_read(kind.experiment, blueprint(kind.experiment.arm)) <= ENTRANCE
        groups[_network(kind.experiment.arm), entrance, kind.scenario.pipeline.label, _shape(kind.scenario)].append(
            kind
        )
    found = []
    for together in groups.values():
        kind = together[-1]
        network, size = _network(kind.experiment.arm), kind.scenario.batch_size * kind.scenario.pipeline.clients
        count = sum(len(each.batches()) * each.scenario.uploads_per_picture for each in together)
        one = kind.experiment.model_copy(update={"scenario": one_upload(kind.scenario)})
        measure = _calling(try_uploads, one, selection, kind.batches())
        like = (UPLOADS, network, kind.scenario.pipeline.label)
        found.append(Work(f"{kind.scenario.label}: {UPLOADS}", network, like, size, count, measure))
    return found


def _attacks(kinds: Sequence[_Kind], selection: Selection, scoring: Scoring) -> list[Work]:
    groups: defaultdict[tuple[Hashable, ...], list[_Kind]] = defaultdict(list)
    tried_in: dict[tuple[Hashable, ...], AttackConfig] = {}
    for kind in kinds:
        for tried in dict.fromkeys(trial.attack for trial in kind.trials):
            scenario = kind.scenario
            marks = (_defended(scenario), scenario.gradient_of, scenario.uploads_per_picture, _shape(scenario))
            key: tuple[Hashable, ...] = (_network(kind.experiment.arm), tried.label, *marks)
            groups[key].append(kind)
            tried_in[key] = tried
    found = []
    for key, together in groups.items():
        tried, kind = tried_in[key], together[-1]
        scenario, network = kind.scenario, _network(kind.experiment.arm)
        size = scenario.batch_size * scenario.pipeline.clients
        count = sum(len(each.batches(tried)) for each in together)
        alone = kind.experiment.model_copy(update={"attacks": (tried,)})
        measure = _calling(try_attack, alone, selection, kind.batches(tried), scoring)
        several = f", {scenario.uploads_per_picture} uploads" if scenario.uploads_per_picture > 1 else ""
        what, about = f"{scenario.label}: {tried.label}{several}", (tried.name, _defended(scenario))
        like = (about, network, tried.label, scenario.uploads_per_picture)
        attack = tried.build()
        nature = Nature.ITERATING if attack.optimises else Nature.SOLVING
        found.append(Work(what, network, like, size, count, measure, nature, attack.usual_seconds))
    return found


def _galleries(kinds: Sequence[_Kind], selection: Selection) -> list[Work]:
    """The features of all pictures, which each network makes once."""
    arms: dict[ModelConfig, _Kind] = {}
    for kind in kinds:
        if any(trial.cell.reveals == "features" for trial in kind.trials):
            arms.setdefault(kind.experiment.arm, kind)
    found = []
    for arm, kind in arms.items():
        network, pictures = _network(arm), len({trial.picture.name for trial in kind.trials})
        measure = _calling(try_gallery, kind.experiment, selection, kind.batches())
        like = (FEATURES, network)
        found.append(Work(f"{kind.scenario.label}: {FEATURES}", network, like, 1, pictures, measure))
    return found


def _network(arm: ModelConfig) -> str:
    """Without seed and weights, which change no time."""
    return arm.model_copy(update={"seed": 0, "weights": None}).model_dump_json()


def _defended(scenario: Scenario) -> bool:
    """Whether there is anything that an attack could undo: in a defence's twin there is not, and it ends at once."""
    return bool(scenario.pipeline.defences)


def _shape(scenario: Scenario) -> Hashable:
    """What else decides how long client and attack take."""
    work = (scenario.batch_size, scenario.update, scenario.local_steps, scenario.local_batch_size)
    return (*work, scenario.pipeline.clients, scenario.server is None or scenario.server.name)


def _calling(function: Callable[..., Tried], *arguments: object) -> Callable[[], Tried]:
    return lambda: function(*arguments)

"""What a campaign will cost: every kind of upload and attack is tried on a few uploads, then counted."""

import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

from attacks.adversary import Adversary
from benchmarks.campaign.prepare import Prepared
from benchmarks.folder.pictures import save_png
from benchmarks.plan.experiment import AttackConfig, Experiment, Part, PlannedTrial
from benchmarks.running import evaluator
from benchmarks.running.gallery import Gallery
from benchmarks.uploads.direct import PICTURES_PER_PASS, DirectUploads, Memory, one_upload
from benchmarks.uploads.source import Batch, described
from fedmjp.data.selection import Selection
from fedmjp.exchange import Exchange
from fedmjp.records import Disclosure, Features, Reconstruction
from fedmjp.scenario import Scenario

PROBED = 4  # uploads per kind; a run works on more at a time, a little faster
PATIENCE = 5.0  # seconds after which an attack that iterates is stopped and extrapolated
KEPT_PER_CELL = 3
ROW_BYTES = 1_500  # of the database, indices included; benchmarks.performance.store measures it


@dataclass(frozen=True)
class Probe:
    """What one kind of work costs: ``seconds`` each, ``count`` times; with a ``failure``, those until it failed."""

    what: str
    seconds: float
    count: int
    failure: str | None = None

    @property
    def total(self) -> float:
        """Seconds in all."""
        return self.seconds * self.count


@dataclass(frozen=True)
class Estimate:
    """Times, and bytes on disk: pictures at the end and at most, and the database."""

    probes: tuple[Probe, ...]
    picture_bytes: int
    peak_picture_bytes: int
    database_bytes: int

    @property
    def seconds(self) -> float:
        """In all, on one worker with all cores."""
        return sum(probe.total for probe in self.probes)


class _WatchedLongEnoughError(Exception):
    """An attack that iterates has shown its pace."""

    def __init__(self, estimate: float) -> None:
        super().__init__()
        self.estimate = estimate  # seconds that it would have taken


@dataclass(frozen=True)
class _Kind:
    """Trials of one scenario."""

    experiment: Experiment
    trials: list[PlannedTrial]

    @property
    def attacks(self) -> list[AttackConfig]:
        return list(dict.fromkeys(trial.attack for trial in self.trials))

    def uploads(self, tried: AttackConfig | None = None) -> int:
        """Uploads in all, or those that one attack meets."""
        return len({trial.batch for trial in self.trials if tried is None or trial.attack == tried})

    def batches(self, tried: AttackConfig | None = None, *, at_most: int = PROBED) -> list[Batch]:
        """Some of the pictures behind them."""
        batches = (trial.batch for trial in self.trials if tried is None or trial.attack == tried)
        return list(dict.fromkeys(batches))[:at_most]


def estimate(prepared: Prepared, on_probe: Callable[[str], None]) -> Estimate:
    """Try each kind of work of a campaign; ``on_probe`` is told what is tried next."""
    probes: list[Probe] = []
    scoring, png = 0.0, 0
    galleries: set[str] = set()  # the weights of networks whose gallery is counted
    for kinds in _sharing(_kinds(prepared)):
        on_probe(f"{kinds[0].experiment.scenario.label}, uploads")
        probes.append(_upload_probe(kinds, prepared.selection))
        memory = Memory()
        for kind, tried in ((asking, tried) for asking in kinds for tried in asking.attacks):
            on_probe(f"{kind.experiment.scenario.label}, {tried.label}")
            source = DirectUploads(kind.experiment, prepared.selection, memory)
            probe, recorded, made = _attack_probe(kind, source, tried)
            probes.append(probe)
            shown = [one for one in made if isinstance(one, Reconstruction)]
            if shown and not png:
                scoring, png = _score(kind, recorded, shown)
            weights = {exchange.upload.weights for exchange in recorded} - galleries
            if weights and any(isinstance(one, Features) and one.features is not None for one in made):
                galleries |= weights
                probes.append(_gallery_probe(kind, source, recorded[0]))
    trials = len(prepared.plan.trials)
    pictures, peak = _picture_counts(prepared)
    return Estimate(
        probes=(*probes, Probe("scores, pictures, rows", scoring, trials)),
        picture_bytes=pictures * png,
        peak_picture_bytes=peak * png,
        database_bytes=trials * ROW_BYTES,
    )


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


def _sharing(kinds: Sequence[_Kind]) -> list[list[_Kind]]:
    """Those whose uploads are the same but for their number, by that number."""
    groups: defaultdict[Hashable, list[_Kind]] = defaultdict(list)
    for kind in sorted(kinds, key=lambda kind: kind.experiment.threat.uploads_per_picture):
        groups[one_upload(kind.experiment.scenario)].append(kind)
    return list(groups.values())


def _upload_probe(kinds: Sequence[_Kind], selection: Selection) -> Probe:
    """Of a whole pass, as uploads are computed in passes, and once for the kind that asks for most of them."""
    fewest, kind = kinds[0], kinds[-1]
    pass_ = max(1, PICTURES_PER_PASS // kind.experiment.scenario.batch_size)
    what, batches = f"{kind.experiment.scenario.label}: uploads", kind.batches(at_most=pass_)
    # Builds the model and finds its kernels, which is done once.
    DirectUploads(fewest.experiment, selection).uploads(batches[:1])
    began = time.perf_counter()
    exchanges = DirectUploads(kind.experiment, selection).uploads(batches)
    seconds = (time.perf_counter() - began) / len(batches)
    failures = [outcome for outcome in exchanges.values() if isinstance(outcome, str)]
    return Probe(what, seconds, kind.uploads(), failures[0] if failures else None)


def _attack_probe(
    kind: _Kind, source: DirectUploads, tried: AttackConfig
) -> tuple[Probe, Sequence[Exchange], Sequence[Disclosure]]:
    what, count = f"{kind.experiment.scenario.label}: {tried.label}", kind.uploads(tried)
    exchanges = source.uploads(kind.batches(tried))
    recorded = [exchange for exchange in exchanges.values() if isinstance(exchange, Exchange)]
    if not recorded:
        return Probe(what, 0.0, count, "there was no upload to try it on"), [], []
    uploads = [exchange.upload for exchange in recorded]
    adversary = Adversary(source.model(uploads[0].weights), kind.experiment.threat, kind.experiment.scenario.seed)
    began, made, failure = time.perf_counter(), list[Disclosure](), None

    def watch(done: int, total: int, _loss: float) -> None:
        elapsed = time.perf_counter() - began
        if elapsed > PATIENCE and done:
            raise _WatchedLongEnoughError(elapsed * total / done)

    try:
        made = adversary.reconstruct(tried.name, uploads, tried.options, then=tried.then, on_progress=watch)
    except _WatchedLongEnoughError as pace:
        return Probe(what, pace.estimate / len(uploads), count), [], []
    except Exception as error:  # noqa: BLE001 (any error of an attack is a result, here as in a run)
        failure = described(error)
    seconds = (time.perf_counter() - began) / len(uploads)
    return Probe(what, seconds, count, failure), recorded, made


def _gallery_probe(kind: _Kind, source: DirectUploads, recorded: Exchange) -> Probe:
    """Of the features of all pictures, which each network makes once."""
    upload, one = recorded.upload, recorded.private.part(0, 1)
    versions = {setting.compared_with for setting in kind.experiment.settings}
    began = time.perf_counter()
    Gallery.of(source.model(upload.weights), upload.weights, [one], versions)
    seconds = time.perf_counter() - began
    pictures = len({trial.picture.name for trial in kind.trials})
    return Probe(f"{kind.experiment.scenario.label}: features of all pictures", seconds, pictures)


def _score(kind: _Kind, recorded: Sequence[Exchange], made: Sequence[Reconstruction]) -> tuple[float, int]:
    """Seconds to score and save one trial, and the size of its PNG."""
    experiment, setting = kind.experiment, kind.trials[0].cell.setting
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "picture.png"
        for _ in range(2):  # the first call loads libraries
            began = time.perf_counter()
            evaluator.score(
                made[0], recorded[0].private, setting, metrics=experiment.metrics, protocol=experiment.protocol
            )
            save_png(made[0].images[0], path)
            seconds = time.perf_counter() - began
        # A natural picture: what an attack left grey or noisy is not typical.
        save_png(recorded[0].private.clean[0], path)
        return seconds / len(recorded[0].private.pictures), path.stat().st_size


def _picture_counts(prepared: Prepared) -> tuple[int, int]:
    """Files at the end, and at most at any time."""
    trials = prepared.plan.trials
    if prepared.campaign.keep == "none":
        return 0, 0
    originals = 2 * len({trial.stem for trial in trials})
    if prepared.campaign.keep == "all":
        whole = len(trials) + originals
        return whole, whole
    by_arm = Counter(trial.arm for trial in trials)
    kept = KEPT_PER_CELL * len({trial.cell for trial in trials})
    return 3 * kept, 3 * kept + max(by_arm.values(), default=0) + originals

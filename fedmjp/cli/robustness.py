"""The options --corruptions, --imagenet-a and --imagenet-o of `fedmjp evaluate`."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmjp.cli.console import tell
from fedmjp.errors import BadInputError

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from fedmjp.evaluation.consistency import Sample
    from fedmjp.evaluation.natural import AdversarialScore, Detection
    from fedmjp.evaluation.robustness import Hits
    from fedmjp.evaluation.robustness_report import Robustness, RobustnessReport
    from fedmjp.evaluation.runs import TrainedModel
    from fedmjp.models.classifier import Classifier

HITS = "corruptions.npz"  # correct predictions, from which an interrupted evaluation continues
ERRORS, SUMMARY, TABLE = "corruptions.csv", "evaluation.json", "robustness.md"


@dataclass(frozen=True)
class RobustnessRequest:
    """The corruptions and folders that a command is to measure."""

    corruptions: Sequence[str]
    imagenet_a: str | None
    imagenet_o: str | None
    imagenet: str | None

    def __bool__(self) -> bool:
        """Tell whether anything is requested."""
        return bool(self.corruptions or self.imagenet_a or self.imagenet_o)

    @property
    def published(self) -> dict[str, Any]:
        """Describe the request for a manifest, with folders by their names alone."""
        folders = {name: getattr(self, name) for name in ("imagenet_a", "imagenet_o", "imagenet")}
        return {"corruptions": list(self.corruptions)} | {
            name: Path(folder).name for name, folder in folders.items() if folder is not None
        }

    @property
    def folders(self) -> list[str]:
        """List the folders that are read beside the data."""
        return [folder for folder in (self.imagenet_a, self.imagenet_o, self.imagenet) if folder is not None]


def read_request(
    data: str | None,
    *,
    everything: bool,
    names: Sequence[str],
    imagenet_a: str | None,
    imagenet_o: str | None,
    imagenet: str | None,
) -> RobustnessRequest:
    """Read the requested robustness from options.

    Args:
        data: Source of pictures to corrupt, or None.
        everything: Whether all corruptions are requested.
        names: Requested corruptions.
        imagenet_a: Folder of ImageNet-A.
        imagenet_o: Folder of ImageNet-O.
        imagenet: Folder of ImageNet's validation pictures.

    Raises:
        UnknownNameError: If there is no such corruption, with the nearest name.
        BadInputError: If options do not go together.
    """
    from fedmjp.errors import UnknownNameError
    from fedmjp.evaluation.severities import NAMES

    for name in names:
        if name not in NAMES:
            raise UnknownNameError("corruption", name, NAMES)
    if bool(imagenet_o) != bool(imagenet):
        raise BadInputError(
            "--imagenet-o and --imagenet go together: foreign pictures, and those of ImageNet's classes"
        )
    selected = NAMES if everything else tuple(name for name in NAMES if name in names)
    if data is None and selected:
        raise BadInputError("corruptions are of pictures: name them with --data")
    if data is None and not (imagenet_a or imagenet_o):
        raise BadInputError("name pictures: --data DIR, or --imagenet-a DIR, or --imagenet-o DIR with --imagenet DIR")
    return RobustnessRequest(selected, imagenet_a, imagenet_o, imagenet)


@dataclass(frozen=True)
class NaturalExamples:
    """The pictures of ImageNet-A and -O under a run's labels."""

    adversarial: "Sample | None"
    foreign: "Sample | None"
    familiar: "Sample | None"
    labels: "np.ndarray | None"  # of the classes that name the foreign pictures' folders


def open_natural(
    runs: "Sequence[TrainedModel]", folders: Sequence[Path], request: RobustnessRequest, *, limit: int | None, seed: int
) -> list[NaturalExamples]:
    """Open the pictures of ImageNet-A and -O for each run.

    Args:
        runs: The trained models.
        folders: Of the runs; empty for a file of weights.
        request: Says which pictures.
        limit: Pictures of each source at most; None for all.
        seed: Of the choice.

    Raises:
        DataError: If there are no pictures, or of classes that the run does not have.
        BadInputError: If a run's labels have no names.
    """
    places: Sequence[Path | None] = folders or [None] * len(runs)
    return [_open(run, place, request, limit=limit, seed=seed) for run, place in zip(runs, places, strict=True)]


def _open(
    run: "TrainedModel", folder: Path | None, request: RobustnessRequest, *, limit: int | None, seed: int
) -> NaturalExamples:
    import numpy as np

    from fedmjp.evaluation.consistency import Sample
    from fedmjp.evaluation.natural import find_class_names, open_familiar, open_labelled
    from fedmjp.training.run_folder import TrainingFolder

    if not (request.imagenet_a or request.imagenet_o):
        return NaturalExamples(None, None, None, None)
    names = find_class_names(run, TrainingFolder(folder).kept_classes() if folder else [])
    adversarial = foreign = familiar = labels = None
    if request.imagenet_a:
        dataset = open_labelled(request.imagenet_a, names)
        adversarial = Sample(dataset, np.arange(len(dataset))).draw(limit, seed)
    if request.imagenet_o and request.imagenet:
        dataset = open_labelled(request.imagenet_o, names)
        labels = np.unique(dataset.labels)
        foreign = Sample(dataset, np.arange(len(dataset))).draw(limit, seed)
        familiar = open_familiar(request.imagenet, dataset).draw(limit, seed)
    return NaturalExamples(adversarial, foreign, familiar, labels)


def measure_natural(
    run: "TrainedModel",
    network: "Classifier",
    pictures: NaturalExamples,
    *,
    workers: int,
    on_skipped: Callable[[str], None],
) -> "tuple[AdversarialScore | None, Detection | None]":
    """Measure accuracy and AURRA on ImageNet-A, and detection of ImageNet-O, as far as there are such pictures.

    Args:
        run: The trained model.
        network: The same on its device.
        pictures: Of ImageNet-A and -O.
        workers: Processes that read.
        on_skipped: Called once with the reason for each picture that cannot be read.
    """
    import numpy as np

    from fedmjp.evaluation.natural import AdversarialScore, compute_aurra, detect, predict_restricted

    adversarial = detection = None
    if pictures.adversarial is not None:
        labels = np.unique(pictures.adversarial.dataset.labels)
        predictions = predict_restricted(
            network, run, pictures.adversarial, labels, workers=workers, on_skipped=on_skipped
        )
        accuracy = 100 * float(predictions.correct.mean())
        adversarial = AdversarialScore(
            len(predictions.correct), len(labels), accuracy, 100 * compute_aurra(predictions)
        )
    if pictures.foreign is not None and pictures.familiar is not None and pictures.labels is not None:
        foreign, familiar = (
            predict_restricted(network, run, part, pictures.labels, workers=workers, on_skipped=on_skipped).confidence
            for part in (pictures.foreign, pictures.familiar)
        )
        detection = detect(foreign, familiar)
    return adversarial, detection


def measure_corruptions(
    pairs: "Sequence[tuple[TrainedModel, Classifier]]",
    pictures: "Sample",
    runs: "Sequence[Robustness]",
    request: RobustnessRequest,
    output: Path,
    *,
    seed: int,
    workers: int,
    console: "Console",
) -> "Hits":
    """Corrupt the pictures in every requested way, and write the results after each.

    Corruptions that an earlier evaluation of the same models on the same pictures finished are read from its file.

    Args:
        pairs: Each run with its network.
        pictures: To corrupt.
        runs: The measurements without corruption.
        request: Says which corruptions.
        output: Folder for results.
        seed: Of the corruptions.
        workers: Processes that read and corrupt.
        console: The terminal.
    """
    from fedmjp.cli.progress import LiveBars
    from fedmjp.evaluation.robustness import predict_corrupted, read_hits, write_hits
    from fedmjp.evaluation.robustness_report import RobustnessReport

    identity = _compute_identity(pairs, pictures, seed)
    hits = read_hits(output / HITS, identity)
    missing = [name for name in request.corruptions if name not in hits]
    if len(missing) < len(request.corruptions):
        tell(
            console,
            f"Going on: {len(request.corruptions) - len(missing)} of {len(request.corruptions)} corruptions are done.",
        )
        _write(output, RobustnessReport(runs, _select(hits, request)))
    with LiveBars(console, transient=True) as bars:
        task = bars.add_task("Corrupted pictures", total=len(missing) * len(pictures.indices) * len(pairs))
        for name in missing:
            hits[name] = predict_corrupted(
                name,
                pairs,
                pictures,
                seed=seed,
                workers=workers,
                on_pictures=partial(bars.advance, task),
                on_skipped=bars.skip,
            )
            write_hits(output / HITS, identity, hits)
            _write(output, RobustnessReport(runs, _select(hits, request)))
            errors = ", ".join(f"{100 * float((~right).mean()):.1f}" for right in hits[name])
            tell(console, f"{name}: error {errors} %")
    return _select(hits, request)


def report_robustness(
    runs: "Sequence[Robustness]", hits: "Hits", data: str, output: Path, console: "Console"
) -> list[str]:
    """Write tables and print them.

    Args:
        runs: The measurements of each run.
        hits: By corruption, (runs, pictures, severities).
        data: Name of the pictures.
        output: Folder for results.
        console: The terminal.

    Returns:
        Names of the files.
    """
    from fedmjp.benchmarks.folder.output import write_text
    from fedmjp.evaluation.robustness_report import RobustnessReport
    from fedmjp.evaluation.tables import print_tables, render_markdown

    report = RobustnessReport(runs, hits, data)
    _write(output, report)
    tables, remarks = report.build_tables(), report.collect_remarks()
    write_text(output / TABLE, render_markdown(tables, remarks, "Robustness"))
    print_tables(tables, console)
    console.print("\n".join(remarks), highlight=False, markup=False)
    return [*([ERRORS, HITS] if hits else []), SUMMARY, TABLE]


def _write(output: Path, report: "RobustnessReport") -> None:
    from fedmjp.benchmarks.folder.output import write_json, write_text
    from fedmjp.texts import guard, printable

    if report.hits:
        write_text(output / ERRORS, printable(report.build_frame().map(guard).to_csv(index=False)))
    write_json(output / SUMMARY, report.build_content())


def _select(hits: "Hits", request: RobustnessRequest) -> "Hits":
    return {name: hits[name] for name in request.corruptions if name in hits}


def _compute_identity(pairs: "Sequence[tuple[TrainedModel, Classifier]]", pictures: "Sample", seed: int) -> str:
    """Digest all that decides which predictions are right, as SHA-256."""
    from fedmjp import provenance

    models = [
        (run.model.weights.sha256 if run.model.weights else None, network.image_size, run.crop_share)
        for run, network in pairs
    ]
    decides = [provenance.code_digest(), pictures.dataset.digest(), pictures.indices.tolist(), seed, models]
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()

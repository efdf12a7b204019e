"""What `fedmjp evaluate` does with --corruptions, --imagenet-a and --imagenet-o."""

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
    from fedmjp.evaluation.natural import Adversarial, Detection
    from fedmjp.evaluation.robustness import Rights
    from fedmjp.evaluation.robustness_report import Robustness
    from fedmjp.evaluation.runs import Trained
    from fedmjp.models.classifier import Classifier

RIGHTS = "corruptions.npz"  # which predictions are right: what an interrupted evaluation goes on from
ERRORS, SUMMARY, TABLE = "corruptions.csv", "evaluation.json", "robustness.md"


@dataclass(frozen=True)
class Asked:
    """Which robustness a command is to measure."""

    corruptions: Sequence[str]
    imagenet_a: str | None
    imagenet_o: str | None
    imagenet: str | None

    def __bool__(self) -> bool:
        """Whether it is any."""
        return bool(self.corruptions or self.imagenet_a or self.imagenet_o)

    @property
    def published(self) -> dict[str, Any]:
        """As a manifest may show it: folders by their names alone."""
        folders = {name: getattr(self, name) for name in ("imagenet_a", "imagenet_o", "imagenet")}
        return {"corruptions": list(self.corruptions)} | {
            name: Path(folder).name for name, folder in folders.items() if folder is not None
        }

    @property
    def folders(self) -> list[str]:
        """What is read beside the data."""
        return [folder for folder in (self.imagenet_a, self.imagenet_o, self.imagenet) if folder is not None]


def asked(
    data: str | None,
    *,
    everything: bool,
    names: Sequence[str],
    imagenet_a: str | None,
    imagenet_o: str | None,
    imagenet: str | None,
) -> Asked:
    """What options ask for.

    Raises:
        UnknownNameError: If a corruption is none, with the nearest name.
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
    chosen = NAMES if everything else tuple(name for name in NAMES if name in names)
    if data is None and chosen:
        raise BadInputError("corruptions are of pictures: name them with --data")
    if data is None and not (imagenet_a or imagenet_o):
        raise BadInputError("name pictures: --data DIR, or --imagenet-a DIR, or --imagenet-o DIR with --imagenet DIR")
    return Asked(chosen, imagenet_a, imagenet_o, imagenet)


@dataclass(frozen=True)
class Named:
    """The folders of ImageNet-A and -O as a run's labels have them, opened before anything takes long."""

    adversarial: "Sample | None"
    foreign: "Sample | None"
    familiar: "Sample | None"
    labels: "np.ndarray | None"  # of the classes that the foreign pictures' folders are called after


def open_folders(
    runs: "Sequence[Trained]", folders: Sequence[Path], what: Asked, *, limit: int | None, seed: int
) -> list[Named]:
    """For each run the pictures of ImageNet-A and -O.

    Raises:
        DataError: If there are none, or of classes that the run does not know.
        BadInputError: If it is not known which classes a run's labels are.
    """
    places: Sequence[Path | None] = folders or [None] * len(runs)
    return [_open(run, place, what, limit=limit, seed=seed) for run, place in zip(runs, places, strict=True)]


def _open(run: "Trained", folder: Path | None, what: Asked, *, limit: int | None, seed: int) -> Named:
    import numpy as np

    from fedmjp.evaluation.consistency import Sample
    from fedmjp.evaluation.natural import class_names, drawn, open_familiar, open_named
    from fedmjp.training.run_folder import TrainingFolder

    if not (what.imagenet_a or what.imagenet_o):
        return Named(None, None, None, None)
    names = class_names(run, TrainingFolder(folder).kept_classes() if folder else [])
    draw = partial(drawn, limit=limit, seed=seed)
    adversarial = foreign = familiar = labels = None
    if what.imagenet_a:
        dataset = open_named(what.imagenet_a, names)
        adversarial = draw(Sample(dataset, np.arange(len(dataset))))
    if what.imagenet_o and what.imagenet:
        dataset = open_named(what.imagenet_o, names)
        labels = np.unique(dataset.labels)
        foreign, familiar = draw(Sample(dataset, np.arange(len(dataset)))), draw(open_familiar(what.imagenet, dataset))
    return Named(adversarial, foreign, familiar, labels)


def measure_natural(
    run: "Trained", network: "Classifier", named: Named, *, workers: int, on_skipped: Callable[[str], None]
) -> "tuple[Adversarial | None, Detection | None]":
    """Accuracy and AURRA on ImageNet-A, and detection of ImageNet-O, as far as there are such pictures."""
    import numpy as np

    from fedmjp.evaluation.natural import Adversarial, aurra, detect, restricted

    adversarial = detection = None
    if named.adversarial is not None:
        labels = np.unique(named.adversarial.dataset.labels)
        found = restricted(network, run, named.adversarial, labels, workers=workers, on_skipped=on_skipped)
        accuracy = 100 * float(found.correct.mean())
        adversarial = Adversarial(len(found.correct), len(labels), accuracy, 100 * aurra(found))
    if named.foreign is not None and named.familiar is not None and named.labels is not None:
        foreign, familiar = (
            restricted(network, run, pictures, named.labels, workers=workers, on_skipped=on_skipped).confidence
            for pictures in (named.foreign, named.familiar)
        )
        detection = detect(foreign, familiar)
    return adversarial, detection


def measure_corruptions(
    pairs: "Sequence[tuple[Trained, Classifier]]",
    pictures: "Sample",
    runs: "Sequence[Robustness]",
    what: Asked,
    output: Path,
    *,
    seed: int,
    workers: int,
    console: "Console",
) -> "Rights":
    """Corrupt the pictures in every way that is asked for, and write what is known after each.

    Those that a former evaluation of the same models on the same pictures finished are not done again.
    """
    from fedmjp.cli.progress import LiveBars
    from fedmjp.evaluation.robustness import read_rights, rights_under, write_rights

    identity = _identity(pairs, pictures, seed)
    kept = read_rights(output / RIGHTS, identity)
    left = [name for name in what.corruptions if name not in kept]
    if len(left) < len(what.corruptions):
        tell(console, f"Going on: {len(what.corruptions) - len(left)} of {len(what.corruptions)} corruptions are done.")
        _write(output, runs, _chosen(kept, what))
    with LiveBars(console, transient=True) as bars:
        task = bars.add_task("Corrupted pictures", total=len(left) * len(pictures.indices) * len(pairs))
        for name in left:
            kept[name] = rights_under(
                name,
                pairs,
                pictures,
                seed=seed,
                workers=workers,
                on_pictures=partial(bars.advance, task),
                on_skipped=bars.skip,
            )
            write_rights(output / RIGHTS, identity, kept)
            _write(output, runs, _chosen(kept, what))
            errors = ", ".join(f"{100 * float((~right).mean()):.1f}" for right in kept[name])
            tell(console, f"{name}: error {errors} %")
    return _chosen(kept, what)


def report_robustness(
    runs: "Sequence[Robustness]", rights: "Rights", data: str, output: Path, console: "Console"
) -> list[str]:
    """Write tables and figures and print them; returns the names of the files."""
    from fedmjp.benchmarks.folder.output import write_text
    from fedmjp.evaluation.robustness_report import notes, sheets
    from fedmjp.evaluation.tables import markdown, print_sheets

    _write(output, runs, rights)
    tables, remarks = sheets(runs, rights, data), notes(rights)
    write_text(output / TABLE, markdown(tables, remarks, "Robustness"))
    print_sheets(tables, console)
    console.print("\n".join(remarks), highlight=False, markup=False)
    return [*([ERRORS, RIGHTS] if rights else []), SUMMARY, TABLE]


def _write(output: Path, runs: "Sequence[Robustness]", rights: "Rights") -> None:
    from fedmjp.benchmarks.folder.output import write_json, write_text
    from fedmjp.evaluation.robustness_report import content, frame
    from fedmjp.texts import guard, printable

    if rights:
        write_text(output / ERRORS, printable(frame(runs, rights).map(guard).to_csv(index=False)))
    write_json(output / SUMMARY, content(runs, rights))


def _chosen(kept: "Rights", what: Asked) -> "Rights":
    return {name: kept[name] for name in what.corruptions if name in kept}


def _identity(pairs: "Sequence[tuple[Trained, Classifier]]", pictures: "Sample", seed: int) -> str:
    """SHA-256 of what decides which predictions are right."""
    from fedmjp import provenance

    models = [
        (run.model.weights.sha256 if run.model.weights else None, network.image_size, run.crop_share)
        for run, network in pairs
    ]
    decides = [provenance.code_digest(), pictures.dataset.digest(), pictures.indices.tolist(), seed, models]
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()

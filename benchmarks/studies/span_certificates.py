"""How often ``mjp_span`` certifies a picture, whether its certificates are right, and how long it takes.

``python -m benchmarks.studies.span_certificates --data FOLDER --rows rows.csv --pictures 50 --ratios 0.09,0.27``

One row per picture and mask ratio, appended as soon as it is there; rows that the file has are not
computed again. The summary of all rows in the file lies beside it, with the ending ``.md``. A certificate is
wrong if any patch of the picture, the masked ones under the best assignment, is below 30 dB.

Pictures are drawn from those that the prior of patches was not measured on. The first 20 that the seed 77
gives were used to develop the attack: they are left out unless ``--development`` asks for them alone.

Many certificates in little time: ``--model name=deit_tiny,image_size=64,patch_size=8 --ratios 0.06,0.09,0.12``.
"""

import csv
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import torch
import typer
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from attacks.mjp.prior import MjpPrior
from attacks.mjp.span.attack import MjpSpan
from attacks.natural_patches import measured_on
from benchmarks.folder.output import write_text
from benchmarks.leaderboard.statistics import share
from fedmjp.config import Checkpoint, ModelConfig
from fedmjp.data.batches import private_batch
from fedmjp.data.pictures import LabelledPicture, PictureSource
from fedmjp.data.selection import Selection, open_source, select
from fedmjp.errors import ConfigError
from fedmjp.metrics import metric
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import to_patches
from fedmjp.private import PrivateBatch
from fedmjp.records import Reconstruction, Upload
from fedmjp.running import run_function
from fedmjp.seeds import torch_generator
from fedmjp.settings import Picture
from fedmjp.threat import ThreatModel
from fedmjp.updates import gradient

DEVELOPMENT, DEVELOPMENT_SEED = 20, 77
RIGHT = 30.0  # dB that every patch of a certified picture must reach: what a certificate promises


@dataclass(frozen=True)
class Row:
    """One upload, attacked.

    Attributes:
        model: Name, and the options that were given.
        weights: File name of trained weights, or "untrained".
        ratio: Wanted mask ratio.
        picture: Name.
        certified: 1 if the attack says that it has every patch.
        found: Masked patches found.
        masked: Masked patches.
        residual_median: Over tokens.
        residual_max: Over tokens.
        expected_error: Of a pixel, as the attack estimates it where it is largest.
        worst_patch: PSNR in dB against the truth, masked patches under the best assignment.
        psnr: Of the picture against the clean one (setting c).
        psnr_prior: The same of ``mjp_prior``.
        seconds: That the attack took.
    """

    model: str
    weights: str
    ratio: float
    picture: str
    certified: int
    found: int
    masked: int
    residual_median: float
    residual_max: float
    expected_error: float
    worst_patch: float
    psnr: float
    psnr_prior: float
    seconds: float

    @property
    def key(self) -> tuple[str, ...]:
        """What tells rows apart."""
        return tuple(str(getattr(self, name)) for name in KEY)

    @property
    def wrong(self) -> bool:
        """Whether its certificate is."""
        return self.certified == 1 and self.worst_patch < RIGHT


KEY = ("model", "weights", "ratio", "picture")


@dataclass(frozen=True)
class Study:
    """A model under attack.

    Attributes:
        model: As in a row.
        weights: As in a row.
        network: Itself.
        seconds: Budget per upload.
    """

    model: str
    weights: str
    network: VitClassifier
    seconds: float

    @staticmethod
    def of(options: str, seconds: float) -> "Study":
        """From KEY=VALUE pairs of ``ModelConfig``.

        Raises:
            ConfigError: If they are no such pairs.
        """
        given = read_options(options)
        values: dict[str, Any] = {"name": "deit_small", "unknown_embedding": True, **given}
        weights = values.pop("weights", None)
        label = "untrained"
        if weights is not None:
            values["weights"] = Checkpoint.of(weights).model_dump()
            label = "/".join(Path(weights).parts[-2:])
        config = ModelConfig.parse(values)
        told = (f"{key}={value}" for key, value in sorted(given.items()) if key not in ("name", "weights"))
        return Study(" ".join([config.name, *told]), label, build_vit(config), seconds)

    def row(self, picture: LabelledPicture, ratio: float) -> Row:
        """Attack one picture under one mask."""
        network = self.network
        batch = private_batch([picture], grid=network.grid, mask_ratio=ratio, gradient_of=Picture.SHUFFLED, seed=0)
        upload = Upload(gradient(network, batch), "gradient", 1, 1, 0, "study")
        generator = torch_generator(0, "mjp_span")
        made, prior = (
            attack.reconstruct([upload], network, ThreatModel(), generator=generator)[0]
            for attack in (MjpSpan({"seconds": self.seconds}), MjpPrior())
        )
        psnr = metric("psnr").function
        told = made.diagnostics
        return Row(
            model=self.model,
            weights=self.weights,
            ratio=ratio,
            picture=picture.name,
            certified=int(told["certified"]),
            found=int(told["found_patches"]),
            masked=int(told["masked_patches"]),
            residual_median=told["residual_median"],
            residual_max=told["residual_max"],
            expected_error=told["expected_error"],
            worst_patch=worst_patch(made, batch, network.patch_size),
            psnr=float(psnr(made.images, batch.clean)),
            psnr_prior=float(psnr(prior.images, batch.clean)),
            seconds=told["seconds"],
        )


def main(
    data: Annotated[str, typer.Option(help="A picture source.")],
    rows: Annotated[Path, typer.Option(help="CSV to append to.")],
    pictures: Annotated[int, typer.Option()] = 50,
    ratios: Annotated[str, typer.Option(help="Mask ratios, comma-separated.")] = "0.09,0.27",
    seconds: Annotated[float, typer.Option(help="Budget per upload.")] = 60.0,
    model: Annotated[str, typer.Option(help="KEY=VALUE,... of the model; weights=FILE for trained ones.")] = "",
    development: Annotated[bool, typer.Option(help="The pictures that the attack was developed on.")] = False,
) -> None:
    """Attack what is not in the file yet, and summarise."""
    torch.set_num_threads(1)
    wanted = read_ratios(ratios)
    study = Study.of(model, seconds)
    size, classes = study.network.image_size, study.network.backbone.num_classes
    chosen = selection(open_source(data, size=size, classes=classes), pictures, development=development)
    done = {row.key for row in read(rows)}
    for entry in chosen.entries:
        for ratio in wanted:
            if (study.model, study.weights, str(ratio), entry.name) not in done:
                append(rows, asdict(study.row(chosen.load(entry), ratio)))
    text = summary(read(rows))
    write_text(rows.with_suffix(".md"), text)
    typer.echo(text)


def read_options(text: str) -> dict[str, str]:
    """Comma-separated KEY=VALUE pairs.

    Raises:
        ConfigError: If one is no such pair.
    """
    found = {}
    for pair in filter(None, text.split(",")):
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise ConfigError(f"--model: {pair!r} is not KEY=VALUE, such as name=deit_tiny")
        found[key] = value
    return found


def read_ratios(text: str) -> list[float]:
    """Comma-separated mask ratios.

    Raises:
        ConfigError: If one is no number from 0 to 1.
    """
    try:
        ratios = [float(part) for part in text.split(",")]
    except ValueError:
        ratios = [-1.0]
    if not all(0 <= ratio <= 1 for ratio in ratios):
        raise ConfigError(f"--ratios {text!r} are no mask ratios: give numbers from 0 to 1, such as 0.09,0.27")
    return ratios


def selection(source: PictureSource, count: int, *, development: bool) -> Selection:
    """Pictures that neither the prior nor, unless asked for, the development of the attack has seen."""
    seen = select(source, DEVELOPMENT, seed=DEVELOPMENT_SEED, leave_out=measured_on)
    if development:
        return Selection(source, seen.entries[:count], seen.skipped)
    names = {entry.name for entry in seen.entries}
    return select(source, count, seed=0, leave_out=lambda name: name in names or measured_on(name))


def worst_patch(made: Reconstruction, batch: PrivateBatch, patch_size: int) -> float:
    """PSNR of the worst patch, masked ones under the assignment of least squared error."""
    mask = batch.mask[0]
    found, true = (to_patches(images.double(), patch_size)[0] for images in (made.images, batch.clean))
    errors = (found - true).square().mean(dim=1)[~mask]
    between = squared_errors(found[mask], true[mask])
    rows, columns = linear_sum_assignment(between.numpy())
    worst = torch.cat([errors, between[rows, columns]]).max().clamp(min=1e-12)
    return float(-10 * torch.log10(worst))


def squared_errors(found: Tensor, true: Tensor) -> Tensor:
    """(found, true) mean squared errors."""
    distances = torch.cdist(found, true, compute_mode="donot_use_mm_for_euclid_dist")
    return distances.square() / max(found.shape[1], 1)


_KINDS: dict[str, Callable[[str], Any]] = get_type_hints(Row)


def read(path: Path) -> list[Row]:
    """The rows of a file; none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [Row(**{name: _KINDS[name](value) for name, value in line.items()}) for line in csv.DictReader(file)]


def append(path: Path, row: Mapping[str, object]) -> None:
    """Write one row at the end of a file, with a header if it is the first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(row))
        if new:
            writer.writeheader()
        writer.writerow(row)


def summary(rows: list[Row]) -> str:
    """A table: one line per model, weights and ratio."""
    groups: defaultdict[tuple[str, str, float], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.model, row.weights, row.ratio].append(row)
    lines = [
        "| model | weights | mask ratio | uploads | certified (95 %) | wrong | PSNR c | of mjp_prior | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_line(group, members) for group, members in sorted(groups.items())),
    ]
    return "\n".join(lines) + "\n"


def _line(group: tuple[str, str, float], rows: list[Row]) -> str:
    certified = share(sum(row.certified for row in rows), len(rows))
    means = [sum(getattr(row, name) for row in rows) / len(rows) for name in ("psnr", "psnr_prior", "seconds")]
    cells = [
        *map(str, group),
        str(len(rows)),
        f"{certified.share:.2f} ({certified.low:.2f} to {certified.high:.2f})",
        str(sum(row.wrong for row in rows)),
        *(f"{mean:.1f}" for mean in means),
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    run_function(main)

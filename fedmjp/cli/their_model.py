"""`fedmjp attack --module package:factory --gradient FILE`: a user's own model, and a gradient of it."""

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmjp.cli.console import tell
from fedmjp.cli.runs import choose, write_manifest
from fedmjp.overrides import parse_pairs

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from fedmjp.gradient_files import GradientFile
    from fedmjp.models.adopt import Adopted
    from fedmjp.records import Reconstruction, Upload
    from fedmjp.threat import ThreatModel

OUTPUT = Path("results/module")
REPORT = "attack.json"
RECOVERED = r"recovered-\d+\.png"
METRICS = ("psnr", "ssim", "mse")


def attack_module(options: Mapping[str, Any], console: "Console") -> None:
    """Attack what a client uploaded of the user's own module.

    Args:
        options: Of the command.
        console: The terminal.
    """
    from fedmjp.attacks import ATTACKS
    from fedmjp.attacks.base import showing_pictures
    from fedmjp.attacks.recover import fit_entrance
    from fedmjp.benchmarks.folder.pictures import png_of, save_png
    from fedmjp.claims import claim_folder
    from fedmjp.errors import BadInputError
    from fedmjp.facade import attack
    from fedmjp.gradient_files import read_gradients

    attack_options = parse_pairs(options["options"], "--set", dashes=True)
    module_attack: Any = showing_pictures(ATTACKS.get(options["name"])(attack_options))
    path = Path(options["gradient"])
    file = read_gradients(path)
    adopted, title = _adopted(options)
    try:
        upload, threat = _upload(options, file, adopted)
    except BadInputError as error:
        raise BadInputError(f"{path}: {error}") from None
    private = None if options["private"] is None else _private(Path(options["private"]), adopted, threat)
    adopted, notes = fit_entrance(module_attack, upload, adopted, threat)
    if private is not None and private.shape[1:] != adopted.pixels:
        height, width = private.shape[1:]
        notes.append(
            f"not scored: {options['private']} is {width} x {height}, and the patches were laid out as "
            f"{adopted.pixels[1]} x {adopted.pixels[0]}"
        )
        private = None
    with warnings.catch_warnings(action="ignore"):  # the notes say the same
        reconstruction: Any = attack(
            module_attack.name, upload, adopted, options=attack_options, threat=threat, seed=options["seed"]
        )
    notes += filter(None, [module_attack.caveat(adopted, threat)])
    folder = Path(options["output"])
    claim_folder(folder)
    for former in folder.glob("recovered-*.png"):
        if re.fullmatch(RECOVERED, former.name):
            former.unlink()
    pictures = {f"recovered-{number}.png": image for number, image in enumerate(reconstruction.images, start=1)}
    for name, image in pictures.items():
        save_png(png_of(image), folder / name)
    scores = None if private is None else _scores(reconstruction, private)
    normalisation = {"mean": _three(adopted.mean), "std": _three(adopted.std)}
    write_manifest(
        folder / REPORT,
        "attack on a module of one's own",
        module={"name": title, "parts": adopted.parts, "weights_sha256": adopted.weights},
        pictures={"pixels": adopted.pixels, "patch_size": adopted.patch_size, "files": list(pictures)},
        normalisation=normalisation,
        upload={"file": path.name, "sha256": file.sha256, "states_weights": file.weights is not None},
        threat=threat.sentence(),
        attack={"name": module_attack.name, "options": attack_options, "seed": options["seed"]},
        notes=notes,
        diagnostics=dict(reconstruction.diagnostics),
        scores=scores,
    )
    tell(console, f"{title}: {', '.join(f'{part} {name}' for part, name in adopted.parts.items() if name)}.")
    statistics = ", ".join(f"{name} {values}" for name, values in normalisation.items())
    height, width = adopted.pixels
    tell(
        console,
        f"Pictures of {height} x {width} pixels in patches of {adopted.patch_size}, normalised by {statistics}.",
    )
    if file.weights is None:
        tell(console, f"{path} states no digest of weights; they are taken to be the module's.")
    tell(console, *notes, style="bold red")
    if scores:
        visible = (
            f" ({scores['psnr_visible']:.1f} dB where patches have a gradient)" if "psnr_visible" in scores else ""
        )
        tell(
            console, f"Against {options['private']}: PSNR {scores['psnr']:.1f} dB{visible}, SSIM {scores['ssim']:.3f}."
        )
    tell(console, f"Written to {folder}: {', '.join([*pictures, REPORT])}.")


def _adopted(options: Mapping[str, Any]) -> "tuple[Adopted, str]":
    from fedmjp.errors import BadInputError
    from fedmjp.models.adopt import adopt
    from fedmjp.models.factories import load_module

    module = load_module(options["module"]).to(choose(options["device"]))
    title = f"{options['module']} ({type(module).__name__})"
    normalisation: dict[str, Any] = {
        name: _numbers(options[name], f"--{name}") for name in ("mean", "std") if options[name]
    }
    try:
        return adopt(module, **normalisation), title
    except BadInputError as error:
        raise BadInputError(f"{title}: {error}") from None


def _numbers(text: str, option: str) -> list[float]:
    from fedmjp.errors import BadInputError

    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise BadInputError(f"{option} {text!r} is not three numbers, such as 0.485,0.456,0.406") from None


def _three(values: "Tensor") -> list[float]:
    return [round(value, 6) for value in values.flatten().tolist()]  # float32 shows more digits than were meant


def _upload(options: Mapping[str, Any], file: "GradientFile", adopted: "Adopted") -> "tuple[Upload, ThreatModel]":
    from fedmjp.threat import ThreatModel

    steps = options["local_steps"]
    kind = file.kind or ("gradient" if steps is None else "delta")
    examples = options["batch_size"] if file.examples is None else file.examples
    learning_rate = options["local_learning_rate"]
    threat = ThreatModel.parse(
        {"update": kind, "batch_size": examples, "local_steps": steps or 1, "local_learning_rate": learning_rate}
    )
    return adopted.upload(file.tensors, examples=examples, kind=threat.update, weights=file.weights), threat


def _private(path: Path, adopted: "Adopted", threat: "ThreatModel") -> "Tensor":
    """Read the user's own picture, (3, height, width) in [0, 1], just as it is."""
    from torchvision.transforms.v2 import functional as transforms

    from fedmjp.data.pictures import open_picture, to_rgb
    from fedmjp.errors import DataError
    from fedmjp.models.entrance import count_patches

    if threat.batch_size > 1:
        raise DataError(f"--private is one picture, the upload is of {threat.batch_size}")
    try:
        with open_picture(path) as photograph:
            pixels = transforms.pil_to_tensor(to_rgb(photograph))
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{path} cannot be read as a picture: {getattr(error, 'strerror', None) or error}") from None
    height, width = pixels.shape[1:]
    side = adopted.patch_size
    fits = height % side == width % side == 0 and (height // side) * (width // side) == count_patches(adopted)
    if (height, width) != adopted.pixels and (adopted.pixels_known or not fits):
        raise DataError(
            f"{path} is {width} x {height}, the module's pictures are {adopted.pixels[1]} x {adopted.pixels[0]}: "
            "give the picture as it went into the module, resized and cropped"
        )
    image: Tensor = pixels.float() / 255
    return image


def _scores(reconstruction: "Reconstruction", private: "Tensor") -> dict[str, float]:
    import torch

    from fedmjp.facade import score
    from fedmjp.private import PrivateBatch
    from fedmjp.settings import Picture

    nothing = torch.zeros(1, 1, dtype=torch.int64)
    batch = PrivateBatch(private[None], private[None], nothing.bool(), nothing, nothing[0], ("private",), Picture.CLEAN)
    scores = score(reconstruction, batch, metrics=METRICS)
    return {name: float(value[0]) for name, value in scores.items()}

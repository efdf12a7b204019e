"""Train and evaluate UperNet with a Swin transformer on ADE20K, as MJP's Table 9 does.

``python results/segmentation/study.py train --data DIR --weights FILE`` and ``... evaluate RUN --data DIR``.

MJP's Table 9 trains UperNet on Swin-T "pre-trained on ImageNet-1K", with and without MJP, and says no more. This study
reads it so: MJP is in how the backbone was trained. Its absolute position embedding, which Swin-T alone lacks, is then
part of the network, resized to the grid of a picture. Nothing is masked while scenes are learnt: a shuffled patch has
no place in a map of labels. The unknown embedding is therefore unused.
"""

import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
import typer
from PIL import Image
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import InterpolationMode
from torchvision.transforms import v2 as transforms

from fedmjp.arithmetic import computing
from fedmjp.benchmarks.folder.output import write_json, write_text
from fedmjp.claims import claim_folder
from fedmjp.cli.console import tell, wide_console
from fedmjp.cli.options import MODEL, PICTURES, Device, Fresh, Seed, Settings, examples
from fedmjp.cli.options import output as output_option
from fedmjp.cli.overrides import with_checkpoint
from fedmjp.cli.progress import LiveBars
from fedmjp.cli.runs import choose, given, require_apart, write_manifest
from fedmjp.config import MAX_IMAGE_SIZE, MAX_SEED, Checkpoint, Config, Numbers
from fedmjp.data.layout import pictures_in
from fedmjp.data.pictures import open_picture, to_rgb
from fedmjp.errors import BadInputError, CheckpointError, ConfigError, DataError, OutputError, TrainingError, suggestion
from fedmjp.files import read_file, replacing
from fedmjp.learning import HIGHEST_RATE
from fedmjp.models import names
from fedmjp.models.checkpoints import read_weights
from fedmjp.models.layouts import LOCALISATION
from fedmjp.overrides import apply_settings
from fedmjp.running import run
from fedmjp.seeds import derive, numpy_generator, scoped_randomness
from fedmjp.training.run_folder import LARGEST as LARGEST_MANIFEST
from fedmjp.training.state import load_state, save_state, save_weights

STAGES = 4  # of a Swin transformer, as UperNet reads them
# With others a run may go on.
INCIDENTAL = {"data": True, "device": True, "recipe": {"workers": True, "checkpoint_every": True}}


class UperNetModel(Config):
    """UperNet on a Swin transformer; the defaults are Swin-T and the heads of mmsegmentation.

    ``weights`` are those of a Swin transformer trained to classify; without, all are drawn.
    """

    dim: int = Field(96, ge=1, description="of the first stage's tokens; each later one has twice as many")
    depths: Numbers = Field((2, 2, 6, 2), description="blocks of each stage")
    heads: Numbers = Field((3, 6, 12, 24), description="of attention, in each stage")
    window: int = Field(7, ge=2, description="tokens per side of a window")
    channels: int = Field(512, ge=1, description="of UperNet's head")
    auxiliary_channels: int = Field(256, ge=1, description="of the head that helps in training, on the third stage")
    drop_path: float = Field(0.3, ge=0, lt=1, description="share of the last branch's uses that training leaves out")
    weights: Checkpoint | None = None

    @model_validator(mode="after")
    def _stages_fit(self) -> Self:
        for name, numbers in (("depths", self.depths), ("heads", self.heads)):
            if len(numbers) != STAGES or min(numbers) < 1:
                raise ValueError(f"{name} = {numbers}: name {STAGES} numbers above 0, one per stage")
        for stage, heads in enumerate(self.heads):
            if self.dim * 2**stage % heads:
                raise ValueError(f"{self.dim * 2**stage} numbers of stage {stage + 1} do not divide into {heads} heads")
        return self


class SegmentationRecipe(Config):
    """How it is trained; MJP's paper does not say, the defaults are mmsegmentation's for UperNet on Swin-T."""

    iterations: int = Field(160_000, ge=1)
    batch_size: int = Field(16, ge=2, description="heads normalise over it, so one picture is too few")
    crop: int = Field(512, ge=32, le=MAX_IMAGE_SIZE, description="pixels per side of what is trained on")
    learning_rate: float = Field(6e-5, gt=0, le=HIGHEST_RATE, description="falls linearly to 0 after the warm-up")
    weight_decay: float = Field(0.01, ge=0, allow_inf_nan=False, description="of all but norms and positions")
    warmup_iterations: int = Field(1500, ge=0)
    auxiliary_weight: float = Field(0.4, ge=0, allow_inf_nan=False, description="of the auxiliary head's loss")
    checkpoint_every: int = Field(2000, ge=1, description="iterations between checkpoints")
    workers: int = Field(0, ge=0, description="processes that read pictures")

    @model_validator(mode="after")
    def _warm_up_ends(self) -> Self:
        if self.warmup_iterations >= self.iterations:
            raise ValueError(
                f"warmup_iterations={self.warmup_iterations} leaves nothing of iterations={self.iterations}: set a "
                "smaller recipe.warmup_iterations"
            )
        return self


class SegmentationConfig(Config):
    """A training of a segmentation network; ``data`` is a folder in ADE20K's layout."""

    data: str
    model: UperNetModel = UperNetModel()
    recipe: SegmentationRecipe = SegmentationRecipe()
    seed: int = Field(0, ge=0, le=MAX_SEED)
    device: Literal["cpu", "cuda"] = "cpu"

    def digest(self, exclude: Mapping[str, Any] | None = None) -> str:
        """As of any configuration, without what only says how a run is carried out."""
        return super().digest(INCIDENTAL if exclude is None else exclude)


# Pictures and annotations in the layout of ADE20K's scene parsing benchmark (ADEChallengeData2016).
Split = Literal["training", "validation"]
CLASSES = 150
IGNORED = 255  # label of what no class is: 0 in the files, "other"
NAMES = "objectInfo150.txt"  # tab-separated, the last column has the names
WHERE = "(fedmjp does not ship ADE20K: it is ADEChallengeData2016.zip of the MIT Scene Parsing Benchmark)"


@dataclass(frozen=True)
class Scenes:
    """The pictures of a split, and what every pixel of them is."""

    root: Path
    split: Split
    names: tuple[str, ...]  # without endings, sorted
    ending: str  # of pictures; annotations are PNG

    def __len__(self) -> int:
        return len(self.names)

    def digest(self) -> str:
        """SHA-256 of the names, as hex."""
        return hashlib.sha256("\n".join(self.names).encode()).hexdigest()

    def load(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a picture (3, height, width) uint8, and its labels (height, width) uint8: 0 to 149, or ``IGNORED``.

        Raises:
            DataError: If one cannot be read, their sizes differ, or the annotation holds what is no class.
        """
        name = self.names[index]
        picture, annotation = self._place("images", name + self.ending), self._place("annotations", f"{name}.png")
        image = torch.from_numpy(np.array(to_rgb(_opened(picture)))).permute(2, 0, 1)
        values = np.array(_opened(annotation))
        if values.ndim != 2 or values.dtype.kind not in "bui":
            raise DataError(
                f"{annotation} has {values.shape[2:] or values.dtype} per pixel: one whole number is a class"
            )
        if values.shape != tuple(image.shape[1:]):
            sizes = " x ".join(map(str, values.shape[::-1])), " x ".join(map(str, reversed(image.shape[1:])))
            raise DataError(f"{annotation} is {sizes[0]} pixels, its picture {sizes[1]}")
        if values.max(initial=0) > CLASSES:
            raise DataError(
                f"{annotation} holds the value {values.max()}: classes are 1 to {CLASSES}, and 0 is none of them"
            )
        labels = torch.from_numpy(values.astype(np.uint8))
        return image, torch.where(labels == 0, IGNORED, labels - 1)

    def class_names(self) -> list[str]:
        """Return the names of the classes in the order of the labels; their numbers where the folder names none."""
        try:
            lines = (self.root / NAMES).read_text(encoding="utf-8").splitlines()[1:]
        except (OSError, ValueError):
            lines = []
        names = [line.split("\t")[-1].strip() for line in lines]
        return names if len(names) == CLASSES else [str(number + 1) for number in range(CLASSES)]

    def _place(self, kind: str, file: str) -> Path:
        return self.root / kind / self.split / file


def open_scenes(root: Path, split: Split) -> Scenes:
    """Return the pictures of a split that have annotations.

    Raises:
        DataError: If the folder has another layout, or a picture or an annotation lacks the other.
    """
    for part in (root, *(root / kind / split for kind in ("images", "annotations"))):
        if not part.is_dir():
            raise DataError(f"there is no folder {part} {WHERE}: {_hint(root, split)}")
    files = [Path(name) for name in pictures_in(root / "images" / split)]
    stems = {file.stem for file in files}
    labelled = {Path(name).stem for name in pictures_in(root / "annotations" / split)}
    if not stems:
        raise DataError(f"{root / 'images' / split} holds no picture {WHERE}")
    if lone := min(stems ^ labelled, default=None):
        kind = "picture" if lone in stems else "annotation"
        raise DataError(
            f"the {kind} {lone} of {root.name}, {split}, has no {_OTHER[kind]}; {len(stems ^ labelled)} lack one"
        )
    endings = {file.suffix for file in files}
    if len(endings) > 1:
        raise DataError(f"{root / 'images' / split} holds {' and '.join(sorted(endings))}: pictures have one ending")
    return Scenes(root, split, tuple(sorted(stems)), endings.pop())


_OTHER = {"picture": "annotation", "annotation": "picture"}


def _hint(root: Path, split: str) -> str:
    """Where the folder that was meant may be."""
    if not root.is_dir():
        near = [path.name for path in root.absolute().parent.iterdir()] if root.absolute().parent.is_dir() else []
        return suggestion(root.name, near)
    for below in sorted(path for path in root.iterdir() if path.is_dir()):
        if (below / "images" / split).is_dir():
            return f"did you mean {below}?"
    return f"its layout is images/{split} and annotations/{split}"


def _opened(path: Path) -> Image.Image:
    try:
        picture = open_picture(path)
        picture.load()
    except (OSError, ValueError, SyntaxError) as error:  # Pillow's for a damaged PNG is the last
        raise DataError(f"{path} cannot be read: {error}") from None
    return picture


# What a segmentation network is trained on and tried on: crops of scenes, and whole ones, normalised.
# As mmsegmentation trains on ADE20K.
SMALLEST, LARGEST = 0.5, 2.0  # of the size at which a picture is shown
LONGER = 4  # a resized picture's longer side is at most so many crops
HALF = 0.5  # of the crops are mirrored
ATTEMPTS, MOST = 10, 0.75  # to find a crop in which no class has more than this share
MEAN, DEVIATION = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]  # of ImageNet
COLOURS = transforms.Compose(
    [
        transforms.RandomApply([transforms.ColorJitter(**{what: by})], p=0.5)
        for what, by in (("brightness", 0.125), ("contrast", 0.5), ("saturation", 0.5), ("hue", 0.05))
    ]
)


# Pictures (batch, 3, crop, crop) and labels (batch, crop, crop), or why there are none.
Read = tuple[Tensor, Tensor] | str


class Crops(Dataset[Read]):
    """The batches of a training, in order; what is drawn for a crop depends on the seed and its place alone."""

    def __init__(self, scenes: Scenes, recipe: SegmentationRecipe, seed: int) -> None:
        self._scenes, self._recipe, self._seed = scenes, recipe, seed

    def __len__(self) -> int:
        return self._recipe.iterations

    def __getitem__(self, step: int) -> Read:
        size = self._recipe.batch_size
        try:  # the loader would tell an error in many lines
            crops = [self._crop(place) for place in range(step * size, (step + 1) * size)]
        except DataError as error:
            return str(error)
        images, labels = zip(*crops, strict=True)
        return torch.stack(images), torch.stack(labels)

    def _crop(self, place: int) -> tuple[Tensor, Tensor]:
        epoch, turn = divmod(place, len(self._scenes))
        order = numpy_generator(self._seed, "order", epoch).permutation(len(self._scenes))
        image, labels = self._scenes.load(int(order[turn]))
        with scoped_randomness(derive(self._seed, "crop", place)):
            return training_crop(image, labels, self._recipe.crop)


def training_crop(image: Tensor, labels: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Draw a random crop of a resized picture, perhaps mirrored, with other colours; drawn from the global generators.

    Args:
        image: (3, height, width) uint8.
        labels: (height, width) uint8.
        size: Pixels per side; smaller pictures are filled up below and on the right.

    Returns:
        The crop, normalised, (3, size, size), and its labels (size, size) int64.
    """
    share = float(torch.empty(()).uniform_(SMALLEST, LARGEST))
    image, labels = _resized(image, share * size), _resized(labels[None], share * size, nearest=True)[0]
    top, left = _place(labels, size)
    image, labels = (part[..., top : top + size, left : left + size] for part in (image, labels))
    if torch.rand(()) < HALF:
        image, labels = image.flip(-1), labels.flip(-1)
    below, right = size - labels.shape[0], size - labels.shape[1]
    shown = F.pad(normalised(COLOURS(image)), (0, right, 0, below))
    return shown, F.pad(labels.long(), (0, right, 0, below), value=IGNORED)


def whole(image: Tensor, size: int, multiple: int) -> tuple[Tensor, tuple[int, int]]:
    """Return a picture (3, height, width) uint8 for evaluation: its shorter side is ``size``, the mean of training.

    Returns:
        It, normalised and filled up below and on the right to a ``multiple`` of pixels, and its height and width.
    """
    resized = _resized(image, size)
    height, width = resized.shape[1:]
    return F.pad(normalised(resized), (0, -width % multiple, 0, -height % multiple)), (height, width)


def normalised(image: Tensor) -> Tensor:
    """From uint8 to what the network reads."""
    shown: Tensor = transforms.functional.normalize(image.float() / 255, MEAN, DEVIATION)
    return shown


def _resized(image: Tensor, shorter: float, *, nearest: bool = False) -> Tensor:
    """With that shorter side, or a longer one of ``LONGER`` times as much where that is less."""
    height, width = image.shape[1:]
    factor = min(shorter / min(height, width), LONGER * shorter / max(height, width))
    sides = [max(1, round(height * factor)), max(1, round(width * factor))]
    how = InterpolationMode.NEAREST if nearest else InterpolationMode.BILINEAR
    resized: Tensor = transforms.functional.resize(image, sides, interpolation=how)
    return resized


def _place(labels: Tensor, size: int) -> tuple[int, int]:
    """Where a crop begins in which no class has too great a share, if one is found."""
    for _ in range(ATTEMPTS):
        top, left = (int(torch.randint(max(side - size, 0) + 1, ())) for side in labels.shape)
        inside = labels[top : top + size, left : left + size]
        counts = torch.bincount(inside[inside != IGNORED].flatten().int())
        if (counts > 0).sum() > 1 and counts.max() < MOST * counts.sum():
            break
    return top, left


# UperNet, from transformers, with weights of a Swin transformer that classifies.
PATCH = 4  # pixels per side, of every Swin transformer
POSITIONS = "patch_embed.pos_embed"
# What classifies, and what only MJP's training needs.
UNUSED = ("head.", "norm.", LOCALISATION, names.UNKNOWN_EMBEDDING)
QKV = ("q_proj", "k_proj", "v_proj")
STAGE = re.compile(r"^layers\.(\d+)\.(.+)")
# timm's names, and those of transformers.
RENAMED = {
    "patch_embed.proj.": "embeddings.patch_embeddings.projection.",
    "patch_embed.norm.": "embeddings.norm.",
    POSITIONS: "embeddings.position_embeddings",
    ".norm1.": ".layernorm_before.",
    ".norm2.": ".layernorm_after.",
    ".attn.proj.": ".attention.o_proj.",
    ".attn.qkv.": ".attention.qkv.",
    ".attn.relative": ".attention.relative_position_bias.relative",
}


class UperNet(nn.Module):
    """From normalised pictures to logits of each pixel, as transformers computes it.

    Args:
        model: Its sizes; its weights are not loaded.
        positions: A table of absolute positions such as it is to have one; None for none.
    """

    def __init__(self, model: UperNetModel, positions: Tensor | None) -> None:
        # Seconds, and an extra.
        from transformers import SwinConfig, UperNetConfig, UperNetForSemanticSegmentation  # noqa: PLC0415

        super().__init__()
        backbone = SwinConfig(
            image_size=PATCH * (1 if positions is None else round((positions.numel() / model.dim) ** 0.5)),
            embed_dim=model.dim,
            depths=list(model.depths),
            num_heads=list(model.heads),
            window_size=model.window,
            drop_path_rate=model.drop_path,
            use_absolute_embeddings=positions is not None,
            out_features=[f"stage{stage + 1}" for stage in range(STAGES)],
        )
        config = UperNetConfig(
            backbone_config=backbone,
            hidden_size=model.channels,
            auxiliary_channels=model.auxiliary_channels,
            num_labels=CLASSES,
            loss_ignore_index=IGNORED,
        )
        self.network: Any = UperNetForSemanticSegmentation(config)
        swin = self.network.backbone.swin
        swin.forward = partial(swin.forward, interpolate_pos_encoding=True)  # of absolute positions, where it has any

    def forward(self, pictures: Tensor) -> Tensor:
        """(batch, 3, height, width), of sides that are multiples of ``PATCH``, to (batch, classes, height, width)."""
        logits: Tensor = self.network(pictures).logits
        return logits

    def loss(self, pictures: Tensor, labels: Tensor, auxiliary_weight: float) -> Tensor:
        """Mean cross-entropy over the pixels that have a class, and the auxiliary head's, weighted; a scalar."""
        self.network.config.auxiliary_loss_weight = auxiliary_weight
        value: Tensor = self.network(pictures, labels=labels).loss
        return value


def build_network(model: UperNetModel, seed: int) -> UperNet:
    """Return the network with its heads drawn from the seed, and the backbone too where there are no weights.

    Raises:
        CheckpointError: If the weights cannot be read, or are not of such a Swin transformer.
    """
    weights = {} if model.weights is None else _swin_weights(model.weights)
    with scoped_randomness(derive(seed, "weights")):  # transformers takes no generator
        made = UperNet(model, weights.get(_renamed(POSITIONS)))
    if model.weights is not None:
        _load(made.network.backbone, weights, model.weights.path)
    return made.eval()


def _swin_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Weights of a classifier's backbone under transformers' names."""
    made: dict[str, Tensor] = {}
    for name, weight in read_weights(checkpoint).items():
        if not name.startswith(UNUSED):
            theirs = _renamed(name)
            if ".attention.qkv." in theirs:
                parts = zip(QKV, weight.chunk(3), strict=False)  # what is not there is told below
                made |= {theirs.replace("qkv", part): value for part, value in parts}
            else:
                made[theirs] = weight
    return made


def _renamed(name: str) -> str:
    for ours, theirs in RENAMED.items():
        name = name.replace(ours, theirs)
    if found := STAGE.match(name):
        # timm begins a stage with the merging of patches that transformers ends the one before with.
        name = f"encoder.layers.{int(found[1]) - found[2].startswith('downsample.')}.{found[2]}"
    return f"swin.{name}"


def _load(backbone: nn.Module, weights: Mapping[str, Tensor], path: str) -> None:
    """Give the backbone its weights; the norms before the heads are not among a classifier's and stay drawn."""
    shapes = {
        name: value.shape
        for name, value in backbone.named_parameters()
        if not name.startswith(("hidden_states_norms.", "swin.layernorm."))
    }
    for name in sorted(shapes.keys() ^ weights.keys()):
        has = "lacks" if name in shapes else "holds"
        near = suggestion(name, weights if name in shapes else shapes)
        raise CheckpointError(f"{path} is not of such a Swin transformer: it {has} {name}; {near}")
    for name, shape in shapes.items():
        if weights[name].shape != shape:
            raise CheckpointError(
                f"{path} does not fit the model: {name} is {tuple(weights[name].shape)} instead of {tuple(shape)}; "
                "set model.dim, model.heads and model.window to those of its training, whose pictures must have had 32 "
                "pixels per side for each token of a window"
            )
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            if name in weights:
                parameter.copy_(weights[name])


# Mean intersection over union and mean accuracy of a segmentation network.
@dataclass(frozen=True)
class SegmentationFigures:
    """What a network's labels of all pixels come to; pixels of no class do not count.

    Attributes:
        overlaps: (classes,), of each class the pixels that are and are called so over those that are or are called so;
            NaN where there are none.
        accuracies: (classes,), of its pixels the share that is called so; NaN where it has none.
        pixels: (classes,) int64, of each class.
        accuracy: Share of all pixels that are called what they are.
    """

    overlaps: Tensor
    accuracies: Tensor
    pixels: Tensor
    accuracy: float

    @property
    def mean_overlap(self) -> float:
        """MIoU, over the classes that occur or are said to."""
        return self.overlaps.nanmean().item()

    @property
    def mean_accuracy(self) -> float:
        """MAcc, over the classes that occur."""
        return self.accuracies.nanmean().item()


def count(labels: Tensor, predicted: Tensor, classes: int = CLASSES) -> Tensor:
    """How many pixels of each class (row) are called each class (column), int64; ``IGNORED`` ones do not count."""
    known = labels != IGNORED
    pairs = labels[known].long() * classes + predicted[known].long()
    return torch.bincount(pairs, minlength=classes**2).view(classes, classes)


def figures_of(counts: Tensor) -> SegmentationFigures:
    """Return the figures of such counts over all pictures."""
    right, actual, said = counts.diag().double(), counts.sum(dim=1), counts.sum(dim=0)
    return SegmentationFigures(
        right / (actual + said - right), right / actual, actual, (right.sum() / counts.sum()).item()
    )


def predict(network: UperNet, image: Tensor, size: int) -> Tensor:
    """Return the class of each pixel of a picture (3, height, width) uint8, (height, width) int64.

    It is shown whole, its shorter side ``size`` pixels, and logits are resized back to its own size.
    """
    shown, (height, width) = whole(image, size, PATCH)
    device = next(network.parameters()).device
    with torch.no_grad(), computing("float32", device):
        logits = network(shown[None].to(device))[..., :height, :width]
        resized = F.interpolate(logits, size=image.shape[1:], mode="bilinear", align_corners=False)
    return resized[0].argmax(dim=0).cpu()


def evaluate(
    network: UperNet, scenes: Scenes, indices: Iterable[int], size: int, on_picture: Callable[[], None]
) -> SegmentationFigures:
    """Label pictures and count; DataError if one cannot be read."""
    counts = torch.zeros(CLASSES, CLASSES, dtype=torch.int64)
    for index in indices:
        image, labels = scenes.load(index)
        counts += count(labels, predict(network, image, size))
        on_picture()
    return figures_of(counts)


# Training of a segmentation network, which goes on where it was stopped.
KIND = "segmentation"
FIRST = 1e-6  # of the learning rate, at the start of the warm-up
TABLES = ("relative_position_bias_table", "position_embeddings")  # which do not decay; nor do norms
Row = dict[str, float]  # of the history


class SegmentationFolder:
    """The folder of such a training."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifest = root / "manifest.json"
        self.history = root / "history.csv"  # iteration, mean loss since the last line, learning rate, seconds in all
        self.weights = root / "weights.safetensors"
        self.state = root / "state.pt"

    def begin(self, config: SegmentationConfig, *, fresh: bool) -> None:
        """Make room for a run, or for what is left of it; a ``fresh`` one removes a former one.

        Raises:
            OutputError: If the folder holds something else, or a run with another configuration.
        """
        if not self.manifest.exists():
            return
        try:
            begun = self.config()
        except BadInputError as error:
            raise OutputError(f"{error}; name another --output") from None
        if fresh:
            for path in (self.manifest, self.history, self.weights, self.state):
                path.unlink(missing_ok=True)
        elif begun.digest() != config.digest():
            raise OutputError(
                f"{self.root} holds a run with another configuration; name another --output or give --fresh"
            )

    def config(self) -> SegmentationConfig:
        """Return the configuration of the run; BadInputError if the folder holds none."""
        try:
            about: dict[str, Any] = json.loads(read_file(self.manifest, LARGEST_MANIFEST))
            if about.get("kind") == KIND:
                return SegmentationConfig.parse(about["config"])
            reason = "its manifest is of something else"
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
            reason = str(error)
        raise BadInputError(f"{self.root} holds no training of a segmentation network: {reason}")


def train(
    config: SegmentationConfig,
    scenes: Scenes,
    folder: SegmentationFolder,
    *,
    on_step: Callable[[int], None],
    on_checkpoint: Callable[[Row], None],
) -> None:
    """Train for the iterations of the recipe, from the folder's checkpoint if it has one.

    Args:
        config: What to train.
        scenes: Those to train on.
        folder: Of the run.
        on_step: Called after every iteration with their number.
        on_checkpoint: Called after every checkpoint with its line of the history.

    Raises:
        CheckpointError: If that is of another configuration or other scenes, or the weights to begin with do not fit.
        DataError: If a scene cannot be read; what was trained up to the last checkpoint is kept.
        TrainingError: If the loss is no longer finite.
    """
    recipe, device = config.recipe, torch.device(config.device)
    state = load_state(folder.state, config=config.digest())
    if state is not None and state["scenes"] != scenes.digest():
        raise CheckpointError(f"{folder.state} is of a run on other scenes: restore them as they were, or give --fresh")
    network = build_network(config.model, config.seed).to(device)
    optimiser = torch.optim.AdamW(_groups(network, recipe.weight_decay), lr=recipe.learning_rate)
    rows: list[Row] = []
    done, before = 0, 0.0
    if state is not None:
        network.load_state_dict(state["network"])
        optimiser.load_state_dict(state["optimiser"])
        rows, done = state["rows"], state["done"]
        before = rows[-1]["seconds"] if rows else 0.0
    network.train()
    losses, started = list[float](), time.monotonic()
    for pictures, labels in _batches(config, scenes, done):
        rate = recipe.learning_rate * learning_rate_factor(recipe, done)
        # What is drawn is what drop path leaves out.
        with computing("float32", device), scoped_randomness(derive(config.seed, "step", done)):
            loss = _step(network, optimiser, rate, (pictures.to(device), labels.to(device)), recipe.auxiliary_weight)
        done += 1
        if not math.isfinite(loss):
            raise TrainingError(
                f"iteration {done} broke down (loss {loss:g}): lower recipe.learning_rate "
                f"(now {recipe.learning_rate:g}) and start over with --fresh"
            )
        losses.append(loss)
        on_step(done)
        if done % recipe.checkpoint_every == 0 or done == recipe.iterations:
            seconds = before + time.monotonic() - started
            mean = sum(losses) / len(losses)
            rows.append({"iteration": done, "loss": mean, "learning_rate": rate, "seconds": seconds})
            losses.clear()
            about = {"config": config.digest(), "scenes": scenes.digest(), "rows": rows, "done": done}
            _keep(folder, network, optimiser, about)
            on_checkpoint(rows[-1])


def learning_rate_factor(recipe: SegmentationRecipe, done: int) -> float:
    """Of the learning rate after so many iterations: a linear warm-up, then a linear fall to 0."""
    if done < recipe.warmup_iterations:
        return FIRST + (1 - FIRST) * done / recipe.warmup_iterations
    return 1 - (done - recipe.warmup_iterations) / (recipe.iterations - recipe.warmup_iterations)


def trained_network(folder: SegmentationFolder) -> UperNet:
    """Return the network with the last weights of a run.

    Raises:
        BadInputError: If the folder holds no such run.
        CheckpointError: If it has no weights yet, or they are damaged.
    """
    model = folder.config().model
    weights = read_weights(Checkpoint.of(folder.weights))
    network = UperNet(model, weights.get("network.backbone.swin.embeddings.position_embeddings"))
    try:
        network.load_state_dict(weights)
    except RuntimeError:
        raise CheckpointError(f"{folder.weights} does not fit the model of {folder.manifest.name} beside it") from None
    return network.eval()


def _groups(network: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters that decay, and norms and positions, which do not."""
    norms = {
        id(parameter)
        for part in network.modules()
        if isinstance(part, nn.LayerNorm | nn.BatchNorm2d)
        for parameter in part.parameters()
    }
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in network.named_parameters():
        groups[id(parameter) not in norms and not name.endswith(TABLES)].append(parameter)
    return [{"params": groups[True], "weight_decay": weight_decay}, {"params": groups[False], "weight_decay": 0.0}]


def _batches(config: SegmentationConfig, scenes: Scenes, done: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Return what is left of the training."""
    crops, steps = Crops(scenes, config.recipe, config.seed), range(done, config.recipe.iterations)
    # A generator of its own: the loader would draw from the global one.
    loader = DataLoader(
        crops, batch_size=None, sampler=steps, num_workers=config.recipe.workers, generator=torch.Generator()
    )
    for read in loader:
        if isinstance(read, str):
            raise DataError(read)
        yield read


def _step(
    network: UperNet, optimiser: torch.optim.Optimizer, rate: float, batch: tuple[Tensor, Tensor], auxiliary: float
) -> float:
    pictures, labels = batch
    if not bool((labels != IGNORED).any()):
        return 0.0  # nothing in it is of any class
    for group in optimiser.param_groups:
        group["lr"] = rate
    optimiser.zero_grad()
    loss = network.loss(pictures, labels, auxiliary)
    loss.backward()  # type: ignore[no-untyped-call]
    optimiser.step()
    return loss.item()


def _keep(
    folder: SegmentationFolder, network: nn.Module, optimiser: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    save_weights(folder.weights, network.state_dict())
    save_state(folder.state, {**state, "network": network.state_dict(), "optimiser": optimiser.state_dict()})
    with replacing(folder.history) as partial:
        pd.DataFrame(state["rows"]).to_csv(partial, index=False)


app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
# mIoU and mAcc of MJP's Table 9, in percent.
PAPER = {"Swin-T": (43.87, 55.22), "Swin-T + MJP": (44.03, 55.50)}
KEYS = {
    "model": "dim, depths, heads, window, channels, auxiliary_channels, drop_path, weights",
    "recipe": "iterations, batch_size, crop, learning_rate, weight_decay, warmup_iterations, auxiliary_weight, "
    "checkpoint_every, workers",
}
Data = Annotated[
    Path,
    typer.Option(
        help="ADE20K's folder, ADEChallengeData2016: images/ and annotations/, each with training/ and validation/.",
        metavar="DIR",
        rich_help_panel=PICTURES,
    ),
]


@app.command(
    "train",
    epilog=examples(
        "python results/segmentation/study.py train --data DIR --weights results/train/weights.safetensors",
        "python results/segmentation/study.py train --data DIR --weights FILE recipe.iterations=40000 recipe.workers=8",
        keys=KEYS,
    ),
)
def train_command(
    data: Data,
    settings: Settings = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            help="Of a Swin-T that was trained to classify, with MJP or without: ours, timm's or the official ones.",
            metavar="FILE",
            rich_help_panel=MODEL,
        ),
    ] = None,
    seed: Seed = 0,
    device: Device = "auto",
    output: Annotated[Path, output_option("Folder for weights, history and state.")] = Path("runs/segment"),
    fresh: Fresh = False,
) -> None:
    """Train UperNet on a Swin transformer; goes on where it was stopped."""
    _require_transformers()

    named = {
        "data": str(data),
        "seed": seed,
        "device": choose(device),
        "model": given({"weights": weights and str(weights)}),
    }
    values = apply_settings(named, settings or [])
    config = SegmentationConfig.parse({**values, "model": with_checkpoint(values["model"])})
    scenes = open_scenes(Path(config.data), "training")
    require_apart(output, config.data)
    claim_folder(output)
    folder = SegmentationFolder(output)
    folder.begin(config, fresh=fresh)
    console = wide_console()
    if config.model.weights is None:
        tell(
            console,
            "The backbone's weights are drawn: figures like the paper's need ones trained on ImageNet (--weights).",
        )
    write_manifest(folder.manifest, KIND, config=config.published(), pictures=len(scenes))
    with LiveBars(console, transient=True) as bars:
        task = bars.add_task("Iterations", total=config.recipe.iterations)
        train(
            config,
            scenes,
            folder,
            on_step=lambda done: bars.update(task, completed=done),
            on_checkpoint=lambda row: tell(console, f"Iteration {row['iteration']}: loss {row['loss']:.3f}"),
        )
    tell(console, f"Written to {output}: weights.safetensors, history.csv, manifest.json.")


@app.command("evaluate", epilog=examples("python results/segmentation/study.py evaluate results/segment --data DIR"))
def evaluate_command(
    folder: Annotated[Path, typer.Argument(help="Folder of such a training.", metavar="RUN")],
    data: Data,
    limit: Annotated[
        int | None, typer.Option(help="Only so many pictures, the first.", min=1, rich_help_panel=PICTURES)
    ] = None,
    device: Device = "auto",
    output: Annotated[Path, output_option("Folder for the figures.")] = Path("runs/segmentation"),
) -> None:
    """Measure mIoU and mAcc on the validation split, beside the paper's."""
    _require_transformers()

    trained = SegmentationFolder(folder)
    size = trained.config().recipe.crop
    scenes = open_scenes(data, "validation")
    require_apart(output, str(data))
    network = trained_network(trained).to(choose(device))
    claim_folder(output)
    console = wide_console()
    pictures = min(limit or len(scenes), len(scenes))
    with LiveBars(console, transient=True) as bars:
        task = bars.add_task("Pictures", total=pictures)
        figures = evaluate(network, scenes, range(pictures), size, lambda: bars.advance(task))
    _write(output, figures, scenes.class_names())
    about = {"data": data.name, "pictures": pictures, "of": len(scenes), "run": folder.name}
    write_manifest(output / "manifest.json", "segmentation evaluation", **about)
    lines = {folder.name: (100 * figures.mean_overlap, 100 * figures.mean_accuracy), **PAPER}
    for name, (overlap, accuracy) in lines.items():
        where = " (the paper's)" if name in PAPER else f" ({pictures} of {len(scenes)} pictures)"
        tell(console, f"{name}{where}: mIoU {overlap:.2f}, mAcc {accuracy:.2f}")
    tell(console, f"Written to {output}: segmentation.json, classes.csv, manifest.json.")


def _write(output: Path, figures: SegmentationFigures, names: list[str]) -> None:

    means = {"mIoU": figures.mean_overlap, "mAcc": figures.mean_accuracy, "pixel_accuracy": figures.accuracy}
    write_json(output / "segmentation.json", means)
    columns = {"class": names, "pixels": figures.pixels, "IoU": figures.overlaps, "accuracy": figures.accuracies}
    write_text(output / "classes.csv", pd.DataFrame(columns).to_csv(index=False))


def _require_transformers() -> None:
    if find_spec("transformers") is None:
        raise BadInputError(
            "this study needs transformers, which is not installed; pip install 'transformers>=5.23,<6'"
        )


if __name__ == "__main__":
    run(app)

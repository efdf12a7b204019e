"""What a training run is: model, data, recipe, puzzle, and for federated runs the federation."""

import hashlib
import json
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from fedmjp.config import DIGEST, MAX_SEED, Config, MaskRatio, ModelConfig

Shuffle = Literal["none", "jigsaw", "pixels"]
Strategy = Literal["fedavg", "fedprox", "fedavgm", "fedadam", "fedsgd"]
Scheme = Literal["iid", "dirichlet", "pathological"]
# A step of FedAdam is about as long as its learning rate, in every weight; FedSGD's is plain SGD.
SERVER_RATES: dict[Strategy, float] = {"fedavg": 1.0, "fedprox": 1.0, "fedavgm": 1.0, "fedadam": 0.01, "fedsgd": 0.1}
# With others a run may go on.
INCIDENTAL: dict[str, Any] = {"device": True, "checkpoint_every": True, "recipe": {"workers": True}}
MOVABLE = 2  # patches that can change places
HIGHEST_RATE = 1000.0  # far beyond what trains anything, and still a number after scaling


class Puzzle(Config):
    """How pictures are shuffled in training. The defaults are what the paper says of its best row (Tables 3 and 4).

    The official code (yhlleo/MJP, ``main.py`` and ``train.sh``) differs: see ``OFFICIAL_CODE``.

    Attributes:
        shuffle: "jigsaw" moves the patches of block-wise masks (JP), "pixels" moves all patches and, with
            one permutation for all of them, the pixels inside (SPP; Tolstikhin et al., MLP-Mixer, 2021).
        mask_ratio: Wanted share of masked patches; the paper's best accuracy is at 0.03, its code trains with 0.1.
        probability: Share of batches that are shuffled; 1 in the paper, 0.5 in its code.
        warmup_epochs: Epochs without a puzzle at the start; none in the paper, those of the learning
            rate's warm-up in its code.
        masks: One per picture (Alg. 1 takes a picture), or one for the whole batch (the code).
        localisation_weight: Weight of the DAL loss, 0.01 (paper, section 4.2).
        localisation_schedule: "constant" (paper), or "cosine" from the weight to its half after a linear
            warm-up from 0 (the code).
    """

    shuffle: Shuffle = "none"
    mask_ratio: MaskRatio = 0.03
    probability: float = Field(1.0, gt=0.0, le=1.0)
    warmup_epochs: int = Field(0, ge=0)
    masks: Literal["picture", "batch"] = "picture"
    localisation_weight: float = Field(0.01, ge=0.0, allow_inf_nan=False)
    localisation_schedule: Literal["constant", "cosine"] = "constant"


# What the official code does where the paper says otherwise; its regressor has two layers
# (``ModelConfig.localisation_layers``).
OFFICIAL_CODE = Puzzle(
    shuffle="jigsaw",
    mask_ratio=0.1,
    probability=0.5,
    warmup_epochs=20,
    masks="batch",
    localisation_schedule="cosine",
)


class Recipe(Config):
    """The recipe of MJP's Table 7 (supplement, Table 1), which is DeiT's; the defaults are its values.

    The learning rate is ``learning_rate * batch_size / 512``. Where the paper gives no number (gradient
    clipping, drop path, final and first learning rate) the official code's is taken.
    """

    epochs: int = Field(300, ge=1)
    batch_size: int = Field(1024, ge=1)
    learning_rate: float = Field(5e-4, gt=0, le=HIGHEST_RATE, description="for a batch of 512")
    warmup_learning_rate: float = Field(5e-7, ge=0, le=HIGHEST_RATE, description="first, for a batch of 512")
    final_learning_rate: float = Field(5e-6, ge=0, le=HIGHEST_RATE, description="last, for a batch of 512")
    warmup_epochs: int = Field(20, ge=0)
    weight_decay: float = Field(0.05, ge=0, allow_inf_nan=False)
    label_smoothing: float = Field(0.1, ge=0.0, lt=1.0)
    drop_path: float = Field(0.1, ge=0.0, lt=1.0)
    clip_gradient: float = Field(5.0, ge=0, allow_inf_nan=False, description="largest norm; 0 never clips")
    repeats: int = Field(3, ge=1, description="repeated augmentation: versions of a picture in an epoch")
    crop_scale: float = Field(0.08, gt=0.0, le=1.0, description="smallest share of a picture that a crop keeps")
    flip: float = Field(0.5, ge=0.0, le=1.0)
    color_jitter: float = Field(0.4, ge=0.0, le=1.0, description="where rand_augment is empty")
    rand_augment: str = Field("rand-m9-mstd0.5-inc1", description="as timm writes it; empty for none")
    random_erasing: float = Field(0.25, ge=0.0, le=1.0)
    mixup: float = Field(0.8, ge=0.0, allow_inf_nan=False)
    cutmix: float = Field(1.0, ge=0.0, allow_inf_nan=False)
    crop_share: float = Field(0.875, gt=0.0, le=1.0, description="share of the shorter side, for evaluation")
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = Field(False, description="torch.compile, worth it on CUDA")
    workers: int = Field(0, ge=0, description="processes that read pictures")

    @model_validator(mode="after")
    def _warm_up_ends(self) -> Self:
        if self.warmup_epochs >= self.epochs:
            raise ValueError(f"{self.warmup_epochs} warm-up epochs leave nothing of {self.epochs} epochs")
        return self


class TrainingConfig(Config):
    """A central training run.

    Attributes:
        model: Initial weights come from its seed, or from its file.
        data: "bundled", a folder of ``CLASS/picture`` files, a folder with ``train`` and ``val`` of that
            kind, a folder of ``train.parquet`` and ``validation.parquet``, or "hub:OWNER/NAME".
        seed: Of everything but the initial weights: order, augmentation, puzzles, drop path.
        checkpoint_every: Epochs (rounds, in a federation) between checkpoints.
    """

    model: ModelConfig = ModelConfig(name="deit_small")
    data: str = "bundled"
    puzzle: Puzzle = Puzzle()
    recipe: Recipe = Recipe()
    seed: int = Field(0, ge=0, le=MAX_SEED)
    device: Literal["cpu", "cuda"] = "cpu"
    checkpoint_every: int = Field(1, ge=1)

    def digest(self) -> str:
        """As of any configuration, without what only says how a run is carried out."""
        return _digest(self, INCIDENTAL)

    @model_validator(mode="after")
    def _model_fits_puzzle(self) -> Self:
        if self.model.defence == "mjp" and self.puzzle.shuffle != "jigsaw":
            raise ValueError("defence mjp without puzzle.shuffle jigsaw would never use the unknown embedding")
        if self.model.defence == "jigsaw" and self.puzzle.shuffle != "jigsaw":
            raise ValueError("defence jigsaw needs puzzle.shuffle jigsaw")
        if self.model.defence == "none" and self.puzzle.shuffle == "jigsaw":
            raise ValueError("puzzle.shuffle jigsaw is defence jigsaw or mjp, not none")
        patches, ratio = self.model.grid**2, self.puzzle.mask_ratio
        if self.puzzle.shuffle == "jigsaw" and int(patches * ratio) < MOVABLE:
            raise ValueError(f"puzzle.mask_ratio {ratio:g} of {patches} patches moves none: take a greater one")
        return self


class PartitionConfig(Config):
    """How pictures are dealt to clients, by flwr-datasets' partitioners.

    Attributes:
        scheme: "iid" (shuffled, equal shares), "dirichlet" (Hsu et al., 2019; each class is dealt by
            proportions drawn from a symmetric Dirichlet distribution), "pathological" (McMahan et al.,
            2017; each client has pictures of few classes).
        alpha: Concentration of the Dirichlet distribution.
        classes_per_client: Of the pathological scheme.
    """

    scheme: Scheme = "iid"
    clients: int = Field(8, ge=1)
    alpha: float = Field(0.3, gt=0, allow_inf_nan=False)
    classes_per_client: int = Field(2, ge=1)


class FederatedConfig(Config):
    """A federated training run.

    Each round a share of the clients trains for ``local_epochs`` with the recipe and uploads its weights;
    rounds x local epochs take the place of ``training.recipe.epochs``, and the learning rate runs over
    them. With "fedsgd" a client uploads the gradient of its next batch instead, and the server takes
    a step of plain SGD.

    Attributes:
        server_learning_rate: Of FedAvgM, FedAdam and FedSGD; None is the strategy's own, see ``server_rate``.
        server_momentum: Of FedAvgM.
        proximal_mu: Of FedProx.
        participation: Share of the clients that take part in a round, at least one.
        round_seconds: How long the server waits for the clients of a round, which may wait for a core.
        uploads: Rounds in which everything that crosses the wire is recorded.
    """

    training: TrainingConfig = TrainingConfig()
    partition: PartitionConfig = PartitionConfig()
    strategy: Strategy = "fedavg"
    rounds: int = Field(10, ge=1)
    local_epochs: int = Field(1, ge=1)
    participation: float = Field(1.0, gt=0.0, le=1.0)
    server_learning_rate: float | None = Field(None, gt=0, allow_inf_nan=False)
    server_momentum: float = Field(0.9, ge=0.0, lt=1.0)
    proximal_mu: float = Field(0.01, ge=0.0, allow_inf_nan=False)
    round_seconds: float = Field(86400.0, gt=0)
    uploads: tuple[int, ...] = ()

    @property
    def server_rate(self) -> float:
        """The server's learning rate."""
        return SERVER_RATES[self.strategy] if self.server_learning_rate is None else self.server_learning_rate

    def digest(self) -> str:
        """As of any configuration, without what only says how a run is carried out."""
        return _digest(self, {"training": INCIDENTAL, "round_seconds": True})

    @model_validator(mode="after")
    def _can_be_run(self) -> Self:
        late = [each for each in self.uploads if not 1 <= each <= self.rounds]
        if late:
            raise ValueError(f"uploads of round {late[0]} were asked for, but there are rounds 1 to {self.rounds}")
        warmup, epochs = self.training.recipe.warmup_epochs, self.rounds * self.local_epochs
        if self.strategy != "fedsgd" and warmup >= epochs:
            raise ValueError(f"{warmup} warm-up epochs leave nothing of {epochs} (rounds x local epochs)")
        puzzle = self.training.puzzle
        if self.strategy != "fedsgd" and puzzle.shuffle != "none" and puzzle.warmup_epochs >= epochs:
            raise ValueError(f"{puzzle.warmup_epochs} epochs without a puzzle leave none of {epochs} with one")
        return self


def _digest(config: Config, incidental: dict[str, Any]) -> str:
    values = config.model_dump(mode="json", context=DIGEST, exclude=incidental)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

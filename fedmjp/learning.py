"""Training: the recipe, the puzzle's schedule, and what a federation adds to them."""

from typing import Literal, Self

from pydantic import Field, model_validator

from fedmjp.arithmetic import Arithmetic
from fedmjp.config import MAX_COUNT, MAX_ROUNDS, Config, Numbers, UpdateKind
from fedmjp.defences.pipeline import Pipeline
from fedmjp.step import ClientStep

Strategy = Literal["fedavg", "fedprox", "fedavgm", "fedadam", "fedsgd", "trimmed_mean", "median", "krum", "multi_krum"]
Scheme = Literal["iid", "dirichlet", "pathological"]
# A step of FedAdam is about as long as its learning rate, in every weight; FedSGD's is plain SGD.
SERVER_RATES: dict[Strategy, float] = {"fedadam": 0.01, "fedsgd": 0.1}  # of the others 1
ROBUST: tuple[Strategy, ...] = ("trimmed_mean", "median", "krum", "multi_krum")
MOVABLE = 2  # patches that can change places
HIGHEST_RATE = 1000.0  # far beyond what trains anything, and still a number after scaling


class Puzzle(Config):
    """The schedule of shuffling in training, and how strongly positions are learnt. The defaults are the paper's.

    The defence says whether and how much is shuffled. The official code (yhlleo/MJP, ``main.py`` and ``train.sh``)
    differs: see ``OFFICIAL_CODE``.
    """

    # Share of batches that are shuffled; 1 in the paper, 0.5 in its code.
    probability: float = Field(1.0, gt=0.0, le=1.0)
    # Epochs without a puzzle at the start; none in the paper, those of the learning rate's warm-up in its code.
    warmup_epochs: int = Field(0, ge=0)
    # One per picture (Alg. 1 takes a picture), or one for the whole batch (the code).
    masks: Literal["picture", "batch"] = "picture"
    # Weight of the DAL loss, 0.01 (paper, section 4.2).
    localisation_weight: float = Field(0.01, ge=0.0, allow_inf_nan=False)
    # "constant" (paper), or "cosine" from the weight to its half after a linear warm-up from 0 (the code).
    localisation_schedule: Literal["constant", "cosine"] = "constant"


# The official code where the paper says otherwise. Its masks are ``mjp:mask_ratio=0.1``, and its regressor
# has two layers (``ModelConfig.localisation_layers``).
OFFICIAL_CODE = Puzzle(probability=0.5, warmup_epochs=20, masks="batch", localisation_schedule="cosine")


class Recipe(Config):
    """The recipe of MJP's Table 7 (supplement, Table 1), which is DeiT's; the defaults are its values.

    The learning rate is ``learning_rate * batch_size / 512``. Where the paper gives no number (gradient
    clipping, drop path, final and first learning rate) the official code's is taken.
    """

    epochs: int = Field(300, ge=1, le=MAX_COUNT)
    batch_size: int = Field(1024, ge=1)
    at_once: int = Field(0, ge=0, description="pictures of a batch that are computed together; 0 for all")
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
    precision: Arithmetic = Field("float32", description="of the networks; tf32 on CUDA alone")
    compile: bool = Field(False, description="torch.compile, worth it on CUDA")
    workers: int = Field(0, ge=0, description="processes that read pictures")

    @property
    def smallest_crop(self) -> float | None:
        """Return the share of a picture that every random crop keeps; None where pictures are shown whole."""
        return self.crop_scale if self.crop_scale < 1 else None

    @model_validator(mode="after")
    def _warm_up_ends(self) -> Self:
        if self.warmup_epochs >= self.epochs:
            raise ValueError(
                f"warmup_epochs={self.warmup_epochs} leaves nothing of epochs={self.epochs}: set a smaller "
                "recipe.warmup_epochs"
            )
        return self


class Learning(Config):
    """The part that every training has: the recipe of its steps, and the puzzle's schedule."""

    recipe: Recipe = Field(default_factory=Recipe)
    puzzle: Puzzle = Puzzle()

    def require_defences(self, pipeline: Pipeline, grid: int, epochs: int | None) -> None:
        """Refuse defences that this recipe leaves without effect or without their guarantee.

        Args:
            pipeline: All defences.
            grid: Patches per side.
            epochs: Of the whole training; None where nobody knows them before.

        Raises:
            ValueError: If nothing would ever be shuffled, or single pictures are protected and the recipe mixes or
                repeats them.
        """
        recipe = self.recipe
        for name in (defence.name for defence in pipeline.by_example):
            if recipe.mixup or recipe.cutmix:
                raise ValueError(
                    f"{name} protects single pictures, and mixed ones are of two: set mixup and cutmix to 0"
                )
            if recipe.repeats > 1:
                raise ValueError(
                    f"{name} protects single pictures, and a step holds {recipe.repeats} versions of each: set repeats "
                    "to 1"
                )
        if not pipeline.shuffles:
            return
        if int(grid**2 * pipeline.mask_ratio) < MOVABLE:
            raise ValueError(f"mask ratio {pipeline.mask_ratio:g} of {grid**2} patches moves none: take a greater one")
        if epochs is not None and self.puzzle.warmup_epochs >= epochs:
            raise ValueError(f"{self.puzzle.warmup_epochs} epochs without a puzzle leave none of {epochs} with one")


class PartitionConfig(Config):
    """The way in which pictures are dealt to clients, by flwr-datasets' partitioners."""

    # "iid" (shuffled, equal shares), "dirichlet" (Hsu et al., 2019; each class is dealt by proportions drawn from a
    # symmetric Dirichlet distribution), "pathological" (McMahan et al., 2017; each client has pictures of few
    # classes).
    scheme: Scheme = "iid"
    alpha: float = Field(0.3, gt=0, allow_inf_nan=False)  # concentration of the Dirichlet distribution
    classes_per_client: int = Field(2, ge=1)  # of the pathological scheme


class Training(Learning):
    """The training of a federation, by clients and server.

    Each round a share of the clients trains for ``local_epochs`` with the recipe and uploads how its weights changed;
    rounds x local epochs take the place of ``recipe.epochs``, and the learning rate runs over them. With "fedsgd" a
    client uploads the gradient of its next batch instead, and the server takes a step of plain SGD.
    """

    partition: PartitionConfig = PartitionConfig()
    strategy: Strategy = "fedavg"
    rounds: int = Field(10, ge=1, le=MAX_ROUNDS)
    local_epochs: int = Field(1, ge=1, le=MAX_COUNT)
    participation: float = Field(1.0, gt=0.0, le=1.0)  # share of the clients that take part in a round, at least one
    server_momentum: float = Field(0.9, ge=0.0, lt=1.0)  # of FedAvgM
    proximal_mu: float = Field(0.01, ge=0.0, allow_inf_nan=False)  # of FedProx
    # Share of a round's clients that may be hostile, for which trimmed_mean, krum and multi_krum are made.
    hostile: float = Field(0.3, ge=0.0, lt=0.5)
    # How many times as long as the median of a round's updates one of them may be, as a whole and in each tensor; a
    # longer one is refused. 0 refuses none.
    max_norm: float = Field(10.0, ge=0.0, allow_inf_nan=False)
    # How long the server waits for the clients of a round; by default ten times as long as half of them take.
    round_seconds: float | None = Field(None, gt=0, allow_inf_nan=False)
    # Share of a round's clients whose updates are needed; a round with fewer does not count, and is played again.
    quorum: float = Field(0.5, ge=0.0, le=1.0)
    # Who measures Top-1 after a round: the server on public pictures, or each site on its own, which stay there.
    validation: Literal["server", "sites"] = "server"
    records: Numbers = ()  # rounds in which everything that crosses the wire is recorded
    checkpoint_every: int = Field(1, ge=1)  # rounds between checkpoints

    @property
    def update(self) -> UpdateKind:
        """Tell what clients upload."""
        return "gradient" if self.strategy == "fedsgd" else "delta"

    @property
    def step(self) -> ClientStep:
        """Describe what is behind one upload as far as a step of single batches can: the recipe says the rest."""
        recipe = self.recipe
        return ClientStep(
            update=self.update,
            batch_size=recipe.batch_size,
            label_smoothing=recipe.label_smoothing,
            mixup=recipe.mixup,
            crop_scale=recipe.smallest_crop,
            arithmetic=recipe.precision,
        )

    @property
    def robust(self) -> bool:
        """Tell whether the strategy is one that a minority of hostile clients cannot lead anywhere."""
        return self.strategy in ROBUST

    @property
    def epochs(self) -> int | None:
        """Count the epochs of a client in all rounds; None in FedSGD, where its pictures decide."""
        return None if self.strategy == "fedsgd" else self.rounds * self.local_epochs

    def steps_per_upload(self, steps_per_epoch: int) -> int:
        """Count the steps behind an upload of a client.

        Args:
            steps_per_epoch: That it makes.
        """
        return 1 if self.epochs is None else self.local_epochs * steps_per_epoch

    @model_validator(mode="after")
    def _most_are_used(self) -> Self:
        if 0 < self.max_norm < 1:
            raise ValueError(
                f"max_norm={self.max_norm:g} would refuse the median update itself: take 1 or more, or 0 for no bound"
            )
        return self

    @model_validator(mode="after")
    def _rounds_come(self) -> Self:
        late = [server_round for server_round in self.records if not 1 <= server_round <= self.rounds]
        if late:
            raise ValueError(f"records of round {late[0]} were asked for, but there are rounds 1 to {self.rounds}")
        if self.epochs is not None and self.recipe.warmup_epochs >= self.epochs:
            raise ValueError(
                f"recipe.warmup_epochs={self.recipe.warmup_epochs} leaves nothing of {self.epochs} epochs "
                "(rounds x local epochs): set a smaller one"
            )
        return self

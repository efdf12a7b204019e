"""What a site lets out: a YAML file of its own, which no app and no server changes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from fedmjp.clients.replies import Kind
from fedmjp.config import Config
from fedmjp.defences.pipeline import Defences, Pipeline, pipeline_of
from fedmjp.errors import ConfigError
from fedmjp.yaml_files import read_yaml

Answer = Literal["say", "defend", "refuse"]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Clear(Config):
    """How much may leave in clear beside the arrays: metrics, settings, counters among the arrays, errors."""

    names: tuple[str, ...] | None = Field(
        None, description="of records, metrics and settings that may leave, and of text; by default usual metrics"
    )
    values: int = Field(64, ge=0, description="numbers in a reply, at most")
    bytes: int = Field(1024, ge=0, description="of text, in a reply, at most")
    digits: int = Field(4, ge=1, le=17, description="significant ones of real numbers")
    reply_bits: int = Field(512, ge=0, description="of all of that and of its names, in a reply, at most")
    run_bits: int = Field(262_144, ge=0, description="of the same in all replies of a run, at most")


class ListedArray(Config):
    """An array that may leave although none like it came in."""

    dtype: Literal["float16", "float32", "float64"] = "float32"
    shape: tuple[Annotated[int, Field(ge=0)], ...]


class Search(Config):
    """An attack that takes long, on some of the rounds."""

    every: int = Field(0, ge=0, description="try it in one round of so many; 0 never does")
    attack: str = Field("patch_embedding_wiener", description="see `fedmjp list attacks`")
    options: Mapping[str, Any] = {}


class Policy(Config):
    """What may leave a site.

    Where several answers apply, the strictest counts: refuse before defend, defend before say. ``defend`` acts where
    the gate's own tries got something back, or too few pictures are behind an upload: what other attacks read leaves as
    it is. With ``defend: always`` every update is defended, and what is said of pictures, features and labels counts
    for the defended one.
    """

    ledger: str = Field("gate.jsonl", description="file of verdicts; its place counts from the policy's folder")
    pictures: Answer = Field("refuse", description="where a picture comes back")
    features: Answer = Field("say", description="where what the last layer reads of a picture comes back")
    labels: Answer = Field("say", description="where labels come back")
    fewest_pictures: int = Field(8, ge=1, le=64, description="behind an upload; fewer count as pictures that come back")
    psnr: float = Field(20.0, gt=0, description="dB from which on a picture has come back")
    unseen: Answer = Field("say", description="where the batches behind an upload were not seen")
    unjudged: Literal["say", "refuse"] = Field("say", description="where arrays leave that did not come in")
    model_checks: Literal["off", "say", "refuse"] = Field("say", description="where a model that came in is suspicious")
    defences: Defences = Field((), description="what defends an upload, in order")
    defend: Literal["where_needed", "always"] = Field("where_needed", description="which updates are defended")
    kind: Kind | None = Field(
        None, description="what replies hold, `change` that of weights; by default weights, where they can be told"
    )
    budget: float | None = Field(None, gt=0, allow_inf_nan=False, description="epsilon over all uploads of the ledger")
    clear: Clear = Clear()
    arrays: dict[str, str | ListedArray] = Field(
        {}, description="beside those that came in: RECORD in the layout of another, or RECORD/ARRAY with a shape"
    )
    rounding: Literal["auto", "off", "grid"] = Field(
        "auto", description="of changes that leave; auto is the grid where the policy has defences, else off"
    )
    bounds: dict[str, tuple[float, float]] = Field(
        {"lr": (0.0, 1.0), "learning-rate": (0.0, 1.0)},
        description="of numbers in the server's messages, least and greatest; `learning-rate` also of the optimiser",
    )
    bundles: tuple[Sha256, ...] = Field((), description="SHA-256 of app bundles that may run; empty lets any run")
    search: Search = Search()

    @model_validator(mode="after")
    def _can_be_kept(self) -> Self:
        if any(low > high for low, high in self.bounds.values()):
            raise ValueError("a bound has a least value above its greatest: write [least, greatest]")
        defended = [name for name in ("pictures", "features", "labels", "unseen") if getattr(self, name) == "defend"]
        if self.defend == "always" and not self.defences:
            raise ValueError("defend: always needs defences, such as [local_dp:epsilon=8]")
        if defended and not self.defences:
            raise ValueError(f"{defended[0]}: defend needs defences, such as [local_dp:epsilon=8]")
        for defence in self.pipeline.defences:
            if set(defence.stages) != {"update"} or defence.needs_model:
                raise ValueError(f"defence {defence.name} does not work on updates, which are all that a gate changes")
        if self.budget is not None and self.multiplier is None:
            raise ValueError("a budget needs local_dp among the defences: nothing else has an epsilon to count")
        return self

    @property
    def rounds(self) -> bool:
        """Tell whether changes are rounded before they leave."""
        return bool(self.defences) if self.rounding == "auto" else self.rounding == "grid"

    @property
    def pipeline(self) -> Pipeline:
        """Build the defences."""
        return pipeline_of(self.defences)

    @property
    def multiplier(self) -> float | None:
        """Return the noise of a defended upload over what one client can change; None without a guarantee."""
        return next((float(defence.multiplier) for defence in self._private), None)

    @property
    def delta(self) -> float:
        """Return the delta at which epsilon is stated."""
        return next((float(defence.options.delta) for defence in self._private), 1e-5)

    @property
    def _private(self) -> list[Any]:
        return [defence for defence in self.pipeline.defences if defence.name == "local_dp"]

    @classmethod
    def read(cls, path: Path) -> tuple[Self, Path]:
        """Read a policy, and find where its ledger lies.

        Args:
            path: A YAML file; an empty one is the default policy.

        Returns:
            The policy, and the ledger's path.

        Raises:
            ConfigError: With the nearest key, if the file is no policy.
        """
        _, values = read_yaml(path)
        if not isinstance(values, Mapping | None):
            raise ConfigError(f"{path}: a policy is a group of keys, such as pictures: refuse")
        try:
            policy = cls.parse(values or {})
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        return policy, path.absolute().parent / policy.ledger

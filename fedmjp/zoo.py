"""Our own trained weights, by name: ``zoo:NAME`` stands wherever a file of weights is taken."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmjp.errors import CheckpointError, UnknownNameError, WeightsMissingError

PREFIX = "zoo:"
FOLDER_VARIABLE = "FEDMJP_WEIGHTS"
RUNS = Path("results") / "learning" / "runs"  # in a clone, a folder for each
CLONE = Path(__file__).parents[1]
TASK = "32 classes of Tiny ImageNet at 32 x 32 pixels"


@dataclass(frozen=True)
class ZooModel:
    """A small trained DeiT: its training, its accuracy, and the digest of its file."""

    name: str
    training: str
    defence: str  # that it was trained under
    patch_size: int
    top1: float  # percent of the validation pictures
    sha256: str
    architecture: str = "deit_micro"

    @property
    def model(self) -> dict[str, Any]:
        """Return the values of its ``ModelConfig``, without the weights."""
        return {
            "name": self.architecture,
            "image_size": 32,
            "patch_size": self.patch_size,
            "classes": 32,
            "localisation": "nonlinear" if self.defence == "mjp" else "none",
        }

    @property
    def source(self) -> Path:
        """Return the place of its file in fedmjp's repository."""
        return RUNS / self.name / "weights.safetensors"

    def find(self) -> Path | None:
        """Find its file on this machine: in the folder of weights, or in the clone that this runs from."""
        candidates = (weights_folder() / f"{self.name}.safetensors", CLONE / self.source)
        return next((path for path in candidates if path.is_file()), None)

    def file(self) -> Path:
        """Return its file.

        Raises:
            WeightsMissingError: If it is not on this machine, with what to do.
        """
        path = self.find()
        if path is None:
            raise WeightsMissingError(
                f"{PREFIX}{self.name} is not on this machine: get {self.source} of fedmjp's repository, and save it "
                f"here as {weights_folder() / self.name}.safetensors"
            )
        return path

    def check(self, path: Path, sha256: str) -> None:
        """Refuse a file that does not hold these weights.

        Args:
            path: Of the file.
            sha256: Of its content, as hex.

        Raises:
            CheckpointError: If the SHA-256 is another.
        """
        if sha256 != self.sha256:
            raise CheckpointError(
                f"{path} is not {PREFIX}{self.name}: its SHA-256 begins with {sha256[:16]}, expected "
                f"{self.sha256[:16]}; restore {self.source} of fedmjp's repository"
            )


# fmt: off
_MODELS = (
    ZooModel("central-jigsaw-0", "central, 10 epochs", "jigsaw", 4, 34.1,
             "75f9bc6d943601681a78e175a8adbd79c1566e310a405535c6ee02ac9a61a765"),
    ZooModel("central-mjp-0", "central, 10 epochs", "mjp", 4, 33.6,
             "46d0a61c45b5c3575acff2db71b54899f9e4e9bc49575515e216da8e76c585ea"),
    ZooModel("central-none-0", "central, 10 epochs", "none", 4, 35.6,
             "0d701821a4a1ad5f9a35d7c723511057db0730764bcf49fc4a5ab5360e3706f3"),
    ZooModel("central30-jigsaw-0", "central, 30 epochs", "jigsaw", 4, 43.3,
             "c53df3bb32832ffc095c65a2c202b895a1f5c80d1683104df28d654318d54817"),
    ZooModel("central30-mjp-0", "central, 30 epochs", "mjp", 4, 41.9,
             "b3b35f470e1348851af84353e4b687400c604222ce1bf2bd4c67c8aa0ce97b6c"),
    ZooModel("central30-none-0", "central, 30 epochs", "none", 4, 44.1,
             "5e3980ed395aba21746789ec4946f01b9a4e72e1c9f894df6382a06161b06713"),
    ZooModel("coarse-mjp-0", "central, 5 epochs", "mjp", 8, 24.1,
             "13afd3736e8c7d8d7f4ea23a6f48321d63e343ac591bf8b70a050cb52bc0931f"),
    ZooModel("coarse-none-0", "central, 5 epochs", "none", 8, 25.7,
             "5d0a985b40a72015c802d27707f69f4b01fef2d8799f905dcb7ff0e4908501e2"),
    ZooModel("dirichlet-jigsaw-0", "8 clients, Dirichlet 0.3, 10 rounds", "jigsaw", 4, 20.6,
             "e6d16f634cceaef3cf0206936d2e50ddcb169f3e1601719f346228df94b77b9b"),
    ZooModel("dirichlet-mjp-0", "8 clients, Dirichlet 0.3, 10 rounds", "mjp", 4, 20.3,
             "6659e8b7efa0d88b401f8fe1b08cfcedfa8a2afedf333be5f9d901fe4393f4ce"),
    ZooModel("dirichlet-none-0", "8 clients, Dirichlet 0.3, 10 rounds", "none", 4, 20.6,
             "0e9a817f3ab7100452e9580a4041d54d7d6de0806a4e0a57fd15ac6792a294a3"),
    ZooModel("iid-jigsaw-0", "8 clients, IID, 10 rounds", "jigsaw", 4, 19.6,
             "884393e099f2f0dc99d3ed821715ea495145087cae4343c0e39516b30ea5e0ed"),
    ZooModel("iid-mjp-0", "8 clients, IID, 10 rounds", "mjp", 4, 19.6,
             "2b229f2c55195ce42c7df19c453262b9013a138803aa1512d1aa14d9ebae4f2e"),
    ZooModel("iid-none-0", "8 clients, IID, 10 rounds", "none", 4, 18.6,
             "4fe1c200fc453773fa440f93dcc685dbee613ce5f6e10d4b0ae941d5a0dc3a02"),
    ZooModel("wide-mjp-0", "central, 6 epochs", "mjp", 4, 31.4,
             "6247023b478d7ef698e1b8ee606c5cf226c4568a3838d3b4d5d69cc0c57d10e3", "deit_mini"),
    ZooModel("wide-none-0", "central, 6 epochs", "none", 4, 31.1,
             "9f663a3c1d42ed13de31abd941fcaabd5b8f7fc7c1f380aeccfbe8adad338b4d", "deit_mini"),
)
# fmt: on
ZOO = {model.name: model for model in _MODELS}


def zoo_model(name: str) -> ZooModel:
    """Look a model up.

    Args:
        name: As ``zoo:NAME``, or without the prefix.

    Raises:
        UnknownNameError: If there is none of that name, with the nearest ones.
    """
    bare = name.removeprefix(PREFIX)
    if bare not in ZOO:
        raise UnknownNameError("model of the zoo", name, [PREFIX + candidate for candidate in ZOO])
    return ZOO[bare]


def weights_folder() -> Path:
    """Return the folder of files that were downloaded by hand: ``FEDMJP_WEIGHTS``, or one of the user's."""
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return Path(os.environ.get(FOLDER_VARIABLE) or data / "fedmjp" / "weights")

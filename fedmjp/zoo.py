"""Weights that we trained ourselves, by name: ``zoo:NAME`` stands wherever a file of weights is taken."""

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
    """A small trained DeiT: how it was trained, how well, and what its file must be."""

    name: str
    training: str
    defence: str  # that it was trained under
    patch_size: int
    top1: float  # percent of the validation pictures
    sha256: str
    architecture: str = "deit_micro"

    @property
    def model(self) -> dict[str, Any]:
        """The values of its ``ModelConfig``, without the weights."""
        return {
            "name": self.architecture,
            "image_size": 32,
            "patch_size": self.patch_size,
            "classes": 32,
            "localisation": "nonlinear" if self.defence == "mjp" else "none",
        }

    @property
    def source(self) -> Path:
        """Where its file lies in fedmjp's repository."""
        return RUNS / self.name / "weights.safetensors"

    def find(self) -> Path | None:
        """Its file, if it is on this machine: in the folder of weights, or in the clone that this runs from."""
        candidates = (weights_folder() / f"{self.name}.safetensors", CLONE / self.source)
        return next((path for path in candidates if path.is_file()), None)

    def file(self) -> Path:
        """Its file; WeightsMissingError if it is not on this machine, with what to do."""
        path = self.find()
        if path is None:
            raise WeightsMissingError(
                f"{PREFIX}{self.name} is not on this machine: get {self.source} of fedmjp's repository, and save it "
                f"here as {weights_folder() / self.name}.safetensors"
            )
        return path

    def check(self, path: Path, sha256: str) -> None:
        """CheckpointError if a file's SHA-256 is not that of these weights."""
        if sha256 != self.sha256:
            raise CheckpointError(
                f"{path} is not {PREFIX}{self.name}: its SHA-256 begins with {sha256[:16]}, expected "
                f"{self.sha256[:16]}; restore {self.source} of fedmjp's repository"
            )


# fmt: off
_MODELS = (
    ZooModel("central-jigsaw-0", "central, 10 epochs", "jigsaw", 4, 34.2,
             "08906a9624ac1a1e19a50aff72fffed1ae7f5f4c7a099ab1d93b2a9dbaeeec26"),
    ZooModel("central-mjp-0", "central, 10 epochs", "mjp", 4, 34.2,
             "e647babeaaea5397d52892a6841e2c60e9302fb051cb951fe3de03ac09b2ae2d"),
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
    """Look ``zoo:NAME`` up; UnknownNameError if there is none, with the nearest names."""
    bare = name.removeprefix(PREFIX)
    if bare not in ZOO:
        raise UnknownNameError("model of the zoo", name, [PREFIX + known for known in ZOO])
    return ZOO[bare]


def weights_folder() -> Path:
    """Where files that were downloaded by hand lie: ``FEDMJP_WEIGHTS``, or a folder of the user's."""
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return Path(os.environ.get(FOLDER_VARIABLE) or data / "fedmjp" / "weights")

"""Small Flower apps that tests write into folders of their own: somebody else's, as far as an audit can tell."""

from pathlib import Path
from textwrap import dedent

PROJECT = """\
[project]
name = "small-app"
version = "1.0.0"
dependencies = []

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "somebody"

[tool.flwr.app.components]
serverapp = "small.parts:server"
clientapp = "small.parts:client"
"""
# A vision transformer that takes one step of SGD on one batch; ANSWER is what else its clients answer with.
VIT = """\
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from timm.models.vision_transformer import VisionTransformer
from torchvision.transforms import Compose, Normalize, ToTensor

BATCH = {batch}
scale = Compose([ToTensor(), Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))])
server, client = ServerApp(), ClientApp()


def network():
    torch.manual_seed(0)
    return VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=2, num_classes=5)


def pictures(partition):
    import numpy as np
    source = np.random.default_rng(partition)
    waves = source.uniform(1, 4, (BATCH, 1, 1, 3)) * np.linspace(0, 3, 32)[None, :, None, None]
    rows = source.uniform(1, 4, (BATCH, 1, 1, 3)) * np.linspace(0, 3, 32)[None, None, :, None]
    made = (127 + 60 * np.sin(waves) + 60 * np.cos(rows)).astype(np.uint8)
    return torch.stack([scale(picture) for picture in made]), torch.arange(BATCH) % 5


@client.train()
def train(message, context):
    model = network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), lr=message.content["config"]["lr"])
    images, labels = pictures(context.node_config["partition-id"])
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimiser.step()
    content = {{
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({{"num-examples": BATCH, "loss": float(loss)}}),
    }}
    {answer}
    return Message(RecordDict(content), reply_to=message)


@server.main()
def main(grid, context):
    strategy = FedAvg(fraction_evaluate=0.0)
    arrays = ArrayRecord(network().state_dict())
    strategy.start(grid=grid, initial_arrays=arrays, train_config=ConfigRecord({{"lr": 0.05}}), num_rounds=50)
"""


def write_app(folder: Path, code: str) -> Path:
    """Write an app of one module into a folder that is made here."""
    (folder / "small").mkdir(parents=True)
    (folder / "small" / "__init__.py").touch()
    (folder / "small" / "parts.py").write_text(dedent(code), encoding="utf-8")
    (folder / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    return folder


def vit_app(folder: Path, *, batch: int, answer: str = "") -> Path:
    """Write an app that trains a small vision transformer."""
    return write_app(folder, VIT.format(batch=batch, answer=answer or "pass"))

"""Checkpoints that others have published: which there are, where they would lie on this machine, how to get them."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub

from fedmjp.config import Checkpoint
from fedmjp.errors import CheckpointError, UnknownNameError, WeightsMissingError
from fedmjp.models.architectures import TIMM, architecture
from fedmjp.zoo import FOLDER_VARIABLE, weights_folder

HUB_FILES = ("model.safetensors", "pytorch_model.bin")
SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")
# Files of releases end in the first digits of their SHA-256.
_NAMED_HASH = re.compile(r"-([0-9a-f]{8})\.pth$")

# The listed ones of timm's: where on the Hugging Face hub they are, and the file's name in releases if it is known.
# It is what timm's own list says of them, which takes seconds to import.
OF_TIMM = {
    "deit_tiny": ("timm/deit_tiny_patch16_224.fb_in1k", "deit_tiny_patch16_224-a1311bcf.pth"),
    "deit_small": ("timm/deit_small_patch16_224.fb_in1k", "deit_small_patch16_224-cd65a155.pth"),
    "vit_small": ("timm/vit_small_patch16_224.augreg_in21k_ft_in1k", ""),
    "swin_tiny": ("timm/swin_tiny_patch4_window7_224.ms_in1k", "swin_tiny_patch4_window7_224.pth"),
    "resnet50": ("timm/resnet50.a1_in1k", "resnet50_a1_0-14fe96d1.pth"),
    f"{TIMM}deit_base_patch16_224": ("timm/deit_base_patch16_224.fb_in1k", "deit_base_patch16_224-b5f2ef4d.pth"),
    f"{TIMM}vit_base_patch16_224": ("timm/vit_base_patch16_224.augreg2_in21k_ft_in1k", ""),
}


@dataclass(frozen=True)
class KnownCheckpoint:
    """Published weights."""

    name: str
    model: str  # the model that they fit, at 224 pixels and with 1000 classes
    unknown_embedding: bool
    source: str  # where they come from, in words
    repository: str = ""  # on the Hugging Face hub; empty if they are not there
    release: str = ""  # the file's name in releases; empty if it is unknown

    @property
    def saved_as(self) -> str:
        """Return the file's name in the folder of weights, without its ending."""
        return self.name.removeprefix(TIMM)

    def find(self) -> Path | None:
        """Find the file on this machine, in the places of ``list_places``; None if it is not there."""
        return next((path for path in self._candidates() if path.is_file()), None)

    def fetch(self) -> Path:
        """Find the file, or download it.

        Raises:
            WeightsMissingError: If it cannot be downloaded, with what to do by hand.
        """
        present = self.find()
        if present is not None:
            return present
        if not self.repository:
            raise WeightsMissingError(f"{self.name} must be downloaded by hand: {self._by_hand()}")
        try:
            return Path(huggingface_hub.hf_hub_download(self.repository, HUB_FILES[0]))
        except Exception as error:  # noqa: BLE001 (the hub's client lets errors of several libraries through)
            raise WeightsMissingError(
                f"{self.name} could not be downloaded ({type(error).__name__}); on a machine with a network: "
                f"{self._by_hand()}"
            ) from None

    def _by_hand(self) -> str:
        ending = SUFFIXES[0] if self.repository else SUFFIXES[1]
        target = f"{HUB_FILES[0]} of {self.source}" if self.repository else f"the model of {self.source}"
        return f"get {target}, and save it here as {weights_folder() / self.saved_as}{ending}"

    def _candidates(self) -> Iterator[Path]:
        releases = [self.release] if self.release else []
        yield from (weights_folder() / name for name in [*(self.saved_as + end for end in SUFFIXES), *releases])
        for name in HUB_FILES if self.repository else ():
            cached = huggingface_hub.try_to_load_from_cache(self.repository, name)
            if isinstance(cached, str):
                yield Path(cached)
        yield from (_torch_cache() / name for name in releases)


OFFICIAL = KnownCheckpoint("mjp_deit_small", "deit_small", True, "yhlleo/MJP, the Google Drive folder in its README")


def known_checkpoints() -> list[KnownCheckpoint]:
    """List the published checkpoints by name; besides, ``find_checkpoint`` finds timm's of every ``timm:NAME``."""
    return [*(_on_hub(name, *places) for name, places in OF_TIMM.items()), OFFICIAL]


def find_checkpoint(name: str) -> KnownCheckpoint:
    """Look a published checkpoint up.

    Args:
        name: One that ``known_checkpoints`` lists, or ``timm:NAME``.

    Raises:
        UnknownNameError: If there is none of that name; the message offers the nearest.
        ConfigError: If it is a model of timm's that cannot be used here.
        WeightsMissingError: If timm has no weights of that model.
    """
    if name == OFFICIAL.name:
        return OFFICIAL
    if name in OF_TIMM:
        return _on_hub(name, *OF_TIMM[name])
    if not name.startswith(TIMM):
        raise UnknownNameError("checkpoint", name, [*OF_TIMM, OFFICIAL.name, f"{TIMM}NAME"])
    return _on_hub(name, *places_in_timm(name))


def list_places() -> list[str]:
    """List the places where weights are looked for, in this order."""
    return [
        f"{weights_folder()} (set {FOLDER_VARIABLE} for another)",
        f"the Hugging Face cache, {huggingface_hub.constants.HF_HUB_CACHE}",
        f"torch's cache, {_torch_cache()}",
    ]


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a file as a checkpoint.

    Args:
        path: Whose name may tell the beginning of its SHA-256.

    Raises:
        CheckpointError: If its content has another SHA-256.
    """
    checkpoint = Checkpoint.of(path)
    stated = _NAMED_HASH.search(path.name)
    if stated and not checkpoint.sha256.startswith(stated[1]):
        raise CheckpointError(
            f"{path} is damaged: its SHA-256 begins with {checkpoint.sha256[:8]}, its name says {stated[1]}; "
            "download it again"
        )
    return checkpoint


def places_in_timm(name: str) -> tuple[str, str]:
    """Ask timm where the weights of a model are: on the Hugging Face hub, and the file's name in releases.

    Args:
        name: Of the model, ``timm:NAME``.

    Raises:
        ConfigError: If it is a model of timm's that cannot be used here.
        WeightsMissingError: If timm has no weights of that model.
    """
    import timm  # noqa: PLC0415 (takes seconds)

    config: Any = timm.get_pretrained_cfg(architecture(name).timm_name)
    repository = str(config.hf_hub_id or "") if config else ""
    if not repository:
        raise WeightsMissingError(f"timm has no weights of {name}: name one of `fedmjp weights`")
    release = Path(config.url or "").name
    return repository, release if release.endswith(".pth") else ""


def _on_hub(name: str, repository: str, release: str) -> KnownCheckpoint:
    return KnownCheckpoint(name, name, False, f"{repository} on the Hugging Face hub", repository, release)


def _torch_cache() -> Path:
    """Return the folder where torch keeps files of releases, by the rules of ``torch.hub.get_dir``."""
    caches = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return Path(os.environ.get("TORCH_HOME", f"{caches}/torch")).expanduser() / "hub" / "checkpoints"

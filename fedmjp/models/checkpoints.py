"""Trained weights from a file: everything fits and everything is used, or there is an error that says what not."""

import hashlib
import io
import pickle
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from fedmjp.config import Checkpoint
from fedmjp.errors import CheckpointError
from fedmjp.models import names
from fedmjp.models.classifier import Classifier, PositionedClassifier
from fedmjp.models.layouts import INDEX_EMBEDDING, LOCALISATION, Layout, in_our_layout

TORCH_FILES = (".pth", ".pt", ".bin", ".tar")  # the last as of MoCo's and torch's examples: .pth.tar
NESTED_UNDER = ("model", "state_dict")
INTEGERS = (".num_batches_tracked", ".relative_position_index", "n_averaged")  # may be no floating point numbers
RELATIVE_POSITIONS = "relative_position_bias_table"
LISTED = 10

_REGRESSORS = {
    (): ("no localisation regressor", "localisation to none"),
    ("weight",): ("a linear localisation regressor", "localisation to linear"),
    ("0.weight", "2.weight"): (
        "a nonlinear localisation regressor of two layers",
        "localisation to nonlinear and localisation-layers to 2",
    ),
    ("0.weight", "2.weight", "4.weight"): (
        "a nonlinear localisation regressor of three layers",
        "localisation to nonlinear and localisation-layers to 3",
    ),
}


def load_checkpoint(model: Classifier, checkpoint: Checkpoint, *, ignored: Collection[str] = ()) -> Layout:
    """Give a model the weights of a file.

    Files are safetensors or torch's own, which are read without running pickled code. They hold a
    state dict, or one under ``model`` or ``state_dict`` beside the state of the training. Names may
    have the marks of torch's wrappers (``module.``, ``_orig_mod.`` and the like), or begin with ``backbone.`` or with
    the name that a training framework gave to the network. The layouts are timm's (also DeiT's), with a
    ``pos_embed`` of (1, tokens, dim); fedmjp's own, with ``unknown_embedding`` besides for MJP; that
    of the official MJP code, whose ``pos_embed.weight`` (tokens + 1, dim), or ``absolute_pos_embed.weight``
    in Swin, has the unknown embedding as its last row; and that of the original Swin code. A localisation
    regressor (DAL) is left out where the model has none: logits do not depend on it.

    Models of the official MJP code take pictures normalised by ImageNet's mean and standard
    deviation, its ViT-S too: they are ``deit_small`` here, not ``vit_small``.

    Args:
        model: Gets them in place.
        checkpoint: A file of weights, and its digest.
        ignored: Names of weights that stay as they are in the model, as timm has it.

    Raises:
        CheckpointError: If the file cannot be read or is not the one that was meant, or its weights
            do not fit the model, all of them.
    """
    layout, weights = in_our_layout(_state_dict(checkpoint), checkpoint.path)
    if model.localisation is None:
        weights = {name: weight for name, weight in weights.items() if not name.startswith(LOCALISATION)}
    usable = {name: weight for name, weight in weights.items() if name not in ignored}
    expected = {name.removeprefix("backbone."): weight for name, weight in model.state_dict().items()}
    required = {name: weight for name, weight in expected.items() if name not in ignored}
    _check_defence(usable, model, checkpoint.path)
    _check_options(usable, required, checkpoint.path)
    _check_fit(usable, required, model, checkpoint.path)
    values = {**expected, **usable}
    model.load_state_dict({name: values[name.removeprefix("backbone.")] for name in model.state_dict()})
    return layout


def holds_unknown_embedding(checkpoint: Checkpoint) -> bool:
    """Tell whether weights are of a model that was trained with MJP.

    Args:
        checkpoint: A file of weights, and its digest.

    Raises:
        CheckpointError: If the file cannot be read.
    """
    return names.UNKNOWN_EMBEDDING in read_weights(checkpoint)


def read_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Read all weights of a file in one of these layouts, under our names without ``backbone.``.

    Args:
        checkpoint: A file of weights, and its digest.

    Raises:
        CheckpointError: If the file cannot be read or is not the one that was meant.
    """
    return in_our_layout(_state_dict(checkpoint), checkpoint.path)[1]


def _state_dict(checkpoint: Checkpoint) -> dict[str, Tensor]:
    path = Path(checkpoint.path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    digest = hashlib.sha256(content).hexdigest()
    if digest != checkpoint.sha256:
        raise CheckpointError(
            f"{path} has SHA-256 {digest}, the configuration asks for {checkpoint.sha256}: "
            "restore that file, or configure the new one"
        )
    loaded = _unnested(parse_tensors(content, path), path)
    odd = [name for name, value in loaded.items() if not _is_weight(name, value)]
    if odd or not loaded:
        raise CheckpointError(f"{path} is not a state dict of weights: {_first(odd) if odd else 'it is empty'}")
    spoilt = [name for name, value in loaded.items() if not bool(torch.isfinite(value).all())]
    if spoilt:
        raise CheckpointError(f"{path} holds NaN or infinite weights: {_first(spoilt)}; take another")
    return loaded


def _is_weight(name: object, value: object) -> bool:
    if not isinstance(name, str) or not isinstance(value, Tensor):
        return False
    return value.is_floating_point() or name.endswith(INTEGERS)


def parse_tensors(content: bytes, path: Path) -> Any:
    """Parse a file of tensors by the ending of its name; pickled code in it is never run.

    Args:
        content: Of the file.
        path: Its name.

    Raises:
        CheckpointError: If it is damaged, needs pickled code, or has another ending.
    """
    if path.suffix not in (".safetensors", *TORCH_FILES):
        raise CheckpointError(f"{path} must end in .safetensors, {', '.join(TORCH_FILES)}, which says how to read it")
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load(content)
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        code = re.search(r"GLOBAL (\S+)", str(error))
        if code is None:
            raise CheckpointError(f"{path} is damaged, or no file of torch's") from None
        raise CheckpointError(
            f"{path} needs pickled code ({code[1]}), which is never run: if you trust the file, load it yourself "
            "and save its weights alone, with safetensors.torch.save_file(checkpoint['model'], ...)"
        ) from None
    except Exception as error:  # noqa: BLE001 (torch answers damaged files with errors of every kind)
        reason = str(error).splitlines() or [type(error).__name__]
        raise CheckpointError(f"{path} is damaged: {reason[0]}") from None


def _unnested(loaded: Any, path: Path) -> dict[Any, Any]:
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{path} holds a {type(loaded).__name__} instead of a state dict")
    inner = [name for name in NESTED_UNDER if isinstance(loaded.get(name), Mapping)]
    if len(inner) > 1:
        raise CheckpointError(
            f"{path} holds several state dicts, {' and '.join(inner)}: save the one that is meant alone"
        )
    return dict(loaded[inner[0]] if inner else loaded)


def _check_defence(weights: Mapping[str, Tensor], model: Classifier, path: str) -> None:
    if names.UNKNOWN_EMBEDDING in weights and not model.defended:
        raise CheckpointError(
            f"{path} holds MJP's unknown position embedding: it fits a model that has one, as under defence mjp"
        )
    if names.UNKNOWN_EMBEDDING not in weights and model.defended:
        raise CheckpointError(
            f"{path} has no unknown position embedding: it fits a model without one, as under no defence"
        )


def _check_options(weights: Mapping[str, Tensor], required: Mapping[str, Tensor], path: str) -> None:
    if (INDEX_EMBEDDING in weights) != (INDEX_EMBEDDING in required):
        has, value = ("an", "true") if INDEX_EMBEDDING in weights else ("no", "false")
        raise CheckpointError(f"{path} has {has} index embedding: set index-embedding to {value}")
    layers, required_layers = _regressor(weights), _regressor(required)
    if layers != required_layers:
        words, remedy = _REGRESSORS.get(layers, ("a localisation regressor that is not MJP's", "localisation to none"))
        raise CheckpointError(f"{path} has {words}, the model has {_REGRESSORS[required_layers][0]}: set {remedy}")


def _regressor(weights: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Name the layers of a localisation regressor."""
    layers = [name.removeprefix(f"{LOCALISATION}layers.") for name in weights if name.startswith(LOCALISATION)]
    return tuple(sorted(name for name in layers if not name.endswith("bias")))


def _check_fit(weights: Mapping[str, Tensor], required: Mapping[str, Tensor], model: Classifier, path: str) -> None:
    missing, unexpected = required.keys() - weights.keys(), weights.keys() - required.keys()
    shapes = {
        name: f"{name} is {tuple(weights[name].shape)} instead of {tuple(required[name].shape)}"
        for name in sorted(required.keys() & weights.keys())
        if weights[name].shape != required[name].shape
    }
    faults = [
        *(f"{name} is missing" for name in sorted(missing)),
        *(f"{name} is unexpected" for name in sorted(unexpected)),
        *shapes.values(),
    ]
    if faults:
        another = "take the model that it is a checkpoint of"
        remedy = another if missing | unexpected else _remedy(weights, shapes, model) or another
        raise CheckpointError(f"{path} does not fit the model: {_first(faults)}; {remedy}")


def _remedy(weights: Mapping[str, Tensor], misshapen: Collection[str], model: Classifier) -> str:
    """Say what to do where all names are right; nothing where shapes differ that no option changes."""
    position_names = (model.positions_name,) if isinstance(model, PositionedClassifier) else ()
    positions = {name for name in misshapen if name.endswith((*position_names, INDEX_EMBEDDING, RELATIVE_POSITIONS))}
    head = f"{model.backbone.pretrained_cfg['classifier']}."
    if any(not name.startswith(head) and name not in positions for name in misshapen):
        return ""
    remedies = []
    if positions:
        remedies.append("position embeddings are not resampled, take image size and patch size of the training")
    if f"{head}bias" in misshapen:
        remedies.append(f"set classes to {len(weights[f'{head}bias'])}")
    return "; ".join(remedies)


def _first(entries: Collection[str]) -> str:
    """List the first few entries, and count the remaining."""
    listed = list(entries)
    more = f" and {len(listed) - LISTED} more" if len(listed) > LISTED else ""
    return ", ".join(str(entry) for entry in listed[:LISTED]) + more

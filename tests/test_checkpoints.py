"""Trained weights from files: every layout gives the same model, and what does not fit is refused by name."""

import argparse
import copy
import hashlib
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from fedmjp.config import Checkpoint, Config, ModelConfig
from fedmjp.errors import CheckpointError, ConfigError
from fedmjp.models.build import build, build_vit
from fedmjp.models.checkpoints import load_checkpoint
from fedmjp.models.classifier import VitClassifier
from tests.conftest import SMALL

Weights = dict[str, Tensor]
TRAINED = 7  # another seed than that of the models that are filled
DIM = 192


def config_of(
    checkpoint: Checkpoint | None, name: str = "deit_tiny", defence: str = "none", **values: object
) -> ModelConfig:
    return ModelConfig.parse(
        {"name": name, "unknown_embedding": defence == "mjp", "weights": checkpoint, **SMALL, **values}
    )


@lru_cache
def trained(defence: str = "none", name: str = "deit_tiny") -> VitClassifier:
    return build_vit(config_of(None, name, defence, seed=TRAINED))


def plain(model: VitClassifier) -> Weights:
    """As timm and DeiT name them."""
    return dict(model.backbone.state_dict())


def official(model: VitClassifier, *, regressor: str = "nonlinear") -> Weights:
    """As the official MJP code has them: an embedding whose last row is the unknown one, and its regressor."""
    made = plain(model)
    embedding = nn.Embedding.from_pretrained(
        torch.cat([made.pop("pos_embed")[0], model.unknown_embedding[None].detach()])
    )
    layers = {
        "linear": nn.Linear(DIM, 2),
        "nonlinear": nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, 2)),
    }
    holder = nn.ModuleDict({"pos_embed": embedding})
    if regressor in layers:
        holder["dlocr"] = nn.ModuleDict({"layers": layers[regressor]})
    return made | dict(holder.state_dict())


def prefixed(prefix: str, weights: Mapping[str, Tensor]) -> Weights:
    return {prefix + name: weight for name, weight in weights.items()}


def saved(path: Path, content: Any) -> Checkpoint:
    if path.suffix == ".safetensors":
        save_file({name: weight.contiguous() for name, weight in content.items()}, path)
    else:
        torch.save(content, path)
    return Checkpoint.of(path)


def assert_same_logits(loaded: VitClassifier, expected: VitClassifier) -> None:
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(64).repeat(2, 1) % 3 == 0 if expected.defended else None
    with torch.no_grad():
        assert torch.equal(loaded(images, mask), expected(images, mask))


LAYOUTS: dict[str, Callable[[Weights], Any]] = {
    "plain": lambda weights: weights,
    "under model": lambda weights: {"model": weights, "epoch": 3},
    "under state_dict": lambda weights: {"state_dict": weights, "arch": "deit"},
    "module.": lambda weights: prefixed("module.", weights),
    "backbone.": lambda weights: prefixed("backbone.", weights),
    "module.backbone.": lambda weights: {"model": prefixed("module.backbone.", weights)},
    "_orig_mod.": lambda weights: prefixed("_orig_mod.", weights),
    "module._orig_mod.": lambda weights: prefixed("module._orig_mod.", weights),
    "model.": lambda weights: {"state_dict": prefixed("model.", weights), "pytorch-lightning_version": "2.5"},
    "average": lambda weights: prefixed("module.", weights) | {"n_averaged": torch.tensor(3)},
}


@pytest.mark.parametrize(
    ("layout", "suffix"), [*((each, ".pth") for each in LAYOUTS), ("plain", ".pt"), ("plain", ".bin")]
)
def test_every_layout_of_a_plain_checkpoint_gives_the_same_logits(tmp_path: Path, layout: str, suffix: str) -> None:
    checkpoint = saved(tmp_path / f"weights{suffix}", LAYOUTS[layout](plain(trained())))
    assert_same_logits(build_vit(config_of(checkpoint)), trained())


compiled = partial(torch.compile, backend="eager")


def compiled_inside(model: nn.Module) -> nn.Module:
    for place, block in enumerate(model.blocks):
        model.blocks[place] = compiled(block)
    return model


def checkpointed_inside(model: nn.Module) -> nn.Module:
    wrapped = nn.Module()
    wrapped.add_module("_checkpoint_wrapped_module", model)
    return wrapped


@pytest.mark.parametrize(
    "wrap",
    [compiled, nn.DataParallel, lambda model: nn.DataParallel(compiled(model)), AveragedModel,
     lambda model: compiled(AveragedModel(model)), compiled_inside,
     checkpointed_inside, lambda model: nn.ModuleDict({"net": model})],
    ids=["compile", "parallel", "both", "average", "compiled average", "compiled blocks", "checkpointed", "inside"],
)  # fmt: skip
def test_torchs_own_wrappers_give_the_same_logits(tmp_path: Path, wrap: Callable[[nn.Module], nn.Module]) -> None:
    state = wrap(copy.deepcopy(trained().backbone)).state_dict()
    assert state.keys() != plain(trained()).keys()
    assert_same_logits(build_vit(config_of(saved(tmp_path / "weights.pth", state))), trained())


@pytest.mark.parametrize("layout", ["plain", "module.", "backbone."])
def test_safetensors_give_the_same_logits(tmp_path: Path, layout: str) -> None:
    checkpoint = saved(tmp_path / "weights.safetensors", LAYOUTS[layout](plain(trained())))
    assert_same_logits(build_vit(config_of(checkpoint)), trained())


@pytest.mark.parametrize(
    ("layout", "regressor"), [*((each, "nonlinear") for each in LAYOUTS), ("plain", "linear"), ("plain", "none")]
)
def test_official_mjp_checkpoints_give_the_same_logits_under_a_mask(
    tmp_path: Path, layout: str, regressor: str
) -> None:
    weights = official(trained("mjp"), regressor=regressor)
    checkpoint = saved(tmp_path / "weights.pth", LAYOUTS[layout](weights))
    assert_same_logits(build_vit(config_of(checkpoint, defence="mjp")), trained("mjp"))


@pytest.mark.parametrize("defence", ["none", "mjp"])
def test_our_own_weights_come_back(tmp_path: Path, defence: str) -> None:
    checkpoint = saved(tmp_path / "weights.safetensors", trained(defence).state_dict())
    assert_same_logits(build_vit(config_of(checkpoint, defence=defence)), trained(defence))


def test_a_timm_model_answers_as_it_did(tmp_path: Path, generator: torch.Generator) -> None:
    original = timm.create_model("deit_tiny_patch16_224", img_size=64, patch_size=8, num_classes=10).eval()
    model = build_vit(config_of(saved(tmp_path / "timm.pth", original.state_dict()), classes=10))
    images = torch.rand(1, 3, 64, 64, generator=generator)
    assert torch.allclose(model(images), original((images - model.mean) / model.std))


def test_the_regressor_of_a_plain_model_is_left_out_and_half_precision_widened(tmp_path: Path) -> None:
    extra = {f"dlocr.layers.{name}": torch.zeros(2) for name in ("weight", "bias")}
    halved = {name: weight.half() for name, weight in plain(trained()).items()}
    model = build_vit(config_of(saved(tmp_path / "weights.pth", halved | extra)))
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    for name, weight in plain(model).items():
        assert torch.equal(weight, halved[name].float()), name


@pytest.mark.parametrize(
    ("regressor", "options"),
    [
        ("linear", {"localisation": "linear"}),
        ("nonlinear", {"localisation": "nonlinear", "localisation_layers": 2}),
        ("none", {"localisation": "pca"}),
    ],
)
def test_the_official_regressor_is_taken_by_a_model_that_has_it(
    tmp_path: Path, regressor: str, options: dict[str, object]
) -> None:
    weights = official(trained("mjp"), regressor=regressor)
    model = build_vit(config_of(saved(tmp_path / "weights.pth", weights), defence="mjp", **options))
    assert model.localisation is not None
    loaded = {f"dlocr.{name}": weight for name, weight in model.localisation.state_dict().items()}
    held = {name for name in weights if name.startswith("dlocr.")}
    assert loaded.keys() == held
    assert all(torch.equal(loaded[name], weights[name]) for name in held)


@pytest.mark.parametrize(
    ("regressor", "options", "message"),
    [
        (
            "nonlinear",
            {"localisation": "linear"},
            (
                "a nonlinear localisation regressor of two layers, the model has a linear localisation regressor: "
                "set localisation to nonlinear and localisation-layers to 2"
            ),
        ),
        ("nonlinear", {"localisation": "nonlinear"}, "of two layers, the model has .* of three layers: .*layers to 2"),
        ("linear", {"localisation": "pca"}, "the model has no localisation regressor: set localisation to linear"),
        ("none", {"localisation": "linear"}, "has no localisation regressor, the model .*: set localisation to none"),
        ("none", {"index_embedding": True}, "has no index embedding: set index-embedding to false"),
    ],
)
def test_options_that_a_checkpoint_does_not_have_are_named(
    tmp_path: Path, regressor: str, options: dict[str, object], message: str
) -> None:
    checkpoint = saved(tmp_path / "weights.pth", official(trained("mjp"), regressor=regressor))
    with pytest.raises(CheckpointError, match=message):
        build_vit(config_of(checkpoint, defence="mjp", **options))


@pytest.mark.parametrize(
    ("name", "defence", "options"),
    [
        ("deit_micro", "mjp", {"localisation": "nonlinear", "index_embedding": True}),
        ("deit_micro", "none", {"localisation": "linear"}),
        ("swin_tiny", "none", {"patch_size": 4}),
        ("swin_tiny", "mjp", {"patch_size": 4, "localisation": "linear", "index_embedding": True}),
        ("resnet50", "none", {}),
        ("timm:vit_tiny_patch16_224", "mjp", {"patch_size": 16}),
    ],
)
def test_every_weight_of_our_own_layout_comes_back(
    tmp_path: Path, name: str, defence: str, options: dict[str, object]
) -> None:
    source = build(config_of(None, name, defence, seed=TRAINED, **options))
    checkpoint = saved(tmp_path / "weights.safetensors", source.state_dict())
    loaded = build(config_of(checkpoint, name, defence, **options)).state_dict()
    assert loaded.keys() == source.state_dict().keys()
    assert all(torch.equal(loaded[each], weight) for each, weight in source.state_dict().items())


def test_a_regressor_is_left_out_where_the_model_has_none(tmp_path: Path) -> None:
    source = build_vit(config_of(None, defence="mjp", seed=TRAINED, localisation="nonlinear"))
    checkpoint = saved(tmp_path / "weights.safetensors", source.state_dict())
    assert_same_logits(build_vit(config_of(checkpoint, defence="mjp")), trained("mjp"))


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("swin_tiny", {"patch_size": 4, "image_size": 32}, "not resampled, take image size"),
        ("swin_tiny", {"patch_size": 4, "classes": 5}, "set classes to 1000"),
        ("resnet50", {"classes": 5}, "set classes to 1000"),
    ],
)
def test_remedies_know_other_models_too(tmp_path: Path, name: str, values: dict[str, int], message: str) -> None:
    patch_size = {"patch_size": values.get("patch_size", 8)}
    checkpoint = saved(tmp_path / "weights.pth", build(config_of(None, name, **patch_size)).state_dict())
    with pytest.raises(CheckpointError, match=message):
        build(config_of(checkpoint, name, **values))


@pytest.mark.parametrize("source", ["deit_tiny", "deit_tiny_april"])
def test_april_models_leave_out_the_first_norm_alone(tmp_path: Path, source: str) -> None:
    checkpoint = saved(tmp_path / "weights.pth", plain(trained(name=source)))
    assert_same_logits(build_vit(config_of(checkpoint, "deit_tiny_april")), trained(name="deit_tiny_april"))
    weights = plain(trained()) | {"blocks.1.norm3.weight": torch.zeros(DIM)}
    with pytest.raises(CheckpointError, match=r"model: blocks\.1\.norm3\.weight is unexpected; take the model"):
        build_vit(config_of(saved(tmp_path / "other.pth", weights), "deit_tiny_april"))


@pytest.mark.parametrize("variant", ["deit_tiny_zero_positions", "deit_tiny_without_positions_april"])
@pytest.mark.parametrize("source", ["deit_tiny", "deit_tiny_without_positions"])
def test_variants_without_positions_never_take_any(tmp_path: Path, variant: str, source: str) -> None:
    model = build_vit(config_of(saved(tmp_path / "weights.pth", plain(trained(name=source))), variant))
    assert_same_logits(model, trained(name=variant))
    assert not model.has_positions or not model.backbone.pos_embed.any()


def changed(**values: Tensor | None) -> Weights:
    weights = plain(trained()) | {name.replace("__", "."): value for name, value in values.items() if value is not None}
    return {name: value for name, value in weights.items() if values.get(name.replace(".", "__"), value) is not None}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            lambda: changed(pos_embed=torch.zeros(1, 197, DIM)),
            r"\(1, 197, 192\) instead of \(1, 65, 192\).*not resampled",
        ),
        (
            lambda: changed(head__weight=torch.zeros(5, DIM), head__bias=torch.zeros(5)),
            r"\(5,\) instead.*set classes to 5",
        ),
        (lambda: changed(cls_token=torch.zeros(1, 1, 5)), r"cls_token is \(1, 1, 5\).*take the model"),
        (lambda: changed(norm__bias=None), r"model: norm\.bias is missing; take the model that it is a checkpoint of"),
        (lambda: changed(index_embed=torch.zeros(1, 65, DIM)), "has an index embedding: set index-embedding to true"),
        (lambda: changed(other=torch.zeros(3)), "model: other is unexpected; take the model"),
        (lambda: {"head.bias": torch.zeros(5)}, r"and 142 more"),
        (lambda: changed(head__bias=torch.full((1000,), float("nan"))), r"NaN or infinite weights.*head\.bias"),
        (lambda: changed(head__bias=torch.zeros(1000, dtype=torch.int64)), r"not a state dict of weights: head\.bias"),
        (lambda: {"epoch": 3}, "not a state dict of weights: epoch"),
        (lambda: {1: torch.zeros(1)}, "not a state dict of weights: 1"),
        (dict, "it is empty"),
        (lambda: [torch.zeros(1)], "holds a list instead of a state dict"),
        (lambda: {"model": changed(), "state_dict": changed()}, "several state dicts, model and state_dict"),
        (lambda: changed() | {"module.norm.bias": torch.zeros(DIM)}, r"holds norm\.bias twice"),
        (
            lambda: {"model": changed(), "args": argparse.Namespace()},
            r"pickled code \(argparse\.Namespace\), which is never",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, content: Callable[[], Any], message: str) -> None:
    checkpoint = saved(tmp_path / "weights.pth", content())
    with pytest.raises(CheckpointError, match=message) as caught:
        build_vit(config_of(checkpoint))
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "weights.pth") in str(caught.value)


@pytest.mark.parametrize("layout", [official, lambda model: dict(model.state_dict())])
def test_an_mjp_checkpoint_fits_mjp_alone(tmp_path: Path, layout: Callable[[VitClassifier], Weights]) -> None:
    checkpoint = saved(tmp_path / "weights.pth", layout(trained("mjp")))
    with pytest.raises(CheckpointError, match="it fits a model that has one, as under defence mjp"):
        build_vit(config_of(checkpoint))


def test_a_plain_checkpoint_does_not_fit_mjp(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "weights.pth", plain(trained()))
    with pytest.raises(
        CheckpointError, match="no unknown position embedding: it fits a model without one, as under no defence"
    ):
        build_vit(config_of(checkpoint, defence="mjp"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("weights.npz", b"", r"must end in \.safetensors, \.pth"),
        ("weights.pth", b"no checkpoint", "weights.pth is damaged"),
        ("weights.pth", b"", "weights.pth is damaged"),
        ("weights.safetensors", b"no checkpoint", "weights.safetensors is damaged"),
    ],
)
def test_files_that_are_no_checkpoints_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        build_vit(config_of(Checkpoint.of(tmp_path / name)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["zipped", "legacy", "safetensors"])
def test_files_cut_anywhere_are_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("weights.safetensors" if kind == "safetensors" else "weights.pth")
    saved(path, {"a": torch.zeros(3, 3), "b": torch.ones(5)})
    if kind == "legacy":
        torch.save({"a": torch.zeros(3, 3), "b": torch.ones(5)}, path, _use_new_zipfile_serialization=False)
    whole = path.read_bytes()
    for length in range(0, len(whole) - 1, 7):
        path.write_bytes(whole[:length])
        # Half of a legacy file may name half of a function.
        with pytest.raises(CheckpointError, match=r"is damaged|needs pickled code"):
            load_checkpoint(trained(), Checkpoint.of(path))


def test_another_file_under_the_same_path_is_refused(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "weights.pth", changed())
    other = saved(tmp_path / "weights.pth", changed(head__bias=torch.ones(1000)))
    with pytest.raises(
        CheckpointError, match=f"has SHA-256 {other.sha256}, the configuration asks for {checkpoint.sha256}"
    ):
        build_vit(config_of(checkpoint))


def test_a_checkpoint_is_its_content_wherever_it_lies(tmp_path: Path) -> None:
    class Holder(Config):
        inner: ModelConfig

    first, second = (saved(tmp_path / name, {"x": torch.zeros(1)}) for name in ("a.safetensors", "b.safetensors"))
    third = saved(tmp_path / "a.safetensors", {"x": torch.ones(1)})
    assert first.sha256 == hashlib.sha256((tmp_path / "b.safetensors").read_bytes()).hexdigest()
    assert Path(first.path) == tmp_path / "a.safetensors"
    digests = [
        [config_of(each).digest(), Holder(inner=config_of(each)).digest()] for each in (first, second, third, None)
    ]
    assert digests[0] == digests[1]
    assert len({digest for pair in digests for digest in pair}) == 6
    stored = config_of(first).model_dump(mode="json")
    assert ModelConfig.parse(stored) == config_of(first), "what is stored says where the file lies"


def test_a_missing_file_and_a_wrong_digest_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone\.pth cannot be read: No such file"):
        Checkpoint.of(tmp_path / "gone.pth")
    with pytest.raises(CheckpointError, match=r"gone\.pth cannot be read: No such file"):
        build_vit(config_of(Checkpoint(path=str(tmp_path / "gone.pth"), sha256="0" * 64)))
    with pytest.raises(ConfigError, match=r"weights\.sha256 = 'abc'"):
        ModelConfig.parse({"name": "deit_tiny", "weights": {"path": "x", "sha256": "abc"}})

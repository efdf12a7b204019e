"""Users' own vision transformers: what is found in them, and that closed forms get their own pictures back."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from skimage.metrics import peak_signal_noise_ratio
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torchvision.transforms import v2 as transforms

import fedmjp
from fedmjp.attacks import ATTACKS
from fedmjp.data.selection import open_source
from fedmjp.errors import AttackNotApplicableError, BadInputError
from fedmjp.models.adopt import Adopted, adopt
from fedmjp.private import PrivateBatch
from fedmjp.records import Upload, weights_digest
from fedmjp.seeds import scoped_randomness
from fedmjp.settings import Picture
from fedmjp.threat import ThreatModel
from tests.conftest import small_model

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE, CLASSES = 64, 1000


class Cutter(nn.Module):
    """Patches as vectors of pixels, whose three channels follow each other (einops' "p1 p2 c")."""

    def __init__(self, side: int, order: tuple[int, ...]) -> None:
        super().__init__()
        self.side, self.order = side, order

    def forward(self, pictures: Tensor) -> Tensor:
        rows = pictures.unfold(2, self.side, self.side).unfold(3, self.side, self.side)  # (b, c, gy, gx, y, x)
        pixels = rows.permute(0, 2, 3, *((1, 4, 5)[axis] for axis in self.order))
        return pixels.flatten(3).flatten(1, 2)


class Homemade(nn.Module):
    """A hand-written transformer with names of its own and a linear patch embedding.

    Where patches have 8 x 8 pixels, every layer has their 192 inputs: any could be the one that embeds patches.
    """

    def __init__(
        self,
        order: tuple[int, ...] = (1, 2, 0),
        before: nn.Module | None = None,
        by_columns: bool = False,
        side: int = 8,
        grid: int = 8,
    ) -> None:
        super().__init__()
        self.scissors, self.before = Cutter(side, order), before or nn.Identity()
        self.lift = nn.Linear(3 * side**2, 192)
        self.where = nn.Parameter(0.02 * torch.randn(grid**2, 192))
        self.stages = nn.ModuleList(nn.TransformerEncoderLayer(192, 3, 192, batch_first=True) for _ in range(2))
        self.verdict = nn.Linear(192, CLASSES)
        self.by_columns = by_columns

    def forward(self, pictures: Tensor) -> dict[str, Tensor]:
        cut = self.scissors(pictures.mT if self.by_columns else pictures)
        tokens = self.lift(self.before(cut)) + self.where
        for stage in self.stages:
            tokens = stage(tokens)
        return {"scores": self.verdict(tokens.mean(1))}


class Grid(nn.Module):
    """A hand-written transformer that takes so many patches in any rows and columns, and does not say which."""

    def __init__(self, patches: int, *, before: int = 0, cut: tuple[int, int] = (8, 8)) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, 192, cut, cut)
        self.first = nn.Parameter(torch.randn(1, before, 192))
        self.where = nn.Parameter(0.02 * torch.randn(1, before + patches, 192))
        layer = nn.TransformerEncoderLayer(192, 3, 384, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.verdict = nn.Linear(192, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        patches = self.cut(pictures).flatten(2).mT
        tokens = torch.cat([self.first.expand(len(patches), -1, -1), patches], dim=1) + self.where
        return self.verdict(self.body(tokens).mean(1))


def of_timm(name: str = "vit_tiny_patch16_224", **changes: Any) -> nn.Module:
    return timm.create_model(name, **{"img_size": SIZE, **changes})


def of_torchvision() -> nn.Module:
    shape = {"num_layers": 2, "num_heads": 3, "hidden_dim": 192, "mlp_dim": 384}
    model = torchvision.models.VisionTransformer(image_size=SIZE, patch_size=8, **shape)
    nn.init.trunc_normal_(model.heads.head.weight, std=0.02)  # torchvision begins with a head of zeros
    return model


def of_transformers() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    shape = {"hidden_size": 192, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 384}
    return ViTForImageClassification(ViTConfig(image_size=SIZE, patch_size=16, num_labels=CLASSES, **shape))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "timm": of_timm,
    "timm without a row for the class token": lambda: of_timm(no_embed_class=True),
    "timm without a class token": lambda: of_timm(class_token=False, global_pool="avg"),
    "two tokens before the patches": lambda: of_timm("deit_tiny_distilled_patch16_224"),
    "registers": lambda: of_timm(reg_tokens=4),
    "torchvision": of_torchvision,
    "transformers": of_transformers,
    "hand-written": Homemade,
    "hand-written, channel first": lambda: Homemade(order=(0, 1, 2)),
    "hand-written, column before row": lambda: Homemade(order=(2, 1, 0)),
}


def made(make: Callable[[], nn.Module]) -> nn.Module:
    with scoped_randomness(3):
        return make()


def logits(output: Any) -> Tensor:
    if isinstance(output, Mapping):
        return output["scores"] if "scores" in output else output["logits"]
    return output if isinstance(output, Tensor) else output[0]


@pytest.fixture(scope="module")
def clean() -> Tensor:
    return open_source("bundled", size=SIZE, classes=CLASSES).load("cat").image[None]


def gradients(module: nn.Module, picture: Tensor) -> dict[str, Tensor]:
    """As a client computes them, with nothing of ours."""
    normalised = (picture - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    module.zero_grad()
    F.cross_entropy(logits(module(normalised)), torch.tensor([281])).backward()
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


def attacked(name: str, upload: Upload, adopted: Adopted, threat: ThreatModel | None = None) -> Tensor:
    attack = ATTACKS.get(name)()
    found = attack.run([upload], adopted, threat or ThreatModel(), generator=torch.Generator())
    return found[0].images


def psnr(clean: Tensor, recovered: Tensor) -> float:
    return peak_signal_noise_ratio(clean.numpy(), recovered.numpy(), data_range=1.0)


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_a_users_own_gradient_gives_the_picture_back(make: Callable[[], nn.Module], clean: Tensor) -> None:
    module = made(make).eval()
    adopted = adopt(module, mean=MEAN, std=STD)
    upload = adopted.upload(gradients(module, clean))
    recovered = attacked("patch_embedding", upload, adopted)
    assert psnr(clean, recovered) > 40
    assert recovered.min() >= 0
    assert recovered.max() <= 1


@pytest.mark.parametrize("make", [of_torchvision, Homemade])
def test_weight_changes_of_two_steps_give_the_picture_back(make: Callable[[], nn.Module], clean: Tensor) -> None:
    module = made(make).eval()
    adopted = adopt(module, mean=MEAN, std=STD)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    for _ in range(2):
        step = gradients(module, clean)
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    change = {name: parameter.detach() - before[name] for name, parameter in module.named_parameters() if name in step}
    upload = adopted.upload(change, kind="delta")
    threat = ThreatModel(update="delta", local_steps=2, local_learning_rate=0.1)
    assert psnr(clean, attacked("patch_embedding_wiener", upload, adopted, threat)) > 30


OF_PICTURES = [
    name
    for name in ATTACKS
    if not (kind := ATTACKS.get(name)).needs_network and kind.reveals == "pictures" and name != "feature_inversion"
]  # that one runs the module itself (``fedmjp.models.layers.LayeredNetwork``)


@pytest.mark.parametrize("name", OF_PICTURES)
def test_every_attack_that_does_not_need_the_network_takes_adopted_models(name: str, clean: Tensor) -> None:
    module = made(of_torchvision).eval()
    adopted = adopt(module, mean=MEAN, std=STD)
    upload = adopted.upload(gradients(module, clean))
    if ATTACKS.get(name).role == "bound":
        with pytest.raises(AttackNotApplicableError, match="the upload has no tensor"):
            attacked(name, upload, adopted)
    else:
        assert (psnr(clean, attacked(name, upload, adopted)) > 40) == (name != "grey")


@pytest.mark.parametrize("name", ["gradient_matching", "mjp_span", "breaching_invertinggradients", "april"])
def test_attacks_that_need_the_network_refuse_adopted_models(name: str, clean: Tensor) -> None:
    module = made(of_torchvision).eval()
    adopted = adopt(module, mean=MEAN, std=STD)
    upload = adopted.upload(gradients(module, clean))
    with pytest.raises(AttackNotApplicableError, match="needs the network behind the tokens"):
        attacked(name, upload, adopted)


def test_our_own_model_adopted_by_its_structure_has_what_it_says_itself() -> None:
    ours = small_model()
    adopted = adopt(ours.backbone)
    for field in ("pixels", "patch_size", "prefix_tokens", "has_positions", "defended"):
        assert getattr(adopted, field) == getattr(ours, field), field
    assert torch.equal(adopted.mean, ours.mean), "timm's models say how pictures are normalised"
    assert torch.equal(adopted.std, ours.std)
    known = dict(ours.named_parameters())
    for name, parameter in adopted.named_parameters():
        assert torch.equal(parameter, known[name]), name
        assert torch.equal(adopted.get_parameter(name), known[name]), name


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (of_timm, ("patch_embed.proj", "pos_embed", "cls_token", "blocks", "head")),
        (of_torchvision, ("conv_proj", "encoder.pos_embedding", "class_token", "encoder.layers", "heads.head")),
        (Homemade, ("lift", "where", None, "stages", "verdict")),
        (
            of_transformers,
            (
                "vit.embeddings.patch_embeddings.projection",
                "vit.embeddings.position_embeddings",
                "vit.embeddings.cls_token",
                "vit.layers",
                "classifier",
            ),
        ),
    ],
    ids=["timm", "torchvision", "hand-written", "transformers"],
)
def test_parts_are_found_under_their_own_names(make: Callable[[], nn.Module], parts: tuple[str | None, ...]) -> None:
    adopted = adopt(made(make), mean=MEAN, std=STD)
    assert tuple(adopted.parts.values()) == parts


def test_adoption_changes_neither_the_module_nor_the_global_generator() -> None:
    module = made(Homemade).train()  # with dropout, which draws from the global generator unless it is put aside
    before, state = weights_digest(module.state_dict()), torch.get_rng_state()
    adopt(module, mean=MEAN, std=STD)
    assert weights_digest(module.state_dict()) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert all(part.training for part in module.modules())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_head_of_zeros_does_not_hide_what_embeds() -> None:
    module = made(of_torchvision)
    nn.init.zeros_(module.heads.head.weight)
    assert adopt(module, mean=MEAN, std=STD).pixels == (SIZE, SIZE)


def relative_swin() -> nn.Module:
    return timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 1, 1, 1))


def without_positions() -> nn.Module:
    return of_timm(pos_embed="none")


class PerPicture(nn.Module):
    def forward(self, pictures: Tensor) -> Tensor:
        return F.layer_norm(pictures, pictures.shape[1:])


class Flipped(nn.Module):
    def forward(self, pictures: Tensor) -> Tensor:
        return pictures.flip(1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torchvision.models.resnet18(), "found no patch embedding: looked for a Conv2d on 3 channels"),
        (lambda: of_timm("vit_tiny_r_s16_p8_224"), "found no patch embedding: .* a Linear like .* is none"),
        (relative_swin, r"found no position embedding: looked for a parameter \(1, n, 96\)"),
        (without_positions, r"found no position embedding: looked for a parameter \(1, n, 192\)"),
        (
            lambda: nn.Sequential(PerPicture(), of_timm()),
            r"changes pictures before 1.patch_embed.proj embeds them, and not each channel by one factor and summand",
        ),
        (
            lambda: nn.Sequential(Flipped(), of_timm()),
            r"changes pictures before 1.patch_embed.proj embeds them, and not each channel by one factor and summand",
        ),
        (
            lambda: Grid(64, cut=(8, 16)),
            "found no patch embedding: cut cuts patches of 8 x 16 pixels; closed forms need",
        ),
        (lambda: Homemade(before=nn.LayerNorm(192)), "found no patch embedding"),
        # Of so many random values the norm is nearly 1: a random picture must show it all the same.
        (
            lambda: Homemade(before=nn.RMSNorm(12288, elementwise_affine=False), side=64, grid=2),
            "found no patch embedding",
        ),
        (lambda: Homemade(by_columns=True), "found no patch embedding"),
    ],
    ids=[
        "convolutions",
        "convolutions first",
        "swin",
        "no positions",
        "normalises each picture",
        "other order of channels",
        "oblong patches",
        "norm first",
        "large norm first",
        "by columns",
    ],
)
def test_what_cannot_be_attacked_is_refused_in_one_line(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(BadInputError, match=message) as refusal:
        adopt(made(make), mean=MEAN, std=STD)
    assert "\n" not in str(refusal.value)


def test_a_module_that_cannot_be_run_on_pictures_is_refused_with_its_own_error() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = of_timm()

        def forward(self, pictures: Tensor) -> Tensor:
            raise KeyError("bool_masked_pos")

    with pytest.raises(BadInputError, match="picture of 64 x 64 failed: 'bool_masked_pos'"):
        adopt(made(Picky), mean=MEAN, std=STD)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "does not say how pictures are normalised .* give both mean and std, such as"),
        ({"mean": MEAN}, "give both mean and std"),
        ({"mean": MEAN, "std": (0.2, 0.2, 0.0)}, "std above 0"),
        ({"mean": (0.5,), "std": (0.5,)}, "three finite numbers"),
        ({"mean": (0.5, 0.5, float("nan")), "std": STD}, "three finite numbers"),
    ],
)
def test_mean_and_std_must_be_known(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        adopt(made(of_torchvision), **given)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda own: own.pop("encoder.pos_embedding"), "has no tensor 'encoder.pos_embedding'"),
        (lambda own: own.update({"conv_proj.weight": None}), "has no tensor 'conv_proj.weight'"),
        (
            lambda own: own.update({"vit.conv_proj.weight": own.pop("conv_proj.weight")}),
            "did you mean 'vit.conv_proj.weight'",
        ),
        (
            lambda own: own.update({"encoder.pos_embedding": own["encoder.pos_embedding"][:, 1:]}),
            r"has shape \(1, 64, 192\), the module's has \(1, 65, 192\)",
        ),
        (
            lambda own: own.update({"conv_proj.weight": own["conv_proj.weight"].flatten(1)}),
            r"has shape \(192, 192\), the module's has \(192, 3, 8, 8\)",
        ),
        (lambda own: own["conv_proj.weight"].fill_(float("nan")), "'conv_proj.weight' holds NaN"),
        (lambda own: own["heads.head.bias"].fill_(float("inf")), "'heads.head.bias' holds NaN or infinite"),
        (lambda own: own.update({"conv_proj.weight": torch.ones(192, 3, 8, 8).int()}), "is a torch.int32"),
        (lambda own: own.update({"conv_proj.weight": [1.0]}), "is a list"),
    ],
)
def test_an_upload_that_does_not_fit_is_refused_by_the_users_own_names(
    spoil: Callable[[dict[str, Any]], object], message: str, clean: Tensor
) -> None:
    module = made(of_torchvision)
    own: dict[str, Any] = gradients(module, clean)
    spoil(own)
    with pytest.raises(BadInputError, match=message):
        adopt(module, mean=MEAN, std=STD).upload(own)


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, AveragedModel, lambda module: torch.compile(module, backend="eager")]
)
def test_what_torchs_wrappers_add_to_names_makes_no_difference(
    wrap: Callable[[nn.Module], nn.Module], clean: Tensor
) -> None:
    wrapped = wrap(made(of_torchvision)).eval()
    bare, own = made(of_torchvision).eval(), gradients(wrapped, clean)
    for module, tensors in ((bare, own), (wrapped, gradients(bare, clean)), (wrapped, own)):
        adopted = adopt(module, mean=MEAN, std=STD)
        assert psnr(clean, attacked("patch_embedding", adopted.upload(tensors), adopted)) > 40


def test_two_tensors_are_enough(clean: Tensor) -> None:
    module = made(of_transformers).eval()
    adopted = adopt(module, mean=MEAN, std=STD)
    embeddings = "vit.embeddings."
    needed = (f"{embeddings}position_embeddings", f"{embeddings}patch_embeddings.projection.weight")
    own = gradients(module, clean)
    upload = adopted.upload({name: own[name] for name in needed})
    assert psnr(clean, attacked("patch_embedding", upload, adopted)) > 40


def test_other_numbers_of_pictures_than_the_threat_model_has_are_refused(clean: Tensor) -> None:
    module = made(of_torchvision)
    adopted = adopt(module, mean=MEAN, std=STD)
    with pytest.raises(AttackNotApplicableError, match="of 2 pictures"):
        attacked("patch_embedding", adopted.upload(gradients(module, clean), examples=2), adopted)


def oblong(height: int, width: int) -> Tensor:
    """A photograph (1, 3, height, width)."""
    whole = open_source("bundled", size=128, classes=CLASSES).load("cat").image
    return whole[None, :, :height, :width]


def of_transformers_oblong() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    shape = {"hidden_size": 192, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 384}
    return ViTForImageClassification(ViTConfig(image_size=(72, 128), patch_size=8, num_labels=CLASSES, **shape))


@pytest.mark.parametrize(
    ("make", "sides"),
    [
        (lambda: of_timm(img_size=(72, 128), patch_size=8, depth=2), (72, 128)),
        (lambda: of_timm(img_size=(128, 72), patch_size=8, depth=2, dynamic_img_size=True), (128, 72)),
        (lambda: of_timm(img_size=(72, 128), patch_size=8, depth=2, reg_tokens=4), (72, 128)),
        (of_transformers_oblong, (72, 128)),
        (lambda: Grid(144), (72, 128)),
        (lambda: Grid(144), (128, 72)),
        (lambda: Grid(144), (96, 96)),
        (lambda: Grid(128, before=1), (64, 128)),
        (lambda: Grid(128, before=5), (128, 64)),
    ],
)
def test_patches_of_pictures_that_are_no_squares_come_back_in_their_places(
    make: Callable[[], nn.Module], sides: tuple[int, int]
) -> None:
    module, picture = made(make).eval(), oblong(*sides)
    own = gradients(module, picture)
    for adopted in (adopt(module, mean=MEAN, std=STD), adopt(module, mean=MEAN, std=STD, pixels=sides)):
        recovered = fedmjp.attack("patch_embedding", adopted.upload(own), adopted).images
        assert psnr(picture, recovered) > 40
    assert adopted.pixels == sides
    assert attacked("grey", adopted.upload(own), adopted).shape == picture.shape
    with pytest.raises(AttackNotApplicableError, match=r"no prior|there is none for (pictures of|image size)"):
        attacked("patch_embedding_wiener", adopted.upload(own), adopted)


def test_a_size_that_the_positions_are_not_of_is_refused() -> None:
    with pytest.raises(BadInputError, match="pictures of 64 x 64 are not what where is of: 144 patches of 8 pixels"):
        adopt(made(lambda: Grid(144)), mean=MEAN, std=STD, pixels=(64, 64))


@pytest.mark.parametrize("pixels", [64, (64,), (64, 0), (64.0, 64.0), "6464"])
def test_pixels_that_are_no_sides_are_refused(pixels: Any, clean: Tensor) -> None:
    module = made(of_timm)
    own = gradients(module, clean)
    with pytest.raises(BadInputError, match="are not height and width of pictures, such as"):
        adopt(module, mean=MEAN, std=STD, pixels=pixels)
    with pytest.raises(BadInputError, match="are not height and width of pictures, such as"):
        fedmjp.recover(own["patch_embed.proj.weight"], own["pos_embed"], mean=MEAN, std=STD, pixels=pixels)


WHOLE = {"mean": (0.0,) * 3, "std": (1 / 255,) * 3}


@pytest.mark.parametrize(
    ("before", "enters", "stated"),
    [
        (nn.Identity(), lambda picture: 255 * picture, WHOLE),
        (nn.Identity(), lambda picture: 255 * picture, {"mean": (0,) * 3, "std": (1,) * 3}),
        (nn.Identity(), lambda picture: (255 * picture - 0.5) / 0.5, {"mean": (0.5,) * 3, "std": (0.5,) * 3}),
        (nn.Identity(), lambda picture: 65_535 * picture, {"mean": (0,) * 3, "std": (1,) * 3}),
        (transforms.Normalize(MEAN, STD), lambda picture: picture, {"mean": (0,) * 3, "std": (1,) * 3}),
        (transforms.ToDtype(torch.float32, scale=True), lambda picture: (255 * picture).round().byte(), WHOLE),
        (transforms.Normalize((0,) * 3, (255,) * 3), lambda picture: 255 * picture, WHOLE),
    ],
    ids=["0..255", "0..255, not stated", "0..255, stated as of 0..1", "16 bits", "inside", "uint8", "divided inside"],
)
def test_values_come_back_on_the_scale_on_which_pictures_enter(
    before: nn.Module, enters: Callable[[Tensor], Tensor], stated: dict[str, Any], clean: Tensor
) -> None:
    """Torchvision's own transforms stand for what modules do inside."""
    module = nn.Sequential(before, made(of_timm)).eval()
    F.cross_entropy(module(enters(clean)), torch.tensor([281])).backward()
    adopted = adopt(module, **stated)
    own = {name: parameter.grad for name, parameter in module.named_parameters()}
    upload = adopted.upload(own)
    for name in ("patch_embedding", "patch_embedding_wiener"):
        assert psnr(clean, fedmjp.attack(name, upload, adopted).images) > 45
    entrance = [own[f"1.{name}"] for name in ("patch_embed.proj.weight", "pos_embed")]
    if isinstance(before, nn.Identity):
        assert psnr(clean[0], fedmjp.recover(*entrance, **stated)) > 45


def test_a_picture_that_was_normalised_by_itself_is_refused_with_numbers_that_stretch_it(clean: Tensor) -> None:
    module = made(of_timm).eval()
    F.cross_entropy(module((clean - clean.mean()) / clean.std()), torch.tensor([281])).backward()
    own = {name: parameter.grad for name, parameter in module.named_parameters()}
    adopted = adopt(module, mean=(0.5,) * 3, std=(0.5,) * 3)
    values = (
        r"mean 0.5,0.5,0.5 and std 0.5,0.5,0.5 the picture's values run from -\d.* instead of 0 to 1: .* take mean "
    )
    with pytest.raises(AttackNotApplicableError, match=f"patch_embedding: with {values}") as refusal:
        fedmjp.attack("patch_embedding", adopted.upload(own), adopted)
    entrance = (own["patch_embed.proj.weight"], own["pos_embed"])
    with pytest.raises(BadInputError, match=f"^with {values}"):
        fedmjp.recover(*entrance, mean=(0.5,) * 3, std=(0.5,) * 3)
    mean, std = (
        [
            float(number)
            for number in re.search(rf"take .*{name} ([\d.,]+)", str(refusal.value))[1].strip(",").split(",")
        ]
        for name in ("mean", "std")
    )
    stretched = fedmjp.attack("patch_embedding", adopted.upload(own), adopt(module, mean=mean, std=std)).images[0]
    assert torch.equal(fedmjp.recover(*entrance, mean=None, std=None).isfinite(), torch.ones(3, SIZE, SIZE).bool())
    assert torch.corrcoef(torch.stack([stretched.flatten(), clean.flatten()]))[0, 1] > 0.999


def test_dropped_patches_are_said_and_the_others_scored_by_themselves(clean: Tensor) -> None:
    module = made(lambda: of_timm(patch_size=8, patch_drop_rate=0.25)).train()
    with scoped_randomness(7):
        own = gradients(module, clean)
    adopted = adopt(module, mean=MEAN, std=STD)
    with pytest.warns(UserWarning, match="16 of 64 patches have no gradient, as of dropped tokens: nothing shows them"):
        result = fedmjp.attack("patch_embedding", adopted.upload(own), adopted)
    assert result.visible is not None
    assert int(result.visible.sum()) == 48 * 64
    nothing = torch.zeros(1, 1, dtype=torch.int64)
    private = PrivateBatch(clean, clean, nothing.bool(), nothing, nothing[0], ("cat",), Picture.CLEAN)
    scores = fedmjp.score(result, private, metrics=("psnr",))
    assert scores["psnr"] < 30
    assert scores["psnr_visible"] > 60
    where = result.visible[0].expand(3, -1, -1)
    expected = peak_signal_noise_ratio(clean[0][where].numpy(), result.images[0][where].numpy(), data_range=1.0)
    assert float(scores["psnr_visible"]) == pytest.approx(expected, abs=1e-3)

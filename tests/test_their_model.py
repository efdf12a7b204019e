"""`fedmjp attack --module ... --gradient ...`: a user's own model and gradient, as a user meets them."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fedmjp
from fedmjp.cli import main
from fedmjp.errors import BadInputError
from fedmjp.models.factories import load_module
from fedmjp.records import Upload, weights_digest
from tests.test_adopt import MEAN, SIZE, STD, logits

BAD_INPUT = 2
NORMALISED = ("--mean", ",".join(map(str, MEAN)), "--std", ",".join(map(str, STD)))

# What a user has: a file of one's own, three libraries, names of one's own.
THEIRS = """
import timm, torch, torchvision
from torch import nn
from transformers import ViTConfig, ViTForImageClassification
from fedmjp.seeds import scoped_randomness

class Own(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.cut = nn.Conv2d(3, 96, 8, 8)
        self.start = nn.Parameter(torch.randn(1, 1, 96))
        self.places = nn.Parameter(0.02 * torch.randn(1, 65, 96))
        layers = (nn.TransformerEncoderLayer(96, 4, 192, dropout=0.0, batch_first=True) for _ in range(depth))
        self.body = nn.Sequential(*layers)
        self.classify = nn.Linear(96, 10)

    def forward(self, pictures):
        patches = self.cut(pictures).flatten(2).mT
        tokens = torch.cat([self.start.expand(len(patches), -1, -1), patches], dim=1) + self.places
        return self.classify(self.body(tokens)[:, 0])

class Fixed(Own):
    def __init__(self):
        super().__init__()
        places = self.places.detach()
        del self.places
        self.register_buffer("places", places)

def drawn(make, seed=3):
    with scoped_randomness(seed):
        return make()

def of_timm():
    return drawn(lambda: timm.create_model("vit_tiny_patch16_224", img_size=64, patch_size=8, depth=2))

def of_torchvision():
    shape = dict(num_layers=2, num_heads=3, hidden_dim=96, mlp_dim=192)
    model = drawn(lambda: torchvision.models.VisionTransformer(image_size=64, patch_size=8, **shape))
    drawn(lambda: nn.init.normal_(model.heads.head.weight))
    return model

def of_transformers():
    shape = dict(hidden_size=96, num_hidden_layers=2, num_attention_heads=3, intermediate_size=192)
    return drawn(lambda: ViTForImageClassification(ViTConfig(image_size=64, patch_size=8, num_labels=10, **shape)))

def hand_written():
    return drawn(Own)

def other_weights():
    return drawn(Own, seed=4)

def shallow():
    return drawn(lambda: Own(depth=1))

def fixed_positions():
    return drawn(Fixed)

ready = drawn(Own)
number = 3

def text():
    return "a model"

def broken():
    raise RuntimeError("weights.pt is not here\\nsecond line")

def leaves():
    raise SystemExit(3)
"""


class Theirs(NamedTuple):
    file: Path
    folder: Path
    private: Tensor  # (1, 3, 64, 64), of 8 bits as a file holds it


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    """The user's file, and a private picture."""
    folder = tmp_path_factory.mktemp("theirs")
    (folder / "vits.py").write_text(THEIRS)
    pixels = (fedmjp.bundled_pictures(1, size=SIZE)[0].image * 255).round().byte()
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(folder / "private.png")
    return Theirs(folder / "vits.py", folder, pixels[None].float() / 255)


def client(module: nn.Module, pictures: Tensor) -> dict[str, Tensor]:
    """Computes a gradient, with nothing of ours."""
    module.zero_grad()
    normalised = (pictures - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    F.cross_entropy(logits(module(normalised)), torch.arange(len(pictures))).backward()
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


@pytest.fixture(scope="module")
def gradient(theirs: Theirs) -> Path:
    """What the client uploaded of the hand-written module."""
    module = load_module(f"{theirs.file}:hand_written")
    path = theirs.folder / "gradient.safetensors"
    save_file(client(module, theirs.private), path, metadata={"weights": weights_digest(module.state_dict())})
    return path


@pytest.fixture
def attack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Runs the command in this process; its output goes to ``out``."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> int:
        words = ["fedmjp", "attack", "--output", "out", *map(str, arguments)]
        monkeypatch.setattr("sys.argv", words if "--attack" in words else [*words, "--attack", "patch_embedding"])
        with pytest.raises(SystemExit) as end:
            main()
        return int(end.value.code or 0)

    return run


def pixels_of(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture)


@pytest.mark.parametrize("kind", ["of_timm", "of_torchvision", "of_transformers", "hand_written"])
def test_the_picture_comes_back_to_the_last_bit_of_eight(
    kind: str, theirs: Theirs, attack: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    own = client(load_module(f"{theirs.file}:{kind}"), theirs.private)
    save_file(own, "upload.safetensors")
    given = ("--module", f"{theirs.file}:{kind}", "--gradient", "upload.safetensors", *NORMALISED)
    assert attack(*given, "--private", theirs.folder / "private.png") == 0
    assert np.array_equal(pixels_of(Path("out/recovered-1.png")), pixels_of(theirs.folder / "private.png"))
    report = json.loads(Path("out/attack.json").read_text())
    assert report["scores"]["psnr"] > 60, "a root mean square error below 1e-3"
    assert report["module"]["parts"]["position embedding"] in own
    printed = capsys.readouterr().out
    assert "Written to out: recovered-1.png, attack.json." in printed
    assert "states no digest of weights" in printed
    assert "normalised by mean [0.485, 0.456, 0.406], std [0.229, 0.224, 0.225]" in printed


def test_a_gradient_is_all_that_is_needed(theirs: Theirs, gradient: Path, attack: Callable[..., int]) -> None:
    torch.save(load_file(gradient), "gradient.pt")
    assert attack("--module", f"{theirs.file}:ready", "--gradient", "gradient.pt", *NORMALISED) == 0
    assert np.array_equal(pixels_of(Path("out/recovered-1.png")), pixels_of(theirs.folder / "private.png"))
    assert json.loads(Path("out/attack.json").read_text())["scores"] is None


def test_what_a_server_recorded_states_itself_what_it_is(
    theirs: Theirs, attack: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    module = load_module(f"{theirs.file}:hand_written")
    change = {name: -0.1 * each for name, each in client(module, theirs.private.expand(2, -1, -1, -1)).items()}
    upload = Upload(change, "delta", 2, server_round=1, node=0, weights=weights_digest(module.state_dict()))
    upload.save(Path("round.safetensors"))
    given = ("--module", f"{theirs.file}:hand_written", "--gradient", "round.safetensors", *NORMALISED)
    assert attack(*given) == 0
    assert "2 pictures of 64 patches share 96 equations" in capsys.readouterr().out
    report = json.loads(Path("out/attack.json").read_text())
    assert "weight delta" in report["threat"]
    assert report["pictures"]["files"] == ["recovered-1.png", "recovered-2.png"]
    assert attack(*given, "--attack", "mjp_prior") == BAD_INPUT, "it takes no batches"


def test_a_mixture_is_refused_unless_the_attack_reckons_with_noise(
    theirs: Theirs, attack: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    two = torch.cat([theirs.private, theirs.private.flip(3)])
    save_file(client(load_module(f"{theirs.file}:hand_written"), two), "mean.safetensors")
    given = ("--module", f"{theirs.file}:hand_written", "--gradient", "mean.safetensors", *NORMALISED)
    assert attack(*given) == BAD_INPUT
    refusal = capsys.readouterr().err
    assert "patch_embedding: the two gradients are not of one picture" in refusal
    assert "give the number of pictures of a batch (--batch-size, or examples in Python" in refusal
    assert not Path("out").exists()
    assert attack(*given, "--attack", "patch_embedding_wiener") == 0
    assert "the two gradients are not of one picture" in capsys.readouterr().out
    assert attack(*given, "--batch-size", "2") == 0
    assert Path("out/recovered-2.png").exists()
    assert attack(*given, "--attack", "grey") == 0
    assert not Path("out/recovered-2.png").exists(), "what a former run left is gone"


def sum_of_two(module: nn.Module, picture: Tensor) -> dict[str, Tensor]:
    first, second = (dict(client(module, each)) for each in (picture, picture.flip(3)))
    return {name: first[name] + second[name] for name in first}


def step_of_adam(module: nn.Module, picture: Tensor) -> dict[str, Tensor]:
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    client(module, picture)
    torch.optim.Adam(module.parameters(), lr=0.01).step()
    return {name: before[name] - parameter.detach() for name, parameter in module.named_parameters()}


def another_size(module: nn.Module, picture: Tensor) -> dict[str, Tensor]:
    """Positions resampled to it, as timm and transformers do."""
    larger = F.interpolate(picture, size=(72, 96))
    table = module.places
    grid = F.interpolate(table[:, 1:].mT.unflatten(2, (8, 8)), size=(9, 12), mode="bicubic").flatten(2).mT
    tokens = torch.cat([module.start, module.cut(larger).flatten(2).mT], dim=1) + torch.cat([table[:, :1], grid], dim=1)
    module.zero_grad()
    F.cross_entropy(module.classify(module.body(tokens)[:, 0]), torch.tensor([0])).backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def by_itself(module: nn.Module, picture: Tensor) -> dict[str, Tensor]:
    standard = (picture - picture.mean()) / picture.std() * 2
    return client(module, standard * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1))


@pytest.mark.parametrize("sends", [sum_of_two, step_of_adam, by_itself])
def test_python_refuses_with_the_commands_sentence(
    sends: Callable[[nn.Module, Tensor], dict[str, Tensor]],
    theirs: Theirs,
    attack: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = f"{theirs.file}:hand_written"
    own = {key: value.detach().clone() for key, value in sends(load_module(name), theirs.private).items()}
    save_file(own, "upload.safetensors")
    assert attack("--module", name, "--gradient", "upload.safetensors", *NORMALISED) == BAD_INPUT
    sentence = capsys.readouterr().err.removeprefix("Error: ").strip()
    adopted = fedmjp.adopt(load_module(name), mean=MEAN, std=STD)
    with pytest.raises(BadInputError, match=f"^{re.escape(sentence)}$"):
        fedmjp.attack("patch_embedding", adopted.upload(own), adopted)
    with pytest.raises(BadInputError) as refusal:
        fedmjp.recover(own["cut.weight"], own["places"], mean=MEAN, std=STD)
    assert sentence.startswith(f"patch_embedding: {refusal.value}")


def test_a_picture_of_another_size_is_said_where_it_cannot_be_told_from_rounding(
    theirs: Theirs, attack: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{theirs.file}:hand_written"
    module = load_module(name)
    own = another_size(module, theirs.private)
    save_file(own, "upload.safetensors")
    assert attack("--module", name, "--gradient", "upload.safetensors", *NORMALISED) == 0
    message = "unexplained, as half precision, TF32 or a small difference of weights do, but a picture of another size"
    assert message in " ".join(capsys.readouterr().out.split())
    adopted = fedmjp.adopt(module, mean=MEAN, std=STD)
    with pytest.warns(UserWarning, match=f"patch_embedding: one picture leaves .*% of .* {message}"):
        fedmjp.attack("patch_embedding", adopted.upload(own), adopted)


def test_the_command_says_what_an_upload_shows_of_size_and_patches(
    theirs: Theirs, attack: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """The module takes 4 x 16 patches as well as 8 x 8; a row of its tokens was dropped."""
    module = load_module(f"{theirs.file}:hand_written")
    picture = fedmjp.bundled_pictures(1, size=128)[0].image[None, :, 40:72]
    keep = torch.arange(64) >= 16
    module.cut.register_forward_hook(lambda _cut, _inputs, output: output * keep.view(1, 1, 4, 16))
    module.places.register_hook(lambda grad: grad * torch.cat([torch.ones(1).bool(), keep])[None, :, None])
    save_file(client(module, picture), "upload.safetensors")
    Image.fromarray((picture[0] * 255).round().byte().permute(1, 2, 0).numpy()).save("wide.png")
    given = ("--module", f"{theirs.file}:hand_written", "--gradient", "upload.safetensors", *NORMALISED)
    for private in ((), ("--private", "wide.png")):
        assert attack(*given, *private) == 0
        assert np.array_equal(pixels_of(Path("out/recovered-1.png"))[8:], pixels_of(Path("wide.png"))[8:])
        printed = " ".join(capsys.readouterr().out.split())
        assert "Pictures of 32 x 128 pixels in patches of 8" in printed
        assert "16 of 64 patches have no gradient, as of dropped tokens: nothing shows them" in printed
        assert "the patches fit together as 32 x 128 pixels" in printed, "whoever holds the picture to score it"
    assert "dB where patches have a gradient)" in printed
    assert json.loads(Path("out/attack.json").read_text())["scores"]["psnr_visible"] > 50
    Image.fromarray(np.zeros((64, 64, 3), dtype=np.uint8)).save("square.png")
    assert attack(*given, "--private", "square.png") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "not scored: square.png is 64 x 64, and the patches were laid out as 128 x 32" in printed
    assert json.loads(Path("out/attack.json").read_text())["scores"] is None


def test_a_network_that_shows_too_little_of_its_tokens_is_refused_too(
    theirs: Theirs, attack: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    save_file(client(load_module(f"{theirs.file}:shallow"), theirs.private), "upload.safetensors")
    given = ("--module", f"{theirs.file}:shallow", "--gradient", "upload.safetensors", *NORMALISED)
    message = "the gradients at 64 tokens span 8 dimensions, which leave the picture open"  # two a head
    refused_with(message, attack(*given), capsys)
    assert attack(*given, "--attack", "mjp_prior", "--private", theirs.folder / "private.png") == 0


def without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda own: own.pop(name)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without("places"), "has no tensor 'places' (1, 65, 96), which closed forms need"),
        (lambda own: own.update({"my.places": own.pop("places")}), "own names; did you mean 'my.places'?"),
        (
            lambda own: own.update({"cut.weight": own["cut.weight"][:, :, :4].contiguous()}),
            "has shape (96, 3, 4, 8), the module's",
        ),
        (lambda own: own["places"].fill_(float("nan")), "'places' holds NaN or infinite values"),
        (lambda own: own["places"].zero_(), "the position-embedding gradient is zero for every patch"),
        (lambda own: own["cut.weight"].zero_(), "the patch embedding's gradient is zero everywhere"),
    ],
)
def test_a_gradient_that_does_not_fit_is_refused(
    spoil: Callable[[dict[str, Tensor]], object],
    message: str,
    theirs: Theirs,
    gradient: Path,
    attack: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = load_file(gradient)
    spoil(own)
    save_file(own, "spoilt.safetensors")
    given = ("--module", f"{theirs.file}:hand_written", "--gradient", "spoilt.safetensors", *NORMALISED)
    refused_with(message, attack(*given), capsys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--module": ":other_weights"}, "the upload states that it was computed from weights"),
        ({"--module": ":fixed_positions"}, ":fixed_positions (Fixed): found no position embedding: looked for"),
        ({"--module": ":hand_writen"}, "has no 'hand_writen'; did you mean 'hand_written'?"),
        ({"--module": ":number"}, ":number is a int: name a function that returns a torch.nn.Module"),
        ({"--module": ":text"}, ":text returned a str, which is no torch.nn.Module"),
        ({"--module": ":broken"}, ":broken failed: RuntimeError: weights.pt is not here"),
        ({"--module": ":leaves"}, ":leaves failed: SystemExit: 3"),
        ({"--module": "hand_written"}, "'hand_written' is not of the form package:factory or FILE.py:factory"),
        ({"--module": "nowhere.py:build"}, "there is no file nowhere.py"),
        ({"--module": "no_such_package.vit:build"}, "failed: ModuleNotFoundError: No module named 'no_such_package'"),
        ({"--mean": None, "--std": None}, "(Own): a Own does not say how pictures are normalised"),
        ({"--mean": "0.5;0.5"}, "--mean '0.5;0.5' is not three numbers, such as 0.485,0.456,0.406"),
        ({"--std": "1,1,0"}, "std above 0"),
        ({"--gradient": "nowhere.safetensors"}, "there is no file nowhere.safetensors"),
        ({"--gradient": None}, "--module needs --gradient FILE"),
        ({"--module": None}, "is of a model of your own: name it with --module package:factory"),
        ({"--data": "bundled"}, "--data does not go with --module"),
        ({"--attack": "gradient_matching"}, "gradient_matching: needs the network behind the tokens"),
        ({"--attack": "oracle_patch_embedding"}, "the upload has no tensor 'oracle.token_gradients'"),
        ({"--attack": "patch_embeding"}, "Unknown attack 'patch_embeding'. Did you mean patch_embedding"),
        ({"--set": "readin=zeros"}, "unknown key 'readin', did you mean 'reading'?"),
        ({"--private": "nowhere.png"}, "nowhere.png cannot be read as a picture: No such file"),
        ({"--private": "small.png"}, "small.png is 12 x 9, the module's pictures are 64 x 64"),
        ({"--private": "no.png"}, "no.png cannot be read"),
        ({"--private": "small.png", "--batch-size": "2"}, "--private is one picture, the upload is of 2"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    change: dict[str, str | None],
    message: str,
    theirs: Theirs,
    gradient: Path,
    attack: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    Image.new("RGB", (12, 9)).save("small.png")
    Path("no.png").write_text("no picture")
    values: dict[str, Any] = {"--module": ":hand_written", "--gradient": gradient, "--mean": "0,0,0", "--std": "1,1,1"}
    values |= change
    if (values["--module"] or "").startswith(":"):
        values["--module"] = f"{theirs.file}{values['--module']}"
    words = [word for option, value in values.items() if value is not None for word in (option, value)]
    refused_with(message, attack(*words), capsys)


def refused_with(message: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    error = capsys.readouterr().err
    assert code == BAD_INPUT, error
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no tensors", "damaged"),
        ({"step": 3}, "must hold tensors alone, by the names of named_parameters(): 'step' is a int"),
        ({}, "it is empty"),
        ([torch.ones(2)], "it holds a list"),
        ({"hook": load_module}, "needs pickled code (fedmjp.models.factories.load_module), which is never run"),
    ],
)
def test_files_of_torch_that_hold_more_than_tensors_are_refused(
    content: object, message: str, attack: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path("upload.pt")
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    refused_with(message, attack("--module", "torch.nn:Identity", "--gradient", path), capsys)


def test_a_module_is_found_in_the_working_directory_and_in_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    Path("zoo_of_mine").mkdir()
    Path("zoo_of_mine/vits.py").write_text("import torch\nbuild = torch.nn.Identity\nready = torch.nn.Linear(2, 3)\n")
    assert isinstance(load_module("zoo_of_mine.vits:build"), nn.Identity)
    assert load_module("zoo_of_mine.vits:ready") is load_module("zoo_of_mine.vits:ready")
    assert isinstance(load_module("zoo_of_mine/vits.py:build"), nn.Identity)
    Path("attacks").mkdir()
    Path("attacks/__init__.py").write_text("raise RuntimeError('another package of this name')")
    assert isinstance(load_module("torch.nn:Identity"), nn.Identity)
    with pytest.raises(BadInputError, match="attacks has no 'build'"):
        load_module("fedmjp.attacks:build")


def test_help_says_that_code_is_run(attack: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert attack("--help") == 0
    assert "This runs your code" in " ".join(capsys.readouterr().out.replace("│", " ").split())

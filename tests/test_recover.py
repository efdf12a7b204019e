"""The closed form by itself: two gradients and a normalisation in, a picture out; and the notebook that shows it."""

import doctest
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
import torch
from torch import Tensor

import fedmjp
import fedmjp.attacks.recover
from fedmjp.errors import BadInputError
from fedmjp.models import names
from tests.test_adopt import MEAN, STD, attacked, clean, gradients, made, of_timm, of_torchvision, of_transformers

NOTEBOOK = Path(__file__).parents[1] / "attacks" / "from_gradient_to_picture.ipynb"
KNOWN = {"mean": MEAN, "std": STD}
OWN_NAMES = {
    of_timm: ("patch_embed.proj.weight", "pos_embed"),
    of_torchvision: ("conv_proj.weight", "encoder.pos_embedding"),
    of_transformers: (
        "vit.embeddings.patch_embeddings.projection.weight",
        "vit.embeddings.position_embeddings",
    ),
}

__all__ = ["clean"]  # a fixture


@pytest.fixture(scope="module")
def pair(clean: Tensor) -> tuple[Tensor, Tensor]:
    own = gradients(made(of_torchvision).eval(), clean)
    return tuple(own[name].clone() for name in OWN_NAMES[of_torchvision])


@pytest.mark.parametrize("make", OWN_NAMES)
def test_two_gradients_and_a_normalisation_give_the_picture_back_as_the_attack_does(
    make: Callable[[], Any], clean: Tensor
) -> None:
    module = made(make).eval()
    own = gradients(module, clean)
    recovered = fedmjp.recover(*(own[name] for name in OWN_NAMES[make]), **KNOWN)
    assert recovered.dtype == torch.float32
    torch.testing.assert_close(recovered, clean[0], atol=1e-3, rtol=0)
    adopted = fedmjp.adopt(module, **KNOWN)
    assert torch.equal(recovered, attacked("patch_embedding", adopted.upload(own), adopted)[0])


@pytest.mark.parametrize(
    "change",
    [lambda each: -0.03 * each, lambda each: each.squeeze(0), lambda each: each.to("cpu", torch.float64)],
    ids=["a step of SGD", "positions without a batch", "float64"],
)
def test_a_factor_and_the_form_of_the_tensors_make_no_difference(
    change: Callable[[Tensor], Tensor], pair: tuple[Tensor, Tensor], clean: Tensor
) -> None:
    recovered = fedmjp.recover(*map(change, pair), **KNOWN)
    torch.testing.assert_close(recovered, clean[0], atol=1e-3, rtol=0)


def test_patches_without_any_gradient_are_grey_and_leave_the_others_exact(
    pair: tuple[Tensor, Tensor], clean: Tensor
) -> None:
    patch, position = (each.clone() for each in pair)
    normalised = (clean[0] - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    # What the patch in the upper left corner adds to the patch embedding's gradient is taken away.
    patch -= torch.einsum("d,cyx->dcyx", position[0, 1], normalised[:, :8, :8])
    position[0, 1] = 0
    recovered = fedmjp.recover(patch, position, **KNOWN)
    torch.testing.assert_close(recovered[:, 8:], clean[0][:, 8:], atol=1e-3, rtol=0)
    assert torch.equal(recovered[:, :8, :8], torch.tensor(MEAN).view(3, 1, 1).expand(3, 8, 8))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda patch, position: (patch.flatten(1), position), r"has shape \(192, 192\), not \(dim, 3, patch, patch\)"),
        (lambda patch, position: (patch, position[..., :96]), r"not \(1, tokens, 192\) or \(tokens, 192\)"),
        (lambda patch, position: (patch, torch.cat([position[0]] * 2)[:74]), "74 tokens are no square number"),
        (lambda patch, position: (patch, position.expand(2, -1, -1)), r"has shape \(2, 65, 192\)"),
        (
            lambda patch, position: (patch[:60], position[..., :60]),
            "64 patches are more unknowns than the 60",
        ),
        (lambda patch, position: (patch, 0 * position), "is zero for every patch"),
        (lambda patch, position: (0 * patch, position), "is zero everywhere"),
        (lambda patch, position: (patch * float("nan"), position), "patch embedding's gradient holds NaN"),
        (lambda patch, position: (patch, position / 0), "position embedding's gradient holds NaN"),
        (lambda patch, position: (patch.roll(1, 0), position), "the two gradients are not of one picture"),
    ],
)
def test_what_no_picture_can_be_recovered_from_is_refused(
    spoil: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], message: str, pair: tuple[Tensor, Tensor]
) -> None:
    with pytest.raises(BadInputError, match=message):
        fedmjp.recover(*spoil(*pair), **KNOWN)


def test_the_mean_over_a_batch_is_told_from_one_picture() -> None:
    module = made(of_torchvision).eval()
    pictures = [picture.image[None] for picture in fedmjp.bundled_pictures(4, size=64)]
    single = [
        {name: gradient.clone() for name, gradient in gradients(module, each).items()}
        for each in (*pictures, pictures[0].flip(3))
    ]
    for one, other in ((0, 1), (2, 3), (0, 4)):  # of one label, which makes them alike
        mean = [(single[one][name] + single[other][name]) / 2 for name in OWN_NAMES[of_torchvision]]
        with pytest.raises(BadInputError, match="not of one picture"):
            fedmjp.recover(*mean, **KNOWN)


def test_mean_and_std_are_checked(pair: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(BadInputError, match="std above 0"):
        fedmjp.recover(*pair, mean=MEAN, std=(1, 1, 0))


def test_an_upload_of_other_weights_is_refused_with_both_digests(clean: Tensor) -> None:
    module = made(of_torchvision).eval()
    adopted = fedmjp.adopt(module, **KNOWN)
    own = gradients(module, clean)
    assert adopted.upload(own, weights=adopted.weights).weights == adopted.weights
    upload = adopted.upload(own)
    with torch.no_grad():
        module.heads.head.bias += 1
    later = fedmjp.adopt(module, **KNOWN)
    both = f"from weights {adopted.weights[:16]}, the model's are {later.weights[:16]}: give"
    with pytest.raises(BadInputError, match=both):
        later.upload(own, weights=adopted.weights)
    with pytest.raises(BadInputError, match=both):
        fedmjp.attack("patch_embedding", upload, later)


def test_a_scenarios_upload_of_other_weights_is_refused() -> None:
    small = {"name": "deit_tiny", "image_size": 64, "patch_size": 8}
    upload = fedmjp.Scenario(model=small).exchange(fedmjp.bundled_pictures(1, size=64)).upload
    assert names.POSITION_EMBEDDING in upload.tensors
    with pytest.raises(BadInputError, match=f"from weights {upload.weights[:16]}, the model's are"):
        fedmjp.attack("patch_embedding", upload, fedmjp.Scenario(model={**small, "seed": 1}))


def test_the_example_runs() -> None:
    result = doctest.testmod(fedmjp.attacks.recover)
    assert result.attempted > 0
    assert result.failed == 0


def test_the_notebook_runs_and_gets_the_picture_back(capsys: pytest.CaptureFixture[str]) -> None:
    mpl.use("Agg")
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    space: dict[str, Any] = {}
    for cell in cells:
        exec("".join(cell["source"]), space)
    torch.testing.assert_close(space["recovered"], space["private"][0], atol=1e-3, rtol=0)
    torch.testing.assert_close(space["result"].images[0], space["private"][0], atol=1e-3, rtol=0)
    shown = [output["text"] for cell in cells for output in cell["outputs"] if "text" in output]
    assert capsys.readouterr().out == "".join(line for text in shown for line in text), "as the page shows it"

"""Metrics against scikit-image, slow formulas, and the official scripts' numbers."""

import hashlib
import json
from pathlib import Path

import lpips
import numpy as np
import pytest
import skimage.data
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from skimage.metrics import mean_squared_error, peak_signal_noise_ratio, structural_similarity

from fedmjp import metrics
from fedmjp.errors import RecordError, UnknownNameError, WeightsMissingError
from fedmjp.metrics import perceptual
from fedmjp.metrics.scoring import to_levels

GOLDEN = json.loads((Path(__file__).parent / "golden" / "official_metrics.json").read_text())
AVAILABLE = ["mse", "psnr", "ssim", "ssim_mjp", "fft2d"]


def target_pixels(name: str) -> np.ndarray:
    photograph = getattr(skimage.data, name)()
    side = min(photograph.shape[:2])
    top, left = (photograph.shape[0] - side) // 2, (photograph.shape[1] - side) // 2
    steps = (np.arange(224) * side) // 224
    return photograph[top : top + side, left : left + side][steps][:, steps]


def distorted_pixels(target: np.ndarray, distortion: str) -> np.ndarray:
    noise = np.random.RandomState(0).normal(0, 20, target.shape)
    return {
        "noise": np.clip(np.rint(target + noise), 0, 255).astype(np.uint8),
        "shift": np.roll(target, 3, axis=1),
        "grey": np.full_like(target, 115),
        "flip": target[::-1, ::-1],
        "quarter": target // 4,
    }[distortion]


def as_batch(pixels: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)[None].float() / 255


@pytest.mark.parametrize("pair", GOLDEN["pairs"], ids=lambda pair: f"{pair['picture']}-{pair['distortion']}")
def test_metrics_give_the_official_scripts_numbers(pair: dict) -> None:
    target = target_pixels(pair["picture"])
    distorted = distorted_pixels(target, pair["distortion"])
    if hashlib.sha256(target.tobytes()).hexdigest() != pair["target_sha256"]:
        assert pair["picture"] == "rocket", "only the JPEG may decode differently from machine to machine"
        pytest.skip("the JPEG decoder of this machine gives other pixels than the oracle's")
    assert hashlib.sha256(np.ascontiguousarray(distorted).tobytes()).hexdigest() == pair["distorted_sha256"]
    images = as_batch(distorted), as_batch(target)
    # The official scripts compute in float32; these are the deviations that rounding explains.
    assert metrics.METRICS["mse"].function(*images).item() == pytest.approx(pair["mse"], abs=1e-7)
    assert metrics.METRICS["psnr"].function(*images).item() == pytest.approx(pair["psnr"], abs=1e-5)
    assert metrics.METRICS["ssim_mjp"].function(*images).item() == pytest.approx(pair["ssim"], abs=5e-5)
    assert metrics.METRICS["fft2d"].function(*images).item() == pytest.approx(pair["fft2d"], abs=1e-6)


@pytest.mark.parametrize("distortion", ["noise", "shift", "grey", "flip", "quarter"])
def test_ssim_mse_and_psnr_agree_with_scikit_image(distortion: str) -> None:
    target = target_pixels("astronaut").astype(np.float64) / 255
    other = distorted_pixels(target_pixels("astronaut"), distortion).astype(np.float64) / 255
    images = [torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)[None] for image in (other, target)]
    structural = structural_similarity(
        target, other, gaussian_weights=True, sigma=1.5, use_sample_covariance=False, data_range=1, channel_axis=2
    )
    assert metrics.METRICS["ssim"].function(*images).item() == pytest.approx(structural, abs=1e-9)
    assert metrics.METRICS["mse"].function(*images).item() == pytest.approx(mean_squared_error(target, other))
    noise_ratio = peak_signal_noise_ratio(target, other, data_range=1)
    assert metrics.METRICS["psnr"].function(*images).item() == pytest.approx(noise_ratio)


def test_fft2d_agrees_with_the_formula_summed_term_by_term(generator: torch.Generator) -> None:
    x, y = torch.rand(2, 1, 3, 8, 8, generator=generator, dtype=torch.float64)
    u, v = np.fft.fft2(x.numpy()).ravel(), np.fft.fft2(y.numpy()).ravel()
    uv = uu = vv = 0j
    for a, b in zip(u, v, strict=True):
        uv, uu, vv = uv + a * b, uu + a * a, vv + b * b
    assert metrics.METRICS["fft2d"].function(x, y).item() == pytest.approx(abs(1 - uv / np.sqrt(uu * vv)), abs=1e-12)


@pytest.mark.parametrize("name", AVAILABLE)
def test_identical_images_get_the_perfect_value(name: str, generator: torch.Generator) -> None:
    images = torch.rand(2, 3, 16, 16, generator=generator)
    perfect = {"mse": 0, "psnr": 200, "ssim": 1, "ssim_mjp": 1, "fft2d": 0}[name]
    assert metrics.METRICS[name].function(images, images).tolist() == pytest.approx([perfect] * 2, abs=1e-9)


@pytest.mark.parametrize("name", AVAILABLE)
@given(seed=st.integers(0, 2**31), count=st.integers(0, 4))
def test_every_image_is_scored_by_itself(name: str, seed: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.rand(2, count, 3, 12, 12, generator=generator)
    scores = metrics.METRICS[name].function(x, y)
    assert scores.shape == (count,)
    assert scores.dtype == torch.float64
    alone = [metrics.METRICS[name].function(x[i : i + 1], y[i : i + 1]).item() for i in range(count)]
    assert scores.tolist() == pytest.approx(alone, abs=1e-12)


def test_fft2d_of_an_image_without_direction_is_no_noise() -> None:
    corner = torch.zeros(1, 3, 32, 32)
    corner[..., 2:8, 2:8] = 1  # shares no bright pixel with its point reflection: sum u^2 is exactly 0
    other = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    fft2d = metrics.METRICS["fft2d"].function
    assert fft2d(corner, other).item() == fft2d(other, corner).item() == 1
    assert fft2d(corner, corner).item() == 0


@pytest.mark.parametrize("name", AVAILABLE)
@pytest.mark.parametrize("levels", [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0), (0.45, 0.0)])
def test_flat_images_never_give_nan(name: str, levels: tuple[float, float]) -> None:
    x, y = (torch.full((1, 3, 16, 16), level) for level in levels)
    assert torch.isfinite(metrics.METRICS[name].function(x, y)).all()


@pytest.mark.parametrize("name", AVAILABLE)
def test_different_shapes_are_refused(name: str) -> None:
    with pytest.raises(RecordError, match=r"\(1, 3, 12, 12\) and \(2, 3, 12, 12\)"):
        metrics.METRICS[name].function(torch.zeros(1, 3, 12, 12), torch.zeros(2, 3, 12, 12))


def test_unknown_metric_offers_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="psnr"):
        metrics.metric("pnsr")


def test_8bit_protocol_is_a_png_round_trip(generator: torch.Generator) -> None:
    images = torch.rand(1, 3, 8, 8, generator=generator)
    stored = (images * 255).round().to(torch.uint8)
    assert torch.equal(to_levels(images), stored.float() / 255)


def test_lpips_without_its_weights_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(WeightsMissingError, match=metrics.BACKBONE_FILE):
        perceptual.lpips_alex(torch.zeros(1, 3, 64, 64), torch.zeros(1, 3, 64, 64))


def test_lpips_refuses_another_file_under_the_right_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    metrics.backbone_path().parent.mkdir(parents=True)
    metrics.backbone_path().write_bytes(b"not AlexNet")
    with pytest.raises(WeightsMissingError, match="damaged or another file"):
        perceptual.lpips_alex(torch.zeros(1, 3, 64, 64), torch.zeros(1, 3, 64, 64))


@pytest.mark.filterwarnings("ignore::UserWarning")  # lpips calls torchvision by a deprecated argument
def test_lpips_loads_its_backbone_from_the_file_where_doctor_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(metrics, "_matches_name", lambda *_: True)  # a file of ours, so with another digest
    alexnet = torchvision.models.alexnet(weights=None)
    metrics.backbone_path().parent.mkdir(parents=True)
    torch.save(alexnet.state_dict(), metrics.backbone_path())
    network = lpips.LPIPS(net="alex", pnet_rand=True, verbose=False)
    layers = dict(alexnet.features.named_children())
    for part in (network.net.slice1, network.net.slice2, network.net.slice3, network.net.slice4, network.net.slice5):
        for name, layer in part.named_children():
            layer.load_state_dict(layers[name].state_dict())
    x, y = torch.rand(2, 2, 3, 64, 64, generator=generator)
    with torch.no_grad():
        expected = network(x, y, normalize=True).flatten().tolist()
    perceptual._network.cache_clear()
    try:
        assert metrics.METRICS["lpips_alex"].missing() is None
        assert perceptual.lpips_alex(x, y).tolist() == pytest.approx(expected, rel=1e-5)
    finally:
        perceptual._network.cache_clear()


@pytest.mark.filterwarnings("ignore::UserWarning")  # lpips calls torchvision by a deprecated argument
def test_lpips_plumbing_scales_images_as_the_package_wants(generator: torch.Generator) -> None:
    network = lpips.LPIPS(net="alex", pnet_rand=True, verbose=False)  # random backbone: the plumbing, not the metric
    x, y = torch.rand(2, 3, 3, 64, 64, generator=generator)
    with torch.no_grad():
        expected = network(x, y, normalize=True).flatten()
    ours = perceptual.perceptual_distance(network, x, y)
    assert ours.tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    assert perceptual.perceptual_distance(network, x, x).tolist() == [0, 0, 0]

"""Layers as Triton kernels: the numbers of torch in float64, and what is not a number stays so."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]

from torch.nn import functional as F  # noqa: E402

from fedsolve.gradient.networks import normalisation  # noqa: E402
from fedsolve.gradient.networks.mobilenet import MobileNetV2  # noqa: E402

SHAPES = [(3, 24, 5, 7), (64, 96, 28, 28), (17, 16, 9, 9), (64, 960, 4, 4), (2, 70, 1, 1)]


def drawn(*shape: int, shift: float = 0.0, seed: int = 0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return (values + shift).cuda()


def apart(one, other) -> float:
    return float((one.detach().double() - other.detach()).norm() / other.detach().norm())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ceiling", [None, normalisation.RELU, normalisation.RELU6])
@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
def test_normalised_as_by_torch_in_double_precision(shape, ceiling, last):
    from fedsolve.gradient.networks.triton_layers import Normalise

    channels = shape[1]
    maps = 3.0 * drawn(*shape, shift=4.0)
    maps = maps.contiguous(memory_format=torch.channels_last) if last else maps
    given = [maps, drawn(channels, shift=2.0), drawn(channels, seed=1)]
    kept = [drawn(channels, seed=2), drawn(channels, seed=3).square()]
    error = drawn(*shape, seed=4)
    own = [value.clone().requires_grad_() for value in given]
    plain = [value.double().requires_grad_() for value in given]
    statistics, plain_statistics = [v.clone() for v in kept], [v.double() for v in kept]

    result = Normalise.apply(*own, *statistics, 0.1, 1e-5, ceiling)
    values = F.batch_norm(plain[0], *plain_statistics, *plain[1:], True, 0.1, 1e-5)
    expected = normalisation.rectified(values, ceiling)

    assert apart(result, expected) < 1e-6
    for one, other in zip(statistics, plain_statistics, strict=True):
        assert apart(one, other) < 1e-6
    # Where a value is at an end of the rectifier, its last digit decides whether the error passes.
    for end in () if ceiling is None else (0.0, ceiling):
        error[(values - end).abs() < 1e-4] = 0.0
    back = torch.autograd.grad(result, own, error)
    # With two rows the errors cancel but for their last digits.
    least = 1e-5 if result.numel() > 4 * channels else 1e-2
    for one, other in zip(back, torch.autograd.grad(expected, plain, error.double()), strict=True):
        assert apart(one, other) < least


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stride", [1, 2])
def test_depthwise_convolutions_as_by_torch_in_double_precision(shape, stride):
    from fedsolve.gradient.networks.triton_layers import Depthwise

    channels = shape[1]
    maps, weight, matrix = drawn(*shape), drawn(channels, 1, 3, 3), drawn(channels, 1, 3, 3, seed=1)
    own = [value.clone().requires_grad_() for value in (maps, weight)]
    plain = [value.double().requires_grad_() for value in (maps, weight)]
    result = Depthwise.apply(*own, matrix, stride)
    expected = F.conv2d(*plain, None, stride, 1, 1, channels)
    error = drawn(*expected.shape, seed=2)
    assert result.shape == expected.shape
    assert apart(result, expected) < 1e-6
    to_maps, to_weight = torch.autograd.grad(result, own, error)
    _, plain_to_weight = torch.autograd.grad(expected, plain, error.double())
    through = F.conv2d(plain[0], matrix.double(), None, stride, 1, 1, channels)
    assert apart(to_weight, plain_to_weight) < 1e-5
    assert apart(to_maps, torch.autograd.grad(through, plain[0], error.double())[0]) < 1e-6


def test_the_same_bits_each_time():
    from fedsolve.gradient.networks.triton_layers import Normalise

    maps, ones = drawn(64, 96, 28, 28), torch.ones(96, device="cuda")
    first, second = (
        Normalise.apply(maps, ones, ones, ones.clone(), ones.clone(), 0.1, 1e-5, 6.0) for _ in range(2)
    )
    assert torch.equal(first, second)


def test_what_is_not_a_number_stays_so():
    from fedsolve.gradient.networks.triton_layers import Normalise

    maps, ones = drawn(4, 16, 5, 5), torch.ones(16, device="cuda")
    maps[0, 3, 1, 1] = torch.nan
    result = Normalise.apply(maps, ones, ones, ones.clone(), ones.clone(), 0.1, 1e-5, 6.0)
    assert bool(torch.isnan(result[:, 3]).all())
    assert not bool(torch.isnan(result[:, :3]).any())


@pytest.mark.parametrize("rows", [64, 37])
def test_mobilenet_learns_as_with_the_layers_of_torch(rows, monkeypatch):
    images, labels = drawn(rows, 1, 28, 28), torch.arange(rows, device="cuda") % 10
    gradients = []
    for layers in (normalisation._triton_layers(), None):
        monkeypatch.setattr(normalisation, "_triton_layers", lambda layers=layers: layers)
        torch.manual_seed(0)
        network = MobileNetV2(1, 10).cuda()
        with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
            loss = F.cross_entropy(network(images), labels)
            gradients.append(torch.autograd.grad(loss, list(network.parameters())))
    most = max(float(gradient.norm()) for gradient in gradients[1])
    for one, other in zip(*gradients, strict=True):
        # In front of a normalisation some gradients are rounding alone.
        assert float((one - other).norm()) < 0.01 * (float(other.norm()) + 0.01 * most)


def test_gradients_row_by_row_go_through_the_layers_of_torch():
    network = MobileNetV2(1, 3).cuda().eval()
    weights = {name: weight.detach() for name, weight in network.named_parameters()}
    images, labels = drawn(4, 1, 28, 28), torch.arange(4, device="cuda") % 3

    def loss(own, image, label):
        return F.cross_entropy(torch.func.functional_call(network, own, (image[None],)), label[None])

    found = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weights, images, labels)
    whole = F.cross_entropy(network(images), labels, reduction="sum")
    gradients = torch.autograd.grad(whole, list(network.parameters()))
    for name, gradient in zip(weights, gradients, strict=True):
        assert float((found[name].sum(0) - gradient).norm()) < 0.01 * (float(gradient.norm()) + 1.0)

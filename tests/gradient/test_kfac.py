"""Curvature factors: against outer products row by row, for every kind of layer that has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsolve.gradient import kfac

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

pytestmark = pytest.mark.torch

TARGETS = torch.tensor([0, 1, 2, 0, 1, 2, 0])


def random(*shape: int, seed: int = 0) -> Any:
    return torch.as_tensor(np.random.default_rng(seed).standard_normal(shape))


def found(
    network: Any, inputs: Any, losses: Any = kfac.true_labels, rows: int = 3
) -> dict[str, kfac.Factors]:
    """Factors of all layers, the rows in several batches."""
    layers = kfac.factored_layers(network, [name for name, _ in network.named_parameters()])
    batches = [(inputs[k : k + rows], TARGETS[k : k + rows]) for k in range(0, len(inputs), rows)]
    return kfac.factors(network, layers, iter(batches), losses)


def mlp(inplace: bool = False) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = (nn.Linear(4, 5), nn.ReLU(inplace=inplace), nn.Linear(5, 3, bias=False))
        return nn.Sequential(*layers).double()


def by_rows(network: Any, inputs: Any, weights: Any) -> dict[str, Any]:
    """A and B of `mlp`, one row and one label at a time; weights: of the labels, (rows, classes)."""
    sums = {"0": [0.0, 0.0], "2": [0.0, 0.0]}
    for row, shares in zip(inputs, weights, strict=True):
        for label, share in enumerate(shares):
            first = network[0](row).detach().requires_grad_()
            hidden = torch.relu(first)
            last = network[2](hidden)
            loss = F.cross_entropy(last[None], torch.tensor([label]))
            grads = torch.autograd.grad(loss, [first, last])
            vectors = {"0": torch.cat([row, torch.ones(1).double()]), "2": hidden.detach()}
            for (name, a), g in zip(vectors.items(), grads, strict=True):
                sums[name][0] = sums[name][0] + torch.outer(a, a) / len(shares)
                sums[name][1] = sums[name][1] + share * torch.outer(g, g)
    return {name: (a.numpy() / len(inputs), b.numpy() / len(inputs)) for name, (a, b) in sums.items()}


def close(left: kfac.Factors, right: Any) -> bool:
    return np.abs(left.right - right[0]).max() < 1e-12 and np.abs(left.left - right[1]).max() < 1e-12


@pytest.mark.parametrize("inplace", [False, True])
def test_linear_layers_row_by_row(inplace: bool) -> None:
    inputs = random(7, 4)
    expected = by_rows(mlp(), inputs, F.one_hot(TARGETS, 3).double())
    factors = found(mlp(inplace), inputs)
    assert all(close(factors[name], expected[name]) for name in ("0", "2"))


def test_labels_as_the_network_predicts_them() -> None:
    network, inputs = mlp(), random(7, 4)
    expected = by_rows(network, inputs, torch.softmax(network(inputs), dim=1).detach())
    factors = found(network, inputs, kfac.predicted_labels(0, np.random.default_rng(0)))
    assert all(close(factors[name], expected[name]) for name in ("0", "2"))
    p = torch.softmax(network(inputs), dim=1).detach()
    closed = torch.diag(p.mean(dim=0)) - p.T @ p / 7
    assert np.abs(factors["2"].left - closed.numpy()).max() < 1e-12
    # A common shift of the logits changes no prediction.
    assert np.abs(factors["2"].left @ np.ones(3)).max() < 1e-12


def test_drawn_labels_agree_in_the_mean() -> None:
    network, inputs = mlp(), random(7, 4)
    exact = found(network, inputs, kfac.predicted_labels(0, np.random.default_rng(0)))
    drawn = found(network, inputs, kfac.predicted_labels(500, np.random.default_rng(0)))
    other = found(network, inputs)
    scale = np.abs(exact["2"].left).max()
    assert np.abs(drawn["2"].left - exact["2"].left).max() < 0.05 * scale
    assert np.abs(other["2"].left - exact["2"].left).max() > 0.1 * scale
    again = found(network, inputs, kfac.predicted_labels(500, np.random.default_rng(0)))
    assert np.array_equal(again["2"].left, drawn["2"].left)


class Conv(nn.Module):
    """A convolution, then the mean of each channel."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.conv = nn.Conv2d(4, 6, 3, **options)
            self.head = nn.Linear(6, 3)
        self.double()

    def forward(self, inputs: Any) -> Any:
        return self.head(torch.tanh(self.conv(inputs)).mean((2, 3)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2, "padding": 1, "bias": False},
        {"dilation": 2, "padding": "same"},
        {"padding": 1, "padding_mode": "circular"},
        {"groups": 2, "padding": (1, 0)},
    ],
)
def test_convolutions_place_by_place(options: dict[str, Any]) -> None:
    """Patches and gradients of every place, read off the derivatives of the layer itself."""
    network, inputs = Conv(**options), random(7, 4, 6, 5, seed=3)
    conv, groups = network.conv, options.get("groups", 1)
    output = conv(inputs)
    places = output.shape[2] * output.shape[3]
    weight = conv.weight.detach().clone().requires_grad_()

    def place(row: int, channel: int, index: int) -> Any:
        """The patch that a channel sees: the derivative of its output by its own weight."""
        own = torch.func.functional_call(conv, {"weight": weight, **_bias(conv)}, (inputs[row : row + 1],))
        return torch.autograd.grad(own[0, channel].flatten()[index], weight)[0][channel].flatten()

    gradients = []
    for row in range(7):
        out = output[row : row + 1].detach().requires_grad_()
        loss = F.cross_entropy(network.head(torch.tanh(out).mean((2, 3))), TARGETS[row : row + 1])
        gradients.append(torch.autograd.grad(loss, out)[0][0].flatten(1))
    factors = found(network, inputs)["conv"]
    for group in range(groups):
        channels = slice(group * 6 // groups, (group + 1) * 6 // groups)
        right, left = 0.0, 0.0
        for row in range(7):
            for index in range(places):
                a = place(row, channels.start, index)
                a = a if conv.bias is None else torch.cat([a, torch.ones(1).double()])
                g = gradients[row][channels, index]
                right, left = right + torch.outer(a, a), left + torch.outer(g, g)
        mine = kfac.Factors(factors.right[group], factors.left[group]) if groups > 1 else factors
        assert close(mine, (right.numpy() / (7 * places), left.numpy() / 7))


def _bias(conv: Any) -> dict[str, Any]:
    return {} if conv.bias is None else {"bias": conv.bias.detach()}


def test_a_convolution_over_the_whole_image_is_a_linear_layer() -> None:
    inputs = random(7, 2, 3, 3)
    linear = nn.Sequential(nn.Linear(18, 3)).double()
    conv = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten()).double()
    with torch.no_grad():
        conv[0].weight.copy_(linear[0].weight.reshape(3, 2, 3, 3))
        conv[0].bias.copy_(linear[0].bias)
    left, right = found(conv, inputs)["0"], found(linear, inputs.flatten(1))["0"]
    assert close(left, (right.right, right.left))


@pytest.mark.parametrize(
    "layer",
    [nn.Linear(4, 3), nn.Linear(4, 3, bias=False), nn.Conv2d(4, 6, 3), nn.Conv2d(4, 6, (3, 1), groups=2)],
)
def test_weights_as_a_matrix_and_back(layer: Any) -> None:
    names = kfac.weight_names("layer", layer)
    assert names == [f"layer.{name}" for name, _ in layer.named_parameters()]
    values = [value.detach().numpy() for value in layer.parameters()]
    matrix = kfac.as_matrix(layer, values)
    back = kfac.from_matrix(layer, matrix)
    assert all(np.array_equal(a, b) for a, b in zip(values, back, strict=True))
    if isinstance(layer, nn.Linear) and layer.bias is not None:
        row = np.random.default_rng(0).standard_normal(4).astype("float32")
        expected = layer(torch.as_tensor(row)).detach().numpy()
        assert matrix @ np.append(row, 1.0) == pytest.approx(expected, abs=1e-6)


def test_only_trained_linear_and_convolution_layers_have_factors() -> None:
    network = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 3), nn.Linear(3, 3)
    )
    names = [name for name, _ in network.named_parameters() if not name.startswith("3")]
    assert list(kfac.factored_layers(network, names)) == ["0", "4"]


def test_the_network_stays_as_it_is() -> None:
    network = mlp()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    found(network, random(7, 4))
    assert not any(module._forward_hooks for module in network.modules())
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())

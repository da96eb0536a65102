"""Feedback alignment: the specification's oracles, two independent backward passes, nothing left behind."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedsolve.errors import DataError
from fedsolve.gradient import FedAvg
from fedsolve.gradient.feedback import Feedback, changing_layers, eligible_layers, trained_layers

torch = pytest.importorskip("torch")
nn = torch.nn
F = torch.nn.functional

pytestmark = pytest.mark.torch

LAYERS = ["stem", "point", "depth", "mix", "head"]


class Small(nn.Module):
    """Convolution, batch normalisation, pointwise, depthwise in a residual, grouped, linear."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.stem = nn.Conv2d(2, 8, 3, stride=2, padding=1)
            self.norm = nn.BatchNorm2d(8)
            self.point = nn.Conv2d(8, 8, 1, bias=False)
            self.depth = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=8)
            self.mix = nn.Conv2d(8, 12, 3, stride=2, groups=4)
            self.head = nn.Linear(12, 5)
        self.double()

    def forward(self, inputs: Any) -> Any:
        hidden = torch.relu(self.norm(self.stem(inputs)))
        hidden = torch.tanh(self.point(hidden))
        hidden = hidden + self.depth(hidden)
        return self.head(torch.relu(self.mix(hidden)).mean((2, 3)))


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def random(*shape: int, seed: int = 0) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


INPUTS = random(6, 2, 11, 11, seed=1)
TARGETS = torch.tensor([0, 1, 2, 3, 4, 0])


def gradients(network: Any, inputs: Any = INPUTS, targets: Any = TARGETS) -> dict[str, Any]:
    network.zero_grad()
    F.cross_entropy(network(inputs), targets).backward()
    return {name: parameter.grad.clone() for name, parameter in network.named_parameters()}


def moved(network: Any, seed: int = 7, by: float = 0.3) -> None:
    """Change every weight, as local training does."""
    generator = np.random.default_rng(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += by * torch.from_numpy(generator.standard_normal(tuple(parameter.shape)))


def same_bits(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def train(
    network: Any, layers: list[str], steps: int, rate: float = 0.2, **options: Any
) -> list[dict[str, Any]]:
    seen = []
    optimiser = torch.optim.SGD(network.parameters(), lr=rate, momentum=0.9)
    with Feedback(network, layers, **options) as feedback:
        for step in range(steps):
            seen.append(gradients(network, INPUTS + step))
            optimiser.step()
            feedback.rescale()
    return seen


# Which layers


def test_eligible_layers_in_order_and_those_after_the_first():
    network = Small()
    assert eligible_layers(network) == trained_layers(network) == LAYERS
    assert changing_layers(network, INPUTS) == LAYERS[1:]
    assert eligible_layers(nn.Linear(3, 2)) == [""]
    assert changing_layers(nn.Linear(3, 2), torch.zeros(2, 3)) == []


def test_trying_which_layers_change_leaves_the_network_as_it_is():
    network = Small()
    network.stem.requires_grad_(False)
    before, state = {n: v.clone() for n, v in network.state_dict().items()}, torch.get_rng_state()
    assert trained_layers(network) == LAYERS[1:]
    changing_layers(network, INPUTS)
    assert network.training
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(part._forward_pre_hooks for part in network.modules())


def test_layers_with_a_forward_of_their_own_are_not_eligible():
    class Standardised(nn.Conv2d):
        def forward(self, inputs: Any) -> Any:
            return F.conv2d(inputs, self.weight - self.weight.mean(), self.bias)

    network = nn.ModuleDict(
        {
            "own": Standardised(2, 2, 1),
            "turned": nn.ConvTranspose2d(2, 2, 1),
            "attention": nn.MultiheadAttention(4, 2),
            "plain": nn.Linear(4, 4),
        }
    )
    assert eligible_layers(network) == ["plain"]


def test_unknown_layer_names_the_near_ones():
    with pytest.raises(DataError, match=r"no layer 'steem'.*stem"):
        Feedback(Small(), ["steem"])
    with pytest.raises(DataError, match=r"'norm' is a BatchNorm2d.*Conv2d and Linear"):
        Feedback(Small(), ["norm"])
    with pytest.raises(DataError, match=r"none is eligible"):
        Feedback(nn.ReLU(), ["stem"])


@pytest.mark.parametrize("option", ["matrix", "scaling", "route"])
def test_unknown_options_are_refused(option):
    with pytest.raises(DataError, match=f"feedback_{option} must be .*got 'other'"):
        FedAvg(network="mlp:6", feedback="lowest", **{f"feedback_{option}": "other"})


# Where it changes nothing


@pytest.mark.parametrize("layers", [[], ["stem"]], ids=["empty set", "first layer"])
def test_changes_nothing_over_many_steps(layers):
    plain, aligned = Small(), Small()
    optimiser = torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.9)
    expected = []
    for step in range(4):
        expected.append(gradients(plain, INPUTS + step))
        optimiser.step()
    assert all(map(same_bits, train(aligned, layers, 4), expected))
    assert same_bits(plain.state_dict(), aligned.state_dict())


@pytest.mark.parametrize("scaling", ["layer", "row", "none"])
def test_first_local_step_is_backpropagation(scaling):
    network = Small()
    expected = gradients(network)
    for layers in (*([name] for name in LAYERS), LAYERS):
        with Feedback(network, layers, scaling=scaling):
            assert same_bits(gradients(network), expected)


def test_standing_still_keeps_the_received_weights_to_the_last_bit():
    network = Small()
    with Feedback(network, LAYERS) as feedback:
        feedback.rescale()
        for name in LAYERS:
            assert torch.equal(feedback.chosen[name].matrix, network.get_submodule(name).weight)


@pytest.mark.parametrize("scaling", ["layer", "row"])
@pytest.mark.parametrize("factor", [0.25, 2.0, 0.3, 1.7])
def test_rescaled_weights_are_their_own_feedback(factor, scaling):
    network = Small()
    with Feedback(network, LAYERS, scaling=scaling) as feedback:
        with torch.no_grad():
            for name in LAYERS:
                network.get_submodule(name).weight.mul_(factor)
        feedback.rescale()
        aligned = gradients(network)
        powers = factor in (0.25, 2.0)  # of two, which do not round
        for name in LAYERS:
            matrix, weight = feedback.chosen[name].matrix, network.get_submodule(name).weight
            torch.testing.assert_close(matrix, weight, rtol=0 if powers else 1e-14, atol=0)
    expected = gradients(network)
    for name, gradient in expected.items():
        tolerance = {"rtol": 0, "atol": 0} if powers else {"rtol": 1e-10, "atol": 1e-14}
        torch.testing.assert_close(aligned[name], gradient, **tolerance)


def test_frozen_features_under_a_head_are_a_no_op():
    network = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5)).double()
    network[0].requires_grad_(False)
    inputs = random(6, 4)
    with Feedback(network, ["1"]) as feedback:
        moved(network[1])
        feedback.rescale()
        F.cross_entropy(network(inputs), TARGETS).backward()
        aligned = network[1].weight.grad.clone()
    network.zero_grad()
    F.cross_entropy(network(inputs), TARGETS).backward()
    assert torch.equal(aligned, network[1].weight.grad)


# What it does change


def detached(inputs: Any, operation: Callable[..., Any], weight: Any, bias: Any, matrix: Any) -> Any:
    """Feedback alignment without a backward of its own: the value of w, the input gradient of B."""
    through = operation(inputs, matrix.detach(), None)
    return operation(inputs.detach(), weight, bias) + (through - through.detach())


def both_ways(module: Any, inputs: Any, seed: int = 3) -> tuple[list[Any], list[Any]]:
    """Output and gradients by input, weight and bias: by Feedback, and by the detach form."""
    module = module.double()
    results = []
    start = module.weight.detach().clone()
    inputs = inputs.clone().requires_grad_()
    with Feedback(module, [""], scaling="none"):
        moved(module)
        values = module(inputs)
        error = random(*values.shape, seed=seed)
        wanted = [inputs, *module.parameters()]
        results.append([values.detach(), *torch.autograd.grad(values, wanted, error)])

    def operation(inputs: Any, weight: Any, bias: Any) -> Any:
        if isinstance(module, nn.Linear):
            return F.linear(inputs, weight, bias)
        return module._conv_forward(inputs, weight, bias)

    values = detached(inputs, operation, module.weight, module.bias, start)
    results.append([values.detach(), *torch.autograd.grad(values, wanted, error)])
    plain = torch.autograd.grad(module(inputs), wanted, error)
    assert not torch.equal(results[0][1], plain[0])
    return results[0], results[1]


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_convolution_equals_the_detach_form(groups, stride, dilation):
    module = nn.Conv2d(8, 16, 3, stride=stride, padding=1, dilation=dilation, groups=groups)
    ours, other = both_ways(module, random(3, 8, 11, 9))
    assert all(map(torch.equal, ours, other))


@pytest.mark.parametrize(
    ("arguments", "shape"),
    [
        ({"kernel_size": 3, "padding": "same"}, (2, 4, 7, 8)),
        ({"kernel_size": (4, 3), "padding": "same"}, (2, 4, 7, 8)),
        ({"kernel_size": (3, 2), "padding": "same", "dilation": (2, 3)}, (2, 4, 9, 8)),
        ({"kernel_size": 3, "padding": "valid", "stride": 2}, (2, 4, 7, 8)),
        ({"kernel_size": 3, "padding": (2, 1), "padding_mode": "reflect"}, (2, 4, 7, 8)),
        ({"kernel_size": 3, "padding": 1, "padding_mode": "replicate", "stride": (2, 1)}, (2, 4, 7, 8)),
        ({"kernel_size": (2, 3), "padding": "same", "padding_mode": "circular"}, (2, 4, 7, 8)),
        ({"kernel_size": (1, 5), "padding": (0, 2), "bias": False}, (2, 4, 7, 8)),
        ({"kernel_size": 3, "padding": 1}, (4, 7, 8)),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_every_kind_of_padding_equals_the_detach_form(arguments, shape):
    ours, other = both_ways(nn.Conv2d(4, 6, **arguments), random(*shape))
    assert all(map(torch.equal, ours, other))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 7), (2, 5, 7), (7,)])
def test_linear_equals_the_detach_form(shape, bias):
    ours, other = both_ways(nn.Linear(7, 4, bias=bias), random(*shape))
    assert all(map(torch.equal, ours, other))


def test_whole_network_equals_the_detach_form_at_every_step():
    class Detached(Small):
        start: dict[str, Any]

        def forward(self, inputs: Any) -> Any:
            def point(hidden: Any, weight: Any, bias: Any) -> Any:
                return F.conv2d(hidden, weight, bias)

            def depth(hidden: Any, weight: Any, bias: Any) -> Any:
                return F.conv2d(hidden, weight, bias, padding=2, dilation=2, groups=8)

            def feedback(name: str) -> Any:
                weight, start = self.get_submodule(name).weight.detach(), self.start[name]
                return start * (weight.norm() / start.norm())

            hidden = torch.relu(self.norm(self.stem(inputs)))
            hidden = torch.tanh(detached(hidden, point, self.point.weight, None, feedback("point")))
            hidden = hidden + detached(hidden, depth, self.depth.weight, self.depth.bias, feedback("depth"))
            return self.head(torch.relu(self.mix(hidden)).mean((2, 3)))

    ours, other = Small(), Detached()
    other.start = {name: other.get_submodule(name).weight.detach().clone() for name in ("point", "depth")}
    optimiser = torch.optim.SGD(other.parameters(), lr=0.2, momentum=0.9)
    expected = []
    for step in range(4):
        expected.append(gradients(other, INPUTS + step))
        optimiser.step()
    for left, right in zip(train(ours, ["point", "depth"], 4), expected, strict=True):
        assert same_bits(left, right)


def test_two_linear_layers_by_hand():
    """Loss |w2 w1 x - y|² / 2: gradient of w1 is (Bᵀ e) xᵀ, of w2 it is e (w1 x)ᵀ."""
    network = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)).double()
    start = network[1].weight.detach().numpy().copy()
    x, y = np.array([0.5, -1.0, 2.0]), np.array([1.0, -2.0])
    with Feedback(network, ["1"]) as feedback:
        moved(network)
        feedback.rescale()
        loss = (network(torch.from_numpy(x)) - torch.from_numpy(y)).square().sum() / 2
        loss.backward()
    w1, w2 = (layer.weight.detach().numpy() for layer in network)
    error = w2 @ w1 @ x - y
    matrix = start * np.linalg.norm(w2) / np.linalg.norm(start)
    np.testing.assert_allclose(network[0].weight.grad, np.outer(matrix.T @ error, x), rtol=1e-12)
    np.testing.assert_allclose(network[1].weight.grad, np.outer(error, w1 @ x), rtol=1e-12)


@pytest.mark.parametrize("position", [1, 2, 3, 4])
def test_the_layer_and_those_after_it_keep_their_gradients_at_every_step(position):
    name = LAYERS[position]
    network = Small()
    optimiser = torch.optim.SGD(network.parameters(), lr=0.2, momentum=0.9)
    with Feedback(network, [name]) as feedback:
        for step in range(4):
            plain = Small()
            plain.load_state_dict(network.state_dict())
            ours, expected = gradients(network, INPUTS + step), gradients(plain, INPUTS + step)
            for layer in LAYERS[position:]:
                assert torch.equal(ours[f"{layer}.weight"], expected[f"{layer}.weight"])
            equal = torch.equal(ours["stem.weight"], expected["stem.weight"])
            assert equal == (step == 0)
            optimiser.step()
            feedback.rescale()


def test_residual_skip_keeps_its_ordinary_gradient():
    """With W^r = 0 nothing returns through the branch, whatever its weight has become."""

    class Cut(Small):
        def forward(self, inputs: Any) -> Any:
            hidden = torch.relu(self.norm(self.stem(inputs)))
            hidden = torch.tanh(self.point(hidden))
            hidden = hidden + self.depth(hidden.detach())
            return self.head(torch.relu(self.mix(hidden)).mean((2, 3)))

    network, cut = Small(), Cut()
    nn.init.zeros_(network.depth.weight)
    with Feedback(network, ["depth"]) as feedback:
        moved(network)
        feedback.rescale()
        cut.load_state_dict(network.state_dict())
        ours, expected = gradients(network), gradients(cut)
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("scaling", ["layer", "row"])
def test_layers_that_start_at_zero_stay_finite(scaling):
    network = Small()
    nn.init.zeros_(network.mix.weight)
    nn.init.zeros_(network.head.weight[0])
    with Feedback(network, ["mix", "head"], scaling=scaling) as feedback:
        moved(network)
        feedback.rescale()
        assert torch.equal(feedback.chosen["mix"].matrix, torch.zeros_like(network.mix.weight))
        assert torch.isfinite(feedback.chosen["head"].matrix).all()
        assert not feedback.chosen["head"].matrix[0].any()
        assert all(torch.isfinite(gradient).all() for gradient in gradients(network).values())


# Scaling


@pytest.mark.parametrize("scaling", ["layer", "row", "none"])
def test_feedback_follows_the_norm_asked_for(scaling):
    network = Small()
    start = network.mix.weight.detach().clone()
    with Feedback(network, ["mix"], scaling=scaling) as feedback:
        for seed in range(3):
            moved(network, seed)
            feedback.rescale()
        matrix, weight = feedback.chosen["mix"].matrix, network.mix.weight
    if scaling == "none":
        assert torch.equal(matrix, start)
    elif scaling == "layer":
        expected = start * (weight.norm() / start.norm())
        torch.testing.assert_close(matrix, expected, rtol=1e-13, atol=0)
    else:
        for row in range(len(start)):
            expected = start[row] * (weight[row].norm() / start[row].norm())
            torch.testing.assert_close(matrix[row], expected, rtol=1e-13, atol=0)


def test_row_and_layer_scaling_agree_for_one_output():
    found = []
    received = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 1, 3), nn.Flatten()).double()
    for scaling in ("layer", "row"):
        network = copy.deepcopy(received)
        with Feedback(network, ["1"], scaling=scaling) as feedback:
            moved(network, 2)
            feedback.rescale()
            network(INPUTS).square().sum().backward()
        found.append({name: p.grad for name, p in network.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-12, atol=0)


# Random and direct feedback


def test_random_feedback_is_fixed_by_the_seed_and_has_the_norm_of_the_weights():
    network = Small()
    matrices = []
    for seed in (3, 3, 4):
        with Feedback(network, ["mix", "head"], matrix="random", seed=seed) as feedback:
            torch.testing.assert_close(feedback.chosen["mix"].matrix.norm(), network.mix.weight.norm())
            matrices.append(feedback.chosen["mix"].matrix.clone())
    assert torch.equal(matrices[0], matrices[1])
    assert abs(float(F.cosine_similarity(matrices[0].flatten(), matrices[2].flatten(), dim=0))) < 0.3
    moved(network)
    with Feedback(network, ["mix"], matrix="random", seed=3) as feedback:
        direction = feedback.chosen["mix"].matrix / feedback.chosen["mix"].matrix.norm()
        torch.testing.assert_close(direction, matrices[0] / matrices[0].norm(), rtol=1e-13, atol=0)
        moved(network, 9)
        feedback.rescale()
        torch.testing.assert_close(feedback.chosen["mix"].matrix.norm(), network.mix.weight.norm())


def test_random_feedback_reaches_only_earlier_layers():
    network = Small()
    expected = gradients(network)
    with Feedback(network, ["mix"], matrix="random"):
        ours = gradients(network)
    for name in ("mix", "head"):
        assert torch.equal(ours[f"{name}.weight"], expected[f"{name}.weight"])
    assert not torch.equal(ours["stem.weight"], expected["stem.weight"])


def direct_matrix(name: str, outputs: int, width: int, seed: int) -> Any:
    from fedsolve.arrays import philox_uniforms, uniform_key

    size = outputs * width
    uniform = philox_uniforms(uniform_key(seed, f"feedback {name}", 0, 0, size), size).reshape(outputs, width)
    return torch.from_numpy((2 * uniform - 1) / np.sqrt(outputs))


def test_direct_feedback_by_formula():
    """h = tanh(w1 x), output w2 h: w1's gradient is ((e R) * (1 - h²))ᵀ x, with e the output's error."""
    network = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 5)).double()
    inputs = random(6, 4)
    with Feedback(network, ["2"], route="direct", seed=5) as feedback:
        F.cross_entropy(network(inputs), TARGETS).backward()
        feedback.rescale()
    with torch.no_grad():
        hidden = torch.tanh(network[0](inputs))
        error = (torch.softmax(network[2](hidden), 1) - F.one_hot(TARGETS, 5)) / 6
        back = error @ direct_matrix("2", 5, 3, 5) * (1 - hidden**2)
    torch.testing.assert_close(network[0].weight.grad, back.T @ inputs, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(network[0].bias.grad, back.sum(0), rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(network[2].weight.grad, error.T @ hidden, rtol=1e-12, atol=1e-15)


def test_direct_feedback_in_a_convolution_and_two_passes():
    """Each pass uses the error of its own output, also when both are backpropagated together."""
    network = Small().eval()
    single = []
    with Feedback(network, ["depth"], route="direct", seed=1):
        for part in (INPUTS, INPUTS * 2):
            single.append(gradients(network, part)["stem.weight"])
        network.zero_grad()
        losses = [F.cross_entropy(network(part), TARGETS) for part in (INPUTS, INPUTS * 2)]
        sum(losses).backward()
        torch.testing.assert_close(network.stem.weight.grad, single[0] + single[1], rtol=1e-12, atol=1e-16)
        with pytest.raises(DataError, match="whole network must be called"):
            network.depth(random(1, 8, 6, 6))
    assert not network._forward_hooks
    assert not network._forward_pre_hooks


def test_direct_feedback_without_an_error_at_the_output_passes_nothing():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 5)

        def forward(self, inputs: Any) -> Any:
            self.middle = self.second(self.first(inputs))
            return self.head(self.middle)

    network = Two().double()
    with Feedback(network, ["second"], route="direct"):
        network(random(6, 4))
        network.middle.square().sum().backward()
    assert network.second.weight.grad.any()
    assert not network.first.weight.grad.any()


def test_direct_feedback_needs_one_tensor_and_rows_that_match():
    class Several(nn.Module):
        def __init__(self, fold: bool) -> None:
            super().__init__()
            self.first, self.second, self.fold = nn.Linear(4, 4), nn.Linear(4, 4), fold

        def forward(self, inputs: Any) -> Any:
            values = self.second(self.first(inputs))
            return values.reshape(-1, 8) if self.fold else (values, values)

    for fold, message in ((False, "returns one tensor; got tuple"), (True, "gave 3 for 6")):
        network = Several(fold)
        with Feedback(network, ["second"], route="direct"), pytest.raises(DataError, match=message):
            network(torch.ones(6, 4)).sum().backward()


# Nothing is left behind


def test_adds_no_parameter_buffer_or_state():
    network = Small()
    names, parameters = list(network.state_dict()), list(map(id, network.parameters()))
    buffers = [name for name, _ in network.named_buffers()]
    saved = io.BytesIO()
    for route in ("layer", "direct"):
        with Feedback(network, LAYERS, route=route):
            gradients(network)
            assert list(network.state_dict()) == names
            assert list(map(id, network.parameters())) == parameters
            assert [name for name, _ in network.named_buffers()] == buffers
            torch.save(network.state_dict(), saved)
        assert all("forward" not in vars(module) for module in network.modules())


def test_a_copy_made_within_the_block_runs_its_own_weights():
    network = Small().eval()
    for route in ("layer", "direct"):
        with Feedback(network, LAYERS, route=route):
            other = copy.deepcopy(network)
            moved(other)
            plain = Small().eval()
            plain.load_state_dict(other.state_dict())
            assert torch.equal(other(INPUTS), plain(INPUTS))


def test_forward_comes_back_after_an_error_and_keeps_one_set_before():
    network = Small()
    marked = network.head.forward
    network.head.forward = marked
    expected = gradients(network)
    with pytest.raises(RuntimeError, match="expected input"), Feedback(network, LAYERS):
        network(INPUTS[:, :1])
    assert network.head.__dict__["forward"] is marked
    assert "forward" not in network.mix.__dict__
    assert same_bits(gradients(network), expected)


def test_a_failing_entry_leaves_the_network_as_it_was(monkeypatch):
    from fedsolve.gradient import feedback

    network = Small()

    def failing(function: Any, module: Any) -> Any:
        if module is network.head:
            raise MemoryError
        return types.MethodType(function, module)

    monkeypatch.setattr(feedback, "MethodType", failing)
    with pytest.raises(MemoryError), Feedback(network, LAYERS):
        pass
    assert all("forward" not in vars(module) for module in network.modules())


def test_one_feedback_is_not_entered_twice_but_serves_one_client_after_another():
    network = Small()
    feedback = Feedback(network, ["mix"])
    with pytest.raises(DataError, match="before the feedback was entered"):
        feedback.rescale()
    with feedback, pytest.raises(DataError, match="already in use"):
        feedback.__enter__()
    with feedback:
        moved(network)
        feedback.receive()
        assert torch.equal(feedback.chosen["mix"].matrix, network.mix.weight)
        ours = gradients(network)
    assert same_bits(ours, gradients(network))


# When it is rescaled


def test_the_matrix_keeps_its_address_and_an_old_graph_is_refused():
    network = Small()
    with Feedback(network, ["mix"]) as feedback:
        address = feedback.chosen["mix"].matrix.data_ptr()
        loss = F.cross_entropy(network(INPUTS), TARGETS)
        with torch.no_grad():
            network.mix.weight.mul_(3.0)  # itself not needed by backward
        feedback.rescale()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        assert feedback.chosen["mix"].matrix.data_ptr() == address
        feedback.receive()
        assert feedback.chosen["mix"].matrix.data_ptr() == address
        assert torch.equal(feedback.chosen["mix"].matrix, network.mix.weight)


def test_agreement_at_the_end_of_a_round():
    network = Small()
    with Feedback(network, ["mix", "head"]) as feedback:
        first = feedback.agreement()
        start = network.mix.weight.detach().clone()
        moved(network)
        feedback.rescale()
        last = feedback.agreement()
    assert first["head"].ratio == pytest.approx(1, abs=1e-15)
    assert first["head"].cosine == pytest.approx(1, abs=1e-14)
    weight = network.mix.weight.detach()
    assert last["mix"].ratio == pytest.approx(float(weight.norm() / start.norm()), rel=1e-13)
    cosine = F.cosine_similarity(start.flatten(), weight.flatten(), dim=0)
    assert last["mix"].cosine == pytest.approx(float(cosine), rel=1e-12)


def test_lower_precision_under_autocast():
    network = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(196, 5))

    def one() -> list[Any]:
        network.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(network(INPUTS.float()), TARGETS)
        loss.backward()
        return [parameter.grad.clone() for parameter in network.parameters()]

    expected = one()
    with Feedback(network, ["1", "3"]):
        assert all(map(torch.equal, one(), expected))


@pytest.mark.slow
def test_importable_without_torch():
    modules = "fedsolve.gradient.feedback, fedsolve.gradient.alignment"
    code = f"import scipy.stats, sys; sys.modules['torch'] = None; import {modules}"
    subprocess.run([sys.executable, "-c", code], check=True)

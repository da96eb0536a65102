"""Networks by name: known sizes, order of layers, initial weights, inputs, and the user's own modules."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fedsolve.errors import DataError
from fedsolve.gradient import FedAvg, networks, slots
from fedsolve.gradient.networks import (
    as_inputs,
    batch_norms,
    build_network,
    draws,
    features_of,
    float_buffers,
    float_parameters,
    head_of,
    input_shape,
    register_network,
    stacked_widths,
)
from fedsolve.gradient.networks.initial import network_seed
from fedsolve.gradient.networks.stages import MOBILENET_BLOCKS, MOBILENET_STAGES, stage_of

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
mobilenet = pytest.importorskip("fedsolve.gradient.networks.mobilenet")

pytestmark = pytest.mark.torch

DEEP = ["cnn", "mobilenet_v2", "mobilenet_v2:gn", "resnet18", "resnet18:gn", "resnet50", "resnet50:gn"]
ALL = ["linear", "mlp", "mlp:32,16,8", *DEEP]


def count(network: Any) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def inputs_for(name: str, features: int = 3072, rows: int = 2, dtype: str = "float32") -> Any:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(rows, features, generator=generator)
    return as_inputs(values, input_shape(name, features), dtype)


def same_bits(first: Any, second: Any) -> bool:
    first, second = first.state_dict(), second.state_dict()
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


# --- sizes and shapes


@pytest.mark.parametrize(
    ("name", "features", "outputs", "parameters"),
    [
        ("linear", 512, 10, 5_130),
        ("mlp", 512, 10, 512 * 256 + 256 + 2_570),
        ("mlp:8,4", 16, 3, 16 * 8 + 8 + 8 * 4 + 4 + 4 * 3 + 3),
        ("mlp:8x3", 16, 3, 16 * 8 + 8 + 2 * (8 * 8 + 8) + 8 * 3 + 3),
        ("cnn", 784, 10, 1_663_370),  # as McMahan et al. 2017 report
        ("mobilenet_v2", 3072, 10, 2_236_682),
        ("mobilenet_v2:gn", 3072, 10, 2_236_682),
        ("mobilenet_v2:stock", 3072, 10, 2_236_682),
        ("resnet18", 3072, 10, 11_173_962),
        ("resnet18:gn", 3072, 10, 11_173_962),
        ("resnet50", 3072, 10, 23_520_842),
        ("resnet50:gn", 3072, 10, 23_520_842),
        ("mobilenet_v2", 784, 100, 2_236_682 - 2 * 9 * 32 + 90 * 1281),
        ("resnet18", 784, 100, 11_173_962 - 2 * 9 * 64 + 90 * 513),
    ],
)
def test_known_numbers_of_parameters(name: str, features: int, outputs: int, parameters: int) -> None:
    assert count(build_network(name, features, outputs)) == parameters


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("features", [784, 1024, 2352, 3072])
def test_forward_at_small_sizes(name: str, features: int) -> None:
    network = build_network(name, features, 7)
    assert network.training
    logits = network(inputs_for(name, features))
    assert logits.shape == (2, 7)
    assert torch.isfinite(logits).all()
    assert (logits.abs().sum() > 0) == (name != "linear")


@pytest.mark.parametrize(("name", "last"), [("mobilenet_v2", "last"), ("resnet18", "stages.3")])
def test_small_images_keep_some_extent(name: str, last: str) -> None:
    for features in (784, 3072):
        network = build_network(name, features, 10)
        sizes: list[tuple[int, ...]] = []
        network.get_submodule(last).register_forward_hook(
            lambda part, given, made, sizes=sizes: sizes.append(tuple(made.shape[2:]))
        )
        network(inputs_for(name, features))
        assert sizes == [(4, 4)]


@pytest.mark.parametrize("name", ALL)
def test_layers_are_registered_as_they_run(name: str) -> None:
    network = build_network(name, 3072, 10)
    layers = {name: part for name, part in network.named_modules() if isinstance(part, nn.Conv2d | nn.Linear)}
    run: list[str] = []
    for layer, part in layers.items():
        part.register_forward_pre_hook(lambda part, given, layer=layer: run.append(layer))
    network(inputs_for(name)).sum().backward()
    assert run == list(layers)
    assert run[-1] == "classifier"
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_depths() -> None:
    def layers(name: str) -> int:
        return sum(
            isinstance(part, nn.Conv2d | nn.Linear) for part in build_network(name, 3072, 10).modules()
        )

    assert layers("resnet18") == 18 + 3
    assert layers("resnet50") == 50 + 4
    assert layers("mobilenet_v2") == 53


# --- a second opinion on the deep networks: out of place, from the weights alone


class Reference:
    """The published networks as functions of named weights, with batch statistics, nothing in place."""

    def __init__(self, network: Any) -> None:
        self.weights = dict(network.named_parameters())

    def convolution(self, name: str, maps: Any, stride: int = 1, groups: int = 1) -> Any:
        weight = self.weights[f"{name}.weight"]
        return F.conv2d(maps, weight, None, stride, weight.shape[-1] // 2, 1, groups)

    def normalised(self, name: str, maps: Any) -> Any:
        mean = maps.mean((0, 2, 3), keepdim=True)
        variance = (maps - mean).square().mean((0, 2, 3), keepdim=True)
        scale, shift = (self.weights[f"{name}.{part}"][:, None, None] for part in ("weight", "bias"))
        return (maps - mean) / torch.sqrt(variance + 1e-5) * scale + shift

    def head(self, maps: Any) -> Any:
        return F.linear(maps.mean((2, 3)), self.weights["classifier.weight"], self.weights["classifier.bias"])

    def mobilenet(self, images: Any) -> Any:
        maps = F.relu6(self.normalised("stem_norm", self.convolution("stem", images)))
        for index in range(17):
            name = f"blocks.{index}"
            wide = maps
            if index:
                wide = self.normalised(f"{name}.expand_norm", self.convolution(f"{name}.expand", wide))
                wide = F.relu6(wide)
            stride = 2 if index in (3, 6, 13) else 1
            wide = self.convolution(f"{name}.depthwise", wide, stride, wide.shape[1])
            wide = F.relu6(self.normalised(f"{name}.depthwise_norm", wide))
            narrow = self.normalised(f"{name}.project_norm", self.convolution(f"{name}.project", wide))
            # The first block of every stage changes the width.
            maps = narrow if index in (0, 1, 3, 6, 10, 13, 16) else maps + narrow
        return self.head(F.relu6(self.normalised("last_norm", self.convolution("last", maps))))

    def resnet(self, images: Any, depths: tuple[int, ...], bottleneck: bool) -> Any:
        maps = F.relu(self.normalised("stem_norm", self.convolution("stem", images)))
        for stage, depth in enumerate(depths):
            for index in range(depth):
                name = f"stages.{stage}.{index}"
                strides = [1, 1, 1] if bottleneck else [1, 1]
                strided = stage > 0 and index == 0
                if strided:
                    strides[1 if bottleneck else 0] = 2
                main = maps
                for number, stride in enumerate(strides, 1):
                    main = self.convolution(f"{name}.conv{number}", main, stride)
                    main = self.normalised(f"{name}.norm{number}", main)
                    main = main if number == len(strides) else F.relu(main)
                if strided or (bottleneck and index == 0):
                    maps = self.convolution(f"{name}.shortcut", maps, 2 if strided else 1)
                    maps = self.normalised(f"{name}.shortcut_norm", maps)
                maps = F.relu(maps + main)
        return self.head(maps)


@pytest.mark.parametrize(
    "name", ["mobilenet_v2", "resnet18", pytest.param("resnet50", marks=pytest.mark.slow)]
)
def test_logits_and_gradients_against_the_published_network(name: str) -> None:
    network = build_network(name, 3 * 16 * 16, 5, dtype="float64", shape=(3, 16, 16))
    images = torch.randn(3, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    targets = torch.tensor([0, 3, 4])
    logits = network(images)
    found = torch.autograd.grad(F.cross_entropy(logits, targets), list(network.parameters()))
    reference = Reference(network)
    if name == "mobilenet_v2":
        expected = reference.mobilenet(images)
    else:
        depths = (2, 2, 2, 2) if name == "resnet18" else (3, 4, 6, 3)
        expected = reference.resnet(images, depths, name == "resnet50")
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-12)
    gradients = torch.autograd.grad(F.cross_entropy(expected, targets), list(network.parameters()))
    largest = max(float(gradient.abs().max()) for gradient in gradients)
    for mine, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-10 * largest)


def test_small_cnn_against_the_published_network() -> None:
    network = build_network("cnn", 784, 10, dtype="float64")
    images = inputs_for("cnn", 784, rows=3, dtype="float64")
    w = dict(network.named_parameters())

    def reference() -> Any:
        maps = F.max_pool2d(F.relu(F.conv2d(images, w["conv1.weight"], w["conv1.bias"], padding=2)), 2)
        maps = F.max_pool2d(F.relu(F.conv2d(maps, w["conv2.weight"], w["conv2.bias"], padding=2)), 2)
        hidden = F.relu(F.linear(maps.flatten(1), w["hidden.weight"], w["hidden.bias"]))
        return F.linear(hidden, w["classifier.weight"], w["classifier.bias"])

    logits, expected = network(images), reference()
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-14)
    for mine, theirs in zip(
        torch.autograd.grad(logits.square().sum(), list(w.values())),
        torch.autograd.grad(expected.square().sum(), list(w.values())),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_batch_norm_is_that_of_torch_without_the_count() -> None:
    mine = next(p for p in build_network("resnet18", 3072, 2).modules() if isinstance(p, nn.BatchNorm2d))
    theirs = nn.BatchNorm2d(mine.num_features)
    for seed in range(3):
        maps = torch.randn(4, mine.num_features, 5, 5, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(mine(maps), theirs(maps))
    assert torch.equal(mine.running_mean, theirs.running_mean)
    assert torch.equal(mine.running_var, theirs.running_var)
    assert (int(mine.num_batches_tracked), int(theirs.num_batches_tracked)) == (0, 3)
    assert torch.equal(mine.eval()(maps), theirs.eval()(maps))
    for each in (mine, theirs):
        each.train().track_running_stats = False
    assert torch.equal(mine(2 * maps + 1), theirs(2 * maps + 1))
    assert torch.equal(mine.running_mean, theirs.running_mean)
    # A plain dict of tensors, as it comes from a message, loads without the version torch adds.
    build_network("resnet18", 3072, 2).load_state_dict(dict(build_network("resnet18", 3072, 2).state_dict()))


@pytest.mark.parametrize(
    ("name", "convolutions", "activations", "sums"),
    [("mobilenet_v2", 52, 35, 10), ("resnet18", 20, 17, 8), ("resnet50", 53, 49, 16)],
)
def test_a_forward_pass_runs_nothing_but_the_layers(
    name: str, convolutions: int, activations: int, sums: int
) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    run: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            run.append(call.overloadpacket.__name__)
            return call(*args, **(kwargs or {}))

    network, images = build_network(name, 784, 10), inputs_for(name, 784)
    with Watch():
        network(images)
    # Empty memory and views are no work; batch normalisation has had several names inside torch.
    work = Counter(
        "batch_norm" if "batch_norm" in each else each for each in run if each not in ("empty", "t", "detach")
    )
    assert work == {
        "convolution": convolutions,
        "batch_norm": convolutions,
        "hardtanh" if name == "mobilenet_v2" else "relu_": activations,
        "add_": sums,
        "mean": 1,
        "addmm": 1,
    }


# --- initial weights


@pytest.mark.parametrize("name", ALL)
def test_initial_weights_depend_on_the_seed_alone(name: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build_network(name, 784, 10, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert same_bits(first, build_network(name, 784, 10, seed=5))
    assert same_bits(first, build_network(name, 784, 10, seed=6)) == (name == "linear")
    assert not any(value.is_meta for value in first.state_dict().values())
    assert all(torch.isfinite(value).all() for value in first.state_dict().values())


def test_threads_that_draw_do_not_disturb() -> None:
    expected = build_network("mlp:64", 200, 10, seed=1)
    with ThreadPoolExecutor(4) as pool:
        noise = [pool.submit(torch.rand, 1000) for _ in range(50)]
        made = [pool.submit(build_network, "mlp:64", 200, 10, seed=1) for _ in range(8)]
        noise += [pool.submit(torch.rand, 1000) for _ in range(50)]
        assert all(same_bits(each.result(), expected) for each in made)
        assert all(each.result().shape == (1000,) for each in noise)


def test_linear_starts_at_zero() -> None:
    network = build_network("linear", 20, 3)
    assert all(not value.any() for value in network.parameters())
    assert [type(part) for part in network.modules()][1:] == [nn.Linear]


@pytest.mark.parametrize("name", ["mlp:32,16", "cnn"])
def test_torch_defaults_where_they_are_promised(name: str) -> None:
    network = build_network(name, 784, 10, seed=4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(network_seed(4))
        for part in network.modules():
            if isinstance(part, nn.Linear):
                plain: Any = nn.Linear(part.in_features, part.out_features)
            elif isinstance(part, nn.Conv2d):
                plain = nn.Conv2d(part.in_channels, part.out_channels, part.kernel_size)
            else:
                continue
            assert torch.equal(part.weight, plain.weight)
            assert torch.equal(part.bias, plain.bias)


@pytest.mark.parametrize("name", ["mobilenet_v2", "resnet18"])
def test_spread_of_the_convolutions(name: str) -> None:
    network = build_network(name, 3072, 10)
    for part in network.modules():
        if isinstance(part, nn.Conv2d) and part.weight.numel() > 10_000:
            fan_out = part.out_channels * part.kernel_size[0] ** 2
            assert float(part.weight.detach().std()) == pytest.approx((2 / fan_out) ** 0.5, rel=0.05)
        if isinstance(part, nn.BatchNorm2d):
            assert torch.equal(part.weight, torch.ones_like(part.weight))
            assert torch.equal(part.running_var, torch.ones_like(part.running_var))
            assert not part.bias.any()
            assert not part.running_mean.any()
    if name == "mobilenet_v2":
        assert float(network.classifier.weight.detach().std()) == pytest.approx(0.01, rel=0.05)
        assert not network.classifier.bias.any()


def test_double_precision_starts_from_the_same_numbers() -> None:
    single = build_network("mobilenet_v2", 784, 10)
    double = build_network("mobilenet_v2", 784, 10, dtype="float64")
    assert {value.dtype for value in float_parameters(double).values()} == {torch.float64}
    assert {value.dtype for value in float_buffers(double).values()} == {torch.float64}
    assert same_bits(single.double(), double)


def test_the_stock_network_has_the_strides_and_dropout_of_its_paper() -> None:
    small, stock = (build_network(name, 3 * 64 * 64, 10) for name in ("mobilenet_v2", "mobilenet_v2:stock"))
    strides = [part.stride[0] for part in stock.modules() if isinstance(part, nn.Conv2d)]
    # Table 2 of the paper: the stem, and the first block of the stages of 24, 32, 64 and 160 channels.
    chosen = [index for index, stride in enumerate(strides) if stride == 2]
    assert chosen == [0, *(3 * block + 1 for block in (1, 3, 6, 13))]
    assert [part.p for part in stock.modules() if isinstance(part, nn.Dropout)] == [0.2]
    assert not any(isinstance(part, nn.Dropout) for part in small.modules())
    for mine, theirs in zip(small.parameters(), stock.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    image = torch.randn(2, 3, 64, 64)
    assert draws(stock, image)
    assert not draws(small, image)


# --- names


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mobilenetv2", "unknown network 'mobilenetv2'. Did you mean 'mobilenet_v2'.*linear, mlp, cnn"),
        ("ResNet18", "Did you mean 'resnet18'.*resnet50:gn.*package.module:factory"),
        ("transformer", r"unknown network 'transformer'\. Known are linear, mlp, cnn, mobilenet_v2"),
        ("", "unknown network ''"),
        ("resnet18:", "'' is no option of resnet18; there is resnet18 or resnet18:gn"),
        ("resnet18:ln", "'ln' is no option of resnet18; there is resnet18 or resnet18:gn"),
        ("linear:4", "'4' is no option of linear; there is linear"),
        ("mlp:", "network 'mlp:': give positive widths"),
        ("mlp:64,0", "network 'mlp:64,0': give positive widths"),
        ("mlp:64,wide", "such as mlp:256"),
        ("mlp:64x", "network 'mlp:64x': give positive widths"),
        ("mlp:64x0", "such as mlp:1024x5"),
        ("resnet_18:gn", "no module 'resnet_18'. Did you mean 'resnet18:gn'.*PYTHONPATH.*linear, mlp"),
        ("absent_package.part:make", "no module 'absent_package.part'.*PYTHONPATH"),
        ("custom:0123", r"'custom:0123' is not registered in this process .*register_network\(module\)"),
        ("a b:make", "unknown network 'a b:make'"),
    ],
)
def test_names_that_are_refused(name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        build_network(name, 784, 10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"features": 0}, "features must be a whole number, at least 1; got 0"),
        ({"outputs": 2.5}, "outputs must be a whole number, at least 1; got 2.5"),
        ({"seed": -1}, "seed must be a whole number, at least 0; got -1"),
        ({"dtype": "float8"}, "dtype must be 'float32' or 'float64'; got 'float8'"),
        ({"name": nn.Linear(2, 2)}, r"must be a name; got a Linear.*register_network\(module\)"),
        ({"name": "cnn", "features": 27, "shape": (3, 3, 3)}, "at least 4 x 4 pixels; got 3 x 3"),
    ],
)
def test_arguments_that_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        build_network(**{"name": "linear", "features": 784, "outputs": 10, **arguments})


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(DataError, match=r"network 'resnet18' needs torch.*pip install 'fedsolve\[torch\]'"):
        build_network("resnet18", 784, 10)
    with pytest.raises(DataError, match=r"pip install 'fedsolve\[torch\]'"):
        register_network(object())  # type: ignore[arg-type]
    assert stacked_widths("mlp", 5, 2) == [5, 256, 2]
    assert input_shape("cnn", 784) == (1, 28, 28)


def test_importing_the_package_does_not_import_torch() -> None:
    check = "import sys, fedsolve.gradient.networks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


# --- inputs


@pytest.mark.parametrize(
    ("features", "shape"),
    [(784, (1, 28, 28)), (1024, (1, 32, 32)), (2352, (3, 28, 28)), (3072, (3, 32, 32)), (12288, (3, 64, 64))],
)
def test_shape_that_the_features_say(features: int, shape: tuple[int, ...]) -> None:
    for name in DEEP:
        assert input_shape(name, features) == shape
    for name in ("linear", "mlp:4", "some.package:make", "custom:00"):
        assert input_shape(name, features) is None
    assert input_shape("linear", features, shape) is None
    assert input_shape("some.package:make", features, list(shape)) == shape


def test_shape_that_is_given() -> None:
    assert input_shape("cnn", 784, (4, 14, 14)) == (4, 14, 14)
    assert build_network("cnn", 784, 10, shape=[4, 14, 14]).conv1.in_channels == 4
    with pytest.raises(
        DataError, match=r"'cnn' takes images, and 512 features.*Give shape 'channels,height,width'"
    ):
        input_shape("cnn", 512)
    with pytest.raises(DataError, match=r"shape \(3, 32, 32\) holds 3072 numbers, but rows have 784"):
        input_shape("cnn", 784, (3, 32, 32))
    for wrong in [(28, 28), (0, 28, 28), "abc", 784, (1, 1, 28, 28)]:
        with pytest.raises(DataError, match="shape must be three positive numbers"):
            input_shape("resnet18", 784, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bytes_are_scaled_and_floats_only_cast(dtype: str) -> None:
    pixels = torch.arange(256, dtype=torch.uint8).reshape(1, 256)
    kept = pixels.clone()
    images = as_inputs(pixels, (1, 16, 16), dtype)
    kind = getattr(torch, dtype)
    assert (images.shape, images.dtype) == ((1, 1, 16, 16), kind)
    assert torch.equal(pixels, kept)
    expected = (pixels.to(kind) / 255 - 0.5) / 0.5
    torch.testing.assert_close(images.flatten(1), expected, rtol=0.0, atol=4 * torch.finfo(kind).eps)
    assert (float(images.min()), float(images.max())) == (-1.0, 1.0)
    floats = torch.rand(5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(as_inputs(floats, None, kind), floats.to(kind))
    assert torch.equal(as_inputs(floats, (3, 2, 2), kind)[1, 2], floats[1, 8:].reshape(2, 2).to(kind))
    assert as_inputs(floats[:0], (3, 2, 2), kind).shape == (0, 3, 2, 2)
    with pytest.raises(
        DataError, match=r"rows of shape \(12,\) cannot be read as images of shape \(1, 2, 2\)"
    ):
        as_inputs(floats, (1, 2, 2), kind)


# --- the classifier and what enters it


class Own(nn.Module):
    """A module as a user writes it: the classifier has another name and more layers around it."""

    def __init__(self, width: int = 6, outputs: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, 5), nn.Tanh(), nn.BatchNorm1d(5))
        self.answer = nn.Linear(5, outputs)

    def forward(self, rows: Any) -> Any:
        return self.answer(self.body(rows)).mul(2.0)


def test_features_of_a_users_module() -> None:
    network = Own().eval()
    rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        features, logits = features_of(network, rows)
        assert torch.equal(features, network.body(rows))
        assert torch.equal(logits, network(rows))
    assert head_of(network) == ("answer", network.answer)
    (gradient,) = torch.autograd.grad(features.sum(), network.body[0].bias)
    assert gradient.any()
    assert not network.answer._forward_pre_hooks
    assert set(network.state_dict()) == set(Own().state_dict())


@pytest.mark.parametrize("name", ["linear", "mlp", "cnn", "mobilenet_v2", "resnet18:gn"])
def test_features_of_the_known_networks(name: str) -> None:
    network = build_network(name, 784, 10).eval()
    features, logits = features_of(network, inputs_for(name, 784))
    label, head = head_of(network)
    assert label == "classifier"
    assert features.shape == (2, head.in_features)
    assert torch.equal(logits, head(features))
    if name == "linear":
        assert torch.equal(features, inputs_for(name, 784))


def test_features_of_copies_and_of_passes_in_between() -> None:
    network = Own().eval()
    rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    features_of(network, rows)
    # Were the features of this pass kept, they could not be copied: they have a history.
    network(rows)
    other = copy.deepcopy(network)
    with torch.no_grad():
        other.body[0].weight.mul_(-1.0)
    features, _ = features_of(other, rows)
    assert torch.equal(features, other.body(rows))
    assert not torch.equal(features, features_of(network, rows)[0])
    with pytest.raises(RuntimeError):
        features_of(network, rows[:, :2])
    assert torch.equal(features_of(network, rows)[0], network.body(rows))
    network(rows)
    assert vars(network.answer).keys() == vars(Own().answer).keys()
    assert not network.answer._forward_pre_hooks


def test_modules_without_a_usable_classifier() -> None:
    with pytest.raises(DataError, match=r"the Sequential has no nn.Linear.*End the network with"):
        head_of(nn.Sequential(nn.Conv2d(1, 1, 1)))

    class Unused(Own):
        def forward(self, rows: Any) -> Any:
            return self.body(rows)

    with pytest.raises(DataError, match="classifier 'answer' of the Unused was not called"):
        features_of(Unused(), torch.zeros(4, 6))


# --- parameters and buffers


def test_parameters_and_buffers_are_apart() -> None:
    network = build_network("mobilenet_v2", 784, 10)
    parameters, buffers = float_parameters(network), float_buffers(network)
    assert sum(value.numel() for value in parameters.values()) == count(network)
    assert parameters["stem.weight"] is network.stem.weight
    assert len(buffers) == 2 * 52
    assert {name.rpartition(".")[2] for name in buffers} == {"running_mean", "running_var"}
    left_out = set(network.state_dict()) - set(parameters) - set(buffers)
    assert {name.rpartition(".")[2] for name in left_out} == {"num_batches_tracked"}
    assert float_buffers(build_network("mobilenet_v2:gn", 784, 10)) == {}


def test_what_normalises_by_batch() -> None:
    by_batch = {name for name in ALL if batch_norms(build_network(name, 784, 10))}
    assert by_batch == {"mobilenet_v2", "resnet18", "resnet50"}
    assert batch_norms(Own())


def test_stacked_widths() -> None:
    assert stacked_widths("linear", 7, 3) == [7, 3]
    assert stacked_widths("mlp", 7, 3) == [7, 256, 3]
    assert stacked_widths("mlp:5, 4", 7, 3) == [7, 5, 4, 3]
    assert stacked_widths("mlp:5x2,4", 7, 3) == [7, 5, 5, 4, 3]
    assert all(stacked_widths(name, 784, 3) is None for name in [*DEEP, "some.package:make", "custom:00"])
    shapes = [tuple(value.shape) for value in build_network("mlp:5,4", 7, 3).parameters()]
    assert shapes == [(5, 7), (5,), (4, 5), (4,), (3, 4), (3,)]


# --- networks of the user's own


def test_registered_modules_are_copied() -> None:
    module = Own()
    weights = copy.deepcopy(module.state_dict())
    module(torch.randn(4, 6)).sum().backward()
    name = register_network(module.eval())
    with torch.no_grad():
        module.answer.weight.add_(1.0)
    first, second = (build_network(name, 6, 3) for _ in range(2))
    assert first.training
    for made in (first, second):
        parameters = dict(made.named_parameters())
        assert all(torch.equal(parameters[key], weights[key]) for key in parameters)
        assert all(value.grad is None for value in parameters.values())
    with torch.no_grad():
        first.answer.weight.zero_()
    assert torch.equal(second.answer.weight, weights["answer.weight"])
    assert torch.equal(build_network(name, 6, 3).answer.weight, weights["answer.weight"])
    assert build_network(name, 6, 3, dtype="float64").answer.weight.dtype == torch.float64


def test_names_of_registered_modules() -> None:
    module = Own()
    name = register_network(module)
    assert name.startswith("custom:")
    assert register_network(copy.deepcopy(module)) == name
    changed = copy.deepcopy(module)
    with torch.no_grad():
        changed.answer.bias[0] += 1.0
    relu = copy.deepcopy(module)
    relu.body[1] = nn.ReLU()

    class Other(Own):
        def __repr__(self) -> str:
            return repr(module)

    kind = Other()
    kind.load_state_dict(module.state_dict())
    assert len({name, *map(register_network, (changed, relu, kind))}) == 4


OWN = """
import torch

fixed = torch.nn.Linear(4, 2)
number = 3

def make(features, outputs):
    return torch.nn.Sequential(torch.nn.Linear(features, 8), torch.nn.ReLU(), torch.nn.Linear(8, outputs))

def same(features, outputs):
    return fixed

def frozen(features, outputs):
    return torch.nn.Linear(features, outputs).requires_grad_(False)

def lazy(features, outputs):
    return torch.nn.LazyLinear(outputs)

def nested(features, outputs):
    from fedsolve.gradient.networks import build_network

    return torch.nn.Sequential(build_network(__name__ + ":make", features, 5), torch.nn.Linear(5, outputs))

def seeded(features, outputs):
    torch.manual_seed(0)
    return make(features, outputs)

def text(features, outputs):
    return "network"

def fails(features, outputs):
    raise OSError("no weights here")

def few(features):
    return make(features, 2)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_gradient_networks.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_gradient_networks", raising=False)
    return "own_gradient_networks"


def test_a_function_that_makes_the_network(own: str) -> None:
    torch.manual_seed(9)
    before = torch.get_rng_state()
    network = build_network(f"{own}:make", 4, 3, seed=2, dtype="float64")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(10)
    assert same_bits(network, build_network(f"{own}:make", 4, 3, seed=2, dtype="float64"))
    assert not same_bits(network, build_network(f"{own}:make", 4, 3, seed=3, dtype="float64"))
    assert network[0].weight.dtype == torch.float64
    assert network(torch.zeros(2, 4, dtype=torch.float64)).shape == (2, 3)
    before = torch.get_rng_state()
    build_network(f"{own}:seeded", 4, 3)
    assert build_network(f"{own}:nested", 4, 3)(torch.zeros(2, 4)).shape == (2, 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_function_that_hands_out_one_module(own: str) -> None:
    first, second = (build_network(f"{own}:same", 4, 2) for _ in range(2))
    with torch.no_grad():
        first.weight.add_(1.0)
    assert not same_bits(first, second)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("maek", "has no 'maek'. Did you mean 'make'"),
        ("number", "has a int, not a function, 'number'"),
        ("fixed", "has a Linear, not a function, 'fixed'"),
        ("text", "must give a torch.nn.Module; got str"),
        ("fails", r"fails\(4, 3\) failed: OSError: no weights here"),
        ("few", r"few\(4, 3\) failed: TypeError.*must take \(features, outputs\)"),
        ("frozen", "no parameter that requires a gradient"),
        ("lazy", "lazy layers whose shapes are not known"),
    ],
)
def test_functions_that_do_not_fit(own: str, name: str, message: str) -> None:
    before = torch.get_rng_state()
    with pytest.raises(DataError, match=message):
        build_network(f"{own}:{name}", 4, 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_module_that_cannot_be_imported(tmp_path: Path, own: str) -> None:
    (tmp_path / "own_broken_networks.py").write_text("import own_broken\n")
    with pytest.raises(
        DataError, match=r"importing own_broken_networks failed: .*No module named 'own_broken'"
    ):
        build_network("own_broken_networks:make", 4, 3)
    with pytest.raises(DataError, match=r"must give a torch\.nn\.Module; got str"):
        register_network("network")  # type: ignore[arg-type]


def test_known_names_are_offered_to_the_command() -> None:
    assert networks.NETWORKS == ("linear", "mlp", "cnn", "mobilenet_v2", "resnet18", "resnet50")
    for name in networks.NETWORKS:
        assert build_network(name, 784, 2) is not None


# --- stages


def test_every_layer_of_mobilenet_has_its_stage_in_order() -> None:
    network = build_network("mobilenet_v2", 784, 10)
    layers = [name for name, part in network.named_modules() if isinstance(part, nn.Conv2d | nn.Linear)]
    stages = [stage_of("mobilenet_v2:gn", layer) for layer in layers]
    assert tuple(dict.fromkeys(stages)) == MOBILENET_STAGES
    # Three convolutions a block, but two in the first, which expands nothing.
    assert [stages.count(stage) for stage in MOBILENET_STAGES] == [1, 2, 6, 9, 12, 9, 9, 3, 1, 1]
    assert tuple(blocks for _, _, blocks, _ in mobilenet.STAGES) == MOBILENET_BLOCKS


def test_stages_of_other_networks() -> None:
    assert stage_of("resnet50", "stages.3.1.conv2") == "stage 4"
    assert stage_of("resnet18:gn", "stem") == "stem"
    assert stage_of("mlp:32,32", "hidden2") == "hidden2"
    assert stage_of("some.package:make", "blocks.0") == "blocks.0"


# --- modules that are used again


def test_modules_of_the_kinds_used_last_are_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slots, "_POOL", OrderedDict())

    def lent(width: int) -> Any:
        with slots.borrowed(FedAvg(network=f"mlp:{width}"), 6, 3, torch.device("cpu")) as slot:
            return slot.lend()

    first, second = lent(1), lent(2)
    assert lent(1) is first
    for width in range(10, 10 + slots._KINDS - 1):
        lent(width)
        assert lent(1) is first  # used last, so it stays
    assert len(slots._POOL) == slots._KINDS
    assert lent(2) is not second
    for width in range(100, 150):
        lent(width)
    assert sum(map(len, slots._POOL.values())) == slots._KINDS
    assert lent(1) is not first


def test_every_convolution_of_mobilenet_may_have_feedback():
    from fedsolve.gradient.feedback import eligible_layers

    network = networks.build_network("mobilenet_v2", 784, 10)
    weighted = [name for name, part in network.named_modules() if isinstance(part, nn.Conv2d | nn.Linear)]
    assert eligible_layers(network) == weighted
    assert len(weighted) == 53

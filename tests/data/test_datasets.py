"""Datasets by address: official splits, files in their real formats, and errors that name the file."""

from __future__ import annotations

import dataclasses
import gzip
import pickle
import shutil
import struct
import sys
import tarfile
import types

import numpy as np
import pytest
from PIL import Image

import fedsolve.data.datasets as registry
from fedsolve.data.address import Address
from fedsolve.data.datasets import (
    Dataset,
    Split,
    datasets,
    folder,
    load_dataset,
    published,
)
from fedsolve.data.images import ArrayImages, FileImages
from fedsolve.data.row_reader import is_address
from fedsolve.errors import DataError


def noise(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def refused(address, root=None, *fragments):
    """Assert that loading fails with a `DataError` that has all fragments; the message."""
    with pytest.raises(DataError) as caught:
        load_dataset(address, root)
    for fragment in fragments:
        assert str(fragment) in str(caught.value)
    return str(caught.value)


def pixels_of(split):
    return np.stack(split.inputs.read(slice(None)))


# -- addresses and the list ------------------------------------------------------------------------


def test_the_list_says_what_to_get_and_where():
    known = datasets()
    names = [dataset.name for dataset in known]
    expected = "digits mnist fashion-mnist cifar10 cifar100 tiny-imagenet medmnist:NAME folder:PATH npz:PATH"
    assert set(expected.split()) <= set(names)
    assert len(set(names)) == len(names)
    for dataset in known:
        assert dataset.title
        assert dataset.files
        assert dataset.source


def test_addresses_are_taken_apart():
    assert Address.parse("digits") == Address("digits", "digits")
    assert Address.parse("folder:a?b/c").rest == "a?b/c"
    parsed = Address.parse("csv:my:file.csv?label=sort of&test=0.3")
    assert (parsed.scheme, parsed.rest) == ("csv", "my:file.csv")
    assert parsed.options == {"label": "sort of", "test": "0.3"}
    assert Address.parse("digits?seed=1").scheme == "digits"
    assert is_address("digits")
    assert is_address("folder:x")
    assert not is_address("folder")
    assert not is_address("data.npz")
    assert not is_address("digits.csv")


def test_unknown_addresses_get_a_suggestion(tmp_path):
    refused("cifar-10", None, "no dataset 'cifar-10'", "Did you mean 'cifar10'?", "folder:PATH")
    refused(str(tmp_path), None, f"write folder:{tmp_path}")
    refused("data.csv", None, "write csv:data.csv")
    refused("folder", None, "write folder:PATH")
    refused("digits:8", None, "write digits")
    refused("digits?size=8", None, "unknown option 'size'", "takes none")
    refused("folder:x?sed=1", None, "unknown option 'sed'", "Did you mean 'seed'?")
    refused("medmnist:bloood", tmp_path, "Did you mean 'blood'?")
    refused("mnist", tmp_path / "nowhere", f"{tmp_path / 'nowhere'} does not exist")


def test_named_datasets_say_what_files_they_need(tmp_path, monkeypatch):
    monkeypatch.delenv("FEDSOLVE_DATA", raising=False)
    for dataset in datasets():
        if dataset.name in ("digits", "hf:NAME", "features:KEY") or dataset.name.endswith("PATH"):
            continue
        address = dataset.name.replace("NAME", "blood")
        for root in (None, tmp_path):
            message = refused(address, root, "FEDSOLVE_DATA", "--data-root", dataset.source)
        assert str(tmp_path) in message


def test_the_data_folder_comes_from_the_argument_or_the_environment(tmp_path, monkeypatch):
    np.savez(tmp_path / "own.npz", x=np.eye(10), y=np.arange(10) % 2)
    monkeypatch.setenv("FEDSOLVE_DATA", str(tmp_path))
    assert len(load_dataset("npz:own.npz").train) == 8
    monkeypatch.delenv("FEDSOLVE_DATA")
    refused("npz:own.npz", None, "own.npz: there is no such file")
    assert len(load_dataset("npz:own.npz", tmp_path).train) == 8


# -- what a dataset is -----------------------------------------------------------------------------


def test_digits_are_split_by_class_once_and_for_all_and_images_too():
    dataset, again = load_dataset("digits"), load_dataset("digits")
    np.testing.assert_array_equal(dataset.train.features, again.train.features)
    np.testing.assert_array_equal(dataset.test.labels, again.test.labels)
    tested, trained = np.bincount(dataset.test.labels), np.bincount(dataset.train.labels)
    assert (trained.sum(), tested.sum()) == (1198, 599)
    assert np.all(np.abs(tested / (tested + trained) - 1 / 3) < 0.01)
    assert dataset.train.features.max() == 1.0
    assert dataset.is_images
    images = pixels_of(dataset.train)
    assert images.shape == (1198, 8, 8, 1)
    assert (images.min(), images.max()) == (0, 255)
    assert np.abs(images.reshape(1198, 64) / 255 - dataset.train.features).max() <= 0.5 / 255 + 1e-12


def test_limits_keep_every_class_in_proportion():
    labels = np.repeat(np.arange(4), [500, 300, 199, 1])
    images = ArrayImages(noise(1000, 2, 2))
    whole = Dataset("some", Split(images, labels), Split(images, labels), tuple("abcd"))
    part = whole.limited(train=100, test=4)
    assert np.bincount(part.train.labels).tolist() == [50, 30, 19, 1]
    assert np.bincount(part.test.labels).tolist() == [1, 1, 1, 1]
    again = whole.limited(train=100)
    assert again.train.identity == part.train.identity
    assert again.test is whole.test
    assert whole.limited(train=100, seed=1).train.identity != part.train.identity
    assert whole.limited(train=5000).identity == whole.identity
    for count in (5, 17, 399, 999):
        assert len(whole.limited(train=count).train) == count
    with pytest.raises(DataError, match="3 rows cannot hold all 4 classes"):
        whole.limited(train=3)


def test_identity_names_images_labels_and_classes():
    def made(pixels, labels, names=("a", "b")):
        return Dataset("any", Split(ArrayImages(pixels), np.array(labels)), None, names)

    identity = made(noise(4, 2, 2), [0, 1, 0, 1]).identity
    assert made(noise(4, 2, 2), [0, 1, 0, 1]).identity == identity
    assert made(noise(4, 2, 2, seed=1), [0, 1, 0, 1]).identity != identity
    assert made(noise(4, 2, 2), [0, 1, 1, 1]).identity != identity
    assert made(noise(4, 2, 2), [0, 1, 0, 1], ("a", "c")).identity != identity


def test_datasets_that_make_no_sense_are_refused():
    images = ArrayImages(noise(4, 2, 2))
    for labels, names, message in [
        ([0, 1, 0], "ab", "4 rows but 3 labels"),
        ([0, 1, 0, 2], "ab", "run from 0 to 2, but there are 2 classes"),
        ([0, 0, 0, -1], "ab", "run from -1"),
        ([0.0, 1, 0, 1], "ab", "positions"),
        ([0, 0, 2, 2], "abc", "no training row of class 'b'"),
    ]:
        with pytest.raises(DataError, match=message):
            Dataset("some", Split(images, np.array(labels)), None, tuple(names))
    whole = Split(images, np.array([0, 1, 0, 1]))
    with pytest.raises(DataError, match="the test part has no rows"):
        Dataset("some", whole, whole.take(np.arange(0)), ("a", "b"))


# -- idx -------------------------------------------------------------------------------------------


def idx_bytes(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def small_idx(tmp_path, monkeypatch):
    """An idx dataset of 60 + 20 images in place of MNIST: its folder, arrays, and a writer of its files."""
    arrays = {
        "train-images-idx3-ubyte": noise(60, 28, 28),
        "train-labels-idx1-ubyte": (np.arange(60) % 10).astype(np.uint8),
        "t10k-images-idx3-ubyte": noise(20, 28, 28, seed=1),
        "t10k-labels-idx1-ubyte": (np.arange(20) % 10).astype(np.uint8),
    }
    spec = dataclasses.replace(published.MNIST, rows=(60, 20), digests={})
    monkeypatch.setattr(published, "KNOWN", (spec,))

    def write(folder="mnist", packed=True):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name, array in arrays.items():
            contents = idx_bytes(array)
            path = tmp_path / folder / (f"{name}.gz" if packed else name)
            path.write_bytes(gzip.compress(contents) if packed else contents)

    return tmp_path, arrays, write


@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw", "."])
@pytest.mark.parametrize("packed", [True, False])
def test_idx_files_are_read_packed_or_not(small_idx, folder, packed):
    root, arrays, write = small_idx
    write(folder, packed)
    dataset = load_dataset("mnist", root)
    for split, part in ((dataset.train, "train"), (dataset.test, "t10k")):
        np.testing.assert_array_equal(pixels_of(split)[..., 0], arrays[f"{part}-images-idx3-ubyte"])
        np.testing.assert_array_equal(split.labels, arrays[f"{part}-labels-idx1-ubyte"])
    assert dataset.class_names == tuple("0123456789")


def test_idx_files_that_are_missing_or_damaged_are_named(small_idx):
    root, arrays, write = small_idx
    write()
    path = root / "mnist" / "t10k-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    wrong = {
        "truncated or damaged gzip": whole[: len(whole) // 2],
        "truncated: ": gzip.compress(idx_bytes(arrays["t10k-images-idx3-ubyte"])[:-1]),
        "too long: ": gzip.compress(idx_bytes(arrays["t10k-images-idx3-ubyte"]) + b"0"),
        "truncated within the idx header": gzip.compress(idx_bytes(arrays["t10k-images-idx3-ubyte"])[:9]),
        "not an idx file": b"<html>no such page</html>",
        "(it starts with nothing": b"",
        "shape (19, 28, 28), but mnist has (20, 28, 28)": idx_bytes(arrays["t10k-images-idx3-ubyte"][:19]),
    }
    for fragment, contents in wrong.items():
        path.write_bytes(contents)
        refused("mnist", root, path, fragment, "Get")
    path.unlink()
    refused("mnist", root, root / "mnist", "has no t10k-images-idx3-ubyte", published.MNIST.source)


def test_idx_contents_must_be_the_official_ones(small_idx, monkeypatch):
    root, _, write = small_idx
    write()
    spec = dataclasses.replace(published.MNIST, rows=(60, 20))
    monkeypatch.setattr(published, "KNOWN", (spec,))
    path = root / "mnist" / "train-images-idx3-ubyte.gz"
    refused(
        "mnist",
        root,
        path,
        "not the official file of mnist",
        published.MNIST.digests["train-images-idx3-ubyte"],
        published.MNIST.source,
    )


def test_idx_labels_must_cover_every_class(small_idx):
    root, arrays, write = small_idx
    arrays["train-labels-idx1-ubyte"] = (np.arange(60) % 9).astype(np.uint8)
    write()
    refused("mnist", root, "no training row of class '9'")


# -- CIFAR -----------------------------------------------------------------------------------------


@pytest.fixture
def small_cifar(tmp_path, monkeypatch):
    """CIFAR-10 and -100 with a few images; the folder and a writer of pickles in the official layout."""
    ten = dataclasses.replace(published.CIFAR10, rows=(100, 20), digests={})
    hundred = dataclasses.replace(published.CIFAR100, rows=(200, 100), digests={})
    monkeypatch.setattr(published, "KNOWN", (ten, hundred))
    batches = {f"data_batch_{n}": (noise(20, 3072, seed=n), np.arange(20) % 10) for n in range(1, 6)}
    batches["test_batch"] = (noise(20, 3072, seed=6), np.arange(20)[::-1] % 10)

    def write(protocol=2):
        folder = tmp_path / "cifar-10-batches-py"
        folder.mkdir(exist_ok=True)
        for name, (data, labels) in batches.items():
            batch = {b"batch_label": b"some", b"labels": labels.tolist(), b"data": data, b"filenames": [b"x"]}
            (folder / name).write_bytes(pickle.dumps(batch, protocol=protocol))
        names = [b"airplane", b"automobile", *(b"class %d" % n for n in range(2, 10))]
        meta = {b"num_cases_per_batch": 20, b"label_names": names, b"num_vis": 3072}
        (folder / "batches.meta").write_bytes(pickle.dumps(meta, protocol=protocol))
        folder = tmp_path / "cifar-100-python"
        folder.mkdir(exist_ok=True)
        for name, rows in (("train", 200), ("test", 100)):
            batch = {b"data": noise(rows, 3072), b"fine_labels": [n % 100 for n in range(rows)]}
            batch[b"coarse_labels"] = [0] * rows
            (folder / name).write_bytes(pickle.dumps(batch, protocol=protocol))
        meta = {b"fine_label_names": [b"fine %d" % n for n in range(100)], b"coarse_label_names": [b"all"]}
        (folder / "meta").write_bytes(pickle.dumps(meta, protocol=protocol))

    return tmp_path, batches, write


@pytest.mark.parametrize("protocol", [2, 5])
def test_cifar_pickles_are_read(small_cifar, protocol):
    root, batches, write = small_cifar
    write(protocol)
    dataset = load_dataset("cifar10", root)
    planes = np.concatenate([batches[f"data_batch_{n}"][0] for n in range(1, 6)]).reshape(-1, 3, 32, 32)
    np.testing.assert_array_equal(pixels_of(dataset.train), planes.transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(dataset.test.labels, batches["test_batch"][1])
    assert dataset.class_names[:3] == ("airplane", "automobile", "class 2")
    hundred = load_dataset("cifar100", root)
    assert (len(hundred.train), len(hundred.test), len(hundred.class_names)) == (200, 100, 100)
    np.testing.assert_array_equal(hundred.train.labels, np.arange(200) % 100)
    path = root / "cifar-10-batches-py" / "data_batch_1"
    path.with_name("data_batch_1.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    assert load_dataset("cifar10", root).identity == dataset.identity


def test_cifar_pickles_of_python_2_are_read(small_cifar):
    root, batches, write = small_cifar
    write()
    data, labels = batches["test_batch"]
    # Protocol 2 as Python 2 writes it: every string is bytes without a type of its own (U, short string).
    strings = {text: b"U" + bytes([len(text)]) + text for text in (b"data", b"labels", b"b", b"u1")}
    pickled = b"\x80\x02}(" + strings[b"labels"] + b"]("
    pickled += b"".join(b"K" + bytes([label]) for label in labels) + b"e" + strings[b"data"]
    pickled += b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + strings[b"b"] + b"\x87R"
    pickled += b"(K\x01K\x14M" + struct.pack("<H", 3072) + b"\x86cnumpy\ndtype\n" + strings[b"u1"]
    pickled += b"K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
    pickled += b"T" + struct.pack("<i", data.nbytes) + data.tobytes() + b"tbu."
    (root / "cifar-10-batches-py" / "test_batch").write_bytes(pickled)
    np.testing.assert_array_equal(load_dataset("cifar10", root).test.labels, labels)
    planes = data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(pixels_of(load_dataset("cifar10", root).test), planes)


class Attack:
    def __reduce__(self):
        import os

        return os.system, ("touch attacked",)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_pickles_cannot_run_code(small_cifar, protocol, monkeypatch, tmp_path):
    root, _, write = small_cifar
    write()
    monkeypatch.chdir(tmp_path)
    path = root / "cifar-10-batches-py" / "data_batch_3"
    for contents in (Attack(), {b"data": Attack()}, {b"data": np.array([Attack()], dtype=object)}):
        path.write_bytes(pickle.dumps(contents, protocol=protocol))
        refused("cifar10", root, path, "the pickle asks for posix.system", "refused")
    path.write_bytes(pickle.dumps({b"data": getattr}, protocol=protocol))
    refused("cifar10", root, path, "getattr", "refused")
    assert not (tmp_path / "attacked").exists()


def test_cifar_files_that_are_missing_or_damaged_are_named(small_cifar, monkeypatch):
    root, batches, write = small_cifar
    write()
    path = root / "cifar-10-batches-py" / "data_batch_2"
    whole = path.read_bytes()
    data, labels = batches["data_batch_2"]
    wrong = {
        "truncated or damaged pickle": whole[:-30],
        "holds a list": pickle.dumps([1, 2]),
        "'data' must be bytes of shape (images, 3072); got shape (20, 3071)": pickle.dumps(
            {b"data": data[:, 1:], b"labels": labels.tolist()}
        ),
        "got none": pickle.dumps({b"labels": labels.tolist()}),
        "'labels' must hold one number for each of 20 images": pickle.dumps(
            {b"data": data, b"labels": labels.tolist()[:-1]}
        ),
    }
    for fragment, contents in wrong.items():
        path.write_bytes(contents)
        refused("cifar10", root, path, fragment, "cifar-10-python.tar.gz again from https://www.cs.toronto")
    path.write_bytes(pickle.dumps({b"data": data[:10], b"labels": labels.tolist()[:10]}))
    refused("cifar10", root, "90 training and 20 test images, but cifar10 has 100 and 20")
    path.unlink()
    refused("cifar10", root, root / "cifar-10-batches-py", "has no data_batch_2")

    path.write_bytes(whole)
    spec = dataclasses.replace(published.CIFAR10, rows=(100, 20), digests={"data_batch_2": "0" * 32})
    monkeypatch.setattr(published, "KNOWN", (spec,))
    refused("cifar10", root, path, "not the official file of cifar10", "0" * 32)


def packed(root, left_out=()):
    """The official archive of what is in the folder, which goes."""
    folder, archive = root / "cifar-10-batches-py", root / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for path in [folder, *sorted(folder.iterdir())]:
            if path.name not in left_out:
                tar.add(path, path.relative_to(root), recursive=False)
    shutil.rmtree(folder)
    return archive


def test_cifar_archives_are_read_as_they_are(small_cifar):
    root, _, write = small_cifar
    write()
    folders = load_dataset("cifar10", root)
    archive = packed(root)
    whole = load_dataset("cifar10", root)
    assert whole.identity == folders.identity
    np.testing.assert_array_equal(pixels_of(whole.test), pixels_of(folders.test))
    assert not (root / "cifar-10-batches-py").exists()
    archive.write_bytes(archive.read_bytes()[:-2000])
    refused("cifar10", root, archive, "truncated or damaged archive", "Get cifar-10-python.tar.gz again")
    write()
    refused_archive = packed(root, left_out=("data_batch_3",))
    refused("cifar10", root, refused_archive, "has no data_batch_3")


def write_folders(root, classes, count, size=(6, 5), kind="png"):
    """`count` images in a folder for each class, each of its own colour."""
    for number, name in enumerate(classes):
        (root / name).mkdir(parents=True, exist_ok=True)
        for image in range(count):
            colour = np.full((*size, 3), 20 * number + image, dtype=np.uint8)
            Image.fromarray(colour).save(root / name / f"{image:04}.{kind}")


def test_cifar_is_read_from_png_folders(small_cifar):
    root, _, _ = small_cifar
    names = [str(number) for number in range(10)]
    write_folders(root / "cifar10" / "train", names, 10, (32, 32))
    write_folders(root / "cifar10" / "test", names, 2, (32, 32))
    dataset = load_dataset("cifar10", root)
    assert isinstance(dataset.train.inputs, FileImages)
    assert dataset.class_names == tuple(names)
    np.testing.assert_array_equal(dataset.train.labels, np.repeat(np.arange(10), 10))
    for file in (root / "cifar10" / "train" / "7").iterdir():
        file.unlink()
    refused("cifar10", root, root / "cifar10" / "train" / "7", "no images in this class folder")
    (root / "cifar10" / "train" / "7").rmdir()
    refused("cifar10", root, root / "cifar10" / "train", "9 class folders, but cifar10 has 10 classes")


# -- Tiny ImageNet ---------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Four classes of Tiny ImageNet with three training and two validation images each."""
    small = dataclasses.replace(folder.TINY_IMAGENET, classes=4, train=3, test=2)
    monkeypatch.setattr(folder, "KNOWN", (small,))
    home = tmp_path / "tiny-imagenet-200"
    ids = ["n03", "n01", "n02", "n04"]
    lines = []
    for number, name in enumerate(ids):
        (home / "train" / name / "images").mkdir(parents=True)
        (home / "train" / name / f"{name}_boxes.txt").write_text("boxes")
        for image in range(3):
            file = home / "train" / name / "images" / f"{name}_{image}.JPEG"
            Image.fromarray(np.full((64, 64), 40 * number, np.uint8)).save(file)
    (home / "val" / "images").mkdir(parents=True)
    for image in range(8):
        Image.fromarray(noise(64, 64, 3, seed=image)).save(home / "val" / "images" / f"val_{image}.JPEG")
        lines.append(f"val_{image}.JPEG\t{ids[image % 4]}\t0\t32\t44\t62\n")
    (home / "val" / "val_annotations.txt").write_text("".join(lines))
    (home / "wnids.txt").write_text("\n".join(ids) + "\n")
    (home / "words.txt").write_text("n01\tgoldfish, Carassius\nn02\tcrane\nn03\tcrane\nn99\tother\n")
    return tmp_path, home


def test_tiny_imagenet_is_read_in_its_own_layout(tiny):
    root, home = tiny
    dataset = load_dataset("tiny-imagenet", root)
    assert dataset.class_names == ("goldfish", "n02", "n03", "n04")
    np.testing.assert_array_equal(dataset.train.labels, np.repeat(np.arange(4), 3))
    np.testing.assert_array_equal(dataset.test.labels, [2, 0, 1, 3] * 2)
    assert dataset.train.inputs.name(0) == str(home / "train" / "n01" / "images" / "n01_0.JPEG")
    assert dataset.test.inputs.read(slice(1))[0].shape == (64, 64, 3)
    assert load_dataset("tiny-imagenet", home).identity == dataset.identity


def test_tiny_imagenet_with_validation_images_sorted_into_folders(tiny):
    root, home = tiny
    labels = load_dataset("tiny-imagenet", root).test.labels
    lines = (home / "val" / "val_annotations.txt").read_text().splitlines()
    for line in lines:
        name, label = line.split("\t")[:2]
        (home / "val" / label).mkdir(exist_ok=True)
        (home / "val" / "images" / name).rename(home / "val" / label / name)
    (home / "val" / "val_annotations.txt").unlink()
    (home / "val" / "images").rmdir()
    np.testing.assert_array_equal(load_dataset("tiny-imagenet", root).test.labels, np.sort(labels))


def test_tiny_imagenet_files_that_are_missing_are_named(tiny):
    root, home = tiny
    annotations = home / "val" / "val_annotations.txt"
    text = annotations.read_text()
    annotations.write_text(text.replace("n02", "n77"))
    refused("tiny-imagenet", root, annotations, "line 3", "'n77'")
    (home / "val" / "images" / "val_5.JPEG").rename(home / "val" / "images" / "other.JPEG")
    annotations.write_text(text)
    refused("tiny-imagenet", root, home / "val" / "images" / "val_5.JPEG", "missing", "tiny-imagenet-200.zip")
    annotations.write_text("".join(line for line in text.splitlines(True) if "val_5" not in line))
    refused("tiny-imagenet", root, home / "val", "class n01 has 1 images, expected 2")
    annotations.unlink()
    refused("tiny-imagenet", root, annotations, "missing")
    annotations.write_text(text)
    (home / "val" / "images" / "other.JPEG").rename(home / "val" / "images" / "val_5.JPEG")
    (home / "train" / "n02").rename(root / "away")
    refused("tiny-imagenet", root, home / "train", "class n02 has 0 images, expected 3", "Get it again")
    (home / "wnids.txt").write_text("n01\n")
    refused("tiny-imagenet", root, home / "wnids.txt", "1 classes, expected 4")


# -- MedMNIST --------------------------------------------------------------------------------------


def write_med(path, rows=(16, 8, 8), size=28, classes=8, **other):
    path.parent.mkdir(exist_ok=True)
    arrays = {}
    for seed, (part, count) in enumerate(zip(("train", "val", "test"), rows, strict=True)):
        arrays[f"{part}_images"] = noise(count, size, size, 3, seed=seed)
        arrays[f"{part}_labels"] = (np.arange(count) % classes).astype(np.uint8)[:, None]
    arrays |= other
    np.savez_compressed(path, **{name: array for name, array in arrays.items() if array is not None})
    return arrays


def test_medmnist_keeps_the_official_split(tmp_path):
    arrays = write_med(tmp_path / "medmnist" / "bloodmnist.npz")
    for address in ("medmnist:blood", "medmnist:bloodmnist", "medmnist:BloodMNIST"):
        dataset = load_dataset(address, tmp_path)
        np.testing.assert_array_equal(pixels_of(dataset.train), arrays["train_images"])
        np.testing.assert_array_equal(pixels_of(dataset.test), arrays["test_images"])
        np.testing.assert_array_equal(dataset.test.labels, arrays["test_labels"][:, 0])
    assert dataset.class_names[0] == "basophil"
    assert len(load_dataset("medmnist:blood?val=train", tmp_path).train) == 24
    write_med(tmp_path / "bloodmnist_64.npz", size=64)
    assert pixels_of(load_dataset("medmnist:blood?size=64", tmp_path).test).shape == (8, 64, 64, 3)


def test_medmnist_files_that_do_not_fit_are_named(tmp_path):
    path = tmp_path / "bloodmnist.npz"
    wrong = [
        ({"test_images": None}, "no array 'test_images'"),
        ({"train_images": noise(16, 27, 27)}, "28 x 28 pixels; got shape (16, 27, 27)"),
        ({"train_labels": np.zeros((16, 14), np.uint8)}, "one number for each of 16 images"),
        ({"test_labels": np.arange(4)[:, None]}, "one number for each of 8 images"),
        ({"train_images": noise(16, 28, 28, 28)}, "1 or 3 channels"),
    ]
    for changes, fragment in wrong:
        write_med(path, **changes)
        refused("medmnist:blood", tmp_path, path, fragment)
    write_med(path, test_labels=np.full((8, 1), 8))
    refused("medmnist:blood", tmp_path, "labels that run from 8 to 8, but there are 8 classes")
    write_med(path, classes=7)
    refused("medmnist:blood", tmp_path, "no training row of class 'platelet'")
    write_med(path)
    contents = bytearray(path.read_bytes())
    contents[2000:3000] = bytes(1000)
    path.write_bytes(contents)
    refused("medmnist:blood", tmp_path, path, "truncated or damaged")
    refused("medmnist:chest", tmp_path, "several labels per image")
    refused("medmnist:blood?size=30", tmp_path, "size is one of 28, 64, 128, 224; got '30'")
    refused("medmnist:blood?val=test", tmp_path, "val is one of out, train; got 'test'")


# -- folders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["png", "jpg"])
def test_a_folder_of_class_folders_is_split_by_class(tmp_path, kind):
    write_folders(tmp_path, ("cat", "ant", "bee"), 10, kind=kind)
    (tmp_path / "ant" / "notes.txt").write_text("left out")
    dataset = load_dataset(f"folder:{tmp_path}")
    assert dataset.class_names == ("ant", "bee", "cat")
    assert np.bincount(dataset.train.labels).tolist() == [8, 8, 8]
    assert np.bincount(dataset.test.labels).tolist() == [2, 2, 2]
    names = {dataset.train.inputs.name(row) for row in range(24)}
    assert not names & {dataset.test.inputs.name(row) for row in range(6)}
    for split in (dataset.train, dataset.test):
        for row, label in enumerate(split.labels):
            assert f"/{dataset.class_names[label]}/" in split.inputs.name(row)
    assert load_dataset(f"folder:{tmp_path}").identity == dataset.identity
    assert load_dataset(f"folder:{tmp_path}?seed=1").identity != dataset.identity
    assert len(load_dataset(f"folder:{tmp_path}?test=0.5").test) == 15
    everything = load_dataset(f"folder:{tmp_path}?test=0")
    assert everything.test is None
    assert len(everything.train) == 30


def test_a_folder_with_train_and_test_keeps_them(tmp_path):
    write_folders(tmp_path / "train", ("ant", "bee"), 4)
    write_folders(tmp_path / "test", ("ant", "bee"), 2)
    dataset = load_dataset(f"folder:{tmp_path}")
    assert (len(dataset.train), len(dataset.test)) == (8, 4)
    identity = dataset.identity
    refused(f"folder:{tmp_path}?test=0.5", None, "leave out the option 'test'")
    (tmp_path / "test").rename(tmp_path / "val")
    assert load_dataset(f"folder:{tmp_path}").identity == identity
    (tmp_path / "val").rename(tmp_path / "later")
    held = load_dataset(f"folder:{tmp_path}")
    assert (len(held.train), len(held.test)) == (6, 2)


def test_a_class_may_be_called_train(tmp_path):
    write_folders(tmp_path, ("train", "car"), 5)
    assert load_dataset(f"folder:{tmp_path}").class_names == ("car", "train")


def test_folders_that_cannot_be_used_are_named(tmp_path):
    refused(f"folder:{tmp_path / 'none'}", None, tmp_path / "none", "no such folder")
    refused(f"folder:{tmp_path}", None, tmp_path, "no class folders; it is empty")
    (tmp_path / "file.txt").write_text("")
    refused(f"folder:{tmp_path / 'file.txt'}", None, "file.txt", "not a folder")
    (tmp_path / "ant").mkdir()
    (tmp_path / "bee").mkdir()
    refused(f"folder:{tmp_path}", None, tmp_path, "no images in any of its 2 folders", ".png")
    write_folders(tmp_path, ("bee",), 3)
    refused(
        f"folder:{tmp_path}", None, tmp_path / "ant", "no images in this class folder", "remove the folder"
    )
    write_folders(tmp_path / "loose", (".",), 3)
    refused(f"folder:{tmp_path / 'loose'}", None, "its 3 images lie in no class")
    write_folders(tmp_path, ("ant",), 1)
    write_folders(tmp_path, ("loose/ant",), 1)
    refused(f"folder:{tmp_path / 'loose'}?test=0.2", None, "too few to hold out", "?test=0")
    refused(f"folder:{tmp_path}?test=2", None, "in [0, 1); got 2")
    refused(f"folder:{tmp_path}?test=some", None, "'test' must be a number; got 'some'")


def test_test_classes_must_be_known_and_may_be_missing(tmp_path):
    write_folders(tmp_path / "train", ("ant", "bee"), 4)
    write_folders(tmp_path / "test", ("ant", "wasp"), 2)
    address = f"folder:{tmp_path}"
    refused(address, None, tmp_path / "test" / "wasp", "not in the training part", "'ant', 'bee'")
    (tmp_path / "test" / "wasp").rename(tmp_path / "wasp")
    with pytest.warns(UserWarning, match="no test image of class 'bee'"):
        dataset = load_dataset(address)
    assert dataset.test.labels.tolist() == [0, 0]
    for file in (tmp_path / "test" / "ant").iterdir():
        file.unlink()
    refused(address, None, tmp_path / "test", "no images")


# -- files of features -----------------------------------------------------------------------------


def test_npz_with_train_and_test_is_decoded_by_scale_and_offset(tmp_path):
    x, y = noise(20, 3), np.arange(20) % 4
    scale, offset = np.array([0.5, 1, 2]), np.array([1.0, 0, -1])
    arrays = {"x_train": x[:12], "y_train": y[:12], "x_test": x[12:], "y_test": y[12:]}
    np.savez(tmp_path / "a.npz", **arrays, scale=scale, offset=offset, classes=list("abcd"))
    dataset = load_dataset(f"npz:{tmp_path / 'a.npz'}")
    assert not dataset.is_images
    np.testing.assert_array_equal(dataset.train.inputs, x[:12] * scale + offset)
    np.testing.assert_array_equal(dataset.test.inputs, x[12:] * scale + offset)
    np.testing.assert_array_equal(dataset.test.labels, y[12:])
    assert dataset.class_names == tuple("abcd")
    refused(f"npz:{tmp_path / 'a.npz'}?test=0.5", None, "has a test part already")
    np.savez(tmp_path / "b.npz", **arrays)
    assert load_dataset(f"npz:{tmp_path / 'b.npz'}").class_names == tuple("0123")
    np.savez(tmp_path / "c.npz", **(arrays | {"y_test": y[12:] + 1}))
    refused(f"npz:{tmp_path / 'c.npz'}", None, "c.npz", "label 4 ")


def test_npz_may_hold_images(tmp_path):
    images, labels = noise(20, 7, 6), np.array(["ant", "bee"] * 10)
    np.savez(tmp_path / "a.npz", x=images, y=labels)
    dataset = load_dataset(f"npz:{tmp_path / 'a.npz'}?test=0")
    assert dataset.is_images
    np.testing.assert_array_equal(pixels_of(dataset.train)[..., 0], images)
    assert dataset.class_names == ("ant", "bee")
    np.savez(
        tmp_path / "b.npz", x_train=images, y_train=labels, x_test=images[:4], y_test=["bee"] * 3 + ["cat"]
    )
    refused(f"npz:{tmp_path / 'b.npz'}", None, "b.npz", "label 'cat' in row 3")
    np.savez(tmp_path / "c.npz", x=images)
    refused(f"npz:{tmp_path / 'c.npz'}", None, "c.npz", "no array 'y' with labels")
    np.savez(tmp_path / "d.npz", x=images.astype(float), y=labels)
    refused(f"npz:{tmp_path / 'd.npz'}", None, "d.npz", "uint8")


def test_csv_and_parquet_are_read_as_tables(tmp_path):
    rows = [f"{n},{n % 3},{'xyz'[n % 3]},{n}" for n in range(30)]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,kind,id", *rows]))
    dataset = load_dataset(f"csv:{tmp_path / 't.csv'}?label=kind&drop=id&test=0")
    np.testing.assert_array_equal(dataset.train.inputs, [[n, n % 3] for n in range(30)])
    np.testing.assert_array_equal(dataset.train.labels, np.arange(30) % 3)
    assert dataset.class_names == ("x", "y", "z")
    held = load_dataset(f"csv:{tmp_path / 't.csv'}?label=kind&drop=id")
    assert (len(held.train), len(held.test)) == (24, 6)
    (tmp_path / "more.csv").write_text("a,b,kind,id\n1,2,y,0\n3,4,x,1\n")
    other = load_dataset(f"csv:{tmp_path / 't.csv'}?label=kind&drop=id&test={tmp_path / 'more.csv'}")
    np.testing.assert_array_equal(other.test.inputs, [[1, 2], [3, 4]])
    assert other.test.labels.tolist() == [1, 0]
    (tmp_path / "more.csv").write_text("a,b,kind,id\n1,2,w,0\n")
    refused(
        f"csv:{tmp_path / 't.csv'}?label=kind&drop=id&test={tmp_path / 'more.csv'}", None, "more.csv", "'w'"
    )

    from pyarrow import parquet, table

    parquet.write_table(table({"a": [1.0, 2, 3, 4], "kind": ["y", "x", "y", "x"]}), tmp_path / "t.parquet")
    found = load_dataset(f"parquet:{tmp_path / 't.parquet'}?label=kind&test=0.5")
    assert len(found.train) == len(found.test) == 2
    assert found.class_names == ("x", "y")


def test_files_of_features_that_cannot_be_used_are_named(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.eye(4), y=[0, 1, 0, 1])
    whole = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "a.npz").write_bytes(whole[: len(whole) // 2])
    refused(f"npz:{tmp_path / 'a.npz'}", None, tmp_path / "a.npz", "damaged")
    refused(f"npz:{tmp_path / 'none.npz'}", None, tmp_path / "none.npz", "no such file")
    refused(f"csv:{tmp_path / 'a.npz'}", None, "a.npz", "'csv:'")
    refused("npz:none.npz", tmp_path, "none.npz", f"nor in {tmp_path}", "--data-root")
    np.savez(tmp_path / "b.npz", x=np.full((4, 2), np.nan), y=[0, 1, 0, 1])
    refused(f"npz:{tmp_path / 'b.npz'}", None, tmp_path / "b.npz", "NaN")
    (tmp_path / "t.csv").write_text("a,label\n1,x\nno,y\n")
    refused(f"csv:{tmp_path / 't.csv'}", None, tmp_path / "t.csv", "line 3", "'no'")


# -- Hugging Face ----------------------------------------------------------------------------------


class Rows:
    """As much of a Hugging Face dataset as is used here: columns of images and labels."""

    def __init__(self, images, labels, names=None, raw=False):
        kind = type("ClassLabel", (), {"names": names}) if names else type("Value", (), {})
        self.features = {"id": object(), "img": type("Image", (), {})(), "label": kind()}
        self.images, self.labels, self.names, self.raw = images, labels, names, raw

    def __len__(self):
        return len(self.images)

    def __getitem__(self, row):
        if isinstance(row, slice):
            return {"label": self.labels[row]}
        image = Image.fromarray(self.images[row])
        return {"img": {"bytes": self.images[row].tobytes(), "path": None} if self.raw else image}

    def select_columns(self, names):
        return self

    def cast_column(self, name, kind):
        assert (name, kind) == ("img", "encoded")
        return Rows(self.images, self.labels, self.names, raw=True)

    def select(self, rows):
        return Rows(self.images[rows], [self.labels[row] for row in rows], self.names)


@pytest.fixture
def hub(monkeypatch):
    """A module `datasets` with what it was asked for and what it answers."""
    module = types.ModuleType("datasets")
    module.asked, module.answer = [], None
    module.Image = lambda decode: "encoded"
    module.load_dataset = lambda name, config: module.asked.append((name, config)) or module.answer
    module.load_from_disk = lambda path: module.asked.append(path) or module.answer
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def test_hub_datasets_keep_their_parts(hub, tmp_path):
    images, labels = noise(20, 8, 8, 3), [n % 2 for n in range(20)]
    hub.answer = {"train": Rows(images[:12], labels[:12], ["no", "yes"])}
    held = load_dataset("hf:some/name?config=small")
    assert hub.asked == [("some/name", "small")]
    assert (len(held.train), len(held.test)) == (10, 2)
    hub.answer["validation"] = Rows(images[12:], labels[12:], ["no", "yes"])
    dataset = load_dataset("hf:some/name")
    np.testing.assert_array_equal(pixels_of(dataset.train), images[:12])
    np.testing.assert_array_equal(pixels_of(dataset.test), images[12:])
    assert dataset.test.labels.tolist() == labels[12:]
    assert dataset.class_names == ("no", "yes")
    assert load_dataset("hf:other/name").identity == dataset.identity
    assert load_dataset("hf:some/name?test=0.25").test.identity != dataset.test.identity
    assert dataset.limited(train=4).train.inputs.identity != dataset.train.inputs.identity
    (tmp_path / "dataset_dict.json").write_text("{}")
    load_dataset(f"hf:{tmp_path}")
    assert hub.asked[-1] == str(tmp_path)


def test_hub_datasets_without_class_names_take_the_labels(hub):
    hub.answer = Rows(noise(8, 4, 4), ["b", "a"] * 4)
    assert load_dataset("hf:x?test=0").class_names == ("a", "b")


def test_hub_datasets_that_cannot_be_used_are_explained(hub, monkeypatch):
    images = noise(8, 4, 4)
    hub.answer = {
        "train": Rows(images, [0, 1] * 4, ["no", "yes"]),
        "test": Rows(images, [-1] * 8, ["no", "yes"]),
    }
    refused("hf:x", None, "label -1 is not one of the classes", "?test=0.2")
    refused("hf:x?train=trane", None, "no train part in hf:x?train=trane 'trane'", "'train'")
    refused("hf:x?image=pic", None, "no column of images called 'pic'", "id, img, label")

    def fail(name, config):
        raise ConnectionError("no network")

    monkeypatch.setattr(hub, "load_dataset", fail)
    refused("hf:x", None, "ConnectionError: no network", "huggingface.co/datasets")
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused("hf:x", None, "pip install 'fedsolve[hf]'")


def test_families_do_not_share_schemes():
    schemes = [known.scheme for family in registry._FAMILIES for known in family.KNOWN]
    assert len(set(schemes)) == len(schemes)

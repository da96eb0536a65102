"""Images: decoded when asked for, named by their contents, and refused by name when they are damaged."""

from __future__ import annotations

import os

import numpy as np
import pytest
from PIL import Image

from fedsolve.data import images as module
from fedsolve.data.images import ArrayImages, FileImages, decode, list_images
from fedsolve.errors import DataError


def noise(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


# -- arrays ----------------------------------------------------------------------------------------


def test_arrays_are_read_as_images_with_channels_last():
    grey, colour = noise(5, 4, 3), noise(5, 4, 3, 3)
    read = ArrayImages(grey).read(slice(1, 3))
    assert [image.shape for image in read] == [(4, 3, 1)] * 2
    np.testing.assert_array_equal(read[0][..., 0], grey[1])
    for image, row in zip(ArrayImages(colour).read(np.array([4, 0])), (4, 0), strict=True):
        np.testing.assert_array_equal(image, colour[row])


def test_identity_of_arrays_follows_contents_not_layout():
    pixels = noise(10, 6, 5, 3)
    identity = ArrayImages(pixels).identity
    planes = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
    assert ArrayImages(planes.transpose(0, 2, 3, 1), "elsewhere").identity == identity
    changed = pixels.copy()
    changed[9, 5, 4, 2] ^= 1
    assert ArrayImages(changed).identity != identity
    assert ArrayImages(pixels.reshape(10, 5, 6, 3)).identity != identity
    assert ArrayImages(pixels).take(np.arange(10)).identity == identity
    assert ArrayImages(pixels).take(np.array([1, 0])).identity == ArrayImages(pixels[[1, 0]]).identity


@pytest.mark.parametrize(
    "pixels",
    [np.zeros((2, 4, 4)), noise(2, 16), noise(2, 4, 4, 4), noise(2, 3, 4, 4), noise(2, 0, 4)],
    ids=["float", "flat", "four channels", "channels first", "no pixels"],
)
def test_arrays_that_are_not_images_are_refused(pixels):
    with pytest.raises(DataError, match=r"somewhere\.npz: images .*shape"):
        ArrayImages(pixels, "somewhere.npz")


# -- decoding --------------------------------------------------------------------------------------


def test_grey_stays_one_channel_and_colours_become_rgb(tmp_path):
    grey, colour = noise(7, 5), noise(7, 5, 3)
    opaque = np.dstack([colour, np.full((7, 5), 9, np.uint8)])
    saved = {
        "grey": (Image.fromarray(grey), grey[..., None]),
        "colour": (Image.fromarray(colour), colour),
        "transparent": (Image.fromarray(opaque), colour),
        "grey and transparent": (
            Image.merge("LA", (Image.fromarray(grey), Image.fromarray(grey))),
            grey[..., None],
        ),
        "one bit": (Image.fromarray(grey > 127), np.where(grey > 127, 255, 0)[..., None]),
        "sixteen bits": (Image.fromarray(grey.astype(np.uint16) * 256 + 77), grey[..., None]),
    }
    palette = Image.fromarray(np.repeat(colour[:1, :1], 7, axis=0).repeat(5, axis=1)).quantize(4)
    saved["palette"] = (palette, np.broadcast_to(colour[0, 0], (7, 5, 3)))
    for name, (picture, expected) in saved.items():
        picture.save(tmp_path / f"{name}.png")
        found = decode(tmp_path / f"{name}.png")
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found, expected, err_msg=name)


def test_jpeg_is_decoded_and_turned_as_the_camera_was_held(tmp_path):
    picture = Image.new("RGB", (16, 8), (200, 30, 30))
    picture.paste((20, 20, 220), (0, 0, 8, 8))
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter turn clockwise is needed to see it upright
    picture.save(tmp_path / "turned.jpg", quality=95, exif=turned)
    found = decode(tmp_path / "turned.jpg")
    assert found.shape == (16, 8, 3)
    assert found[2, 4, 2] > 200 > found[2, 4, 0]
    assert found[13, 4, 0] > 180 > found[13, 4, 2]
    picture.convert("CMYK").save(tmp_path / "print.jpg")
    assert decode(tmp_path / "print.jpg").shape == (8, 16, 3)


def test_images_without_a_fixed_range_are_refused(tmp_path):
    Image.fromarray(np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)).save(tmp_path / "depth.tif")
    with pytest.raises(DataError, match=r"depth\.tif: pixels of kind F .* 8 bits"):
        decode(tmp_path / "depth.tif")


def damaged_files(folder):
    """Files that are not whole images, by what is wrong with them."""
    Image.fromarray(noise(40, 40, 3)).save(folder / "whole.png")
    Image.fromarray(noise(40, 40, 3)).save(folder / "whole.jpg")
    for kind in ("png", "jpg"):
        contents = (folder / f"whole.{kind}").read_bytes()
        (folder / f"truncated.{kind}").write_bytes(contents[: len(contents) // 2])
        (folder / f"beginning.{kind}").write_bytes(contents[:10])
    png = bytearray((folder / "whole.png").read_bytes())
    png[60:90] = bytes(30)
    (folder / "overwritten.png").write_bytes(png)
    (folder / "text.png").write_text("not an image")
    (folder / "empty.jpg").write_bytes(b"")
    (folder / "folder.png").mkdir()
    broken = (folder / "link.png", folder / "nowhere.png")
    broken[0].symlink_to(broken[1])
    names = ["truncated.png", "truncated.jpg", "beginning.png", "beginning.jpg", "overwritten.png"]
    return [*names, "text.png", "empty.jpg", "folder.png", "link.png", "nowhere.png"]


def test_damaged_files_are_named_with_a_remedy(tmp_path):
    for name in damaged_files(tmp_path):
        with pytest.raises(DataError) as caught:
            FileImages(["whole.png", name], tmp_path).read(slice(None))
        assert str(caught.value).startswith(str(tmp_path / name))
        assert any(word in str(caught.value) for word in ("Replace", "Put it back")), name


# -- files -----------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """Twelve PNG files in two folders, of different sizes, and their pixels by name."""
    pixels = {}
    for number in range(12):
        name = f"{'ab'[number % 2]}/{number:02}.png"
        pixels[name] = noise(8 + number, 9, 3, seed=number)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(pixels[name]).save(tmp_path / name)
    return tmp_path, pixels


@pytest.mark.parametrize("workers", [1, 4, None])
def test_files_are_read_in_the_order_asked_for(folder, workers):
    root, pixels = folder
    names = list_images(root)
    assert names == sorted(pixels)
    files = FileImages(names, root, workers)
    assert len(files) == 12
    for rows in (slice(3, 7), np.array([11, 0, 5]), slice(None)):
        wanted = names[rows] if isinstance(rows, slice) else [names[row] for row in rows]
        for image, name in zip(files.read(rows), wanted, strict=True):
            np.testing.assert_array_equal(image, pixels[name])
    assert files.name(2) == str(root / names[2])
    assert files.take(np.array([4, 2])).names == [names[4], names[2]]


def test_identity_of_files_follows_names_order_and_contents(folder, tmp_path_factory):
    root, _ = folder
    names = list_images(root)
    identity = FileImages(names, root).identity
    copy = tmp_path_factory.mktemp("copy")
    for name in names:
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_bytes((root / name).read_bytes())
    assert FileImages(names, copy, workers=1).identity == identity
    assert FileImages(names[::-1], root).identity != identity
    assert FileImages(names[:-1], root).identity != identity
    (copy / names[0]).rename(copy / "a" / "new.png")
    assert FileImages(["a/new.png", *names[1:]], copy).identity != identity
    contents = bytearray((root / names[3]).read_bytes())
    contents[-1] ^= 1
    (root / names[3]).write_bytes(contents)
    assert FileImages(names, root).identity != identity


def test_files_that_are_linked_often_are_as_good_as_copies(folder, monkeypatch):
    root, _ = folder
    names = list_images(root)[:3]
    links = root / "links"
    links.mkdir()
    monkeypatch.setattr(module, "_BLOCK", 20)
    for number in range(50):
        make = os.link if number % 2 else os.symlink
        make(root / names[number % 3], links / f"{number}.png")
    listed = list_images(links)
    assert len(listed) == 50
    linked = FileImages(listed, links).identity
    for name in listed:
        target = root / names[int(name.removesuffix(".png")) % 3]
        (links / name).unlink()
        (links / name).write_bytes(target.read_bytes())
    assert FileImages(listed, links).identity == linked


def test_identity_of_a_missing_file_names_it(folder):
    root, _ = folder
    with pytest.raises(DataError, match=r"a/gone\.png: cannot read"):
        _ = FileImages(["a/gone.png"], root).identity


def test_listing_sorts_recurses_and_leaves_out_what_is_not_an_image(tmp_path):
    for name in ("b.PNG", "a/2.jpeg", "a/10.jpg", "a/c/deep.Webp", "notes.txt", ".hidden.png", ".git/x.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "a" / "up").symlink_to(tmp_path)  # a loop
    assert list_images(tmp_path) == ["a/10.jpg", "a/2.jpeg", "a/c/deep.Webp", "b.PNG"]

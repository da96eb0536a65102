"""The tutorial's commands, as they stand on the page, on 300 images in three class folders."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.command import fedsolve

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


def make_images(folder: Path) -> None:
    """Discs, squares and stripes of random size, place and colours: 100 each, 48 x 48 pixels."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:48, :48]
    for shape in ("disc", "square", "stripes"):
        (folder / shape).mkdir(parents=True)
        for number in range(100):
            cx, cy, size = rng.uniform(16, 32), rng.uniform(16, 32), rng.uniform(7, 14)
            inside = {
                "disc": (x - cx) ** 2 + (y - cy) ** 2 < size**2,
                "square": (abs(x - cx) < size) & (abs(y - cy) < size),
                "stripes": ((x + cx) // 4) % 2 == 0,
            }[shape]
            colours = rng.integers(0, 256, (2, 3))
            pixels = np.where(inside[:, :, None], colours[0], colours[1]) + rng.normal(0, 12, (48, 48, 3))
            Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(folder / shape / f"{number}.png")


@pytest.mark.slow
def test_every_command_of_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_images(tmp_path / "images")
    (toml,) = blocks("toml")
    (tmp_path / "mine.toml").write_text(toml)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSOLVE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("COLUMNS", "100")
    commands = [line for block in blocks("sh") for line in block.splitlines()]
    assert len(commands) == 9
    printed = []
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "fedsolve"
        done = fedsolve(*words)
        assert done.exit_code == 0, f"{command}\n{done.output}"
        printed.append(done.stdout)
    accuracies = [re.search(r"([\d.]+ %) on 60 test rows", text) for text in printed[1:3]]
    assert accuracies[0] is not None
    assert accuracies[1] is not None
    assert accuracies[0][1] == accuracies[1][1]
    assert float(accuracies[0][1].split()[0]) > 80
    assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 301, "every image"
    assert "My images" in (tmp_path / "report.html").read_text()

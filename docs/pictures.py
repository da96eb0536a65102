"""The pictures of README and of the pages, in one style; `python docs/pictures.py [NAME ...]` draws them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import FancyArrowPatch, Rectangle
from sklearn.datasets import load_digits

import fedsolve as fs
from fedsolve.experiments.algorithms import SoftmaxFedAvg
from fedsolve.pages.plots import INK, RULE, SERIES, SOFT

HERE = Path(__file__).parent
STYLE = {
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.labelcolor": SOFT,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "fedsolve",
}


def digits() -> tuple[Any, Any, Any, Any]:
    X, y = load_digits(return_X_y=True)
    return X[:1200] / 16, y[:1200], X[1200:] / 16, y[1200:]


def save(name: str) -> None:
    plt.savefig(HERE / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
    plt.close()


def canvas(width: float, height: float) -> Any:
    _figure, axes = plt.subplots(figsize=(width, height))
    axes.axis("off")
    return axes


def invariance() -> None:
    """Test accuracy as the same rows are dealt ever more unevenly: averages fall, solutions do not move."""
    X, y, X_test, y_test = digits()
    dealt = {"evenly": fs.partition.iid(y, clients=20, seed=0)}
    for alpha in (1.0, 0.3, 0.1, 0.03):
        dealt[f"{alpha:g}"] = fs.partition.dirichlet(y, clients=20, alpha=alpha, seed=0)
    scores: dict[str, list[float]] = {"DeepAFL": [], "AFL": [], "FedAvg": []}
    for owners in dealt.values():
        federation = fs.LocalFederation.from_arrays(X, y, owners)
        for name, method in (("AFL", fs.AFL(ridge=0.1)), ("DeepAFL", fs.DeepAFL(layers=5, width=256))):
            scores[name].append(100 * method.fit(federation).score(X_test, y_test))
        rows = [np.flatnonzero(owners == client) for client in range(20)]
        head = SoftmaxFedAvg(rounds=10).fit(X, y, rows, 10)
        right = np.argmax(np.c_[X_test, np.ones(len(X_test))] @ head, axis=1) == y_test
        scores["FedAvg"].append(100 * float(right.mean()))
    _figure, axes = plt.subplots(figsize=(5, 3.3))
    told = {"DeepAFL": "DeepAFL, solved", "AFL": "AFL, one exchange", "FedAvg": "FedAvg, 10 rounds"}
    for (name, found), colour, above in zip(scores.items(), SERIES, (1.2, 1.2, -3.2), strict=False):
        axes.plot(found, "o-", color=colour, linewidth=2.2, markersize=6)
        axes.text(4.1, found[-1] + above, told[name], color=colour, fontsize=12, ha="right")
    axes.set_xticks(range(len(dealt)), list(dealt), fontsize=12)
    axes.set(ylim=(72, 101), yticks=(75, 80, 85, 90, 95, 100))
    axes.tick_params(labelsize=12, length=0)
    axes.set_xlabel("how 20 clients share the digits: Dirichlet alpha", fontsize=12)
    axes.set_ylabel("right on test rows, %", fontsize=12)
    axes.grid(axis="y", color=RULE, linewidth=0.7)
    save("invariance")


def law_of_sums() -> None:
    """The Gram matrices of three owners of the digits, and their sum."""
    X, y, _, _ = digits()
    X = (X - X.mean(axis=0))[:, 19:35]
    parts = [X[y < 4], X[(y >= 4) & (y < 6)], X[y >= 6]]
    grams = [part.T @ part for part in parts]
    _figure, axes = plt.subplots(1, 4, figsize=(8, 2.2), gridspec_kw={"wspace": 0.45})
    most = 0.6 * abs(sum(grams)).max()
    titles = [f"{len(part):,} rows" for part in parts] + [f"all {len(X):,} rows"]
    for number, (one, gram, title) in enumerate(zip(axes, [*grams, sum(grams)], titles, strict=True)):
        one.imshow(gram, cmap="RdBu_r", vmin=-most, vmax=most)
        one.set_title(title, fontsize=10, color=SERIES[number] if number < 3 else INK)
        one.set(xticks=[], yticks=[])
        if number:
            one.text(-4.5, 8.5, "=" if number == 3 else "+", fontsize=20, color=SOFT)
    save("law-of-sums")


def afl() -> None:
    """How far AFL's weights are from those of the pooled rows."""
    X, y, _, _ = digits()
    X = np.tanh(X @ np.random.default_rng(0).normal(size=(64, 64)))
    pooled = fs.AFL(ridge=1.0).fit(fs.LocalFederation.from_arrays(X, y, np.zeros(len(y), int))).weight
    _figure, axes = plt.subplots(figsize=(6, 2.6))
    counts = (2, 5, 10, 20, 50, 100)
    for alpha, colour in ((100.0, SERIES[0]), (0.1, SERIES[1])):
        far = []
        for clients in counts:
            owners = fs.partition.dirichlet(y, clients=clients, alpha=alpha, seed=0)
            model = fs.AFL(ridge=1.0).fit(fs.LocalFederation.from_arrays(X, y, owners))
            far.append(np.linalg.norm(model.weight - pooled) / np.linalg.norm(pooled))
        axes.loglog(counts, np.maximum(far, 1e-17), "o-", color=colour, label=f"Dirichlet {alpha:g}")
    axes.set(xlabel="clients", ylabel="relative difference", ylim=(1e-17, 1e-8))
    axes.set_xticks(counts, [str(count) for count in counts], minor=False)
    axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.legend(frameon=False)
    save("afl-exact")


def deepafl() -> None:
    """Accuracy on test rows after each block, for two partitions: the curves lie on one another."""
    X, y, X_test, y_test = digits()
    _figure, axes = plt.subplots(figsize=(6, 2.6))
    for alpha, colour, width in ((100.0, SERIES[0], 5), (0.1, SERIES[1], 1.5)):
        owners = fs.partition.dirichlet(y, clients=20, alpha=alpha, seed=0)
        federation = fs.LocalFederation.from_arrays(X, y, owners)
        scores = fs.DeepAFL(layers=10, width=256).fit(federation).staged_score(X_test, y_test)
        label = f"20 clients, Dirichlet {alpha:g}"
        axes.plot(100 * np.asarray(scores), "-", color=colour, linewidth=width, label=label)
    axes.set(xlabel="residual blocks", ylabel="test accuracy, %")
    axes.legend(frameon=False)
    save("deepafl-blocks")


def apfl() -> None:
    """Each client's accuracy on its own kind of rows: the shared model, and its own."""
    X, y, X_test, y_test = digits()
    swapped = np.r_[np.arange(10) % 10, (np.arange(10) + 1) % 10].reshape(2, 10)
    owners = np.arange(len(y)) % 2
    own = swapped[owners, y]
    federation = fs.LocalFederation.from_arrays(X, own, owners)
    model = fs.APFL(width=256, refinement_width=256, balance="auto").fit(federation)
    shared, personal = [], []
    for number, participant in enumerate(federation.participants):
        truth = swapped[number][y_test]
        shared.append(100 * model.score(X_test, truth))
        mine = participant.personalise(model)
        personal.append(100 * mine.score(X_test, truth))
    _figure, axes = plt.subplots(figsize=(6, 2.2))
    places = np.arange(2)
    axes.barh(places + 0.2, shared, 0.36, color=SERIES[5], label="shared model")
    axes.barh(places - 0.2, personal, 0.36, color=SERIES[2], label="own model")
    axes.set_xticks([0, 25, 50, 75, 100])
    axes.set_yticks(places, ["names digits 0-9", "names each digit one higher"])
    axes.set(xlabel="accuracy on its own kind of rows, %", xlim=(0, 140))
    axes.legend(frameon=False, loc="center right")
    save("apfl-personal")


def box(
    axes: Any, x: float, y: float, text: str, colour: str, width: float = 1.5, height: float = 0.6
) -> None:
    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, alpha=0.14, edgecolor=colour))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center")


def arrow(
    axes: Any, start: tuple[float, float], end: tuple[float, float], colour: str, style: str = "-"
) -> None:
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color=colour, linestyle=style)
    )


def flfa() -> None:
    """Forward through the client's own weights, backward through those that it received."""
    axes = canvas(7, 2)
    axes.set(xlim=(0, 9), ylim=(0, 2.2))
    for number, name in enumerate(("layer 1", "layer 2", "layer 3")):
        box(axes, 0.4 + 2.9 * number, 0.8, name, SERIES[0])
    for number in range(2):
        left, right = 1.9 + 2.9 * number, 3.3 + 2.9 * number
        arrow(axes, (left, 1.25), (right, 1.25), SERIES[0])
        chosen = number == 1
        arrow(axes, (right, 0.95), (left, 0.95), SERIES[1] if chosen else SOFT, "-" if chosen else "--")
        told = r"$B^\top\delta$" if chosen else r"$W^\top\delta$"
        axes.text((left + right) / 2, 0.6, told, ha="center", color=SERIES[1] if chosen else SOFT)
        axes.text((left + right) / 2, 1.4, r"$W h$", ha="center", color=SERIES[0])
    axes.text(0.4, 1.9, "forward: the client's own weights W", color=SERIES[0])
    axes.text(0.4, 0.15, "backward in the chosen layer: B, the weights that the server sent", color=SERIES[1])
    save("flfa")


def secure_sums() -> None:
    """Three numbers, masks that cancel, and the only number that the server can read."""
    axes = canvas(7, 2.3)
    axes.set(xlim=(0, 10), ylim=(0, 3.4))
    rows = [("north", 12, "+71", "-40", 43), ("south", 7, "-71", "+88", 24), ("west", 30, "+40", "-88", -18)]
    for title, x in (("own number", 2.2), ("a mask with each other site", 5.2), ("what is sent", 8.6)):
        axes.text(x, 3.1, title, ha="center", color=SOFT)
    for line, (name, own, first, second, sent) in enumerate(rows):
        y = 2.3 - 0.75 * line
        axes.text(0.2, y, name, va="center", color=SERIES[line])
        box(axes, 2.1, y - 0.25, str(own), SERIES[line], 1, 0.5)
        axes.text(4.3, y, first, ha="center", va="center")
        axes.text(5.7, y, second, ha="center", va="center")
        arrow(axes, (6.4, y), (8.0, y), SOFT)
        box(axes, 8.1, y - 0.25, str(sent), SERIES[5], 1, 0.5)
    axes.text(8.6, 0.1, "sum: 49 = 12 + 7 + 30", ha="center", weight="bold")
    save("secure-sums")


def cells() -> None:
    """Rows in cells, class by fold; answers are about whole cells, and small cells wait."""
    counts = np.array([[41, 38, 44], [17, 21, 15], [3, 0, 2]])
    axes = canvas(5, 2.2)
    axes.set(xlim=(-1.6, 5.6), ylim=(-0.3, 3.4))
    for line, name in enumerate(("class a", "class b", "class c")):
        axes.text(-0.2, 2.4 - line, name, ha="right", va="center", color=SOFT)
        for fold in range(3):
            rows = counts[line, fold]
            colour = SERIES[2] if rows >= 10 else SERIES[1]
            box(axes, fold, 2 - line + 0.08, str(rows), colour, 0.94, 0.84)
    for fold in range(3):
        axes.text(fold + 0.47, 3.1, f"fold {fold}", ha="center", color=SOFT)
    axes.text(3.3, 1.9, "take part", color=SERIES[2], va="center")
    axes.text(3.3, 0.5, "wait for more rows", color=SERIES[1], va="center")
    save("cells")


def three_sites() -> None:
    """Who calls whom: sites call out, the gate of the server is all that listens."""
    axes = canvas(5.4, 2.9)
    axes.set(xlim=(0, 10), ylim=(0.2, 4.3))
    for place, name in enumerate(("north", "south", "west")):
        y = 3.05 - 1.35 * place
        box(axes, 0.1, y, f"hospital {name}\nfedsolve client\nrows stay here", SERIES[0], 2.7, 1.1)
        arrow(axes, (2.8, y + 0.55), (5.4, 2.25 + 0.25 * (1 - place)), SERIES[0])
    axes.text(2.95, 0.55, "TLS 1.3,\nmasked sums", ha="left", va="center", color=SOFT)
    axes.add_patch(Rectangle((5.2, 0.5), 4.6, 3.5, facecolor="none", edgecolor=RULE))
    axes.text(5.4, 3.65, "the server", color=SOFT, va="center")
    box(axes, 5.4, 1.75, "gate\nTCP 9092", SERIES[1], 1.6, 1.1)
    box(axes, 7.9, 1.75, "fedsolve\nserver", SERIES[2], 1.6, 1.1)
    arrow(axes, (7.0, 2.3), (7.9, 2.3), SOFT)
    axes.text(5.4, 1.2, "only the gate listens", va="center", color=SOFT)
    save("three-sites")


def main() -> None:
    plt.rcParams.update(STYLE)
    for draw in (invariance, law_of_sums, afl, deepafl, apfl, flfa, secure_sums, cells, three_sites):
        if not sys.argv[1:] or draw.__name__ in sys.argv[1:]:
            draw()


if __name__ == "__main__":
    main()

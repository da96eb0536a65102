"""What secure sums cost: bytes masked per second on one core, and seconds per client, server and setup.

A rate counts the bytes of the message once for every mask that is added to it. The best of several turns
counts; how busy the machine was otherwise stands beside it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from rich.console import Console
from rich.table import Table

from benchmarks.machine import OtherWork, progress
from fedsolve.federation.messages import Term
from fedsolve.privacy.census import OFF
from fedsolve.privacy.masking import Client
from fedsolve.privacy.notes import Setup, least_threshold
from fedsolve.privacy.primitives import add_masks, signer, verifier
from fedsolve.privacy.ring import Layout, RingVector, decode, encode
from fedsolve.privacy.unmasking import Server, WordSum

MOST_SUMMED = 50
"""With more clients only one client's part is timed: in one process all of them would take minutes."""

TARGETS = {"one limb": 1.5e9, "two limbs": 0.8e9}


def measure(
    width: int = 1024,
    classes: int = 100,
    clients: tuple[int, ...] = (20, 200),
    slots: int = 10,
    repeats: int = 5,
    mebibytes: int = 16,
    masks: int = 20,
) -> dict[str, Any]:
    """Rates, and the cost of a sum of Gram and cross matrices of this width, as JSON values."""
    others = OtherWork()
    progress("rates of masks and of the ring")
    result: dict[str, Any] = {
        "masks": mask_rates(mebibytes, masks, repeats),
        "ring": ring_rates(mebibytes, repeats),
        "signature": signature_seconds(repeats),
        "width": width,
        "classes": classes,
        "slots": slots,
    }
    result["sums"] = []
    for count in clients:
        for limbs in (1, 2):
            progress(f"a sum over {count} clients in {'one limb' if limbs == 1 else 'two limbs'}")
            result["sums"].append(sum_seconds(width, classes, count, limbs, slots))
    result["uploads"] = uploads() | weight_uploads()
    result["other_work"] = others.share()
    return result


def uploads(layers: tuple[int, ...] = (5, 20), clients: int = 4) -> dict[str, float]:
    """Bytes that clients of DeepAFL send in secure sums, as a multiple of those in the open, by plan."""
    import fedsolve as fs
    from fedsolve.privacy import SecureFederation

    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 100 * clients)
    rows = rng.standard_normal((len(labels), 32))
    federation = fs.LocalFederation.from_arrays(rows, labels, np.arange(len(labels)) % clients)
    found = {}
    for plan in ("single", "textbook", "lean"):
        for count in layers:
            method = fs.DeepAFL(layers=count, width=64, exchange=plan)
            plain, secure = (
                sum(record.bytes_up for record in method.fit(over).history)
                for over in (federation, SecureFederation(federation, limits=OFF))
            )
            found[f"{plan}, {count} layers"] = secure / plain
    return found


def weight_uploads(clients: int = 4, rounds: int = 3) -> dict[str, float]:
    """The same of FedAvg's float32 weights: in the first round, and in those after it."""
    import fedsolve as fs
    from fedsolve.privacy import SecureFederation

    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 40 * clients)
    rows = rng.standard_normal((len(labels), 64))
    federation = fs.LocalFederation.from_arrays(rows, labels, np.arange(len(labels)) % clients)
    method = fs.gradient.FedAvg(network="mlp:512", rounds=rounds)
    plain, secure = (
        [record.bytes_up for record in method.fit(over).history]
        for over in (federation, SecureFederation(federation, limits=OFF))
    )
    ratios = [some / others for some, others in zip(secure, plain, strict=True)]
    return {"fedavg, float32, first round": ratios[0], "fedavg, float32, later rounds": max(ratios[1:])}


def mask_rates(mebibytes: int = 16, masks: int = 20, repeats: int = 5) -> dict[str, float]:
    """Bytes per second of masks added to a vector on one core, in one limb and in two."""
    words = mebibytes << 17
    limbs = np.zeros(words, dtype=np.uint64)
    vectors = {"one limb": RingVector(limbs, 0), "two limbs": RingVector(limbs.copy(), words // 2)}
    keys = [(hashlib.sha256(bytes([number])).digest(), 1 - 2 * (number % 2)) for number in range(masks)]
    return {
        name: masks * vector.limbs.nbytes / _best(lambda vector=vector: add_masks(vector, keys), repeats)
        for name, vector in vectors.items()
    }


def ring_rates(mebibytes: int = 16, repeats: int = 5) -> dict[str, float]:
    """Bytes per second, of the vector as it is sent, of adding, encoding and decoding on one core."""
    numbers = np.random.default_rng(0).standard_normal(mebibytes << 17)
    term = Term({"x": numbers})
    rates = {}
    for name, exponents in (("one limb", {("x", numbers.shape): 40}), ("two limbs", {})):
        layout = Layout.of(term, exponents)
        vector = encode(term, layout, 20)
        total = WordSum(np.zeros(2 * layout.wide + layout.narrow, dtype=np.uint64), layout.wide)
        rates[f"adding, {name}"] = vector.limbs.nbytes / _best(lambda t=total, v=vector: t.add(v), repeats)
        rates[f"encoding, {name}"] = vector.limbs.nbytes / _best(
            lambda layout=layout: encode(term, layout, 20), repeats
        )
        rates[f"decoding, {name}"] = vector.limbs.nbytes / _best(
            lambda v=vector, layout=layout: decode(v, layout), repeats
        )
    return rates


def signature_seconds(repeats: int = 5) -> dict[str, float]:
    """Seconds to sign and to verify the keys of one client with P-256."""
    key = ec.generate_private_key(ec.SECP256R1())
    sign, verify = signer(key), verifier({"site": key.public_key()})
    signature = sign(b"keys")
    return {
        "sign": _best(lambda: sign(b"keys"), repeats),
        "verify": _best(lambda: verify("site", b"keys", signature), repeats),
    }


def sum_seconds(width: int, classes: int, clients: int, limbs: int, slots: int = 10) -> dict[str, Any]:
    """Seconds of one client and of the server for one sum, and of the setup of one client.

    Signatures are left out here: they cost what `signature_seconds` says, once for each other member.
    """
    rng = np.random.default_rng(0)
    features = rng.standard_normal((width, width))
    term = Term(
        {"gram": features.T @ features, "cross": rng.standard_normal((width, classes))},
        {"rows": width},
        frozenset({"gram"}),
    )
    exponents = {(name, array.shape): 36 for name, array in term.arrays.items()} if limbs == 1 else {}
    layout = Layout.of(term, exponents)
    names = [f"site-{number:03d}" for number in range(clients)]
    # The others make only the two slots used here; what many slots cost is timed for one client.
    made, server, setup_cost = _made(names, Setup("bench", 0, 2, least_threshold(clients)), slots)
    vector = encode(term, layout, clients)
    found: dict[str, Any] = {"clients": clients, "limbs": limbs, "bytes": vector.limbs.nbytes, **setup_cost}
    found["encode"] = _best(lambda: encode(term, layout, clients), 3)
    if clients > MOST_SUMMED:
        found["mask"] = float(np.median([_timed(made[n].mask, 0, vector, names)[0] for n in names[:3]]))
        return found
    for slot, gone in ((0, 0), (1, round(0.3 * clients))):
        pending = server.sum(slot, names, layout.wide, layout.narrow)
        answers = {name: _timed(made[name].mask, slot, vector, names) for name in names[gone:]}
        adding = [_timed(pending.add, name, note)[0] for name, (_, note) in answers.items()]
        survivors, dropped = pending.close()
        openings = {name: _timed(made[name].open, slot, survivors, dropped) for name in survivors}
        for name, (_, note) in openings.items():
            pending.add_opening(name, note)
        seconds, total = _timed(pending.total)
        assert decode(total, layout).counts["rows"] == width * (clients - gone)
        if gone:
            found["server_opens_without_30_percent"] = seconds
            continue
        found["server_opens"] = seconds
        found["mask"] = float(np.median([spent for spent, _ in answers.values()]))
        found["open"] = float(np.median([spent for spent, _ in openings.values()]))
        found["server_adds"] = float(np.median(adding))
    return found


def _timed(call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    started = time.perf_counter()
    result = call(*arguments)
    return time.perf_counter() - started, result


def _made(names: list[str], setup: Setup, slots: int) -> tuple[dict[str, Client], Server, dict[str, Any]]:
    """Clients and a server that are ready, and what the setup of `slots` slots costs one client."""

    def verify(name: str, message: bytes, signature: bytes) -> bool:
        return True

    def advertised(setup: Setup) -> tuple[dict[str, Client], Server]:
        server = Server(setup)
        made = {name: Client(setup, name, lambda message: b"", verify) for name in names}
        for name, client in made.items():
            server.add_keys(name, client.advertise())
        return made, server

    timed, server = advertised(Setup(setup.run, setup.epoch, slots, setup.threshold))
    keys = server.keys_for(server.members[0])
    started = time.perf_counter()
    shares = timed[names[0]].share(keys)
    cost = {
        "setup": time.perf_counter() - started,
        "setup_down": len(keys) + len(shares),
        "setup_up": len(shares),
    }
    cost["setup_up"] += len(timed[names[0]].advertise())
    made, server = advertised(setup)
    keys = server.keys_for(server.members[0])
    for name, client in made.items():
        server.add_shares(name, client.share(keys))
    for name, client in made.items():
        client.receive(server.shares_for(name))
    return made, server, cost


def _best(call: Callable[[], Any], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def show(console: Console, result: dict[str, Any]) -> None:
    """Two tables: rates, and the cost of sums."""
    rates = Table(title="One core, GB/s")
    rates.add_column("what")
    rates.add_column("rate", justify="right")
    rates.add_column("at least", justify="right")
    for name, rate in result["masks"].items():
        rates.add_row(f"masks, {name}", f"{rate / 1e9:.2f}", f"{TARGETS[name] / 1e9:.1f}")
    for name, rate in result["ring"].items():
        rates.add_row(name, f"{rate / 1e9:.2f}", "")
    console.print(rates)
    sums = Table(
        title=f"Gram and cross matrices, width {result['width']}, {result['classes']} classes; seconds"
    )
    columns = ("encode", "mask", "open", "server_adds", "server_opens", "server_opens_without_30_percent")
    for name in ("clients", "limbs", "MB", *columns, "setup", "kB up", "kB down"):
        sums.add_column(name.replace("_", " "), justify="right")
    for entry in result["sums"]:
        sums.add_row(
            str(entry["clients"]),
            str(entry["limbs"]),
            f"{entry['bytes'] / 1e6:.1f}",
            *(f"{entry[key]:.4f}" if key in entry else "" for key in columns),
            f"{entry['setup']:.3f}",
            *(f"{entry[key] / 1e3:.0f}" for key in ("setup_up", "setup_down")),
        )
    console.print(sums)
    seconds = result["signature"]
    console.print(
        f"The setup is of {result['slots']} slots, for one client, without signatures: "
        f"{1e3 * seconds['verify']:.2f} ms to verify one, {1e3 * seconds['sign']:.2f} ms to sign."
    )
    ratios = ", ".join(f"{ratio:.2f} ({name})" for name, ratio in result["uploads"].items())
    console.print(f"Clients send in secure sums, as a multiple of plain ones: {ratios}.")
    if result["other_work"] is not None:
        console.print(f"Other processes took {result['other_work']:.0%} of the machine.")

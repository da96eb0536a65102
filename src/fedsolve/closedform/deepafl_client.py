"""DeepAFL on the client's side: one pass over the rows answers any request of the server.

The server's side, with the paper and its symbols, is `deepafl`.
"""

from __future__ import annotations

from fedsolve.backends import NUMPY
from fedsolve.closedform.deepafl_layers import LayerFeatures, Network
from fedsolve.closedform.projections import check_projections
from fedsolve.closedform.solvers import Sandwich
from fedsolve.closedform.sums import Accumulator, cached_rows, chunks
from fedsolve.errors import TermError
from fedsolve.federation.messages import Block, Chain, Request, Term
from fedsolve.federation.participant import ClientData, Memory, step

KIND = "deepafl"


@step(KIND, over_rows=True)
def answer_layer(data: ClientData, request: Request, memory: Memory) -> Term:
    """The statistics asked for, in one pass over the rows that also brings Phi to the request's layer.

    Statistics of a step belong to the last block: they are taken while it is applied.
    """
    features = _layer_features(data, memory)
    network, rows, workspace = features.network, features.rows, memory.workspace
    added = layer_blocks(memory.chain)
    ask, goal = set(request.note["ask"]), request.step
    if goal != len(added):
        raise TermError(f"the request is for layer {goal}, but the model so far has {len(added)} blocks.")
    kernels = rows.kernels
    sums = Accumulator(workspace, network.precision, kernels)
    _declare(sums, ask, network, rows.outputs)
    weight = None if "weight" not in request.arrays else kernels.array(request.arrays["weight"])
    tracks = weight is not None and request.note["track"] and rows.codes is not None
    correct = 0

    steps = "step_gram" in ask
    start, kept = features.begin(memory.chain, goal - 1 if steps else goal)
    blocks = [block_of(block, network.precision) for block in added[max(start, 0) :]]
    passed = [block and block.on(kernels) for block in blocks]
    for span in chunks(len(rows), network.width, kernels):
        targets = rows.weighted(span, rows.targets(span))
        current = features.start(span) if start < 0 else features.load(span)
        for layer, block in enumerate(passed, max(start, 0)):
            hidden = features.hidden(span, current, layer, kept, workspace)
            output = network.output(hidden, block)
            if steps and layer == goal - 1:
                weighted = rows.weighted(span, output)
                sums.add_product("step_feature", rows.weighted(span, current), weighted)
                sums.add_product("step_cross", weighted, targets)
                sums.add_gram("step_gram", weighted)
            features.step(current, output, block, workspace)
        features.keep(span, current)
        phi = rows.weighted(span, current)
        if "gram" in ask:
            sums.add_level(phi, targets)
        if "anchor" in ask:
            sums.add_product("anchor", phi, rows.weighted(span, features.initial(span)))
        if "hidden_gram" in ask:
            hidden = rows.weighted(span, features.hidden(span, current, goal, kept, workspace))
            sums.add_gram("hidden_gram", hidden)
            if "hidden_residual" in ask:
                sums.add_product("hidden_residual", hidden, targets - phi @ weight)
            if "hidden_feature" in ask:
                sums.add_product("hidden_feature", hidden, phi)
            if "hidden_cross" in ask:
                sums.add_product("hidden_cross", hidden, targets)
            if "hidden_initial" in ask:
                sums.add_product("hidden_initial", hidden, rows.weighted(span, features.initial(span)))
        if tracks:
            correct += rows.is_right(span, current @ weight)
    features.commit(memory.chain, goal, goal if "hidden_gram" in ask else -1)
    ahead = goal + 1 if "hidden_gram" in ask else goal
    if kernels is not NUMPY and ahead < features.layers and network.projection == "random":
        network.draw(ahead, kernels)  # a device makes the next projection while the server solves

    term = sums.finish()
    term.counts["rows"] = len(rows)
    if tracks:
        term.counts |= {"correct": correct, "tracked": len(rows)}
    return term


def _declare(sums: Accumulator, ask: set[str], network: Network, outputs: int) -> None:
    wide, deep, rank = network.width, network.hidden_width, min(network.width, outputs)
    shapes: dict[str, tuple[int, ...]] = {
        "gram": (wide, wide),
        "cross": (wide, outputs),
        "label_square": (outputs,),
        "hidden_gram": (deep, deep),
        "hidden_residual": (deep, outputs),
        "hidden_feature": (deep, wide),
        "hidden_cross": (deep, outputs),
        "hidden_initial": (deep, wide),
        "anchor": (wide, wide),
        "step_feature": (wide, rank),
        "step_cross": (rank, outputs),
        "step_gram": (rank, rank),
    }
    unknown = ask - shapes.keys()
    if unknown:
        raise TermError(f"unknown statistics {sorted(unknown)}. Install the fedsolve version of the server.")
    for name in sorted(ask):
        sums.declare(name, shapes[name], symmetric=name.endswith("gram"))


def _layer_features(data: ClientData, memory: Memory) -> LayerFeatures:
    """This client's features for the run that the chain describes; new when the run is new."""
    opening = memory.chain.opening
    parameters = opening["parameters"]
    rows = cached_rows(data, memory, parameters["precision"], memory.kernels)
    cached = memory.cache.get(KIND)
    if isinstance(cached, LayerFeatures) and cached.rows is rows:
        return cached
    check_projections(memory.chain)
    memory.cache.pop(KIND, None)
    memory.cache[KIND] = LayerFeatures(
        rows, Network.from_parameters(data.width, parameters), memory, parameters["layers"]
    )
    return memory.cache[KIND]  # type: ignore[no-any-return]


def blocks_of(chain: Chain, precision: str) -> list[Sandwich | None]:
    """The blocks of the model so far; None where the transformation is the identity."""
    return [block_of(block, precision) for block in layer_blocks(chain)]


def layer_blocks(chain: Chain) -> list[Block]:
    """Those blocks of a chain that are blocks of the network."""
    return [block for block in chain.blocks if "layer" in block.note]


def block_of(block: Block, precision: str) -> Sandwich | None:
    """A block of the network; None where the transformation is the identity."""
    if not block.arrays:
        return None
    return Sandwich(*(block.arrays[side].astype(precision, copy=False) for side in ("left", "right")))

"""Floor 1, validators: is every row of an ONNX file's embedding table the checkpoint's, asked for by a probe or not?

Probes hold a few hundred ids of many thousand; a row that none of them asks for is seen by nothing else. What is held
against the file are two numbers for each row: its norm, and its product with a fixed vector of signs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from nlpconvert import disk

SEED = 7
ALLOWED: dict[str, float] = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2, "int8": 5e-2, "int4": 0.5}
"""By precision, how far a row's product may be from the checkpoint's, as a share of its norm: the rounding of its
elements."""
_GATHERS = ("Gather", "EmbedLayerNormalization")


def fingerprint(table: np.ndarray) -> np.ndarray:
    """Norm and product with the signs of each row of a table (rows, width): float32 (rows, 2)."""
    wide = table.astype(np.float32, copy=False)
    signs = np.random.default_rng([SEED, table.shape[1]]).choice(np.array([-1, 1], np.float32), table.shape[1])
    return np.stack([np.sqrt(np.einsum("ij,ij->i", wide, wide)), wide @ signs], axis=1)


def tables(graph: Any, directory: Path, rows: int) -> list[tuple[str, np.ndarray]]:
    """The constant tables of `rows` rows that a GraphProto looks ids up in, by name; read from the data file in
    `directory` where they lie there. Raises OSError for one that is not there, ValueError for one cut off."""
    weights = {tensor.name: tensor for tensor in graph.initializer}
    moved = {n.output[0]: n.input[0] for n in graph.node if n.op_type in ("Identity", "Cast", "Transpose")}
    turned = {n.output[0] for n in graph.node if n.op_type == "Transpose"}
    found: dict[str, np.ndarray] = {}
    for node in graph.node:
        if node.op_type not in _GATHERS:
            continue
        for name in node.input:
            transposed = name in turned
            origin = moved.get(name, name)
            tensor = weights.get(origin)
            if tensor is None or len(tensor.dims) != 2 or origin in found:
                continue
            if tensor.dims[1 if transposed else 0] != rows:
                continue
            array = _array(tensor, directory)
            found[origin] = array.T if transposed else array
    return list(found.items())


def _array(tensor: Any, directory: Path) -> np.ndarray:
    """A tensor's values, from its data file where they lie there. onnx's own reader refuses files with several hard
    links, as caches and snapshots make them; a path that leads out of the directory is refused here too."""
    import onnx

    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return np.asarray(onnx.numpy_helper.to_array(tensor))
    said = {entry.key: entry.value for entry in tensor.external_data}
    shape = tuple(tensor.dims)
    return np.memmap(
        disk.inside(directory, said["location"]),
        dtype=onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type),
        mode="r",
        offset=int(said.get("offset", 0)),
        shape=shape,
    )


def problems(found: list[tuple[str, np.ndarray]], expected: np.ndarray, precision: str) -> list[str]:
    """What is wrong with the tables of a file, a sentence each. `expected`: `fingerprint` of the checkpoint's.

    A table of the checkpoint's rows times one factor is the checkpoint's: what becomes of the factor, the probes see.
    Another table with as many rows (positions, by chance) is left out when one of them is the checkpoint's.
    """
    allowed = ALLOWED.get(precision, ALLOWED["float32"])
    said: list[str] = []
    for name, table in found:
        ours = fingerprint(table)
        known = expected[:, 0] > 0
        with np.errstate(divide="ignore", invalid="ignore"):
            factor = float(np.median(ours[known, 0] / expected[known, 0])) if known.any() else 1.0
        factor = factor if np.isfinite(factor) and factor > 0 else 1.0
        bound = allowed * factor * np.maximum(expected[:, 0], np.median(expected[:, 0]))
        differ = ~(np.abs(ours - factor * expected).max(axis=1) <= bound)
        if not differ.any():
            return []
        first = int(np.argmax(differ))
        said.append(
            f"{int(differ.sum()):,} of {len(differ):,} rows of its embedding table {name} are not the checkpoint's, "
            f"first that of id {first}"
        )
    return said

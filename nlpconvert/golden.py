"""Floor 1: goldens: the probe inputs and PyTorch's answers, as arrays and as files.

With a golden, `verify` needs neither torch nor the model. Small outputs are kept whole; where they would not fit the
budget (a large vocabulary), a seeded sample of positions is kept whole and what was sampled is recorded.

    golden/golden.json           the cases in order: names, words, twins, inputs, outputs with their full shapes
    golden/inputs.safetensors    "<case>/<input>"
    golden/outputs.safetensors   "<case>/<output>" in float32, and "<case>/<output>/index" where it was sampled
    golden/tables.safetensors    "vocabulary": two numbers for each row of the embedding table (`validators.vocabulary`)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from nlpconvert import disk
from nlpconvert.errors import DriftError, UsageError
from nlpconvert.inputs import KINDS, Case, Twin
from nlpconvert.models import AXIS_MASK, OutputRow

DEFAULT_BUDGET = 64 << 20
"""Bytes that all kept outputs together may take."""
_INDEX_BYTES = 2 * 8  # what one kept position costs in the index

_WORDS, _INPUTS, _OUTPUTS = "golden.json", "inputs.safetensors", "outputs.safetensors"
_TABLES = "tables.safetensors"
_VOCABULARY = "vocabulary"


@dataclass(frozen=True)
class Reference:
    """PyTorch's answer to one case in one output.

    Whole: `index` is None and `values` has the output's shape. Sampled: `index` is int64 (n, 2), the kept
    (batch, position) pairs, and `values` is (n, *shape[2:]). `shape` is always the full output's.
    """

    values: np.ndarray
    shape: tuple[int, ...]
    index: np.ndarray | None = None

    def select(self, array: np.ndarray) -> np.ndarray:
        """The entries of a full-shaped array (or of a (batch, position) mask) that stand opposite `values`."""
        return array if self.index is None else array[self.index[:, 0], self.index[:, 1]]


Answers = Mapping[str, Reference]
"""One case's references by output name."""


# --- sampling to a budget --------------------------------------------------------------------------------------------


def mask_of(row: OutputRow, case: Case) -> np.ndarray | None:
    """The mask, int64 (batch, position), that says which positions of an output are real; None where it has none."""
    return case.inputs.get(AXIS_MASK.get(row.axes[1], "")) if len(row.axes) > 1 else None


def _may_be_sampled(row: OutputRow) -> bool:
    # An output with nothing after the sequence axis is decided over that axis (question answering), and small.
    return len(row.axes) > 2 and row.axes[1] in AXIS_MASK


def _shape(row: OutputRow, case: Case, example: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that `case` will have in an output, when another case's was `example`."""
    axes = {"batch": 0, "choices": 0, "sequence": 0, "decoder_sequence": 0}
    for name, array in case.inputs.items():
        axes["batch"] = array.shape[0]
        axes["decoder_sequence" if name.startswith("decoder_") else "sequence"] = array.shape[-1]
        if array.ndim > 2:
            axes["choices"] = array.shape[1]
    return tuple(axes.get(axis, size) for axis, size in zip(row.axes, example, strict=True))


def _shares(wanted: Mapping[str, int], available: int) -> dict[str, int]:
    """Divide `available` so that the small get all they want and the large get equal parts of the rest."""
    given: dict[str, int] = {}
    for count, name in enumerate(sorted(wanted, key=lambda name: (wanted[name], name))):
        given[name] = min(wanted[name], max(0, available) // (len(wanted) - count))
        available -= given[name]
    return given


@dataclass(frozen=True)
class Plan:
    """How much of which output is kept: made once, before the answers are, so that only one case's is ever held whole.

    `positions`: for each sampled output, how many (batch, position) pairs of each case; outputs not in it are whole.
    `notes`: lines for the person where the budget could not be held.
    """

    rows: tuple[OutputRow, ...]
    positions: Mapping[str, Mapping[str, int]]
    seed: int = 0
    notes: tuple[str, ...] = ()

    def keep(self, case: Case, output: str, array: np.ndarray) -> Reference:
        """What is kept of `array`, one case's answer in one output, as a float32 copy."""
        count = self.positions.get(output, {}).get(case.name)
        if count is None or array.ndim < 3 or count >= array.shape[0] * array.shape[1]:
            return Reference(np.array(array, dtype=np.float32, order="C"), array.shape)
        row = next(row for row in self.rows if row.name == output)
        mask = mask_of(row, case)
        if mask is None or mask.shape != array.shape[:2]:
            mask = np.ones(array.shape[:2], np.int64)
        # One stream per case and output: a case that joins or leaves changes no other's sample.
        words = f"{self.seed}/{case.name}/{output}".encode()
        rng = np.random.default_rng(int.from_bytes(hashlib.sha256(words).digest()[:8], "big"))
        index = choose_positions(mask, count, rng)
        values = array[index[:, 0], index[:, 1]].astype(np.float32, order="C")
        return Reference(values, array.shape, index)


def plan(
    cases: Sequence[Case],
    rows: Sequence[OutputRow],
    example: Mapping[str, tuple[int, ...]],
    budget: int = DEFAULT_BUDGET,
    seed: int = 0,
) -> Plan:
    """Divide `budget` bytes among all cases and outputs.

    `example` holds the output shapes of the first case that was answered: the sizes of the fixed axes come from it, the
    others from each case's inputs. Outputs without a sequence axis are whole, then small ones; what is left is
    divided among the large ones, and in each among the cases, the short ones whole first. Every case keeps two
    positions, or one where two would not fit, whatever the budget.
    """
    # An output of another rank than its row is not understood: whole, and the judges' business.
    present = [row for row in rows if row.name in example and len(row.axes) == len(example[row.name])]
    sizes = {row.name: [_shape(row, case, example[row.name]) for case in cases] for row in present}
    whole = {name: 4 * sum(prod(shape) for shape in shapes) for name, shapes in sizes.items()}
    large = {row.name: whole[row.name] for row in present if _may_be_sampled(row)}
    fixed = sum(whole.values()) - sum(large.values())
    notes: list[str] = []
    if fixed > budget:
        notes.append(f"outputs that cannot be sampled take {fixed:,} bytes, over the golden's budget of {budget:,}")
    positions: dict[str, dict[str, int]] = {}
    for name, share in _shares(large, budget - fixed).items():
        if share >= large[name]:
            continue
        there = {case.name: shape[0] * shape[1] for case, shape in zip(cases, sizes[name], strict=True)}
        each = _INDEX_BYTES + 4 * prod(example[name][2:])
        total = share // each
        least = 2 if total >= sum(min(2, count) for count in there.values()) else 1
        if total < sum(min(1, count) for count in there.values()):
            notes.append(f"{name}: one position of each case is kept, over the golden's budget of {budget:,} bytes")
        first = {case: min(least, count) for case, count in there.items()}
        more = _shares({case: there[case] - first[case] for case in there}, total - sum(first.values()))
        positions[name] = {case: first[case] + more[case] for case in there}
    return Plan(tuple(present), positions, seed, tuple(notes))


def choose_positions(mask: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """int64 (count, 2): (batch, position) pairs in order, where `mask` is (batch, position) with 1 at the real ones.

    The last and the first real position of a row come first, row by row in random order, until they are half; from four
    on an eighth is padded; the rest are real ones at random. When one kind runs out the other fills up.
    """
    real, padded = rng.permutation(np.argwhere(mask != 0)), rng.permutation(np.argwhere(mask == 0))
    count = min(count, mask.size)
    ends: list[tuple[int, int]] = []
    for row in rng.permutation(mask.shape[0]):
        (at,) = np.nonzero(mask[row])
        if at.size:
            ends += dict.fromkeys([(int(row), int(at[-1])), (int(row), int(at[0]))])
    ends = ends[: max(2, count // 2)]
    anchors = np.array(ends[:count], np.int64).reshape(-1, 2)
    is_anchor = {tuple(pair) for pair in anchors.tolist()}
    rest = np.array([pair for pair in real.tolist() if tuple(pair) not in is_anchor], np.int64).reshape(-1, 2)
    of_padded = min(len(padded), max(1, count // 8) if count >= 4 else 0)
    of_rest = min(len(rest), max(0, count - len(anchors) - of_padded))
    of_padded = min(len(padded), count - len(anchors) - of_rest)
    chosen = np.concatenate([anchors, rest[:of_rest], padded[:of_padded]])
    return np.ascontiguousarray(chosen[np.lexsort((chosen[:, 1], chosen[:, 0]))], dtype=np.int64)


def describe(cases: Iterable[Case], answers: Mapping[str, Answers]) -> list[dict[str, Any]]:
    """One row per case for the manifest: name, about, real tokens, and of each sampled output how many of how many."""
    rows: list[dict[str, Any]] = []
    for case in cases:
        masks = [case.inputs[name] for name in AXIS_MASK.values() if name in case.inputs]
        ids = [array for name, array in case.inputs.items() if name.endswith("input_ids")]
        sampled = {
            name: {"kept": len(reference.index), "of": reference.shape[0] * reference.shape[1]}
            for name, reference in answers.get(case.name, {}).items()
            if reference.index is not None
        }
        tokens = sum(int(np.count_nonzero(mask)) for mask in masks) if masks else sum(array.size for array in ids)
        rows.append({"name": case.name, "about": case.about, "tokens": tokens, "sampled": sampled})
    return rows


# --- as files --------------------------------------------------------------------------------------------------------


def write(
    directory: Path, cases: Sequence[Case], answers: Mapping[str, Answers], vocabulary: np.ndarray | None = None
) -> None:
    """Write a golden into `directory` (made when missing). The same cases and answers give the same bytes.

    `vocabulary`: the fingerprint of the embedding table, float32 (ids, 2).

    A case without answers (PyTorch could not give one) is kept with its inputs. UsageError: two cases of one name, or
    answers to no case. ConversionError: no room.
    """
    from safetensors.numpy import save

    names = [case.name for case in cases]
    if len(set(names)) != len(names) or not set(answers) <= set(names):
        raise UsageError(f"golden: case names have to be unique and answers have to belong to one: {', '.join(names)}")
    inputs: dict[str, np.ndarray] = {}
    outputs: dict[str, np.ndarray] = {}
    words: list[dict[str, Any]] = []
    for case in cases:
        of_case = answers.get(case.name, {})
        # safetensors writes memory as it lies: order="C" makes a view (a transposed array) what it looks like.
        inputs |= {f"{case.name}/{name}": np.asarray(array, order="C") for name, array in case.inputs.items()}
        for name, reference in of_case.items():
            outputs[f"{case.name}/{name}"] = np.asarray(reference.values, np.float32, order="C")
            if reference.index is not None:
                outputs[f"{case.name}/{name}/index"] = np.asarray(reference.index, np.int64, order="C")
        words.append(
            {
                "name": case.name,
                "about": case.about,
                "from_data": case.from_data,
                "truncated": case.truncated,
                "twins": [[twin.row, twin.case, twin.other_row, twin.kind] for twin in case.twins],
                "inputs": list(case.inputs),
                "outputs": {
                    name: {"shape": list(reference.shape), "sampled": reference.index is not None}
                    for name, reference in of_case.items()
                },
            }
        )
    with disk.disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        # Not save_file, which lets nobody but the owner read what it writes.
        (directory / _INPUTS).write_bytes(save(inputs))
        (directory / _OUTPUTS).write_bytes(save(outputs))
        if vocabulary is not None:
            (directory / _TABLES).write_bytes(save({_VOCABULARY: np.asarray(vocabulary, np.float32, order="C")}))
        disk.write_json_atomic(directory / _WORDS, {"cases": words})


def vocabulary(directory: Path) -> np.ndarray | None:
    """The fingerprint of the embedding table, float32 (ids, 2); None where none was kept. DriftError: damaged."""
    if not (directory / _TABLES).is_file():
        return None
    found = _load(directory, _TABLES).get(_VOCABULARY)
    if found is None or found.dtype != np.float32 or found.ndim != 2 or found.shape[1] != 2:
        raise DriftError(f"{directory / _TABLES} does not hold what it should; make the golden again")
    return found


def _load(directory: Path, name: str) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return load_file(disk.inside(directory, name))
    except SafetensorError as error:
        raise DriftError(f"{directory / name} is damaged ({error}); restore it or make the golden again") from error
    except OSError as error:
        raise UsageError(f"{directory / name} cannot be read: {error.strerror or error}") from error


def _reference(array: np.ndarray, shape: tuple[int, ...], index: np.ndarray | None) -> Reference:
    """A Reference whose parts fit each other; ValueError when they do not."""
    if index is not None:
        if len(shape) < 2 or index.dtype != np.int64 or index.ndim != 2 or index.shape[1] != 2:
            raise ValueError("an index of another form")
        if ((index < 0) | (index >= np.array(shape[:2]))).any():
            raise ValueError("an index out of its output's shape")
    if array.dtype != np.float32 or array.shape != (shape if index is None else (len(index), *shape[2:])):
        raise ValueError(f"{array.dtype} {array.shape} for an output of shape {shape}")
    return Reference(array, shape, index)


def _twin(row: Any, case: Any, other_row: Any, kind: Any = "company") -> Twin:
    """A twin as it was written; older goldens do not say of which kind it is. ValueError for another kind."""
    if kind not in KINDS:
        raise ValueError(f"a twin of the kind {kind!r}")
    return Twin(int(row), str(case), int(other_row), kind)


def read(directory: Path) -> tuple[list[Case], dict[str, Answers]]:
    """The cases in order and the answers by case, as they were written. Nothing is trusted: the files may be anyone's.

    UsageError: a file is missing or cannot be opened. DriftError: one is cut off, or the three do not fit each other.
    """
    path = directory / _WORDS
    try:
        words = json.loads(disk.inside(directory, _WORDS).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; make the golden again") from error
    except (ValueError, RecursionError) as error:
        raise DriftError(f"{path} is damaged ({error}); restore it or make the golden again") from error
    inputs, outputs = _load(directory, _INPUTS), _load(directory, _OUTPUTS)
    cases: list[Case] = []
    answers: dict[str, Answers] = {}
    try:
        for word in words["cases"]:
            name = str(word["name"])
            of_case = {key: inputs.pop(f"{name}/{key}") for key in word["inputs"]}
            twins = tuple(_twin(*said) for said in word["twins"])
            cases.append(
                Case(name, of_case, str(word["about"]), twins, bool(word["from_data"]), int(word["truncated"]))
            )
            references = {
                key: _reference(
                    outputs.pop(f"{name}/{key}"),
                    tuple(int(size) for size in said["shape"]),
                    outputs.pop(f"{name}/{key}/index") if said["sampled"] else None,
                )
                for key, said in word["outputs"].items()
            }
            if references:
                answers[name] = references
        if inputs or outputs:
            raise ValueError(f"{next(iter([*inputs, *outputs]))} belongs to no case")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DriftError(f"{path} does not fit the arrays beside it ({error}); make the golden again") from error
    return cases, answers

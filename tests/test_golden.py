"""golden: what is written is read again exactly, damage is told in one line, and samples keep to the budget."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from nlpconvert import golden
from nlpconvert.errors import DriftError, NlpconvertError, UsageError
from nlpconvert.golden import Plan, Reference, choose_positions, describe, mask_of, plan
from nlpconvert.inputs import Case, Twin
from nlpconvert.models import OutputRow

LOGITS = OutputRow("logits", ("batch", "sequence", "vocabulary"), "distribution")
POOLER = OutputRow("pooler_output", ("batch", "hidden"), "embedding")
START = OutputRow("start_logits", ("batch", "sequence"), "position")
DECODER = OutputRow("logits", ("batch", "decoder_sequence", "vocabulary"), "distribution")
ENCODER = OutputRow("encoder_last_hidden_state", ("batch", "sequence", "hidden"), "embedding")


def case(name: str, mask: np.ndarray, **more: np.ndarray) -> Case:
    """A case of ids and a mask, (batch, sequence)."""
    ids = np.arange(mask.size, dtype=np.int64).reshape(mask.shape)
    return Case(name, {"input_ids": ids, "attention_mask": mask, **more}, f"about {name}")


def mask_like(batch: int, sequence: int, padded: int = 0) -> np.ndarray:
    """Ones, with `padded` zeros at the right of every row but the first."""
    mask = np.ones((batch, sequence), np.int64)
    if padded:
        mask[1:, -padded:] = 0
    return mask


def standard_cases() -> list[Case]:
    """24 cases of 1 to 512 tokens a row, about 6,000 positions: what the probe set is like."""
    shapes = [(1, 1), (1, 2), (1, 512), (8, 64), (4, 100), (2, 300)] + [(2, 7 * (i + 1)) for i in range(18)]
    return [case(f"c{i:02}", mask_like(batch, sequence, sequence // 3)) for i, (batch, sequence) in enumerate(shapes)]


# --- files -----------------------------------------------------------------------------------------------------------


def example() -> tuple[list[Case], dict[str, golden.Answers]]:
    """Two cases and one that PyTorch could not answer; a whole and a sampled output, a zero-size and a scalar array."""
    rng = np.random.default_rng(0)
    full = rng.normal(size=(2, 5, 7)).astype(np.float32)
    index = np.array([[0, 0], [1, 4]])
    cases = [
        case("plain", mask_like(2, 5), extreme=np.array([[2**62, -1]]), scalar=np.array(3)),
        Case("empty", {"input_ids": np.zeros((1, 0), np.int64)}, "nothing", (Twin(0, "plain", 1),), True, 2),
        case("not-answered", mask_like(1, 3)),
    ]
    sampled = Reference(full[index[:, 0], index[:, 1]], full.shape, index)
    answers: dict[str, golden.Answers] = {
        "plain": {"logits": sampled, "x": Reference(full, full.shape)},
        "empty": {"x": Reference(np.zeros((1, 0, 7), np.float32), (1, 0, 7))},
    }
    return cases, answers


def assert_same(one: Reference, other: Reference) -> None:
    """Bit for bit, type and shape."""
    assert one.shape == other.shape and one.values.dtype == other.values.dtype == np.float32
    np.testing.assert_array_equal(one.values, other.values, strict=True)
    assert (one.index is None) == (other.index is None)
    if one.index is not None and other.index is not None:
        np.testing.assert_array_equal(one.index, other.index, strict=True)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    """Exactly, every field of a case, in the same order; a case without answers keeps its inputs."""
    cases, answers = example()
    golden.write(tmp_path / "golden", cases, answers)
    again, given = golden.read(tmp_path / "golden")
    for one, other in zip(cases, again, strict=True):
        fields = {field.name for field in dataclasses.fields(Case)} - {"inputs"}
        assert {name: getattr(one, name) for name in fields} == {name: getattr(other, name) for name in fields}
        assert list(one.inputs) == list(other.inputs)
        for name, array in one.inputs.items():
            np.testing.assert_array_equal(array, other.inputs[name], strict=True)
    assert list(given) == ["plain", "empty"]
    for name, references in answers.items():
        assert list(given[name]) == list(references)
        for output, reference in references.items():
            assert_same(given[name][output], reference)


def test_every_field_of_a_case_is_kept() -> None:
    """A field that joins Case has to join the file: this list and `write` and `read` go together."""
    assert {field.name for field in dataclasses.fields(Case)} == {
        "name", "inputs", "about", "twins", "from_data", "truncated"
    }  # fmt: skip


def test_the_bytes_are_the_same_every_time(tmp_path: Path) -> None:
    """So that a golden's hash says something."""
    cases, answers = example()
    for name in ("one", "two"):
        golden.write(tmp_path / name, cases, answers)
    for file in ("golden.json", "inputs.safetensors", "outputs.safetensors"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    assert {path.name for path in (tmp_path / "one").iterdir()} == {
        "golden.json", "inputs.safetensors", "outputs.safetensors"
    }  # fmt: skip


def test_a_view_is_written_as_it_looks(tmp_path: Path) -> None:
    """safetensors writes memory as it lies; a transposed array must not come back otherwise. float64 is narrowed."""
    turned = np.arange(6.0).reshape(2, 3).T
    ids = np.arange(6).reshape(2, 3).T
    golden.write(tmp_path, [Case("a", {"input_ids": ids})], {"a": {"x": Reference(turned, turned.shape)}})
    cases, answers = golden.read(tmp_path)
    np.testing.assert_array_equal(cases[0].inputs["input_ids"], ids)
    np.testing.assert_array_equal(answers["a"]["x"].values, turned.astype(np.float32), strict=True)


def test_names_have_to_fit(tmp_path: Path) -> None:
    """Two cases of one name would overwrite each other; answers to no case would be lost."""
    one = case("a", mask_like(1, 2))
    with pytest.raises(UsageError, match="unique"):
        golden.write(tmp_path, [one, one], {})
    with pytest.raises(UsageError, match="belong"):
        golden.write(tmp_path, [one], {"b": {}})


def change_words(directory: Path, change: Callable[[dict[str, object]], object]) -> None:
    """Edit the first case of golden.json."""
    words = json.loads((directory / "golden.json").read_text())
    change(words["cases"][0])
    (directory / "golden.json").write_text(json.dumps(words))


def change_outputs(directory: Path, changed: Mapping[str, np.ndarray]) -> None:
    """Replace arrays in outputs.safetensors."""
    save_file({**load_file(directory / "outputs.safetensors"), **changed}, directory / "outputs.safetensors")


def cut(path: Path, size: int) -> None:
    """Cut a file off."""
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda d: cut(d / "outputs.safetensors", -9), DriftError, "outputs.safetensors is damaged"),
        (lambda d: cut(d / "inputs.safetensors", 4), DriftError, "inputs.safetensors is damaged"),
        (lambda d: cut(d / "inputs.safetensors", 0), DriftError, "inputs.safetensors is damaged"),
        (lambda d: cut(d / "golden.json", 40), DriftError, "golden.json is damaged"),
        (lambda d: (d / "golden.json").write_text("[1]"), DriftError, "does not fit"),
        (lambda d: (d / "golden.json").unlink(), UsageError, "golden.json cannot be read: No such file"),
        (lambda d: (d / "outputs.safetensors").unlink(), UsageError, "outputs.safetensors cannot be read: No such"),
        (lambda d: change_words(d, lambda c: c.update(name="other")), DriftError, "does not fit .*other/input_ids"),
        (lambda d: change_words(d, lambda c: c.update(outputs={})), DriftError, "belongs to no case"),
        (lambda d: change_words(d, lambda c: c.update(twins=[[1]])), DriftError, "does not fit"),
        (
            lambda d: change_words(d, lambda c: c.update(outputs={"x": {"shape": [2, 5, 8], "sampled": False}})),
            DriftError,
            "for an output of shape",
        ),
        (lambda d: change_outputs(d, {"plain/logits/index": np.array([[0, 0], [1, 5]])}), DriftError, "out of its"),
        (lambda d: change_outputs(d, {"plain/logits/index": np.array([[0, 0], [-1, 0]])}), DriftError, "out of its"),
        (lambda d: change_outputs(d, {"plain/logits/index": np.array([0, 0])}), DriftError, "index of another form"),
        (lambda d: change_outputs(d, {"plain/logits": np.zeros((2, 7))}), DriftError, "float64"),
        (lambda d: change_outputs(d, {"plain/logits": np.zeros((3, 7), np.float32)}), DriftError, "for an output of"),
    ],
)
def test_a_damaged_golden_is_one_line(
    tmp_path: Path, damage: Callable[[Path], object], error: type[NlpconvertError], message: str
) -> None:
    """Cut off, missing, or parts that do not fit each other: named, never a wrong comparison."""
    golden.write(tmp_path, *example())
    damage(tmp_path)
    with pytest.raises(error, match=message) as told:
        golden.read(tmp_path)
    assert str(tmp_path) in str(told.value) and "\n" not in str(told.value)


# --- sampling --------------------------------------------------------------------------------------------------------


def kept_bytes(planned: Plan, cases: list[Case], shapes: Callable[[Case], Mapping[str, tuple[int, ...]]]) -> int:
    """What a plan really keeps, by making each case's answers one after the other."""
    total = 0
    for one in cases:
        for output, shape in shapes(one).items():
            reference = planned.keep(one, output, np.zeros(shape, np.float32))
            total += reference.values.nbytes + (reference.index.nbytes if reference.index is not None else 0)
            if reference.index is not None:
                assert min(2, shape[0] * shape[1]) <= len(reference.index)
    return total


@pytest.mark.parametrize("budget", [12 << 20, 64 << 20])
def test_a_vocabulary_of_50000_keeps_to_the_budget(budget: int) -> None:
    """6,000 positions of 50,000 would be 1.2 GB. Every case keeps two at least, and little of the budget is left."""
    cases = standard_cases()

    def shapes(one: Case) -> dict[str, tuple[int, ...]]:
        return {"logits": (*one.inputs["input_ids"].shape, 50_000)}

    planned = plan(cases, (LOGITS,), shapes(cases[2]), budget)
    kept = kept_bytes(planned, cases, shapes)
    assert 0.95 * budget < kept <= budget
    assert planned.notes == () and set(planned.positions) == {"logits"}
    # The shortest cases are whole, in the form of a whole one.
    assert planned.keep(cases[0], "logits", np.zeros((1, 1, 50_000))).index is None


def test_small_outputs_are_whole_beside_a_large_one() -> None:
    """An encoder's states beside a decoder's logits; pooled and question-answering outputs are never sampled."""
    decoder = {"decoder_input_ids": np.zeros((2, 9), np.int64), "decoder_attention_mask": mask_like(2, 9)}
    cases = [case(f"c{i}", mask_like(2, 40, 5), **decoder) for i in range(10)]

    def shapes(one: Case) -> dict[str, tuple[int, ...]]:
        rows, sequence = one.inputs["input_ids"].shape
        return {
            "logits": (rows, 9, 20_000),
            "encoder_last_hidden_state": (rows, sequence, 32),
            "pooler_output": (rows, 32),
            "start_logits": (rows, sequence),
        }

    planned = plan(cases, (DECODER, ENCODER, POOLER, START), shapes(cases[0]), 4 << 20)
    assert set(planned.positions) == {"logits"}
    assert 0.9 * (4 << 20) < kept_bytes(planned, cases, shapes) <= 4 << 20
    # The decoder's own mask decides which of its positions are real.
    assert mask_of(DECODER, cases[0]) is decoder["decoder_attention_mask"] and mask_of(POOLER, cases[0]) is None
    assert plan(cases, (DECODER, ENCODER, POOLER, START), shapes(cases[0]), 1 << 30).positions == {}
    # Question answering decides over the sequence axis: a sample of it would be another question.
    none_fits = plan(cases, (POOLER, START), shapes(cases[0]), 1)
    assert none_fits.positions == {} and "cannot be sampled" in none_fits.notes[0]


def test_a_budget_too_small_keeps_one_and_says_so() -> None:
    """One position of each case whatever the budget, two outputs that cannot be sampled stay whole; both are noted."""
    cases = standard_cases()
    planned = plan(cases, (LOGITS, POOLER), {"logits": (1, 1, 50_000), "pooler_output": (1, 64)}, 1000)
    assert set(planned.positions["logits"].values()) == {1}
    assert len(planned.notes) == 2 and "cannot be sampled" in planned.notes[0] and "one position" in planned.notes[1]
    reference = planned.keep(cases[3], "logits", np.zeros((8, 64, 50), np.float32))
    assert reference.values.shape == (1, 50)
    # One is just enough for each: one it is, without a note.
    (just,) = plan(cases, (LOGITS,), {"logits": (1, 1, 50_000)}, 24 * (4 * 50_000 + 16)).positions.values()
    assert set(just.values()) == {1}


def test_what_is_kept_stands_opposite_the_index() -> None:
    """Values are the positions of the index, whole over the vocabulary; `select` picks the same of another array."""
    one = case("a", mask_like(3, 50, 20))
    full = np.random.default_rng(1).normal(size=(3, 50, 11)).astype(np.float32)
    planned = plan([one], (LOGITS,), {"logits": full.shape}, 20 * (44 + 16))
    reference = planned.keep(one, "logits", full)
    assert reference.index is not None and reference.shape == full.shape and len(reference.index) == 20
    np.testing.assert_array_equal(reference.values, reference.select(full), strict=True)
    assert not np.shares_memory(planned.keep(one, "other", full).values, full)
    real = reference.select(one.inputs["attention_mask"])
    assert 0 < np.count_nonzero(real == 0) <= 3 and np.count_nonzero(real) >= 17
    (row,) = describe([one], {"a": {"logits": reference}})
    assert row == {
        "name": "a", "about": "about a", "tokens": 110, "sampled": {"logits": {"kept": 20, "of": 150}}
    }  # fmt: skip


def test_the_sample_is_seeded_by_case_and_output() -> None:
    """The same again; another seed or another case another; and no other case's sample moves when one joins."""
    cases = [case(name, mask_like(2, 200)) for name in ("a", "b")]
    full = np.zeros((2, 200, 3), np.float32)
    positions = {"logits": {"a": 30, "b": 30}}

    def index(planned: Plan, one: Case) -> bytes:
        reference = planned.keep(one, "logits", full)
        assert reference.index is not None
        return reference.index.tobytes()

    first = Plan((LOGITS,), positions, seed=0)
    assert index(first, cases[0]) == index(Plan((LOGITS,), {"logits": {"a": 30}}), cases[0])
    assert index(first, cases[0]) != index(first, cases[1])
    assert index(first, cases[0]) != index(Plan((LOGITS,), positions, seed=1), cases[0])


@pytest.mark.parametrize("count", [1, 2, 3, 4, 10, 39, 40])
@pytest.mark.parametrize("kind", ["right", "left", "holes", "none real", "all real"])
def test_positions_are_chosen_without_repeat(count: int, kind: str) -> None:
    """Exactly as many as asked, in order, ends first, some padded from four on, whatever the mask is like."""
    mask = np.ones((4, 10), np.int64)
    if kind == "right":
        mask[:, 6:] = 0
    elif kind == "left":
        mask[:, :6] = 0
    elif kind == "holes":
        mask[:, ::3] = 0
    elif kind == "none real":
        mask[:] = 0
    index = choose_positions(mask, count, np.random.default_rng(count))
    pairs = [tuple(pair) for pair in index.tolist()]
    assert len(pairs) == count == len(set(pairs)) and pairs == sorted(pairs) and index.dtype == np.int64
    ends = [{(row, int(at[-1])), (row, int(at[0]))} for row in range(4) if (at := np.nonzero(mask[row])[0]).size]
    if kind == "none real":
        return
    if count == 1:
        assert any(pairs[0] in both for both in ends)
    else:
        assert any(both <= set(pairs) for both in ends)
    chosen = mask[index[:, 0], index[:, 1]]
    if count >= 4 and kind != "all real":
        assert (chosen == 0).any()
    assert (chosen == 1).any()


def test_an_answer_of_another_length_than_planned() -> None:
    """A model may give other positions than it was asked: what it gives is sampled, and the mask is left out."""
    one = case("a", mask_like(2, 5, 2))
    reference = Plan((LOGITS,), {"logits": {"a": 4}}).keep(one, "logits", np.zeros((2, 9, 3), np.float32))
    assert reference.index is not None and reference.index.shape == (4, 2) and reference.shape == (2, 9, 3)
    # Fewer axes than its row says: whole.
    assert plan([one], (LOGITS,), {"logits": (2, 5)}, 1).positions == {}

"""Profiles: what is parsed, what is refused and in which words, and which batches an engine can take."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nlpconvert import profiles
from nlpconvert.artifact import TensorSpec
from nlpconvert.cache_names import CacheLayer, past
from nlpconvert.errors import OutOfProfile, UsageError
from nlpconvert.models import input_axes
from nlpconvert.profiles import Profile

AXES = ("batch", "sequence")
INPUTS = (
    TensorSpec("input_ids", "int64", ("batch", "sequence")),
    TensorSpec("attention_mask", "int64", ("batch", "sequence")),
    TensorSpec("scale", "float32", ("batch", 1)),
)


def profile(minimum: str = "1x1", optimum: str = "8x128", maximum: str = "32x512") -> Profile:
    return profiles.parse(minimum, optimum, maximum, AXES)


def test_parse_reads_sizes_in_the_order_of_the_axes() -> None:
    found = profile()
    assert found.min == {"batch": 1, "sequence": 1}
    assert found.opt == {"batch": 8, "sequence": 128}
    assert found.max == {"batch": 32, "sequence": 512}
    assert str(found) == "1x1 / 8x128 / 32x512"


def test_data_comes_back() -> None:
    assert profiles.from_data(profile().as_data()) == profile()
    with pytest.raises(KeyError):
        profiles.from_data({"min": {}, "opt": {}})


@pytest.mark.parametrize(
    ("task", "names", "expected"),
    [
        ("text-classification", ("input_ids", "attention_mask"), ("batch", "sequence")),
        ("multiple-choice", ("input_ids", "attention_mask"), ("batch", "choices", "sequence")),
        (
            "text2text-generation",
            ("decoder_input_ids", "input_ids", "attention_mask"),  # in whatever order the inputs come
            ("batch", "sequence", "decoder_sequence"),
        ),
    ],
)
def test_dynamic_axes(task: str, names: tuple[str, ...], expected: tuple[str, ...]) -> None:
    assert profiles.dynamic_axes(input_axes(name, task) for name in names) == expected


def test_dynamic_axes_leaves_fixed_sizes_out_and_keeps_unknown_ones() -> None:
    assert profiles.dynamic_axes([("windows", "sequence", 384), ("batch", "sequence")]) == (
        "batch",
        "sequence",
        "windows",
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("1x1", None, "32x512"), "the profile is incomplete, --opt is missing: give --min, --opt and --max"),
        (("1x1", None, None), "the profile is incomplete, --opt and --max are missing"),
        (("1x1", "8*128", "32x512"), '--opt "8*128" is not a shape: write whole numbers joined by "x", here batchxseq'),
        (("1x1", "8x", "32x512"), '--opt "8x" is not a shape'),
        (("1x1", "x8", "32x512"), '--opt "x8" is not a shape'),
        (("", "8x128", "32x512"), '--min "" is not a shape'),
        (("1x1", "8x128", "32x5.12"), '--max "32x5.12" is not a shape'),
        (("1", "8x128", "32x512"), '--min "1" is incomplete, sequence is missing: this model takes 2 sizes'),
        (("1x1", "8x128x3", "32x512"), '--opt "8x128x3" has 3 sizes: this model takes 2, batchxsequence'),
        (("9x1", "8x128", "32x512"), "--min is over --opt for batch (9 > 8)"),
        (("1x1", "8x128", "32x64"), "--opt is over --max for sequence (128 > 64)"),
        (("0x1", "8x128", "32x512"), "--min has batch 0: every size is at least 1"),
        (("1x-1", "8x128", "32x512"), "--min has sequence -1: every size is at least 1"),
        (("1x1", "8x128", "32x513"), "--max has sequence 513, over this model's limit of 512 tokens"),
    ],
)
def test_bad_profiles_are_refused_in_one_line(given: tuple[str | None, str | None, str | None], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        profiles.choose(*given, AXES, 512)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_check_refuses_axes_that_are_missing_or_unknown() -> None:
    short = Profile({"batch": 1}, {"batch": 8}, {"batch": 32})
    with pytest.raises(UsageError, match="incomplete, --min has no sequence: give batchxsequence"):
        profiles.check(short, AXES, 512)
    with pytest.raises(UsageError, match="--min has an axis sequence that this model does not have: give batch"):
        profiles.check(profile(), ("batch",), 512)


def test_the_decoder_is_held_to_the_limit_too() -> None:
    axes = ("batch", "sequence", "decoder_sequence")
    with pytest.raises(UsageError, match="--max has decoder_sequence 65, over this model's limit of 64 tokens"):
        profiles.choose("1x1x1", "2x8x8", "2x64x65", axes, 64)


def test_without_a_limit_any_length_is_allowed() -> None:
    assert profiles.choose("1x1", "8x128", "32x5000", AXES, None).max["sequence"] == 5000


@pytest.mark.parametrize(
    ("limit", "optimum", "maximum"),
    [(512, 128, 512), (None, 128, 512), (2048, 128, 512), (384, 128, 384), (64, 64, 64)],
)
def test_default_profile_stays_within_the_limit(limit: int | None, optimum: int, maximum: int) -> None:
    found = profiles.choose(None, None, None, AXES, limit)
    assert found == Profile(
        {"batch": 1, "sequence": 1}, {"batch": 8, "sequence": optimum}, {"batch": 32, "sequence": maximum}
    )


def test_default_profile_of_other_axes() -> None:
    axes = ("batch", "choices", "sequence", "windows")
    assert str(profiles.choose(None, None, None, axes, 64)) == "1x1x1x1 / 8x4x64x128 / 32x8x64x512"


def test_shapes_give_the_same_axis_the_same_size() -> None:
    found = profiles.shapes(profile(), INPUTS)
    assert found["input_ids"] == found["attention_mask"] == ((1, 1), (8, 128), (32, 512))
    assert found["scale"] == ((1, 1), (8, 1), (32, 1))


def test_shapes_refuse_an_axis_without_a_size() -> None:
    with pytest.raises(UsageError, match="incomplete: input memory has an axis windows"):
        profiles.shapes(profile(), (TensorSpec("memory", "float32", ("batch", "windows")),))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, ""),
        ({"unread": (7,)}, ""),
        ({"input_ids": (4, 600), "attention_mask": (4, 600)}, "length 600 is over the engine's profile 512"),
        ({"input_ids": (33, 9)}, "batch 33 is over the engine's profile 32"),
        ({"input_ids": (4, 0)}, "length 0 is under the engine's profile 1"),
        ({"attention_mask": (4, 8)}, "input attention_mask has sequence 8, another input 9"),
        ({"attention_mask": (4, 9, 9)}, "input attention_mask has 3 axes, the engine takes 2"),
        ({"scale": (4, 2)}, "input scale has shape (4, 2), the engine takes ('batch', 1)"),
    ],
)
def test_outside_says_why(changed: dict[str, tuple[int, ...]], reason: str) -> None:
    batch = {"input_ids": (4, 9), "attention_mask": (4, 9), "scale": (4, 1), **changed}
    assert profiles.outside(profile(), INPUTS, batch) == reason


def test_outside_names_a_missing_input() -> None:
    assert (
        profiles.outside(profile(), INPUTS, {"input_ids": (4, 9)})
        == "the batch lacks the engine's input attention_mask"
    )


# -- models that write -------------------------------------------------------------------------------------------------

DECODER, PAIR = profiles.DECODER_AXES, profiles.PAIR_AXES
NOTHING = (None, None, None)
LAYERS = (CacheLayer(2, 8, 8),)
WRITING = (
    TensorSpec("input_ids", "int64", ("batch", "sequence")),
    TensorSpec("attention_mask", "int64", ("batch", "total_sequence")),
    *past(LAYERS),
)


def test_axes_of_graphs_with_a_past() -> None:
    assert profiles.dynamic_axes(spec.shape for spec in WRITING) == DECODER
    pair = (
        TensorSpec("input_ids", "int64", ("batch", "decoder_sequence")),
        TensorSpec("encoder_attention_mask", "int64", ("batch", "sequence")),
        *past(LAYERS, "past_decoder_sequence", "decoder"),
        *past(LAYERS, "sequence", "encoder"),
    )
    assert profiles.dynamic_axes(spec.shape for spec in pair) == PAIR


def test_prompts_and_steps_of_a_decoder() -> None:
    prefill, steps = profiles.choose_all("1x1", "4x16", "8x64", DECODER, 1024, max_new_tokens=100)
    assert str(prefill) == "prefill 1x1x0 / 4x16x0 / 8x64x100"
    assert str(steps) == "steps 1x1x0 / 4x1x66 / 8x1x163"
    for each in (prefill, steps):
        for level in (each.min, each.opt, each.max):
            assert list(level) == list(DECODER)
            assert level["total_sequence"] == level["sequence"] + level["past_sequence"]
    assert prefill.max["total_sequence"] == steps.max["total_sequence"] == 164
    assert [profiles.from_data(json.loads(json.dumps(each.as_data()))) for each in (prefill, steps)] == [prefill, steps]


def test_prompts_and_steps_behind_an_encoder() -> None:
    prefill, steps = profiles.choose_all("1x1", "4x16", "8x64", PAIR, None, max_new_tokens=100)
    assert str(prefill) == "prefill 1x1x1x0 / 4x16x1x0 / 8x64x101x0"
    assert str(steps) == "steps 1x1x1x0 / 4x16x1x51 / 8x64x1x100"
    assert prefill.of(("batch", "sequence")) == profiles.parse("1x1", "4x16", "8x64", AXES)


@pytest.mark.parametrize(
    ("axes", "limit", "options", "longest", "total"),
    [
        (DECODER, 1024, {}, 512, 768),
        (DECODER, 1024, {"configured": 20}, 512, 532),
        (DECODER, 1024, {"configured": 20, "max_new_tokens": 30}, 512, 542),
        (DECODER, 1024, {"max_new_tokens": 1000}, 512, 1024),  # cut: nobody chose the length of the prompts
        (DECODER, 64, {}, 64, 64),
        (DECODER, 64, {"max_new_tokens": 64}, 64, 64),
        (DECODER, None, {}, 512, 768),
        (PAIR, None, {}, 257, 257),
        (PAIR, 64, {"configured": 256}, 64, 64),
        (PAIR, 64, {"max_new_tokens": 20}, 21, 21),
    ],
)
def test_default_profiles_stay_within_the_limit(
    axes: tuple[str, ...], limit: int | None, options: Mapping[str, Any], longest: int, total: int
) -> None:
    prefill, steps = profiles.choose_all(*NOTHING, axes, limit, **options)
    new, held = ("sequence", "past_sequence") if axes == DECODER else ("decoder_sequence", "past_decoder_sequence")
    assert prefill.max[new] == longest and prefill.max[held] == total - longest
    assert steps.max[held] == total - 1 and steps.min[held] == 0 and steps.max[new] == 1


@pytest.mark.parametrize(
    ("given", "axes", "new", "message"),
    [
        (
            ("1x1", "4x16", "8x60"),
            DECODER,
            6,
            "--max-new-tokens 6: after a prompt of 60 that is past this model's limit ",
        ),
        (("1x1", "4x16", "8x60"), DECODER, 6, "of 64 tokens; give at most 5"),
        (NOTHING, DECODER, 65, "after a prompt of 1 that is past this model's limit of 64 tokens; give at most 64"),
        (NOTHING, PAIR, 65, "after the start token that is past this model's limit of 64 tokens; give at most 64"),
        (NOTHING, DECODER, 0, "--max-new-tokens 0: nothing would be written"),
        (("1x1", "4x16", "8x65"), DECODER, 1, "--max has sequence 65, over this model's limit of 64 tokens"),
        (("1x1", "4x16", "8x65"), PAIR, 1, "--max has sequence 65, over this model's limit of 64 tokens"),
        (("1x1x1", "4x16", "8x60"), PAIR, 1, '--min "1x1x1" has 3 sizes: this model takes 2, batchxsequence'),
        (NOTHING, AXES, 5, "--max-new-tokens is for a model that writes with a cache, and this one does not"),
    ],
)
def test_new_tokens_that_are_refused(given: Any, axes: tuple[str, ...], new: int, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        profiles.choose_all(*given, axes, 64, max_new_tokens=new)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_what_just_fits_is_not_refused() -> None:
    """The last token is written and never read: 60 and 5 fill 64."""
    assert profiles.choose_all("1x1", "4x16", "8x60", DECODER, 64, max_new_tokens=5)[1].max["past_sequence"] == 63


def test_without_a_past_there_is_one_profile() -> None:
    assert profiles.choose_all(*NOTHING, AXES, 384) == (profiles.choose(*NOTHING, AXES, 384),)


def of(rows: int, new: int, held: int, mask: int | None = None) -> dict[str, tuple[int, ...]]:
    """Shapes of a call of the decoder."""
    arrays = {"input_ids": (rows, new), "attention_mask": (rows, new + held if mask is None else mask)}
    return arrays | {f"past_key_values.0.{kind}": (rows, 2, held, 8) for kind in ("key", "value")}


@pytest.mark.parametrize(
    ("shapes", "number"),
    [(of(2, 24, 0), 0), (of(2, 1, 0), 1), (of(4, 1, 43), 1), (of(1, 24, 20), 0), (of(1, 2, 20), 0)],
)
def test_a_call_is_run_by_the_narrowest_profile(shapes: Mapping[str, tuple[int, ...]], number: int) -> None:
    chosen = profiles.choose_all("1x1", "2x8", "4x24", DECODER, 64, max_new_tokens=20)
    assert profiles.fitting(chosen, WRITING, shapes) == number


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        (
            of(2, 25, 0),
            "prefill: length 25 is over the engine's profile 24; steps: length 25 is over the engine's profi",
        ),
        (
            of(2, 3, 21),
            "prefill: past 21 is over the engine's profile 20; steps: length 3 is over the engine's profile",
        ),
        (of(5, 1, 0), "batch 5 is over the engine's profile 4"),
        (of(2, 1, 9, mask=12), "total_sequence 12 is not past_sequence 9 and sequence 1 together"),
    ],
)
def test_a_call_that_no_profile_takes(shapes: Mapping[str, tuple[int, ...]], reason: str) -> None:
    chosen = profiles.choose_all("1x1", "2x8", "4x24", DECODER, 64, max_new_tokens=20)
    with pytest.raises(OutOfProfile) as caught:
        profiles.fitting(chosen, WRITING, shapes)
    assert str(caught.value).startswith(reason) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "found"),
    [('{"max_new_tokens": 99}', 99), ('{"max_length": 20}', None), ("[]", None), ("{", None), (None, None)],
)
def test_new_tokens_of_the_checkpoint(text: str | None, found: int | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text)
    assert profiles.configured_tokens(tmp_path) == found

"""Floor 1: optimisation profiles: the shapes a TensorRT engine is built for, as parsed, checked and asked about.

A profile gives each dynamic axis a smallest, a usual and a largest size. TensorRT builds for a length that the model
does not have and only warns; so everything that can be said against a profile is said here, before a builder starts.
What does not belong here: building and running engines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nlpconvert.artifact import TensorSpec
from nlpconvert.cache_names import PAST_AXIS, PAST_DECODER_AXIS, TOTAL_AXIS, TOTAL_DECODER_AXIS
from nlpconvert.errors import OutOfProfile, UsageError
from nlpconvert.models import AXIS_MASK

Sizes = Mapping[str, int]
Shape = tuple[int, ...]

# The order in which a person writes the axes; axes that are not here follow in the order in which the inputs show them.
AXIS_ORDER: tuple[str, ...] = (
    "batch",
    "choices",
    "sequence",
    "decoder_sequence",
    PAST_AXIS,
    TOTAL_AXIS,
    PAST_DECODER_AXIS,
    TOTAL_DECODER_AXIS,
)

# Axes whose size is the sum of two others': nobody chooses them.
_SUMS: dict[str, tuple[str, str]] = {
    TOTAL_AXIS: (PAST_AXIS, "sequence"),
    TOTAL_DECODER_AXIS: (PAST_DECODER_AXIS, "decoder_sequence"),
}
_PASTS = (PAST_AXIS, PAST_DECODER_AXIS)
_LENGTHS = (*AXIS_MASK, *_PASTS, *_SUMS)
"""Axes that count tokens, so that the model's limit holds for them."""

PREFILL, STEPS = "prefill", "steps"
DEFAULT_NEW_TOKENS = 256
"""What is written after a prompt, where neither the user nor the checkpoint says."""

# Axis -> opt and max of the default profile (min is 1); both are lowered to the model's limit where there is one.
_DEFAULTS: dict[str, tuple[int, int]] = {
    "batch": (8, 32),
    "choices": (4, 8),
    "sequence": (128, 512),
    "decoder_sequence": (128, 512),
}
_DEFAULT_OTHER = (128, 512)


@dataclass(frozen=True)
class Profile:
    """Smallest, usual and largest size of each dynamic axis; `name` tells several of one engine apart."""

    min: Sizes
    opt: Sizes
    max: Sizes
    name: str = ""

    def __str__(self) -> str:
        """As the command line has it: "1x1 / 8x128 / 32x512", sizes that follow from others left out."""
        levels = (self.min, self.opt, self.max)
        said = " / ".join("x".join(str(size) for axis, size in each.items() if axis not in _SUMS) for each in levels)
        return f"{self.name} {said}" if self.name else said

    def as_data(self) -> dict[str, Any]:
        """Plain JSON values, read back by `from_data`."""
        named = {"name": self.name} if self.name else {}
        return {**named, "min": dict(self.min), "opt": dict(self.opt), "max": dict(self.max)}

    def of(self, axes: Iterable[str]) -> Profile:
        """Of these axes alone, without a name: the encoder's share of its decoder's profile."""
        kept = tuple(axes)
        least, usual, most = (
            {axis: sizes[axis] for axis in kept if axis in sizes} for sizes in (self.min, self.opt, self.max)
        )
        return Profile(least, usual, most)


def from_data(data: Mapping[str, Any]) -> Profile:
    """The profile that `as_data` wrote. Raises KeyError, TypeError or ValueError on anything else."""
    sizes = {level: {str(axis): int(size) for axis, size in data[level].items()} for level in ("min", "opt", "max")}
    return Profile(sizes["min"], sizes["opt"], sizes["max"], str(data.get("name", "")))


def dynamic_axes(shapes: Iterable[Sequence[int | str]]) -> tuple[str, ...]:
    """The dynamic axes of a model's inputs, in the order in which a profile writes them: batch x sequence x ..."""
    found = dict.fromkeys(axis for shape in shapes for axis in shape if isinstance(axis, str))
    known = [axis for axis in AXIS_ORDER if axis in found]
    return (*known, *(axis for axis in found if axis not in known))


def choose(
    minimum: str | None, optimum: str | None, maximum: str | None, axes: Sequence[str], max_length: int | None
) -> Profile:
    """The profile of a command line: the default one where none of --min, --opt, --max is given; always checked.

    Raises UsageError as `parse` and `check` do.
    """
    given = (minimum, optimum, maximum)
    profile = default_profile(axes, max_length) if given == (None, None, None) else parse(*given, axes)
    check(profile, axes, max_length)
    return profile


def parse(minimum: str | None, optimum: str | None, maximum: str | None, axes: Sequence[str]) -> Profile:
    """A profile from "1x1", "8x128", "32x512", the sizes in the order of `axes`.

    Raises UsageError when one of the three is missing, is not numbers joined by "x", or has more or fewer than `axes`.
    """
    given = {"--min": minimum, "--opt": optimum, "--max": maximum}
    missing = [option for option, text in given.items() if text is None]
    if missing:
        raise UsageError(
            f"the profile is incomplete, {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing: "
            "give --min, --opt and --max together, or none of them"
        )
    smallest, usual, largest = (_sizes(option, text or "", axes) for option, text in given.items())
    return Profile(smallest, usual, largest)


def _sizes(option: str, text: str, axes: Sequence[str]) -> dict[str, int]:
    pattern = "x".join(axes)
    if not re.fullmatch(r"-?[0-9]+(x-?[0-9]+)*", text):
        raise UsageError(f'{option} "{text}" is not a shape: write whole numbers joined by "x", here {pattern}')
    numbers = [int(number) for number in text.split("x")]
    if len(numbers) < len(axes):
        raise UsageError(
            f'{option} "{text}" is incomplete, {axes[len(numbers)]} is missing: this model takes {len(axes)} sizes, '
            f"{pattern}"
        )
    if len(numbers) > len(axes):
        raise UsageError(f'{option} "{text}" has {len(numbers)} sizes: this model takes {len(axes)}, {pattern}')
    return dict(zip(axes, numbers, strict=True))


def default_profile(axes: Sequence[str], max_length: int | None) -> Profile:
    """From 1 to what `_DEFAULTS` says, lengths lowered to the model's limit (None when it has none)."""

    def within(axis: str, size: int) -> int:
        return size if max_length is None or axis not in AXIS_MASK else min(size, max_length)

    rows = {axis: _DEFAULTS.get(axis, _DEFAULT_OTHER) for axis in axes}
    return Profile(
        dict.fromkeys(axes, 1),
        {axis: within(axis, row[0]) for axis, row in rows.items()},
        {axis: within(axis, row[1]) for axis, row in rows.items()},
    )


def check(profile: Profile, axes: Sequence[str], max_length: int | None) -> None:
    """Refuses a profile that no engine of this model should be built for.

    `axes` are the model's dynamic axes, `max_length` its true limit in tokens (None when there is none). Raises
    UsageError for an axis that is missing or unknown, a size below 1, min over opt, opt over max, and a length over the
    limit.
    """
    levels = {"--min": profile.min, "--opt": profile.opt, "--max": profile.max}
    for option, sizes in levels.items():
        for axis in axes:
            if axis not in sizes:
                raise UsageError(f"the profile is incomplete, {option} has no {axis}: give {'x'.join(axes)}")
        for axis, size in sizes.items():
            if axis not in axes:
                raise UsageError(f"{option} has an axis {axis} that this model does not have: give {'x'.join(axes)}")
            if size < (0 if axis in _PASTS else 1):
                raise UsageError(f"{option} has {axis} {size}: every size is at least 1")
    for axis in axes:
        for (low, smaller), (high, larger) in (
            (("--min", profile.min), ("--opt", profile.opt)),
            (("--opt", profile.opt), ("--max", profile.max)),
        ):
            if smaller[axis] > larger[axis]:
                raise UsageError(
                    f"{low} is over {high} for {axis} ({smaller[axis]} > {larger[axis]}): --min <= --opt <= --max"
                )
        if max_length is not None and axis in _LENGTHS and profile.max[axis] > max_length:
            raise UsageError(
                f"--max has {axis} {profile.max[axis]}, over this model's limit of {max_length} tokens: "
                f"an engine built for it would answer from positions that do not exist; give at most {max_length}"
            )


# -- models that write -------------------------------------------------------------------------------------------------

DECODER_AXES = ("batch", "sequence", PAST_AXIS, TOTAL_AXIS)
PAIR_AXES = ("batch", "sequence", "decoder_sequence", PAST_DECODER_AXIS)
"""Axes of what writes, of a decoder alone and of one behind an encoder."""


def choose_all(
    minimum: str | None,
    optimum: str | None,
    maximum: str | None,
    axes: Sequence[str],
    max_length: int | None,
    *,
    max_new_tokens: int | None = None,
    configured: int | None = None,
) -> tuple[Profile, ...]:
    """The profiles of an engine, checked: one as `choose` has it; for a graph with a past, "prefill" and "steps".

    With a past, --min, --opt and --max are batch x prompt length (behind an encoder: the source's length), and
    `max_new_tokens` is what can be written after the longest prompt: unless given, `configured` (the checkpoint's own)
    or DEFAULT_NEW_TOKENS, cut to the model's limit. "prefill" reads up to the longest prompt, behind an encoder all
    that can be written, after as much of a past as still fits; "steps" reads one token after any past.

    Raises UsageError as `choose` does, for new tokens past the model's limit, and for new tokens without a past.
    """
    past = next((axis for axis in axes if axis in _PASTS), "")
    if not past:
        if max_new_tokens is not None:
            raise UsageError(
                "--max-new-tokens is for a model that writes with a cache, and this one does not: leave it"
            )
        return (choose(minimum, optimum, maximum, axes, max_length),)
    read = choose(minimum, optimum, maximum, ("batch", "sequence"), max_length)
    alone = past == PAST_AXIS
    new = max_new_tokens if max_new_tokens is not None else configured or DEFAULT_NEW_TOKENS
    if new < 1:
        raise UsageError(f"--max-new-tokens {new}: nothing would be written; give 1 or more")
    # The decoder's own prompt: behind an encoder it is the start token.
    prompt = {level: sizes["sequence"] if alone else 1 for level, sizes in _levels(read).items()}
    if max_new_tokens is not None and max_length is not None:
        # The last token is written and never read. Of a length that nobody chose, what is left is what counts.
        longest = prompt["max"] if maximum is not None else prompt["min"]
        if longest + new - 1 > max_length:
            what = f"a prompt of {longest:,}" if alone else "the start token"
            raise UsageError(
                f"--max-new-tokens {new}: after {what} that is past this model's limit of {max_length:,} tokens; "
                f"give at most {max_length - longest + 1:,}"
            )
    total = prompt["max"] + new if max_length is None else min(prompt["max"] + new, max_length)
    longest = prompt["max"] if alone else total
    usual = min(prompt["opt"] + new // 2, total - 1)
    sizes = {
        PREFILL: ((prompt["min"], 0), (prompt["opt"], 0), (longest, total - longest)),
        STEPS: ((1, 0), (1, usual), (1, total - 1)),
    }
    tokens = "sequence" if alone else "decoder_sequence"
    made = tuple(replace(_with_past(read, tokens, past, levels, axes), name=name) for name, levels in sizes.items())
    for profile in made:
        check(profile, axes, max_length)
    return made


def _levels(profile: Profile) -> dict[str, Sizes]:
    return {"min": profile.min, "opt": profile.opt, "max": profile.max}


def _with_past(read: Profile, tokens: str, past: str, sizes: Sequence[tuple[int, int]], axes: Sequence[str]) -> Profile:
    """`read` with these sizes of new tokens and of the past, and the sums that follow, in the order of `axes`."""
    levels = []
    for level, (new, held) in zip(_levels(read).values(), sizes, strict=True):
        known = {**level, tokens: new, past: held}
        known |= {axis: known[of] + known[and_] for axis, (of, and_) in _SUMS.items() if of in known and and_ in known}
        levels.append({axis: known[axis] for axis in axes if axis in known})
    least, usual, most = levels
    return Profile(least, usual, most)


def configured_tokens(directory: Path) -> int | None:
    """`max_new_tokens` of the generation_config.json in `directory`; None where it does not say."""
    try:
        said = json.loads((directory / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    value = said.get("max_new_tokens") if isinstance(said, dict) else None
    return value if type(value) is int and value > 0 else None


# -- batches -----------------------------------------------------------------------------------------------------------


def shapes(profile: Profile, inputs: Sequence[TensorSpec]) -> dict[str, tuple[Shape, Shape, Shape]]:
    """Each input's smallest, usual and largest shape; the same axis has the same size in every input.

    Raises UsageError when an input has an axis that the profile has no size for.
    """
    return {
        spec.name: (_fill(spec, profile.min), _fill(spec, profile.opt), _fill(spec, profile.max)) for spec in inputs
    }


def _fill(spec: TensorSpec, sizes: Sizes) -> Shape:
    for axis in spec.shape:
        if isinstance(axis, str) and axis not in sizes:
            raise UsageError(
                f"the profile is incomplete: input {spec.name} has an axis {axis} that it gives no size for"
            )
    return tuple(sizes[axis] if isinstance(axis, str) else axis for axis in spec.shape)


def outside(profile: Profile, inputs: Sequence[TensorSpec], given: Mapping[str, Shape]) -> str:
    """Why an engine of this profile cannot take a batch of these shapes, in one line; "" when it can.

    `given` holds the batch's shapes by input name; names that are no input of the engine do not matter.
    """
    agreed: dict[str, int] = {}
    for spec in inputs:
        if spec.name not in given:
            return f"the batch lacks the engine's input {spec.name}"
        shape = given[spec.name]
        if len(shape) != len(spec.shape):
            return f"input {spec.name} has {len(shape)} axes, the engine takes {len(spec.shape)}"
        for axis, size in zip(spec.shape, shape, strict=True):
            if not isinstance(axis, str):
                if size != axis:
                    return f"input {spec.name} has shape {shape}, the engine takes {spec.shape}"
            elif size > profile.max[axis]:
                return f"{_word(axis)} {size} is over the engine's profile {profile.max[axis]}"
            elif size < profile.min[axis]:
                return f"{_word(axis)} {size} is under the engine's profile {profile.min[axis]}"
            elif agreed.setdefault(axis, size) != size:
                return f"input {spec.name} has {axis} {size}, another input {agreed[axis]}"
    for axis, (of, and_) in _SUMS.items():
        if {axis, of, and_} <= agreed.keys() and agreed[axis] != agreed[of] + agreed[and_]:
            return f"{axis} {agreed[axis]} is not {of} {agreed[of]} and {and_} {agreed[and_]} together"
    return ""


def fitting(profiles: Sequence[Profile], inputs: Sequence[TensorSpec], given: Mapping[str, Shape]) -> int:
    """Which profile a batch of these shapes is run by: the last that takes it, since the narrower stand behind.

    Raises OutOfProfile, in one line, where none does.
    """
    reasons = [outside(profile, inputs, given) for profile in profiles]
    fits = [number for number, reason in enumerate(reasons) if not reason]
    if fits:
        return fits[-1]
    if len(set(reasons)) == 1:
        raise OutOfProfile(reasons[0])
    raise OutOfProfile("; ".join(f"{p.name}: {reason}" for p, reason in zip(profiles, reasons, strict=True)))


def _word(axis: str) -> str:
    words = {
        "sequence": "length",
        "decoder_sequence": "decoder length",
        PAST_AXIS: "past",
        PAST_DECODER_AXIS: "past",
        TOTAL_AXIS: "past and new together",
    }
    return words.get(axis, axis)

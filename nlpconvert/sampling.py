"""Floor 3: what the layers' inputs look like over the texts that scales are fitted on.

A file is run with its inner tensors as outputs, a few sites at a time, and samplers see what comes out; what is made of
a sample is `integers` and `blocks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nlpconvert import calibration
from nlpconvert.errors import ConversionError
from nlpconvert.integers import Sample, Sampler

if TYPE_CHECKING:
    from nlpconvert.inputs import Case
    from nlpconvert.search import Bench

SAMPLE_TOKENS = 1024
SAMPLE_BYTES = 2**30
PASS_BYTES = 2**28
"""Inner tensors that one pass over the texts gives out at a time."""


def sample_inputs(bench: Bench, sites: Sequence[Any]) -> dict[str, Sample]:
    """What every site's input looks like over the calibrate part, real tokens only. Streaming: bounded in memory."""
    from nlpconvert.convert import derived

    work = bench.work
    run = calibration.runner(work, "calibrate")
    width = sum(site.channels for site in sites)
    most = max(64, min(SAMPLE_TOKENS, SAMPLE_BYTES // max(5 * width, 1)))
    samplers = {site.name: Sampler(site.channels, most) for site in sites}
    for group in _groups(sites, run.largest_tokens):
        names = [value.name for site in group for value in site.inputs]
        tapped = derived.tap(bench.base.path, bench.scratch / "tapped", names)
        for case, values in run(tapped, names):
            for site in group:
                for value in site.inputs:
                    try:
                        samplers[site.name].add(*_real_tokens(case, values[value.name]))
                    except ValueError as error:
                        raise ConversionError(f"the input of {site.name} cannot be calibrated: {error}") from error
    found = {}
    for site in sites:
        try:
            found[site.name] = samplers[site.name].sample()
        except ValueError as error:
            raise ConversionError(f"the input of {site.name} cannot be calibrated: {error}") from error
    return found


def _groups(sites: Sequence[Any], tokens: int) -> list[list[Any]]:
    """Sites in so many passes that what one gives out fits into PASS_BYTES."""
    groups: list[list[Any]] = [[]]
    size = 0
    for site in sites:
        need = 4 * tokens * site.channels * len(site.inputs)
        if groups[-1] and size + need > PASS_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(site)
        size += need
    return groups


def _real_tokens(case: Case, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, channels) of a layer's input and each token's text's length, without padding where its axes are those of
    a mask."""
    rows = np.asarray(values, np.float32)
    for name in ("attention_mask", "decoder_attention_mask"):
        mask = case.inputs.get(name)
        if mask is not None and rows.ndim == 3:
            real = mask.reshape(-1, mask.shape[-1]) != 0
            if rows.shape[:2] == real.shape:
                lengths = np.broadcast_to(real.sum(1, keepdims=True), real.shape)
                return rows[real], lengths[real]
    length = rows.shape[1] if rows.ndim > 2 else 1
    rows = rows.reshape(-1, rows.shape[-1])
    return rows, np.full(len(rows), length)

"""Floor 2: proof that a loaded model holds what its checkpoint's files hold, tensor by tensor.

transformers' own loading report can be clean over re-initialised weights, so it is not asked: every tensor of the files
is read again, one at a time, and compared by content in float32 with the loaded tensor it maps to. Only how names map
(and how a few architectures merge or split tensors) is taken from transformers.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from nlpconvert.checkpoint import few, open_safetensors
from nlpconvert.errors import UsageError

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8",
    "F8_E5M2": "float8",
}


@dataclass(frozen=True)
class Weights:
    """What the comparison found; names are the loaded model's, except in `not_compared` and `not_loaded` (the file's).

    `not_in_file`: loaded tensors that no tensor of the file reached, ties aside. `missing`: those of them that are
    floating-point and that the model's class does not declare optional (computed ones). `dtypes` are the file's
    floating-point types.
    """

    compared: int
    not_compared: tuple[str, ...]
    not_loaded: tuple[str, ...]
    not_in_file: tuple[str, ...]
    missing: tuple[str, ...]
    tied: tuple[tuple[str, ...], ...]
    dtypes: tuple[str, ...]

    def notes(self) -> list[str]:
        """Lines for the person."""
        lines = []
        if self.dtypes and self.dtypes != ("float32",):
            lines.append(f"the checkpoint is {', '.join(self.dtypes)}; the reference computes in float32")
        if self.not_loaded:
            lines.append(
                f"{len(self.not_loaded)} tensors of the checkpoint are not part of this model: {few(self.not_loaded)}"
            )
        if self.not_compared:
            lines.append(
                f"{len(self.not_compared)} tensors could not be compared with the file: {few(self.not_compared)}"
            )
        return lines


def read_folder(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a small module's folder (model.safetensors or pytorch_model.bin), in float32."""
    file = next(
        (directory / name for name in ("model.safetensors", "pytorch_model.bin") if (directory / name).is_file()), None
    )
    if file is None:
        raise UsageError(f"{directory} holds no weights: neither model.safetensors nor pytorch_model.bin")
    with contextlib.ExitStack() as stack:
        return {name: read().to(torch.float32) for name, (_, read) in _stored((file,), stack).items()}


def compare(module: Any, files: Sequence[Path]) -> Weights:
    """Compares every tensor of `files` with the one of `module` it maps to; UsageError names the first that differs."""
    state: dict[str, torch.Tensor] = module.state_dict()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name not in state}
    conversions = get_model_conversion_mapping(module)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    prefix = getattr(module, "base_model_prefix", "")
    compared, not_compared, not_loaded, reached = 0, [], [], set()
    converted: dict[str, list[tuple[str, str]]] = {}
    with contextlib.ExitStack() as stack:
        stored = _stored(files, stack)
        for name in sorted(stored, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, prefix, state)
            if target not in state and name in state:
                target, pattern = name, None
            if target not in state:
                # A buffer that the class computes (position ids): in old files, and no loss when it says the same.
                if not (target in buffers and _same(stored[name][1](), buffers[target])):
                    not_loaded.append(name)
            elif pattern is not None:
                converted.setdefault(target, []).append((name, pattern))
            else:
                _check(name, stored[name][1](), target, state[target])
                compared += 1
                reached.add(target)
        for target, sources in converted.items():
            names = [name for name, _ in sources]
            converter = next(each for each in converters if sources[0][1] in each.source_patterns)
            made = _convert(module, converter, target, sources, stored)
            for key, value in made.items():
                if key in state:
                    _check(few(names), value, key, state[key])
            compared += len(names) if made else 0
            not_compared += [] if made else names
            first = converter.target_patterns[0]
            reached |= set(made) or {target.replace(first, each) for each in converter.target_patterns}
        dtypes = tuple(sorted({dtype for dtype, _ in stored.values() if "float" in dtype}))
    tied = _tied(state)
    reached |= {name for group in tied if reached & set(group) for name in group}
    not_in_file = tuple(name for name in state if name not in reached)
    optional = _patterns(module, "_keys_to_ignore_on_load_missing")
    missing = tuple(
        name
        for name in not_in_file
        if state[name].is_floating_point() and not any(each.search(name) for each in optional)
    )
    return Weights(compared, tuple(not_compared), tuple(not_loaded), not_in_file, missing, tied, dtypes)


# -- reading -----------------------------------------------------------------------------------------------------------

_Stored = dict[str, tuple[str, Callable[[], torch.Tensor]]]
"""A file's tensors by name: element type, and a function that reads the tensor now."""


def _stored(files: Sequence[Path], stack: contextlib.ExitStack) -> _Stored:
    stored: _Stored = {}
    for file in files:
        if file.suffix == ".safetensors":
            # Read and not mapped: mapped pages would count as memory a second time.
            handle = stack.enter_context(open_safetensors(file, "pt", backend="pread"))
            for name in handle.keys():  # noqa: SIM118 (a handle, not a dict)
                dtype = handle.get_slice(name).get_dtype()
                stored[name] = (_DTYPES.get(dtype, dtype.lower()), _reader(handle, name))
        else:
            for name, tensor in read_pickled(file).items():
                stored[name] = (str(tensor.dtype).removeprefix("torch."), _holder(tensor))
    return stored


def _reader(handle: Any, name: str) -> Callable[[], torch.Tensor]:
    return lambda: handle.get_tensor(name)


def _holder(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: tensor


def read_pickled(file: Path) -> dict[str, torch.Tensor]:
    """A pickled state dict through torch's weights-only loader, mapped where its format allows."""
    try:
        try:
            values = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # written before torch 1.6: no zip, cannot be mapped
            values = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{file} holds more than tensors and is refused: only torch's weights-only loader reads it; "
            "get the checkpoint as safetensors",
            detail=str(error),
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise UsageError(f"{file} is no whole PyTorch checkpoint: fetch it again", detail=str(error)) from error
    if not isinstance(values, dict):
        raise UsageError(f"{file} holds a {type(values).__name__}, not tensors by name")
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


# -- comparing ---------------------------------------------------------------------------------------------------------


def _same(stored: torch.Tensor, loaded: torch.Tensor) -> bool:
    """Equal in shape and, in the loaded type, in every element; NaN equals NaN."""
    value = stored.to(loaded.dtype)
    if value.shape != loaded.shape:
        return False
    loaded = loaded.cpu()
    return torch.equal(value, loaded) or torch.allclose(value, loaded, rtol=0, atol=0, equal_nan=True)


def _check(name: str, stored: torch.Tensor, target: str, loaded: torch.Tensor) -> None:
    if stored.shape != loaded.shape:
        raise UsageError(
            f"{name} is {tuple(stored.shape)} in the checkpoint, and {target} {tuple(loaded.shape)} in the model that "
            "config.json describes: the two do not belong together"
        )
    if not _same(stored, loaded):
        raise UsageError(
            f"{target} was loaded with other values than {name} has in the checkpoint: transformers or the model's own "
            "code changed it, and the model is not the one in the file"
        )


def _convert(
    module: Any,
    converter: Any,
    target: str,
    sources: Sequence[tuple[str, str]],
    stored: _Stored,
) -> dict[str, torch.Tensor]:
    """Repeats a conversion that merges or splits tensors (experts, fused projections); empty when it cannot."""
    converter = copy.deepcopy(converter)
    for name, pattern in sources:
        read = stored[name][1]
        converter.add_tensor(target, name, pattern, _in_float32(read))
    try:
        made = converter.convert(target, model=module, config=module.config)
    except Exception:  # transformers' own operation on the file's tensors: what it cannot repeat is listed, not guessed
        return {}
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _in_float32(read: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    return lambda: read().to(torch.float32)


def _tied(state: Mapping[str, torch.Tensor]) -> tuple[tuple[str, ...], ...]:
    """Groups of names that are one tensor in memory."""
    groups: dict[tuple[int, torch.Size], list[str]] = {}
    for name, tensor in state.items():
        if tensor.numel():
            groups.setdefault((tensor.data_ptr(), tensor.shape), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def _patterns(module: torch.nn.Module, attribute: str) -> list[re.Pattern[str]]:
    return [re.compile(pattern) for pattern in getattr(module, attribute, None) or ()]

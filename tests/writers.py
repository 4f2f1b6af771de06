"""Writers on tiny models for the tests of what writes: the reference's own, and ONNX graphs with a cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx

from nlpconvert.artifact import Artifact
from nlpconvert.backends.pytorch_writing import PytorchWriter
from nlpconvert.backends.writing import OnnxWriter
from nlpconvert.backends.writing import open as open_artifact
from nlpconvert.convert import cached, cached_pair
from nlpconvert.source import Loaded
from nlpconvert.writer import encodes

DECODER, PAIR_DECODER = "model.onnx", "decoder_model.onnx"


def export(model: Loaded, directory: Path) -> Path:
    """The graphs with a cache of a model, in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    convert = cached_pair.convert if encodes(model.facts) else cached.convert
    convert(model.module, model.facts, directory, companions=model.directory)
    return directory


def onnx_writer(model: Loaded, directory: Path) -> OnnxWriter:
    """A writer on the graphs in `directory`."""
    path = directory / (PAIR_DECODER if encodes(model.facts) else DECODER)
    artifact = Artifact("onnx", path, "onnx", "float32", model.facts.task, (), (), {}, "source", "")
    return open_artifact(artifact, model.facts, threads=1)


def reference(model: Loaded) -> PytorchWriter:
    """The reference's own writer."""
    return PytorchWriter(model.module, model.facts)


def prompts(model: Loaded, lengths: tuple[int, ...]) -> list[list[int]]:
    """Rows of drawn plain ids of these lengths."""
    plain = [each for each in range(model.facts.vocab_size) if each not in model.facts.special_ids]
    return [list(map(int, np.random.default_rng(n).choice(plain, n))) for n in lengths]


def rewired(directory: Path, out: Path, names: dict[str, str]) -> Path:
    """A copy of the decoder in `out` whose outputs have each other's names: `names` says which becomes which."""
    out.mkdir(parents=True, exist_ok=True)
    for file in directory.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    rename(out / (PAIR_DECODER if (out / PAIR_DECODER).is_file() else DECODER), names)
    return out


def rename(path: Path, names: dict[str, str]) -> None:
    """Gives values of a graph each other's names, wherever they stand in its nodes."""
    model = onnx.load(path, load_external_data=False)
    for node in model.graph.node:
        for place, output in enumerate(node.output):
            node.output[place] = names.get(output, output)
        for place, given in enumerate(node.input):
            node.input[place] = names.get(given, given)
    path.write_bytes(model.SerializeToString())

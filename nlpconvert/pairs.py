"""Floor 3: a converter of one graph on an artifact of two: merged before it, cut apart again after it.

What the two graphs are and where they meet is `convert.pair`'s; which converter makes which step is `making`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlpconvert import cache_names, disk, own_words
from nlpconvert.artifact import Artifact, Made, TensorSpec
from nlpconvert.errors import CannotRunHere

if TYPE_CHECKING:
    from nlpconvert.making import Work

KEPT = ("cache", "encoder_cache")
"""What a pair's record says of its cache goes on to what is made from it."""


def is_pair(artifact: Artifact | None) -> bool:
    """Whether an artifact is an encoder's and a decoder's graph."""
    return artifact is not None and artifact.format == "onnx" and isinstance(artifact.made_by.get("encoder"), Mapping)


@contextlib.contextmanager
def as_one(artifact: Artifact) -> Iterator[Artifact]:
    """The artifact; of a pair the merged one, in a temporary directory. CannotRunHere without what merges them."""
    if not is_pair(artifact):
        yield artifact
        return
    if importlib.util.find_spec("onnx_ir") is None:
        raise CannotRunHere(
            f"{artifact.step} is an encoder's and a decoder's graph, and looking into both takes onnx_ir, which is not "
            "installed: pip install 'nlpconvert[cpu]'"
        )
    with tempfile.TemporaryDirectory(prefix="nlpconvert-pair-") as scratch:
        yield _merged(artifact, Path(scratch))


def through(work: Work, maker: Callable[[Work], Made]) -> Made:
    """What `maker` makes of the pair `work.parent`, as a pair in `work.new`.

    The maker sees one graph: its parent is the merged file, its `new` a scratch directory beside the true one. What it
    writes beside its graph (tokenizer, config, a recipe) goes along. Made speaks of the decoder, and
    `made_by["encoder"]` of the encoder, as those of `convert.cached_pair`. Raises as the maker and `pair.split` do.
    """
    from nlpconvert.convert import pair

    parent = work.above
    scratch = work.new.parent / f"{work.new.name}-merged"
    with disk.disk_errors(work.new.parent):
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            merged = _merged(parent, scratch / "parent")
            new = scratch / "new"
            new.mkdir()
            made = maker(replace(work, parent=merged, new=new))
            encoder, decoder = pair.split(new / made.file, work.new, boundary(parent.inputs))
            for name in disk.hash_tree(new):
                if not name.startswith(made.file):
                    (work.new / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(new / name, work.new / name)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    inputs, outputs = pair.specs(decoder)
    taken, given = pair.specs(encoder)
    own = {"file": encoder.name, "inputs": _plain(taken), "outputs": _plain(given)}
    kept = {name: parent.made_by[name] for name in KEPT if name in parent.made_by}
    return replace(
        made, file=decoder.name, inputs=inputs, outputs=outputs, made_by={**made.made_by, **kept, "encoder": own}
    )


def boundary(inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """The decoder's inputs that the encoder makes."""
    return [spec for spec in inputs if cache_names.is_past(spec.name) and ".encoder." in spec.name]


def _merged(parent: Artifact, into: Path) -> Artifact:
    """The pair as one artifact in `into`, its companions beside it; the step and all else as they are."""
    from nlpconvert.convert import pair

    path = pair.merge(parent.directory, into)
    graphs = {pair.ENCODER_FILE, pair.DECODER_FILE, pair.DATA_FILE}
    for name in parent.files:
        if name not in graphs and "/" not in name:
            shutil.copyfile(parent.directory / name, into / name)
    inputs, outputs = pair.specs(path)
    made_by = {own_words.PAIR: [str(parent.path), str(parent.directory / pair.ENCODER_FILE)]}
    files = {**disk.hash_tree(into), path.name: parent.sha256}  # what is made of it names the pair as its parent
    return replace(parent, path=path, inputs=inputs, outputs=outputs, files=files, made_by=made_by)


def _plain(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
    return [{"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)} for spec in specs]

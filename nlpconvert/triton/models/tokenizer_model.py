"""Floor 2: a model of Triton's Python backend that turns texts into ids; copied into a repository as model.py.

It reads tokenizer.json with the `tokenizers` package, cuts at the model's limit and pads at the right: what
`nlpconvert.tokens` does where the artifact was judged. It imports nothing of nlpconvert.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np


class TritonPythonModel:
    """TEXT, and TEXT_PAIR where the model takes pairs, to the inputs of the model behind."""

    def initialize(self, args: dict[str, str]) -> None:
        """Opens tokenizer.json."""
        from tokenizers import Tokenizer

        here = Path(args["model_repository"]) / args["model_version"]
        self.serving = json.loads((here / "serving.json").read_text(encoding="utf-8"))
        self.tokenizer = Tokenizer.from_file(str(here / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(self.serving["limit"], strategy="longest_first")

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response for each request; its rows are padded to its longest."""
        import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

        responses = []
        for request in requests:
            try:
                texts = words(pb_utils.get_input_tensor_by_name(request, "TEXT"))
                pairs = words(pb_utils.get_input_tensor_by_name(request, "TEXT_PAIR"))
                arrays = self.encode(texts or [], pairs)
                tensors = [pb_utils.Tensor(name, array) for name, array in arrays.items()]
                responses.append(pb_utils.InferenceResponse(output_tensors=tensors))
            except Exception as error:
                said = pb_utils.TritonError(f"{type(error).__name__}: {error}")
                responses.append(pb_utils.InferenceResponse(output_tensors=[], error=said))
        return responses

    def encode(self, texts: list[str], pairs: list[str] | None) -> dict[str, np.ndarray]:
        """Texts to int64 (batch, sequence) by input name."""
        lower = self.serving["lower"]
        read = [text.lower() if lower else text for text in texts]
        if pairs is not None and len(pairs) != len(texts):
            raise ValueError(f"{len(texts)} texts and {len(pairs)} second texts")
        seconds = [None] * len(texts) if pairs is None else [pair or None for pair in pairs]
        found = [self.tokenizer.encode(text, pair) for text, pair in zip(read, seconds, strict=True)]
        size = max((len(each.ids) for each in found), default=0)
        shape = (len(found), size)
        ids, mask = np.full(shape, self.serving["pad"], np.int64), np.zeros(shape, np.int64)
        types = np.zeros(shape, np.int64)
        for row, each in enumerate(found):
            ids[row, : len(each.ids)], mask[row, : len(each.ids)] = each.ids, 1
            types[row, : len(each.ids)] = np.minimum(each.type_ids, self.serving["last_type"])
        positions = np.where(mask == 0, 1, np.maximum(np.cumsum(mask, axis=-1) - 1, 0)).astype(np.int64)
        arrays = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types, "position_ids": positions}
        return {name: arrays[name] for name in self.serving["inputs"]}


def words(tensor: Any) -> list[str] | None:
    """The texts of a tensor of bytes, (batch, 1)."""
    if tensor is None:
        return None
    return [each.decode("utf-8") if isinstance(each, bytes) else str(each) for each in tensor.as_numpy().reshape(-1)]

"""Floor 2: a model of Triton's Python backend around ONNX Runtime or torch; copied into a repository as model.py.

It serves the artifact's own file under its own names. Requests of mixed lengths become one batch: padded at the right
with what serving.json says, run once, and cut to each request's own length. It imports nothing of nlpconvert.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]

ONNX_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64}


class TritonPythonModel:
    """What Triton calls: `initialize` once, `execute` with the requests of one batch, `finalize` at the end."""

    def initialize(self, args: dict[str, str]) -> None:
        """Opens the files that lie beside this one."""
        here = Path(args["model_repository"]) / args["model_version"]
        self.serving = json.loads((here / "serving.json").read_text(encoding="utf-8"))
        self.inputs: list[dict[str, Any]] = self.serving["inputs"]
        self.outputs: list[dict[str, Any]] = self.serving["outputs"]
        self.padded = set(self.serving["padded_axes"])
        kinds = {"onnx": OnnxFile, "onnx-pair": OnnxPair, "torchscript": TorchFile}
        self.model = kinds[self.serving["kind"]](here, self.serving)

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response for each request, in order. A request that fails takes no other with it."""
        import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

        responses: list[Any] = [None] * len(requests)
        groups: dict[tuple[Any, ...], list[tuple[int, Arrays]]] = {}
        for number, request in enumerate(requests):
            arrays = {}
            for spec in self.inputs:
                tensor = pb_utils.get_input_tensor_by_name(request, spec["name"])
                if tensor is not None:
                    arrays[spec["name"]] = np.ascontiguousarray(tensor.as_numpy(), dtype=spec["dtype"])
            key = (tuple(sorted(arrays)), self.unpadded(arrays))
            groups.setdefault(key, []).append((number, arrays))
        for group in groups.values():
            for number, answer in self.answers(group):
                if isinstance(answer, Exception):
                    error = pb_utils.TritonError(f"{type(answer).__name__}: {answer}")
                    responses[number] = pb_utils.InferenceResponse(output_tensors=[], error=error)
                else:
                    tensors = [pb_utils.Tensor(name, array) for name, array in answer.items()]
                    responses[number] = pb_utils.InferenceResponse(output_tensors=tensors)
        return responses

    def answers(self, group: list[tuple[int, Arrays]]) -> list[tuple[int, Any]]:
        """The answers of requests that fit into one batch, or what went wrong with each."""
        try:
            return self.together(group)
        except Exception as error:
            if len(group) == 1:
                return [(group[0][0], error)]
            return [answer for each in group for answer in self.answers([each])]

    def together(self, group: list[tuple[int, Arrays]]) -> list[tuple[int, Any]]:
        """One execution for all of them."""
        sizes = [self.sizes(arrays) for _, arrays in group]
        batch: Arrays = {}
        for spec in self.inputs:
            name = spec["name"]
            if name in group[0][1]:
                batch[name] = self.joined(spec, [arrays[name] for _, arrays in group])
        given = self.model.run(batch)
        found, first = [], 0
        for (number, _), own in zip(group, sizes, strict=True):
            rows = slice(first, first + own["batch"])
            first += own["batch"]
            answer = {}
            for spec in self.outputs:
                cut = tuple(slice(0, own[axis]) if axis in own else slice(None) for axis in spec["axes"][1:])
                answer[spec["name"]] = np.ascontiguousarray(given[spec["name"]][(rows, *cut)], dtype=spec["dtype"])
            found.append((number, answer))
        return found

    def joined(self, spec: dict[str, Any], arrays: list[np.ndarray]) -> np.ndarray:
        """Rows under each other, padded at the end of every axis to the longest."""
        longest = np.max([array.shape[1:] for array in arrays], axis=0, initial=0)
        fill = self.serving["fills"].get(spec["name"], 0)
        padded = []
        for array in arrays:
            more = [(0, 0), *((0, int(most - size)) for most, size in zip(longest, array.shape[1:], strict=True))]
            padded.append(np.pad(array, more, constant_values=fill))
        return np.concatenate(padded)

    def sizes(self, arrays: Arrays) -> dict[str, int]:
        """Size of every dynamic axis of a request."""
        found: dict[str, int] = {}
        for spec in self.inputs:
            if spec["name"] in arrays:
                shape = arrays[spec["name"]].shape
                found |= {axis: size for axis, size in zip(spec["axes"], shape, strict=True) if isinstance(axis, str)}
        return found

    def unpadded(self, arrays: Arrays) -> tuple[tuple[str, int], ...]:
        """The sizes that have to be alike in a batch."""
        return tuple(
            (axis, size) for axis, size in self.sizes(arrays).items() if axis != "batch" and axis not in self.padded
        )

    def finalize(self) -> None:
        """Frees the model."""
        del self.model


class OnnxFile:
    """A graph in ONNX Runtime; a cache that it takes goes in empty."""

    def __init__(self, here: Path, serving: dict[str, Any], file: str = "file") -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if serving.get("threads"):
            options.intra_op_num_threads = serving["threads"]
        provider = "CUDAExecutionProvider" if serving.get("gpu") else "CPUExecutionProvider"
        self.session = onnxruntime.InferenceSession(str(here / serving[file]), options, providers=[provider])
        if self.session.get_providers()[0] != provider:
            raise RuntimeError(f"asked for {provider}, ONNX Runtime fell back to {self.session.get_providers()[0]}")
        self.past = [value for value in self.session.get_inputs() if value.name.startswith("past_key_values.")]
        self.takes = {value.name for value in self.session.get_inputs()}
        self.gives = [value.name for value in self.session.get_outputs() if not value.name.startswith("present.")]

    def run(self, batch: Arrays) -> Arrays:
        """Arrays by input name to arrays by output name."""
        feed = {name: array for name, array in batch.items() if name in self.takes}
        for value in self.past:
            if value.name not in feed:
                feed[value.name] = empty(value, len(next(iter(batch.values()))))
        return dict(zip(self.gives, self.session.run(self.gives, feed), strict=True))


class OnnxPair:
    """An encoder's graph and a decoder's on one file of weights."""

    def __init__(self, here: Path, serving: dict[str, Any]) -> None:
        self.decoder = OnnxFile(here, serving)
        self.encoder = OnnxFile(here, serving, "encoder")
        self.made = [value.name for value in self.encoder.session.get_outputs()]

    def run(self, batch: Arrays) -> Arrays:
        """A source and a target in, logits and the encoder's states out."""
        source = {name: batch[name] for name in ("input_ids", "attention_mask") if name in self.encoder.takes}
        made = dict(zip(self.made, self.encoder.session.run(self.made, source), strict=True))
        feed = {"input_ids": batch["decoder_input_ids"], "encoder_attention_mask": batch["attention_mask"]}
        for name, array in made.items():
            if name.startswith("present."):
                feed["past_key_values." + name.removeprefix("present.")] = array
        if "last_hidden_state" in made:
            feed["encoder_hidden_states"] = made["last_hidden_state"]
        answers = self.decoder.run(feed)
        if "last_hidden_state" in made:
            answers["encoder_last_hidden_state"] = made["last_hidden_state"]
        return answers


class TorchFile:
    """A TorchScript file, asked by the names of its arguments."""

    def __init__(self, here: Path, serving: dict[str, Any]) -> None:
        import torch

        if serving.get("threads"):
            torch.set_num_threads(serving["threads"])
        self.device = "cuda" if serving.get("gpu") else "cpu"
        torch.jit.set_fusion_strategy([("DYNAMIC", 0)])
        self.module = torch.jit.load(str(here / serving["file"]), map_location=self.device).eval()  # type: ignore[no-untyped-call]

    def run(self, batch: Arrays) -> Arrays:
        """Arrays by input name to arrays by output name."""
        import torch

        with torch.inference_mode():
            given = self.module(**{name: torch.from_numpy(array).to(self.device) for name, array in batch.items()})
        return {name: tensor.cpu().numpy() for name, tensor in given.items()}


def empty(value: Any, rows: int) -> np.ndarray:
    """A cache of no tokens for one input of a graph."""
    shape = [rows if axis == 0 else size if isinstance(size, int) else 0 for axis, size in enumerate(value.shape)]
    return np.zeros(shape, ONNX_TYPES.get(value.type, np.float32))

"""Floor 2: a decoupled model of Triton's Python backend that writes text; copied into a repository as model.py.

Greedy, on the artifact's own cache: past_key_values.N in, present.N out, through ONNX Runtime. Every token is a
response of its own; the last carries Triton's final flag. It imports neither torch nor nlpconvert.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]

ONNX_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64}


class TritonPythonModel:
    """One text a request: TEXT or input_ids in; token, and the text that it adds, out, until the text ends."""

    def initialize(self, args: dict[str, str]) -> None:
        """Opens the graphs, and the tokenizer where there is one."""
        import onnxruntime

        here = Path(args["model_repository"]) / args["model_version"]
        self.serving = json.loads((here / "serving.json").read_text(encoding="utf-8"))
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if self.serving.get("threads"):
            options.intra_op_num_threads = self.serving["threads"]
        provider = "CUDAExecutionProvider" if self.serving.get("gpu") else "CPUExecutionProvider"
        self.sessions = [
            onnxruntime.InferenceSession(str(here / self.serving[each]), options, providers=[provider])
            for each in ("file", "encoder")
            if self.serving.get(each)
        ]
        self.tokenizer: Any = None
        if (here / "tokenizer.json").is_file():
            from tokenizers import Tokenizer

            self.tokenizer = Tokenizer.from_file(str(here / "tokenizer.json"))
            self.tokenizer.no_padding()
            self.tokenizer.no_truncation()

    def execute(self, requests: list[Any]) -> None:
        """Answers each request token by token, one request after the other."""
        import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

        for request in requests:
            sender = request.get_response_sender()
            try:
                given = {
                    name: pb_utils.get_input_tensor_by_name(request, name)
                    for name in ("input_ids", "TEXT", "max_new_tokens")
                }
                most = given["max_new_tokens"]
                limit = self.serving["max_new_tokens"] if most is None else int(most.as_numpy().reshape(-1)[0])
                for token, text in self.texts(self.prompt(given["input_ids"], given["TEXT"]), limit):
                    tensors = [
                        pb_utils.Tensor("token", np.array([token], np.int64)),
                        pb_utils.Tensor("text", np.array([text.encode("utf-8")], np.object_)),
                    ]
                    sender.send(pb_utils.InferenceResponse(output_tensors=tensors))
            except Exception as error:
                said = pb_utils.TritonError(f"{type(error).__name__}: {error}")
                sender.send(pb_utils.InferenceResponse(output_tensors=[], error=said))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def prompt(self, ids: Any, text: Any) -> list[int]:
        """Token ids of what was given."""
        if ids is not None:
            return [int(each) for each in ids.as_numpy().reshape(-1)]
        if text is None:
            raise ValueError("give input_ids or TEXT")
        if self.tokenizer is None:
            raise ValueError("there is no tokenizer here: give input_ids")
        (found,) = text.as_numpy().reshape(-1)
        return list(self.tokenizer.encode(found.decode("utf-8") if isinstance(found, bytes) else str(found)).ids)

    def texts(self, prompt: list[int], most: int) -> Any:
        """Each new token with the text that it adds; a character of several tokens comes with its last."""
        read = [] if self.serving.get("encoder") else list(prompt)
        said = self.decoded(read)
        for token in self.tokens(prompt, most):
            read.append(token)
            whole = self.decoded(read)
            open_character = whole.endswith("\ufffd")
            more = "" if open_character else whole[len(said) :]
            said = said if open_character else whole
            yield token, more

    def decoded(self, ids: list[int]) -> str:
        """Ids as text; "" without a tokenizer."""
        return "" if self.tokenizer is None else str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def tokens(self, prompt: list[int], most: int) -> Any:
        """New ids, the one that ends the text included."""
        if not prompt:
            raise ValueError("the prompt holds no token")
        limit = self.serving["limit"]
        if limit is not None and len(prompt) > limit:
            raise ValueError(f"the prompt is {len(prompt)} tokens long, and the model takes {limit}")
        ids = np.array([prompt], np.int64)
        cache, fixed = self.begin(ids)
        if self.serving.get("encoder"):
            ids = np.array([[self.serving["start"]]], np.int64)
        length = 0
        for _ in range(most):
            if limit is not None and length + ids.shape[1] > limit:
                return
            logits, cache = self.step(ids, length, cache, fixed)
            length += ids.shape[1]
            token = int(logits[0, -1].argmax())
            yield token
            if token in self.serving["eos"]:
                return
            ids = np.array([[token]], np.int64)

    def begin(self, ids: np.ndarray) -> tuple[Arrays, Arrays]:
        """The cache before the first token, and what stays as it is: what an encoder has read."""
        cache = {
            value.name: empty(value)
            for value in self.sessions[0].get_inputs()
            if value.name.startswith("past_key_values.") and ".encoder." not in value.name
        }
        if len(self.sessions) == 1:
            return cache, {}
        encoder = self.sessions[1]
        names = [value.name for value in encoder.get_outputs()]
        taken = {value.name for value in encoder.get_inputs()}
        mask = np.ones_like(ids)
        source = {name: array for name, array in (("input_ids", ids), ("attention_mask", mask)) if name in taken}
        fixed: Arrays = {"encoder_attention_mask": mask}
        for name, array in zip(names, encoder.run(names, source), strict=True):
            fixed["encoder_hidden_states" if name == "last_hidden_state" else past(name)] = array
        return cache, fixed

    def step(self, ids: np.ndarray, length: int, cache: Arrays, fixed: Arrays) -> tuple[np.ndarray, Arrays]:
        """Reads `ids`, (1, n), after `length` tokens: logits (1, n, vocabulary) and the cache."""
        session = self.sessions[0]
        total = length + ids.shape[1]
        arrays: Arrays = {
            "input_ids": ids,
            "attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(length, total, dtype=np.int64)[None],
            **cache,
            **fixed,
        }
        taken = {value.name for value in session.get_inputs()}
        names = [value.name for value in session.get_outputs()]
        given = session.run(names, {name: array for name, array in arrays.items() if name in taken})
        made = dict(zip(names, given, strict=True))
        return made.pop("logits"), {past(name): array for name, array in made.items() if name.startswith("present.")}

    def finalize(self) -> None:
        """Frees the graphs."""
        del self.sessions


def past(name: str) -> str:
    """The input at the next call that an output is."""
    return "past_key_values." + name.removeprefix("present.")


def empty(value: Any) -> np.ndarray:
    """A cache of no tokens for one input of a graph."""
    shape = [1 if axis == 0 else size if isinstance(size, int) else 0 for axis, size in enumerate(value.shape)]
    return np.zeros(shape, ONNX_TYPES.get(value.type, np.float32))

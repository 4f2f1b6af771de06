"""What scripts/gpu_check.sh asks of Python: which GPU, what is not installed, PyTorch's own drift on the GPU, and what
an engine writes.

    python scripts/gpu_check.py gpu              the GPU's name, or why there is none (exit 4)
    python scripts/gpu_check.py missing PART     what PART needs and is not installed, nothing when all is there
    python scripts/gpu_check.py pytorch MODEL    the same model on the CPU and on the GPU (exit 1 when they differ)
    python scripts/gpu_check.py write OUT STEP MODEL
                                                 32 greedy tokens of OUT's artifact and of PyTorch (exit 1 when they
                                                 part where PyTorch was sure, 4 when it cannot be run here)

What does not belong here: converting and judging, which `nlpconvert` does.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nlpconvert import engines
from nlpconvert.errors import NlpconvertError
from nlpconvert.writer import encodes

if TYPE_CHECKING:
    from nlpconvert.source import Loaded

ATOL, RTOL = 1e-3, 1e-3
NEW, PROMPTS, PROMPT_TOKENS = 32, 6, 24
SURE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""By precision: two logits further apart than this, over the largest one there, are no near tie."""

_CLI = ("numpy", "typer", "rich", "safetensors", "tokenizers", "onnx")
_EXPORT = (*_CLI, "torch", "transformers", "onnxscript", "onnx_ir")

# Part -> the modules it imports.
PARTS: dict[str, tuple[str, ...]] = {
    "pytorch": ("torch", "transformers", "tokenizers"),
    "torchscript": (*_CLI, "torch", "transformers"),
    "onnxruntime-cuda": (*_EXPORT, "onnxruntime"),
    "tensorrt": (*_EXPORT, "polygraphy", "tensorrt"),
    "tensorrt-rtx": (*_EXPORT, "polygraphy", "tensorrt_rtx"),
}


def missing(part: str) -> list[str]:
    """What `part` ("tensorrt", or "tensorrt-fp16" and the like) lacks here: modules, and builds of torch and ONNX
    Runtime that know CUDA."""
    modules = PARTS[_of(part)]
    lacks = [module for module in modules if importlib.util.find_spec(module) is None]
    if lacks:
        return lacks
    if "torch" in modules:
        import torch

        if not torch.cuda.is_available():
            lacks.append(f"a torch that can use this GPU (torch {torch.__version__} cannot)")
    if "onnxruntime" in modules:
        import onnxruntime

        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            lacks.append(f"onnxruntime-gpu (onnxruntime {onnxruntime.__version__} has no CUDA provider)")
    return lacks


def _of(part: str) -> str:
    """The row of PARTS that a part is of; "" for none."""
    return max((name for name in PARTS if part == name or part.startswith(f"{name}-")), key=len, default="")


def pytorch(model_directory: Path) -> int:
    """Runs the model on the CPU and on the GPU, TF32 off, and prints the worst difference. 0 when all agree."""
    import torch
    import transformers

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    config = json.loads((model_directory / "config.json").read_text(encoding="utf-8"))
    model = getattr(transformers, config["architectures"][0]).from_pretrained(model_directory, dtype=torch.float32)
    model.eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_directory)
    batch = dict(tokenizer("The quick brown fox jumps over the lazy dog.", return_tensors="pt"))
    if getattr(model.config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = batch["input_ids"][:, :4]
    with torch.no_grad():
        reference = _floats(model(**batch))
        model.to("cuda")
        candidate = _floats(model(**{name: tensor.to("cuda") for name, tensor in batch.items()}))
    if not reference or reference.keys() != candidate.keys():
        print(f"nothing to compare: outputs {sorted(reference)} and {sorted(candidate)}")
        return 1
    drifted = False
    for name, expected in reference.items():
        difference = (candidate[name] - expected).abs()
        agrees = bool((difference <= ATOL + RTOL * expected.abs()).all())
        drifted |= not agrees
        print(f"{name}: worst |cuda - cpu| {float(difference.max()):.1e} {'agrees' if agrees else 'DRIFT'}")
    return int(drifted)


def write(out: Path, step: str, model: str) -> int:
    """Greedy tokens after prompts in one batch, by the artifact and by PyTorch on the CPU. 0 when they agree."""
    from nlpconvert import generation, manifest, models, runtimes, source
    from nlpconvert.backends.pytorch_writing import PytorchWriter
    from nlpconvert.plan import Options

    record = manifest.read(out)
    artifact, facts = record.artifact(step, out), models.facts_from_data(record.facts)
    loaded = source.load(model)
    prompts = generation.pad_for(facts, _prompts(loaded))
    ends = () if facts.eos_id is None else (facts.eos_id,)
    # What an encoder-decoder writes after its end is nothing that it has learnt.
    how = generation.Settings(max_new_tokens=NEW, pad=facts.pad_id)
    how = replace(how, eos=ends) if encodes(facts) else how
    seen: list[np.ndarray] = []
    expected = generation.generate(
        PytorchWriter(loaded.module, facts), prompts, how, on_step=lambda logits, _: seen.append(logits)
    )
    session = runtimes.open_artifact(artifact, Options())
    try:
        writer = runtimes.writer(session, artifact, facts)
        if writer is None:
            print(f"{step} keeps no cache, so that nothing can be written with it")
            return 1
        found = generation.generate(writer, prompts, how)
    finally:
        session.close()
    rate = f"{found.tokens_per_second:,.0f} tokens/s, PyTorch {expected.tokens_per_second:,.0f}"
    print(f"{step} on {session.provider}: {rate}")
    lines, agrees = parted(expected.tokens, found.tokens, expected.lengths, seen, SURE.get(artifact.precision, 1e-2))
    print("\n".join(lines))
    return int(not agrees)


def parted(
    reference: np.ndarray, candidate: np.ndarray, lengths: Sequence[int], logits: Sequence[np.ndarray], sure: float
) -> tuple[list[str], bool]:
    """A line for each row of tokens (batch, n), and whether all agree: the same tokens up to the row's length, or from
    one on where the reference's logits (batch, vocabulary) of the two are nearly alike."""
    lines, agrees = [], True
    for row, length in enumerate(lengths):
        own = candidate[row, :length]
        differ = np.flatnonzero(own != reference[row, : len(own)])
        if not len(differ) and len(own) == length:
            lines.append(f"row {row}: {length} tokens, the same")
            continue
        place = int(differ[0]) if len(differ) else len(own)
        scores = logits[place][row]
        other = int(candidate[row, place]) if place < len(own) else -1
        gap = float(scores[reference[row, place]] - scores[other]) / max(float(np.abs(scores).max()), 1e-9)
        near = other >= 0 and gap <= sure
        agrees &= near
        word = "a near tie" if near else "DRIFT"
        lines.append(f"row {row}: {place} tokens the same, then {word}, logits {gap:.1e} of the largest apart")
    return lines, agrees


def _prompts(loaded: Loaded) -> list[list[int]]:
    """Ids of the first texts of the model's own eval.jsonl; without one, or a tokenizer, drawn ones."""
    texts = loaded.directory / "eval.jsonl"
    if loaded.encode is None or not texts.is_file():
        plain = [each for each in range(loaded.facts.vocab_size) if each not in loaded.facts.special_ids]
        rng = np.random.default_rng(0)
        return [rng.choice(plain, 3 + 4 * row).tolist() for row in range(PROMPTS)]
    lines = texts.read_text(encoding="utf-8").splitlines()[:PROMPTS]
    rows = [loaded.tokenizer(json.loads(line)["text"])["input_ids"] for line in lines]
    # A source is read to its end; a decoder goes on from a part, each row from another length.
    cut = None if encodes(loaded.facts) else PROMPT_TOKENS
    return [row if cut is None else row[: cut - 3 * number] for number, row in enumerate(rows)]


def _floats(answer: Any) -> dict[str, Any]:
    """The floating-point tensors of a model's answer, on the CPU."""
    return {
        name: value.detach().cpu()
        for name, value in answer.items()
        if hasattr(value, "is_floating_point") and value.is_floating_point()
    }


def main(arguments: list[str]) -> int:
    """The exit status of the question asked."""
    match arguments:
        case ["gpu"]:
            gpu, reason = engines.find_gpu()
            print(reason if gpu is None else f"{gpu.name}, compute capability {gpu.compute_capability}")
            return 4 if gpu is None else 0
        case ["missing", part] if _of(part):
            print(", ".join(missing(part)))
            return 0
        case ["pytorch", directory]:
            return pytorch(Path(directory))
        case ["write", out, step, model]:
            try:
                return write(Path(out), step, model)
            except NlpconvertError as error:
                print(error)
                return error.exit_code
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

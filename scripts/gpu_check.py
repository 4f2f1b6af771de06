"""What scripts/gpu_check.sh asks of Python: which GPU, what is not installed, and PyTorch's own drift on the GPU.

    python scripts/gpu_check.py gpu              the GPU's name, or why there is none (exit 4)
    python scripts/gpu_check.py missing PART     what PART needs and is not installed, nothing when all is there
    python scripts/gpu_check.py pytorch MODEL    the same model on the CPU and on the GPU (exit 1 when they differ)

What does not belong here: converting and judging, which `nlpconvert` does.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from nlpconvert import engines

ATOL, RTOL = 1e-3, 1e-3
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
    """What `part` lacks here: modules, and builds of torch and ONNX Runtime that know CUDA."""
    lacks = [module for module in PARTS[part] if importlib.util.find_spec(module) is None]
    if lacks:
        return lacks
    if "torch" in PARTS[part]:
        import torch

        if not torch.cuda.is_available():
            lacks.append(f"a torch that can use this GPU (torch {torch.__version__} cannot)")
    if "onnxruntime" in PARTS[part]:
        import onnxruntime

        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            lacks.append(f"onnxruntime-gpu (onnxruntime {onnxruntime.__version__} has no CUDA provider)")
    return lacks


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
        case ["missing", part] if part in PARTS:
            print(", ".join(missing(part)))
            return 0
        case ["pytorch", directory]:
            return pytorch(Path(directory))
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

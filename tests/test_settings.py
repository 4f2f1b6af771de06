"""settings: what a file chooses, which file it is, and that nothing in it is silently not used."""

from __future__ import annotations

from pathlib import Path

import pytest

from nlpconvert import settings
from nlpconvert.errors import UsageError
from nlpconvert.settings import FILE, PYPROJECT, Overrides, Settings, read

WHOLE = """\
tolerance = "cosine>=0.995"
allow_unverified = ["trt", "trt-fp16"]
provider = "cuda"
threads = 2
baseline = "main/nlpconvert.json"

[outputs.sentence_embedding]
tolerance = "cosine>=0.999"

[cases.masked-row]
tolerance = ["cosine>=0.9", "kl<=0.1"]

[cases."5 words"]
tolerance = "rel<=1e-3"

[steps.onnx-int8]
tolerance = ["cosine>=0.99", "changed<=0.5%"]

[steps.onnx-int8.outputs.sentence_embedding]
tolerance = "cosine>=0.98"

[steps.onnx-int8.cases.empty]
tolerance = "noise<=20"
"""


def written(directory: Path, text: str, name: str = FILE) -> Path:
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return path


def in_pyproject(text: str) -> str:
    """The same settings as a pyproject.toml has them, beside another tool's."""
    tables = text.replace("\n[", "\n[tool.nlpconvert.")
    return f'[project]\nname = "x"\n[tool.ruff]\nline-length = 120\n[tool.nlpconvert]\n{tables}'


def refused(directory: Path, text: str, name: str = FILE) -> str:
    with pytest.raises(UsageError) as caught:
        read(written(directory, text, name))
    message = str(caught.value)
    assert "\n" not in message and message.startswith(str(directory / name))
    return message.removeprefix(str(directory / name))


def test_everything_that_can_be_chosen(tmp_path: Path) -> None:
    found = read(written(tmp_path, WHOLE))
    assert found.path == tmp_path / FILE
    assert found.tolerance == ("cosine>=0.995",) and found.allow_unverified == ("trt", "trt-fp16")
    assert (found.provider, found.threads, found.baseline) == ("cuda", 2, tmp_path / "main" / "nlpconvert.json")
    assert found.tolerance_for("onnx") == ["cosine>=0.995"]
    assert found.tolerance_for("onnx-int8") == ["cosine>=0.99", "changed<=0.5%"]
    cases = {"masked-row": "cosine>=0.9,kl<=0.1", "5 words": "rel<=1e-3"}
    assert found.overrides("onnx") == Overrides({"sentence_embedding": "cosine>=0.999"}, cases)
    own = Overrides({"sentence_embedding": "cosine>=0.98"}, {**cases, "empty": "noise<=20"})
    assert found.overrides("onnx-int8") == own


def test_the_same_from_a_pyproject(tmp_path: Path) -> None:
    project = read(written(tmp_path, in_pyproject(WHOLE), PYPROJECT))
    own = read(written(tmp_path, WHOLE))
    assert project.path == tmp_path / PYPROJECT
    assert all(getattr(project, name) == getattr(own, name) for name in ("tolerance", "common", "steps", "baseline"))


def test_where_it_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory's own file, or its pyproject where that has the table; nothing in the folders above."""
    inner = tmp_path / "inner"
    inner.mkdir()
    monkeypatch.chdir(inner)
    written(tmp_path, 'provider = "cuda"')
    assert read() == Settings()
    written(inner, '[project]\nname = "x"\n', PYPROJECT)
    assert read() == Settings()
    written(inner, "[tool.nlpconvert]\nthreads = 3\n", PYPROJECT)
    assert read().threads == 3 and read().path == Path(PYPROJECT)
    assert read(tmp_path).provider == "cuda"
    assert read(tmp_path / FILE).baseline is None
    written(inner, "threads = 4", FILE)
    with pytest.raises(UsageError, match=r"both nlpconvert\.toml and \[tool\.nlpconvert\] in pyproject\.toml hold"):
        read()
    assert read(Path(FILE)).threads == 4


def test_no_file_chooses_nothing() -> None:
    assert Settings().tolerance_for("onnx") == [] and Settings().overrides("onnx") == Overrides()
    Settings().check_names([], [])


def test_a_file_that_was_named_has_to_be_there_and_to_hold_settings(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"other\.toml: no such file"):
        read(tmp_path / "other.toml")
    assert refused(tmp_path, "[project]\n", PYPROJECT) == " holds no [tool.nlpconvert]"
    assert "is not TOML" in refused(tmp_path, "tolerance = \n")
    (tmp_path / FILE).write_bytes(b"tolerance = '\xff'")
    with pytest.raises(UsageError, match="is not TOML"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('tolerence = "kl<=1"', ": 'tolerence' is not a setting; did you mean 'tolerance'?"),
        ("zebra = 1", ": 'zebra' is not a setting; there is tolerance, allow_unverified, provider, threads, baseline, "
         "outputs, cases, steps"),
        ('[outputs.logits]\ntolerances = "kl<=1"', ", [outputs.logits]: 'tolerances' is not a setting; did you mean "
         "'tolerance'?"),
        ("[outputs.logits]\n", ', [outputs.logits]: tolerance is missing; write for example "cosine>=0.99"'),
        ("[steps.onnx-int9]\n", ", [steps]: there is no step 'onnx-int9'; did you mean 'onnx-int8'?"),
        ("[steps.onnx]\nthreads = 2", ", [steps.onnx]: 'threads' is not a setting; there is tolerance, outputs, cases"),
        ("[steps.onnx.output.logits]\n", ", [steps.onnx]: 'output' is not a setting; did you mean 'outputs'?"),
        ('allow_unverified = ["tr"]', ": allow_unverified: there is no step 'tr'; did you mean 'trt'?"),
        ('allow_unverified = "trt"', ": allow_unverified has to be a list of texts, and is 'trt'"),
        ("allow_unverified = [1]", ": allow_unverified has to be a list of texts, and holds 1"),
        ("tolerance = 0.995", ": tolerance has to be a list of texts, and is 0.995"),
        ("tolerance = []", ": tolerance is empty; leave it out for the defaults"),
        ("provider = 1", ": provider has to be a text, and is 1"),
        ('provider = " "', ": provider is empty; leave it out for the default"),
        ("threads = true", ": threads has to be a whole number, and is True"),
        ("threads = 0", ": threads is 0: at least 1"),
        ("baseline = [1]", ": baseline has to be a text, and is [1]"),
        ('outputs = "kl<=1"', ": outputs has to be a table, and is 'kl<=1'"),
        ('outputs.logits = "kl<=1"', ", [outputs]: logits has to be a table, and is 'kl<=1'"),
        ("steps.onnx = 1", ", [steps]: onnx has to be a table, and is 1"),
        ('[steps.onnx.outputs.logits]\ntolerance = ["kl<=1", "abs<=1"]',
         ", [steps.onnx.outputs.logits]: one tolerance judges an output; 'kl<=1,abs<=1' are more"),
    ],
)  # fmt: skip
def test_what_is_refused_names_the_file_and_the_table(tmp_path: Path, text: str, expected: str) -> None:
    assert refused(tmp_path, text) == expected


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ('tolerance = "cosine<=0.9"', "", "cosine is better when it is larger"),
        ('[cases.x]\ntolerance = "much"', ", [cases.x]", "tolerance 'much' is not understood"),
        ('[steps.onnx]\ntolerance = ["kl<=1", "kl<=2"]', ", [steps.onnx]", "gives kl twice"),
        ('[steps.onnx.outputs.x]\ntolerance = "rel<=2"', ", [steps.onnx.outputs.x]", "answers of zeros would pass"),
    ],
)
def test_a_tolerance_that_is_none(tmp_path: Path, text: str, where: str, what: str) -> None:
    message = refused(tmp_path, text)
    assert message.startswith(f"{where}: tolerance") and what in message


def test_a_pyproject_names_its_whole_table(tmp_path: Path) -> None:
    text = "[tool.nlpconvert]\n[tool.nlpconvert.steps.onnx]\nthreads = 2\n"
    assert refused(tmp_path, text, PYPROJECT).startswith(", [tool.nlpconvert.steps.onnx]: 'threads' is not a setting")
    assert refused(tmp_path, "[tool]\nnlpconvert = 1\n", PYPROJECT) == ": tool.nlpconvert has to be a table, and is 1"


def test_names_are_checked_against_what_there_is(tmp_path: Path) -> None:
    found = read(written(tmp_path, WHOLE))
    cases = ["masked-row", "5 words", "empty"]
    found.check_names(["sentence_embedding", "last_hidden_state"], cases)
    with pytest.raises(UsageError) as caught:
        found.check_names(["sentence_embeddings"], cases)
    assert str(caught.value) == (
        f"{tmp_path / FILE}, [outputs]: there is no output 'sentence_embedding'; did you mean 'sentence_embeddings'?"
    )
    with pytest.raises(UsageError) as caught:
        found.check_names(["sentence_embedding"], ["masked-row", "5 words", "alone"])
    assert str(caught.value) == (
        f"{tmp_path / FILE}, [steps.onnx-int8.cases]: there is no case 'empty'; there is masked-row, 5 words, alone"
    )


def test_reading_imports_nothing_heavy(tmp_path: Path) -> None:
    """A command reads its settings before it does anything."""
    import subprocess
    import sys

    written(tmp_path, "threads = 2")
    code = "import sys; from nlpconvert import settings; settings.read(); print('numpy' in sys.modules)"
    where = {"cwd": tmp_path, "env": {"PYTHONPATH": str(Path(settings.__file__).parent.parent)}}
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, **where)  # type: ignore[call-overload]
    assert told.stdout == "False\n"


# ---- in the line -----------------------------------------------------------------------------------------------------


def test_the_line_and_verify_keep_to_the_settings(classifier: Path, tmp_path: Path) -> None:
    """A step's own tolerance, one output's and one case's; what one output was given is recorded for no other."""
    from nlpconvert import manifest, pipeline

    (tmp_path / settings.FILE).write_text(
        '[steps.torchscript]\ntolerance = "noise<=1e-9"\n[cases.masked-row]\ntolerance = "abs<=0.1"\n', encoding="utf-8"
    )
    chosen = settings.read(tmp_path)
    out = tmp_path / "out"
    (outcome,) = pipeline.convert_step("torchscript", str(classifier), out, settings=chosen)
    assert outcome.verdict is not None
    bounds = {o["only"]: o["tolerance"] for o in outcome.verdict["comparison"]["outputs"]}
    assert bounds[""]["multiple"] == 1e-9 and bounds["masked-row"]["measure"] == "abs"
    (tmp_path / settings.FILE).write_text('[outputs.logits]\ntolerance = "abs<=0.1"\n', encoding="utf-8")
    (again,) = pipeline.convert_step("torchscript", str(classifier), tmp_path / "two", settings=settings.read(tmp_path))
    assert again.status == "agrees"
    assert manifest.read(tmp_path / "two").record("torchscript").tolerances == ()


def test_the_line_refuses_a_case_that_there_is_not(classifier: Path, tmp_path: Path) -> None:
    from nlpconvert import pipeline

    (tmp_path / settings.FILE).write_text('[cases.masked-rows]\ntolerance = "abs<=0.1"\n', encoding="utf-8")
    with pytest.raises(UsageError, match="there is no case 'masked-rows'; did you mean 'masked-row'"):
        pipeline.convert_step("torchscript", str(classifier), tmp_path / "out", settings=settings.read(tmp_path))

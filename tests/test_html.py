"""Tests of the HTML report (html, html_step, html_output, plots, values), in a real browser at two widths."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from nlpconvert import html, manifest, pipeline, plots, values
from nlpconvert.artifact import Artifact, Outcome
from nlpconvert.errors import MissingPackage
from nlpconvert.proofs import Proof, Smallest, Trial
from nlpconvert.validators.located import Located, Moved
from nlpconvert.validators.scores import Scored, Scores, Tripped
from nlpconvert.validators.statistics import Interval
from tests import browser
from tests.browser import Browser, Page
from tests.test_report import DRIFTED, agreeing, outcome

WIDTHS = (375, 1280)
HOSTILE = "<script>document.title = 'taken'</script>&\"'"

QUESTIONS = {
    "scripts": "document.scripts.length",
    "title": "document.title",
    "headings": "[...document.querySelectorAll('h1,h2,h3,h4,h5')].map(h => Number(h.tagName[1]))",
    "plots": """[...document.querySelectorAll('figure svg')].map(s => ({
        width: s.getBoundingClientRect().width, height: s.getBoundingClientRect().height,
        label: s.getAttribute('aria-label'), shapes: s.querySelectorAll('path, use').length,
        letters: Math.min(...[...s.querySelectorAll('text')].map(t => parseFloat(getComputedStyle(t).fontSize)
            * s.getBoundingClientRect().width / s.viewBox.baseVal.width))}))""",
    "bare tables": "[...document.querySelectorAll('table')].filter(t => !t.querySelector('thead th[scope]')).length",
    "tables outside a box": "[...document.querySelectorAll('table')].filter(t => !t.closest('.scroll')).length",
    "ids": "[...document.querySelectorAll('[id]')].map(e => e.id)",
    "lost links": """[...document.querySelectorAll('a[href^="#"]')].map(a => a.getAttribute('href').slice(1))
        .filter(id => !document.getElementById(id))""",
    "statuses": "[...document.querySelectorAll('.status')].map(s => [s.textContent.trim(), s.className])",
    "open": "[...document.querySelectorAll('details.body')].map(d => d.open)",
    # WCAG 2: the contrast of words with what is behind them
    "contrast": """[...document.querySelectorAll('h1, h4, p, .status, dt, dd, td, th, a, summary, svg text')].map(e => {
        const rgb = c => c.match(/[\\d.]+/g).map(Number);
        const light = c => { const [r, g, b] = c.slice(0, 3).map(v => v / 255).map(v =>
            v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
        let behind = e, colour;
        do { colour = rgb(getComputedStyle(behind).backgroundColor); behind = behind.parentElement; }
        while (behind && colour.length == 4 && colour[3] < 1);
        const style = getComputedStyle(e), own = e.tagName == 'text' ? style.fill : style.color;
        const [a, b] = [light(rgb(own)), light(colour)].sort((x, y) => y - x);
        return [(a + 0.05) / (b + 0.05), e.tagName + ' ' + e.getAttribute('class') + ' ' + e.textContent.slice(0, 20)];
        }).filter(found => found[0] < 4.5)""",
}


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """The browser. Its absence is a failure, unless a person said that there is none: then these tests are skipped."""
    path = browser.find()
    if path == "none":
        pytest.skip(f"{browser.VARIABLE}=none: the HTML report is not looked at in a browser")
    if path is None:
        pytest.fail(browser.ADVICE, pytrace=False)
    with browser.running(path, tmp_path_factory.mktemp("profile")) as found:
        yield found


# -- what is reported --------------------------------------------------------------------------------------------------


def artifact(step: str, precision: str = "float32", **made_by: Any) -> Artifact:
    files = {"model.onnx": "ab" * 32, "config.json": "cd" * 32}
    path = Path(step) / "model.onnx"
    return Artifact(step, path, "onnx", precision, "text-classification", (), (), files, "source", "ef" * 32, made_by)


def located(first: str = "encoder.layer.3.output.dense") -> dict[str, Any]:
    modules = [
        Moved(f"encoder.layer.{n}.output.dense", f"t{n}", (1, 8), 2e-2 if n > 2 else 1e-7, 1e-7) for n in range(20)
    ]
    modules[3] = Moved(first, "t3", (1, 8), 2.2e-2, 2.2e-2)
    found = Located(
        "onnx", "source", ("alone",), tuple(modules), first, first, 1e-5, True, {"logits": 2e-2}, ("pooler",)
    )
    return found.to_dict()


def asked() -> dict[str, Any]:
    """A proof and scores, as a verdict keeps them."""
    trials = (
        Trial(
            "bias",
            "a bias dropped",
            False,
            "not seen",
            module="encoder.layer.0.output.dense",
            reason="moves too little",
        ),
        Trial("nan", "not a number in one text's answer", True, "seen", output="logits", reason="4 not finite"),
        Trial("mask", "the mask ignored", True, "seen", output="logits", case="alone", times=43.2),
        Trial("types", "token types ignored", False, "does not apply", reason="the model has none"),
    )
    smallest = Smallest("encoder.layer.0.output.dense", "its weight", 1e-4, 5e-5, 6)
    span = Interval(-0.021, 0.004, 0.95, "paired bootstrap")
    score = Scored(
        "accuracy", "higher", 1, 0.9, Interval(0.86, 0.93, 0.95, "exact"), 0.91, -0.01, span, detectable=0.02
    )
    tripped = Tripped("accuracy drops by 0.5% at 95%", "not shown", "it may have", "200 rows cannot see it")
    scored = Scores("onnx", "accuracy", "scored", data="labelled.jsonl", rows=200, scores=(score,), fail_if=(tripped,))
    proof = Proof("onnx", "onnx", "float32", ("noise<=10",), trials, smallest)
    return {"proof": proof.to_dict(), "scores": scored.to_dict()}


def with_histogram(found: Outcome) -> Outcome:
    verdict = dict(found.verdict or {})
    for output in verdict["comparison"]["outputs"]:
        output["histogram"] = {"edges": [-7.0, -6.0, -5.0, -4.0, -3.0], "counts": [1, 800, 20, 3], "equal": 12}
    return dataclasses.replace(found, verdict=verdict)


def recorded(*outcomes: Outcome, **more: Any) -> dict[str, Any]:
    """The manifest of these outcomes as plain JSON, with cases and a source."""
    steps = {o.step: manifest.Record(o) for o in outcomes}
    cases = ({"name": "alone", "about": "one short text", "tokens": 2}, {"name": "left-padded", "about": "of two"})
    found = manifest.Manifest(
        source={"sha256": "01" * 32, "task": "text-classification", "model": "models/mine", "parameters": 12_345},
        facts={},
        golden=manifest.Golden({}, cases, "23" * 32),
        steps=steps,
        created="2026-01-02T03:04:05+00:00",
    )
    data = found.to_json()
    data["steps"] = {name: {**step, **more} for name, step in data["steps"].items()}
    return data


def passing() -> str:
    plain = agreeing()
    fast = outcome({}, precision="int8")
    outcomes = [
        dataclasses.replace(with_histogram(plain), artifact=artifact("onnx")),
        dataclasses.replace(
            fast, step="onnx-int8", artifact=artifact("onnx-int8", "int8"), bytes=23_000_000, notes=("chosen: static",)
        ),
        dataclasses.replace(plain, step="onnx-optimized", artifact=artifact("onnx-optimized", latency_ratio=0.7)),
    ]
    tried = {"name": "static, fused", "drift": "changed 0", "used": 0.4, "latency": 0.5, "share": 0.99, "chosen": True}
    recipes = {"onnx-int8": {"candidates": [tried]}}
    return html.render(outcomes, out="out", recorded=recorded(outcomes[0]), recipes=recipes, exit_code=0, when="today")


def failing() -> str:
    drifted = with_histogram(
        outcome(DRIFTED, localisation=located(), **asked(), invariances={"two runs": {"holds": True}})
    )
    drifted = dataclasses.replace(drifted, artifact=artifact("onnx"))
    before = dataclasses.replace(agreeing(), artifact=artifact("onnx"))
    verdict = dict(before.verdict or {}) | {"versions": {"onnxruntime": "1.31.0", "torch": "2.13.0"}}
    drifted = dataclasses.replace(
        drifted, verdict=dict(drifted.verdict or {}) | {"versions": {"onnxruntime": "1.32.0"}}
    )
    outcomes = [
        drifted,
        Outcome(
            "onnx-int8", "drift", reason="onnx-int8/model.onnx has changed since it was verified; it was not opened"
        ),
        Outcome("trt", "not run", reason="no NVIDIA GPU with a driver here"),
        Outcome("trt-fp16", "skipped", reason="not installed"),
    ]
    return html.render(outcomes, out="out", recorded=recorded(before, verdict=verdict), exit_code=1)


def hostile() -> str:
    """Whatever a stranger may have put into names, reasons, keys and values."""
    found = outcome(DRIFTED, localisation=located(HOSTILE), unheard_of={HOSTILE: [{HOSTILE: HOSTILE}]})
    verdict: Any = dict(found.verdict or {})
    verdict["comparison"]["not_applicable"] = [[HOSTILE, HOSTILE]]
    verdict["structure"] = [HOSTILE]
    verdict["versions"] = {HOSTILE: HOSTILE}
    for output in verdict["comparison"]["outputs"]:
        output["name"] = output["dtype"] = HOSTILE
        output["cases"] = {HOSTILE: next(iter(output["cases"].values()))}
        output["notes"] = output["problems"] = [HOSTILE]
        output["unheard_of"] = HOSTILE
        output["worst"]["case"] = HOSTILE
        output["histogram"] = {"edges": [-7.0, -6.0], "counts": [3]}
    outcomes = [
        dataclasses.replace(found, step=HOSTILE, verdict=verdict, notes=(HOSTILE,)),
        dataclasses.replace(agreeing(), step=f"{HOSTILE} 2"),
        Outcome("trt", "not run", reason=HOSTILE),
    ]
    data = recorded(agreeing())
    data["source"]["model"] = HOSTILE
    return html.render(outcomes, out=HOSTILE, recorded=data, when=HOSTILE)


REPORTS = {"passing": passing, "failing": failing, "hostile": hostile}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    found = {name: folder / f"{name}.html" for name in REPORTS}
    for name, file in found.items():
        file.write_text(REPORTS[name](), encoding="utf-8")
    return found


# -- in the browser ----------------------------------------------------------------------------------------------------


def sound(page: Page, width: int) -> None:
    """What holds for every report at every width."""
    assert page.errors == []
    assert page.requests == []
    assert page.width == width
    assert page.scroll_width <= width, "the page scrolls sideways"
    assert page.answers["scripts"] == 0
    assert page.answers["bare tables"] == 0 and page.answers["tables outside a box"] == 0
    assert page.answers["lost links"] == []
    levels = page.answers["headings"]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels)), levels
    assert page.answers["plots"], "no plot was drawn"
    for plot in page.answers["plots"]:
        assert plot["label"] and plot["shapes"] > 5 and plot["width"] > 250 and plot["height"] > 100
        assert plot["letters"] >= 8, "letters that nobody can read"
    ids = page.answers["ids"]
    assert len(ids) == len(set(ids)), sorted({each for each in ids if ids.count(each) > 1})
    for words, tone in page.answers["statuses"]:
        is_good = words.endswith((" agrees", " seen", " it holds", " passes"))
        assert ("good" in tone.split()) == is_good, (words, tone)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", REPORTS)
def test_a_report_is_whole_in_a_browser(chromium: Browser, files: Mapping[str, Path], name: str, width: int) -> None:
    for dark in (False, True):
        page = chromium.look(files[name], width, dark=dark, questions=QUESTIONS)
        sound(page, width)
        assert page.answers["contrast"] == []


@pytest.mark.parametrize("width", WIDTHS)
def test_a_passing_report_says_what_agrees(chromium: Browser, files: Mapping[str, Path], width: int) -> None:
    page = chromium.look(files["passing"], width, questions=QUESTIONS)
    assert "3 of 3 artifacts agree with PyTorch" in page.text
    assert "Everything that was asked" not in page.text  # one case is not applicable
    assert "the reference raised RuntimeError: no tokens" in page.text
    assert "What moved" not in page.text
    assert page.answers["open"] == [False, False, False]
    assert "Drift against size and time" in page.text and "0.70 x" in page.text and "0.50 x" in page.text
    assert page.answers["title"].startswith("nlpconvert: 3 of 3")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_failing_report_says_what_moved_first(chromium: Browser, files: Mapping[str, Path], width: int) -> None:
    page = chromium.look(files["failing"], width, questions=QUESTIONS)
    above, _, below = page.text.partition("Verdicts")
    assert "1 of 4 artifacts disagrees with PyTorch, 1 refused before anything was measured, 1 not run" in above
    assert "logits: rel 1.0e-02, 207 times what is allowed" in above
    assert "reference 1, candidate 1.031 in case left-padded" in above
    assert "rel<=1.1e-02" in above  # would pass at
    assert "rel 0.0e+00" in above or "rel 0," in above  # when it was recorded
    assert "First to move: encoder.layer.3.output.dense (introduced 2.2e-02 of it)." in above
    assert "nlpconvert verify out --step onnx --case left-padded" in above
    assert "it was not opened" in above
    assert "no NVIDIA GPU with a driver here" in below
    assert not re.search(r"torch\s+2", below), "what does not run the artifact may be missing here"
    assert re.search(r"onnxruntime\s+1\.31\.0\s+1\.32\.0\s+onnx", below)
    assert page.answers["open"] == [True, True, False, False]
    assert "2 of 3 breaks seen, judged by noise<=10. The smallest nudge" in below
    assert re.search(r"the mask ignored\s+✓ seen\s+logits in case alone: 43.2 times the tolerance", below)
    assert re.search(r"accuracy\s+0.9000\s+0.9100\s+-1.00 %\s+-2.10 % to \+0.40 % at 95 %", below)
    assert "accuracy drops by 0.5% at 95%: it may have Warning: 200 rows cannot see it" in below


@pytest.mark.parametrize("name", REPORTS)
def test_on_paper_all_is_unfolded_and_fits(chromium: Browser, files: Mapping[str, Path], name: str) -> None:
    paper = 718  # CSS pixels between the margins of A4
    chromium.look(files[name], paper)
    seen = "getComputedStyle(document.querySelector('details.body:not([open])'), '::details-content').contentVisibility"
    assert chromium.value(seen) == "hidden"
    chromium.ask("Emulation.setEmulatedMedia", media="print")
    try:
        assert chromium.value(seen) == "visible"
        assert chromium.value("document.documentElement.scrollWidth") <= paper
    finally:
        chromium.ask("Emulation.setEmulatedMedia", media="")


def test_what_a_stranger_wrote_stays_text(chromium: Browser, files: Mapping[str, Path]) -> None:
    page = chromium.look(files["hostile"], 375, questions=QUESTIONS)
    assert page.answers["title"] != "taken"
    assert page.text.count("<script>document.title = 'taken'</script>&\"'") > 10
    assert "<script" not in files["hostile"].read_text(encoding="utf-8")


def test_a_real_verdict_in_a_browser(chromium: Browser, features_out: Path, tmp_path: Path) -> None:
    outcomes = pipeline.verify(features_out)
    record = manifest.read(features_out)
    file = tmp_path / "verdict.html"
    file.write_text(html.render(outcomes, out=str(features_out), recorded=record.to_json(), exit_code=0), "utf-8")
    for width in WIDTHS:
        page = chromium.look(file, width, questions=QUESTIONS)
        sound(page, width)
        assert "1 of 1 artifact agrees with PyTorch" in page.text
        assert "The same versions, processor, provider and probe set." in page.text


# -- without one -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REPORTS)
def test_nothing_is_asked_for_from_elsewhere(files: Mapping[str, Path], name: str) -> None:
    text = files[name].read_text(encoding="utf-8")
    names = {"http://www.w3.org/1999/xlink", "http://www.w3.org/2000/svg"}
    assert set(re.findall(r"https?://[^\"'\s<]+", text)) <= names
    assert not re.findall(r"<(?:link|img|iframe|object|embed|form|base)\b(?! rel=\"icon\" href=\"data:,\")", text)
    assert not re.findall(r"@import|\bon\w+=", text)


def test_an_output_keeps_its_unknown_values() -> None:
    found = agreeing()
    assert found.verdict is not None
    found.verdict["comparison"]["outputs"][0].update(fancy=0.125, deep={"one": {"two": [1, 2]}})
    text = html.render([dataclasses.replace(found, verdict={**found.verdict, "weather": "fair"})])
    assert "fancy" in text and "0.125" in text and "deep.one.two" in text and "1, 2" in text
    assert "Weather" in text and "fair" in text


def test_nothing_verified_is_never_good() -> None:
    for outcomes in ([], [Outcome("trt", "not run", reason="no GPU here")], [Outcome("trt", "skipped", reason="no")]):
        text = html.render(outcomes)
        assert "Nothing was verified" in text
        assert '<header class="good">' not in text


def test_some_not_run_is_not_good() -> None:
    text = html.render([agreeing(), Outcome("trt", "not run", reason="no GPU here")])
    assert "1 of 2 artifacts agrees with PyTorch, 1 not run" in text
    assert '<header class="open">' in text


def test_what_is_worse_than_its_baseline_or_fails_otherwise_does_not_disagree() -> None:
    found = dataclasses.replace(agreeing(), status="drift", reason="logits lost twice as much as before")
    worse = [{"kind": "loss", "output": "logits", "text": "logits lost twice as much"}]
    text = html.render([dataclasses.replace(found, verdict={**(found.verdict or {}), "regressions": worse})])
    assert "1 of 1 artifact agrees with PyTorch and got worse than the baseline" in text
    assert "Worse than the baseline" in text and "logits lost twice as much</li>" in text
    text = html.render([found])
    assert "1 of 1 artifact agrees with PyTorch and did not pass what else was asked" in text
    assert '<header class="bad">' in text and "logits lost twice as much as before" in text


def test_what_is_not_finite_is_told() -> None:
    text = html.render([outcome({("left-padded", "logits", (1, 2, 0)): float("nan")})])
    assert "not finite" in text and "cannot be held against it" in text and "no tolerance" in text


def test_what_was_recorded_may_be_anything() -> None:
    found = agreeing()
    step = {"onnx": {"verdict": {"comparison": {"outputs": [{"name": "logits"}, 3]}, "versions": [], "host": 3}}}
    recipes: Any = {"onnx": {"candidates": [3, {"chosen": True, "latency": "fast", "used": None}]}}
    text = html.render([found], recorded={"steps": step}, recipes=recipes)
    assert "1 of 1 artifact agrees" in text
    assert "1 of 1 artifact agrees" in html.render([found], recorded={"steps": {"onnx": []}}, recipes={})


def test_a_case_with_a_tolerance_of_its_own_stands_apart() -> None:
    found: Any = agreeing()
    outputs = found.verdict["comparison"]["outputs"]
    outputs.append({**outputs[0], "only": "alone"})
    assert html.render([found]).count("in case alone") == 1


def test_a_missing_package_is_named_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else object())
    with pytest.raises(MissingPackage, match=r"matplotlib, which is not installed: pip install 'nlpconvert\[verify\]'"):
        html.check()


def test_recipes_are_read_where_they_lie(tmp_path: Path) -> None:
    made = dataclasses.replace(artifact("onnx-int8"), path=tmp_path / "model.onnx")
    made = dataclasses.replace(made, files={**made.files, "recipe.json": "00"})
    found = Outcome("onnx-int8", "agrees", artifact=made)
    assert html.recipes([found]) == {}  # not there
    (tmp_path / "recipe.json").write_text("[", "utf-8")
    assert html.recipes([found]) == {}
    (tmp_path / "recipe.json").write_text('{"candidates": []}', "utf-8")
    assert html.recipes([found]) == {"onnx-int8": {"candidates": []}}


# -- plots and tables --------------------------------------------------------------------------------------------------


def test_plots_take_what_is_zero_missing_or_not_finite() -> None:
    points = [plots.Point("onnx", 0.0, 0.0, "agrees"), plots.Point("onnx-int8", 3.0, 1e-2, "drift")]
    assert plots.scatter(points, "size, MB", "a", "label").count("<text") > 4
    modules = [{"module": "a", "arrives": None, "introduced": "inf"}, {"module": "b", "arrives": 0.0, "introduced": 0}]
    assert "<svg" in plots.layers(modules, "b", "label")
    assert "<svg" in plots.layers([], "c", "label")
    assert "allowed" in plots.histogram([-3, -2], [5], "d", "label", (-1.0, "allowed"))


def test_plots_escape_and_share_no_ids() -> None:
    points = [plots.Point("<b>$x$", 1.0, 1e-3, "agrees")]
    one, two = (plots.scatter(points, "across", name, "<i>") for name in ("one", "two"))
    assert "<b>" not in one and "&lt;b&gt;$x$" in one and "<i>" not in one
    ids = [set(re.findall(r'id="([^"]+)"', text)) for text in (one, two)]
    assert ids[0] and not ids[0] & ids[1]
    assert one == plots.scatter(points, "across", "one", "<i>"), "a plot of the same data is the same text"


def test_values_become_tables() -> None:
    like = values.table([{"name": "a", "holds": True}, {"name": "b", "holds": False, "worst": 1e-7}])
    assert like.header == ("name", "holds", "worst")
    assert like.rows == (("a", "yes", ""), ("b", "no", "1e-07"))
    assert values.table({"two runs": {"holds": True}, "order": {"holds": False}}).header == ("name", "holds")
    assert values.table({"a_b": {"c": 1200}, "d": None}).rows == (("a b.c", "1,200"), ("d", "none"))
    assert values.table(list(range(3))).rows == (("value", "0, 1, 2"),)
    long = values.table([{"n": n} for n in range(100)])
    proof = {"step": "onnx", "trials": [{"name": "a bias dropped", "status": "seen"}], "smallest": None}
    assert [name for name, _ in values.tables("proof", proof)] == ["proof", "proof: trials"]
    assert len(long.rows) == values.MOST and long.more == 40

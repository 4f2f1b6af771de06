"""float16 and bfloat16: kept where they fit, left where they do not, and told.

ONNX Runtime's CPU computes in float32 on 16-bit weights and cannot see an overflow. So what is claimed here of half
arithmetic rests on torch's own half on the CPU, on the graph with every tensor rounded (`half.simulate`), and on ONNX's
reference implementation in numpy's half.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from nlpconvert import calibration, disk, pipeline, plan, probes
from nlpconvert.artifact import Artifact, Made, TensorSpec
from nlpconvert.backends import onnxruntime
from nlpconvert.convert import derived, half
from nlpconvert.convert.half_plan import FORMATS, HEADROOM, look_at
from nlpconvert.errors import ConversionError
from nlpconvert.inputs import Case
from nlpconvert.models import Facts
from nlpconvert.source import Loaded
from tests import asking, tiny
from tests.test_architectures import MORE, QUICK, REFUSED, UNBUILT, wrong

F16, BF16 = FORMATS["float16"], FORMATS["bfloat16"]
STEPS = ["onnx-fp16", "onnx-bf16", "trt-fp16", "trt-bf16"]
Answers = list[dict[str, np.ndarray]]

NOT_ALL_HALF = {("convbert", "onnx-bf16"), ("squeezebert", "onnx-bf16"), ("xlnet", "onnx-bf16")}
"""Conv (before opset 22) and Einsum have no bfloat16 form."""


def convert(parent: Artifact, directory: Path, cases: Sequence[Case], precision: str = "float16", **more: Any) -> Made:
    """As the line does it, on cases of a test's own."""
    directory.mkdir()
    run = calibration.Runner(cases, 1, parent.directory)
    more = {"accept_clamped": False, **more}
    made = half.convert(parent, directory, precision=precision, run=run, **more)
    assert not (directory / "measuring").exists()
    return made


def texts(facts: Facts) -> list[Case]:
    return calibration.cases(plan.Options(), facts, None, "calibrate")


def simulated(parent: Artifact, path: Path, form: half.Format, batches: Sequence[Mapping[str, np.ndarray]]) -> Answers:
    """The file's answers when every tensor is rounded where it is 16 bits wide."""
    weights = {name: value.const_value for name, value in onnx_ir.load(parent.path).graph.initializers.items()}
    rounded = half.simulate(path, weights, form, path.parent / "rounded")
    session = onnxruntime.open_file(rounded, data=parent.directory)
    return [session.run(batch) for batch in batches]


class Model:
    """A tiny model with its ONNX graph; what is made from it lies beside."""

    def __init__(self, row: tiny.Tiny, directory: Path, change: Callable[[Any], None] | None = None) -> None:
        module = tiny.build(row)
        if change is not None:
            with torch.no_grad():
                change(module)
        module.save_pretrained(directory / "model")
        self.directory = directory
        self.loaded: Loaded = asking.source.load(str(directory / "model"))
        self.facts = self.loaded.facts
        self.parent = asking.make("onnx", self.loaded, directory / "onnx")
        self.made: dict[str, tuple[Made, Path]] = {}

    def half(self, precision: str = "float16") -> tuple[Made, Path]:
        if precision not in self.made:
            path = self.directory / precision
            self.made[precision] = convert(self.parent, path, texts(self.facts), precision), path / "model.onnx"
        return self.made[precision]

    def rounded(self, path: Path, form: half.Format) -> Answers:
        return simulated(self.parent, path, form, [case.inputs for case in self.cases()])

    def cases(self) -> list[Case]:
        """The standard probes that PyTorch answers: all kinds of padding and a fully masked row among them."""
        return [case for case in probes.probe_cases(self.facts, None) if case.name != "empty-alone"]

    def torch(self, dtype: torch.dtype) -> Answers:
        return torch_answers(self.loaded, self.cases(), dtype)

    def onnx(self, path: Path) -> Answers:
        session = onnxruntime.open_file(path)
        return [session.run(case.inputs) for case in self.cases()]


def torch_answers(loaded: Loaded, cases: Sequence[Case], dtype: torch.dtype) -> Answers:
    """What the model answers when all of it is of one type."""
    module = copy.deepcopy(loaded.module).to(dtype)
    answers = []
    for case in cases:
        with torch.inference_mode():
            found = module(**{name: torch.from_numpy(array) for name, array in case.inputs.items()})
        answers.append({name: value.float().numpy() for name, value in found.items()})
    return answers


def error(reference: Sequence[Mapping[str, np.ndarray]], candidate: Sequence[Mapping[str, np.ndarray]]) -> float:
    """Root mean square of all differences over that of the reference, the worst output; infinite where not finite."""
    worst = 0.0
    for name in reference[0]:
        before = np.concatenate([each[name].reshape(-1) for each in reference]).astype(np.float64)
        after = np.concatenate([each[name].reshape(-1) for each in candidate]).astype(np.float64)
        if not np.isfinite(after).all():
            return float("inf")
        worst = max(worst, float(np.sqrt(np.square(after - before).mean() / np.square(before).mean())))
    return worst


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """The tiny model of a row, exported once."""
    made: dict[str, Model] = {}

    def get(name: str) -> Model:
        if name not in made:
            made[name] = Model(tiny.ROWS[name], tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture(scope="module")
def bert(model_of: Callable[[str], Model]) -> Model:
    return model_of("bert")


# -- the whole line ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.name, marks=() if row.name in QUICK else pytest.mark.slow)
        for row in (*tiny.TINY, *MORE)
        if row.name not in REFUSED
    ],
)
def test_agrees_and_builds(row: tiny.Tiny, tmp_path: Path) -> None:
    """Every architecture, all probes, fully masked rows among them."""
    model = tiny.save(row, tmp_path / "model")
    options = plan.Options(keep_going=True)
    outcomes = {o.step: o for o in pipeline.run(str(model), tmp_path / "out", to=STEPS, options=options)}
    for step in STEPS[:2]:
        artifact = outcomes[step].artifact
        assert artifact is not None, outcomes[step].reason
        made_by = artifact.made_by
        assert made_by["size_over_parent"] < 1 and not made_by["clamped"]
        assert made_by["half_matmuls"] > 0
        assert (made_by["flops_half"] > 0.99) == ((row.name, step) not in NOT_ALL_HALF), made_by["kept_float32"][:3]
        assert max(made_by["rounded_everywhere"].values()) < 5 * FORMATS[made_by["format"]].rounding
    fp16 = outcomes["onnx-fp16"]
    assert fp16.verdict is not None
    assert fp16.status == "agrees", (fp16.reason, wrong(fp16))
    assert fp16.verdict["precision"] == "float32 arithmetic on float16 weights"
    assert outcomes["onnx-bf16"].status == "not run" and "NOT_IMPLEMENTED" in outcomes["onnx-bf16"].reason
    for step in STEPS[2:]:
        if row.name in UNBUILT:
            assert outcomes[step].status == "failed" and f"[{UNBUILT[row.name]} " in outcomes[step].reason
        else:
            assert outcomes[step].status in ("not run", "agrees"), (outcomes[step].reason, wrong(outcomes[step]))
            engine = outcomes[step].artifact
            assert engine is not None and all(path.stat().st_size > 10_000 for path in engine.graphs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", "bert-question-answering bert-text-classifier bert-token-classifier gpt2-lm llama-lm t5-seq2seq".split()
)
def test_trained_models_agree(name: str, fixtures_dir: Path, tmp_path: Path) -> None:
    outcomes = {o.step: o for o in pipeline.run(str(fixtures_dir / name), tmp_path / "out", to=STEPS[:1])}
    fp16 = outcomes["onnx-fp16"]
    assert fp16.status == "agrees", (fp16.reason, wrong(fp16))
    assert fp16.artifact is not None and fp16.artifact.made_by["flops_half"] > 0.99


@pytest.mark.slow
def test_a_real_model(minilm: Path, tmp_path: Path) -> None:
    """MiniLM: half the size; cosine against PyTorch over the probes and the shipped texts that were not measured on."""
    outcomes = {o.step: o for o in pipeline.run(str(minilm), tmp_path / "out", to=STEPS[:2])}
    fp16, bf16 = outcomes["onnx-fp16"], outcomes["onnx-bf16"]
    assert fp16.status == "agrees" and fp16.verdict is not None and fp16.artifact is not None
    assert bf16.status == "not run" and bf16.artifact is not None
    assert fp16.bytes < 0.51 * outcomes["onnx"].bytes
    for output in fp16.verdict["comparison"]["outputs"]:
        print(output["name"], output["cosine"], fp16.artifact.made_by["rounded_everywhere"])
        assert output["cosine"]["worst"] >= 0.99999 and output["cosine"]["mean"] >= 0.999999
    assert fp16.artifact.made_by["flops_half"] == 1 and fp16.artifact.made_by["matmuls"] == 36

    # Half arithmetic itself: no further off than the same model in torch's half and bfloat16.
    loaded, parent = asking.source.load(str(minilm)), outcomes["onnx"].artifact
    assert parent is not None
    known = {case.name: case for case in probes.probe_cases(loaded.facts, loaded.encode)}
    cases = [known["masked-row"], known["holed"], known["texts-1"]]
    reference = torch_answers(loaded, cases, torch.float32)
    for artifact, form in ((fp16.artifact, F16), (bf16.artifact, BF16)):
        theirs = torch_answers(loaded, cases, getattr(torch, form.name))
        shutil.copytree(artifact.directory, tmp_path / form.name)
        rounded = simulated(parent, tmp_path / form.name / "model.onnx", form, [case.inputs for case in cases])
        print(form.name, "ours", error(reference, rounded), "torch", error(reference, theirs))
        # In torch's half the mean over no token is 0 / 0, its 1e-9 being zero there; here it is what it is in float32.
        assert error(reference[:1], theirs[:1]) == (float("inf") if form is F16 else pytest.approx(0, abs=0.05))
        assert error(reference[:1], rounded[:1]) < 5 * form.rounding
        assert error(reference[1:], rounded[1:]) < 1.5 * error(reference[1:], theirs[1:])


# -- true half arithmetic ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", pytest.param("gpt2", marks=pytest.mark.slow), "llama", "t5"])
@pytest.mark.parametrize("form", [F16, BF16], ids=lambda form: form.name)
def test_no_further_off_than_torch_in_half(name: str, form: half.Format, model_of: Callable[[str], Model]) -> None:
    """With every tensor rounded the graph is as near to float32 as the same model in torch's half, masks and all."""
    model = model_of(name)
    _, path = model.half(form.name)
    reference = model.torch(torch.float32)
    theirs = error(reference, model.torch(getattr(torch, form.name)))
    ours = error(reference, model.rounded(path, form))
    assert 0 < ours < 5 * form.rounding, (ours, theirs)
    assert ours < 1.5 * theirs, (ours, theirs)


@pytest.mark.parametrize("form", [F16, BF16], ids=lambda form: form.name)
def test_onnx_reference_implementation_agrees(bert: Model, form: half.Format, tmp_path: Path) -> None:
    """numpy's half (sums and all), which neither adds nor drops a cast: another arithmetic, the same answers."""
    made = convert(bert.parent, tmp_path / form.name, texts(bert.facts), form.name)
    evaluator = ReferenceEvaluator(str(tmp_path / form.name / made.file))
    reference = bert.torch(torch.float32)
    found = [dict(zip(evaluator.output_names, evaluator.run(None, _fed(bert, c)), strict=True)) for c in bert.cases()]
    assert error(reference, found) < 10 * form.rounding


def _fed(model: Model, case: Case) -> dict[str, np.ndarray]:
    return {spec.name: case.inputs[spec.name] for spec in model.parent.inputs}


# -- what does not fit -------------------------------------------------------------------------------------------------


def overflowing(module: Any) -> None:
    """Layer 1's feed-forward works at 1e5 times the size, which float32 does not mind: relu lets the factor through."""
    layer = module.bert.encoder.layer[1]
    layer.intermediate.dense.weight.mul_(1e5)
    layer.intermediate.dense.bias.mul_(1e5)
    layer.output.dense.weight.mul_(1e-5)


RELU = tiny.Tiny(
    "relu", "BertForSequenceClassification", "BertConfig", {**tiny.ROWS["bert"].values, "hidden_act": "relu"}
)


def test_activations_past_float16_stay_in_float32(tmp_path: Path) -> None:
    model = Model(RELU, tmp_path, overflowing)
    made, path = model.half()
    reference = model.torch(torch.float32)
    assert error(reference, model.torch(torch.float16)) == float("inf"), "torch's half overflows"
    assert error(reference, model.rounded(path, F16)) < 5 * F16.rounding
    assert error(reference, model.onnx(path)) < 5 * F16.rounding

    kept = {
        each["module"]: each["why"]
        for each in made.made_by["kept_float32"]
        if "layer.1" in each["module"] and each["op"] == "MatMul"
    }
    assert set(kept) == {f"bert.encoder.layer.1.{part}.dense" for part in ("intermediate", "output")}
    assert all("past float16" in why or "too small for float16" in why for why in kept.values()), kept
    assert made.notes[0].startswith("2 of 14 products stay in float32: bert.encoder.layer.1.")
    assert made.made_by["largest"][0]["value"] > F16.largest
    assert made.made_by["half_matmuls"] == 11 and 0.5 < made.made_by["flops_half"] < 1
    assert types_read(path)["bert.encoder.layer.1.intermediate.dense.weight.T"] == "FLOAT"

    made, path = model.half("bfloat16")
    assert made.made_by["half_matmuls"] == 13, "bfloat16 has float32's range"
    assert error(reference, model.rounded(path, BF16)) < 5 * BF16.rounding


def test_weights_that_do_not_fit_keep_their_layer(tmp_path: Path) -> None:
    """One element past the range, and a matrix of which hardly anything would be left."""

    def change(module: Any) -> None:
        module.bert.encoder.layer[0].attention.output.dense.weight[3, 5] = 70_000.0
        module.bert.encoder.layer[1].intermediate.dense.weight.mul_(1e-7)

    model = Model(tiny.ROWS["bert"], tmp_path, change)
    made, path = model.half()
    kept = {each["module"]: each["why"] for each in made.made_by["kept_float32"] if "its weights" in each["why"]}
    assert list(kept) == ["bert.encoder.layer.0.attention.output.dense", "bert.encoder.layer.1.intermediate.dense"]
    large, small = kept.values()
    assert large == "its weights reach 70,000, past float16"
    assert small.startswith("its weights are too small for float16, ")
    assert error(model.torch(torch.float32), model.rounded(path, F16)) < 5 * F16.rounding


def test_looking_at_a_constant() -> None:
    values = np.array([1.0, -70_000.0, 1e-9, -np.inf, 0.0], np.float32)
    known = look_at(values, F16)
    assert (known.largest, known.flushed, known.size) == (70_000.0, 1, 5) and known.lost < 1e-8
    assert look_at(np.array(1e-12, np.float32), F16).lost == 1
    normal = np.random.default_rng(0).normal(size=10_000).astype(np.float32)
    assert 0 < look_at(normal, F16).lost < F16.rounding < look_at(normal * np.float32(1e-6), F16).lost
    assert 0 < look_at(normal, BF16).lost < BF16.rounding
    assert look_at(np.array(np.finfo(np.float32).min), BF16).largest > BF16.largest


# -- statistics, masks and casts in the file ---------------------------------------------------------------------------


def types_read(path: Path) -> dict[str, str]:
    """The element type of each initialiser, by name."""
    graph = onnx_ir.load(path).graph
    return {name: value.const_value.dtype.name for name, value in graph.initializers.items()}  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["bert", "deberta", "llama"])
def test_statistics_and_masks_are_float32_in_the_file(name: str, model_of: Callable[[str], Model]) -> None:
    """A LayerNormalization, one that is written out, an RMS; the softmax of masked scores; sine and cosine."""
    _, path = model_of(name).half()
    strict = {"LayerNormalization", "Pow", "ReduceMean", "Sqrt", "Reciprocal", "Softmax", "Sin", "Cos", "ReduceSum"}
    seen = set()
    for node in onnx_ir.load(path).graph:
        if node.op_type in strict:
            seen.add(node.op_type)
            floats = [v for v in (*node.inputs, *node.outputs) if v is not None and v.dtype != onnx_ir.DataType.INT64]
            assert {v.dtype for v in floats} == {onnx_ir.DataType.FLOAT}, node
        for value in node.inputs:
            tensor = None if value is None else value.const_value
            if tensor is not None and tensor.dtype == onnx_ir.DataType.FLOAT16:
                assert np.isfinite(tensor.numpy()).all(), "a mask's number became infinite"
    assert len(seen) >= 2
    for value in onnx_ir.load(path).graph.outputs:
        assert value.dtype == onnx_ir.DataType.FLOAT


def test_no_cast_that_is_not_needed(bert: Model, tmp_path: Path) -> None:
    """No cast there and back, none of the same value twice."""
    convert(bert.parent, tmp_path / "half", texts(bert.facts))
    casts = [node for node in onnx_ir.load(tmp_path / "half" / "model.onnx").graph if node.op_type == "Cast"]
    sixteen = [node for node in casts if onnx_ir.DataType.FLOAT16 in (node.inputs[0].dtype, node.outputs[0].dtype)]
    assert not [node for node in sixteen if node.inputs[0].producer() in sixteen]
    assert len({(node.inputs[0].name, node.outputs[0].dtype) for node in sixteen}) == len(sixteen)
    assert len(sixteen) == 2 * 5 + 2 * 2 + 1, "in and out of 5 normalisations and 2 softmaxes, and into the head"


def test_a_small_head_is_not_rounded(bert: Model, tmp_path: Path) -> None:
    """Scores of one text that lie close would tie in float16; a language model's head is a product like any other."""
    made = convert(bert.parent, tmp_path / "half", texts(bert.facts))
    (head,) = [each for each in made.made_by["kept_float32"] if each["op"] in ("MatMul", "Gemm")]
    assert head["module"] == "classifier" and head["why"] == "its result is the answer, and it costs next to nothing"
    assert not [note for note in made.notes if "products stay" in note]
    (answer,) = onnxruntime.open_file(tmp_path / "half" / made.file).run(bert.cases()[0].inputs).values()
    assert (answer != answer.astype(np.float16)).any()


def test_mixed_types_are_refused(tmp_path: Path) -> None:
    graph = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> g (float16[n] a, float[n] b) => (float[n] c) { c = Add(a, b) }'
    )
    onnx.save(graph, tmp_path / "model.onnx")
    with pytest.raises(ConversionError, match="a graph of mixed types was written"):
        half._lint(tmp_path / "model.onnx", tmp_path / "scratch")


# -- weights on disk ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["masked-lm", *(pytest.param(n, marks=pytest.mark.slow) for n in ("albert", "t5"))])
def test_tied_weights_are_stored_once(name: str, tmp_path: Path) -> None:
    values = {**tiny.ROWS["bert"].values, "vocab_size": 4000}
    own = {"masked-lm": tiny.Tiny(name, "BertForMaskedLM", "BertConfig", values)}
    row = own.get(name) or tiny.ROWS[name]
    row = tiny.Tiny(name, row.model, row.config, {**row.values, "vocab_size": 4000}, row.factor)
    model = Model(row, tmp_path)
    made, path = model.half()
    before, after = types_read(model.parent.path), types_read(path)
    large = [value.name for value in onnx_ir.load(path).graph.initializers.values() if value.const_value.nbytes > 2000]
    assert large and set(large) <= set(before), "names are those of the parent"
    assert {after[each] for each in large} == {"FLOAT16"}
    assert len([each for each in after if each.endswith(".float16")]) <= 4, "scalars may stand in both"
    assert made.made_by["size_over_parent"] < 0.65
    embedding = max(large, key=lambda each: onnx_ir.load(path).graph.initializers[each].const_value.nbytes)
    assert len([n for n in large if onnx_ir.load(path).graph.initializers[n].const_value.nbytes > 100_000]) == 1, (
        embedding
    )


def test_a_shared_weight_in_both_types_is_stored_once(tmp_path: Path) -> None:
    """The head's product overflows and stays in float32; the table that it shares with the embedding is half, once."""

    def change(module: Any) -> None:
        module.cls.predictions.transform.LayerNorm.weight.mul_(3e4)

    values = {**tiny.ROWS["bert"].values, "vocab_size": 4000}
    model = Model(tiny.Tiny("masked-lm", "BertForMaskedLM", "BertConfig", values), tmp_path, change)
    made, path = model.half()
    assert made.made_by["half_matmuls"] == made.made_by["matmuls"] - 1
    table = "bert.embeddings.word_embeddings.weight"
    assert made.made_by["size_over_parent"] < 0.65 and "FLOAT16" in types_read(path).values()
    assert [n for n, kind in types_read(path).items() if table in n and kind == "FLOAT"] == []
    assert error(model.torch(torch.float32), model.rounded(path, F16)) < 5 * F16.rounding


def test_weights_stay_outside_and_no_path_leads_out(bert: Model, tmp_path: Path) -> None:
    made = convert(bert.parent, tmp_path / "half", texts(bert.facts))
    proto = onnx.load(tmp_path / "half" / made.file, load_external_data=False)
    places = {entry.value for t in proto.graph.initializer for entry in t.external_data if entry.key == "location"}
    assert places == {"model.onnx.data"}
    assert sum(len(t.raw_data) for t in proto.graph.initializer) < 20_000
    assert str(tmp_path).encode() not in (tmp_path / "half" / made.file).read_bytes()
    assert sorted(f.name for f in (tmp_path / "half").iterdir()) == ["config.json", "model.onnx", "model.onnx.data"]
    shutil.move(tmp_path / "half", tmp_path / "elsewhere")
    assert onnxruntime.open_file(tmp_path / "elsewhere" / "model.onnx").run(bert.cases()[0].inputs)
    scopes = [node.metadata_props for node in onnx_ir.load(tmp_path / "elsewhere" / "model.onnx").graph]
    assert sum("pkg.torch.onnx.name_scopes" in each for each in scopes) > 60
    assert bert.parent.directory.joinpath("model.onnx.data").stat().st_nlink == 1


# -- graphs written by hand --------------------------------------------------------------------------------------------

HIDDEN = 64


def by_hand(body: str, directory: Path, *, width: int = HIDDEN, scale: float = 1.0, **constants: float) -> Artifact:
    """An ONNX artifact: ids and mask, a table of embeddings `e`, a weight `w`, `m` the mask as float32 (batch, 1)..."""
    declared = "".join(f", float {name} = {{{value!r}}}" for name, value in constants.items())
    text = f"""<ir_version: 10, opset_import: ["" : 20]>
    g (int64[batch,sequence] input_ids, int64[batch,sequence] attention_mask)
      => (float[batch,sequence,{width}] out) <int64[1] last = {{-1}}{declared}> {{
        e = Gather(table, input_ids)
        wide = Unsqueeze(attention_mask, last)
        m = Cast<to = 1>(wide)
        {body}
    }}"""
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    for name, shape in (("table", (50, width)), ("w", (width, width))):
        array = rng.normal(size=shape) / np.sqrt(width) * (scale if name == "w" else 1)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    directory.mkdir()
    program = onnx_ir.from_proto(onnx.shape_inference.infer_shapes(model, strict_mode=True))
    onnx_ir.save(program, directory / "model.onnx", external_data="model.onnx.data", size_threshold_bytes=1024)
    return Artifact(
        step="onnx",
        path=directory / "model.onnx",
        format="onnx",
        precision="float32",
        task="feature-extraction",
        inputs=tuple(TensorSpec(n, "int64", ("batch", "sequence")) for n in ("input_ids", "attention_mask")),
        outputs=(TensorSpec("out", "float32", ("batch", "sequence", width)),),
        files=disk.hash_tree(directory),
        parent="source",
        parent_sha256="",
    )


def asked() -> list[Case]:
    ids = np.random.default_rng(1).integers(0, 50, (3, 7))
    return [Case("one", {"input_ids": ids, "attention_mask": np.ones_like(ids)})]


def masked() -> dict[str, np.ndarray]:
    """A row of padding beside a padded one."""
    ids = np.random.default_rng(2).integers(0, 50, (2, 5))
    return {"input_ids": ids, "attention_mask": np.array([[0] * 5, [1, 1, 1, 0, 0]])}


ADDED = """
        gone = Sub(one, m)
        bias = Mul(gone, lowest)
        h = Add(e, bias)
        out = MatMul(h, w)
"""


def test_a_constant_that_cannot_be_kept_is_an_error(tmp_path: Path) -> None:
    """Added to what every product reads: neither can all of it stay float32 nor is the constant clamped in silence."""
    parent = by_hand(ADDED, tmp_path / "onnx", one=1.0, lowest=-1e12)
    with pytest.raises(ConversionError, match=r"none of 1 products can be float16: .*constant lowest \(1e\+12\), past"):
        convert(parent, tmp_path / "refused", asked())
    made = convert(parent, tmp_path / "taken", asked(), accept_clamped=True)
    limit = F16.largest / HEADROOM
    assert made.made_by["clamped"] == [{"name": "lowest", "largest": float(np.float32(1e12)), "to": limit}]
    assert made.notes[0] == "lowest was clamped from 1e+12 to 16,376"
    assert made.made_by["half_matmuls"] == 1


def test_a_constant_that_can_be_kept_is_not_clamped_even_if_accepted(bert: Model, tmp_path: Path) -> None:
    made = convert(bert.parent, tmp_path / "half", texts(bert.facts), accept_clamped=True)
    assert made.made_by["clamped"] == [] and made.made_by["kept_counts"]["constant"] == 4


def test_the_floor_of_a_divisor_survives(tmp_path: Path) -> None:
    """A mean over no token at all: 1e-9 is zero in float16, and zero over zero is not a number."""
    body = """
        h = MatMul(e, w)
        real = Mul(h, m)
        axis = Constant<value_ints = [1]>()
        sum = ReduceSum(real, axis)
        count = ReduceSum(m, axis)
        some = Clip(count, floor)
        mean = Div(sum, some)
        squares = ReduceL2(mean, last)
        length = Clip(squares, floor)
        like = Shape(mean)
        long = Expand(length, like)
        unit = Div(mean, long)
        out = Add(h, unit)
    """
    parent = by_hand(body, tmp_path / "onnx", floor=1e-9)
    made = convert(parent, tmp_path / "half", asked())
    assert made.made_by["half_matmuls"] == 1
    path = tmp_path / "half" / "model.onnx"
    assert np.isfinite(onnxruntime.open_file(path).run(masked())["out"]).all()
    assert np.isfinite(simulated(parent, path, F16, [masked()])[0]["out"]).all()
    assert "it may hold the constant floor (1e-09), too small for float16" in str(made.made_by["kept_float32"])


def test_a_mask_that_no_text_showed_is_known_from_the_graph(tmp_path: Path) -> None:
    """Measured without padding, a mask is all zeros; its constant stands in the graph all the same."""
    body = """
        p = MatMul(e, w)
        t = Transpose<perm = [0, 2, 1]>(e)
        scores = MatMul(p, t)
        gone = Sub(one, m)
        bias = Mul(gone, lowest)
        turned = Transpose<perm = [0, 2, 1]>(bias)
        there = Add(scores, turned)
        a = Softmax(there)
        out = MatMul(a, p)
    """
    parent = by_hand(body, tmp_path / "onnx", one=1.0, lowest=float(np.finfo(np.float32).min))
    made = convert(parent, tmp_path / "half", asked())
    reference = onnxruntime.open_file(parent.path).run(masked())
    rounded = simulated(parent, tmp_path / "half" / "model.onnx", F16, [masked()])
    assert error([reference], rounded) < 5 * F16.rounding
    evaluator = ReferenceEvaluator(str(tmp_path / "half" / "model.onnx"))
    assert error([reference], [{"out": evaluator.run(None, masked())[0]}]) < 10 * F16.rounding
    whys = {each["op"]: each["why"] for each in made.made_by["kept_float32"]}
    assert set(whys) == {"Add", "Softmax"} and "constant lowest (3.4e+38), past float16" in whys["Add"]


def test_headroom_is_kept(tmp_path: Path) -> None:
    """What fits on these texts, and would not at a few times the size, stays in float32 and says so."""
    body = """
        p = MatMul(e, w)
        big = Mul(p, up)
        back = Mul(big, down)
        out = MatMul(back, w)
    """
    parent = by_hand(body, tmp_path / "onnx", scale=80, up=1e3, down=1e-3)
    made = convert(parent, tmp_path / "half", asked())
    (largest,) = [each["value"] for each in made.made_by["largest"] if each["tensor"] == "big"]
    assert F16.largest / HEADROOM < largest < F16.largest
    assert f"reaches {largest:,.0f}, past float16 with a headroom of {HEADROOM:g}" in str(made.made_by["kept_float32"])
    assert made.made_by["half_matmuls"] == 2


def test_nothing_to_make_half(tmp_path: Path) -> None:
    parent = by_hand("out = Mul(e, m)", tmp_path / "onnx")
    with pytest.raises(ConversionError, match="no product in this graph has a constant weight"):
        convert(parent, tmp_path / "half", asked())
    parent = by_hand("out = MatMul(e, w)", tmp_path / "large", scale=1e6)
    with pytest.raises(
        ConversionError, match=r"none of 1 products can be float16: .*its weights reach [\d,]+, past float16$"
    ):
        convert(parent, tmp_path / "none", asked())


def test_a_file_larger_than_its_source_is_an_error(tmp_path: Path) -> None:
    """Two numbers a token: the casts weigh more than what the weights lose."""
    body = "a = MatMul(e, w) b = Softmax(a) c = MatMul(b, w) d = Softmax(c) f = MatMul(d, w) out = Softmax(f)"
    parent = by_hand(body, tmp_path / "onnx", width=2)
    with pytest.raises(
        ConversionError, match=r"the float16 file has [\d,]+ bytes, more than the [\d,]+ it was made from"
    ):
        convert(parent, tmp_path / "half", asked())


def test_nothing_to_measure_on(bert: Model, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="no calibration texts"):
        convert(bert.parent, tmp_path / "half", [])


def test_largest_is_the_largest_finite_one(tmp_path: Path) -> None:
    """Infinities of a mask, and an axis without any element."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> g (float[n] x) => (float[n] y) { i = Log(x)  y = Neg(i) }'
    )
    (tmp_path / "own").mkdir()
    onnx.save(model, tmp_path / "own" / "model.onnx")
    session = onnxruntime.open_file(derived.tap(tmp_path / "own" / "model.onnx", tmp_path / "scratch", [], ["i"]))
    for given, expected in (([0.0, np.e**2], 2.0), ([0.0], 0.0), ([-1.0, np.e], 1.0)):
        (found,) = session.tap({"x": np.array(given, np.float32)}, ["i/largest"]).values()
        assert found == pytest.approx(expected)

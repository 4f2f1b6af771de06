"""Every architecture of `tests/tiny.py` through the whole line: made, opened from disk, measured at every probe case.

The probe set asks many lengths and batches, right, left and holed padding, a fully masked row and both sides of every
constant of the architecture; an artifact that froze any of that drifts or fails there. On a machine without a GPU the
engine is built and not run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nlpconvert import pipeline
from nlpconvert.errors import UsageError
from tests import tiny

QUICK = ("bert", "roberta", "deberta-v2", "gpt2", "llama", "t5")
REFUSED = {"longformer": "window count", "funnel": "pooling positions"}

# Like those of the table but for details; each was the subject of a public bug report (tests/test_bugs_shapes.py).
MORE = (
    tiny.Tiny(
        "fnet",
        "FNetForSequenceClassification",
        "FNetConfig",
        {
            "vocab_size": 120,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "intermediate_size": 64,
            "max_position_embeddings": 64,
            **tiny.PADS,
        },
    ),
    tiny.Tiny(
        "convbert",
        "ConvBertForSequenceClassification",
        "ConvBertConfig",
        {**tiny.S, "embedding_size": 32, "conv_kernel_size": 3, "max_position_embeddings": 64},
    ),
    tiny.Tiny(
        "roformer",
        "RoFormerForSequenceClassification",
        "RoFormerConfig",
        {**tiny.S, "embedding_size": 32, "max_position_embeddings": 64},
    ),
    tiny.Tiny(
        "mobilebert",
        "MobileBertForSequenceClassification",
        "MobileBertConfig",
        {**tiny.S, "embedding_size": 32, "intra_bottleneck_size": 32, "max_position_embeddings": 64},
        factor=1.0,
    ),
    tiny.Tiny(
        "squeezebert",
        "SqueezeBertForSequenceClassification",
        "SqueezeBertConfig",
        {
            **tiny.S,
            "embedding_size": 32,
            "max_position_embeddings": 64,
            **dict.fromkeys(("q_groups", "k_groups", "v_groups"), 1),
            **dict.fromkeys(("post_attention_groups", "intermediate_groups", "output_groups"), 1),
        },
    ),
    tiny.Tiny("ibert", "IBertForSequenceClassification", "IBertConfig", {**tiny.S, **tiny.ROBERTA}),
    tiny.Tiny(
        "esm",
        "EsmForMaskedLM",
        "EsmConfig",
        {
            **tiny.S,
            "max_position_embeddings": 66,
            "pad_token_id": 1,
            "mask_token_id": 3,
            "position_embedding_type": "rotary",
        },
    ),
    tiny.Tiny(
        "xlm",
        "XLMForSequenceClassification",
        "XLMConfig",
        {
            "vocab_size": 120,
            "emb_dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": 64,
            "pad_token_id": 2,
        },
    ),
    tiny.Tiny("bart-classifier", "BartForSequenceClassification", "BartConfig", tiny.BART),
    tiny.Tiny("t5-encoder", "T5EncoderModel", "T5Config", tiny.ROWS["t5"].values, factor=1.0),
    tiny.Tiny(
        "mistral",
        "MistralForCausalLM",
        "MistralConfig",
        {**tiny.S, "num_key_value_heads": 2, "sliding_window": 4, "max_position_embeddings": 64, **tiny.PADS},
    ),
)

UNBUILT = {"fnet": "DFT", "bart-classifier": "NonZero"}
"""Operators that tensorrt-rtx does not know: the step fails and says which, and what was made before stays."""

USED = 0.2
MORE_USED = {"fnet": 0.6}  # 0.46 here: PyTorch's Fourier transform is a fast one, ONNX Runtime's a sum of products
"""Share of the tolerance that float32 rounding may use up here; 0.05 was the most when this was written."""


def rows() -> list[Any]:
    taken = [row for row in tiny.TINY if row.name not in REFUSED]
    return [
        pytest.param(row, id=row.name, marks=() if row.name in QUICK else pytest.mark.slow) for row in (*taken, *MORE)
    ]


def test_the_table_is_covered() -> None:
    assert len(tiny.TINY) == 28 and set(QUICK) | set(REFUSED) <= set(tiny.ROWS)


@pytest.mark.parametrize("row", rows())
def test_agrees_at_every_case(row: tiny.Tiny, tmp_path: Path) -> None:
    model = tiny.save(row, tmp_path / "model")
    outcomes = {outcome.step: outcome for outcome in pipeline.run(str(model), tmp_path / "out")}
    assert list(outcomes) == ["torchscript", "onnx", "trt"]
    for step in ("torchscript", "onnx"):
        outcome = outcomes[step]
        assert outcome.status == "agrees", (outcome.reason, wrong(outcome))
        assert outcome.verdict is not None
        comparison = outcome.verdict["comparison"]
        assert comparison["cases"] >= 18
        # Without a tokenizer an empty text has no token at all, and PyTorch itself cannot answer that.
        assert [case for case, _ in comparison["not_applicable"]] in ([], ["empty-alone"])
        for output in comparison["outputs"]:
            assert output["used"] <= MORE_USED.get(row.name, USED), (
                step,
                output["name"],
                output["used"],
                output["worst"],
            )
            assert output["scale"] > 0.01 and output["nonfinite"] == 0, (step, output["name"])
    assert outcomes["onnx"].artifact is not None
    assert outcomes["onnx"].artifact.made_by["exporter"] == "transformers.exporters"
    assert not [note for note in outcomes["onnx"].notes if "unique parameters" in note]
    trt = outcomes["trt"]
    if row.name in UNBUILT:
        assert trt.status == "failed" and f"[{UNBUILT[row.name]} " in trt.reason, trt.reason
        assert (tmp_path / "out" / "onnx").is_dir() and not (tmp_path / "out" / "trt").exists()
    else:
        assert trt.status in ("not run", "agrees"), (trt.reason, wrong(trt))
        assert trt.artifact is not None
        assert all(path.stat().st_size > 10_000 for path in trt.artifact.graphs)


def wrong(outcome: Any) -> str:
    """What a person needs to see of a verdict that was not expected."""
    outputs = outcome.verdict["comparison"]["outputs"] if outcome.verdict else []
    return json.dumps([{key: each[key] for key in ("name", "used", "worst", "problems")} for each in outputs])


@pytest.mark.parametrize(("name", "words"), REFUSED.items())
def test_refused_by_name(name: str, words: str, tmp_path: Path) -> None:
    model = tiny.save(tiny.ROWS[name], tmp_path / "model")
    with pytest.raises(UsageError, match=rf"{name} cannot be converted right: .*{words}"):
        pipeline.run(str(model), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_trace_that_froze_a_length_drifts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeBERTa traced at a usual, short example looks no further than that example is long."""
    from nlpconvert import probes

    usual = probes.export_example

    def short(*args: Any, least: int = 0, **options: Any) -> Any:
        assert least == 16
        return usual(*args, **options)

    monkeypatch.setattr(probes, "export_example", short)
    model = tiny.save(tiny.ROWS["deberta"], tmp_path / "model")
    (outcome,) = pipeline.run(str(model), tmp_path / "out", to=["torchscript"])
    assert outcome.status == "drift"
    assert "failed where the reference answers" in wrong(outcome)

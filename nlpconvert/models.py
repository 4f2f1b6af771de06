"""Floor 1: what is known about tasks and architectures, as rows.

"Like BERT" is a row here or nothing at all: an architecture without a row is allowed, since every artifact is measured.
A row exists only for what measurement cannot find out by itself: a known refusal, where positions come from, what the
length limit really is. No class per model, no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nlpconvert.errors import UsageError


@dataclass(frozen=True)
class OutputRow:
    """One output of a task: its name, its axes, and how it is judged below float32.

    Axes are "batch", "sequence", "decoder_sequence", "choices" (dynamic) or any other word (fixed size). An output
    with a sequence axis (always the second) is scored where that axis's mask is 1.
    `measure`: "embedding" (cosine), "decisions" (argmax over the last axis), "distribution" (KL over the last axis),
    "position" (argmax over the sequence axis, for question answering), "score" (one number per row, as of a
    regression head: there is no decision to change, so it is judged by element).
    """

    name: str
    axes: tuple[str, ...]
    measure: str
    optional: bool = False  # dropped when the checkpoint has no weights for it, or the model does not give it
    secondary: bool = False  # not what the task is for: below float32 judged by the table, whatever was asked for


@dataclass(frozen=True)
class Task:
    """One row: a task by its Hugging Face pipeline name."""

    name: str
    auto_class: str
    suffix: str  # what the name in config.architectures ends in ("" when the architecture is a bare model)
    outputs: tuple[OutputRow, ...]
    columns: tuple[str, ...]  # of --data, the required ones first; a name in brackets is optional
    pairs: bool = False  # the probe set holds text pairs where the model takes pairs
    choices: bool = False


_HIDDEN = OutputRow("last_hidden_state", ("batch", "sequence", "hidden"), "embedding")
_POOLER = OutputRow("pooler_output", ("batch", "hidden"), "embedding", optional=True)
_ENCODER = OutputRow(
    "encoder_last_hidden_state", ("batch", "sequence", "hidden"), "embedding", optional=True, secondary=True
)

TASKS: dict[str, Task] = {
    row.name: row
    for row in (
        Task("feature-extraction", "AutoModel", "Model", (_HIDDEN, _POOLER), ("text", "[text_pair]"), pairs=True),
        Task(
            "sentence-embedding",
            "AutoModel",
            "Model",
            (OutputRow("sentence_embedding", ("batch", "hidden"), "embedding"), replace(_HIDDEN, secondary=True)),
            ("text",),
        ),
        Task(
            "fill-mask",
            "AutoModelForMaskedLM",
            "ForMaskedLM",
            (OutputRow("logits", ("batch", "sequence", "vocabulary"), "distribution"),),
            ("text", "[text_pair]"),
            pairs=True,
        ),
        Task(
            "text-classification",
            "AutoModelForSequenceClassification",
            "ForSequenceClassification",
            (OutputRow("logits", ("batch", "labels"), "decisions"),),
            ("text", "[text_pair]", "[label]"),
            pairs=True,
        ),
        Task(
            "token-classification",
            "AutoModelForTokenClassification",
            "ForTokenClassification",
            (OutputRow("logits", ("batch", "sequence", "labels"), "decisions"),),
            ("tokens", "[tags]"),
        ),
        Task(
            "question-answering",
            "AutoModelForQuestionAnswering",
            "ForQuestionAnswering",
            (
                OutputRow("start_logits", ("batch", "sequence"), "position"),
                OutputRow("end_logits", ("batch", "sequence"), "position"),
            ),
            ("question", "context", "[answers]"),
            pairs=True,
        ),
        Task(
            "multiple-choice",
            "AutoModelForMultipleChoice",
            "ForMultipleChoice",
            (OutputRow("logits", ("batch", "choices"), "decisions"),),
            ("text", "choices", "[label]"),
            pairs=True,
            choices=True,
        ),
        Task(
            "text-generation",
            "AutoModelForCausalLM",
            "ForCausalLM",
            (OutputRow("logits", ("batch", "sequence", "vocabulary"), "distribution"),),
            ("text",),
        ),
        Task(
            "text2text-generation",
            "AutoModelForSeq2SeqLM",
            "ForConditionalGeneration",
            (OutputRow("logits", ("batch", "decoder_sequence", "vocabulary"), "distribution"), _ENCODER),
            ("text", "target"),
        ),
    )
}

WRITING: tuple[str, ...] = ("text-generation", "text2text-generation")
"""The tasks of models that write token by token."""

# An encoder-decoder without a head: the decoder's states, and the encoder's.
ENCODER_DECODER_FEATURES: tuple[OutputRow, ...] = (
    OutputRow("last_hidden_state", ("batch", "decoder_sequence", "hidden"), "embedding"),
    _ENCODER,
)

# Class names in config.architectures that a suffix alone would get wrong.
ARCHITECTURE_TASKS: dict[str, str] = {
    "GPT2LMHeadModel": "text-generation",
    "OpenAIGPTLMHeadModel": "text-generation",
    "TransfoXLLMHeadModel": "text-generation",
    "XLNetLMHeadModel": "text-generation",
    "BartForCausalLM": "text-generation",
    "MarianMTModel": "text2text-generation",
    "FlaubertWithLMHeadModel": "fill-mask",
    "XLMWithLMHeadModel": "fill-mask",
    "BertLMHeadModel": "text-generation",
    "BertForPreTraining": "fill-mask",
    "AlbertForPreTraining": "fill-mask",
    "ElectraForPreTraining": "feature-extraction",
    "FunnelForPreTraining": "feature-extraction",
    "XLNetForQuestionAnsweringSimple": "question-answering",
    "CTRLLMHeadModel": "text-generation",
    "BertGenerationEncoder": "feature-extraction",
    "DPRQuestionEncoder": "feature-extraction",
}


def task_of(architecture: str) -> str | None:
    """The task that a class name in config.architectures stands for; None when the name does not say."""
    if architecture in ARCHITECTURE_TASKS:
        return ARCHITECTURE_TASKS[architecture]
    heads = (row for row in TASKS.values() if row.suffix != "Model")
    head = next((row.name for row in heads if architecture.endswith(row.suffix)), None)
    return head or ("feature-extraction" if architecture.endswith("Model") else None)


# Words people use for the same tasks.
TASK_ALIASES: dict[str, str] = {
    "default": "feature-extraction",
    "embedding": "sentence-embedding",
    "sentence-similarity": "sentence-embedding",
    "masked-lm": "fill-mask",
    "sequence-classification": "text-classification",
    "sentiment-analysis": "text-classification",
    "ner": "token-classification",
    "causal-lm": "text-generation",
    "seq2seq-lm": "text2text-generation",
    "seq2seq": "text2text-generation",
    "summarization": "text2text-generation",
    "translation": "text2text-generation",
}


@dataclass(frozen=True)
class Architecture:
    """One row: what has to be known about a model type in advance.

    `positions`: "mask" when position_ids are an input computed from the mask (cumsum - 1, decoders), "pad" when the
    model counts positions from the pad id (RoBERTa), "own" when it needs none from outside.
    `limit`: the config attribute of the length limit ("" for none); `offset`: what has to be taken off it: a number or
    "pad+1". `refused`: why this architecture cannot be converted right, in one sentence.
    """

    model_type: str
    positions: str = "own"
    limit: str = "max_position_embeddings"
    offset: int | str = 0
    refused: str = ""
    refused_when: Mapping[str, Any] | None = None  # config attribute -> value; None means always
    token_types: int = 0  # how many token types it takes, where its config has no type_vocab_size to say so
    trace_length: str = ""  # config attribute: a trace of a shorter example answers up to that example's length only


_WINDOWED = (
    "its window count and padding are computed in Python from the example's length and freeze at export, so that other "
    "lengths answer wrongly (also at the export shape)"
)

_BLOCK_SPARSE = (
    "block-sparse attention picks its random blocks in Python from the example's length and freezes them at export; "
    'set "attention_type": "original_full" in config.json to convert it'
)

ARCHITECTURES: dict[str, Architecture] = {
    row.model_type: row
    for row in (
        Architecture("roberta", "pad", offset="pad+1"),
        Architecture("xlm-roberta", "pad", offset="pad+1"),
        Architecture("camembert", "pad", offset="pad+1"),
        Architecture("data2vec-text", "pad", offset="pad+1"),
        Architecture("xlm-roberta-xl", "pad", offset="pad+1"),
        Architecture("ibert", "pad", offset="pad+1"),
        Architecture("mpnet", "pad", offset="pad+1"),
        Architecture("esm", "pad", offset="pad+1"),
        # It looks as far as min(length, max_relative_positions), computed in Python: a trace holds the example's, which
        # at its largest is right for every length.
        Architecture("deberta", trace_length="max_relative_positions"),
        Architecture("gpt2", "mask"),
        Architecture("gpt_neo", "mask"),
        Architecture("gptj", "mask"),
        Architecture("gpt_neox", "mask"),
        Architecture("opt", "mask"),
        Architecture("llama", "mask"),
        Architecture("mistral", "mask"),
        Architecture("mixtral", "mask"),
        Architecture("qwen2", "mask"),
        Architecture("qwen3", "mask"),
        Architecture("gemma", "mask"),
        Architecture("gemma2", "mask"),
        Architecture("gemma3_text", "mask"),
        Architecture("phi", "mask"),
        Architecture("phi3", "mask"),
        Architecture("codegen", "mask"),
        Architecture("gpt_bigcode", "mask"),
        Architecture("starcoder2", "mask"),
        Architecture("stablelm", "mask"),
        Architecture("olmo2", "mask"),
        Architecture("granite", "mask"),
        Architecture("cohere", "mask"),
        Architecture("bloom", limit=""),
        Architecture("mpt", limit=""),
        Architecture("xlnet", limit="", token_types=2),
        Architecture("t5", limit=""),
        Architecture("mt5", limit=""),
        Architecture("longt5", limit=""),
        Architecture("umt5", limit=""),
        Architecture("longformer", refused=_WINDOWED),
        Architecture("led", refused=_WINDOWED),
        Architecture(
            "funnel",
            refused="its pooling positions are computed in Python from the example's length and freeze at export, so "
            "that shorter inputs run and answer wrongly",
        ),
        Architecture(
            "big_bird",
            refused=_BLOCK_SPARSE,
            refused_when={"attention_type": "block_sparse"},
        ),
        Architecture(
            "bigbird_pegasus",
            refused=_BLOCK_SPARSE,
            refused_when={"attention_type": "block_sparse"},
        ),
    )
}


def architecture(model_type: str) -> Architecture:
    """The row of `model_type`; a plain row where there is none."""
    return ARCHITECTURES.get(model_type, Architecture(model_type))


# Config attributes that hold a length at which an architecture changes what it does. Probes stand on both sides.
LENGTH_CONSTANTS: tuple[str, ...] = (
    "attention_window",
    "sliding_window",
    "window_size",
    "local_attention",
    "block_size",
    "local_radius",
    "global_block_size",
    "position_buckets",
    "max_relative_positions",
    "relative_attention_num_buckets",
    "relative_attention_max_distance",
    "conv_kernel_size",
)


@dataclass(frozen=True)
class Facts:
    """What the rest of the house needs to know of one loaded model, without torch.

    `inputs` are the names the converted model takes, in order; `outputs` the rows it gives. `max_length` is the true
    limit in tokens (None when there is none), `constants` the lengths at which the architecture changes behaviour.
    """

    model_type: str
    task: str
    inputs: tuple[str, ...]
    outputs: tuple[OutputRow, ...]
    vocab_size: int
    pad_id: int
    eos_id: int | None
    decoder_start_id: int | None
    max_length: int | None
    positions: str
    type_vocab_size: int
    constants: tuple[int, ...]
    pairs: bool
    special_ids: tuple[int, ...] = ()
    required_token: int | None = None
    """A token every row must hold (the eos from whose state BART's sequence classifier answers)."""
    trace_length: int = 0
    """The length that the example of a trace must have at least."""


# The mask that says which entries of an axis are real.
AXIS_MASK: dict[str, str] = {"sequence": "attention_mask", "decoder_sequence": "decoder_attention_mask"}

# Axes of every input that a converted model may take. Their element type is int64.
INPUT_AXES: dict[str, tuple[str, ...]] = {
    "input_ids": ("batch", "sequence"),
    "attention_mask": ("batch", "sequence"),
    "token_type_ids": ("batch", "sequence"),
    "position_ids": ("batch", "sequence"),
    "decoder_input_ids": ("batch", "decoder_sequence"),
    "decoder_attention_mask": ("batch", "decoder_sequence"),
}


def input_axes(name: str, task: str) -> tuple[str, ...]:
    """Axes of an input; multiple choice has one more after the batch."""
    axes = INPUT_AXES[name]
    return (axes[0], "choices", *axes[1:]) if TASKS[task].choices else axes


def facts_from_data(data: Mapping[str, Any]) -> Facts:
    """Facts back from the plain values that a manifest keeps. Raises UsageError when a field is missing or unknown."""
    names = {f.name for f in dataclasses.fields(Facts)}
    if missing := sorted(names - set(data)):
        raise UsageError(
            f"the manifest's facts lack {', '.join(missing)}; run the conversion again into a new directory"
        )
    values: dict[str, Any] = {name: tuple(data[name]) if isinstance(data[name], list) else data[name] for name in names}
    values["outputs"] = tuple(OutputRow(**{**row, "axes": tuple(row["axes"])}) for row in data["outputs"])
    return Facts(**values)


# Files of a checkpoint that make its tokenizer, whatever its kind.
TOKENIZER_FILES: tuple[str, ...] = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "bpe.codes",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
    "source.spm",
    "target.spm",
)

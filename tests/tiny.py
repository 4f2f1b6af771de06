"""Tiny random models of many architectures, scaled so that a wrong mask or position shows.

With the default initialisation (standard deviation 0.02) a tiny model's output hardly depends on its input, and errors
pass any tolerance. So every parameter of two or more dimensions is multiplied by 5, and every one-dimensional one that
is zero (biases) is drawn from N(0, 0.3).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

S: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 120,
}
GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 120, "n_positions": 64}
BART: dict[str, Any] = {
    "vocab_size": 120,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "bos_token_id": 0,
    "decoder_start_token_id": 2,
}
PADS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Tiny:
    """One row: a name, the model's class, its config's class and values."""

    name: str
    model: str
    config: str
    values: dict[str, Any] = field(default_factory=dict)
    factor: float = 5.0
    """What weights are multiplied by. T5 starts with weights of order 1: at 5 its attention is one-hot, and PyTorch
    itself differs between float32 and float64 by 5e-4."""


def _encoder(name: str, stem: str, head: str = "ForSequenceClassification", **values: Any) -> Tiny:
    return Tiny(name, stem + head, stem + "Config", {**S, **values})


ROBERTA = {"max_position_embeddings": 66, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
DISTIL = {"vocab_size": 120, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 64}

TINY: tuple[Tiny, ...] = (
    _encoder("bert", "Bert", max_position_embeddings=64),
    Tiny("distilbert", "DistilBertForSequenceClassification", "DistilBertConfig", DISTIL),
    _encoder("roberta", "Roberta", **ROBERTA),
    _encoder("xlm-roberta", "XLMRoberta", **ROBERTA),
    _encoder("albert", "Albert", "ForMaskedLM", embedding_size=16, max_position_embeddings=64),
    _encoder("electra", "Electra", "ForTokenClassification", embedding_size=16, max_position_embeddings=64),
    _encoder(
        "deberta",
        "Deberta",
        relative_attention=True,
        max_relative_positions=16,
        pos_att_type=["c2p", "p2c"],
        type_vocab_size=0,
        max_position_embeddings=64,
    ),
    _encoder(
        "deberta-v2",
        "DebertaV2",
        relative_attention=True,
        position_buckets=8,
        max_relative_positions=64,
        pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        position_biased_input=False,
        type_vocab_size=0,
        max_position_embeddings=64,
    ),
    _encoder("mpnet", "MPNet", "Model", **ROBERTA),
    _encoder(
        "modernbert",
        "ModernBert",
        "ForMaskedLM",
        max_position_embeddings=64,
        local_attention=8,
        global_attn_every_n_layers=2,
        pad_token_id=0,
        cls_token_id=1,
        sep_token_id=2,
        bos_token_id=1,
        eos_token_id=2,
    ),
    _encoder("camembert", "Camembert", "ForQuestionAnswering", **ROBERTA),
    _encoder("big_bird", "BigBird", attention_type="original_full", max_position_embeddings=64, **PADS),
    Tiny(
        "xlnet",
        "XLNetForSequenceClassification",
        "XLNetConfig",
        {"vocab_size": 120, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, "pad_token_id": 5},
    ),
    Tiny("gpt2", "GPT2LMHeadModel", "GPT2Config", {**GPT, **PADS}),
    Tiny(
        "gpt_neo",
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "vocab_size": 120,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "intermediate_size": 64,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 8,
            "max_position_embeddings": 64,
            **PADS,
        },
    ),
    Tiny(
        "opt",
        "OPTForCausalLM",
        "OPTConfig",
        {
            "vocab_size": 120,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 64,
            "word_embed_proj_dim": 32,
            "max_position_embeddings": 64,
            **PADS,
        },
    ),
    Tiny(
        "llama",
        "LlamaForCausalLM",
        "LlamaConfig",
        {**S, "num_key_value_heads": 2, "max_position_embeddings": 64, **PADS},
    ),
    Tiny(
        "qwen3",
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {**S, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, **PADS},
    ),
    Tiny(
        "gemma3",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            **S,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "sliding_window": 8,
            "max_position_embeddings": 64,
            "query_pre_attn_scalar": 8,
            **PADS,
        },
    ),
    Tiny(
        "bloom",
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": 120, "hidden_size": 32, "n_layer": 2, "n_head": 4, **PADS},
    ),
    Tiny("gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", {**S, "max_position_embeddings": 64, **PADS}),
    Tiny(
        "t5",
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 120,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 16,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
            "eos_token_id": 1,
        },
        factor=1.0,
    ),
    Tiny("bart", "BartForConditionalGeneration", "BartConfig", BART),
    Tiny("marian", "MarianMTModel", "MarianConfig", BART),
    Tiny("m2m_100", "M2M100ForConditionalGeneration", "M2M100Config", BART),
    Tiny("pegasus", "PegasusForConditionalGeneration", "PegasusConfig", BART),
    _encoder("longformer", "Longformer", attention_window=[8, 8], max_position_embeddings=130),
    Tiny(
        "funnel",
        "FunnelModel",
        "FunnelConfig",
        {
            "vocab_size": 120,
            "block_sizes": [1, 1],
            "d_model": 32,
            "n_head": 4,
            "d_head": 8,
            "d_inner": 64,
            "num_decoder_layers": 1,
        },
    ),
)

ROWS: dict[str, Tiny] = {row.name: row for row in TINY}


def scale(model: torch.nn.Module, factor: float = 5.0, seed: int = 0) -> torch.nn.Module:
    """Makes a random model's output depend on its input (see the module's docstring), in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(factor)
            elif not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        for name, buffer in model.named_buffers():
            if name == "final_logits_bias":
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)
    return model


def build(row: Tiny, **values: Any) -> torch.nn.Module:
    """The random model of a row, in eval mode."""
    torch.manual_seed(0)
    config = getattr(transformers, row.config)(**{**row.values, **values})
    return scale(getattr(transformers, row.model)(config), row.factor).eval()


def save(row: Tiny, directory: Path, **values: Any) -> Path:
    """The random model of a row as a checkpoint directory (no tokenizer)."""
    build(row, **values).save_pretrained(directory)
    return directory


WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def add_tokenizer(directory: Path) -> Path:
    """A WordPiece tokenizer of single letters and digits, 77 of the 120 ids, beside a checkpoint like BERT."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    vocabulary = {token: i for i, token in enumerate((*WORDS, *letters, *(f"##{letter}" for letter in letters)))}
    transformers.BertTokenizer(vocab=vocabulary, model_max_length=64).save_pretrained(directory)
    return directory

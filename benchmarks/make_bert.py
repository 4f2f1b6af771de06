"""Benchmarks: writes a random BERT of bert-base's size with the tokenizer of another checkpoint.

    make_bert.py OUT TOKENIZER

Prints, as JSON: its parameters.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

out, tokenizer = sys.argv[1:]
words = AutoTokenizer.from_pretrained(tokenizer)
torch.manual_seed(0)
model = BertForSequenceClassification(BertConfig(vocab_size=len(words), num_labels=3))
model.save_pretrained(out)
words.save_pretrained(out)
print(json.dumps({"parameters": sum(parameter.numel() for parameter in model.parameters())}))

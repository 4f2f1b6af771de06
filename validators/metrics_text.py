"""Floor 1, validators: metrics of words: SQuAD's answers and BLEU's n-grams.

Texts in, a row's numbers out; how rows become a score is `metrics`.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from nlpconvert.errors import MissingPackage

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(answer: str) -> str:
    """Lower case, without punctuation, English articles and surplus blanks: the official SQuAD script's."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, wanted: Sequence[str]) -> float:
    """1.0 where the normalised answer is one of those wanted. No text wanted means that none is right: ""."""
    return max(float(normalized(answer) == normalized(text)) for text in wanted or ("",))


def word_f1(answer: str, wanted: Sequence[str]) -> float:
    """F1 of the words that the normalised answer shares with the likest of those wanted (SQuAD 2.0's script)."""
    return max(_overlap(normalized(answer).split(), normalized(text).split()) for text in wanted or ("",))


def _overlap(candidate: list[str], wanted: list[str]) -> float:
    if not candidate or not wanted:
        return float(candidate == wanted)
    shared = sum((Counter(candidate) & Counter(wanted)).values())
    return 2 * shared / (len(candidate) + len(wanted))


def check_bleu() -> None:
    """MissingPackage where BLEU cannot be counted here, before a model is asked."""
    _bleu()


def bleu_counts(candidate: str, wanted: str) -> list[float]:
    """A row's part of corpus BLEU: matches of 1- to 4-grams, n-grams, and the words of candidate and target: (10,).

    Words are those of sacrebleu's 13a tokenization, case as it stands. MissingPackage without sacrebleu.
    """
    found = _bleu().sentence_score(candidate, [wanted])
    return [*map(float, found.counts), *map(float, found.totals), float(found.sys_len), float(found.ref_len)]


@lru_cache(maxsize=1)
def _bleu() -> Any:
    """Raises MissingPackage without sacrebleu."""
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError as error:
        raise MissingPackage("--metric bleu needs sacrebleu: pip install 'nlpconvert[bleu]'") from error
    return BLEU(effective_order=True)  # of one sentence; only the counts are read

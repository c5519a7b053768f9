"""A sample of the attack corpus on three families; `python -m benchmarks.control_tokens` runs all of it on all."""

import random
from functools import cache

import pytest

from benchmarks.attacks import attacks, benign
from benchmarks.control_tokens import Score, Trial, measure
from benchmarks.families import family, names

pytestmark = pytest.mark.stack

SAMPLED = ["qwen3", "llama3.1", "deepseek-v3"]


@cache
def sample(name: str) -> tuple[list[str], list[str]]:
    """60 attacks on the family and 40 benign texts, always the same."""
    rng = random.Random(name)
    return rng.sample(attacks(Trial(family(name)).tokens), 60), rng.sample(benign(), 40)


@pytest.mark.parametrize("name", names())
def test_the_corpus_is_large(name: str) -> None:
    tokens = Trial(family(name)).tokens
    corpus = attacks(tokens)
    assert len(corpus) == len(set(corpus)) >= 200
    assert corpus == attacks(tokens)
    assert all(any(token in text for text in corpus) for token in tokens)
    kind = benign()
    assert len(kind) == len(set(kind)) >= 150
    assert [text for text in kind if any(token in text for token in tokens)] == []


@pytest.mark.parametrize("name", SAMPLED)
def test_nothing_is_forged(name: str) -> None:
    hostile, kind = sample(name)
    score = measure(name, hostile, kind)
    assert score.attacks >= 3 * len(hostile)
    assert score.benign >= 3 * len(kind)
    assert (score.forged, score.differing, score.raised) == ([], [], [])


@pytest.mark.parametrize("name", SAMPLED)
def test_without_the_firewall_the_same_sample_forges(name: str) -> None:
    unguarded, score = Trial(family(name), guarded=False), Score()
    for text in sample(name)[0]:
        unguarded.try_attack(text, score)
    assert len(score.forged) > 20


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_a_template_that_trims_parts_puts_no_token_together(name: str) -> None:
    """Two parts with white space between them became a control token once."""
    texts = [token for token in Trial(family(name)).tokens if "turn" in token]
    score = measure(name, texts, ["a <", "<b> c"])
    assert score.attacks > 0
    assert (score.forged, score.differing) == ([], [])

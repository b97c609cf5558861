"""Entropy of one sampled token: exact, and from the likeliest outcomes."""

import math
from collections.abc import Sequence

import torch


def entropy_from_logits(logits: torch.Tensor, chunk_size: int = 64) -> torch.Tensor:
    """Entropy of the categorical distributions that `logits` define, summed over the whole vocabulary.

    Masked entries (`-inf`) count as probability zero. Rows are taken `chunk_size` at a time, which bounds the two
    temporary copies of the vocabulary axis.

    Args:
        logits (`torch.Tensor` of shape `(num_rows, vocab_size)`):
            Logits after temperature.
        chunk_size (`int`, *optional*, defaults to `64`):
            Rows per softmax.

    Returns:
        `torch.Tensor` of shape `(num_rows,)`, float32, in nats.
    """
    chunks = [torch.special.entr(chunk.float().softmax(dim=-1)).sum(dim=-1) for chunk in logits.split(chunk_size)]
    return torch.cat(chunks)


def entropy_from_top_logprobs(logprobs: Sequence[float]) -> float:
    """Entropy of a distribution of which only the likeliest outcomes are known: all others together count as one.

    That is a lower bound, exact where nothing is left over. What it misses, r·H(rest) with r the probability left over,
    grows with the entropy, so that changes of entropy come out too small, not too large.

    Args:
        logprobs (`Sequence[float]`):
            Log-probabilities in nats of different outcomes.

    Returns:
        `float`: In nats.
    """
    probabilities = [math.exp(logprob) for logprob in logprobs]
    rest = 1.0 - sum(probabilities)
    if rest > 0:
        probabilities.append(rest)
    return -sum(p * math.log(p) for p in probabilities if p > 0)

"""The random model that calls tools, with a tool and a reward for it."""

from arpo_trl.demo.tiny_model import WORDS, save_tagged_model


__all__ = ["WORDS", "count_words", "save_tagged_model", "search"]


def search(query: str) -> str:
    """Looks something up.

    Args:
        query: What.
    """
    return " ".join(reversed(query.split())) or "w0"


def count_words(completions, **kwargs) -> list[float]:
    """A reward that differs between rows: words in the last turn."""
    return [len(completion[-1]["content"].split()) / 10 for completion in completions]

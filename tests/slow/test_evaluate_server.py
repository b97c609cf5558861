"""Evaluation through a real `vllm serve` on loopback."""

import json
import re

import pytest

from arpo_trl.evaluation import Benchmark, evaluate
from arpo_trl.evaluation.config import EvaluationArguments, load_tokenizer, make_generator
from arpo_trl.tools.registry import resolve_tools
from tests.small_models import WORDS, search


pytestmark = pytest.mark.slow


class Words(Benchmark):
    name = "words"


def test_the_same_rows_as_the_sampler_makes(served, tmp_path):
    model, url = served
    args = EvaluationArguments(
        model_name_or_path=model,
        benchmarks=["unused"],
        backend="server",
        server_url=url,
        dialect="tagged",
        max_completion_length=48,
        max_tool_calling_iterations=2,
    )
    questions = tmp_path / "words.jsonl"
    questions.write_text("".join(json.dumps({"question": f"{word} w0", "answer": [word]}) + "\n" for word in WORDS))
    tools = resolve_tools([search])
    generator = make_generator(args, *load_tokenizer(args), tools)
    summary = evaluate(Words(questions), generator, tmp_path / "out", n=8, system_prompt="none")
    samples = [json.loads(line) for line in (tmp_path / "out" / "words" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 64 and summary["tool_calls"] > 0
    assert {sample["finish_reason"] for sample in samples} <= {"stop", "length", "tool_limit"}
    for sample in samples:
        for message in sample["messages"]:
            if message["role"] == "tool":
                assert message["name"] == "search"
            elif message.get("tool_calls"):  # the stream was closed right after the tag
                assert re.search(r"</search>$", message["content"].strip())
    unfinished = [s for s in samples if s["finish_reason"] == "length"]
    assert all(s["num_tokens"] <= 48 for s in samples) and unfinished

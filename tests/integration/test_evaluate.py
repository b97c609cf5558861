"""Evaluation end to end: the script killed and resumed, real engines, a server on loopback, the training callback."""

import contextlib
import json
import logging
import os
import runpy
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from datasets import Dataset

from arpo_trl import ARPOConfig, ARPOTrainer
from arpo_trl.evaluation import BENCHMARKS, Benchmark, evaluate
from arpo_trl.evaluation.callback import BenchmarkCallback
from arpo_trl.evaluation.config import EvaluationArguments, load_tokenizer, make_generator
from arpo_trl.evaluation.generation import SamplerGenerator, WatchedEngine
from arpo_trl.rollout.dialects import make_dialect
from arpo_trl.rollout.engines.server_engine import ServerEngine, served_model_length
from arpo_trl.rollout.sampler import Limits, Sampler
from arpo_trl.tools.registry import resolve_tools
from arpo_trl.tools.runner import ToolRunner
from tests.completion_server import serve_tagged
from tests.small_models import WORDS, count_words, save_tagged_model, search


ROOT = Path(__file__).parents[2]
MODULE = '''
import os
import signal

from arpo_trl.evaluation import Benchmark
from tests.small_models import search  # a tool by its dotted path


class Dies(Benchmark):
    """Its process is killed when the third batch is scored, unless the environment says otherwise."""

    name = "words"
    batches = 0

    def score(self, answers, ground_truths):
        type(self).batches += 1
        if self.batches == 3 and "SURVIVES" not in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().score(answers, ground_truths)
'''


@pytest.fixture(scope="module")
def tagged_model(tmp_path_factory):
    return save_tagged_model(tmp_path_factory.mktemp("tagged_model"))


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "words.jsonl"
    rows = [{"question": f"{word} w0", "answer": [word, "w1"]} for word in WORDS[:4]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Words(Benchmark):
    name = "words"


# The script


def test_the_script_is_killed_and_goes_on(tagged_model, questions, tmp_path, monkeypatch, capsys, caplog):
    (tmp_path / "mine.py").write_text(MODULE)
    recipe = tmp_path / "evaluate.yaml"
    recipe.write_text(
        f"model_name_or_path: {tagged_model}\nbackend: transformers\ndialect: tagged\n"
        "tools: [{path: tests.small_models.search, timeout_s: 5}]\n"
        f"system_prompt: none\nbenchmarks: ['mine.Dies={questions}']\nn: 2\nbatch_size: 2\nmax_completion_length: 48\n"
        "output_dir: out\n"
    )
    script = ROOT / "scripts" / "evaluate.py"
    command = [sys.executable, str(script), "--config", str(recipe)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=240)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    file = tmp_path / "out" / "words" / "samples.jsonl"
    before = file.read_bytes()
    assert len(before.splitlines()) == 4

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("SURVIVES", "1")
    evaluate_script = runpy.run_path(str(script))
    (args,) = evaluate_script["make_parser"]().parse_args_and_config(["--config", str(recipe)])
    with caplog.at_level(logging.INFO):
        evaluate_script["run"](args)
    assert "4 samples are there already, 4 are missing" in caplog.text
    assert file.read_bytes().startswith(before)
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted((s["question_id"], s["sample"]) for s in samples) == [(q, k) for q in range(4) for k in range(2)]
    header, _, row = capsys.readouterr().out.splitlines()[-3:]
    assert header.split()[0] == "benchmark" and row.split()[0] == "words"
    (summary,) = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["num_samples"] == 8 and summary["tokens"] > 0 and 0 < summary["entropy"] < 3
    assert "| words | 4 | 2 |" in (tmp_path / "out" / "summary.md").read_text()

    evaluate_script["compare"]("out", "out")
    comparison = json.loads(capsys.readouterr().out)
    assert comparison["benchmark"] == "words" and comparison["difference"] == 0 and comparison["p_value"] == 1


@pytest.fixture
def parse(monkeypatch):
    monkeypatch.setattr(os, "environ", {**os.environ})  # a recipe may set variables
    make_parser = runpy.run_path(str(ROOT / "scripts" / "evaluate.py"))["make_parser"]
    return lambda *arguments: make_parser().parse_args_and_config(list(arguments))[0]


def test_the_shipped_recipe_names_what_there_is(parse):
    args = parse("--config", str(ROOT / "recipes" / "cpu" / "evaluate_smollm2.yaml"), "--n", "3")
    assert args.n == 3 and args.limit == 2 and args.dialect == "tagged"
    names = {spec.partition("=")[0] for spec in args.benchmarks}
    assert len(names) == 8 and names <= set(BENCHMARKS)


def test_c22_a_typo_fails_by_name(parse, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model_name_or_path: m\nbenchmarks: [aime24]\nmax_completion_lenght: 3\n")
    with pytest.raises(ValueError, match="max_completion_lenght"):
        parse("--config", str(recipe))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "tpu"}, "`backend` must be one of vllm, transformers, server"),
        ({"backend": "server"}, "needs `server_url`"),
        ({"check": "both"}, "needs `judge_model`"),
        ({"n": 0}, "at least 1"),
        ({"benchmarks": []}, "Give `model_name_or_path` and `benchmarks`"),
        ({"compare": ["a"]}, "two output folders"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        EvaluationArguments(**{"model_name_or_path": "m", "benchmarks": ["aime24"], **change})


# Engines


@contextlib.contextmanager
def make_sampler_generator(engine, tokenizer, tools, dialect="tagged"):
    with ToolRunner(tools) as runner:
        sampler = Sampler(engine, make_dialect(dialect, tokenizer, tools), runner, Limits(completion_tokens=64))
        yield SamplerGenerator(sampler, tokenizer, tools, tools_in_template=dialect == "native")


def test_vllm_with_the_samplers_tools_and_entropies(vllm_engine, tiny_tokenizer, questions, tmp_path):
    engine = WatchedEngine(vllm_engine)
    with make_sampler_generator(engine, tiny_tokenizer, [search], "native") as generator:
        summary = evaluate(Words(questions), generator, tmp_path / "out", n=3, batch_size=5, system_prompt="none")
    assert summary["num_samples"] == 12 and summary["unscored"] == 0
    assert 0 < summary["entropy"] < 6 and summary["tokens"] > 1
    assert set(summary["pass@k"]) == {1, 2, 3}


def test_tools_run_and_are_counted(tagged_model, questions, tmp_path):
    args = EvaluationArguments(
        model_name_or_path=tagged_model,
        benchmarks=["unused"],
        backend="transformers",
        dialect="tagged",
        max_completion_length=64,
        max_tool_calling_iterations=2,
    )
    tools = resolve_tools([search])
    model, tokenizer, stops = load_tokenizer(args)
    generator = make_generator(args, model, tokenizer, stops, tools)
    summary = evaluate(Words(questions), generator, tmp_path / "out", n=16, system_prompt="none")
    samples = [json.loads(line) for line in (tmp_path / "out" / "words" / "samples.jsonl").read_text().splitlines()]
    assert 0 < summary["tool_calls"] <= 2
    for sample in samples:
        answered = [message["name"] for message in sample["messages"] if message["role"] == "tool"]
        assert Counter(answered) == sample["tool_calls"]
    assert {sample["finish_reason"] for sample in samples} <= {"stop", "length", "tool_limit"}


@pytest.fixture
def completion_server(tagged_model):
    with serve_tagged(tagged_model) as server:
        yield server


def make_server_engine(server, **options):
    stops = [server.tokenizer.eos_token_id]
    return ServerEngine(server.url, "m", stops, 256, server.tokenizer, **options)


@pytest.mark.parametrize("sends_ids", [True, False])
def test_a_server_in_place_of_the_engine(completion_server, questions, tmp_path, sends_ids):
    completion_server.sends_ids = sends_ids
    engine = make_server_engine(completion_server, temperature=0.7, sampling={"top_k": 5})
    with make_sampler_generator(engine, completion_server.tokenizer, [search]) as generator:
        summary = evaluate(Words(questions), generator, tmp_path / "out", n=2, system_prompt="none")
    samples = [json.loads(line) for line in (tmp_path / "out" / "words" / "samples.jsonl").read_text().splitlines()]
    assert summary["accuracy"]["mean"] == 1.0 and summary["tool_calls"] == 1 and summary["entropy"] is None
    for sample in samples:
        assert [message["role"] for message in sample["messages"]] == ["assistant", "tool", "assistant"]
        assert sample["messages"][0]["content"].split() == ["w1", "<search>", "w2", "w3", "</search>"]
        assert sample["messages"][1]["content"] == "w3 w2"
    assert {(body["temperature"], body["top_k"], body["stream"]) for body in completion_server.bodies} == {
        (0.7, 5, True)
    }


def test_the_servers_own_limit(completion_server):
    assert served_model_length(completion_server.url, "m") == 256
    with pytest.raises(ValueError, match="set `server_model` to one of"):
        served_model_length(completion_server.url, "n")
    with pytest.raises(ValueError, match="set `vllm_max_model_length`"):
        served_model_length(completion_server.url, "other")
    with pytest.raises(ValueError, match="check `server_url`"):
        served_model_length("http://127.0.0.1:1/v1", "m")


# While training


def train(model, output_dir, benchmark=None, **arguments):
    config = ARPOConfig(
        output_dir=str(output_dir),
        num_generations=4,
        per_device_train_batch_size=8,
        max_steps=2,
        learning_rate=1e-2,
        max_completion_length=32,
        entropy_window=4,
        dialect=arguments.pop("dialect", "tagged"),
        deterministic_rollouts=True,
        logging_steps=2,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **arguments.pop("options", {}),
    )
    rows = [{"prompt": [{"role": "user", "content": f"{first} {second}"}]} for first in WORDS for second in WORDS]
    trainer = ARPOTrainer(model, count_words, config, Dataset.from_list(rows), **{"tools": [search], **arguments})
    if benchmark is not None:
        trainer.add_callback(
            BenchmarkCallback(trainer, [benchmark], 1, n=2, output_dir=output_dir / "kept", system_prompt="none")
        )
    return trainer


def test_the_callback_logs_and_leaves_training_as_it_was(tagged_model, questions, tmp_path):
    plain = train(tagged_model, tmp_path / "plain")
    plain.train()
    watched = train(tagged_model, tmp_path / "watched", Words(questions))
    watched.train()
    logged = [entry for entry in watched.state.log_history if "benchmark/words/accuracy" in entry]
    assert [entry["step"] for entry in logged] == [1, 2]
    assert all(0 <= entry["benchmark/words/pass@2"] <= 1 and "reward" not in entry for entry in logged)
    for step in (1, 2):
        kept = (tmp_path / "watched" / "kept" / f"step-{step}" / "words" / "samples.jsonl").read_text().splitlines()
        assert len(kept) == 8

    def rewards(trainer):
        history = [entry for entry in trainer.state.log_history if "reward" in entry]
        return [(entry["step"], entry["reward"], entry["loss"], entry["num_tokens"]) for entry in history]

    assert rewards(watched) == rewards(plain) and len(rewards(plain)) == 1
    assert not watched._metrics["eval"]


class Box:
    """An environment with a state."""

    def reset(self, **kwargs):
        self.content = []
        return None

    def put(self, word: str) -> str:
        """Puts a word into the box.

        Args:
            word: Which.
        """
        self.content.append(word)
        return " ".join(self.content)


def test_c19_evaluation_of_one_row_with_an_environment(tiny_model_dir, tmp_path):
    trainer = train(
        tiny_model_dir,
        tmp_path,
        dialect="native",
        tools=None,
        environment_factory=Box,
        eval_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "w1"}]}]),
        options={"num_generations_eval": 1, "per_device_eval_batch_size": 1},
    )
    assert trainer.evaluate()["eval_reward"] >= 0
    with pytest.raises(ValueError, match="Benchmarks know no environments"):
        BenchmarkCallback(trainer, [], 1)

"""The examples of CONTRIBUTING.md, run as they stand."""

import importlib
import importlib.metadata
import json
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset

from arpo_trl import AEPOConfig, AEPOTrainer
from arpo_trl.evaluation.benchmarks import resolve_benchmark
from arpo_trl.extensions import is_known, resolve
from arpo_trl.rewards.registry import resolve_rewards
from arpo_trl.rollout.dialects import make_dialect
from arpo_trl.tools.contract import ToolCall, ToolContext, ToolResult
from arpo_trl.tools.registry import resolve_tools
from arpo_trl.tools.runner import ToolRunner


PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
SECTIONS = {
    title: (
        re.search(r"```python\n# (\S+)\n(.*?)```", text, re.DOTALL),
        re.search(r"```yaml\n(.*?)```", text, re.DOTALL),
    )
    for title, text in re.findall(r"^### (.+?)\n(.*?)(?=^### |\Z)", PAGE, re.DOTALL | re.MULTILINE)
}


@pytest.fixture(scope="module", autouse=True)
def my_parts(tmp_path_factory):
    """A folder with every example in the file that it names."""
    folder = tmp_path_factory.mktemp("parts")
    for code, _ in SECTIONS.values():
        path = folder / code[1]
        path.parent.mkdir(exist_ok=True)
        path.write_text(code[2])
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_parts"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def recipe() -> dict:
    """What the examples say in a recipe, all of it together."""
    return {key: value for _, block in SECTIONS.values() for key, value in yaml.safe_load(block[1]).items()}


def test_there_are_eight_kinds():
    assert len(SECTIONS) == 8
    rows = re.findall(r"^\| .+? \| `\w+`.*? \| `(\w+)` in `(\S+)` \|$", PAGE, re.MULTILINE)
    assert len(rows) == 8
    for registry, path in rows:
        module = importlib.import_module(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        assert getattr(module, registry)


def test_reward(recipe):
    [reward] = resolve_rewards(recipe["reward_funcs"])
    completions = [[{"role": "assistant", "content": "word " * count}] for count in (5, 20)]
    assert reward(completions=completions) == [1.0, 0.5]


def test_tool(recipe):
    tools = resolve_tools(recipe["tools"])
    with ToolRunner(tools.tools, tools.options) as runner:
        runner.start(
            "row", [ToolCall("count_words", {"text": "one two three"})], context=ToolContext("row", 0, 0, True)
        )
        [(_, [result])] = runner.poll(None)
    assert result.failure is None and result.content == "3"


def test_dialect(recipe, tiny_tokenizer):
    dialect = make_dialect(recipe["dialect"], tiny_tokenizer, resolve_tools(recipe["tools"]).tools)
    turn_ids = tiny_tokenizer.encode("<count_words>one two</count_words>")
    turn = dialect.read(turn_ids, "stop", resolve_tools(recipe["tools"]).tools)
    ids = dialect.result_ids(turn_ids, turn.calls, [ToolResult("count_words", "2")])
    assert turn.calls == [ToolCall("count_words", {"text": "one two"})]
    assert tiny_tokenizer.decode(ids) == "<observation>2</observation>"


def test_benchmark(recipe, my_parts, monkeypatch):
    monkeypatch.chdir(my_parts)
    Path("capitals.jsonl").write_text(json.dumps({"country": "France", "capital": "Paris"}) + "\n")
    [name] = recipe["benchmarks"]
    benchmark = resolve_benchmark(name)
    assert benchmark.score(["Paris", "Rome"], list(benchmark.load()["ground_truth"]) * 2) == [1.0, 0.0]


def test_training_with_all_of_them(recipe, tiny_model_dir, tmp_path, monkeypatch):
    """One update of a trainer whose dialect, fork rule, credit rule, token objective and engine are the examples'."""
    called = []
    for name in ("fork_rules.early_steps", "credit_rules.best_of_shared", "token_objectives.leaky_clip"):
        module_name, _, attribute = f"my_parts.{name}".rpartition(".")
        module = importlib.import_module(module_name)
        original = getattr(module, attribute)

        def spy(*args, name=name, original=original):
            called.append(name)
            return original(*args)

        monkeypatch.setattr(module, attribute, spy)
    tools = resolve_tools(recipe["tools"])
    options = {name: recipe[name] for name in ("dialect", "branch_rule", "attribution", "engine", "use_vllm")}
    args = AEPOConfig(
        output_dir=str(tmp_path),
        token_objective=recipe["token_objective"],
        entropy_balanced_clipping=recipe["entropy_balanced_clipping"],
        entropy_aware_advantage=False,
        dynamic_budget=False,
        per_device_train_batch_size=4,
        num_generations=4,
        num_initial_rollouts=1,
        max_completion_length=100,
        max_steps=1,
        use_cpu=True,
        bf16=False,
        report_to=[],
        seed=0,
        **options,
    )
    prompt = [{"role": "user", "content": "capital"}]
    trainer = AEPOTrainer(
        tiny_model_dir,
        lambda completion_ids, **kwargs: [float(len(ids) % 5) for ids in completion_ids],
        args,
        Dataset.from_dict({"prompt": [prompt] * 4}),
        tools=tools.tools,
    )
    # The model is random and calls nothing by itself: turns end after four tokens, and the first eight are calls.
    dialect, calls = trainer._dialect, iter(range(8))
    call_ids = trainer.processing_class.encode("<count_words>one two</count_words>")
    read = dialect.read
    monkeypatch.setattr(dialect, "closes_turn", lambda ids, new: len(ids) >= 4)
    monkeypatch.setattr(
        dialect, "read", lambda ids, reason, rows: read(ids if next(calls, None) is None else call_ids, reason, rows)
    )
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.train()
    assert trainer._sampler.engine.requests >= 4
    assert set(called) == {"fork_rules.early_steps", "credit_rules.best_of_shared", "token_objectives.leaky_clip"}
    assert any(not torch.equal(old, new) for old, new in zip(before, trainer.model.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["reward", "tool", "dialect", "fork rule", "credit rule", "engine", "benchmark"])
def test_names(kind, monkeypatch):
    """The library's own, an installed package's, a dotted path; else an error that lists what there is."""
    group = f"arpo_trl.{kind.replace(' ', '_')}s"
    offered = importlib.metadata.EntryPoint("early", "my_parts.fork_rules:early_steps", group)
    monkeypatch.setattr(
        "importlib.metadata.entry_points",
        lambda group, name: [p for p in [offered] if (p.group, p.name) == (group, name)],
    )
    early_steps = importlib.import_module("my_parts.fork_rules").early_steps
    assert resolve(kind, "own", {"own": 1}) == 1
    assert is_known(kind, "early", {}) and resolve(kind, "early", {}) is early_steps
    assert resolve(kind, "my_parts.fork_rules.early_steps", {}) is early_steps
    assert not is_known(kind, "nothing", {"own": 1})
    with pytest.raises(ValueError, match=f"There is no {kind} 'nothing'; use one of 'own', or the dotted path"):
        resolve(kind, "nothing", {"own": 1})
    with pytest.raises(ValueError, match=f"The {kind} 'my_parts.nowhere.x' cannot be imported"):
        resolve(kind, "my_parts.nowhere.x", {})

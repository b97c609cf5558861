"""`--dry_run`: what the scripts say about a recipe before anything is loaded, and what they end with."""

import json
import runpy
import shutil
from pathlib import Path

import pytest
import yaml

from arpo_trl.commands.launch import parse_recipe


ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tiny_model_dir, tmp_path, monkeypatch):
    """A place to run in, with a model that has no weights, 100 questions and 8 traces."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    shutil.copytree(tiny_model_dir, "model", ignore=shutil.ignore_patterns("*.safetensors"))
    questions = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(100)]
    Path("questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    trace = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "<answer>4</answer>"}]
    Path("traces.jsonl").write_text("".join(json.dumps({"messages": trace}) + "\n" for _ in range(8)))
    return tmp_path


RECIPE = {
    "model_name_or_path": "model",
    "dataset_name": "questions.jsonl",
    "system_prompt": "none",
    "tools": ["tests.integration.test_doctor.lookup"],
    "reward_funcs": ["exact_match_reward"],
    "accelerate_config": "recipes/accelerate_configs/fsdp2.yaml",
    "num_generations": 4,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "max_completion_length": 40,
    "max_tool_result_length": 16,
    "output_dir": "out",
    "report_to": "none",
    "bf16": True,
}


def dry_run(script: str, recipe: dict, capsys, *options: str) -> tuple[int, str]:
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    module = runpy.run_path(str(ROOT / "scripts" / f"{script}.py"))
    arguments = parse_recipe(module["make_parser"](), ["--config", "recipe.yaml", "--dry_run", *options])
    with pytest.raises(SystemExit) as ended:
        module["main"](*arguments)
    return ended.value.code, capsys.readouterr().out


@pytest.mark.parametrize("script", ["arpo", "aepo", "grpo"])
def test_a_recipe_for_gpus_is_examined_without_one(script, folder, capsys):
    status, out = dry_run(script, RECIPE, capsys)
    assert status == 0, out
    *lines, summary = out.splitlines()
    assert summary == "0 problems, 0 warnings"
    for check in ("packages", "rewards", "tools", "model", "dialect", "rollout", "data", "sizes", "memory"):
        assert any(line.startswith(f"ok       {check}") for line in lines), out
    assert "16 prompts × 4 rows" in out and "an update 32 rows, on 8 processes (fsdp)" in out
    # 100 prompts are 6 rollouts of 16 an epoch, of 2 updates each, 3 epochs.
    assert f"with {script.upper()} for 36 updates, 2 a rollout and 6 rollouts an epoch" in lines[-1]
    assert "save it to out" in lines[-1] and not Path("out").exists()


def test_the_command_line_wins_in_a_dry_run(folder, capsys):
    status, out = dry_run("arpo", RECIPE, capsys, "--max_steps", "5", "--num_generations", "2")
    assert status == 0 and "for 5 updates" in out and "32 prompts × 2 rows" in out


@pytest.mark.parametrize(
    ("change", "check", "remedy"),
    [
        ({"dataset_name": "nowhere.jsonl"}, "data", "check the path"),
        ({"tools": ["tests.integration.test_doctor.broken"]}, "tools", "refuses connections"),
        ({"reward_funcs": ["exact"]}, "rewards", "exact"),
        ({"steps_per_generation": 32}, "dry run", "lower steps_per_generation"),
        ({"accelerate_config": "recipes/accelerate_configs/zero3.yaml"}, "packages", "pip install"),
    ],
)
def test_a_fault_is_a_problem_and_the_status_1(change, check, remedy, folder, capsys):
    status, out = dry_run("arpo", {**RECIPE, **change}, capsys)
    [problem] = [line for line in out.splitlines() if line.startswith("PROBLEM")]
    assert status == 1 and problem.split("  ")[1].strip() == check and remedy in problem


def test_a_cold_start(folder, capsys):
    names = ("model_name_or_path", "accelerate_config", "output_dir", "report_to", "bf16")
    recipe = {name: RECIPE[name] for name in names} | {
        "dataset_name": "traces.jsonl",
        "dialect": "tagged",
        "per_device_train_batch_size": 1,
        "num_train_epochs": 2,
        "max_length": 5,
    }
    status, out = dry_run("sft", recipe, capsys)
    assert status == 0, out
    assert "8 traces" in out and "8 are longer than max_length (5)" in out
    assert "for 2 updates of 8 traces on 8 processes (fsdp)" in out and not Path("out").exists()
    status, out = dry_run("sft", {**recipe, "dialect": "native"}, capsys)
    assert status == 0 and "ok       memory" in out


def test_a_real_run_says_so_where_it_has_other_processes_than_the_recipe(caplog, folder):
    from arpo_trl.commands.recipe import warn_of_other_launch

    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    parser = runpy.run_path(str(ROOT / "scripts" / "arpo.py"))["make_parser"]()
    script_args, args, _, _ = parse_recipe(parser, ["--config", "recipe.yaml", "--use_cpu", "true"])

    def warnings() -> list[str]:
        warn_of_other_launch(script_args, args)
        said = [record.getMessage() for record in caplog.records if record.name == "arpo_trl.commands.recipe"]
        caplog.clear()
        return said

    [warning] = warnings()
    assert "for 8 processes and was launched with 1: its batches are 0.125 times as large" in warning
    script_args.accelerate_config = None
    assert warnings() == []

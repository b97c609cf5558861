"""Runs that have too little memory end with one sentence: in the update, and where vLLM starts."""

import os
import runpy
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import yaml

from arpo_trl import ARPOTrainer
from arpo_trl.commands.launch import parse_recipe


ROOT = Path(__file__).parents[2]


@pytest.fixture
def recipe(tiny_model_dir, tmp_path, monkeypatch):
    """A small recipe, changed as asked, as a file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    Path("questions.jsonl").write_text('{"question": "2 + 2?", "answer": "4"}\n' * 4)

    def write(**changes) -> str:
        options = {
            "model_name_or_path": tiny_model_dir,
            "dataset_name": "questions.jsonl",
            "system_prompt": "none",
            "tools": ["tests.integration.test_doctor.lookup"],
            "reward_funcs": ["exact_match_reward"],
            "num_generations": 2,
            "per_device_train_batch_size": 2,
            "max_completion_length": 8,
            "max_steps": 1,
            "output_dir": "out",
            "report_to": "none",
            "save_strategy": "no",
            "use_cpu": True,
            "bf16": False,
        }
        Path("recipe.yaml").write_text(yaml.safe_dump(options | changes))
        return "recipe.yaml"

    return write


def run(path: str) -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "arpo.py"))
    with patch.dict(os.environ):  # vLLM leaves its place in the job there
        script["main"](*parse_recipe(script["make_parser"](), ["--config", path]))


def test_out_of_memory_in_the_update_ends_with_what_to_lower(recipe, monkeypatch):
    def compute_loss(self, *args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.16 GiB. GPU 0 has a total capacity of…")

    monkeypatch.setattr(ARPOTrainer, "compute_loss", compute_loss)
    with pytest.raises(SystemExit) as ended:
        run(recipe())
    message = ended.value.code
    assert message.startswith(
        "error: The device has no memory for another 1.16 GiB: lower per_device_train_batch_size"
    )
    assert "set optim: adamw_8bit" in message and "\n" not in message


def test_vllm_without_room_for_its_cache_ends_with_what_to_change(recipe, monkeypatch):
    def build_llm(model, **options):
        raise ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when …")

    monkeypatch.setattr("arpo_trl.training.vllm_generation.build_llm", build_llm)
    with pytest.raises(SystemExit, match="^error: vLLM has too little memory for its cache: raise "):
        run(recipe(use_vllm=True, vllm_max_model_length=512))

"""vLLM that finds no room for its cache ends a run with one sentence."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM


ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_vllm_without_room_for_its_cache_ends_with_what_to_change(tiny_model_dir, tmp_path, monkeypatch):
    # 64 KiB of keys and values a token: a row of 32,768 needs 2 GiB.
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=32768,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "wide")
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(tmp_path / "wide")
    (tmp_path / "questions.jsonl").write_text('{"question": "2 + 2?", "answer": "4"}\n' * 4)
    recipe = {
        "model_name_or_path": "wide",
        "dataset_name": "questions.jsonl",
        "system_prompt": "none",
        "tools": ["calculator"],
        "reward_funcs": ["exact_match_reward"],
        "num_generations": 2,
        "per_device_train_batch_size": 2,
        "use_vllm": True,
        "vllm_max_model_length": 32768,
        "output_dir": "out",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):  # of engines in this process
        monkeypatch.delenv(name, raising=False)
    command = [sys.executable, str(ROOT / "scripts" / "arpo.py"), "--config", "recipe.yaml"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert run.returncode == 1, run.stderr[-3000:]
    assert run.stderr.rstrip().endswith(
        "error: vLLM has too little memory for its cache: raise the environment variable VLLM_CPU_KVCACHE_SPACE (GiB), "
        "or lower vllm_max_model_length (32768)."
    )

"""The LoRA recipe, from the command line: trained, killed, resumed, merged, loaded."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer


ROOT = Path(__file__).resolve().parents[2]
VLLM_SAYS = """
import sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=256)
prompt = {"prompt_token_ids": [int(id) for id in sys.argv[2:]]}
(output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=8, detokenize=False))
print("IDS", *output.outputs[0].token_ids)
"""


def command(*arguments) -> list[str]:
    return [sys.executable, *map(str, arguments)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_lora_recipe_killed_resumed_merged_and_loaded(whole_demo, tmp_path):
    start, _ = whole_demo

    def run(*arguments) -> str:
        done = subprocess.run(command(*arguments), cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    lora = ["scripts/arpo.py", "--config", "recipes/cpu/arpo_lora.yaml", "--model_name_or_path", start / "sft"]
    lora += ["--dataset_name", start / "train.jsonl", "--eval_strategy", "no", "--eval_on_start", "false"]
    lora += ["--output_dir", tmp_path / "lora", "--max_steps", 6, "--save_steps", 2]
    lora += ["--per_device_train_batch_size", 64]

    process = subprocess.Popen(command(*lora), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (tmp_path / "lora" / "checkpoint-2" / "manifest.json").exists():
        assert process.poll() is None
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "lora" / "adapter_model.safetensors").exists()

    run(*lora, "--resume_from_checkpoint", "true")
    said = run("scripts/merge_adapter.py", tmp_path / "lora", tmp_path / "merged")
    assert "saved to" in said

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    question = [{"role": "user", "content": "In 1974, what is the mascot of the builder of Nipi?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    base = AutoModelForCausalLM.from_pretrained(start / "sft")
    before = base(ids).logits
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    adapted = PeftModel.from_pretrained(base, tmp_path / "lora")
    torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=0, atol=1e-4)
    assert (merged(ids).logits - before).abs().max() > 0.01
    generated = merged.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)[0, ids.shape[1] :]
    said = run("-c", VLLM_SAYS, tmp_path / "merged", *ids[0].tolist())
    assert said.split("IDS ")[1].split() == [str(id) for id in generated.tolist()]

"""The demo learns, from whatever seed: what `make demo` promises."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_demo_learns_to_choose(seed, tmp_path):
    done = subprocess.run(
        [sys.executable, "scripts/demo.py", "--output_dir", str(tmp_path), "--seed", str(seed)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    *_, held_out, last = done.stdout.strip().splitlines()
    figures = re.fullmatch(
        r"reward: first five updates ([\d.]+), last five ([\d.]+); tool calls per update (\d+) to (\d+); wall (\d+) s",
        last,
    )
    assert figures, last
    first, final = map(float, figures.groups()[:2])
    assert 0.3 <= first <= 0.55
    assert final >= first + 0.3
    before, after = map(float, re.findall(r"\d\.\d+", held_out))
    assert before < after and after >= 0.8

    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert any((tmp_path / "arpo" / "rollouts").iterdir())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "arpo")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "arpo")
    right = 0
    for line in (tmp_path / "test.jsonl").read_text().splitlines()[:16]:
        (question,) = json.loads(line)["prompt"]
        year, link, ship = re.match(r"In (\d+), what is the \w+ of the (\w+) of (\w+)", question["content"]).groups()
        prompt = tokenizer.apply_chat_template([question], add_generation_prompt=True, return_tensors="pt")
        generated = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        right += tokenizer.decode(generated).startswith(f"<search>{link} {ship} {year}</search>")
    assert right >= 14
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())

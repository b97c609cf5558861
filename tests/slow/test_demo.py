"""The demo learns, whatever is drawn: what `make demo` promises."""

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_demo_learns_to_choose(seed, whole_demo, run_demo, tmp_path):
    """Seed 0 from nothing; the others from its cold start, since what they vary is what ARPO learns."""
    start, said = whole_demo
    folder = tmp_path if seed else start
    if seed:
        said = run_demo("--output_dir", folder, "--seed", seed, "--cold_start", start)
    *_, held_out, last = said.strip().splitlines()
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

    assert (folder / "curves.png").stat().st_size > 10_000
    assert any((folder / "arpo" / "rollouts").iterdir())
    model = AutoModelForCausalLM.from_pretrained(folder / "arpo")
    tokenizer = AutoTokenizer.from_pretrained(folder / "arpo")
    right = 0
    for line in (start / "test.jsonl").read_text().splitlines()[:16]:
        (question,) = json.loads(line)["prompt"]
        year, link, ship = re.match(r"In (\d+), what is the \w+ of the (\w+) of (\w+)", question["content"]).groups()
        prompt = tokenizer.apply_chat_template([question], add_generation_prompt=True, return_tensors="pt")
        generated = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        right += tokenizer.decode(generated).startswith(f"<search>{link} {ship} {year}</search>")
    assert right >= 14
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())

"""Models pushed to a Hub on loopback: files, revisions, and what their cards say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from tests.integration.hub_server import HubServer


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pushed(tiny_model_dir, tmp_path_factory):
    """The Hub after a run, the run's folder and what it said on standard error."""
    folder = tmp_path_factory.mktemp("hub")
    with HubServer() as hub:
        environment = {
            **os.environ,
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(folder / "home"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "HF_TOKEN": "hf_test",
            "PYTHONPATH": str(ROOT),
        }
        run = subprocess.run(
            [sys.executable, "-m", "tests.hub_run", tiny_model_dir, str(folder)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert run.returncode == 0, run.stderr[-4000:]
        yield hub, folder, run.stderr


def card(hub: HubServer, repo: str, revision: str = "main") -> ModelCard:
    return ModelCard(hub.repos[repo][revision]["README.md"].decode())


def test_a_whole_model(pushed):
    hub, folder, _ = pushed
    files = hub.repos["tester/full"]["main"]
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md", "curves.png"} <= set(files)
    assert (folder / "full" / "rollouts").is_dir() and not any(name.startswith("rollouts") for name in files)
    data, text = card(hub, "tester/full").data, card(hub, "tester/full").text
    assert data.library_name == "transformers" and data.pipeline_tag == "text-generation"
    assert data.datasets == "org/questions" or data.datasets == ["org/questions"]
    assert {"arpo", "trl", "tool-use"} <= set(data.tags)
    # A local base is named, but is none for the Hub's metadata, and its path is nobody's business.
    assert data.base_model is None and "a local model" in text and str(folder.parent) not in text
    assert {result.metric_type for result in data.eval_results} == {"reward", "rewards/reward/mean"}
    assert data.eval_results[0].metric_value == pytest.approx(data.eval_results[1].metric_value)
    for said in ("2507.19849", "2510.14545", "| `search` | Searches. |", "trl 1.16", "arpo_trl 0.", "(curves.png)"):
        assert said in text
    assert "rows a prompt, M (`num_generations`) | 4 |" in text and "α (`branch_alpha`) | 0.5 |" in text
    assert "2 optimizer steps" in text and "dong2025arpo" in text and "{{" not in text.split("```bibtex")[0]
    assert "ARPO, which trained this model" in text and text.lstrip().startswith("# full\n")


def test_checkpoints_are_revisions(pushed):
    hub, _, _ = pushed
    repo = hub.repos["team/steps"]
    assert sorted(repo) == ["main", "step-1", "step-2"] and hub.visibility["team/steps"] == "private"
    for revision in ("step-1", "step-2"):
        assert "model.safetensors" in repo[revision]
        assert not [
            name for name in repo[revision] if name.startswith(("optimizer", "rng", "scheduler", "trainer_state"))
        ]


def test_an_adapter_and_the_same_merged(pushed):
    hub, _, _ = pushed
    adapter, merged = hub.repos["tester/adapter"]["main"], hub.repos["tester/merged"]["main"]
    assert "adapter_model.safetensors" in adapter and "model.safetensors" not in adapter
    assert "model.safetensors" in merged and not any(name.startswith("adapter") for name in merged)
    data, text = card(hub, "tester/adapter").data, card(hub, "tester/adapter").text
    assert data.library_name == "peft" and "holds the adapter" in text and "aepo" in data.tags
    assert data.datasets is None and "train.jsonl" not in text
    assert "AEPO, which trained this model" in text and "branch penalty (`branch_penalty`) | True |" in text
    assert card(hub, "tester/merged").data.library_name == "transformers"
    assert "holds the adapter" not in card(hub, "tester/merged").text


def test_a_baseline_says_that_it_did_not_fork(pushed):
    hub, _, _ = pushed
    saved = card(hub, "tester/baseline")
    assert "none forked" in saved.text and "with GRPO" in saved.text and "branch_alpha" not in saved.text
    assert "which trained this model" not in saved.text and "grpo" in saved.data.tags


def test_faults_are_one_sentence(pushed):
    _, _, said = pushed
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 3
    for error, remedy in zip(
        errors, ("leave `merge` out", "name the output_dir", "save_strategy: steps"), strict=True
    ):
        assert remedy in error

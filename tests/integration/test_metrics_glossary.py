"""`docs/metrics.md` has every metric that is logged, and none of ours that is not."""

import re
from pathlib import Path

import pytest

from arpo_trl import AEPOConfig, AEPOTrainer, ARPOConfig, ARPOTrainer
from tests import scripted_training


ROOT = Path(__file__).parents[2]
# Of transformers' Trainer, at the end of a run or an evaluation.
TIMES = re.compile(r"(train|eval)_(runtime|samples_per_second|steps_per_second|loss)|total_flos")
# Need what a scripted run on a CPU does not have: vLLM, a logger, a benchmark.
ELSEWHERE = re.compile(r"sampling/.*|kl|policy_loss|rollout/prefix_cache_hit_rate|profiling/.*|benchmark/.*")


@pytest.fixture(scope="module")
def glossary() -> dict[str, re.Pattern]:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    names = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    assert len(names) == len(set(names)) > 50
    return {name: re.compile(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(name))) for name in names}


@pytest.fixture(scope="module")
def logged(tiny_model_dir, tmp_path_factory) -> set[str]:
    names = set()
    for classes in ((ARPOTrainer, ARPOConfig), (AEPOTrainer, AEPOConfig)):
        trainer, batch = scripted_training.build(
            *classes,
            tiny_model_dir,
            tmp_path_factory.mktemp("run"),
            max_steps=1,
            logging_steps=1,
            save_strategy="no",
            beta=0.1,
        )
        trainer.train()
        trainer.evaluate(trainer.train_dataset)
        names |= {name for entry in trainer.state.log_history for name in entry if name != "step"}
    return {name for name in names if not TIMES.fullmatch(name)}


def test_every_logged_metric_is_explained(glossary, logged):
    unknown = {
        name
        for name in logged
        if not any(pattern.fullmatch(name.removeprefix("eval_")) for pattern in glossary.values())
    }
    assert not unknown


def test_every_explained_metric_is_logged(glossary, logged):
    missing = {
        name
        for name, pattern in glossary.items()
        if not ELSEWHERE.fullmatch(name) and not any(pattern.fullmatch(other) for other in logged)
    }
    assert not missing


def test_every_metric_named_in_the_code_is_explained(glossary):
    """Those too that no short run logs."""
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "arpo_trl").rglob("*.py"))
    named = set(re.findall(r'"((?:rollout|aepo|sampling|prefix_sharing)/[a-z_/]+)"', code))
    # A sum of squares, on its way to `aepo/initial_rollouts_std`.
    assert named - {"aepo/initial_rollouts_squared"} <= set(glossary) and len(named) > 25

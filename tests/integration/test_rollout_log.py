"""The rollout log of a trainer on rows from a script."""

import json
import logging

import pytest

from arpo_trl import AEPOConfig, AEPOTrainer, ARPOConfig, ARPOTrainer
from arpo_trl.reporting.rollout_log import RolloutLog, ScoredRollout, read_rollouts, token_texts
from arpo_trl.rollout.tree import RolloutTree
from tests import scripted_training


@pytest.mark.parametrize("classes", [(ARPOTrainer, ARPOConfig), (AEPOTrainer, AEPOConfig)])
def test_what_is_read_back_is_what_was_trained_on(classes, tiny_model_dir, tmp_path):
    trainer, batch = scripted_training.build(*classes, tiny_model_dir, tmp_path, rollout_log=True, attribution="hard")
    trainer.rollout_log.flush()
    trees = list(read_rollouts(tmp_path))
    assert len(trees) == 2 and all(tree["step"] == 0 and not tree["evaluation"] for tree in trees)
    rows = [(tree, row) for tree in trees for row in tree["rows"]]
    assert any(row["parent"] is not None for _, row in rows)
    scores = []
    for (tree, row), ids, mask in zip(
        rows, batch["completion_ids"], batch["completion_mask"] * batch["tool_mask"], strict=True
    ):
        path, segment = [], row["tail"]
        while segment is not None:
            path.append(tree["segments"][segment])
            segment = path[-1]["parent"]
        path.reverse()
        logged = [id for segment in path for id in segment["ids"]]
        assert logged == ids[: len(logged)].tolist() and row["tokens"] == len(logged)
        sampled = [int(segment["sampled"]) for segment in path for _ in segment["ids"]]
        assert sampled == mask[: len(logged)].tolist() and mask[len(logged) :].sum() == 0
        assert row["tool_turns"] == sum(not segment["sampled"] for segment in path)
        assert row["rewards"] == pytest.approx({"reward": scripted_training.reward([ids[: len(logged)].tolist()])[0]})
        scores.append(row["rewards"]["reward"])
        for segment in path:
            assert segment["text"] == trainer.processing_class.decode(segment["ids"])
            if segment["sampled"]:
                assert len(segment["logprobs"]) == len(segment["ids"])
                assert len(segment["entropies"]) == len(segment["watched"]) <= len(segment["ids"])
            else:
                assert all("Paris is the" in result["content"] for result in segment["results"])
        if row["parent"] is not None:
            assert any(row["slot"] in decision["children"] for decision in tree["decisions"])
    # One advantage a row, standardized in its group.
    for start, tree in zip((0, 4), trees, strict=True):
        assert sum(row["advantage"] for row in tree["rows"]) == pytest.approx(0, abs=1e-4)
        best = max(range(4), key=lambda slot: scores[start + slot])
        assert tree["rows"][best]["advantage"] == max(row["advantage"] for row in tree["rows"]) > 0
    prompt = trainer.processing_class.decode(batch["prompt_ids"][0][batch["prompt_mask"][0].bool()])
    assert trees[0]["prompt"] == prompt and "the capital of France" in prompt


def test_evaluation_goes_to_files_of_its_own(tiny_model_dir, tmp_path):
    trainer, _ = scripted_training.build(ARPOTrainer, ARPOConfig, tiny_model_dir, tmp_path, rollout_log=True)
    trainer.model.eval()
    inputs = [{"prompt": [{"role": "user", "content": "the capital of France"}]}] * trainer.num_generations_eval
    for _ in range(2):
        trainer._generate_and_score_completions(inputs)
    trainer.rollout_log.flush()
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == [
        "eval-000000-rank0.jsonl",
        "step-000000-rank0.jsonl",
    ]
    evaluated = list(read_rollouts(tmp_path, evaluation=True))
    assert len(evaluated) == 2 * trainer.num_generations_eval
    assert all(len(tree["rows"]) == 1 and not tree["decisions"] for tree in evaluated)
    assert len(list(read_rollouts(tmp_path, evaluation=False))) == 2


def rollout(step: int, tokens: int) -> ScoredRollout:
    tree = RolloutTree([[40, 41]])
    row = tree.root()
    row.append(sampled=True, ids=[50] * tokens).logprobs.extend([-1.0] * tokens)
    row.finish_reason = "stop"
    return ScoredRollout(step, False, [tree], [[float("nan")]], [0.0], ["reward"])


def test_the_oldest_steps_are_dropped(tiny_tokenizer, tmp_path):
    log = RolloutLog(tmp_path, tiny_tokenizer, max_mb=0.05)
    for step in range(10):
        log.write(rollout(step, 1000))
    log.flush()
    steps = [tree["step"] for tree in read_rollouts(tmp_path)]
    sizes = [path.stat().st_size for path in (tmp_path / "rollouts").iterdir()]
    assert steps == list(range(10 - len(steps), 10)) and 1 < len(steps) < 10
    assert sum(sizes) <= 0.05 * 2**20 < sum(sizes) + max(sizes)
    assert next(read_rollouts(tmp_path))["rows"][0]["rewards"] == {"reward": None}
    # A run that starts again in the same folder replaces its steps, and still keeps to the bound.
    again = RolloutLog(tmp_path, tiny_tokenizer, max_mb=0.05)
    again.write(rollout(9, 10))
    again.write(rollout(10, 20_000))
    again.flush()
    assert [(tree["step"], tree["rows"][0]["tokens"]) for tree in read_rollouts(tmp_path)] == [(10, 20_000)]


def test_a_log_that_cannot_be_written_warns_once(tiny_tokenizer, tmp_path, caplog):
    (tmp_path / "rollouts").write_text("a file where the folder should be")
    log = RolloutLog(tmp_path, tiny_tokenizer)
    with caplog.at_level(logging.WARNING):
        for step in range(20):
            log.write(rollout(step, 3))
        log.flush()
    assert len(caplog.records) == 1 and "rollout_log=False" in caplog.text
    with pytest.raises(FileNotFoundError, match="rollout_log=True"):
        list(read_rollouts(tmp_path))


def test_a_line_cut_off_by_a_kill_is_left_out(tiny_tokenizer, tmp_path):
    log = RolloutLog(tmp_path, tiny_tokenizer)
    log.write(rollout(0, 3))
    log.write(rollout(0, 4))
    log.flush()
    path = next((tmp_path / "rollouts").iterdir())
    path.write_bytes(path.read_bytes()[:-20])
    assert [tree["rows"][0]["tokens"] for tree in read_rollouts(path)] == [3]
    assert json.loads(path.read_text().splitlines()[0])["segments"][0]["sampled"]


def test_texts_of_tokens_that_split_a_character(tiny_tokenizer):
    ids = tiny_tokenizer.encode("a é 東 z", add_special_tokens=False)
    texts = token_texts(tiny_tokenizer, ids)
    assert "".join(texts) == "a é 東 z" and "" in texts and len(texts) == len(ids)

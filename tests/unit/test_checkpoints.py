"""Which checkpoint a run goes on from, and which are deleted."""

import os
from types import SimpleNamespace

import pytest
from trl import SFTConfig

from arpo_trl import ARPOConfig
from arpo_trl.training.checkpoints import (
    MANIFEST,
    SETTINGS,
    check_complete,
    delete_old_checkpoints,
    find_checkpoint,
    write_manifest,
)


@pytest.fixture
def args(tmp_path):
    return ARPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)


FILES = ("model.safetensors", "rng_state.pth", "rollouts_0.pt")


def make_checkpoint(args, step, complete=True, files=FILES):
    folder = os.path.join(args.output_dir, f"checkpoint-{step}")
    os.makedirs(os.path.join(folder, "optimizer_0"))
    for name in (*files, "optimizer_0/shard"):
        with open(os.path.join(folder, name), "w") as file:
            file.write(name)
    if complete:
        write_manifest(folder, args)
        # Clocks are too coarse for folders made one after another.
        os.utime(os.path.join(folder, MANIFEST), ns=(0, 1_000 + step))
    return folder


@pytest.mark.parametrize("value", [None, False, "false", "False", "none"])
def test_no_resumption(args, value):
    make_checkpoint(args, 1)
    assert find_checkpoint(value, args) is None


@pytest.mark.parametrize("value", [True, "true", "True"])
def test_the_newest_complete_checkpoint(args, value, caplog):
    make_checkpoint(args, 2)
    whole = make_checkpoint(args, 10)
    cut = make_checkpoint(args, 11)
    with open(os.path.join(cut, "optimizer_0", "shard"), "w"):
        pass
    make_checkpoint(args, 12, complete=False)
    os.mkdir(os.path.join(args.output_dir, "checkpoint-best"))
    assert find_checkpoint(value, args) == whole
    assert "checkpoint-12 is not complete: it has no manifest.json" in caplog.text
    assert "checkpoint-11 is not complete: optimizer_0/shard has 0 of 17 bytes" in caplog.text


def test_without_a_complete_checkpoint_the_run_starts_at_the_beginning(args, caplog):
    make_checkpoint(args, 1, complete=False)
    assert find_checkpoint("true", args) is None
    assert "starts at the beginning" in caplog.text


def test_a_named_checkpoint_must_be_complete(args):
    assert find_checkpoint(make_checkpoint(args, 1), args).endswith("checkpoint-1")
    with pytest.raises(ValueError, match="resume_from_checkpoint=true for the newest"):
        find_checkpoint(make_checkpoint(args, 2, complete=False), args)
    with pytest.raises(ValueError, match="save_only_model"):
        find_checkpoint(make_checkpoint(args, 3, files=["model.safetensors"]), args)
    with pytest.raises(ValueError, match="'nowhere' is not a folder"):
        find_checkpoint("nowhere", args)


def test_other_sizes_are_refused(args):
    folder = make_checkpoint(args, 1, complete=False)
    others = {**{name: getattr(args, name) for name in SETTINGS}, "world_size": 2, "num_generations": 4}
    write_manifest(folder, SimpleNamespace(**others))
    with pytest.raises(ValueError, match="world_size=2, num_generations=4, now it is world_size=1, num_gen.*=8"):
        find_checkpoint(folder, args)


def test_a_checkpoint_of_another_kind_of_trainer_is_refused(args):
    """One of supervised training by a run of reinforcement learning, and the other way round."""
    supervised = SFTConfig(output_dir=args.output_dir, use_cpu=True, bf16=False)
    folder = make_checkpoint(supervised, 1)
    assert find_checkpoint(folder, supervised) == folder
    with pytest.raises(ValueError, match="num_generations=None, .* now it is .*num_generations=8"):
        find_checkpoint(folder, args)
    with pytest.raises(ValueError, match="num_generations=8, .* now it is .*num_generations=None"):
        find_checkpoint(make_checkpoint(args, 2), supervised)


def test_a_manifest_is_whole_or_not_there(args, monkeypatch):
    """Killed while it is written, the checkpoint counts as incomplete."""
    folder = make_checkpoint(args, 1, complete=False)

    def killed(file):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        write_manifest(folder, args)
    with pytest.raises(ValueError, match="not complete"):
        check_complete(folder)


def test_deletion_leaves_the_last_completed_ones(args):
    steps = {step: make_checkpoint(args, step, complete=step != 7) for step in (3, 4, 6, 7)}
    # The run went back from 6 to 4, and has come to 5.
    steps[5] = make_checkpoint(args, 5)
    os.utime(os.path.join(steps[5], MANIFEST), ns=(0, 2_000))

    def left():
        return [step for step, folder in steps.items() if os.path.isdir(folder)]

    for no_limit in (None, 0):
        delete_old_checkpoints(args.output_dir, no_limit)
        assert len(left()) == 5
    delete_old_checkpoints(args.output_dir, 3, keep=steps[3])
    assert left() == [3, 6, 5]
    delete_old_checkpoints(args.output_dir, 1, keep=steps[3])
    assert left() == [3, 5]
    delete_old_checkpoints(args.output_dir, 1)
    assert left() == [5]

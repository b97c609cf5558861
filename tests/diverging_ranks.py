"""Two ranks of a tensor parallel group with scripted engines: in step, failing, and made to differ on purpose."""

from datetime import timedelta

import torch.distributed as dist

from arpo_trl.algorithms.fork_rules import BranchingOptions
from arpo_trl.rollout.engines.tensor_parallel import RanksDiverged, TensorParallelRollout
from arpo_trl.rollout.environments import Environments
from arpo_trl.rollout.sampler import Limits, Prompt, Sampler
from arpo_trl.tools.runner import ToolRunner
from tests.scripted import FIRST_WORD, STOP, VOCAB, NumberDialect, ScriptedEngine, hashed, random_token


def tool(number: int) -> str:
    """Says a number.

    Args:
        number: Which.
    """
    return "word " * (number % 7)


def rollout(engine: ScriptedEngine, fails: bool = False) -> list:
    group = TensorParallelRollout(engine, 2, timedelta(seconds=30))
    with ToolRunner([tool]) as runner:
        options = BranchingOptions(alpha=0.9, window=3)
        sampler = Sampler(group.engine, NumberDialect(), runner, Limits(400), options, 4, VOCAB, seed_requests=True)

        def sample(brought: list) -> list:
            if fails:
                raise ValueError("no sampling today")
            shared = Environments({"tool": tool})
            trees = iter(sampler.run([Prompt(ids, row, shared) for part in brought for ids, row in part]))
            return [[next(trees) for _ in part] for part in brought]

        rank = dist.get_rank()
        mine = [([[FIRST_WORD + rank]] * 8, 16 * rank + 8 * index) for index in range(1 + rank)]
        return group.run(mine, sample)


class RefusingEngine(ScriptedEngine):
    """Takes two of three requests; the ranks that follow must not hear of the others."""

    def submit(self, request):
        if hashed(request.id) % 3 == 0:
            raise ValueError("no room for it")
        super().submit(request)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    trees = rollout(ScriptedEngine(random_token(1, 0.02)))
    assert len(trees) == 1 + dist.get_rank() and all(len(tree.trajectories) == 8 for tree in trees)
    assert all(tree.rows(STOP)[0].ids for tree in trees)
    print("same rows everywhere", flush=True)

    try:
        rollout(ScriptedEngine(random_token(1)), fails=True)
    except (ValueError, RuntimeError) as error:
        assert "no sampling today" in str(error)
        print("leader failure seen", flush=True)

    rows = [row for tree in rollout(RefusingEngine(random_token(1, 0.1))) for row in tree.trajectories]
    refused = [row for row in rows if row.finish_reason == "error"]
    assert 0 < len(refused) < len(rows) == 8 * (1 + dist.get_rank())
    print("refused rows end alone", flush=True)

    for stop_share, length in ((0.001, "long"), (0.5, "short")):
        try:
            rollout(ScriptedEngine(random_token(dist.get_rank(), stop_share)))
        except RanksDiverged:
            print(f"RanksDiverged caught in a {length} rollout", flush=True)

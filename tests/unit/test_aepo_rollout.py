"""AEPO's rollout on a scripted engine: the budget's probe, decisions that wait for it, the branch penalty."""

import dataclasses

import pytest

from arpo_trl.algorithms.budget import initial_rollouts
from arpo_trl.algorithms.entropy_change import normalize_entropy
from arpo_trl.algorithms.fork_rules import BranchingOptions
from arpo_trl.rollout.environments import Environments
from arpo_trl.rollout.sampler import Limits, Prompt, Sampler
from arpo_trl.tools.runner import ToolRunner
from tests.scripted import CALL, FIRST_WORD, STOP, VOCAB, NumberDialect, ScriptedEngine


AEPO = BranchingOptions(alpha=1.0, beta=0.0, window=2, dynamic_budget=True)


def tool(number: int) -> str:
    """Says a number.

    Args:
        number: Which.
    """
    return str(number)


@pytest.fixture(scope="module")
def runner():
    with ToolRunner([tool]) as runner:
        yield runner


def talker(calls, entropies, words=3):
    """Every turn has `words` tokens; root r calls the tool `calls[r]` times; turn t has entropy `entropies[t]`."""

    def model(request, sampled):
        _, _, name, turns = request.id.split("/")
        turns, wanted = int(turns), calls.get(int(name.split(".")[0]), 1)
        entropy = entropies[min(turns, len(entropies) - 1)]
        if len(sampled) < words - 1:
            return FIRST_WORD + len(sampled), entropy
        return (CALL if turns < wanted else STOP), entropy

    return model


def rollout(runner, model, options, minimum=1, sizes=(8,), **kwargs):
    sampler = Sampler(
        ScriptedEngine(model),
        NumberDialect(),
        runner,
        Limits(completion_tokens=100, tool_turns=4),
        options,
        num_initial=minimum,
        vocab_size=VOCAB,
        lockstep=True,
    )
    prompts, row = [], 0
    for size in sizes:
        prompts.append(Prompt([[7, 8, FIRST_WORD + row]] * size, row, Environments({"tool": tool})))
        row += size
    return sampler.run(prompts, **kwargs), sampler.engine


def starts(engine):
    """Places of all turns in the order in which the engine got them: (path, tool turns before)."""
    return [tuple(request_id.split("/")[2:]) for request_id in engine.requests]


@pytest.mark.parametrize("entropies", [(2.0, 2.0), (3.5, 0.1), (0.1, 3.5)])
@pytest.mark.parametrize("probe", ["trajectory", "first_tool"])
def test_the_probe_divides_the_rows_and_is_one(runner, entropies, probe):
    options = dataclasses.replace(AEPO, budget_beta=4.0, probe=probe)
    (tree,), engine = rollout(runner, talker({}, entropies), options, minimum=2)
    root, after = (normalize_entropy([h, h], options.norm, options.window, VOCAB) for h in entropies)
    expected = initial_rollouts(8, [root], [after], 4.0, 2)
    assert expected == {(2.0, 2.0): 4, (3.5, 0.1): 8, (0.1, 3.5): 2}[entropies]
    roots = [t for t in tree.trajectories if t.parent is None and t.can_fork]
    assert len(roots) == expected and len(tree.trajectories) == 8
    assert tree.trajectories[0] is roots[0] and starts(engine)[0] == ("0", "0")


def test_rows_needed_in_any_case_start_with_the_probe(runner):
    live_at_first = []

    def model(request, sampled):
        live_at_first.append(request.id)
        return talker({}, (1.0,))(request, sampled)

    _, engine = rollout(runner, model, AEPO, minimum=3)
    assert [request_id.split("/")[2] for request_id in live_at_first[:3]] == ["0", "1", "2"]
    # The others start when the probe has ended, after its two turns.
    later = starts(engine)[3:]
    assert later[:3] == [("0", "1"), ("1", "1"), ("2", "1")] and ("3", "0") in later[3:]


def test_decisions_wait_for_the_budget_and_are_taken_in_order(runner):
    """Root 1 is done after one call, the probe after three: what root 1 has to decide waits for the probe's end."""
    (tree,), engine = rollout(runner, talker({0: 3}, (1.0,)), AEPO, minimum=2, sizes=(4,))
    assert [t.name for t in tree.trajectories] == ["0", "1", "0.1:0", "1.1:0"]
    assert [(d["slot"], d["step"]) for d in tree.decisions] == [(0, 1), (1, 1)]
    order = starts(engine)
    assert order.index(("0", "3")) < order.index(("0.1:0", "1")) < order.index(("1.1:0", "1"))


def test_the_first_tool_step_can_fix_the_budget(runner):
    options = dataclasses.replace(AEPO, probe="first_tool")
    (tree,), engine = rollout(runner, talker({0: 3}, (1.0,)), options, minimum=2, sizes=(4,))
    assert [t.name for t in tree.trajectories] == ["0", "1", "0.1:0", "1.1:0"]
    order = starts(engine)
    assert order.index(("0.1:0", "1")) < order.index(("0", "3"))


def test_several_probes_decide_together(runner):
    """A variant: H_root and H̄_tool are means over the first rows."""

    def model(request, sampled):
        root = request.id.split("/")[2]
        return talker({}, {"0": (3.5, 0.1), "1": (0.1, 3.5)}.get(root, (1.0,)))(request, sampled)

    options = dataclasses.replace(AEPO, budget_beta=4.0, num_probes=2)
    (tree,), _ = rollout(runner, model, options, minimum=2)
    assert sum(t.parent is None and t.can_fork for t in tree.trajectories) == 4


def test_other_prompts_do_not_wait_for_a_probe(runner):
    one = rollout(runner, talker({}, (1.0,)), AEPO, sizes=(6,))[1].steps
    assert rollout(runner, talker({}, (1.0,)), AEPO, sizes=(6, 6, 6))[1].steps == one


def test_the_penalty_counts_consecutive_forks_on_a_path(runner):
    """With γ = 1 a fork at a high-entropy step rules out a fork at the next step, which in turn allows one again."""
    options = BranchingOptions(alpha=1.0, beta=0.2, window=2, penalty="linear", gamma=1.0)
    (tree,), _ = rollout(runner, talker({0: 4}, (1.0, 3.0)), options, minimum=1, sizes=(4,))
    assert [t.name for t in tree.trajectories] == ["0", "0.1:0", "0.3:0", "0.1:0.3:0"]
    of_root = [(d["step"], d["consecutive"], bool(d["children"])) for d in tree.decisions if d["slot"] == 0]
    assert of_root == [(1, 0, True), (2, 1, False), (3, 0, True)]
    # The child inherits the fork it came from: its step 2 is ruled out, its step 3 is not.
    of_child = [(d["step"], d["consecutive"], bool(d["children"])) for d in tree.decisions if d["slot"] == 1]
    assert of_child == [(2, 1, False), (3, 0, True)]


def test_without_a_rise_of_entropy_nothing_is_penalized(runner):
    options = BranchingOptions(alpha=1.0, beta=0.0, window=2, penalty="linear", gamma=1.0)
    (tree,), _ = rollout(runner, talker({0: 3}, (1.0, 0.5)), options, minimum=1, sizes=(16,))
    assert all(d["consecutive"] == 0 for d in tree.decisions) and tree.decisions


def test_evaluation_has_neither_probe_nor_forks(runner):
    (tree,), engine = rollout(runner, talker({}, (1.0,)), AEPO, sizes=(5,), training=False)
    assert not any(t.can_fork for t in tree.trajectories)
    assert starts(engine)[:5] == [(str(row), "0") for row in range(5)]

"""One prompt's rows while they grow: which of them fork, and when the missing ones start afresh.

A group is told when the entropy of a turn is known ([`Group.observe`]) and when a row has ended ([`Group.settle`]); it
answers with the rows to start. It never makes a row wait.
"""

from dataclasses import dataclass
from typing import Any

from ..algorithms.budget import fork_capacity, initial_rollouts
from ..algorithms.draws import draw
from ..algorithms.entropy_change import entropy_change, normalize_entropy
from ..algorithms.fork_rules import BranchingOptions, ForkStep, branch_score, forks, next_consecutive
from .environments import Environments
from .tree import RolloutTree, Segment, Trajectory


@dataclass(slots=True, eq=False)
class Decision:
    """Whether to fork `trajectory` after its tool step `step`: due, not yet taken.

    Args:
        at (`Segment`):
            The tool result to fork from.
        entropies (`list[float]`):
            Entropies in nats of the first tokens sampled after it.
        delta (`float`):
            ΔH_t, normalised.
        snapshot (`Any`):
            The row's environment after the step, where the row goes on before the decision is taken.
    """

    trajectory: Trajectory
    step: int
    at: Segment
    entropies: list[float]
    delta: float
    snapshot: Any = None


class Group:
    """Decides for one prompt.

    Args:
        tree ([`RolloutTree`]):
            Where the rows grow.
        environments ([`Environments`]):
            Forked with the rows.
        options ([`BranchingOptions`], *optional*):
            When to fork; `None` starts independent rows.
        num_initial (`int`):
            N; with a dynamic budget the rows that start whatever the pilot says.
        vocab_size (`int`):
            V, for normalising entropies.
        max_turns (`int`):
            Tool turns a row may have.
        key (`tuple[int, str, int, int]`):
            `(seed, mode, generation, row)`: with path and step what each draw derives from.
    """

    def __init__(
        self,
        tree: RolloutTree,
        environments: Environments,
        options: BranchingOptions | None,
        num_initial: int,
        vocab_size: int,
        max_turns: int,
        key: tuple[int, str, int, int],
    ):
        self.tree, self.environments = tree, environments
        self.branching, self.options = options is not None, options or BranchingOptions()
        self.num_initial = None if options is not None and options.dynamic_budget else num_initial
        self.vocab_size, self.max_turns, self.key = vocab_size, max_turns, key
        self.pending: list[Decision] = []
        self._first = min(num_initial, tree.size)
        self._observed: dict[int, int] = {}
        self._tool_entropies: dict[int, list[float]] = {}

    def start(self) -> list[Trajectory]:
        """The first rows: all without branching, else N, or as many as AEPO needs whatever its pilot says."""
        if not self.branching:
            return [self.tree.root(can_fork=False) for _ in range(self.tree.size)]
        return [self.tree.root() for _ in range(self._first)]

    def watch(self, trajectory: Trajectory) -> int:
        """How many first tokens of the row's next turn are to be watched."""
        if not self.branching or not trajectory.can_fork:
            return 0
        # A fork does not decide again on the step that it comes from.
        seen = self._observed.get(trajectory.slot, -1) >= trajectory.turns
        return self.options.window if not seen and (self.tree.missing or not trajectory.turns) else 0

    def observe(self, trajectory: Trajectory, entropies: list[float]) -> list[Trajectory]:
        """Takes the entropies of the first tokens of the row's present turn; returns the rows to start."""
        step = self._observed[trajectory.slot] = trajectory.turns
        if step == 0:
            trajectory.baseline = entropies
        else:
            options = self.options
            delta = entropy_change(entropies, trajectory.baseline or [], options.norm, options.window, self.vocab_size)
            self._tool_entropies.setdefault(trajectory.slot, []).append(self._normalize(entropies))
            at = trajectory.turn.parent
            assert at is not None  # a tool result: this is not the first turn
            self.pending.append(Decision(trajectory, step, at, entropies, delta))
        return self.settle()

    def settle(self) -> list[Trajectory]:
        """Takes every decision that can be taken now; returns the rows to start."""
        started = self._fix_budget()
        if self.num_initial is None:
            return started
        while due := self._next_due():
            self.pending.remove(due)
            started += self._decide(due)
        return started + self._fill()

    def hold(self, trajectory: Trajectory) -> None:
        """The row is about to change its environment: keeps its present state for decisions not yet taken."""
        for decision in self.pending:
            if decision.trajectory is trajectory and decision.snapshot is None:
                decision.snapshot = self.environments.snapshot(trajectory.slot)

    def _normalize(self, entropies: list[float]) -> float:
        return normalize_entropy(entropies, self.options.norm, self.options.window, self.vocab_size)

    def _fix_budget(self) -> list[Trajectory]:
        """AEPO: N from the first rows, the pilots, as soon as they have shown enough."""
        if self.num_initial is not None:
            return []
        probes = self.tree.trajectories[: self.options.num_probes]
        for probe in probes:
            stepped = self.options.probe == "first_tool" and self._tool_entropies.get(probe.slot)
            if not (probe.finish_reason or stepped):
                return []
        self.num_initial = initial_rollouts(
            self.tree.size,
            [self._normalize(probe.baseline or []) for probe in probes],
            [entropy for probe in probes for entropy in self._tool_entropies.get(probe.slot, [])],
            self.options.budget_beta,
            self._first,
        )
        return [self.tree.root() for _ in range(self.num_initial - len(self.tree.trajectories))]

    def _forkable(self) -> list[Trajectory]:
        return [t for t in self.tree.trajectories if t.can_fork and t.finish_reason is None]

    def _undecided_step(self, trajectory: Trajectory) -> bool:
        """Whether the row has had a tool result whose following entropy is not known yet."""
        return trajectory.turns > self._observed.get(trajectory.slot, 0)

    def _next_due(self) -> Decision | None:
        """The decision to take now. Ranked: of a step that every live row has reached, largest score first."""
        if not self.pending or self.options.order == "eager":
            return self.pending[0] if self.pending else None
        step = min(decision.step for decision in self.pending)
        if any(self._observed.get(t.slot, 0) < step for t in self._forkable()):
            return None
        return min(
            (decision for decision in self.pending if decision.step == step),
            key=lambda decision: (-self._score(decision), self._uniform(decision)),
        )

    def _score(self, decision: Decision) -> float:
        relative = normalize_entropy(decision.entropies, "mean", self.options.window, self.vocab_size)
        return branch_score(decision.delta, self.options, decision.trajectory.consecutive, relative)

    def _uniform(self, decision: Decision) -> float:
        return draw(*self.key, decision.trajectory.path, decision.step)

    def _decide(self, decision: Decision) -> list[Trajectory]:
        parent, score = decision.trajectory, self._score(decision)
        step = ForkStep(score, self._uniform(decision), decision.delta, decision.step, parent.consecutive)
        wanted = forks(step, self.options)
        children = []
        for child in range(min(self.options.factor, self.tree.missing) if wanted else 0):
            fork = self.tree.fork(parent, decision.at, decision.step, child)
            self._observed[fork.slot] = decision.step
            children.append(fork)
        self.environments.fork(parent.slot, [fork.slot for fork in children], decision.snapshot)
        self.tree.decisions.append(
            {
                "slot": parent.slot,
                "step": decision.step,
                "delta_entropy": decision.delta,
                "score": score,
                "consecutive": parent.consecutive,
                "wanted": wanted,
                "children": [fork.slot for fork in children],
            }
        )
        parent.consecutive = next_consecutive(parent.consecutive, decision.delta, bool(children))
        for fork in children:
            fork.consecutive = parent.consecutive
        return children

    def _fill(self) -> list[Trajectory]:
        """Starts all missing rows afresh once the live ones cannot fork enough."""
        missing = self.tree.missing
        if not missing:
            self.pending.clear()
            return []
        forkable = self._forkable()
        live = [
            (
                self.max_turns - t.turns + self._undecided_step(t),
                [self.max_turns - d.step for d in self.pending if d.trajectory is t],
            )
            for t in forkable
        ]
        rest = [(0, [self.max_turns - d.step]) for d in self.pending if d.trajectory not in forkable]
        if fork_capacity(live + rest, self.options.factor, missing) >= missing:
            return []
        self.pending.clear()
        return [self.tree.root(can_fork=False) for _ in range(missing)]

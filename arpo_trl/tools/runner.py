"""Runs the tool calls of many trajectories at once, so that no call can hold up a batch.

Every call runs in a thread of its own; an async tool runs on one event loop, its thread waits for it. One scheduler
thread starts what the limits allow and answers what is over time. A call that hangs is answered and abandoned: its
thread ends whenever the tool lets it, and what it then says is dropped. A tool that hangs in C without giving the
interpreter back stops the whole process, unless its option `isolate` puts it into a process of its own.
"""

import inspect
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tenacity

from .cache import STORED_CHARS, Answer, ToolCache, argument_owner
from .calling import (
    bind_arguments,
    describe_error,
    is_transient,
    may_retry,
    parameters_of,
    retry_after,
    shorten,
    to_content,
    tools_by_name,
)
from .contract import Failure, InfrastructureError, ToolCall, ToolContext, ToolError, ToolResult
from .event_loop import EventLoop
from .isolation import IsolatedTool
from .options import ToolOptions
from .rate import RateLimit, rate_file
from .stats import ToolStats


logger = logging.getLogger(__name__)

UNKNOWN_TOOL = "unknown_tool"
UNUSABLE = "The environment of this call is not used any more: a call of it was given up and may still change it."


@dataclass(eq=False)
class _Turn:
    key: Hashable
    results: list[ToolResult | None]


@dataclass(eq=False)
class _Job:
    """One call on its way. `over` is set once it is answered, by itself or by the scheduler.

    `owner` is the environment whose method it is, and `following` the next call of the turn on it.
    """

    turn: _Turn
    index: int
    name: str
    tool: Callable | IsolatedTool
    arguments: dict[str, Any]
    options: ToolOptions
    cache_key: str | None = None
    owner: Any = None
    following: "_Job | None" = None
    over: threading.Event = field(default_factory=threading.Event)
    started: float = 0.0
    running_future: Future | None = None

    @property
    def deadline(self) -> float:
        return self.started + self.options.timeout_s


class ToolRunner:
    """Runs tool calls in parallel, within each tool's limits.

    Args:
        tools (`Iterable[Callable]` or `Mapping[str, Callable]`, *optional*):
            The tools every trajectory may call.
        options (`Mapping[str, ToolOptions]`, *optional*):
            Options by tool name; a tool without an entry runs with the defaults.
        cache ([`ToolCache`], *optional*):
            Where tools whose option `cache` is not `"off"` keep their answers.
        rate_folder (`Path`, *optional*):
            Folder in which the processes of a run share each tool's `rate_limit`. Without it this process has the rates
            for itself.

    Raises:
        ValueError: Where two tools have one name, or options do not go with the tools.
    """

    def __init__(
        self,
        tools: Iterable[Callable] | Mapping[str, Callable] = (),
        options: Mapping[str, ToolOptions] | None = None,
        cache: ToolCache | None = None,
        rate_folder: Path | None = None,
    ):
        self._tools = tools_by_name(tools.values() if isinstance(tools, Mapping) else tools)
        self._options = dict(options or {})
        if unknown := self._options.keys() - self._tools.keys():
            raise ValueError(f"Options for tools that do not exist: {', '.join(sorted(unknown))}.")
        cached = [name for name, o in self._options.items() if o.cache != "off"]
        if cached and cache is None:
            raise ValueError(f"Tools {', '.join(cached)} ask for a cache; pass `cache=ToolCache(folder)`.")
        for name in cached:
            tool = self._tools[name]
            if parameters_of(tool).context and not hasattr(argument_owner(tool), "normalise_arguments"):
                raise ValueError(
                    f"Tool '{name}' takes a context, and has no `normalise_arguments` to say what of it its answers "
                    "depend on; set `cache: off`."
                )
        self._cache = cache
        self._isolated = {name: IsolatedTool(self._tools[name]) for name, o in self._options.items() if o.isolate}
        self._loop = EventLoop()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # for the scheduler
        self._finished_turn = threading.Condition(self._lock)  # for `poll`
        self._turns: dict[Hashable, _Turn] = {}
        self._finished: deque[_Turn] = deque()
        self._waiting: dict[str, deque[_Job]] = defaultdict(deque)
        self._running: dict[str, set[_Job]] = defaultdict(set)
        self._rates = {
            name: RateLimit(o.rate_limit, rate_folder and rate_file(rate_folder, name))
            for name, o in self._options.items()
            if o.rate_limit is not None
        }
        self._abandoned: dict[int, Any] = {}  # environments by their id
        self._stats: dict[str, ToolStats] = defaultdict(ToolStats)
        self._closed = False
        self._scheduler = threading.Thread(target=self._schedule, name="tool-scheduler", daemon=True)
        self._scheduler.start()

    def start(
        self,
        key: Hashable,
        calls: list[ToolCall],
        tools: Mapping[str, Callable] | None = None,
        context: ToolContext | None = None,
    ) -> None:
        """Starts the calls of one assistant turn; returns at once.

        Args:
            key (`Hashable`):
                Names the turn. Not a key that is still pending.
            calls (`list[ToolCall]`):
                In the order they were written. They run in parallel, those on one environment one after another.
            tools (`Mapping[str, Callable]`, *optional*):
                Tools of this trajectory alone, by name (methods of its environment); they go before the runner's own.
            context ([`ToolContext`], *optional*):
                Handed to the tools that declare an argument `context`.
        """
        tools = {**self._tools, **(tools or {})}
        turn = _Turn(key, [None] * len(calls))
        jobs = [self._prepare(turn, index, call, tools, context) for index, call in enumerate(calls)]
        with self._lock:
            if self._closed:
                raise RuntimeError("The tool runner is closed.")
            if key in self._turns:
                raise ValueError(f"Turn {key!r} is still pending.")
            self._turns[key] = turn
            last: dict[int, _Job] = {}  # of each environment's calls
            for job in jobs:
                if not isinstance(job, _Job):
                    self._stats[job.name if job.name in tools else UNKNOWN_TOOL].add(job)
                elif id(job.owner) in last:
                    last[id(job.owner)].following = job
                else:
                    self._waiting[job.name].append(job)
                if isinstance(job, _Job) and job.owner is not None:
                    last[id(job.owner)] = job
            self._finish_if_complete(turn)
            self._changed.notify()

    def poll(self, timeout: float | None = 0) -> list[tuple[Hashable, list[ToolResult]]]:
        """Turns that have finished since the last poll, each with its results in the order of its calls.

        Args:
            timeout (`float`, *optional*, defaults to `0`):
                How many seconds to wait for the first one; `None` waits as long as it takes. With nothing pending it
                returns at once.
        """
        with self._lock:
            self._finished_turn.wait_for(lambda: self._finished or not self._turns, timeout)
            done = [(turn.key, [result for result in turn.results if result is not None]) for turn in self._finished]
            for turn in self._finished:
                del self._turns[turn.key]
            self._finished.clear()
        return done

    def pending(self) -> int:
        """Turns that were started and not handed out yet."""
        with self._lock:
            return len(self._turns)

    def running(self) -> int:
        """Calls that run at this moment; those that were answered and abandoned are not counted."""
        with self._lock:
            return sum(len(jobs) for jobs in self._running.values())

    def cancel(self, key: Hashable) -> None:
        """Drops a turn: what waits never starts, what runs is abandoned, nothing is reported. Unknown keys are
        ignored."""
        with self._lock:
            turn = self._turns.pop(key, None)
            if turn is None:
                return
            if turn in self._finished:
                self._finished.remove(turn)
            for name, waiting in self._waiting.items():
                self._waiting[name] = deque(job for job in waiting if job.turn is not turn)
            for jobs in self._running.values():
                for job in [job for job in jobs if job.turn is turn]:
                    self._abandon(job)
            self._changed.notify()
            self._finished_turn.notify_all()

    def acts_on(self, environment: Any) -> bool:
        """Whether a call that was given up may still act on `environment`, so that nothing else may."""
        return id(environment) in self._abandoned

    def forget_environments(self) -> None:
        """Of the environments of a rollout that is over nobody will ask again."""
        self._abandoned = {}

    def stats(self) -> dict[str, ToolStats]:
        """Counts per tool since the last call of this method. Warns of a tool none of whose calls worked."""
        with self._lock:
            stats, self._stats = dict(self._stats), defaultdict(ToolStats)
        for name, s in stats.items():
            if s.calls >= 4 and s.failures == s.calls and name != UNKNOWN_TOOL:
                logger.warning(
                    "All %d calls of tool '%s' failed in this rollout (%d timeouts, %d infrastructure failures); the "
                    "last answer was: %s",
                    s.calls,
                    name,
                    s.timeouts,
                    s.infrastructure,
                    s.last_error,
                )
        return stats

    def close(self) -> None:
        """Abandons whatever is left and ends the runner's own threads and processes."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for jobs in self._running.values():
                for job in list(jobs):
                    self._abandon(job)
            self._turns.clear()
            self._finished.clear()
            self._waiting.clear()
            self._changed.notify_all()
            self._finished_turn.notify_all()
        self._scheduler.join()
        for tool in self._isolated.values():
            tool.close()
        self._loop.close()

    def __enter__(self) -> "ToolRunner":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _prepare(
        self,
        turn: _Turn,
        index: int,
        call: ToolCall,
        tools: Mapping[str, Callable],
        context: ToolContext | None,
    ) -> _Job | ToolResult:
        """A job, or the answer to a call that needs none: it cannot be made, or the cache knows it."""
        name = shorten(str(call.name), 200)
        options = self._options.get(name, ToolOptions())
        tool = tools.get(name)
        begun = time.monotonic()
        try:
            if call.error is not None:
                raise ToolError(call.error)
            if tool is None:
                raise ToolError(f"There is no tool '{name}'; the tools are: {', '.join(tools) or 'none'}.")
            arguments = bind_arguments(tool, call.arguments, context)
            if tool is not self._tools.get(name):  # it has a state: not cached, not isolated, not tried again
                owner = getattr(tool, "__self__", None)
                if self.acts_on(owner):
                    raise InfrastructureError(UNUSABLE)
                return _Job(turn, index, name, tool, arguments, replace(options, max_retries=0), owner=owner)
            key = answer = None
            if self._cache is not None and options.cache != "off":
                # Answered here, a hit needs no thread, no place among the running calls, no share of the rate limit.
                key = self._cache.key(tool, arguments, options.version)
                answer = self._cache.get(key) if options.cache != "record" else None
            if answer is None:
                return _Job(turn, index, name, self._isolated.get(name, tool), arguments, options, key)
            content, failure = answer
            result = ToolResult(name, to_content(content, options.max_output_chars), failure, cached=True)
        except Exception as error:  # of a tool's `normalise_arguments`, too
            content = to_content(describe_error(error), options.max_output_chars)
            result = ToolResult(name, content, _kind(error), executed=False)
        result.latency_s = time.monotonic() - begun
        turn.results[index] = result
        return result

    # The scheduler's thread. Everything it touches is guarded by the lock.

    def _schedule(self) -> None:
        with self._lock:
            while not self._closed:
                now = time.monotonic()
                self._expire(now)
                jobs, next_start = self._take_waiting(now)
                if jobs:
                    self._start_threads(jobs)
                    continue
                wake = [job.deadline for jobs in self._running.values() for job in jobs]
                wake += [] if next_start is None else [next_start]
                self._changed.wait(min(wake) - time.monotonic() if wake else None)

    def _expire(self, now: float) -> None:
        """Answers what is over time."""
        for jobs in self._running.values():
            for job in [job for job in jobs if job.deadline <= now]:
                text = f"The call of '{job.name}' took longer than {job.options.timeout_s:g} s and was given up."
                failure: Failure = "timeout"
                if job.owner is not None:
                    text, failure = f"{text} {UNUSABLE}", "infrastructure"
                self._abandon(job)
                self._answer(job, ToolResult(job.name, text, failure, now - job.started))

    def _take_waiting(self, now: float) -> tuple[list[_Job], float | None]:
        """What the limits allow to start, now counted as running, and when a rate limit allows the next start."""
        jobs, next_start = [], None
        for name, waiting in self._waiting.items():
            while waiting and len(self._running[name]) < waiting[0].options.concurrency:
                try:
                    wait = self._rates[name].take() if name in self._rates else 0.0
                except OSError as error:
                    text = f"The rate limit of '{name}' cannot be kept: {error}"
                    self._answer(waiting.popleft(), ToolResult(name, text, "infrastructure", executed=False))
                    continue
                if wait:
                    next_start = min(now + wait, next_start or float("inf"))
                    break
                job = waiting.popleft()
                job.started = time.monotonic()
                self._running[name].add(job)
                jobs.append(job)
        return jobs, next_start

    def _start_threads(self, jobs: list[_Job]) -> None:
        """Starts a thread for each job, without the lock meanwhile: a start takes long, and the rollout need not wait."""
        failed = []
        self._lock.release()
        try:
            for job in jobs:
                try:
                    threading.Thread(target=self._run, args=(job,), name=f"tool-{job.name}", daemon=True).start()
                except RuntimeError as error:  # no more threads, of which calls that hang keep theirs
                    failed.append((job, error))
        finally:
            self._lock.acquire()
        for job, reason in failed:
            self._abandon(job)
            text = f"The call cannot be started: {reason}"
            self._answer(job, ToolResult(job.name, text, "infrastructure", executed=False))

    def _abandon(self, job: _Job) -> None:
        self._running[job.name].discard(job)
        job.over.set()
        if job.owner is not None:
            self._abandoned[id(job.owner)] = job.owner
        if job.running_future is not None:
            job.running_future.cancel()
            self._loop.check()

    def _answer(self, job: _Job, result: ToolResult) -> None:
        self._stats[job.name].add(result)
        job.turn.results[job.index] = result
        self._finish_if_complete(job.turn)
        if (following := job.following) is None:
            return
        if self.acts_on(following.owner):
            self._answer(following, ToolResult(following.name, UNUSABLE, "infrastructure", executed=False))
        else:
            self._waiting[following.name].append(following)
            self._changed.notify()

    def _finish_if_complete(self, turn: _Turn) -> None:
        if None not in turn.results and self._turns.get(turn.key) is turn:
            self._finished.append(turn)
            self._finished_turn.notify_all()

    # The call's own thread.

    def _run(self, job: _Job) -> None:
        cached, executed = False, True
        try:
            content, failure, cached = self._outcome(job)
        except Exception as error:  # of the cache; the tool's are read in `_call`
            content, failure = to_content(describe_error(error), job.options.max_output_chars), _kind(error)
            executed = False
        result = ToolResult(job.name, content, failure, time.monotonic() - job.started, cached, executed)
        with self._lock:
            if not job.over.is_set():
                job.over.set()
                self._running[job.name].discard(job)
                self._answer(job, result)
                self._changed.notify()

    def _outcome(self, job: _Job) -> tuple[Any, Failure | None, bool]:
        if self._cache is None or job.cache_key is None:
            return *self._call(job, job.options.max_output_chars), False
        content, failure, cached = self._cache.get_or_call(
            job.cache_key,
            lambda: self._call(job, STORED_CHARS),
            job.options,
            job.over,
            job.deadline,
        )
        return to_content(content, job.options.max_output_chars), failure, cached

    def _call(self, job: _Job, limit: int) -> Answer:
        try:
            return to_content(self._with_retries(job), limit), None
        except BaseException as error:
            # SystemExit and KeyboardInterrupt raised by a tool end its call, not the training.
            return to_content(describe_error(error), limit), _kind(error)

    def _with_retries(self, job: _Job) -> Any:
        backoff = tenacity.wait_exponential(multiplier=0.5, max=8) + tenacity.wait_random(0, 0.25)

        def is_last(state: tenacity.RetryCallState) -> bool:
            # What can only be tried again after the deadline has failed now.
            too_late = time.monotonic() + state.upcoming_sleep >= job.deadline
            return state.attempt_number > job.options.max_retries or job.over.is_set() or too_late

        def pause(state: tenacity.RetryCallState) -> float:
            error = None if state.outcome is None else state.outcome.exception()
            assert error is not None  # what is tried again has failed
            return max(backoff(state), retry_after(error))

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(may_retry),
            stop=is_last,
            wait=pause,
            sleep=tenacity.sleep_using_event(job.over),
            reraise=True,
        )
        return retrying(self._call_once, job)

    def _call_once(self, job: _Job) -> Any:
        if isinstance(job.tool, IsolatedTool):
            return job.tool.call(job.arguments, job.over, job.deadline)
        value = job.tool(**job.arguments)
        if not inspect.isawaitable(value):
            return value
        future = self._loop.run(value)
        with self._lock:
            job.running_future = future
            if job.over.is_set():
                future.cancel()
        value, error = future.result()
        if error is not None:
            raise error
        return value


def _kind(error: BaseException) -> Failure:
    if isinstance(error, TimeoutError):
        return "timeout"
    return "infrastructure" if is_transient(error) else "tool_error"

"""A rollout without a model: a scripted engine calls a fake tool in the recipe's dialect, rows fork, rows answer."""

import os
from typing import TYPE_CHECKING

from ...algorithms.fork_rules import BranchingOptions
from ...rollout.dialects import Dialect, make_dialect
from ...rollout.engines.protocol import Event, Request
from ...rollout.environments import Environments
from ...rollout.sampler import Limits, Prompt, Sampler
from ...rollout.tree import RolloutTree
from ...tools.runner import ToolRunner


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTION = "What is the capital of France?"
RESULT = "Paris is the capital of France."
ANSWER = "The answer is Paris."


def lookup(query: str) -> str:
    """Looks something up.

    Args:
        query: What to look for.
    """
    return RESULT


class _ScriptedEngine:
    """Continues a prompt without the tool's result with a call, one with it with an answer."""

    generator = None
    busy_s, prompt_tokens, cached_tokens, max_model_len = 0.0, 0, 0, 2**20

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", stop_token_ids: frozenset[int], call: list[int], answer: list[int]
    ):
        self.stop_token_ids = stop_token_ids
        self._tokenizer, self._call, self._answer = tokenizer, call, answer
        self._live: dict[str, Request] = {}

    def begin(self) -> None:
        self._live.clear()

    def end(self) -> None:
        self._live.clear()

    def submit(self, request: Request) -> None:
        self._live[request.id] = request

    def cancel(self, request_id: str) -> None:
        self._live.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self._live)

    def poll(self) -> list[Event]:
        events = []
        for request in self._live.values():
            answered = RESULT in self._tokenizer.decode(request.prompt_ids)
            ids = self._answer if answered else self._call
            events.append(Event(request.id, ids, [-1.0] * len(ids), [1.0] * min(request.watch, len(ids)), "stop"))
        self._live.clear()
        return events


def trial_rollout(tokenizer: "PreTrainedTokenizerBase", dialect_name: str, stop_token_ids: list[int]) -> RolloutTree:
    """
    Samples four rows, two of them forks, each with one call of a fake tool.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The model's.
        dialect_name (`str`):
            `"native"` or `"tagged"`.
        stop_token_ids (`list[int]`):
            Tokens that end a turn besides the tokenizer's EOS.

    Returns:
        [`RolloutTree`]

    Raises:
        ValueError: If the call is not read as one, if its result does not reach the model, or if rows do not end.
    """
    dialect = make_dialect(dialect_name, tokenizer, [lookup], stop_token_ids=stop_token_ids)
    prompt, call, answer = _conversation(tokenizer, dialect, dialect_name)
    engine = _ScriptedEngine(tokenizer, dialect.stop_token_ids, call, answer)
    branching = BranchingOptions(alpha=1.0, beta=0.0, window=4)
    limits = Limits(completion_tokens=4096, tool_turns=2, seconds=30)
    with ToolRunner([lookup]) as runner:
        sampler = Sampler(engine, dialect, runner, limits, branching, num_initial=2, vocab_size=len(tokenizer))
        [tree] = sampler.run([Prompt([prompt] * 4, 0, Environments({"lookup": lookup}))])
    rows = tree.trajectories
    if not all(row.results() for row in rows):
        raise ValueError(
            f"A call was not read as one in the dialect '{dialect_name}': {tokenizer.decode(call)!r}. Choose the other "
            "dialect, or a chat template that TRL can parse."
        )
    wrong = [str(result.content) for row in rows for result in row.results() if result.content != RESULT]
    if wrong:
        raise ValueError(f"The call {tokenizer.decode(call)!r} did not reach the tool as it was meant: {wrong[0]}")
    if not all(row.finish_reason == "stop" and row.turns == 1 for row in rows):
        ends = ", ".join(sorted({f"{row.finish_reason} after {row.turns} tool turns" for row in rows}))
        raise ValueError(
            f"Rows do not end with an answer after one call ({ends}); the result may not reach the model."
        )
    return tree


def _conversation(
    tokenizer: "PreTrainedTokenizerBase", dialect: Dialect, name: str
) -> tuple[list[int], list[int], list[int]]:
    """Ids of a prompt, of a turn that calls `lookup` and of one that answers."""
    question = [{"role": "user", "content": QUESTION}]
    if name == "tagged":
        text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
        call, answer = f"<lookup>{QUESTION}</lookup>", f"<answer>{ANSWER}</answer>"
        return _ids(tokenizer, text), _ids(tokenizer, call), _ids(tokenizer, answer)
    from ...tools.calling import tool_schema

    def render(messages: list[dict], add_generation_prompt: bool) -> str:
        return tokenizer.apply_chat_template(
            messages,
            tools=[tool_schema(lookup)],
            chat_template=dialect.chat_template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )

    function = {"name": "lookup", "arguments": {"query": QUESTION}}
    calling = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    prompt = render(question, True)
    turns = []
    for message in (calling, {"role": "assistant", "content": ANSWER}):
        whole = render([*question, message], False)
        ids = _ids(tokenizer, whole[len(os.path.commonprefix([prompt, whole])) :])
        end = next((i for i, id in enumerate(ids) if id in dialect.stop_token_ids), None)
        if end is None:
            raise ValueError(
                "The chat template ends an assistant turn with none of the model's stop tokens: set the tokenizer's "
                "`eos_token`, or the generation config's `eos_token_id`, to the token that ends a turn."
            )
        turns.append(ids[: end + 1])
    return _ids(tokenizer, prompt), *turns


def _ids(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]

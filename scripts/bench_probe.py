"""What the exact entropy probe costs: its share of the engine's own time, with rows watched as in a rollout.

The time inside the probe is taken directly, since two runs on a busy machine differ by more than it costs.

```bash
python scripts/bench_probe.py --model path/to/model --rows 64 --turns 4 --tokens 40 --window 20
```
"""

import argparse
import statistics
import time

from arpo_trl.rollout.engines.protocol import Request
from arpo_trl.rollout.engines.vllm_engine import VLLMEngine, build_llm
from arpo_trl.rollout.engines.vllm_probe import EntropyProbe


class Stopwatch:
    """Adds up the time spent in the methods it wraps."""

    def __init__(self):
        self.seconds = 0.0

    def wrap(self, owner: object, name: str) -> None:
        method = getattr(owner, name)

        def timed(*args, **kwargs):
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        setattr(owner, name, timed)


def rollout(engine: VLLMEngine, args: argparse.Namespace) -> None:
    """Every trajectory makes `args.turns` requests, one after another, each continuing the last."""
    contexts = {row: [5 + (7 * row + i) % 50 for i in range(args.prompt)] for row in range(args.rows)}
    turns = dict.fromkeys(contexts, 0)

    def submit(row: int) -> None:
        request = Request(f"{row}/{turns[row]}", list(contexts[row]), args.tokens, watch=args.window, seed=row)
        turns[row] += 1
        engine.submit(request)

    engine.begin()
    for row in contexts:
        submit(row)
    while engine.has_work():
        for event in engine.poll():
            row = int(event.id.split("/")[0])
            contexts[row] += event.token_ids
            if event.finish_reason is not None and turns[row] < args.turns:
                submit(row)
    engine.end()


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="path or hub id")
    parser.add_argument("--rows", type=int, default=64, help="trajectories in flight")
    parser.add_argument("--turns", type=int, default=4, help="requests a trajectory makes, each watched anew")
    parser.add_argument("--tokens", type=int, default=40, help="tokens a request samples")
    parser.add_argument("--window", type=int, default=20, help="watched tokens of each request")
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens")
    parser.add_argument("--repeats", type=int, default=3)
    return parser


def main() -> None:
    args = make_parser().parse_args()

    max_model_len = args.prompt + args.turns * args.tokens + 1
    llm = build_llm(args.model, max_model_len=max_model_len, max_num_seqs=args.rows)
    engine = VLLMEngine(llm, stop_token_ids=[])
    processors = llm.llm_engine.model_executor.driver_worker.model_runner.input_batch.logitsprocs.argmax_invariant
    (probe,) = (processor for processor in processors if isinstance(processor, EntropyProbe))
    stopwatch = Stopwatch()
    for name in ("apply", "update_state"):
        stopwatch.wrap(probe, name)
    for name in ("open", "read", "close"):
        stopwatch.wrap(engine._recorder, name)

    shares = []
    for repeat in range(args.repeats + 1):
        stopwatch.seconds = 0.0
        start = time.perf_counter()
        rollout(engine, args)
        wall = time.perf_counter() - start
        if repeat:  # the first one warms up
            shares.append(stopwatch.seconds / wall)
            print(
                f"wall {wall:.2f} s, engine {engine.busy_s:.2f} s, probe {stopwatch.seconds:.3f} s: {shares[-1]:.2%}"
            )
    print(f"probe: median {statistics.median(shares):.2%} of rollout time")


if __name__ == "__main__":
    main()

"""Builds the full-text index that the tool `search` reads, or asks one a question.

```shell
python scripts/build_index.py --input wiki.jsonl --output data/wiki_index
python scripts/build_index.py --input search_cache.json --output data/cache_index
python scripts/build_index.py --dataset org/name --split train --output data/index
python scripts/build_index.py --output data/wiki_index --query "who wrote the first dictionary"
```

Interrupted, the same command goes on after the last commit. Inputs: JSONL and parquet (one passage a row), and the
papers' `search_cache.json` (one JSON object from query to result text, split into its passages).
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from arpo_trl.tools.search.local import (
    ANALYZERS,
    LocalSearch,
    Passage,
    build_index,
    passages_of_row,
    read_passages,
)


def read_dataset(name: str, split: str, text_field: str | None, title_field: str | None) -> Iterator[Passage]:
    """The passages of a dataset on the Hugging Face Hub, streamed."""
    from datasets import load_dataset

    for row in load_dataset(name, split=split, streaming=True):
        yield passages_of_row(row, text_field, title_field)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, nargs="+", default=[], help="files with passages")
    parser.add_argument("--dataset", help="a dataset on the Hub, instead of files")
    parser.add_argument("--split", default="train", help="its split (default: train)")
    parser.add_argument("--output", type=Path, required=True, help="folder of the index")
    parser.add_argument(
        "--text_field", help="field of the text; found by itself if named text, contents, passage, body"
    )
    parser.add_argument("--title_field", help="field of the title (default: title)")
    parser.add_argument("--analyzer", choices=ANALYZERS, default="en_stem", help="how text becomes terms")
    parser.add_argument("--threads", type=int, help="indexing threads (default: cores, at most 8)")
    parser.add_argument("--memory_mb", type=int, default=512, help="memory of the writer in MiB (default: 512)")
    parser.add_argument("--query", help="ask this after building, or of an index that exists")
    parser.add_argument("--top_k", type=int, default=5, help="passages per answer (default: 5)")
    return parser


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(arguments)
    if args.input and args.dataset:
        parser.error("give either --input or --dataset")
    if not (args.input or args.dataset or args.query):
        parser.error("give --input or --dataset to build an index, or --query to ask one")
    if args.input or args.dataset:
        if args.dataset:
            source = f"{args.dataset}:{args.split}"
            passages = read_dataset(args.dataset, args.split, args.text_field, args.title_field)
        else:
            source = ", ".join(f"{path.name} ({path.stat().st_size} bytes)" for path in args.input)
            passages = (p for path in args.input for p in read_passages(path, args.text_field, args.title_field))
        begun = time.monotonic()
        with tqdm(unit=" passages", unit_scale=True) as bar:
            total = build_index(
                args.output, passages, source, args.analyzer, args.threads, args.memory_mb, progress=bar.update
            )
        print(f"{total} passages in {args.output} after {time.monotonic() - begun:.1f} s")
    if args.query:
        print(LocalSearch(str(args.output), top_k=args.top_k).search(args.query))


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")

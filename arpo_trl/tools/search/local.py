"""Full-text search over one's own passages: BM25 on tantivy, embedded, read-only, shared by any number of processes.

`scripts/build_index.py` builds an index; [`LocalSearch`] opens it.
"""

import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import tantivy
from filelock import FileLock

from ..contract import InfrastructureError
from ..json_lines import read_json_lines
from .answers import checked_query, numbered


FIELD = "contents"
ANALYZERS = ("en_stem", "default")
MAX_QUERY_TERMS = 64
_STATE = "arpo_trl_index.json"


@dataclass(frozen=True)
class Passage:
    """A piece of text that search returns as a whole."""

    text: str
    title: str = ""

    @property
    def contents(self) -> str:
        return f"{self.title}\n{self.text}" if self.title else self.text


def analyzer(name: str) -> tantivy.TextAnalyzer:
    """Splits text into terms as the index does: words in lower case, for `"en_stem"` reduced to English stems."""
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
    builder = builder.filter(tantivy.Filter.remove_long(40)).filter(tantivy.Filter.lowercase())
    if name == "en_stem":
        builder = builder.filter(tantivy.Filter.stemmer("English"))
    return builder.build()


class LocalSearch:
    """The tool `search` over a local index.

    Args:
        index (`str`):
            Folder made by `scripts/build_index.py`.
        source (`str`, *optional*):
            File that the index is built from where `index` holds none yet, see [`read_passages`].
        top_k (`int`, *optional*, defaults to `5`):
            Passages per answer.
        max_passage_chars (`int`, *optional*, defaults to `1000`):
            Longer passages are shortened.
    """

    def __init__(self, index: str, source: str | None = None, top_k: int = 5, max_passage_chars: int = 1000):
        if source is not None and not read_state(Path(index)).get("complete"):
            Path(index).mkdir(parents=True, exist_ok=True)
            with FileLock(Path(index) / "building.lock"):  # several processes may open the recipe at once
                if not read_state(Path(index)).get("complete"):
                    build_index(index, read_passages(Path(source)), source)
        state = read_state(Path(index))
        if not state.get("complete"):
            raise ValueError(f"{index} is not a complete index; build it with `python scripts/build_index.py`.")
        if top_k < 1 or max_passage_chars < 1:
            raise ValueError("`top_k` and `max_passage_chars` must be at least 1.")
        self.top_k, self.max_passage_chars = top_k, max_passage_chars
        self._source = state["source"]
        folder = index
        if not os.access(index, os.W_OK):  # tantivy keeps lock files beside what it reads
            self._links = _links_to(Path(index))
            folder = self._links.name
        self._index = tantivy.Index.open(str(folder))
        self._searcher = self._index.searcher()
        self._analyzer = analyzer(state["analyzer"])

    def __len__(self) -> int:
        return self._searcher.num_docs

    def tools(self) -> list[Callable]:
        """What the model may call."""
        return [self.search]

    def preflight(self) -> None:
        """One real search; raises [`InfrastructureError`] where the index is empty."""
        if len(self) == 0:
            raise InfrastructureError("The search index holds no passages; build it with `scripts/build_index.py`.")
        self.ranked("test")

    def normalise_arguments(self, arguments: dict) -> dict:
        """For the cache: queries that have the same terms have the same answer."""
        return {
            "terms": sorted(set(self._analyzer.analyze(arguments["query"]))),
            "index": [self._source, len(self)],
            "shape": [self.top_k, self.max_passage_chars],
        }

    def ranked(self, query: str) -> list[tuple[float, str]]:
        """BM25 scores (k1 = 1.2, b = 0.75) and contents of the best `top_k` passages that share a term with `query`,
        best first. The query is plain words: it has no operators."""
        terms = dict.fromkeys(self._analyzer.analyze(query))
        should = [
            (tantivy.Occur.Should, tantivy.Query.term_query(self._index.schema, FIELD, term, "freq"))
            for term in islice(terms, MAX_QUERY_TERMS)
        ]
        if not should:
            return []
        found = self._searcher.search(tantivy.Query.boolean_query(should), self.top_k, count=False)
        return [(score, self._searcher.doc(address)[FIELD][0]) for score, address in found.hits]

    def search(self, query: str) -> str:
        """
        Searches a collection of text passages and returns the best matches.

        Args:
            query: What to look for, in a few words.

        Returns:
            The passages found, best first.
        """
        found = self.ranked(checked_query(query))
        return numbered([text for _, text in found], self.max_passage_chars)


def _links_to(folder: Path) -> tempfile.TemporaryDirectory:
    links = tempfile.TemporaryDirectory(prefix="arpo_trl_index_")
    for file in folder.iterdir():
        if file.suffix != ".lock":
            Path(links.name, file.name).symlink_to(file.resolve())
    return links


def read_state(folder: Path) -> dict:
    """What the builder wrote beside the index; empty for a folder without one."""
    path = folder / _STATE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def build_index(
    folder: str | Path,
    passages: Iterable[Passage],
    source: str,
    analyzer: str = "en_stem",
    threads: int | None = None,
    memory_mb: int = 512,
    commit_every: int = 1_000_000,
    progress: Callable[[int], None] = lambda added: None,
) -> int:
    """Builds an index, or goes on with one that was interrupted.

    Args:
        folder (`str` or `Path`):
            Where the index is written.
        passages (`Iterable[Passage]`):
            The same ones in the same order when a build is resumed.
        source (`str`):
            Names where the passages come from; a build is only resumed with the same one.
        analyzer (`str`, *optional*, defaults to `"en_stem"`):
            `"en_stem"` for English, `"default"` for words as they are.
        threads (`int`, *optional*):
            Indexing threads; defaults to the number of cores, at most 8.
        memory_mb (`int`, *optional*, defaults to `512`):
            Memory of the writer, in MiB.
        commit_every (`int`, *optional*, defaults to `1_000_000`):
            Passages between two commits. An interrupted build loses what came after the last one.
        progress (`Callable[[int], None]`, *optional*):
            Called with the number of passages added since the last call.

    Returns:
        `int`: passages in the index.

    Raises:
        `ValueError`: where the folder holds an index of another source or analyzer.
    """
    if analyzer not in ANALYZERS:
        raise ValueError(f"Unknown analyzer {analyzer!r}; choose one of {', '.join(ANALYZERS)}.")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {"source": source, "analyzer": analyzer}
    state = read_state(folder)
    if state and {key: state.get(key) for key in wanted} != wanted:
        raise ValueError(f"{folder} holds an index of {state.get('source')}; choose another folder or delete it.")
    _write_state(folder, {**wanted, "complete": state.get("complete", False)})
    schema = (
        tantivy.SchemaBuilder()
        .add_text_field(FIELD, stored=True, tokenizer_name=analyzer, index_option="freq")
        .build()
    )
    index = tantivy.Index(schema, path=str(folder))
    done = index.searcher().num_docs
    if state.get("complete"):
        return done
    progress(done)
    writer = index.writer(heap_size=memory_mb << 20, num_threads=threads or min(8, os.cpu_count() or 1))
    total, reported = done, done
    last_report = time.monotonic()
    for passage in islice(passages, done, None):
        writer.add_document(tantivy.Document(**{FIELD: passage.contents}))
        total += 1
        if total % commit_every == 0:
            writer.commit()
        if total % 1000 == 0 and time.monotonic() - last_report > 0.2:
            progress(total - reported)
            reported, last_report = total, time.monotonic()
    writer.commit()
    writer.wait_merging_threads()
    progress(total - reported)
    _write_state(folder, {**wanted, "complete": True})
    mode = (folder / _STATE).stat().st_mode
    for file in folder.iterdir():  # tantivy lets nobody else read some of them
        file.chmod(mode)
    return total


def _write_state(folder: Path, state: dict) -> None:
    new = folder / f"{_STATE}.new"
    new.write_text(json.dumps(state, indent=2), encoding="utf-8")
    new.replace(folder / _STATE)


def passages_of_row(row: dict, text_field: str | None = None, title_field: str | None = None) -> Passage:
    """A passage from a record. Without names, the text is in `text`, `contents`, `passage` or `body`; the title, if
    there is one, in `title`."""
    text = row[_text_field(row, text_field)]
    return Passage(text=str(text or ""), title=str(row.get(title_field or "title") or ""))


def _text_field(names: Iterable[str], text_field: str | None) -> str:
    wanted = ("text", "contents", "passage", "body") if text_field is None else (text_field,)
    found = next((name for name in wanted if name in names), None)
    if found is None:
        raise ValueError(f"No text field among {', '.join(map(str, names))}; name it with `--text_field`.")
    return found


def read_search_cache(path: str | Path) -> Iterator[Passage]:
    """The passages of a search cache as the papers' code writes it: one JSON object from query to result text, in
    which every result begins with "Page 1: ". Each passage comes once."""
    results = json.loads(Path(path).read_text(encoding="utf-8"))
    seen = set()
    for text in results.values():
        for page in re.split(r"(?:^|\n)Page \d+: ", text):
            if (page := page.strip()) and page not in seen:
                seen.add(page)
                yield Passage(page)


def read_passages(path: Path, text_field: str | None = None, title_field: str | None = None) -> Iterator[Passage]:
    """The passages of a JSONL or parquet file (one a row) or of a search cache (`.json`), in a fixed order.

    Raises:
        `ValueError`: for other files.
    """
    if path.suffix == ".json":
        yield from read_search_cache(path)
    elif path.suffix == ".parquet":
        import pyarrow.parquet

        file = pyarrow.parquet.ParquetFile(path)
        names = file.schema_arrow.names
        columns = {_text_field(names, text_field), title_field or "title"}.intersection(names)
        for batch in file.iter_batches(batch_size=10_000, columns=sorted(columns)):
            for row in batch.to_pylist():
                yield passages_of_row(row, text_field, title_field)
    elif path.suffix == ".jsonl":
        for row in read_json_lines(path):
            yield passages_of_row(row, text_field, title_field)
    else:
        raise ValueError(f"Cannot read {path}: give a .jsonl, .parquet or .json file.")

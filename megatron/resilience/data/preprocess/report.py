"""What was read, written and left out, for people and for machines.

Promise: counts are exact; the first few of each kind of bad input are named with file and line.
"""

import json
from array import array
from collections import Counter
from dataclasses import dataclass

import numpy as np

from megatron.resilience.data.preprocess.config import OnBadInput, PreprocessConfig
from megatron.resilience.data.preprocess.records import (
    FILE_KINDS,
    BadKind,
    BadRecord,
    ChunkResult,
)
from resihp_ext.errors import UserError

EXAMPLES_PER_KIND = 5


class Tally:
    """Adds up the results in the order of the documents and decides where to stop."""

    def __init__(self, config: PreprocessConfig) -> None:
        self._config = config
        self.tokens = 0
        self.text_bytes = 0
        self.files = 0
        self.bad: Counter[BadKind] = Counter()
        self.examples: list[BadRecord] = []
        self.lengths = array("q")
        """Tokens of each document written."""

    @property
    def documents(self) -> int:
        """Documents to be written."""
        return len(self.lengths)

    def take(self, result: ChunkResult) -> tuple[int, bool]:
        """Count ``result``; return (how many of its documents to write, whether to stop there).

        Raises:
            UserError: bad input, and the configuration says to fail.
        """
        accepted, is_full = self._fitting(result.text_bytes)
        for documents_before, record in result.bad:
            if documents_before < accepted or not is_full:
                self._take_bad(record)
        self.files += result.files
        lengths = result.lengths[:accepted]
        self.lengths.extend(lengths.tolist())
        self.tokens += int(lengths.sum())
        self.text_bytes += int(result.text_bytes[:accepted].sum())
        return accepted, is_full

    def judge(self) -> None:
        """Refuse to write a dataset of nothing, or of input that is too bad.

        Raises:
            UserError: no documents, or more bad ones than the configuration allows.
        """
        bad_files = sum(n for kind, n in self.bad.items() if kind in FILE_KINDS)
        bad_documents = self.bad.total() - bad_files - self.bad[BadKind.EMPTY]
        first = f"; first: {self.examples[0]}" if self.examples else ""
        if not self.documents:
            raise UserError(f"no documents to write: {self.files} files, {self._left_out()}{first}")
        limit = self._config.max_bad_fraction
        for what, bad, total in (
            ("documents", bad_documents, self.documents + bad_documents),
            ("files", bad_files, self.files),
        ):
            if bad > limit * total:
                raise UserError(
                    f"{bad} of {total} {what} are bad ({self._left_out()}), "
                    f"--max-bad-fraction is {limit:g}{first}"
                )

    def _fitting(self, text_bytes: np.ndarray) -> tuple[int, bool]:
        """Return (how many more documents fit, whether the limits are reached)."""
        accepted = text_bytes.size
        is_full = False
        if self._config.limit_bytes is not None:
            room = self._config.limit_bytes - self.text_bytes
            fitting = int(np.searchsorted(np.cumsum(text_bytes), room, side="right"))
            is_full = fitting < accepted
            accepted = min(accepted, fitting)
        if self._config.max_documents is not None:
            room = self._config.max_documents - self.documents
            is_full = is_full or room <= accepted
            accepted = min(accepted, room)
        return accepted, is_full

    def _take_bad(self, record: BadRecord) -> None:
        is_fatal = record.kind is not BadKind.EMPTY
        if is_fatal and self._config.on_bad_input is OnBadInput.FAIL:
            raise UserError(f"{record}; repair it or use --on-bad-input skip")
        self.bad[record.kind] += 1
        if self.bad[record.kind] <= EXAMPLES_PER_KIND:
            self.examples.append(record)
            # What matters first: an empty file is never the reason for a refusal.
            self.examples.sort(key=lambda r: r.kind is BadKind.EMPTY)

    def _left_out(self) -> str:
        return describe_bad(self.bad) or "nothing left out"


def describe_bad(bad: Counter[BadKind]) -> str:
    """Return ``3 bad_utf8, 1 empty``; empty when nothing is bad."""
    return ", ".join(f"{count} {kind}" for kind, count in sorted(bad.items()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The outcome of one run that wrote a dataset."""

    output_prefix: str
    documents: int
    tokens: int
    bytes: int
    """UTF-8 bytes of the text of the documents."""
    files: int
    seconds: float
    """Wall clock of reading, encoding and writing, without loading Megatron."""
    import_seconds: float
    """Wall clock of loading Megatron to write the dataset."""
    bad: Counter[BadKind]
    examples: tuple[BadRecord, ...]
    length_tokens: dict[str, int]
    """p50, p90, p99 and max of the tokens of a document."""
    workers: int
    tokenizer: str
    vocab_size: int
    eod: int | None
    dtype: str
    training_flags: tuple[str, ...]

    @property
    def mb_per_s(self) -> float:
        """Text in 10^6 bytes a second."""
        return self.bytes / 1e6 / max(self.seconds, 1e-9)

    def to_json(self) -> str:
        """Return one line with one JSON object."""
        names = (
            *("output_prefix", "documents", "tokens", "bytes", "files", "length_tokens"),
            *("workers", "tokenizer", "vocab_size", "eod", "dtype", "training_flags"),
        )
        return json.dumps(
            {
                **{name: getattr(self, name) for name in names},
                "seconds": round(self.seconds, 3),
                "import_seconds": round(self.import_seconds, 3),
                "mb_per_s": round(self.mb_per_s, 3),
                "bad": {kind.value: count for kind, count in sorted(self.bad.items())},
                "bad_examples": [str(record) for record in self.examples],
            }
        )

    def to_text(self) -> str:
        """Return the summary for people."""
        lengths = ", ".join(f"{name} {value:,}" for name, value in self.length_tokens.items())
        lines = [
            f"wrote {self.output_prefix}.bin and .idx: {self.documents:,} documents, "
            f"{self.tokens:,} tokens from {self.bytes / 1e6:,.1f} MB in {self.files:,} files, "
            f"{self.seconds:.1f} s ({self.mb_per_s:,.1f} MB/s, {self.workers} workers)",
            f"tokens in a document: {lengths}",
        ]
        if self.bad:
            lines.append(f"left out: {describe_bad(self.bad)}")
            lines.extend(f"  {record}" for record in self.examples)
        flags = " ".join(self.training_flags)
        lines.append(f"train with: --data-path {self.output_prefix} {flags}")
        return "\n".join(lines)


def length_percentiles(lengths: "array[int]") -> dict[str, int]:
    """Return p50, p90, p99 and max of ``lengths``, each a length that occurs."""
    values = np.frombuffer(lengths, dtype=np.int64)
    p50, p90, p99 = np.percentile(values, [50, 90, 99], method="lower").tolist()
    return {"p50": p50, "p90": p90, "p99": p99, "max": int(values.max())}

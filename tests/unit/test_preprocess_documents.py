"""From chunks to tokens and totals: every kind of bad document is counted, named and judged."""

import json

import numpy as np
import pytest

from megatron.resilience.data.byte_tokenizer import (
    BYTE_EOD,
    BYTE_PAD,
    BYTE_VOCAB_SIZE,
    ByteTokenizer,
    byte_ids,
    ids_to_bytes,
)
from megatron.resilience.data.preprocess.chunks import plan_chunks
from megatron.resilience.data.preprocess.config import (
    InputFormat,
    OnBadInput,
    PreprocessConfig,
)
from megatron.resilience.data.preprocess.encoders import ByteEncoder, build_encoder
from megatron.resilience.data.preprocess.records import BadKind, LineBlock, LineForm
from megatron.resilience.data.preprocess.report import Tally, length_percentiles
from megatron.resilience.data.preprocess.sources import discover
from megatron.resilience.data.preprocess.work import ChunkEncoder
from resihp_ext.errors import UserError

pytestmark = pytest.mark.unit


def worker(**options):
    defaults = {
        "encoder": ByteEncoder(),
        "json_key": "text",
        "append_eod": True,
        "max_document_bytes": 10**6,
    }
    return ChunkEncoder(**{**defaults, **options})


def encode_lines(data, *, form=LineForm.JSONL, **options):
    block = LineBlock(
        path="f", first_line=1, data=data, form=form, source_bytes=0, starts_file=True
    )
    return worker(**options)(block)


def texts_of(result):
    ends = np.cumsum(result.lengths)
    return [ids_to_bytes(ids).decode() for ids in np.split(result.tokens, ends)[:-1]]


def bad_of(result):
    return [(before, r.line, r.kind) for before, r in result.bad]


def test_bytes_and_specials_do_not_collide():
    tokenizer = ByteTokenizer()
    every_byte = bytes(range(256))
    assert byte_ids(every_byte).tolist() == list(range(256))
    assert {tokenizer.eod, tokenizer.pad} == {256, 257}
    assert tokenizer.vocab_size == 258 == max(BYTE_EOD, BYTE_PAD) + 1
    text = "naïve 🙂 \x00 end"
    assert tokenizer.detokenize([*tokenizer.tokenize(text), BYTE_EOD, BYTE_PAD]) == text
    assert byte_ids(text.encode()).dtype == np.uint16


def test_good_lines_become_documents_with_end_of_document():
    texts = ["one", "zwei ü", "line\nbreak \x00"]
    data = b"".join(json.dumps({"text": t}).encode() + b"\n" for t in texts)
    result = encode_lines(data)
    assert texts_of(result) == texts
    assert result.lengths.tolist() == [len(t.encode()) + 1 for t in texts]
    assert result.text_bytes.tolist() == [len(t.encode()) for t in texts]
    assert result.tokens[np.cumsum(result.lengths) - 1].tolist() == [BYTE_EOD] * 3
    assert not result.bad
    assert BYTE_EOD not in encode_lines(data, append_eod=False).tokens


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (b'{"text": "cut', BadKind.MALFORMED_JSON),
        (b"[" * 100_000, BadKind.MALFORMED_JSON),
        (b'["text"]', BadKind.MALFORMED_JSON),
        (b'{"body": "x"}', BadKind.MISSING_KEY),
        (b'{"text": 7}', BadKind.NOT_TEXT),
        (b'{"text": null}', BadKind.NOT_TEXT),
        (b'{"text": "\xff"}', BadKind.BAD_UTF8),
        (b'{"text": "\\ud83d"}', BadKind.BAD_UTF8),
        (b'{"text": "' + b"x" * 1_000_000 + b'"}', BadKind.TOO_LARGE),
        (b'{"text": ""}', BadKind.EMPTY),
        (b'{"text": " \\n"}', BadKind.EMPTY),
        (b"", BadKind.EMPTY),
    ],
)
def test_a_bad_line_is_named_by_kind_and_line_and_its_neighbours_survive(line, kind):
    result = encode_lines(b'{"text": "a"}\n' + line + b'\n{"text": "b"}\n')
    assert texts_of(result) == ["a", "b"]
    assert bad_of(result) == [(1, 2, kind)]


def test_a_byte_order_mark_is_dropped_only_at_the_start_of_a_file():
    bom = b"\xef\xbb\xbf"
    result = encode_lines(bom + b"a\n" + bom + b"b\n", form=LineForm.LINES)
    assert texts_of(result) == ["a", "\ufeffb"]


def test_lines_lose_their_line_ends_whatever_the_system_that_wrote_them():
    result = encode_lines(b"a\r\nb\n\nc", form=LineForm.LINES)
    assert texts_of(result) == ["a", "b", "c"]
    assert bad_of(result) == [(2, 3, BadKind.EMPTY)]


def test_a_tokenizer_that_raises_costs_one_document():
    class Picky(ByteEncoder):
        def encode(self, text, utf8):
            if text == "bad":
                raise KeyError("no such piece")
            return super().encode(text, utf8)

    result = encode_lines(b"a\nbad\nb", form=LineForm.LINES, encoder=Picky())
    assert texts_of(result) == ["a", "b"]
    assert bad_of(result) == [(1, 2, BadKind.UNTOKENIZABLE)]


def run_tally(tmp_path, **options):
    """Do all but the processes and the disk: return the tally of a run over ``tmp_path``."""
    config = PreprocessConfig(output_prefix="p", inputs=(str(tmp_path),), **options)
    tally = Tally(config)
    texts = []
    for chunk in plan_chunks(discover(config), max_document_bytes=10**6):
        result = worker()(chunk)
        accepted, is_full = tally.take(result)
        texts.extend(texts_of(result)[:accepted])
        if is_full:
            break
    return tally, texts


def write_lines(path, count, bad_lines=()):
    lines = [json.dumps({"text": f"document {i:03}"}) for i in range(1, count + 1)]
    for line in bad_lines:
        lines[line - 1] = "{"
    path.write_text("\n".join(lines) + "\n")


def test_bad_documents_up_to_the_allowed_part_are_left_out(tmp_path):
    write_lines(tmp_path / "a.jsonl", 100, bad_lines=[7])
    tally, texts = run_tally(tmp_path)
    tally.judge()
    assert len(texts) == tally.documents == 99
    assert str(tally.examples[0]).startswith(f"{tmp_path}/a.jsonl:7: malformed_json")


def test_more_bad_documents_than_allowed_refuse_the_dataset(tmp_path):
    write_lines(tmp_path / "a.jsonl", 100, bad_lines=[7, 9])
    with pytest.raises(UserError, match=r"2 of 100 documents are bad .*a\.jsonl:7"):
        run_tally(tmp_path)[0].judge()
    run_tally(tmp_path, max_bad_fraction=0.02)[0].judge()


def test_one_lost_file_of_few_refuses_the_dataset_however_many_documents_it_held(tmp_path):
    write_lines(tmp_path / "a.jsonl", 500)
    (tmp_path / "b.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00")
    with pytest.raises(UserError, match="1 of 2 files are bad"):
        run_tally(tmp_path)[0].judge()


def test_fail_stops_at_the_first_bad_document_but_not_at_empty_ones(tmp_path):
    write_lines(tmp_path / "a.jsonl", 100, bad_lines=[7])
    with pytest.raises(UserError, match=r"a\.jsonl:7: malformed_json"):
        run_tally(tmp_path, on_bad_input=OnBadInput.FAIL)
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n\n{"text": ""}\n')
    tally, _ = run_tally(tmp_path, on_bad_input=OnBadInput.FAIL)
    tally.judge()
    assert tally.bad == {BadKind.EMPTY: 2}


def test_no_documents_is_an_error_that_says_why(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match=r"no documents.*1 files, 1 empty.*empty\.txt"):
        run_tally(tmp_path)[0].judge()


@pytest.mark.parametrize(
    ("limits", "documents"),
    [
        ({"max_documents": 5}, 5),
        ({"max_documents": 1000}, 100),
        ({"limit_bytes": 12 * 5}, 5),
        ({"limit_bytes": 12 * 5 - 1}, 4),
        ({"limit_bytes": 12 * 5 + 1}, 5),
        ({"limit_bytes": 12 * 50, "max_documents": 3}, 3),
        ({"limit_bytes": 12 * 2, "max_documents": 3}, 2),
    ],
)
def test_a_slice_is_the_exact_beginning(tmp_path, limits, documents):
    write_lines(tmp_path / "a.jsonl", 100)
    tally, texts = run_tally(tmp_path, **limits)
    assert texts == [f"document {i:03}" for i in range(1, documents + 1)]
    assert tally.documents == documents
    assert tally.text_bytes == 12 * documents
    assert tally.tokens == 13 * documents


def test_bad_documents_behind_the_end_of_a_slice_are_not_counted(tmp_path):
    write_lines(tmp_path / "a.jsonl", 100, bad_lines=[2, 5])
    tally, _ = run_tally(tmp_path, max_documents=3)
    assert [r.line for r in tally.examples] == [2]


def test_only_the_first_of_each_kind_are_named(tmp_path):
    write_lines(tmp_path / "a.jsonl", 100, bad_lines=range(20, 40))
    tally, _ = run_tally(tmp_path)
    assert tally.bad[BadKind.MALFORMED_JSON] == 20
    assert [r.line for r in tally.examples] == [20, 21, 22, 23, 24]


def test_percentiles_are_lengths_that_occur(tmp_path):
    write_lines(tmp_path / "a.jsonl", 10)
    tally, _ = run_tally(tmp_path)
    assert length_percentiles(tally.lengths) == {"p50": 13, "p90": 13, "p99": 13, "max": 13}


def test_a_whole_file_keeps_its_bytes(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a\r\n\tb\n\n")
    _, texts = run_tally(tmp_path)
    assert texts == ["a\r\n\tb\n\n"]


def test_lines_format_makes_a_document_of_each_line_of_any_file(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\ny = 2\n")
    _, texts = run_tally(tmp_path, input_format=InputFormat.LINES)
    assert texts == ["x = 1", "y = 2"]


def test_an_unknown_flag_is_refused_in_one_line():
    with pytest.raises(UserError, match="--wokers"):
        build_encoder("bytes", ["--wokers", "3"])
    assert build_encoder("bytes", []).vocab_size == BYTE_VOCAB_SIZE

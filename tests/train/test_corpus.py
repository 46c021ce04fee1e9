"""The corpus holds every byte of every file once, in order; the two sides of a split do not overlap."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ringspan.models import LongNet, LongNetConfig
from ringspan.train.data import Corpus
from ringspan.train.evaluate import _ends, ablated_configs, bigram_bits_per_byte, score_branches, score_contexts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deeper").mkdir()
    for name, text in {"a": b"0123", "b": b"", "deeper/c": b"456", "d": b"789"}.items():
        (tmp_path / name).write_bytes(text)
    return tmp_path


def text_of(corpus: Corpus, start: int, stop: int) -> bytes:
    return bytes(corpus.read(start, stop).tolist())


def test_files_form_one_sequence_of_bytes(folder: Path) -> None:
    corpus = Corpus.of([folder])
    assert len(corpus) == 10
    whole = text_of(corpus, 0, 10)
    assert sorted(whole) == sorted(b"0123456789")
    for start in range(11):
        for stop in range(start, 11):
            assert text_of(corpus, start, stop) == whole[start:stop]


def test_the_halves_of_a_split_do_not_overlap(folder: Path) -> None:
    corpus = Corpus.of([folder / "a", folder / "d"])
    train, held_out = corpus.split(0.3)
    assert text_of(train, 0, len(train)) + text_of(held_out, 0, len(held_out)) == b"0123789"
    with pytest.raises(ValueError, match=r"0 \.\. 5"):
        train.read(0, 5)


def test_the_start_of_a_sequence_depends_only_on_seed_and_number(folder: Path) -> None:
    corpus = Corpus.of([folder])
    starts = [corpus.start_of(0, number, 4) for number in range(50)]
    assert starts == [corpus.start_of(0, number, 4) for number in range(50)]
    assert set(starts) == set(range(6))
    with pytest.raises(ValueError, match="tokens=10"):
        corpus.start_of(0, 0, 10)


def test_missing_and_empty_files_are_errors(folder: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        Corpus.of([folder / "z"])
    with pytest.raises(ValueError, match=r"no text in .*/b: 1 empty \(b in .*\)"):
        Corpus.of([folder / "b"])


def test_the_default_is_pythons_standard_library() -> None:
    assert len(Corpus.of([])) > 2**20


def test_a_bigram_model_predicts_alternating_text(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"ab" * 5000)
    corpus = Corpus.of([tmp_path / "text"])
    assert bigram_bits_per_byte(corpus, corpus) == pytest.approx(0.0, abs=0.1)
    (tmp_path / "noise").write_bytes(bytes(torch.randint(256, (2**16,), dtype=torch.uint8).tolist()))
    noise = Corpus.of([tmp_path / "noise"])
    assert bigram_bits_per_byte(corpus, noise) == pytest.approx(8.0, abs=0.2)


def test_contexts_are_scored_on_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(256)) * 20)
    corpus = Corpus.of([tmp_path / "text"])
    model = LongNet(LongNetConfig.named("nano", patterns=("16x1,256x4",)))
    short, long = score_contexts(model, corpus, [512, 128], windows=3, scored=64)
    assert (short.context, long.context, len(short.windows)) == (128, 512, 3)
    assert short.bits_per_byte == pytest.approx(8, abs=0.5)  # an untrained model
    assert short.gain_over(short) == (0.0, 0.0)
    gain, error = long.gain_over(short)
    assert gain == pytest.approx(short.bits_per_byte - long.bits_per_byte)
    assert error > 0
    with pytest.raises(ValueError, match=r"windows=64: .* at most 9"):
        next(score_contexts(model, corpus, [512]))
    with pytest.raises(ValueError, match="64: must be at least 512"):
        next(score_contexts(model, corpus, [64]))
    with pytest.raises(ValueError, match=r"5120: .* at most 5119"):
        next(score_contexts(model, corpus, [512, 5120]))


def test_no_byte_is_scored_twice(tmp_path: Path) -> None:
    """Overlapping windows would make the standard error too small."""
    (tmp_path / "text").write_bytes(b"abcdefgh" * 40)
    corpus = Corpus.of([tmp_path / "text"])
    model = LongNet(LongNetConfig.named("nano", patterns=("16x1,256x4",)))
    read: list[int] = []
    for seed in range(3):
        (score,) = score_contexts(model, corpus, [64], windows=16, scored=16, seed=seed, on_window=read.append)
        assert len(score.windows) == 16
    assert read == [64] * 48
    ends = _ends(corpus, [64], windows=16, scored=16, seed=0)
    scored = [byte for end in ends for byte in range(end - 15, end + 1)]
    assert len(set(scored)) == 16 * 16
    assert min(scored) >= 64 - 15
    assert max(scored) < len(corpus)


def test_branches_are_added_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(256)) * 20)
    corpus = Corpus.of([tmp_path / "text"])
    model = LongNet(LongNetConfig.named("nano", patterns=("16x1,256x4",)))
    scores = list(score_branches(model, corpus, 512, windows=3, scored=64))
    assert [score.reach for score in scores] == [4, 8, 16, 256]
    assert scores[-1] == next(score_contexts(model, corpus, [512], windows=3, scored=64))
    assert len({score.bits_per_byte for score in scores}) == 4


@pytest.mark.parametrize(
    ("patterns", "cuts"),
    [
        (
            ("16x1,256x4", "16x1,256x4 shift 8"),
            [
                ("4x1", "4x1 shift 2"),
                ("8x1", "8x1 shift 4"),
                ("16x1", "16x1 shift 8"),
                ("16x1,256x4", "16x1,256x4 shift 8"),
            ],
        ),
        (("window 31",), [("window 7",), ("window 15",), ("window 31",)]),
        (
            ("window 31 right 2 dilation 2 + 256x4,64x1", "full"),
            [
                ("window 7 right 2 dilation 2", "window 7"),
                ("window 15 right 2 dilation 2", "window 15"),
                ("window 31 right 2 dilation 2", "window 31"),
                ("window 31 right 2 dilation 2 + 64x1", "window 63"),
                ("window 31 right 2 dilation 2 + 256x4,64x1", "window 255"),
                ("window 31 right 2 dilation 2 + 256x4,64x1", "full"),
            ],
        ),
        (("full",), [("window 127",), ("window 255",), ("full",)]),
        (("window 0",), [("window 0",)]),
    ],
    ids=["dilated", "window", "mixed", "full", "own row"],
)
def test_patterns_of_all_layers_are_cut_to_a_reach(patterns: tuple[str, ...], cuts: list[tuple[str, ...]]) -> None:
    config = LongNetConfig.named("nano", patterns=patterns)
    assert [cut.patterns for cut in ablated_configs(config, 512)] == cuts

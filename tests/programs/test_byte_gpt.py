"""The byte-level GPT: its windows, the table it must beat, and that it learns, the same way every time."""

import math

import numpy as np
import pytest
import torch

from everstep.programs import byte_gpt
from everstep.programs.byte_gpt import Windows

TINY = {
    "layers": 1,
    "width": 32,
    "heads": 2,
    "context": 16,
    "batch_size": 8,
    "lr": 0.01,
    "warmup": 5,
    "decay_steps": 60,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A text whose next byte depends on the two before it: a table of pairs cannot know it, a model can."""
    folder = tmp_path_factory.mktemp("corpus")
    text = (b"abcaad" * 2000)[:10_000]
    for name, part in (("train-000", text[:4096]), ("train-001", text[4096:8192]), ("held-000", text[8192:])):
        (folder / f"{name}.bin").write_bytes(part)
    return folder


def trained(data, steps):
    torch.manual_seed(0)
    program = byte_gpt.build(TINY, data)
    for step in range(steps):
        batch = program.collate([program.dataset[(step * 8 + one) % len(program.dataset)] for one in range(8)])
        program.optimizer.zero_grad()
        program.loss(batch).backward()
        program.optimizer.step()
        program.scheduler.step()
    return program


def test_a_window_is_a_pure_function_of_its_number(data):
    windows = Windows(data, "train", 16)
    assert len(windows) == 2 * (4095 // 16)
    text = [np.fromfile(data / f"train-00{shard}.bin", np.uint8) for shard in (0, 1)]
    for index, shard, start in ((0, 0, 0), (1, 0, 16), (254, 0, 4064), (255, 1, 0), (509, 1, 4064)):
        assert windows[index].tolist() == text[shard][start : start + 17].tolist()
    assert windows[7].dtype == torch.int64
    assert isinstance(windows.shards[0], np.memmap), "text is mapped, not read"


def test_a_folder_without_text_is_refused_in_a_sentence(data, tmp_path):
    with pytest.raises(ValueError, match=r"data.source: .* holds no text in train-\*.bin"):
        byte_gpt.build(TINY, tmp_path)


def test_the_bigram_table_is_what_counting_gives(data):
    counts = byte_gpt.count_pairs([np.frombuffer(b"abab", np.uint8), np.frombuffer(b"ac", np.uint8)])
    assert counts.sum() == 4
    assert (counts[97, 98], counts[98, 97], counts[97, 99]) == (2, 1, 1)
    bits = byte_gpt.bits_of_bigram(counts, torch.tensor([[97, 98, 97], [97, 99, 0]]))
    certain = 256 * 0.01
    expected = [2.01 / (3 + certain), 1.01 / (1 + certain), 1.01 / (3 + certain), 0.01 / certain]
    assert bits == pytest.approx(-sum(map(math.log2, expected)) / 4)


def test_a_short_training_beats_the_table_and_shows_it(data):
    program = trained(data, 60)
    with torch.no_grad():
        measured = program.evaluate()
        text = program.show()
    assert measured["bits_per_byte"] < 0.5
    assert measured["bigram_bits_per_byte"] > 0.7
    assert f"{measured['bits_per_byte']:.3f} by this model" in text
    assert f"{measured['bigram_bits_per_byte']:.3f} by a bigram table" in text
    assert "the same 4,096 held-out bytes" in text
    assert len(text.partition("A sample:\n")[2]) >= byte_gpt.SAMPLE_BYTES


def test_it_is_the_same_every_time(data):
    one, other = trained(data, 3), trained(data, 3)
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name]), name
    assert one.show() == other.show()


def test_the_future_is_not_seen(data):
    model = trained(data, 1).model.eval()
    text = torch.tensor([list(b"abcaadabcaad")])
    other = text.clone()
    other[0, -1] = 0
    assert torch.equal(model(text)[0, :-1], model(other)[0, :-1])


def test_the_rate_rises_then_falls_to_a_tenth_and_stays():
    rates = [byte_gpt.rate(step, 10, 100) for step in range(150)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == rates[10] == pytest.approx(1.0)
    assert rates[100:] == [pytest.approx(0.1)] * 50
    assert rates[10:101] == sorted(rates[10:101], reverse=True)

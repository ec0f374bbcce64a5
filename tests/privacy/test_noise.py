"""Secret noise is Gaussian, of the size asked for, and never the same twice; seeded noise keeps its bits.

The secret draws have no seed, so each test below fails by chance about once in a million runs.
"""

import itertools
import math
import os
import secrets
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from scipy import stats

from fedfrozen_app.core.seeds import numpy_generator
from fedfrozen_app.privacy import keystream
from fedfrozen_app.privacy.keystream import CHUNK, Keystream
from fedfrozen_app.privacy.noise import STEP_BITS, SecretNoise, SeededNoise

CPU = torch.device("cpu")
RARE = 1e-6
MANY = 3 * CHUNK + 7  # several chunks, and an odd rest


@pytest.fixture(scope="module")
def drawn():
    return Keystream().gaussians(MANY, CPU).numpy()


def test_gaussians_have_their_distribution(drawn):
    assert len(drawn) == MANY and drawn.dtype == np.float64
    assert stats.kstest(drawn, "norm").pvalue > RARE
    for start in range(0, MANY, CHUNK):  # in every chunk, and in its two halves (cosines and sines)
        chunk = drawn[start : start + CHUNK]
        for part in (chunk, chunk[: len(chunk) // 2], chunk[len(chunk) // 2 :]):
            assert stats.kstest(part, "norm").pvalue > RARE


def test_gaussians_have_their_moments(drawn):
    # Of n values: the mean's deviation is √(1/n), the variance's √(2/n), the fourth moment's √(96/n).
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        far = abs(float((drawn**power).mean()) - mean) / math.sqrt(variance / MANY)
        assert far < stats.norm.isf(RARE / 2)
    beyond = int((np.abs(drawn) > 4).sum())  # and their tails
    assert stats.binomtest(beyond, MANY, 2 * stats.norm.sf(4)).pvalue > RARE


def test_neighbours_partners_and_squares_are_independent(drawn):
    """Two values that share a Box-Muller pair lie half a chunk apart."""
    whole = drawn[: 3 * CHUNK]
    for lag in (1, 2, CHUNK // 2, CHUNK):
        for values in (whole, (whole**2 - 1) / math.sqrt(2)):
            together = float((values[:-lag] * values[lag:]).mean()) * math.sqrt(len(whole) - lag)
            assert abs(together) < 7  # standard deviations; products have heavier tails than a Gaussian
    # Neither do the squares of partners: their sum would be the pair's radius were there one term only.
    halves = whole.reshape(3, 2, CHUNK // 2)
    assert stats.kstest((halves**2).sum(axis=1).ravel(), stats.chi2(2).cdf).pvalue > RARE


def test_a_pair_by_hand(monkeypatch):
    """Eight words give four radii and four angles; each of the two Gaussians is half the sum of four."""
    eighths = np.array([1, 2, 4, 7, 0, 1, 3, 6])  # of 2⁶⁴: u₁ = 1/8 … 7/8, u₂ = 0 … 6/8
    words = eighths.astype(np.uint64) << np.uint64(61)
    drawn = words.view(np.uint8)

    def encipher(self, room, size):
        room[:size] = drawn[:size].data

    monkeypatch.setattr(Keystream, "encipher", encipher)
    radius, angle = np.sqrt(-2 * np.log(eighths[:4] / 8)), 2 * np.pi * eighths[4:] / 8
    expected = [(radius * np.cos(angle)).sum() / 2, (radius * np.sin(angle)).sum() / 2]
    assert Keystream().gaussians(2, CPU).tolist() == pytest.approx(expected, rel=1e-12)


def test_uniform_and_whole_numbers_are_even():
    stream = Keystream()
    values = stream.uniform(MANY)
    assert values.min() >= 0 and values.max() < 1
    assert stats.kstest(values, "uniform").pvalue > RARE
    whole = [stream.below(6) for _ in range(12_000)]
    assert stats.chisquare(np.bincount(whole, minlength=6)).pvalue > RARE
    assert {stream.below(1) for _ in range(5)} == {0}


def test_bits_are_even():
    words = Keystream().words(100_000)
    ones = np.unpackbits(words.view(np.uint8)).reshape(-1, 64).sum(axis=0)
    assert stats.chisquare(ones, np.full(64, ones.mean())).pvalue > RARE
    assert stats.binomtest(int(ones.sum()), 6_400_000, 0.5).pvalue > RARE


def test_it_is_the_keystream_of_aes(monkeypatch):
    """NIST SP 800-38A would do for the cipher; that the counter starts at 0 and goes on is ours to keep."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    key = bytes(range(32))
    monkeypatch.setattr(keystream.secrets, "token_bytes", lambda size: key[:size])
    stream = Keystream()
    ours = np.concatenate([stream.words(3), stream.words(5)]).tobytes()
    blocks = Cipher(algorithms.AES256(key), modes.ECB()).encryptor()
    assert ours == blocks.update(b"".join(number.to_bytes(16, "big") for number in range(4)))


def test_no_two_streams_share_anything():
    words = [Keystream().words(1000) for _ in range(50)]
    assert len(np.unique(np.concatenate(words))) == 50_000


def test_a_fork_goes_on_with_a_key_of_its_own():
    """Also a grandchild, and the parent's own stream is not disturbed."""
    stream = Keystream()
    stream.words(2)
    reader, writer = os.pipe()
    if os.fork() == 0:
        child = stream.words(4)
        if os.fork() == 0:
            os.write(writer, stream.words(4).tobytes())
            os._exit(0)
        os.wait()
        os.write(writer, child.tobytes())
        os._exit(0)
    os.wait()
    theirs = np.frombuffer(os.read(reader, 64), dtype=np.uint64)
    os.close(reader)
    os.close(writer)
    assert len(theirs) == 8 and len(np.unique(np.concatenate([theirs, stream.words(4)]))) == 12


def _first_words_of_a_fork():
    """Without a pool: its own threads can wait for ever in the fork of a process that has others."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writer, SecretNoise(CPU)._stream.words(8).tobytes())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    words = os.read(reader, 64)
    os.close(reader)
    return np.frombuffer(words, dtype=np.uint64).tolist()


def test_no_repeats_across_processes():
    found = [_first_words_of_a_fork() for _ in range(8)]
    assert len({word for words in found for word in words}) == 64


@pytest.mark.parametrize("size", [MANY, MANY + 1])  # both leave some of the last lane's numbers over
def test_noise_that_several_threads_draw_is_gaussian_and_independent(size):
    """Six threads for two clients: three lanes each, and no two say the same."""
    sources, like = [SecretNoise(CPU) for _ in range(2)], torch.empty(size)
    with ThreadPoolExecutor(6) as workers:
        drawn = SecretNoise.standards(sources, like, workers, 6).numpy()
        again = SecretNoise.standards(sources, like, workers, 6).numpy()
        alone = SecretNoise.standards(sources[:1], like, workers, 6).numpy()  # six lanes of its own
    assert drawn.shape == (2, size) and alone.shape == (1, size)
    lane = -(-size // 3)
    lanes = [row[start : start + lane] for row in (*drawn, *again) for start in range(0, size, lane)]
    assert len(lanes) == 12
    for part in (*lanes, *alone):
        assert stats.kstest(part, "norm").pvalue > RARE
    for one, other in itertools.combinations([*lanes, alone[0]], 2):
        length = min(len(one), len(other))
        for values, others in ((one, other), (one**2 - 1, (other**2 - 1) / 2)):
            assert abs(float((values[:length] * others[:length]).mean())) * math.sqrt(length) < 7


def test_chunks_keep_their_order_whoever_enciphers_them(monkeypatch):
    """Of a stream that is held up too, while others are ahead."""
    encipher = keystream.Keystream.encipher

    def held_up(self, room, size):
        time.sleep(0.003 * secrets.randbelow(3))
        encipher(self, room, size)

    found = []
    for threads in (None, 5):
        keys = itertools.count()
        monkeypatch.setattr(keystream.secrets, "token_bytes", lambda size, k=keys: bytes([next(k)]) * size)
        streams = [keystream.Keystream() for _ in range(3)]
        count = 10 * keystream.CHUNK // 3
        if threads is None:
            found.append(keystream.gaussians_of(streams, count, CPU))
            continue
        monkeypatch.setattr(keystream.Keystream, "encipher", held_up)
        with ThreadPoolExecutor(threads) as workers:
            found.append(keystream.gaussians_of(streams, count, CPU, workers))
    assert torch.equal(*found)


def test_no_cipher_is_at_work_after_a_draw_that_failed(monkeypatch):
    at_work, encipher = Counter(), keystream.Keystream.encipher

    def slow(self, room, size):
        at_work[self] += 1
        assert at_work[self] == 1
        time.sleep(0.05)
        encipher(self, room, size)
        at_work[self] -= 1

    monkeypatch.setattr(keystream.Keystream, "encipher", slow)
    streams, worked_out = [Keystream() for _ in range(2)], keystream._worked_out
    with ThreadPoolExecutor(4) as workers:
        monkeypatch.setattr(keystream, "_worked_out", lambda words: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            keystream.gaussians_of(streams, 4 * CHUNK, CPU, workers)
        monkeypatch.setattr(keystream, "_worked_out", worked_out)
        assert keystream.gaussians_of(streams, 10, CPU, workers).shape == (2, 10)


# What training sees ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [SecretNoise(CPU), SeededNoise(CPU, 0, "a", 1)])
def test_poisson_samples_have_the_rate_asked_for(source):
    sizes = np.array([len(source.poisson(200, 0.1)) for _ in range(500)])
    # Binomial: of mean 20 and variance 18, whose own deviation over 500 samples is about 1.14.
    assert abs(sizes.mean() - 20) < 5 * math.sqrt(18 / 500) and abs(sizes.var() - 18) < 5 * 1.14
    assert len(source.poisson(50, 0.0)) == 0 and source.poisson(50, 1.0).tolist() == list(range(50))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_added_with_the_deviation_asked_for(dtype):
    value = torch.linspace(-5, 5, 90_000, dtype=dtype).view(300, 300)
    noisy = SecretNoise(CPU).added_to(value, 0.37)
    assert noisy.dtype == dtype and noisy.shape == value.shape
    assert stats.kstest(((noisy - value) / 0.37).flatten().numpy(), "norm").pvalue > RARE
    assert torch.equal(SecretNoise(CPU).added_to(value, 0.0), value)


def test_what_leaves_lies_on_a_grid_that_knows_nothing_of_the_sum():
    """Near zero a float32 has digits far below the noise; those of a sum without noise must not be there."""
    step = 2.0 ** (-2 - STEP_BITS)  # 0.37 lies between 2⁻² and 2⁻¹
    for hidden in (0.1, 1 / 3, 1e-9):
        noisy = SecretNoise(CPU).added_to(torch.full((50_000,), hidden, dtype=torch.float64), 0.37)
        assert torch.equal((noisy / step).round() * step, noisy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clients_side_by_side_get_the_bits_of_each_by_itself(dtype):
    """Each has a deviation of its own, and so a grid of its own; powers of two lie at the edge of theirs."""
    stds = [0.37, 0.25, 1.0, 4.9e-7, 123.4]
    value = torch.linspace(-5, 5, 5 * 700, dtype=dtype).view(5, 700)
    column = torch.tensor(stds, dtype=torch.float64)[:, None]
    drawn = SecretNoise(CPU).standard(value)
    together = SecretNoise.with_drawn(value, drawn.clone(), column)
    for row, own, std, found in zip(value, drawn, stds, together, strict=True):
        step = 2.0 ** (math.floor(math.log2(std)) - STEP_BITS)
        expected = ((own * (std / step) + row.double() / step).round() * step).to(dtype)
        alone = SecretNoise.with_drawn(row, own.clone(), torch.tensor(std, dtype=torch.float64))
        assert torch.equal(found, expected) and torch.equal(alone, expected)
    for kind in (torch.float64, dtype):  # as numpy draws it, and a GPU
        drawn = SeededNoise(CPU, 0, "a", 1).standard(value).to(kind)
        together = SeededNoise.with_drawn(value, drawn.clone(), column)
        for row, own, std, found in zip(value, drawn, stds, together, strict=True):
            assert torch.equal(found, row + (own * std).to(row))


def test_a_seed_gives_the_same_bits_as_ever():
    source, plain = SeededNoise(CPU, 7, "3", 2), numpy_generator(7, "privacy", "3", 2)
    assert np.array_equal(source.poisson(50, 0.3), np.flatnonzero(plain.random(50) < 0.3))
    assert source.one_of(1000) == plain.integers(1000) == 313
    value = torch.arange(6.0).view(2, 3)
    expected = value + torch.from_numpy(plain.standard_normal((2, 3)) * 0.7).float()
    assert torch.equal(source.added_to(value, 0.7), expected)
    assert not torch.equal(SeededNoise(CPU, 7, "4", 2).added_to(value, 0.7), value)


def test_dropout_masks_are_new_every_time_and_leave_the_generator_alone():
    before = torch.default_generator.get_state()
    masks = []
    for _ in range(2):
        with SecretNoise(CPU).dropout():
            masks.append(torch.rand(100))
    assert not torch.equal(*masks) and torch.equal(torch.default_generator.get_state(), before)

"""The ring buffer against a deque, rollouts and the value gap in toy models whose every step is known."""

import io
from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import micro

CPU = torch.device("cpu")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# --- the ring buffer --------------------------------------------------------------------------------------------------
def numbered(first, count):
    """Rows that tell when they were written: [number, 2 * number], from 1 on."""
    numbers = torch.arange(first, first + count, dtype=torch.float32) + 1
    return torch.stack([numbers, 2 * numbers], -1)


def filled(capacity, sizes):
    """A buffer after additions of these sizes, and the numbers of the rows that should be in it."""
    buffer, expected, count = micro.RingBuffer(capacity, 2, CPU), deque(maxlen=capacity), 0
    buffer.rows.fill_(float("nan"))  # what was not written must never be seen
    for size in sizes:
        rows = numbered(count, size)
        buffer.add(rows)
        expected.extend(rows[:, 0].tolist())
        count += size
    return buffer, expected


@settings(max_examples=300, deadline=None)
@given(capacity=st.integers(1, 12), sizes=st.lists(st.integers(0, 30), min_size=1, max_size=12))
def test_the_buffer_holds_the_newest_rows(capacity, sizes):
    buffer, expected = filled(capacity, sizes)
    assert buffer.size == len(expected)
    assert sorted(buffer.rows[: buffer.size, 0].tolist()) == list(expected)
    if expected:
        sample = buffer.sample(400, generator())  # 12 rows at most: each is drawn, but for a chance of 1e-14
        assert sample.shape == (400, 2)
        assert set(sample[:, 0].tolist()) == set(expected)
        assert torch.equal(sample[:, 1], 2 * sample[:, 0])


def test_more_rows_than_fit():
    buffer, _ = filled(5, [3, 17])
    assert sorted(buffer.rows[:, 0].tolist()) == [16, 17, 18, 19, 20]
    buffer.add(numbered(20, 1))
    assert sorted(buffer.rows[:, 0].tolist()) == [17, 18, 19, 20, 21]  # the oldest went


def test_every_row_is_drawn_equally_often():
    buffer, _ = filled(10, [7, 6])
    counts = torch.bincount(buffer.sample(20_000, generator())[:, 0].long())[4:]
    assert len(counts) == 10 and (counts - 2000).abs().max() < 6 * 2000**0.5


def test_sampling_is_a_function_of_the_generator():
    buffer, _ = filled(50, [70])
    assert torch.equal(buffer.sample(20, generator(1)), buffer.sample(20, generator(1)))
    assert not torch.equal(buffer.sample(20, generator(1)), buffer.sample(20, generator(2)))


@pytest.mark.parametrize("sizes", [[3], [8], [3, 8], [20]], ids=["part full", "full", "wrapped", "overfull"])
def test_a_saved_buffer_goes_on_as_before(sizes):
    """As in a checkpoint: its attributes through a file, and then the same additions to both."""
    buffer, _ = filled(8, sizes)
    stream = io.BytesIO()
    torch.save(vars(buffer), stream)
    stream.seek(0)
    restored = micro.RingBuffer(8, 2, CPU)
    vars(restored).update(torch.load(stream, weights_only=True))
    for size in (0, 2, 5, 9):
        for copy in (buffer, restored):
            copy.add(numbered(100, size))
        assert torch.equal(buffer.sample(50, generator(3)), restored.sample(50, generator(3)))
        assert torch.equal(buffer.rows[: buffer.size], restored.rows[: restored.size])


# --- rollouts ---------------------------------------------------------------------------------------------------------
def toy_ensemble(changes, log_std=-40.0):
    """One model for each (change of x, reward): states are [x, name], and a model changes x, never the name."""
    ensemble = micro.Ensemble(len(changes), 2, 1, 4).requires_grad_(False)
    for parameter in [*ensemble.weights, *ensemble.biases]:
        parameter.zero_()
    for bias, (change, reward) in zip(ensemble.biases[-1], changes):
        bias[0] = torch.tensor([change, 0, reward, 2 * log_std, -80, -80])
    ensemble.min_logvar.fill_(-80)
    ensemble.max_logvar.fill_(20)
    return ensemble


def toy_actor():
    torch.manual_seed(0)
    return micro.Actor(2, 1, 8).requires_grad_(False)


def starts_at(*positions):
    return torch.stack([torch.tensor(positions, dtype=torch.float32), torch.arange(len(positions)).float()], -1)


def beyond(limit):
    return lambda obs: obs[..., 0] >= limit


def never(obs):
    return torch.zeros(obs.shape[:-1], dtype=torch.bool)


def roll(ensemble, terminated, starts, length, num_elites=None, seed=0):
    """The stored rows, as chains: name -> rows in the order in which they were stored."""
    buffer = micro.RingBuffer(10_000, 7, CPU)
    num_elites = num_elites or len(ensemble.weights[0])
    stats = micro.rollout(toy_actor(), ensemble, num_elites, terminated, starts, length, buffer, generator(seed))
    chains = {name: [] for name in range(len(starts))}
    for row in buffer.rows[: buffer.size]:
        obs, act, reward, next_obs, done = micro.unpack(row, 2, 1)
        assert abs(act.item()) <= 1
        chains[round(obs[1].item())].append((obs, act.item(), reward.item(), next_obs, done.item()))
    return chains, stats, buffer


def check_links(chains, starts, terminated, length):
    """Each chain begins at its start, goes on from the predicted state, and ends at the first done or at the length."""
    for name, chain in chains.items():
        assert torch.equal(chain[0][0], starts[name])
        for before, after in zip(chain, chain[1:]):
            assert torch.equal(before[3], after[0])
            assert before[4] == 0
        assert all(bool(done) == bool(terminated(next_obs)) for _, _, _, next_obs, done in chain)
        assert len(chain) == length or chain[-1][4] == 1


def test_rollouts_stop_at_termination_and_go_on_from_the_predicted_state():
    """x grows by 1 a step and ends at 3: from x = 0, 1, 2, 2.5, -10 there are 3, 2, 1, 1 and 5 rows."""
    starts = starts_at(0, 1, 2, 2.5, -10)
    chains, stats, buffer = roll(toy_ensemble([(1.0, 0.5)] * 3), beyond(3), starts, length=5)
    check_links(chains, starts, beyond(3), 5)
    assert [len(chain) for chain in chains.values()] == [3, 2, 1, 1, 5]
    assert [chain[-1][4] for chain in chains.values()] == [1, 1, 1, 1, 0]
    for start, chain in zip(starts, chains.values()):
        assert [row[3][0].item() for row in chain] == pytest.approx([start[0].item() + k + 1 for k in range(len(chain))])
        assert all(reward == pytest.approx(0.5) for _, _, reward, _, _ in chain)
    assert stats["rollout_rows"] == buffer.size == 12
    assert stats["rollout_reward"] == pytest.approx(0.5)
    assert stats["rollout_ended"] == pytest.approx(4 / 5)


def test_rollouts_stop_early_when_all_have_ended():
    starts = starts_at(2, 2, 2)
    chains, stats, _ = roll(toy_ensemble([(1.0, 0.0)]), beyond(3), starts, length=50)
    assert [len(chain) for chain in chains.values()] == [1, 1, 1]
    assert stats["rollout_rows"] == 3 and stats["rollout_ended"] == 1


@pytest.mark.parametrize("length", [1, 4])
def test_rollouts_without_termination_have_the_full_length(length):
    starts = starts_at(*range(7))
    chains, stats, _ = roll(toy_ensemble([(1.0, 0.0)] * 2), never, starts, length)
    check_links(chains, starts, never, length)
    assert stats["rollout_rows"] == 7 * length and stats["rollout_ended"] == 0


def test_noisy_rollouts_link_up_as_well():
    """With noise of standard deviation 1 around +0.3, the termination is that of the state that was drawn."""
    starts = starts_at(*[0.0] * 200)
    chains, stats, buffer = roll(toy_ensemble([(0.3, 0.0)] * 2, log_std=0.0), beyond(2), starts, length=6)
    check_links(chains, starts, beyond(2), 6)
    assert {len(chain) for chain in chains.values()} == {1, 2, 3, 4, 5, 6}
    changes = torch.cat([row[3][:1] - row[0][:1] for chain in chains.values() for row in chain])
    assert abs(changes.mean() - 0.3) < 0.15 and abs(changes.std() - 1) < 0.1
    assert stats["rollout_rows"] == buffer.size == sum(map(len, chains.values()))


def test_every_step_draws_one_elite_for_each_row():
    """Four models, of which the first two are elites: uniform, anew at each step, change and reward of the same one."""
    ensemble = toy_ensemble([(1.0, 10.0), (2.0, 20.0), (100.0, 0.0), (1000.0, 0.0)])
    starts = starts_at(*[0.0] * 300)
    chains, _, _ = roll(ensemble, never, starts, 5, num_elites=2)
    check_links(chains, starts, never, 5)
    drawn = [[round((row[3] - row[0])[0].item()) for row in chain] for chain in chains.values()]
    rewards = [[round(row[2]) for row in chain] for chain in chains.values()]
    assert rewards == [[10 * elite for elite in chain] for chain in drawn]
    share = sum(chain.count(1) for chain in drawn) / 1500
    assert abs(share - 0.5) < 0.07
    assert sum(len(set(chain)) == 2 for chain in drawn) > 250  # nearly every chain saw both elites


def test_rollouts_are_a_function_of_the_generator():
    ensemble, starts = toy_ensemble([(1.0, 0.5)] * 2, log_std=0.0), starts_at(*range(5))
    one, again, other = (roll(ensemble, never, starts, 3, seed=seed)[2].rows for seed in (1, 1, 2))
    assert torch.equal(one[:15], again[:15]) and not torch.equal(one[:15], other[:15])


def test_many_rows_are_cut_into_chunks(monkeypatch):
    monkeypatch.setattr(micro, "CHUNK", 7)
    starts = starts_at(*[0.0] * 100)
    chains, stats, _ = roll(toy_ensemble([(1.0, 0.5)] * 3), beyond(3), starts, length=5)
    check_links(chains, starts, beyond(3), 5)
    assert stats["rollout_rows"] == 300


# --- the value gap ----------------------------------------------------------------------------------------------------
def constant_critics(*values):
    critics = micro.Critics(len(values), 2, 1, 4).requires_grad_(False)
    for critic, value in zip(critics.critics, values):
        critic[-1].weight.zero_()
        critic[-1].bias.fill_(value)
    return critics


def gap(ensemble, terminated, starts, gamma, steps, critics=(10.0, 7.0)):
    critics = constant_critics(*critics)
    num_models = len(ensemble.weights[0])
    return micro.value_gap(toy_actor(), critics, ensemble, num_models, terminated, starts, gamma, generator(), steps)


def test_value_gap_of_a_constant_reward():
    """The smaller critic says 7; a reward of 0.5 for 40 steps is worth 0.5 (1 - 0.9^40) / (1 - 0.9)."""
    value, excess = gap(toy_ensemble([(0.0, 0.5)] * 2), never, starts_at(1, 2, 3), gamma=0.9, steps=40)
    assert value == pytest.approx(7)
    assert excess == pytest.approx(7 - 0.5 * (1 - 0.9**40) / 0.1, rel=1e-5)


def test_value_gap_counts_the_reward_of_the_last_step_only_once():
    """From x = 0, 2 and 2.5 there are 3, 1 and 1 rewards before x = 3: the terminal step is paid, then nothing."""
    value, excess = gap(toy_ensemble([(1.0, 2.0)] * 2), beyond(3), starts_at(0, 2, 2.5), gamma=0.5, steps=100)
    assert excess == pytest.approx(7 - 2 * ((1 + 0.5 + 0.25) + 1 + 1) / 3, rel=1e-5)


def test_value_gap_of_an_honest_critic_is_zero():
    _, excess = gap(toy_ensemble([(0.0, 1.0)]), never, starts_at(0), gamma=0.95, steps=500, critics=(20.0,))
    assert excess == pytest.approx(0, abs=1e-3)


def test_value_gap_by_default_looks_far_enough_ahead():
    """At gamma 0.99 the sum of all rewards of 1 is 100: what the default number of steps leaves out is under 1."""
    args = toy_actor(), constant_critics(100.0), toy_ensemble([(0.0, 1.0)]), 1, never, starts_at(0), 0.99, generator()
    assert micro.value_gap(*args)[1] == pytest.approx(0, abs=1)

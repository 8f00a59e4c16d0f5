"""The dynamics ensemble: it recovers a known noisy linear system, and every detail of its training is as specified."""

import copy
import math

import numpy as np
import pytest
import torch

import micro

OBS_DIM, ACT_DIM = 2, 1
CPU = torch.device("cpu")
A, B = np.array([[-0.1, 0.3], [-0.3, -0.1]]), np.array([[0.2], [0.5]])
NOISE_STD = np.array([0.1, 0.4, 0.2])  # of the two state dimensions and the reward


def mean_change(obs: np.ndarray, act: np.ndarray) -> np.ndarray:
    """The expected (s' - s, r) of the system."""
    return np.concatenate([obs @ A.T + act @ B.T, obs[:, :1] - 0.5 * act], 1)


def system_rows(count: int, seed: int = 0) -> torch.Tensor:
    """Packed rows [s, a, r, s', terminal]."""
    rng = np.random.default_rng(seed)
    obs, act = rng.normal(size=(count, OBS_DIM)), rng.uniform(-1, 1, size=(count, ACT_DIM))
    change = mean_change(obs, act) + NOISE_STD * rng.normal(size=(count, OBS_DIM + 1))
    rows = np.concatenate([obs, act, change[:, -1:], obs + change[:, :-1], np.zeros((count, 1))], 1)
    return torch.as_tensor(rows, dtype=torch.float32)


def make_args(**changes) -> micro.Args:
    return micro.Args(**(dict(num_models=3, num_elites=2, dynamics_hidden_size=16, dynamics_max_epochs=3) | changes))


def train(rows: torch.Tensor, args: micro.Args, saved=None, after_epoch=lambda state, metrics: None) -> dict:
    return micro.train_dynamics(rows, OBS_DIM, ACT_DIM, args, CPU, saved, after_epoch)


def make_ensemble(num_models: int = 3, hidden_size: int = 8) -> micro.Ensemble:
    """Random networks in float64, with biases, bounds and input scale that all matter."""
    torch.manual_seed(0)
    ensemble = micro.Ensemble(num_models, OBS_DIM, ACT_DIM, hidden_size).double()
    with torch.no_grad():
        for parameter in ensemble.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        ensemble.min_logvar.add_(7)
        ensemble.input_mean.add_(0.5)
        ensemble.input_std.mul_(1.5)
    return ensemble


@pytest.fixture
def live(monkeypatch) -> list[micro.Ensemble]:
    """The ensembles that train_dynamics is training: what tests look at, or spoil, between epochs."""
    ensembles, make_optimizer = [], micro.dynamics_optimizer

    def watched(ensemble, lr):
        ensembles.append(ensemble)
        return make_optimizer(ensemble, lr)

    monkeypatch.setattr(micro, "dynamics_optimizer", watched)
    return ensembles


def split(rows: torch.Tensor, args: micro.Args) -> tuple[torch.Tensor, torch.Tensor]:
    """The holdout and the training rows, drawn again."""
    order = torch.randperm(len(rows), generator=micro.generator(CPU, args.seed, micro.SPLIT))
    size = min(len(rows) // 5, 1000)
    return rows[order[:size]], rows[order[size:]]


def numpy_forward(state: dict, member: int, inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and log-variance by one network, in float64."""
    state = {name: tensor.detach().numpy().astype(np.float64) for name, tensor in state.items()}
    x = (inputs - state["input_mean"]) / state["input_std"]
    for layer in range(5):
        x = x @ state[f"weights.{layer}"][member] + state[f"biases.{layer}"][member]
        if layer < 4:
            x = x / (1 + np.exp(-x))  # SiLU
    mean, logvar = np.split(x, 2, axis=1)
    logvar = state["max_logvar"] - np.logaddexp(0, state["max_logvar"] - logvar)  # logaddexp(0, x) is softplus
    return mean, state["min_logvar"] + np.logaddexp(0, logvar - state["min_logvar"])


def holdout_error(state: dict, member: int, rows: torch.Tensor) -> float:
    """The mean squared error of one network's mean of (s' - s, r)."""
    rows, errors = rows.numpy().astype(np.float64), []
    mean, _ = numpy_forward(state, member, rows[:, : OBS_DIM + ACT_DIM])
    for row, prediction in zip(rows, mean):
        obs, reward, next_obs = row[:OBS_DIM], row[OBS_DIM + ACT_DIM], row[OBS_DIM + ACT_DIM + 1 : -1]
        errors += [(prediction[i] - (next_obs[i] - obs[i])) ** 2 for i in range(OBS_DIM)]
        errors.append((prediction[-1] - reward) ** 2)
    return float(np.mean(errors))


# --- what it learns ---------------------------------------------------------------------------------------------------
def test_it_recovers_a_noisy_linear_system():
    args = make_args(dynamics_hidden_size=32, dynamics_max_epochs=40, dynamics_lr=3e-3, dynamics_patience=40)
    rows = system_rows(5000)
    ensemble = micro.load_dynamics(train(rows, args), OBS_DIM, ACT_DIM, args, CPU)
    rng = np.random.default_rng(1)
    obs, act = rng.normal(size=(2000, OBS_DIM)), rng.uniform(-1, 1, size=(2000, ACT_DIM))
    expected = mean_change(obs, act)
    observed = expected + NOISE_STD * rng.normal(size=expected.shape)
    mean, logvar = (
        part.numpy() for part in ensemble(torch.as_tensor(np.concatenate([obs, act], 1), dtype=torch.float32))
    )
    std = np.exp(0.5 * logvar)
    for member in range(args.num_models):
        assert (np.sqrt(((mean[member] - expected) ** 2).mean(0)) < 0.35 * NOISE_STD).all()
        np.testing.assert_allclose(std[member].mean(0), NOISE_STD, rtol=0.25)
        np.testing.assert_allclose(((observed - mean[member]) / std[member]).std(0), 1, atol=0.2)


# --- snapshots, elites, stopping --------------------------------------------------------------------------------------
def test_networks_are_the_snapshots_sorted_by_holdout_error(live):
    """Shadow book-keeping: after each epoch, every network's error by an independent loop, and its weights if better.

    After the sixth epoch the live networks are spoilt on purpose: nothing of that may come back.
    """
    rows, args = system_rows(2000), make_args(num_models=4, dynamics_max_epochs=9, dynamics_lr=3e-3, dynamics_patience=9)
    holdout, _ = split(rows, args)
    best, kept, epochs_kept = [math.inf] * 4, [None] * 4, [None] * 4

    def watch(state, metrics):
        current = copy.deepcopy(live[0].state_dict())
        for member in range(4):
            error = holdout_error(current, member, holdout)
            assert float(metrics[f"holdout_error_{member}"]) == pytest.approx(error, rel=1e-4)
            if error < 0.99 * best[member]:
                best[member], kept[member], epochs_kept[member] = error, current, state["epoch"]
        if state["epoch"] == 6:
            with torch.no_grad():
                for parameter in [*live[0].weights, *live[0].biases]:
                    parameter.add_(torch.randn_like(parameter))

    result = train(rows, args, after_epoch=watch)
    assert result["epochs"] == 9 and 1 < max(epochs_kept) <= 6
    errors = result["holdout_error"].tolist()
    assert errors == sorted(errors)
    np.testing.assert_allclose(errors, sorted(best), rtol=1e-4)
    for place, member in enumerate(np.argsort(best)):
        assert holdout_error(result["ensemble"], place, holdout) == pytest.approx(errors[place], rel=1e-4)
        for name in [f"{kind}.{layer}" for kind in ("weights", "biases") for layer in range(5)]:
            assert torch.equal(result["ensemble"][name][place], kept[member][name][member])
    for name in ("max_logvar", "min_logvar"):  # shared by the networks, and not part of a snapshot
        assert torch.equal(result["ensemble"][name], live[0].state_dict()[name])


def staged_run(live, wanted, **changes) -> tuple[dict, list[dict]]:
    """A run in which nothing is learnt and network m has the holdout error wanted[m][epoch], the last one for ever.

    The targets are all zero, the networks ignore their input, and network m predicts sqrt(wanted) everywhere.
    """
    obs = torch.randn(100, OBS_DIM, generator=torch.Generator().manual_seed(0))
    rows = torch.cat([obs, obs[:, :1], torch.zeros(100, 1), obs, torch.zeros(100, 1)], 1)
    states = []

    def stage(state, metrics):
        for member, errors in enumerate(wanted):
            assert float(metrics[f"holdout_error_{member}"]) == pytest.approx(errors[min(len(states), len(errors) - 1)])
        states.append(copy.deepcopy(state))
        prepare(live[-1], len(states))

    def prepare(ensemble, epoch):
        with torch.no_grad():
            ensemble.weights[4].zero_()
            for member, errors in enumerate(wanted):
                ensemble.biases[4][member] = math.sqrt(errors[min(epoch, len(errors) - 1)])

    before_first = micro.dynamics_optimizer

    def prepared(ensemble, lr):
        prepare(ensemble, 0)
        return before_first(ensemble, lr)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro, "dynamics_optimizer", prepared)
        args = make_args(num_models=len(wanted), num_elites=1, dynamics_lr=0.0, **changes)
        return train(rows, args, after_epoch=stage), states


@pytest.mark.parametrize("patience", [1, 2, 5])
def test_patience_stops_after_exactly_so_many_stale_epochs(live, patience):
    """The first epoch always counts as a gain; a constant error never does."""
    result, _ = staged_run(live, [[1.0], [2.0]], dynamics_patience=patience, dynamics_max_epochs=None)
    assert result["epochs"] == 1 + patience


def test_a_gain_is_more_than_one_percent_of_the_network_s_own_best(live):
    """Small steps count once they add up; one network's gain keeps all going; each keeps its own snapshot."""
    first = [1.0, 0.995, 0.991, 0.985, 0.98, 0.979, 0.978, 0.5]  # gains: epochs 1 and 4 (0.985 < 0.99 x 1.0)
    second = [3.0, 4.0, 2.0, 2.5, 2.6, 2.7, 2.8, 0.1]  # gains: epochs 1 and 3
    result, states = staged_run(live, [first, second], dynamics_patience=3, dynamics_max_epochs=None)
    assert [state["stale"] for state in states] == [0, 1, 0, 0, 1, 2, 3]
    assert result["epochs"] == 7  # stale in 5, 6 and 7: the great gain of epoch 8 is never seen
    np.testing.assert_allclose(result["holdout_error"], [0.985, 2.0], rtol=1e-5)
    np.testing.assert_allclose(result["ensemble"]["biases.4"][:, 0, 0].square(), [0.985, 2.0], rtol=1e-5)


def test_max_epochs_stops_in_any_case(live):
    wanted = [[0.5**epoch for epoch in range(10)]]  # would go on for ever
    result, states = staged_run(live, wanted, dynamics_max_epochs=4)
    assert result["epochs"] == len(states) == 4


def test_the_best_networks_come_first(live):
    result, _ = staged_run(live, [[3.0], [1.0], [2.0]])
    np.testing.assert_allclose(result["holdout_error"], [1.0, 2.0, 3.0], rtol=1e-5)
    np.testing.assert_allclose(result["ensemble"]["biases.4"][:, 0, 0].square(), [1.0, 2.0, 3.0], rtol=1e-5)


@pytest.mark.parametrize("interrupted_after", [1, 3, 5])
def test_resuming_gives_the_same_to_the_last_bit(interrupted_after):
    rows, args, states = system_rows(600), make_args(dynamics_max_epochs=5), []
    whole = train(rows, args, after_epoch=lambda state, metrics: states.append(copy.deepcopy(state)))
    resumed = train(rows, args, saved=states[interrupted_after - 1])
    assert whole["epochs"] == resumed["epochs"] == 5
    assert torch.equal(whole["holdout_error"], resumed["holdout_error"])
    for name, tensor in whole["ensemble"].items():
        assert torch.equal(tensor, resumed["ensemble"][name]), name


def test_resuming_remembers_how_many_epochs_were_stale():
    """With a rate of 0 the first epoch is the only gain, so that 4 epochs are all with a patience of 3."""
    args, states = make_args(dynamics_lr=0.0, dynamics_patience=3, dynamics_max_epochs=None), []
    whole = train(system_rows(300), args, after_epoch=lambda state, metrics: states.append(copy.deepcopy(state)))
    assert whole["epochs"] == 4
    for state in states:
        assert train(system_rows(300), args, saved=state)["epochs"] == 4


def test_another_seed_is_another_ensemble():
    rows = system_rows(300)
    one, same, other = (train(rows, make_args(dynamics_max_epochs=1, seed=seed))["ensemble"] for seed in (1, 1, 2))
    assert torch.equal(one["weights.0"], same["weights.0"]) and not torch.equal(one["weights.0"], other["weights.0"])


# --- what each network is shown ---------------------------------------------------------------------------------------
def test_each_network_has_its_own_bootstrap_in_a_new_order_each_epoch(monkeypatch):
    """The reward of a row is its number, so the batches tell which rows they hold."""
    rows, args, shown, loss = system_rows(1000), make_args(dynamics_max_epochs=3), [], micro.dynamics_loss
    rows[:, OBS_DIM + ACT_DIM] = torch.arange(1000)

    def watched(ensemble, inputs, targets):
        numbers = targets[..., -1].long()
        torch.testing.assert_close(inputs, rows[numbers, : OBS_DIM + ACT_DIM])
        torch.testing.assert_close(targets[..., :-1], (rows[numbers, -3:-1] - rows[numbers, :OBS_DIM]))
        shown.append(numbers)
        return loss(ensemble, inputs, targets)

    monkeypatch.setattr(micro, "dynamics_loss", watched)
    train(rows, args)
    assert [batch.shape for batch in shown] == 3 * [(3, 256), (3, 256), (3, 256), (3, 32)]  # 800 rows, the rest included
    epochs = [torch.cat(shown[4 * epoch : 4 * epoch + 4], 1) for epoch in range(3)]
    holdout, _ = split(rows, args)
    assert not set(holdout[:, OBS_DIM + ACT_DIM].long().tolist()) & set(torch.cat(epochs).flatten().tolist())
    for member in range(3):
        samples = [sorted(epoch[member].tolist()) for epoch in epochs]
        assert samples[0] == samples[1] == samples[2]  # drawn once
        assert 0.58 < len(set(samples[0])) / 800 < 0.68  # with replacement: 1 - 1/e = 0.632 of the rows
        assert not torch.equal(epochs[0][member], epochs[1][member])
        assert not torch.equal(epochs[1][member], epochs[2][member])
        for other in range(member):
            assert samples[0] != sorted(epochs[0][other].tolist())
    by_position = [[epoch[member].argsort().tolist() for member in range(3)] for epoch in epochs]
    assert by_position[0][0] != by_position[0][1]  # and the networks are not shuffled alike


@pytest.mark.parametrize("count, holdout_size", [(100, 20), (7000, 1000)])
def test_holdout_is_a_fifth_but_at_most_a_thousand(monkeypatch, count, holdout_size):
    seen = []

    def counted(ensemble, inputs, targets):
        seen.append(inputs.shape[1])
        return ensemble.max_logvar.sum()  # anything with a gradient

    monkeypatch.setattr(micro, "dynamics_loss", counted)
    train(system_rows(count), make_args(num_models=1, num_elites=1, dynamics_hidden_size=2, dynamics_max_epochs=1))
    assert sum(seen) == count - holdout_size


@pytest.mark.parametrize("constant", [0.0, 0.3, -1.0, 1000.1])
def test_inputs_are_standardised_with_the_training_rows(constant):
    """Mean and population std without the holdout; a constant column has the std 1."""
    rows, args = system_rows(1000), make_args(dynamics_max_epochs=1, dynamics_lr=0.0)
    rows[:, OBS_DIM] = constant
    state = train(rows, args)["ensemble"]
    inputs = split(rows, args)[1][:, : OBS_DIM + ACT_DIM].numpy().astype(np.float64)
    np.testing.assert_allclose(state["input_mean"], inputs.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(state["input_std"][:OBS_DIM], inputs[:, :OBS_DIM].std(0), rtol=1e-5)
    assert state["input_std"][OBS_DIM] == 1


# --- loss, optimizer, networks ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(20,), (3, 20)])
def test_loss_against_a_loop(shape):
    """Every network on the same batch, or each on its own."""
    ensemble, rng = make_ensemble(), np.random.default_rng(0)
    inputs, targets = rng.normal(size=(*shape, OBS_DIM + ACT_DIM)), 2 * rng.normal(size=(*shape, OBS_DIM + 1))
    expected = 0.0
    for member in range(3):
        own_inputs, own_targets = (x if len(shape) == 1 else x[member] for x in (inputs, targets))
        mean, logvar = numpy_forward(ensemble.state_dict(), member, own_inputs)
        terms = []
        for row in range(20):
            for i in range(OBS_DIM + 1):
                error = mean[row, i] - own_targets[row, i]
                terms.append(error**2 / math.exp(logvar[row, i]) + logvar[row, i])
        expected += sum(terms) / len(terms)
    for maximum, minimum in zip(ensemble.max_logvar.tolist(), ensemble.min_logvar.tolist()):
        expected += 0.01 * (maximum - minimum)
    loss = micro.dynamics_loss(ensemble, torch.as_tensor(inputs), torch.as_tensor(targets))
    assert loss.item() == pytest.approx(expected, rel=1e-10)


def test_weight_decay_is_that_of_the_loss():
    """Some steps equal those of plain Adam on the loss with its explicit term: weights of each layer, no biases."""
    ensemble, rng = make_ensemble(), torch.Generator().manual_seed(0)
    reference = copy.deepcopy(ensemble)
    optimizer = micro.dynamics_optimizer(ensemble, 1e-2)
    plain = torch.optim.Adam(reference.parameters(), lr=1e-2)
    for _ in range(5):
        inputs, targets = (torch.randn(30, 3, generator=rng, dtype=torch.float64) for _ in range(2))
        optimizer.zero_grad()
        micro.dynamics_loss(ensemble, inputs, targets).backward()
        optimizer.step()
        loss = micro.dynamics_loss(reference, inputs, targets)
        for weight, decay in zip(reference.weights, (2.5e-5, 5e-5, 7.5e-5, 7.5e-5, 1e-4)):
            loss = loss + decay * 0.5 * (weight**2).sum()
        plain.zero_grad()
        loss.backward()
        plain.step()
    for (name, ours), expected in zip(ensemble.named_parameters(), reference.parameters()):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-11, msg=f"{name} differs")


def test_initial_parameters():
    """A normal cut at two std has 0.8796 of its std."""
    torch.manual_seed(0)
    ensemble = micro.Ensemble(7, 11, 3, 200)
    assert [tuple(weight.shape) for weight in ensemble.weights] == [(7, 14, 200), *[(7, 200, 200)] * 3, (7, 200, 24)]
    for weight in ensemble.weights:
        std = 1 / (2 * math.sqrt(weight.shape[1]))
        assert 1.98 * std < weight.abs().max() <= 2 * std
        assert weight.std().item() == pytest.approx(0.8796 * std, rel=0.02)
        assert abs(weight.mean().item()) < 0.02 * std
        assert not torch.equal(weight[0], weight[1])
    assert all((bias == 0).all() for bias in ensemble.biases)
    assert (ensemble.max_logvar == 0.5).all() and (ensemble.min_logvar == -10).all()


def test_forward_against_numpy_and_of_some_members_only():
    ensemble = make_ensemble(4).requires_grad_(False)
    shared = torch.randn(9, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    own = torch.randn(4, 9, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for inputs in (shared, own):
        kept = inputs.clone()
        everything = ensemble(inputs)
        for member in range(4):
            expected = numpy_forward(ensemble.state_dict(), member, (inputs if inputs is shared else own[member]).numpy())
            for ours, theirs in zip(everything, expected):
                np.testing.assert_allclose(ours[member], theirs, rtol=1e-9, atol=1e-9)
        for members in (slice(2), slice(1, 2), slice(4)):
            part = ensemble(inputs if inputs is shared else inputs[members], members)
            for ours, theirs in zip(part, everything):
                torch.testing.assert_close(ours, theirs[members])
        with torch.no_grad():  # where SiLU works in place
            for ours, theirs in zip(ensemble(inputs), everything):
                torch.testing.assert_close(ours, theirs)
        assert torch.equal(inputs, kept)


# --- a step in the model ----------------------------------------------------------------------------------------------
def certain_ensemble(num_models: int) -> micro.Ensemble:
    """Networks of wildly different biases that are sure of what they say: std e^-15."""
    ensemble = make_ensemble(num_models).requires_grad_(False)
    ensemble.biases[4][:, 0, : OBS_DIM + 1] += 100 * torch.arange(1, num_models + 1)[:, None]
    ensemble.biases[4][:, 0, OBS_DIM + 1 :] = -1000
    ensemble.min_logvar.fill_(-30)
    return ensemble


def test_each_row_steps_in_the_one_elite_drawn_for_it(monkeypatch):
    """s' and r come from the same elite, all elites are used alike, no other network is, and each state steps once."""
    monkeypatch.setattr(micro, "CHUNK", 100)
    num_models, num_elites, count = 5, 3, 3000
    ensemble, actor = certain_ensemble(num_models), micro.Actor(OBS_DIM, ACT_DIM, 8).double()
    rng = torch.Generator().manual_seed(0)
    start = torch.randn(count, OBS_DIM, generator=rng).double()
    obs, act, reward, next_obs = micro.model_step(actor, ensemble, num_elites, start, rng)
    assert sorted(obs.tolist()) == sorted(start.tolist())
    inputs = torch.cat([obs, act], 1).numpy()
    matches = np.zeros((num_models, count), dtype=bool)
    for member in range(num_models):
        mean, _ = numpy_forward(ensemble.state_dict(), member, inputs)
        right_state = np.abs((next_obs - obs).numpy() - mean[:, :-1]).max(1) < 1e-4
        right_reward = np.abs(reward.numpy() - mean[:, -1]) < 1e-4
        assert (right_state == right_reward).all()
        matches[member] = right_state
    assert (matches.sum(0) == 1).all()
    assert matches[num_elites:].sum() == 0
    np.testing.assert_allclose(matches[:num_elites].mean(1), 1 / num_elites, atol=0.04)

    def elite_of_each_start():
        step_obs, _, step_reward, _ = micro.model_step(actor, ensemble, num_elites, start, rng)
        return torch.div(step_reward, 100).round()[step_obs[:, 0].argsort()]

    same = (elite_of_each_start() == elite_of_each_start()).double().mean().item()
    assert same == pytest.approx(1 / num_elites, abs=0.05)  # drawn anew, not kept


def test_a_step_samples_the_predicted_gaussian_and_the_stochastic_policy():
    """From one state, the steps have the mean and std that the network says; actions have the policy's."""
    torch.manual_seed(0)
    ensemble, actor = micro.Ensemble(1, OBS_DIM, ACT_DIM, 4).requires_grad_(False), micro.Actor(OBS_DIM, ACT_DIM, 4)
    ensemble.weights[4].zero_()
    ensemble.biases[4][0, 0] = torch.tensor([1.0, -2.0, 3.0, *2 * np.log(NOISE_STD)])
    obs, act, reward, next_obs = micro.model_step(
        actor, ensemble, 1, torch.ones(20_000, OBS_DIM), torch.Generator().manual_seed(0)
    )
    change = torch.cat([next_obs - obs, reward[:, None]], 1)
    mean, logvar = ensemble(torch.ones(1, 3))
    np.testing.assert_allclose(change.mean(0), mean[0, 0], atol=0.02)
    np.testing.assert_allclose(change.std(0), NOISE_STD, rtol=0.08)  # the soft clamp adds a little
    np.testing.assert_allclose(change.std(0), (0.5 * logvar[0, 0]).exp(), rtol=0.03)
    assert torch.corrcoef(change.T).fill_diagonal_(0).abs().max() < 0.04
    with torch.no_grad():
        mean, log_std = (part.item() for part in actor(torch.ones(1, OBS_DIM)))
    before_tanh = torch.atanh(act[:, 0].clamp(-1 + 1e-6, 1 - 1e-6)).double().sort().values
    middle = before_tanh[len(before_tanh) // 2].item()
    spread = (before_tanh[int(0.8413 * 20_000)] - middle).item()  # from the median to one std above it
    assert middle == pytest.approx(mean, abs=0.04 * math.exp(log_std))
    assert spread == pytest.approx(math.exp(log_std), rel=0.05)

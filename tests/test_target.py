"""The conservative target, the penalties and the whole update, against slow and obvious implementations.

Everything runs in float64, so that "equal" can mean equal to ten digits.
"""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import micro

OBS_DIM, ACT_DIM, BATCH, MODEL_ROWS = 3, 2, 10, 6
CPU = torch.device("cpu")
CLOSE = dict(rtol=1e-9, atol=1e-9)


def make_args(**changes) -> micro.Args:
    sizes = dict(num_models=5, num_elites=3, num_critics=2, hidden_size=8, batch_size=BATCH, penalty_draws=4)
    return micro.Args(**(sizes | dict(beta=1.5, gamma=0.9) | changes))


def make_agent(args: micro.Args, seed: int = 0) -> micro.Agent:
    """Random networks whose target critics are not the critics and whose log std reaches both of its bounds."""
    agent = micro.Agent(OBS_DIM, ACT_DIM, args, CPU)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in (agent.actor, agent.critics, agent.target_critics):
            module.double()
            for parameter in module.parameters():
                parameter.add_(0.4 * torch.randn(parameter.shape, generator=rng, dtype=torch.float64))
        agent.actor.log_std.weight.mul_(6)
        agent.temperature.double()
    return agent


def make_ensemble(args: micro.Args, seed: int = 1) -> micro.Ensemble:
    torch.manual_seed(seed)
    ensemble = micro.Ensemble(args.num_models, OBS_DIM, ACT_DIM, 8).double().requires_grad_(False)
    for parameter in ensemble.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    ensemble.min_logvar.add_(6)  # about -4: the bounds must matter
    ensemble.input_mean.add_(0.5)
    ensemble.input_std.mul_(1.5)
    return ensemble


def make_batch(seed: int = 2) -> tuple[torch.Tensor, ...]:
    """s, a, r, s', done: the rows of the model come last, and both parts have terminal rows."""
    rng = np.random.default_rng(seed)
    obs, next_obs = rng.normal(size=(2, BATCH, OBS_DIM))
    act, reward = np.tanh(rng.normal(size=(BATCH, ACT_DIM))), rng.normal(size=BATCH)
    done = np.zeros(BATCH)
    done[[1, BATCH - 2]] = 1
    return tuple(map(torch.as_tensor, (obs, act, reward, next_obs, done)))


def make_noise(args: micro.Args, seed: int = 3, model_rows: int = MODEL_ROWS) -> micro.Noise:
    rng = torch.Generator().manual_seed(seed)
    return micro.Noise(*(part.double() for part in micro.draw_noise(args, model_rows, OBS_DIM, ACT_DIM, rng)))


# --- the oracle: NumPy, float64, one row, elite, draw and critic at a time --------------------------------------------
def arrays_of(module: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy().astype(np.float64) for name, tensor in module.state_dict().items()}


def softplus(x: np.ndarray) -> np.ndarray:
    return np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0)


def hidden_layers(weights: dict, prefix: str, x: np.ndarray) -> np.ndarray:
    for layer in (0, 2):  # Linear, ReLU, Linear, ReLU
        x = np.maximum(weights[f"{prefix}.{layer}.weight"] @ x + weights[f"{prefix}.{layer}.bias"], 0)
    return x


def oracle_action(weights: dict, obs: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, float]:
    """An action and its log-density: the normal's, minus the logarithm of the tanh's slope."""
    hidden = hidden_layers(weights, "body", obs)
    mean = weights["mean.weight"] @ hidden + weights["mean.bias"]
    log_std = np.clip(weights["log_std.weight"] @ hidden + weights["log_std.bias"], -5, 2)
    action, log_prob = np.zeros(len(mean)), 0.0
    for i in range(len(mean)):
        std = math.exp(log_std[i])
        before_tanh = mean[i] + std * noise[i]
        action[i] = math.tanh(before_tanh)
        density = math.exp(-((before_tanh - mean[i]) ** 2) / (2 * std**2)) / (std * math.sqrt(2 * math.pi))
        log_prob += math.log(density) - math.log(1 - action[i] ** 2 + 1e-6)
    return action, log_prob


def oracle_value(weights: dict, obs: np.ndarray, act: np.ndarray) -> float:
    """The smallest of the critics' values."""
    values = []
    for k in range(len(weights) // 6):  # three layers each
        hidden = hidden_layers(weights, f"critics.{k}", np.concatenate([obs, act]))
        values.append((weights[f"critics.{k}.4.weight"] @ hidden + weights[f"critics.{k}.4.bias"])[0])
    return min(values)


def oracle_model(weights: dict, member: int, obs: np.ndarray, act: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and std of (s' - s, r) by one network."""
    x = (np.concatenate([obs, act]) - weights["input_mean"]) / weights["input_std"]
    for layer in range(5):
        x = x @ weights[f"weights.{layer}"][member] + weights[f"biases.{layer}"][member, 0]
        if layer < 4:
            x = x / (1 + np.exp(-x))  # SiLU
    mean, logvar = x[: len(x) // 2], x[len(x) // 2 :]
    logvar = weights["max_logvar"] - softplus(weights["max_logvar"] - logvar)
    logvar = weights["min_logvar"] + softplus(logvar - weights["min_logvar"])
    return mean, np.sqrt(np.exp(logvar))


def oracle_set_values(agent, ensemble, args, obs, act, state_noise, action_noise) -> np.ndarray:
    draws, _, rows, _ = state_noise.shape
    values = np.zeros((draws, args.num_elites, rows))
    models, actor, targets = arrays_of(ensemble), arrays_of(agent.actor), arrays_of(agent.target_critics)
    for draw in range(draws):
        for elite in range(args.num_elites):
            shared_or_own = 0 if state_noise.shape[1] == 1 else elite
            for row in range(rows):
                mean, std = oracle_model(models, elite, obs[row], act[row])
                next_obs = obs[row] + mean[:-1] + std[:-1] * state_noise[draw, shared_or_own, row]
                action, _ = oracle_action(actor, next_obs, action_noise[draw, shared_or_own, row])
                values[draw, elite, row] = oracle_value(targets, next_obs, action)
    return values


def oracle_target(agent, ensemble, batch, noise, args) -> tuple[np.ndarray, np.ndarray]:
    """y and f of every row, data rows included."""
    obs, act, reward, next_obs, done = (part.numpy() for part in batch)
    noise = micro.Noise(*(part.numpy() for part in noise))
    data_rows = len(obs) - noise.set_state.shape[2]
    set_values = oracle_set_values(
        agent, ensemble, args, obs[data_rows:], act[data_rows:], noise.set_state, noise.set_action
    )
    alpha = math.exp(agent.temperature.log_alpha.item())
    if args.auto_alpha and alpha > 1:
        alpha = 1.0
    actor, targets = arrays_of(agent.actor), arrays_of(agent.target_critics)
    y, f = np.zeros(len(obs)), np.zeros(len(obs))
    for row in range(len(obs)):
        action, log_prob = oracle_action(actor, next_obs[row], noise.next_action[row])
        next_value = oracle_value(targets, next_obs[row], action)
        if row >= data_rows and args.penalty != "none":
            values = []  # one for each elite: the mean over its draws
            for elite in range(args.num_elites):
                draws = [set_values[draw, elite, row - data_rows] for draw in range(len(set_values))]
                values.append(sum(draws) / len(draws))
            average = sum(values) / len(values)
            if args.penalty == "micro":
                f[row] = average - min(values)
            elif args.penalty == "eq8":
                f[row] = next_value - min(values)
            elif len(values) > 1:  # MOBILE
                f[row] = math.sqrt(sum((value - average) ** 2 for value in values) / (len(values) - 1))
        soft_value = next_value if args.deterministic_backup else next_value - alpha * log_prob
        goes_on = 0.0 if done[row] else 1.0
        if args.penalty == "mobile":
            y[row] = reward[row] - args.beta * f[row] + args.gamma * goes_on * soft_value
        else:
            y[row] = reward[row] + args.gamma * goes_on * (soft_value - args.beta * f[row])
        if args.clamp_target:
            y[row] = max(y[row], 0.0)
    return y, f


# --- target and penalty -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("penalty", ["micro", "eq8", "mobile", "none"])
@pytest.mark.parametrize("common_noise", [True, False])
@pytest.mark.parametrize("deterministic_backup", [True, False])
@pytest.mark.parametrize("clamp_target", [True, False])
@pytest.mark.parametrize("alpha", ["auto", "fixed"])
def test_target_and_penalty_are_the_oracle_s(penalty, common_noise, deterministic_backup, clamp_target, alpha):
    args = make_args(
        penalty=penalty, common_noise=common_noise, deterministic_backup=deterministic_backup, clamp_target=clamp_target,
        auto_alpha=alpha == "auto", alpha=1.7, penalty_draws=1 if penalty == "eq8" else 4,
    )  # fmt: skip
    agent, ensemble, batch, noise = make_agent(args), make_ensemble(args), make_batch(), make_noise(args)
    if args.auto_alpha:
        agent.temperature.log_alpha.data.fill_(0.6)
    y, f = micro.target_and_penalty(agent, ensemble, batch, noise, args)
    expected_y, expected_f = oracle_target(agent, ensemble, batch, noise, args)
    np.testing.assert_allclose(y, expected_y, **CLOSE)
    np.testing.assert_allclose(f, expected_f[-MODEL_ROWS:], **CLOSE)
    assert (f != 0).all() or penalty == "none"
    assert y.max() > 0 and (y.min() == 0) == clamp_target  # the clamp had something to do


def test_automatic_alpha_is_at_most_one_and_fixed_alpha_is_as_given():
    fixed, automatic = make_args(auto_alpha=False, alpha=1.7), make_args(auto_alpha=True)
    assert make_agent(fixed).alpha(fixed).item() == pytest.approx(1.7)
    assert make_agent(make_args(auto_alpha=False, alpha=0.0)).alpha(fixed).item() == 0
    agent = make_agent(automatic)
    for log_alpha, in_use in ((0.0, 1.0), (0.6, 1.0), (-0.6, math.exp(-0.6))):
        agent.temperature.log_alpha.data.fill_(log_alpha)
        assert agent.alpha(automatic).item() == pytest.approx(in_use)


@pytest.mark.parametrize("common_noise", [True, False])
def test_uncertainty_set_values_are_the_oracle_s(common_noise):
    args = make_args(common_noise=common_noise)
    agent, ensemble, (obs, act, *_), noise = make_agent(args), make_ensemble(args), make_batch(), make_noise(args)
    obs, act = obs[-MODEL_ROWS:], act[-MODEL_ROWS:]
    values = micro.uncertainty_set_values(
        ensemble, args.num_elites, agent.actor, agent.target_critics, obs, act, noise.set_state, noise.set_action
    )
    state_noise, action_noise = noise.set_state.numpy(), noise.set_action.numpy()
    expected = oracle_set_values(agent, ensemble, args, obs.numpy(), act.numpy(), state_noise, action_noise)
    assert values.shape == (args.penalty_draws, args.num_elites, MODEL_ROWS)
    np.testing.assert_allclose(values, expected, **CLOSE)


@pytest.mark.parametrize("common_noise", [True, False])
def test_chunks_change_nothing(monkeypatch, common_noise):
    """3 elites x 6 rows x 140 draws are more than CHUNK; 7 divides nothing here."""
    args = make_args(penalty_draws=140, common_noise=common_noise)
    agent, ensemble, (obs, act, *_), noise = make_agent(args), make_ensemble(args), make_batch(), make_noise(args)
    assert args.penalty_draws * args.num_elites * MODEL_ROWS > micro.CHUNK

    def values():
        return micro.uncertainty_set_values(
            ensemble, args.num_elites, agent.actor, agent.target_critics, obs[-MODEL_ROWS:], act[-MODEL_ROWS:],
            noise.set_state, noise.set_action,
        )  # fmt: skip

    chunked = values()
    for size in (10**9, 7):
        monkeypatch.setattr(micro, "CHUNK", size)
        np.testing.assert_allclose(chunked, values(), **CLOSE)


@pytest.mark.parametrize("penalty", ["micro", "eq8", "mobile", "none"])
def test_without_beta_and_clamp_it_is_sac_s_target(penalty):
    args = make_args(penalty=penalty, beta=0.0, clamp_target=False, auto_alpha=False, alpha=0.3)
    agent, ensemble, batch, noise = make_agent(args), make_ensemble(args), make_batch(), make_noise(args)
    y, _ = micro.target_and_penalty(agent, ensemble, batch, noise, args)
    _, _, reward, next_obs, done = batch
    with torch.no_grad():
        next_action, log_prob = agent.actor.sample_with_log_prob(next_obs, noise.next_action)
        soft_value = agent.target_critics(next_obs, next_action).min(0).values - 0.3 * log_prob
    torch.testing.assert_close(y, reward + 0.9 * (1 - done) * soft_value)


@pytest.mark.parametrize("penalty", ["micro", "eq8", "mobile"])
def test_data_rows_are_never_penalised(penalty):
    """Whatever beta is, their target stays; the target of model rows that go on does not."""
    targets = []
    for beta in (0.0, 100.0):
        args = make_args(penalty=penalty, beta=beta, clamp_target=False)
        agent, ensemble, batch, noise = make_agent(args), make_ensemble(args), make_batch(), make_noise(args)
        targets.append(micro.target_and_penalty(agent, ensemble, batch, noise, args)[0])
    unpenalised, penalised = targets
    data_rows, goes_on = BATCH - MODEL_ROWS, batch[4] == 0
    assert torch.equal(unpenalised[:data_rows], penalised[:data_rows])
    assert (unpenalised != penalised)[data_rows:][goes_on[data_rows:]].all()


def test_a_batch_of_data_only_and_one_of_the_model_only():
    for model_rows in (0, BATCH):
        args = make_args(clamp_target=False)
        agent, ensemble, batch = make_agent(args), make_ensemble(args), make_batch()
        noise = make_noise(args, model_rows=model_rows)
        y, f = micro.target_and_penalty(agent, ensemble, batch, noise, args)
        expected_y, expected_f = oracle_target(agent, ensemble, batch, noise, args)
        np.testing.assert_allclose(y, expected_y, **CLOSE)
        assert f.mean().item() == pytest.approx(expected_f.mean())


@pytest.mark.parametrize("penalty", ["micro", "mobile"])
@pytest.mark.parametrize("common_noise", [True, False])
def test_one_elite_has_no_gap(penalty, common_noise):
    args = make_args(penalty=penalty, num_elites=1, common_noise=common_noise)
    agent, ensemble, batch, noise = make_agent(args), make_ensemble(args), make_batch(), make_noise(args)
    y, f = micro.target_and_penalty(agent, ensemble, batch, noise, args)
    assert torch.equal(f, torch.zeros(MODEL_ROWS, dtype=torch.float64))
    expected_y, _ = oracle_target(agent, ensemble, batch, noise, args)
    np.testing.assert_allclose(y, expected_y, **CLOSE)


# --- the pure functions, on any numbers -------------------------------------------------------------------------------
def numbers(*shape: int):
    return arrays(np.float64, shape, elements=st.floats(-1000, 1000)).map(torch.as_tensor)


SET_VALUES = st.tuples(st.integers(1, 3), st.integers(1, 4)).flatmap(lambda size: numbers(*size, 2))


@settings(deadline=None)
@given(SET_VALUES, numbers(2))
def test_penalty_by_hand(set_values, next_value):
    draws, elites, rows = set_values.shape
    for row in range(rows):
        values = [set_values[:, elite, row].sum().item() / draws for elite in range(elites)]
        expected = dict(
            micro=sum(values) / elites - min(values),
            eq8=next_value[row].item() - min(values),
            mobile=np.std(values, ddof=1) if elites > 1 else 0.0,
        )
        for kind, f in expected.items():
            assert micro.penalty(kind, set_values, next_value)[row].item() == pytest.approx(f, abs=1e-9)


@settings(deadline=None)
@given(SET_VALUES, numbers(2))
def test_micro_and_mobile_penalties_are_never_negative(set_values, next_value):
    for kind in ("micro", "mobile"):
        assert (micro.penalty(kind, set_values, next_value) >= -1e-12 * 1000).all()  # but for rounding


def test_eq8_can_be_negative():
    """The stored s' may be worse than all that the elites draw."""
    set_values = torch.tensor([[[5.0], [7.0], [6.0]]])
    assert micro.penalty("eq8", set_values, torch.tensor([2.0])).item() == -3
    assert micro.penalty("eq8", set_values, torch.tensor([9.0])).item() == 4
    assert micro.penalty("micro", set_values, torch.tensor([2.0])).item() == 1


@settings(deadline=None)
@given(SET_VALUES, numbers(2), numbers(2), numbers(2), st.floats(0, 10), st.floats(0, 10), st.booleans())
def test_target_never_rises_with_beta(set_values, reward, next_value, bonus, beta, more, clamp):
    done = torch.tensor([0.0, 1.0], dtype=torch.float64)
    for kind in ("micro", "mobile"):
        f = micro.penalty(kind, set_values, next_value).clamp(min=0)  # the clamp only takes off rounding below 0
        y = micro.conservative_target(kind, reward, done, next_value, bonus, f, beta, 0.99, clamp)
        lower = micro.conservative_target(kind, reward, done, next_value, bonus, f, beta + more, 0.99, clamp)
        assert (lower <= y).all()


@given(numbers(4), numbers(4), numbers(4), numbers(4), st.floats(0, 10), st.booleans())
def test_conservative_target_by_hand(reward, next_value, bonus, f, beta, clamp):
    done = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    for kind in ("micro", "eq8", "mobile", "none"):
        y = micro.conservative_target(kind, reward, done, next_value, bonus, f, beta, 0.9, clamp)
        for row in range(4):
            r, value, loss = reward[row].item(), (next_value + bonus)[row].item(), beta * f[row].item()
            if kind == "mobile":
                expected = r - loss + (0.9 * value if done[row] == 0 else 0)
            else:
                expected = r + (0.9 * (value - loss) if done[row] == 0 else 0)
            assert y[row].item() == pytest.approx(max(expected, 0) if clamp else expected, abs=1e-9)


@given(numbers(3), numbers(3), numbers(3), numbers(3), st.floats(0, 10))
def test_terminal_rows(reward, next_value, bonus, f, beta):
    """MICRO: y = r exactly, whatever f is. MOBILE: its penalty stays."""
    done = torch.ones(3, dtype=torch.float64)
    for kind in ("micro", "eq8", "none"):
        assert torch.equal(micro.conservative_target(kind, reward, done, next_value, bonus, f, beta, 0.99, False), reward)
    mobile = micro.conservative_target("mobile", reward, done, next_value, bonus, f, beta, 0.99, False)
    torch.testing.assert_close(mobile, reward - beta * f)


@given(numbers(3), numbers(3), numbers(3), st.floats(0, 10), st.sampled_from(["micro", "eq8", "mobile", "none"]))
def test_the_clamp(reward, next_value, f, beta, kind):
    done = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    free = micro.conservative_target(kind, reward, done, next_value, 0.0, f, beta, 0.99, False)
    clamped = micro.conservative_target(kind, reward, done, next_value, 0.0, f, beta, 0.99, True)
    assert torch.equal(clamped, torch.where(free > 0, free, torch.zeros_like(free)))


# --- noise and policy -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("draws", [1, 2, 3, 4])
def test_common_noise_is_shared_and_in_antithetic_pairs(draws):
    args = make_args(common_noise=True, penalty_draws=draws)
    noise = micro.draw_noise(args, MODEL_ROWS, OBS_DIM, ACT_DIM, torch.Generator().manual_seed(0))
    assert noise.next_action.shape == noise.action.shape == (BATCH, ACT_DIM)
    assert noise.set_state.shape == (draws, 1, MODEL_ROWS, OBS_DIM)
    assert noise.set_action.shape == (draws, 1, MODEL_ROWS, ACT_DIM)
    together = torch.cat([noise.set_state, noise.set_action], -1)  # state and action flip together
    pairs = [(i, j) for i in range(draws) for j in range(i) if torch.equal(together[i], -together[j])]
    assert len(pairs) == draws // 2 and len({i for pair in pairs for i in pair}) == 2 * len(pairs)


@pytest.mark.parametrize("common_noise", [True, False])
def test_no_draws_means_the_elites_means_and_the_policys_mode(common_noise):
    args = make_args(penalty_draws=0, common_noise=common_noise)
    agent, ensemble, (obs, act, *_), noise = make_agent(args), make_ensemble(args), make_batch(), make_noise(args)
    obs, act = obs[-MODEL_ROWS:], act[-MODEL_ROWS:]
    values = micro.uncertainty_set_values(
        ensemble, args.num_elites, agent.actor, agent.target_critics, obs, act, noise.set_state, noise.set_action
    )
    models, actor, targets = arrays_of(ensemble), arrays_of(agent.actor), arrays_of(agent.target_critics)
    for elite in range(args.num_elites):
        for row in range(MODEL_ROWS):
            mean, _ = oracle_model(models, elite, obs[row].numpy(), act[row].numpy())
            next_obs = obs[row].numpy() + mean[:-1]
            mode = np.tanh(actor["mean.weight"] @ hidden_layers(actor, "body", next_obs) + actor["mean.bias"])
            np.testing.assert_allclose(values[0, elite, row], oracle_value(targets, next_obs, mode), **CLOSE)
    assert values.shape == (1, args.num_elites, MODEL_ROWS)


def test_noise_is_standard_normal_and_otherwise_independent():
    """Between elites, draws, rows and parts there is no correlation beyond chance (some 0.01 here)."""
    rows = 10_000
    args = make_args(common_noise=False, penalty_draws=2, num_elites=3, batch_size=rows)
    noise = micro.draw_noise(args, rows, OBS_DIM, ACT_DIM, torch.Generator().manual_seed(0))
    assert noise.set_state.shape == (2, 3, rows, OBS_DIM) and noise.set_action.shape == (2, 3, rows, ACT_DIM)
    parts = [noise.next_action, noise.action, *noise.set_state.flatten(0, 1), *noise.set_action.flatten(0, 1)]
    columns = torch.cat(parts, -1).T
    assert columns.mean(1).abs().max() < 0.05 and (columns.std(1) - 1).abs().max() < 0.05
    assert (torch.corrcoef(columns) - torch.eye(len(columns))).abs().max() < 0.05
    common = micro.draw_noise(make_args(penalty_draws=3), rows, OBS_DIM, ACT_DIM, torch.Generator().manual_seed(0))
    columns = torch.cat([*common.set_state[:2, 0], *common.set_action[:2, 0]], -1).T  # the first halves of two pairs
    assert (torch.corrcoef(columns) - torch.eye(len(columns))).abs().max() < 0.05


def constant_policy(mean: float, log_std: float) -> micro.Actor:
    actor = micro.Actor(1, 1, 4).double()
    with torch.no_grad():
        for head, value in ((actor.mean, mean), (actor.log_std, log_std)):
            head.weight.zero_()
            head.bias.fill_(value)
    return actor


@pytest.mark.parametrize("mean, log_std", [(0.0, -1.0), (0.7, 0.3), (-1.5, -0.5)])
def test_log_prob_is_that_of_a_tanh_gaussian(mean, log_std):
    """Against torch.distributions, and as a density that integrates to one (but for the 1e-6 in the logarithm)."""
    actor = constant_policy(mean, log_std)
    noise = torch.linspace(-5, 5, 4001, dtype=torch.float64)[:, None]
    obs = torch.zeros(len(noise), 1, dtype=torch.float64)
    with torch.no_grad():
        action, log_prob = actor.sample_with_log_prob(obs, noise)
        assert torch.equal(action, actor.sample(obs, noise))
    assert torch.trapezoid(log_prob.exp(), action[:, 0]).item() == pytest.approx(1, abs=1e-3)
    normal = torch.distributions.Normal(torch.tensor(mean, dtype=torch.float64), math.exp(log_std))
    density = torch.distributions.TransformedDistribution(normal, torch.distributions.TanhTransform())
    inner = action[:, 0].abs() < 0.99  # beyond, the 1e-6 shows
    torch.testing.assert_close(log_prob[inner], density.log_prob(action[inner, 0]), rtol=0, atol=1e-4)


def test_log_std_is_clamped_and_the_mode_is_the_tanh_of_the_mean():
    obs, noise = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    for log_std, in_use in ((9.0, 2.0), (-9.0, -5.0), (1.5, 1.5)):
        actor = constant_policy(-0.3, log_std)
        assert actor(obs)[1].item() == in_use
        assert actor.mode(obs).item() == pytest.approx(math.tanh(-0.3))
        assert actor.sample(obs, noise).item() == pytest.approx(math.tanh(-0.3 + math.exp(in_use)))


# --- the whole update -------------------------------------------------------------------------------------------------
def forward_critics(parameters: list[torch.Tensor], num_critics: int, obs, act) -> torch.Tensor:
    values = []
    for k in range(num_critics):
        w1, b1, w2, b2, w3, b3 = parameters[6 * k : 6 * k + 6]
        x = torch.cat([obs, act], 1)
        values.append(F.linear(F.linear(F.linear(x, w1, b1).relu(), w2, b2).relu(), w3, b3)[:, 0])
    return torch.stack(values)


def forward_actor(parameters: list[torch.Tensor], obs, noise) -> tuple[torch.Tensor, torch.Tensor]:
    w1, b1, w2, b2, w_mean, b_mean, w_std, b_std = parameters
    hidden = F.linear(F.linear(obs, w1, b1).relu(), w2, b2).relu()
    std = F.linear(hidden, w_std, b_std).clamp(-5, 2).exp()
    normal = torch.distributions.Normal(F.linear(hidden, w_mean, b_mean), std)
    before_tanh = normal.mean + std * noise
    action = before_tanh.tanh()
    return action, (normal.log_prob(before_tanh) - torch.log(1 - action**2 + 1e-6)).sum(1)


def step(optimizer: torch.optim.Optimizer, loss: torch.Tensor, parameters: list[torch.Tensor]) -> None:
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
        parameter.grad = gradient
    optimizer.step()


@pytest.mark.parametrize("penalty", ["micro", "mobile"])
@pytest.mark.parametrize("auto_alpha", [True, False])
def test_three_updates_against_plain_torch(penalty, auto_alpha):
    """Critics, then the actor with the updated critics, then alpha, then the target critics; y from the oracle."""
    rates = dict(actor_lr=0.01, critic_lr=0.02, alpha_lr=0.03, tau=0.1)
    args = make_args(penalty=penalty, auto_alpha=auto_alpha, alpha=0.4, clamp_target=False, num_critics=3, **rates)
    agent, ensemble = make_agent(args), make_ensemble(args)
    agent.temperature.log_alpha.data.fill_(-0.02 if auto_alpha else math.log(0.4))  # automatic: crosses 1 on the way
    reference = copy.deepcopy(agent)  # holds the reference's numbers; only its parameters are used below
    actor, critics, targets = (
        list(module.parameters()) for module in (reference.actor, reference.critics, reference.target_critics)
    )
    log_alpha = reference.temperature.log_alpha
    actor_adam, critic_adam = torch.optim.Adam(actor, lr=0.01), torch.optim.Adam(critics, lr=0.02)
    alpha_adam = torch.optim.Adam([log_alpha], lr=0.03)

    for number in range(3):
        batch, noise = make_batch(seed=10 + number), make_noise(args, seed=20 + number)
        metrics = micro.update(agent, ensemble, batch, noise, args)

        obs, act = batch[:2]
        y, f = map(torch.as_tensor, oracle_target(reference, ensemble, batch, noise, args))
        q = forward_critics(critics, 3, obs, act)
        critic_loss = sum(((q[k] - y) ** 2).mean() for k in range(3)) / 3
        step(critic_adam, critic_loss, critics)
        action, log_prob = forward_actor(actor, obs, noise.action)
        alpha = log_alpha.detach().exp().clamp(max=1) if auto_alpha else torch.tensor(0.4, dtype=torch.float64)
        actor_loss = (alpha * log_prob - forward_critics(critics, 3, obs, action).min(0).values).mean()
        step(actor_adam, actor_loss, actor)
        if auto_alpha:
            step(alpha_adam, -(log_alpha * (log_prob.detach() + -ACT_DIM)).mean(), [log_alpha])
        with torch.no_grad():
            for target, critic in zip(targets, critics):
                target.copy_((1 - args.tau) * target + args.tau * critic)

        f = f[-MODEL_ROWS:]
        expected = dict(
            critic_loss=critic_loss, actor_loss=actor_loss, q=q.mean(), q_min=q.min(), q_max=q.max(), target=y.mean(),
            f=f.mean(), f_max=f.max(), alpha=alpha, entropy=-log_prob.mean(),
        )  # fmt: skip
        assert len(metrics) == len(micro.METRICS)
        for name, value in zip(micro.METRICS, metrics.tolist()):
            assert value == pytest.approx(expected[name].item(), abs=1e-7), name

    for name in ("actor", "critics", "target_critics", "temperature"):
        for ours, expected in zip(getattr(agent, name).parameters(), getattr(reference, name).parameters()):
            torch.testing.assert_close(ours, expected, rtol=1e-7, atol=1e-7, msg=f"{name} differs")
    if not auto_alpha:
        assert agent.temperature.log_alpha.item() == math.log(0.4)


def test_the_actor_s_step_leaves_the_critics_alone():
    """With and without a step of the actor, the critics after an update are the same to the last bit, gradients too."""
    agents = []
    for actor_lr in (0.0, 0.1):
        args = make_args(actor_lr=actor_lr)
        agents.append(agent := make_agent(args))
        before = [parameter.detach().clone() for parameter in agent.actor.parameters()]
        micro.update(agent, make_ensemble(args), make_batch(), make_noise(args), args)
        moved = [not torch.equal(old, new) for old, new in zip(before, agent.actor.parameters())]
        assert all(moved) if actor_lr else not any(moved)
    for one, other in zip(agents[0].critics.parameters(), agents[1].critics.parameters()):
        assert torch.equal(one, other) and torch.equal(one.grad, other.grad)

    obs, act, *_ = make_batch()
    args = make_args()
    fresh = make_agent(args)  # the gradients left behind are those of the critics' loss alone
    y, _ = micro.target_and_penalty(fresh, make_ensemble(args), make_batch(), make_noise(args), args)
    critics = list(fresh.critics.parameters())
    gradients = torch.autograd.grad((forward_critics(critics, 2, obs, act) - y).square().mean(), critics)
    for expected, parameter in zip(gradients, agents[1].critics.parameters()):
        torch.testing.assert_close(parameter.grad, expected)


def test_the_target_critics_carry_no_graph():
    """Their soft update must not be recorded by autograd: the record would grow with every update of the run."""
    args = make_args()
    agent = make_agent(args)
    micro.update(agent, make_ensemble(args), make_batch(), make_noise(args), args)
    for parameter in agent.target_critics.parameters():
        assert parameter.is_leaf and not parameter.requires_grad

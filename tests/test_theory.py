"""The paper's theory on small tabular MDPs: what the robust operator is, and what the implemented one keeps of it.

Notation: d is the distance of two states, c = d^p the cost of moving one unit of probability between them, and the
uncertainty set of a model P is every distribution that can be reached from P with an expected cost of at most epsilon.
"""

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

import micro

GAMMA, SEEDS = 0.9, range(5)


def random_distances(rng: np.random.Generator, states: int) -> np.ndarray:
    points = rng.uniform(size=(states, 2))
    return np.linalg.norm(points[:, None] - points[None], axis=-1)


def worst_case(p0: np.ndarray, values: np.ndarray, cost: np.ndarray, epsilon: float) -> float:
    """The linear programme: the least expected value over plans that move p0 with expected cost <= epsilon.

    A plan x[i, j] >= 0 is how much probability goes from state i to state j; an infinite cost forbids the move.
    """
    n = len(p0)
    leaves = np.kron(np.eye(n), np.ones(n))  # sum_j x[i, j] = p0[i]
    allowed = np.isfinite(cost).ravel()
    solution = linprog(
        np.tile(values, n), A_ub=np.where(allowed, cost.ravel(), 0)[None], b_ub=[epsilon], A_eq=leaves, b_eq=p0,
        bounds=[(0, None if may else 0) for may in allowed],
    )  # fmt: skip
    assert solution.success, solution.message
    return solution.fun


def dual(p0: np.ndarray, values: np.ndarray, cost: np.ndarray, epsilon: float) -> float:
    """sup over lambda >= 0 of E_s'[min_x V(x) + lambda c(s', x)] - lambda epsilon (Prop. 3).

    It is concave and piecewise linear in lambda and falls in the end, so its maximum is at 0 or at a kink: where two
    lines V(x) + lambda c(s', x) cross. Trying all of them needs no optimiser and leaves no error.
    """
    kinks = [0.0]
    for row in cost:
        for x in range(len(values)):
            for y in range(x):
                if row[x] != row[y]:
                    kinks.append((values[y] - values[x]) / (row[x] - row[y]))
    return max(p0 @ (values + k * cost).min(1) - k * epsilon for k in kinks if k >= 0)


def worst_in_ball(p0: np.ndarray, values: np.ndarray, cost: np.ndarray, epsilon: float) -> float:
    """Eq. 5: each next state is replaced by the worst one within the ball around it."""
    return p0 @ np.where(cost <= epsilon, values, np.inf).min(1)


# --- Prop. 2 ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["finite set", "Wasserstein ball"])
def test_robust_operator_is_a_contraction(kind, seed):
    rng = np.random.default_rng(seed)
    states, actions, models = 4, 2, 3
    reward = rng.normal(size=(states, actions))
    transitions = rng.dirichlet(np.ones(states), size=(models, states, actions))
    distance = random_distances(rng, states)

    def robust_operator(values: np.ndarray) -> np.ndarray:
        if kind == "finite set":
            worst = (transitions @ values).min(0)
        else:
            nominal = transitions[0].reshape(-1, states)
            worst = np.reshape([worst_case(p, values, distance, 0.2) for p in nominal], (states, actions))
        return (reward + GAMMA * worst).max(1)

    for _ in range(5):
        one, other = 10 * rng.normal(size=(2, states))
        gap_before, gap_after = np.abs(one - other).max(), np.abs(robust_operator(one) - robust_operator(other)).max()
        assert gap_after <= GAMMA * gap_before + 1e-9
    shifted = robust_operator(one + 7) - robust_operator(one)  # and gamma is the best factor: constants shrink by it
    np.testing.assert_allclose(shifted, GAMMA * 7, atol=1e-6)


# --- Prop. 3 ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("epsilon", [0.01, 0.1, 0.4, 3.0])
def test_linear_programme_equals_its_dual(seed, p, epsilon):
    rng = np.random.default_rng(seed)
    p0, values = rng.dirichlet(np.ones(6)), 5 * rng.normal(size=6)
    cost = random_distances(rng, 6) ** p
    primal = worst_case(p0, values, cost, epsilon)
    assert primal == pytest.approx(dual(p0, values, cost, epsilon), abs=1e-6)
    assert values.min() - 1e-9 <= primal <= p0 @ values + 1e-9
    if epsilon > cost.max():  # then all of the probability can go to the worst state
        assert primal == pytest.approx(values.min(), abs=1e-9)


# --- Eq. 5 ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("p", [1, 2])
def test_worst_state_in_the_ball_is_only_an_upper_bound(seed, p):
    """Moving every state inside its own ball is one of the plans that the budget allows, and not always the best."""
    rng = np.random.default_rng(seed)
    p0, values = rng.dirichlet(np.ones(6)), 5 * rng.normal(size=6)
    cost = random_distances(rng, 6) ** p
    for epsilon in (0.01, 0.1, 0.4):
        assert worst_in_ball(p0, values, cost, epsilon) >= worst_case(p0, values, cost, epsilon) - 1e-9


def test_the_ball_misses_half_of_the_example():
    """Values (1, 0) at distance 1, epsilon 1/2: half of the probability can move, but no state lies in the ball."""
    p0, values, cost = np.array([1.0, 0.0]), np.array([1.0, 0.0]), np.array([[0.0, 1.0], [1.0, 0.0]])
    assert worst_case(p0, values, cost, 0.5) == pytest.approx(0.5)
    assert dual(p0, values, cost, 0.5) == pytest.approx(0.5)
    assert worst_in_ball(p0, values, cost, 0.5) == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_the_ball_is_exact_for_p_infinite(seed):
    """There no probability may move farther than epsilon; and the sets of finite p shrink towards that one."""
    rng = np.random.default_rng(seed)
    p0, values, distance, epsilon = rng.dirichlet(np.ones(6)), 5 * rng.normal(size=6), random_distances(rng, 6), 0.4
    ball = worst_in_ball(p0, values, distance, epsilon)
    assert worst_case(p0, values, np.where(distance <= epsilon, 0, np.inf), 0) == pytest.approx(ball)
    by_p = [worst_case(p0, values, (distance / epsilon) ** p, 1) for p in (1, 2, 4, 8)]  # (E d^p)^(1/p) <= epsilon
    assert by_p == sorted(by_p) and by_p[-1] <= ball + 1e-9


# --- the implemented backup -------------------------------------------------------------------------------------------
# The next state comes from a random elite, so the expected backup is
#     B V = r + gamma (mean_e x_e - beta (mean_e x_e - min_e x_e)) = r + gamma ((1 - beta) mean_e x_e + beta min_e x_e)
# with x_e = P_e V. Mean and minimum both move by at most |V - U|, so B's Lipschitz constant is at most
#     gamma (|1 - beta| + beta),  which is gamma for 0 <= beta <= 1 and gamma (2 beta - 1) beyond.
# For beta > 1 the mean and the minimum pull in opposite directions, but one of the n elites is in both. Where elites lead
# to states of their own, the slopes are (1 - beta) / n for n - 1 of them and beta - (beta - 1) / n for the worst. Their
# absolute sum gamma (2 beta - 1 - 2 (beta - 1) / n) is the constant of n elites, and tends to gamma (2 beta - 1).
# Eq. 8 has V(s') of the stored s' instead of the mean: two different states, and gamma (2 beta - 1) is attained.
def backup(values: np.ndarray, reward: np.ndarray, transitions: np.ndarray, beta: float) -> np.ndarray:
    """B V by the code itself: one draw, and the value under each elite's model (elites, s-a pairs, states)."""
    elite_values = torch.as_tensor(transitions @ values)
    next_value, done = elite_values.mean(0), torch.zeros(len(reward), dtype=torch.float64)
    f = micro.penalty("micro", elite_values[None], next_value)
    return micro.conservative_target(
        "micro", torch.as_tensor(reward), done, next_value, 0.0, f, beta, GAMMA, clamp=False
    ).numpy()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0, 1.5, 4.0])
def test_implemented_backup_s_lipschitz_constant(seed, beta):
    rng = np.random.default_rng(seed)
    states, pairs, elites = 5, 8, 3
    reward, transitions = rng.normal(size=pairs), rng.dirichlet(np.full(states, 0.1), size=(elites, pairs))
    bound = GAMMA if beta <= 1 else GAMMA * (2 * beta - 1)
    for _ in range(200):
        one = rng.normal(size=states)
        other = one + rng.choice([-1.0, 1.0], size=states) * rng.choice([1e-3, 1.0])
        difference = backup(one, reward, transitions, beta) - backup(other, reward, transitions, beta)
        assert np.abs(difference).max() <= bound * np.abs(one - other).max() + 1e-12
    elite_values = transitions @ one
    expected = reward + GAMMA * ((1 - beta) * elite_values.mean(0) + beta * elite_values.min(0))
    np.testing.assert_allclose(backup(one, reward, transitions, beta), expected)


@pytest.mark.parametrize("beta", [1.5, 4.0])
@pytest.mark.parametrize("elites", [2, 5, 1000])
def test_beyond_beta_one_the_backup_expands(beta, elites):
    """Each elite leads to its own state. The worst state falls by 1/2, all others rise by 1/2: a sup norm of 1/2."""
    transitions = np.eye(elites)[:, None]  # (elites, one s-a pair, states)
    before = np.where(np.arange(elites) == 0, -1.0, 0.0)
    after = before + np.where(np.arange(elites) == 0, -0.5, 0.5)
    difference = backup(before, np.zeros(1), transitions, beta) - backup(after, np.zeros(1), transitions, beta)
    factor = np.abs(difference).max() / 0.5
    assert factor == pytest.approx(GAMMA * (2 * beta - 1 - 2 * (beta - 1) / elites))
    assert factor > GAMMA  # no contraction at this rate, and none at all where it exceeds 1
    if elites == 1000:
        assert factor == pytest.approx(GAMMA * (2 * beta - 1), rel=0.01)


@pytest.mark.parametrize("beta", [1.0, 1.5, 4.0])
def test_eq8_attains_the_bound(beta):
    """V(s') rises by 1/2 and the worst value in the set falls by 1/2: y falls by gamma ((beta - 1) / 2 + beta / 2)."""
    targets = []
    for next_value, worst in ((0.0, -1.0), (0.5, -1.5)):
        next_value, zero = torch.tensor([next_value]), torch.zeros(1)
        f = micro.penalty("eq8", torch.tensor([[[worst], [3.0]]]), next_value)
        targets.append(micro.conservative_target("eq8", zero, zero, next_value, 0.0, f, beta, GAMMA, False).item())
    assert targets[0] - targets[1] == pytest.approx(GAMMA * (2 * beta - 1) * 0.5)

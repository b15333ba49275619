"""Gymnasium tasks of the experiment, and the return of a policy on them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from analyses.context import AnalysisError
from analyses.online_rl.buffer import Floats
from analyses.online_rl.policy import ActorCritic
from analyses.online_rl.spec import Task

EPISODES = 20


class TaskOf(NamedTuple):
    """A task by gymnasium's name; worst and best return span the scale of `first_half`."""

    environment: str
    options: Mapping[str, Any]
    worst: float
    best: float


TASKS: Mapping[Task, TaskOf] = {
    "frozen_lake": TaskOf("FrozenLake-v1", {"is_slippery": False}, 0.0, 1.0),
    "cart_pole": TaskOf("CartPole-v1", {}, 0.0, 500.0),
    "acrobot": TaskOf("Acrobot-v1", {}, -500.0, -100.0),
}


def make(task: Task) -> Any:
    """The environment. Raises AnalysisError where gymnasium is not installed."""
    try:
        import gymnasium
    except ImportError as error:
        raise AnalysisError(
            "the experiment needs gymnasium; install the extra: pip install 'tunegate[rl]'",
            "experiment",
        ) from error
    chosen = TASKS[task]
    return gymnasium.make(chosen.environment, **chosen.options)


def return_of(policy: ActorCritic, task: Task, seed: int) -> float:
    """Expected undiscounted return of the stochastic policy.

    frozen_lake: exact. Others: mean of 20 episodes, run side by side.
    """
    env = make(task)
    if task == "frozen_lake":
        with torch.no_grad():
            log_prob_SA, _ = policy.outputs(torch.arange(env.observation_space.n))
        return exact_return(
            env.unwrapped.P,
            log_prob_SA.double().exp().numpy(),
            np.asarray(env.unwrapped.initial_state_distrib, dtype=np.float64),
            env.spec.max_episode_steps,
        )
    return sampled_return(policy, [env, *(make(task) for _ in range(EPISODES - 1))], seed)


def exact_return(
    transitions: Mapping[int, Mapping[int, list[tuple[float, int, float, bool]]]],
    policy_SA: Floats,
    start_S: Floats,
    steps: int,
) -> float:
    """Expected return within so many steps, by moving the distribution over states along.

    transitions[s][a]: (probability, next state, reward, episode over) as gymnasium's toy tasks
    have it.
    """
    states, actions = policy_SA.shape
    move_SS, reward_S = np.zeros((states, states)), np.zeros(states)
    for s in range(states):
        for a in range(actions):
            for probability, following, reward, over in transitions[s][a]:
                weight = policy_SA[s, a] * probability
                reward_S[s] += weight * reward
                if not over:
                    move_SS[s, following] += weight
    alive_S, total = start_S.copy(), 0.0
    for _ in range(steps):
        total += float(alive_S @ reward_S)
        alive_S = alive_S @ move_SS
    return total


def sampled_return(policy: ActorCritic, environments: list[Any], seed: int) -> float:
    """Mean return of one episode in each environment; discrete actions."""
    rng = np.random.default_rng(seed)
    total_E = np.zeros(len(environments))
    observations = [env.reset(seed=seed + k)[0] for k, env in enumerate(environments)]
    running = list(range(len(environments)))
    while running:
        with torch.no_grad():
            batch = torch.as_tensor(np.stack([observations[k] for k in running]))
            probabilities = policy.outputs(batch)[0].double().exp().numpy()
        still = []
        for k, row in zip(running, probabilities, strict=True):
            action = draw(row.cumsum(), rng.random())
            observations[k], reward, terminated, truncated, _ = environments[k].step(action)
            total_E[k] += reward
            if not (terminated or truncated):
                still.append(k)
        running = still
    return float(total_E.mean())


def draw(cumulative: Floats, uniform: float) -> int:
    """An action by inverse distribution; the last one where rounding leaves a gap."""
    return min(int(np.searchsorted(cumulative, uniform, side="right")), len(cumulative) - 1)

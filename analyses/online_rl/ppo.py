"""A small PPO to measure with: readable, seeded throughout, with stable-baselines3's interface."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from analyses.online_rl.buffer import (
    Floats,
    RolloutBuffer,
    Samples,
    gae,
    minibatches,
    standardize,
)
from analyses.online_rl.policy import ActorCritic
from analyses.online_rl.spec import PPOSettings
from analyses.online_rl.targets import policy_loss
from analyses.online_rl.tasks import draw

OnStep = Callable[[Samples, Tensor], None]


def optimizer_of(policy: nn.Module, settings: PPOSettings) -> torch.optim.Optimizer:
    """Plain SGD, or Adam as stable-baselines3 sets it."""
    if settings.optimizer == "sgd":
        return torch.optim.SGD(policy.parameters(), lr=settings.learning_rate)
    return torch.optim.Adam(policy.parameters(), lr=settings.learning_rate, eps=1e-5)


def update(
    policy: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Samples,
    settings: PPOSettings,
    *,
    normalize_advantage: bool = True,
    on_step: OnStep | None = None,
) -> None:
    """One optimiser step on a minibatch.

    loss = mean policy loss + vf_coef mean (V - R)^2 - ent_coef mean entropy. on_step(batch,
    standardised advantages) is called before the step.
    """
    weights = standardize(batch.advantages) if normalize_advantage else batch.advantages
    if on_step is not None:
        on_step(batch, weights)
    values, log_prob, entropy = policy.evaluate_actions(batch.observations, batch.actions)  # type: ignore[operator]
    loss = policy_loss(log_prob, batch.old_log_prob, weights, settings.clip_range).mean()
    loss = loss + settings.vf_coef * (values - batch.returns).square().mean()
    if settings.ent_coef > 0:
        loss = loss - settings.ent_coef * entropy.mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    if settings.max_grad_norm is not None:
        nn.utils.clip_grad_norm_(policy.parameters(), settings.max_grad_norm)
    optimizer.step()


class PPO:
    """Proximal policy optimisation on one gymnasium environment.

    policy, rollout_buffer, batch_size, n_epochs, normalize_advantage, action_space,
    collect_rollouts() and train() are as in stable-baselines3, so iif.InfluenceFilter wraps either.
    Time limits: gamma V(last state) is added to the reward of a truncated step.
    """

    def __init__(self, env: Any, settings: PPOSettings, seed: int) -> None:
        self.env, self.settings = env, settings
        self.action_space = env.action_space
        self.batch_size, self.n_epochs = settings.batch_size, settings.n_epochs
        self.clip_range, self.ent_coef = settings.clip_range, settings.ent_coef
        self.normalize_advantage = True
        self._generator = torch.Generator().manual_seed(seed)
        self._rng = np.random.default_rng(seed)
        states = getattr(env.observation_space, "n", None)
        self._states = None if states is None else int(states)
        discrete = getattr(env.action_space, "n", None)
        self.policy = ActorCritic(
            self._states or int(np.prod(env.observation_space.shape)),
            int(np.prod(env.action_space.shape)) if discrete is None else int(discrete),
            continuous=discrete is None,
            n_states=self._states,
            hidden=settings.hidden,
            activation=settings.activation,
            generator=self._generator,
        )
        self.optimizer = optimizer_of(self.policy, settings)
        self.rollout_buffer: RolloutBuffer | None = None
        self.dones_T: Floats = np.zeros(0)
        self.rewards_T: Floats = np.zeros(0)
        self._observation = env.reset(seed=seed)[0]

    def collect_rollouts(self) -> RolloutBuffer:
        """n_steps of the present policy; the buffer with advantages and returns."""
        n = self.settings.n_steps
        observations: list[Any] = []
        actions: list[Any] = []
        rewards_T, values_T, log_prob_T, dones_T = (np.zeros(n) for _ in range(4))
        # The policy is fixed in a rollout: with numbered states its outputs are computed once.
        table = None if self._states is None else self._outputs(np.arange(self._states))
        sums = None if table is None else table[0].cumsum(axis=1)
        for t in range(n):
            here = self._observation
            if table is None or sums is None:
                probabilities, head, values = self._outputs(np.asarray(here)[None])
                place, cumulative = 0, probabilities[0].cumsum()
            else:
                (_, head, values), place = table, int(here)
                cumulative = sums[place]
            if self.policy.log_std is None:
                action: Any = draw(cumulative, self._rng.random())
                log_prob_T[t], taken = head[place, action], action
            else:
                action, log_prob_T[t], taken = self._continuous(head[place])
            observations.append(here)
            actions.append(action)
            values_T[t] = values[place]
            following, reward, terminated, truncated, _ = self.env.step(taken)
            rewards_T[t] = self._bootstrapped(reward, following, truncated and not terminated)
            dones_T[t] = terminated or truncated
            self._observation = self.env.reset()[0] if dones_T[t] else following
        last = float(self._outputs(np.asarray(self._observation)[None])[2][0])
        advantages_T, returns_T = gae(
            rewards_T, values_T, dones_T, last, self.settings.gamma, self.settings.gae_lambda
        )
        self.dones_T, self.rewards_T = dones_T, rewards_T
        dtype = torch.get_default_dtype()
        samples = Samples(
            torch.as_tensor(np.array(observations)),
            torch.as_tensor(np.array(actions)),
            torch.as_tensor(values_T, dtype=dtype),
            torch.as_tensor(log_prob_T, dtype=dtype),
            torch.as_tensor(advantages_T, dtype=dtype),
            torch.as_tensor(returns_T, dtype=dtype),
            torch.arange(n),
        )
        self.rollout_buffer = RolloutBuffer(samples, self._generator)
        return self.rollout_buffer

    def train(self, on_step: OnStep | None = None) -> None:
        """n_epochs passes over rollout_buffer in minibatches. See update()."""
        if self.rollout_buffer is None:
            raise RuntimeError("call collect_rollouts() before train()")
        for _ in range(self.n_epochs):
            for batch in self.rollout_buffer.get(self.batch_size):
                update(
                    self.policy,
                    self.optimizer,
                    batch,
                    self.settings,
                    normalize_advantage=self.normalize_advantage,
                    on_step=on_step,
                )

    def learn(self, total_timesteps: int) -> "PPO":
        """Rounds of collect_rollouts() and train() until so many steps are taken."""
        for _ in range(-(-total_timesteps // self.settings.n_steps)):
            self.collect_rollouts()
            self.train()
        return self

    def _outputs(self, observations: Any) -> tuple[Floats, Floats, Floats]:
        """Probabilities (of discrete actions), log-probabilities or means, and values."""
        with torch.no_grad():
            head, values = self.policy.outputs(torch.as_tensor(observations))
        head_64 = head.double().numpy()
        return np.exp(head_64), head_64, values.double().numpy()

    def _continuous(self, mean_D: Floats) -> tuple[Floats, float, Floats]:
        assert self.policy.log_std is not None
        log_sigma_D = self.policy.log_std.bias.detach().double().numpy()
        z_D = self._rng.standard_normal(len(mean_D))
        action_D = mean_D + np.exp(log_sigma_D) * z_D
        log_prob = float(np.sum(-0.5 * z_D**2 - log_sigma_D - 0.5 * np.log(2 * np.pi)))
        low, high = self.action_space.low.ravel(), self.action_space.high.ravel()
        taken = np.clip(action_D, low, high).reshape(self.action_space.shape)
        return action_D, log_prob, taken.astype(self.action_space.dtype)

    def _bootstrapped(self, reward: float, following: Any, cut_short: bool) -> float:
        if not cut_short:
            return float(reward)
        value = float(self._outputs(np.asarray(following)[None])[2][0])
        return float(reward) + self.settings.gamma * value


def replay(
    policy: nn.Module,
    samples: Samples,
    settings: PPOSettings,
    generator: torch.Generator,
    *,
    first_epoch: Tensor | None,
    normalize_advantage: bool,
    on_step: OnStep,
) -> None:
    """A recorded round's update once more, in place, for the scores at its optimiser steps.

    first_epoch: minibatch number of each record in the first epoch; later epochs are drawn.
    """
    optimizer = optimizer_of(policy, settings)
    n = len(samples.advantages)
    for epoch in range(settings.n_epochs):
        if epoch == 0 and first_epoch is not None:
            blocks = [(first_epoch == k).nonzero().flatten() for k in torch.unique(first_epoch)]
        else:
            blocks = list(minibatches(n, settings.batch_size, generator))
        for rows in blocks:
            update(
                policy,
                optimizer,
                samples.at(rows),
                settings,
                normalize_advantage=normalize_advantage,
                on_step=on_step,
            )

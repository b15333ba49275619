"""An actor and a critic, apart, with the parameter names of stable-baselines3's MlpPolicy."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import skip_init

from analyses.context import AnalysisError
from analyses.online_rl.ghost import Shift

ACTIVATIONS: Mapping[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}
ACTOR, CRITIC = "mlp_extractor.policy_net", "mlp_extractor.value_net"


class Extractor(nn.Module):
    """The hidden layers of both networks."""

    def __init__(self, actor: nn.Sequential, critic: nn.Sequential) -> None:
        super().__init__()
        self.policy_net, self.value_net = actor, critic


class ActorCritic(nn.Module):
    """pi(a|s) and V(s) by two networks without shared weights.

    Discrete actions: softmax over `actions`. Continuous: independent normals of learnt mean and
    one log sigma per dimension. n_states: observations are state numbers, encoded one-hot. Weights
    start orthogonal, with gain sqrt(2) in hidden layers, 0.01 at the actions and 1 at the value.
    """

    def __init__(
        self,
        inputs: int,
        actions: int,
        *,
        continuous: bool = False,
        n_states: int | None = None,
        hidden: Sequence[int] = (64, 64),
        critic_hidden: Sequence[int] | None = None,
        activation: str = "tanh",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.inputs, self.actions, self.continuous, self.n_states = (
            inputs,
            actions,
            continuous,
            n_states,
        )

        def linear(width_in: int, width_out: int, gain: float) -> nn.Linear:
            layer: nn.Linear = skip_init(nn.Linear, width_in, width_out)  # type: ignore[no-untyped-call]
            nn.init.orthogonal_(layer.weight, gain, generator=generator)
            nn.init.zeros_(layer.bias)
            return layer

        def stack(widths: Sequence[int]) -> nn.Sequential:
            pairs = zip((inputs, *widths), widths, strict=False)
            layers = [(linear(a, b, math.sqrt(2)), ACTIVATIONS[activation]()) for a, b in pairs]
            return nn.Sequential(*(module for pair in layers for module in pair))

        critic_widths = tuple(hidden if critic_hidden is None else critic_hidden)
        self.mlp_extractor = Extractor(stack(hidden), stack(critic_widths))
        self.action_net = linear((inputs, *hidden)[-1], actions, 0.01)
        self.value_net = linear((inputs, *critic_widths)[-1], 1, 1.0)
        self.log_std = Shift(actions) if continuous else None

    def encode(self, observations: Tensor) -> Tensor:
        """Observations as the networks read them, (n, inputs)."""
        if self.n_states is not None:
            return functional.one_hot(observations.long().flatten(), self.n_states).to(
                self.action_net.weight.dtype
            )
        return observations.to(self.action_net.weight.dtype).flatten(1)

    def latent(self, observations: Tensor) -> Tensor:
        """The actor's last hidden layer, (n, width)."""
        out: Tensor = self.mlp_extractor.policy_net(self.encode(observations))
        return out

    def outputs(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """What the action depends on, (n, actions): log-probabilities, or means; and V, (n,)."""
        x = self.encode(observations)
        head = self.action_net(self.mlp_extractor.policy_net(x))
        values = self.value_net(self.mlp_extractor.value_net(x)).squeeze(1)
        return head if self.continuous else functional.log_softmax(head, dim=1), values

    def evaluate_actions(
        self, observations: Tensor, actions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Values, log-probabilities of the actions and entropies, (n,) each."""
        head, values = self.outputs(observations)
        if self.log_std is None:
            chosen = head.gather(1, actions.long().reshape(-1, 1)).squeeze(1)
            return values, chosen, -(head.exp() * head).sum(dim=1)
        log_sigma = self.log_std(len(head))
        z = (actions.to(head.dtype).reshape(head.shape) - head) * torch.exp(-log_sigma)
        constant = 0.5 * math.log(2 * math.pi)
        log_prob = (-0.5 * z.square() - log_sigma - constant).sum(dim=1)
        return values, log_prob, (log_sigma + constant + 0.5).sum(dim=1)


def policy_of(
    tensors: Mapping[str, Tensor], activation: str, *, numbered_states: bool
) -> ActorCritic:
    """The policy of a state dict of stable-baselines3's MlpPolicy; sizes are read from it.

    numbered_states: observations of the buffer are state numbers. Raises AnalysisError.
    """
    tensors = {
        "log_std.bias" if name == "log_std" else name: tensor for name, tensor in tensors.items()
    }
    hidden, critic = _widths(tensors, ACTOR), _widths(tensors, CRITIC)
    for name in ("action_net.weight", "value_net.weight"):
        if name not in tensors or tensors[name].ndim != 2:
            raise AnalysisError(
                f"the policy file has no matrix {name!r}; it must hold the state dict of an "
                "MlpPolicy of stable-baselines3",
                "policy",
            )
    first = tensors.get(f"{ACTOR}.0.weight", tensors["action_net.weight"])
    inputs = first.shape[1]
    policy = ActorCritic(
        inputs,
        tensors["action_net.weight"].shape[0],
        continuous="log_std.bias" in tensors,
        n_states=inputs if numbered_states else None,
        hidden=hidden,
        critic_hidden=critic,
        activation=activation,
    )
    if all(tensor.dtype == torch.float64 for tensor in tensors.values()):
        policy.double()
    try:
        policy.load_state_dict(dict(tensors))
    except RuntimeError as error:
        raise AnalysisError(
            f"the policy file is no state dict of an MlpPolicy with two plain networks: {error}",
            "policy",
        ) from error
    return policy


def _widths(tensors: Mapping[str, Tensor], stem: str) -> list[int]:
    widths: list[int] = []
    while (weight := tensors.get(f"{stem}.{2 * len(widths)}.weight")) is not None:
        widths.append(weight.shape[0])
    return widths

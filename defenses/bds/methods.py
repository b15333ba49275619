"""BDS as tuning methods: what the model descends, and what the scheduler learns from each step.

    L_theta = c_a * mean_m a_m + (1/b) sum_{i in B} w_i l_i       w held constant

a: losses of the alignment rows, l: of the b user rows of the step, w: their safety weights.
Canary rows (ids N and above) take part in the scheduler's loss only. theta stays the AdamW point
estimate of the training loop under both samplers. Source: arXiv 2510.27172.
"""

import math
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from defenses.bds.errors import RowIdError, SchedulerStateError
from defenses.bds.neural import NeuralScheduler
from defenses.bds.ranking import effective_sample_size
from defenses.bds.scheduler import (
    ScalarScheduler,
    Transform,
    checked_losses,
    scheduler_rate,
    transform_weights,
)
from defenses.bds.scorers import Scorer, new_scorer
from defenses.method import (
    MethodContext,
    MethodError,
    PlainMethod,
    StepLosses,
    StepRecord,
    shared_mean,
)
from jobspec.defense import SchedulerOptions

LARGEST_LOGIT = 6.0
_TRANSFORMS: tuple[Transform, ...] = ("softmax", "sigmoid")


class Coefficients(NamedTuple):
    """Of the mean alignment loss and of the weighted user loss."""

    alignment: float
    user: float


def coefficients(options: SchedulerOptions, epoch: int, epochs: int) -> Coefficients:
    """Coefficients of epoch `epoch` (from 0) of `epochs`.

        constant:  (c_a, 1)
        seal:      (u, 1 - u),  u = 1 - epoch/epochs

    Under seal the first epoch descends the alignment loss alone; from the second on, u falls by
    1/epochs each, to 1/epochs in the last. c_a plays no part. A run of one epoch therefore never
    learns the user's rows, which suits the selection stage of SEAL and nothing else. SEAL
    (arXiv 2410.07471) lowers u by a constant each epoch from the second on and leaves that constant
    open (its script: 0.03 over 3 epochs, as the selector is its product); 1/epochs is derived, so
    that the user's rows count and the alignment term never vanishes.
    """
    if options.coefficients == "constant":
        return Coefficients(options.alignment_coefficient, 1.0)
    u = max(0.0, 1.0 - epoch / epochs)
    return Coefficients(u, 1.0 - u)


class _WeightedTuning(PlainMethod):
    """What the scalar and the neural form share: the objective."""

    uses_alignment: ClassVar[bool] = True
    uses_canaries: ClassVar[bool] = True

    def __init__(self, context: MethodContext, options: SchedulerOptions) -> None:
        self._user_count = context.row_count
        self._options = options
        self._steps_per_epoch = max(context.steps_per_epoch, 1)
        self._epochs = max(1, math.ceil(context.user_steps / self._steps_per_epoch))

    @property
    def rescores(self) -> bool:
        return self._options.rescore

    def objective(self, losses: StepLosses) -> Tensor:
        """This process's share of c_a * mean a + (1/b) sum_i w_i l_i; see the module."""
        factor = coefficients(self._options, losses.epoch, self._epochs)
        w_B = self._step_weights(losses).detach().to(losses.user_B)
        weighted = shared_mean(w_B * losses.user_B, losses.user_count)
        trusted = shared_mean(losses.alignment_B, losses.alignment_count)
        return factor.alignment * trusted + factor.user * weighted

    def _step_weights(self, losses: StepLosses) -> Tensor:
        """w of this process's user rows, float64."""
        raise NotImplementedError

    def _over_user_rows(self, v_N: Tensor) -> Tensor:
        """Weights normalised over the N user rows, given all logits."""
        return transform_weights(v_N[: self._user_count], self._options.transform)


class ScalarBds(_WeightedTuning):
    """BDS with one logit a row (arXiv 2510.27172, the released form).

        w_i = N * exp(v_i) / sum_{k < N} exp(v_k)       softmax over the N USER rows
        L_v = (1/b') sum_{i in B'} sigma_i(v) l_i       B': user and canary rows of the step,
                                                        sigma over all N + canaries

    The canaries take part in L_v like any row. In L_theta their weight is 0, so the user rows are
    normalised among themselves and keep mean weight 1. Without canaries both weights are the same.
    """

    def __init__(self, context: MethodContext, options: SchedulerOptions) -> None:
        super().__init__(context, options)
        self._rate = scheduler_rate(options, context.user_steps, context.steps_per_epoch)
        self._context = context
        self.scheduler = self._fresh()

    @property
    def rescores(self) -> bool:
        """A Langevin chain is not started anew: it samples, and rescoring estimates."""
        return self._options.rescore and self._options.sampler == "adam"

    def _fresh(self) -> ScalarScheduler:
        return ScalarScheduler(
            self._context.row_count + self._context.canary_count,
            self._options.model_copy(update={"learning_rate": self._rate}),
            seed=self._context.seed,
        )

    def learn(self, record: StepRecord) -> dict[str, float]:
        """One scheduler step; metrics scheduler_loss and effective_sample_size of the user rows.

        Raises NonFiniteLossError or RowIdError; v is untouched then.
        """
        row_ids, losses = _joined(record)
        if row_ids.numel() == 0:
            return {}
        step = self.scheduler.step(row_ids, losses)
        return {
            "scheduler_loss": step.loss,
            "effective_sample_size": effective_sample_size(self.weights()),
        }

    def relearn(self, record: StepRecord) -> None:
        """Estimate v anew from the losses of the whole set under one and the same model.

            v_i = -(t/T) (l_i - mean_k l_k) / c_H       after step t of T, cut at -6 and 6

        With the entropy prior c_H and t = T this is the exact minimiser of sum_k pi_k l_k + c_H
        sum_k pi_k log pi_k, pi = softmax(-l/c_H) (brief; c_H is rescore_temperature, nats); t/T
        holds it back while a row that is not learned yet may still be. The steps that follow start
        from there.

        A minibatch step tells when a row was last drawn as much as what it is, and early losses
        tell what the model did not know yet. Over the release's 20 epochs both wash out; in a run
        of a few they are most of v. And AdamW knows only the sign of a full-batch gradient, so it
        would push a row that is a little harder than the mean down as far as a poisoned one; this
        estimate goes by how much harder it is. Derived. Raises NonFiniteLossError or RowIdError; v
        is untouched then.
        """
        row_ids, losses = _joined(record)
        losses = checked_losses(row_ids, losses)
        progress = min(1.0, (record.step + 1) / self._context.user_steps)
        v_N = torch.zeros(self.scheduler.row_count, dtype=torch.float64)
        v_N[row_ids] = (losses.mean() - losses) * progress / self._options.rescore_temperature
        self.scheduler = self._fresh()
        self.scheduler.start_from(v_N.clamp(-LARGEST_LOGIT, LARGEST_LOGIT))

    def weights(self) -> Tensor:
        """w of all user rows, float64 [N]."""
        return self._over_user_rows(self.scheduler.v_N.detach())

    def logits(self) -> Tensor:
        """v of user rows and canaries, float64 [N + canaries]."""
        return self.scheduler.v_N.detach().clone()

    def state(self) -> dict[str, Tensor]:
        """v, transform (0 softmax, 1 sigmoid), and adam/... or generator."""
        saved = self.scheduler.state_dict()
        state = {"v": saved["v"], "transform": _transform_code(self._options.transform)}
        state |= {f"adam/{name}": value for name, value in saved["optimizer"].items()}
        if "generator" in saved:
            state["generator"] = saved["generator"]
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continues bit for bit; raises SchedulerStateError for a state of something else."""
        if "v" not in state:
            raise SchedulerStateError("saved state is not of a scalar scheduler: it has no v")
        nested = {
            "v": state["v"],
            "transform": _transform_name(state),
            "optimizer": {
                name.removeprefix("adam/"): value
                for name, value in state.items()
                if name not in ("v", "transform", "generator")
            },
        }
        if "generator" in state:
            nested["generator"] = state["generator"]
        self.scheduler.load_state_dict(nested)

    def _step_weights(self, losses: StepLosses) -> Tensor:
        return self.weights()[_known(losses.row_ids_B, self._user_count)]


class NeuralBds(_WeightedTuning):
    """BDS with a scorer f_phi (arXiv 2510.27172, the amortised form).

        w_i = b * softmax(f_phi(B))_i       over the user rows B of the step, on all processes
        L_v = (1/b') sum_{i in B'} b' * softmax(f_phi(B'))_i l_i    B': B and the step's canaries

    scorer: None makes a new one from options.scorer and the context's seed; a causal_lm must be
    passed. frozen: transfer; the scorer, trained on another set, is used as it is and learn only
    measures. Raises MethodError without features, or where they do not fit the set or the scorer.
    """

    compares_batches: ClassVar[bool] = True

    def __init__(
        self,
        context: MethodContext,
        options: SchedulerOptions,
        scorer: Scorer | None = None,
        frozen: bool = False,
    ) -> None:
        super().__init__(context, options)
        self._seed = context.seed
        if context.features is None:
            raise MethodError(
                "the neural scheduler reads the rows: pass their embeddings or the token ids of "
                "the scorer's tokenizer as features"
            )
        if scorer is None:
            if frozen:
                raise MethodError("a frozen scheduler needs a trained scorer; load one first")
            scorer = new_scorer(options.scorer, context.features, context.seed)
        self.scheduler = NeuralScheduler(
            scorer, context.features, options, frozen=frozen, seed=context.seed
        )
        expected = context.row_count + context.canary_count
        if self.scheduler.row_count != expected:
            raise MethodError(
                f"features describe {self.scheduler.row_count} rows, the set has {expected} "
                f"({context.row_count} of the user and {context.canary_count} canaries, in this "
                "order); make one entry for each"
            )

    @property
    def rescores(self) -> bool:
        return self._options.rescore and not self.scheduler.frozen

    def learn(self, record: StepRecord) -> dict[str, float]:
        """One scheduler step; metrics scheduler_loss and effective_sample_size.

        The latter is of the step's user rows among themselves, before the step: it costs nothing,
        where that of the whole set would cost N scorer passes. Raises NonFiniteLossError or
        RowIdError; phi is untouched then.
        """
        row_ids, losses = _joined(record)
        if row_ids.numel() == 0:
            return {}
        step = self.scheduler.step(row_ids, losses)
        metrics = {"scheduler_loss": step.loss}
        if record.row_ids.numel():
            v_B = step.logits_B[: record.row_ids.numel()]
            w_B = transform_weights(v_B, self._options.transform)
            metrics["effective_sample_size"] = effective_sample_size(w_B)
        return metrics

    def relearn(self, record: StepRecord) -> None:
        """One pass over the whole set in shuffled batches, in as many steps as an epoch has.

        The order follows from seed and step alone. Rows share phi, so minibatches do not single
        out the row that was drawn last, and cost one pass of the scorer instead of one for each
        step. Derived. Raises NonFiniteLossError or RowIdError.
        """
        row_ids, losses = _joined(record)
        generator = torch.Generator().manual_seed(self._seed + record.step)
        order = torch.randperm(row_ids.numel(), generator=generator)
        for places in torch.tensor_split(order, min(self._steps_per_epoch, order.numel())):
            self.scheduler.step(row_ids[places], losses[places])

    def weights(self) -> Tensor:
        """Weights of all user rows, normalised over them, float64 [N]; scores every row."""
        return self._over_user_rows(self.scheduler.score_all())

    def logits(self) -> Tensor:
        """f_phi of user rows and canaries, float64 [N + canaries]; scores every row."""
        return self.scheduler.score_all()

    def state(self) -> dict[str, Tensor]:
        """phi/..., rows, transform, and adam/... or generator; frozen: logits, transform."""
        return self.scheduler.state() | {"transform": _transform_code(self._options.transform)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continues bit for bit; raises SchedulerStateError for a state of something else."""
        saved = _transform_name(state)
        if saved != self._options.transform:
            raise SchedulerStateError(
                f"saved state uses the {saved} transform, the options ask for "
                f"{self._options.transform}"
            )
        self.scheduler.load_state({n: t for n, t in state.items() if n != "transform"})

    def _step_weights(self, losses: StepLosses) -> Tensor:
        step_ids = _known(losses.step_ids, self._user_count)
        row_ids_B = _known(losses.row_ids_B, self._user_count)
        if step_ids.numel() == 0:
            return torch.zeros(0, dtype=torch.float64)
        own = row_ids_B[:, None] == step_ids[None, :]
        if not bool(own.any(dim=1).all()):
            missing = row_ids_B[~own.any(dim=1)].tolist()
            raise RowIdError(f"rows {missing} of this process are not among the step's rows")
        weights = self.scheduler.weights(step_ids)
        return weights[own.to(torch.int64).argmax(dim=1)]


def _joined(record: StepRecord) -> tuple[Tensor, Tensor]:
    """Ids and losses of user rows, then canaries."""
    row_ids = torch.cat([record.row_ids, record.canary_ids])
    return row_ids, torch.cat([record.losses, record.canary_losses])


def _known(row_ids: Tensor, user_count: int) -> Tensor:
    """User row ids, perhaps none, int64 on the CPU; raises RowIdError for a canary or beyond."""
    row_ids = row_ids.detach().to(device="cpu", dtype=torch.int64)
    outside = row_ids[(row_ids < 0) | (row_ids >= user_count)].tolist()
    if outside:
        raise RowIdError(f"rows {outside} are no user rows; those are 0..{user_count - 1}")
    return row_ids


def _transform_code(transform: Transform) -> Tensor:
    return torch.tensor(_TRANSFORMS.index(transform))


def _transform_name(state: Mapping[str, Tensor]) -> Transform:
    code = int(state.get("transform", torch.tensor(-1)))
    if not 0 <= code < len(_TRANSFORMS):
        raise SchedulerStateError("saved state does not say which transform its weights need")
    return _TRANSFORMS[code]

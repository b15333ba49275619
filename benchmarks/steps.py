"""One training step of each kind, put together from the parts that the product's loop uses."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.workload import CPU, adapted_model, batch_of
from defenses.losses import IGNORED_LABEL, response_nll_B, response_token_mean_nll
from defenses.method import MethodContext, RowFeatures, StepLosses, StepRecord, TuningMethod
from defenses.panacea.perturbation import (
    PostHocPerturbation,
    panacea_gradients,
    post_hoc_perturbation,
    relative_rho,
)
from defenses.registry import build_method
from jobspec.defense import TuningOptions
from workers.pipeline.forward import response_scores
from workers.pipeline.models import trainable
from workers.pipeline.rows import TokenRow

CLIP = 1.0
STRENGTH = 1e-3


class Steps:
    """One adapted model with its optimiser; every method's step changes the same adapter."""

    def __init__(self, model_path: str | None = None, row_count: int = 1000) -> None:
        self.model: Any = adapted_model(model_path)
        self.parameters = trainable(self.model)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            list(self.parameters.values()), lr=1e-4, betas=(0.9, 0.95)
        )
        self.row_count = row_count
        self.count = 0

    def method(self, options: TuningOptions, features: RowFeatures | None = None) -> TuningMethod:
        context = MethodContext(
            row_count=self.row_count,
            canary_count=0,
            user_steps=1000,
            steps_per_epoch=100,
            parameters=self.parameters,
            seed=0,
            features=features,
        )
        return build_method(options, context)

    def tune(
        self,
        method: TuningMethod,
        alignment: Sequence[TokenRow],
        user: Sequence[TokenRow],
        ids: Sequence[int],
    ) -> None:
        """The product's step: alignment and user rows joined, one update of model and method."""
        seen: list[Tensor] = []
        torch.autograd.backward(self._objective(method, alignment, user, ids, seen))
        self._update()
        self._learn(method, ids, seen)

    def tune_jointly(
        self,
        method: TuningMethod,
        alignment: Sequence[TokenRow],
        user: Sequence[TokenRow],
        ids: Sequence[int],
        harmful: Sequence[TokenRow],
    ) -> None:
        """The same under Panacea's objective."""
        seen: list[Tensor] = []
        batch = batch_of(harmful)
        found = panacea_gradients(
            lambda: self._objective(method, alignment, user, ids, seen),
            lambda: response_token_mean_nll(self.model, *batch),
            self.parameters,
            rho=relative_rho(self.parameters),
            strength=STRENGTH,
            clamp=1e3,
        )
        for name, parameter in self.parameters.items():
            parameter.grad = found.direction[name]
        self._update()
        self._learn(method, ids, seen)

    def own_loss(self, *parts: Sequence[TokenRow]) -> None:
        """The model's own loss on its full logits, one forward and backward pass a part."""
        for rows in parts:
            batch = batch_of(rows)
            loss: Tensor = self.model(
                input_ids=batch.input_ids_BT,
                attention_mask=batch.attention_mask_BT,
                labels=batch.labels_BT,
                use_cache=False,
            ).loss
            torch.autograd.backward(loss)
        self._update()

    def straightforward(
        self,
        method: TuningMethod,
        alignment: Sequence[TokenRow],
        user: Sequence[TokenRow],
        ids: Sequence[int],
    ) -> None:
        """BDS as its description reads: for each set a forward pass, full logits [B, T, V], their
        cross-entropy at every position and a backward pass."""
        a_B = self._full_row_losses(alignment)
        torch.autograd.backward(method.objective(self._losses(a_B, a_B[:0], ids[:0])))
        l_B = self._full_row_losses(user)
        torch.autograd.backward(method.objective(self._losses(l_B[:0], l_B, ids)))
        self._update()
        self._learn(method, ids, [l_B.detach()])

    def _full_row_losses(self, rows: Sequence[TokenRow]) -> Tensor:
        batch = batch_of(rows)
        logits_BTV = self.model(
            input_ids=batch.input_ids_BT, attention_mask=batch.attention_mask_BT, use_cache=False
        ).logits
        targets_BT = batch.labels_BT[:, 1:]
        nll_BT = torch.nn.functional.cross_entropy(
            logits_BTV[:, :-1].float().flatten(0, 1),
            targets_BT.flatten(),
            ignore_index=IGNORED_LABEL,
            reduction="none",
        ).view_as(targets_BT)
        return nll_BT.sum(dim=1) / (targets_BT != IGNORED_LABEL).sum(dim=1)

    def perturb(self, batches: Sequence[Sequence[TokenRow]]) -> PostHocPerturbation:
        """Panacea's post-hoc perturbation from so many harmful batches."""
        return post_hoc_perturbation(
            self.parameters,
            [self._harmful_loss(rows) for rows in batches],
            relative_rho(self.parameters),
        )

    def plain_passes(self, batches: Sequence[Sequence[TokenRow]]) -> None:
        """Forward and backward over the same rows, without any use of the gradients."""
        for rows in batches:
            batch = batch_of(rows)
            torch.autograd.backward(response_nll_B(self.model, *batch).mean())
        self.optimizer.zero_grad(set_to_none=True)

    def _harmful_loss(self, rows: Sequence[TokenRow]) -> Callable[[], Tensor]:
        batch = batch_of(rows)
        return lambda: response_token_mean_nll(self.model, *batch)

    def _objective(
        self,
        method: TuningMethod,
        alignment: Sequence[TokenRow],
        user: Sequence[TokenRow],
        ids: Sequence[int],
        seen: list[Tensor],
    ) -> Tensor:
        scores = response_scores(self.model, [*alignment, *user], CPU)
        a_B, l_B = scores.nll[: len(alignment)], scores.nll[len(alignment) :]
        seen.append(l_B.detach())
        return method.objective(self._losses(a_B, l_B, ids))

    def _losses(self, a_B: Tensor, l_B: Tensor, ids: Sequence[int]) -> StepLosses:
        row_ids = torch.tensor(ids, dtype=torch.int64)
        return StepLosses(
            user_B=l_B,
            alignment_B=a_B,
            row_ids_B=row_ids,
            step_ids=row_ids,
            user_count=len(l_B),
            alignment_count=len(a_B),
            step=self.count,
            epoch=0,
            processes=1,
        )

    def _learn(self, method: TuningMethod, ids: Sequence[int], seen: Sequence[Tensor]) -> None:
        nothing = torch.empty(0, dtype=torch.float64)
        method.learn(
            StepRecord(
                torch.tensor(ids, dtype=torch.int64),
                seen[0].double(),
                nothing.long(),
                nothing,
                self.count,
                0,
            )
        )
        self.count += 1

    def _update(self) -> None:
        torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

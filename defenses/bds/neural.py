"""The neural data scheduler: a scorer f_phi reads each row, and phi is what is learned."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from defenses.bds.errors import RowIdError, SchedulerStateError
from defenses.bds.sampler import make_sampler
from defenses.bds.scheduler import (
    Transform,
    checked_losses,
    checked_row_ids,
    descent,
    transform_weights,
)
from defenses.bds.scorers import Scorer, empty_scorer, rows_of
from defenses.method import MethodError, RowFeatures
from jobspec.defense import SchedulerOptions

WEIGHTS_FILE = "scorer.safetensors"
SCORER_FILE = "scorer.json"


class NeuralStep(NamedTuple):
    """loss, gradient_norm: as in SchedulerStep. logits_B: f_phi of the batch before the step."""

    loss: float
    gradient_norm: float
    logits_B: Tensor


class NeuralScheduler:
    """v_i = f_phi(z_i), normalised over the batch, and how phi moves.

        w_i = b * softmax(f_phi(B))_i, detached           for the model's loss (or 2 sigmoid(f))
        L_v = (1/b) sum_{i in B} w_i(phi) l_i + c_H sum_B pi log pi + c_G sum_B gaussian(f)
        adam: phi <- AdamW(phi, clip(dL_v/dphi, global norm clip))     no weight decay
        sgld: phi <- phi - (eta/2) dU/dphi + sqrt(eta) N(0, I)

    U is scheduler_potential with the batch's logits; the prior on phi itself is flat.

    The gradient with respect to a batch logit is pi_j (l_j - sum_k pi_k l_k); it sums to 0, so
    without a Gaussian prior a bias of the last layer gets none but rounding errors. The softmax and
    what follows it is float64; the scorer computes in its own precision, on its own device.

    frozen: transfer. phi stays as it was given, `step` measures and changes nothing, and every row
    is scored once, at first use. Otherwise all rows are scored only when score_all is called: the
    release does it twice a step.

    Source: Bayesian Data Scheduler, arXiv 2510.27172 (neural scheduler). The release never updates
    phi; the update here follows the paper.
    """

    def __init__(
        self,
        scorer: Scorer,
        features: RowFeatures,
        options: SchedulerOptions,
        *,
        frozen: bool = False,
        seed: int = 0,
    ) -> None:
        self.row_count = _row_count(scorer, features)
        self.scorer = scorer.eval()
        self.options = options
        self.frozen = frozen
        self._features = features
        self._phi = {name: p for name, p in scorer.named_parameters() if p.requires_grad}
        self._sampler = make_sampler(self._phi, options, learning_rate(scorer, options), seed)
        self._all_scores: Tensor | None = None

    def logits(self, row_ids_B: Tensor) -> Tensor:
        """f_phi of the given rows, float64 [B] on the CPU, detached."""
        row_ids_B = checked_row_ids(row_ids_B, self.row_count)
        if self.frozen:
            return self.score_all()[row_ids_B]
        with torch.no_grad():
            return self._scores(row_ids_B)

    def weights(self, row_ids_B: Tensor) -> Tensor:
        """sigma of the given rows, normalised over them alone, detached float64 [B]."""
        return transform_weights(self.logits(row_ids_B), self.options.transform)

    def score_all(self) -> Tensor:
        """f_phi of every row, float64 [N]: N scorer passes, kept until phi moves."""
        if self._all_scores is None:
            order = _by_length(self._features, self.row_count)
            scores_N = torch.empty(self.row_count, dtype=torch.float64)
            with torch.no_grad():
                for start in range(0, self.row_count, self.scorer.rows_per_pass):
                    row_ids = order[start : start + self.scorer.rows_per_pass]
                    scores_N[row_ids] = self._scores(row_ids)
            self._all_scores = scores_N
        return self._all_scores.clone()

    def step(self, row_ids_B: Tensor, losses_B: Tensor) -> NeuralStep:
        """Moves phi once by the losses of the given rows; frozen, it only measures.

        Raises RowIdError for unknown rows or a length mismatch, NonFiniteLossError for a NaN or
        infinite loss; phi is untouched then.
        """
        row_ids_B = checked_row_ids(row_ids_B, self.row_count)
        losses_B = checked_losses(row_ids_B, losses_B)
        places_B = torch.arange(row_ids_B.shape[0])
        if self.frozen:
            v_B = self.logits(row_ids_B)
            found = descent(v_B, places_B, losses_B, self.row_count, self.options)
            return NeuralStep(found.loss, 0.0, v_B)
        v_B = self._scores(row_ids_B)
        found = descent(v_B, places_B, losses_B, self.row_count, self.options)
        gradients = torch.autograd.grad(
            found.target, list(self._phi.values()), allow_unused=True, materialize_grads=True
        )
        norm = self._sampler.move(gradients)
        self._all_scores = None
        return NeuralStep(found.loss, norm, v_B.detach())

    def state(self) -> dict[str, Tensor]:
        """Flat copies of phi and the sampler's state; of a frozen scheduler, the rows' logits."""
        if self.frozen:
            return {"logits": self.score_all()}
        state = {f"phi/{name}": p.detach().clone() for name, p in self._phi.items()}
        return state | self._sampler.state() | {"rows": torch.tensor(self.row_count)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continues from a state of a scheduler of the same set and scorer, bit for bit.

        Raises SchedulerStateError if the rows, the scorer's shape, the sampler or "frozen" differ;
        nothing is changed then.
        """
        if self.frozen != ("logits" in state):
            raise SchedulerStateError(
                "one of saved state and scheduler is frozen, the other learns; resume with the "
                "options of the first run"
            )
        rows = state["logits"].numel() if self.frozen else int(state.get("rows", torch.tensor(-1)))
        if rows != self.row_count:
            raise SchedulerStateError(
                f"saved state has {rows} rows, this training set has {self.row_count}; "
                "resume with the file the checkpoint was made from"
            )
        if self.frozen:
            self._all_scores = state["logits"].to(device="cpu", dtype=torch.float64).clone()
            return
        saved = {n.removeprefix("phi/"): t for n, t in state.items() if n.startswith("phi/")}
        if {n: t.shape for n, t in saved.items()} != {n: p.shape for n, p in self._phi.items()}:
            raise SchedulerStateError(
                "the scorer of the saved state has other tensors or shapes than this one; resume "
                "with the scorer of the first run"
            )
        rest = {n: t for n, t in state.items() if n != "rows" and not n.startswith("phi/")}
        self._sampler.load_state(rest)
        with torch.no_grad():
            for name, parameter in self._phi.items():
                parameter.copy_(saved[name])
        self._all_scores = None

    def _scores(self, row_ids_B: Tensor) -> Tensor:
        scores_B: Tensor = self.scorer(rows_of(self._features, row_ids_B))
        return scores_B.to(device="cpu", dtype=torch.float64)


def learning_rate(scorer: Scorer, options: SchedulerOptions) -> float:
    """AdamW rate of phi: the option, or 1e-3 for a network from scratch, 5e-5 for a backbone."""
    if options.scorer_learning_rate is not None:
        return options.scorer_learning_rate
    return 5e-5 if scorer.kind == "causal_lm" else 1e-3


def save_scorer(folder: Path, scorer: Scorer, *, tokenizer: str, transform: Transform) -> None:
    """Writes phi and what it must be used with: scorer.safetensors and scorer.json.

    tokenizer: the fingerprint of RowFeatures that it was trained on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {n: t.detach().cpu().clone().contiguous() for n, t in scorer.state_dict().items()}
    safetensors.torch.save_file(tensors, folder / WEIGHTS_FILE)
    description = {
        "kind": scorer.kind,
        "sizes": scorer.sizes(),
        "tokenizer": tokenizer,
        "transform": transform,
    }
    (folder / SCORER_FILE).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def load_scorer(
    folder: Path, tokenizer_fingerprint: str, *, transform: Transform = "softmax"
) -> Scorer:
    """The scorer that save_scorer wrote, on the CPU, for rows made by the same tokenizer.

    tokenizer_fingerprint: of the RowFeatures it shall read. transform: that it shall be used with.
    Raises SchedulerStateError if either differs, or the files are missing or damaged.
    """
    try:
        described: dict[str, Any] = json.loads((folder / SCORER_FILE).read_text(encoding="utf-8"))
        trained_on, trained_with = described["tokenizer"], described["transform"]
        kind, sizes = described["kind"], described["sizes"]
        tensors = safetensors.torch.load_file(folder / WEIGHTS_FILE)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise SchedulerStateError(
            f"{folder} holds no complete scorer ({error}); train one with the neural scheduler"
        ) from error
    if trained_on != tokenizer_fingerprint:
        raise SchedulerStateError(
            f"the scorer in {folder} reads rows of the tokenizer or embedder {trained_on!r}, these "
            f"rows were made by {tokenizer_fingerprint!r}; its logits would mean nothing. Make the "
            "features with the former, or train a new scorer"
        )
    if trained_with != transform:
        raise SchedulerStateError(
            f"the scorer in {folder} was trained under the {trained_with} transform, the options "
            f"ask for {transform}; use {trained_with}, or train a new scorer"
        )
    try:
        scorer = empty_scorer(kind, sizes)
        scorer.load_state_dict(tensors)
    except (RuntimeError, KeyError, TypeError, ValueError) as error:
        raise SchedulerStateError(
            f"the weights in {folder} do not fit the scorer it describes ({error})"
        ) from error
    return scorer


def _row_count(scorer: Scorer, features: RowFeatures) -> int:
    if scorer.reads == "embeddings" and features.embeddings_ND is not None:
        count = int(features.embeddings_ND.shape[0])
        if not bool(torch.isfinite(features.embeddings_ND).all()):
            raise MethodError("an embedding is not finite; embed the rows again")
    elif scorer.reads == "tokens" and features.tokens is not None:
        count = len(features.tokens)
        empty = [row_id for row_id, row in enumerate(features.tokens) if len(row) == 0]
        if empty:
            raise MethodError(f"rows {empty} have no token to score; drop them first")
    else:
        raise MethodError(
            f"a scorer of kind {scorer.kind} reads {scorer.reads}, which the features lack; "
            "choose another scorer or make those features"
        )
    if count == 0:
        raise RowIdError("a scheduler needs at least one row, got 0")
    return count


def _by_length(features: RowFeatures, row_count: int) -> Tensor:
    """All row ids, short rows first, so that a pass pads little."""
    if features.tokens is None:
        return torch.arange(row_count)
    return torch.argsort(torch.tensor([len(row) for row in features.tokens]), stable=True)

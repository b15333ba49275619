"""Every method's scores of all rows, from gradients, their store, or curvature."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from analyses.attribution import curvature, scores
from analyses.attribution.ekfac import ekfac
from analyses.attribution.features import FeatureStore
from analyses.attribution.gradients import Blocks, BlockVectors, PassResult
from analyses.attribution.rows import EncodedRow, TargetRows
from analyses.attribution.spec import CURVATURE_METHODS, GRAM_METHODS, FinalModelRequest
from analyses.attribution.subject import JOB_BETAS, AdamState, Subject
from analyses.context import AnalysisContext, AnalysisError

Array = NDArray[np.float64]
FIRST_ORDER = ("grad_dot", "grad_cos")
FISHER_SHARE, GAUSS_NEWTON_TIMES, DATAINF_SHARE = 0.1, 100.0, 0.1
UNSOLVED = 0.1


class Queries(NamedTuple):
    """What rows are scored for: the Q targets and then the controls' mean, T = Q + 1 together.

    vectors: gradients by block, [T, size]; norms_T; losses_T; rows and sign_TR for methods that
    take the rows themselves.
    """

    vectors: BlockVectors
    norms_T: Array
    losses_T: Array
    answers: TargetRows

    @property
    def targets(self) -> int:
        """Q."""
        return len(self.norms_T) - 1

    @property
    def equal_share(self) -> Array:
        """Coefficients of the mean over targets whose gradients are scaled to one norm, and back
        to their mean norm: one target keeps its own score. [Q]"""
        norms = self.norms_T[: self.targets]
        alive = norms > 0
        found = np.zeros(self.targets)
        found[alive] = norms[alive].mean() / (norms[alive] * alive.sum())
        return found


class Found(NamedTuple):
    """scores_TN by method; mean_N by method, over the targets; damping by method;
    warnings."""

    scores_TN: dict[str, Array]
    mean_N: dict[str, Array]
    block_dots_NM: Tensor
    statistics: PassResult
    damping: dict[str, float]
    warnings: list[str]


Pass = Callable[[BlockVectors, int], PassResult]


def all_scores(
    request: FinalModelRequest,
    context: AnalysisContext,
    subject: Subject,
    queries: Queries,
    run_pass: Pass,
    open_store: Callable[[], FeatureStore],
    adam: AdamState | None,
) -> Found:
    """Scores of every asked method but further_training.

    run_pass(directions, detail): inner products with all rows; open_store: their store, where
    inner products among rows are needed.
    """
    blocks = subject.blocks
    wanted: set[str] = set(request.methods)
    T, warnings = queries.targets + 1, []
    scores_TN: dict[str, Array] = {}
    groups = {"grad": queries.vectors}
    if "adam_dot" in wanted:
        if adam is None:
            raise AnalysisError(
                "methods: adam_dot needs the optimiser's last state; give the file "
                "`optimizer_state`, or leave the method out",
                "methods",
            )
        groups["adam"] = _preconditioned(queries.vectors, adam)
    directions = [torch.cat(parts) for parts in zip(*groups.values(), strict=True)]
    first = request.methods[0]
    lead = "adam" if first == "adam_dot" else "grad"
    mean = _mean_direction(groups[lead], queries)
    directions = [torch.cat([part, one]) for part, one in zip(directions, mean, strict=True)]
    found = run_pass(directions, len(groups) * T)
    dots_DN = found.dots_DN.numpy()
    scores_TN["grad_dot"] = dots_DN[:T]
    scores_TN["grad_cos"] = np.stack(
        [
            scores.cosines(dots, found.norms_N.numpy(), float(norm))
            for dots, norm in zip(dots_DN[:T], queries.norms_T, strict=True)
        ]
    )
    if "adam_dot" in wanted:
        scores_TN["adam_dot"] = dots_DN[T : 2 * T]
    lambda0, fixed = found.mean_square(blocks), request.fixed_damping
    if lambda0 == 0 and not wanted <= {*FIRST_ORDER, "adam_dot", "further_training"}:
        raise AnalysisError(
            "every row's gradient is zero: the rows are fully learned, and nothing can be ranked",
            "methods",
        )
    damping: dict[str, float] = {}
    if wanted & GRAM_METHODS:
        if "fisher_if" in wanted:
            damping["fisher_if"] = lambda0 if fixed is None else fixed
        if "datainf" in wanted and fixed is not None:
            damping["datainf"] = fixed
        scores_TN |= _gram_scores(wanted, open_store(), queries, found, damping)
    if wanted & CURVATURE_METHODS:
        strong = GAUSS_NEWTON_TIMES * lambda0 if fixed is None else fixed
        damping |= dict.fromkeys(CURVATURE_METHODS & wanted, strong)
        solved, notes = _solved(request, context, subject, queries, strong)
        warnings += notes
        for name, vectors in solved.items():
            scores_TN[name] = run_pass(vectors, 0).dots_DN.numpy()
    if "ekfac" in wanted:
        context.check_stop()
        damping["ekfac"] = FISHER_SHARE * lambda0 if fixed is None else fixed
        by_answer = ekfac(
            subject.model,
            blocks,
            subject.rows,
            queries.answers.rows,
            damping=damping["ekfac"],
            batch_size=request.batch_size,
        ).numpy()
        scores_TN["ekfac"] = queries.answers.sign_QR.double().numpy() @ by_answer
    kept = {str(name): scores_TN[name] for name in request.methods if name in scores_TN}
    return Found(
        kept,
        {name: mean_over_targets(name, value, queries) for name, value in kept.items()},
        found.block_dots_NM,
        found,
        damping,
        warnings,
    )


def mean_over_targets(method: str, scores_TN: Array, queries: Queries) -> Array:
    """[N]. Methods that are linear in q average over gradients of one norm, the others plainly."""
    plain = method in ("grad_cos", "trak")
    share = np.full(queries.targets, 1 / queries.targets) if plain else queries.equal_share
    return np.asarray(share @ scores_TN[: queries.targets])


def _mean_direction(vectors: BlockVectors, queries: Queries) -> BlockVectors:
    share = torch.from_numpy(queries.equal_share)
    return [(share.to(part) @ part[: queries.targets])[None] for part in vectors]


def _preconditioned(vectors: BlockVectors, adam: AdamState) -> BlockVectors:
    """q / (sqrt(vhat) + 1e-8): the scaling is moved from every g_i to q."""
    found = []
    for part, second in zip(vectors, adam.second, strict=True):
        scale = scores.adam_scale(second.double().cpu().numpy(), adam.step, JOB_BETAS[1])
        found.append((part.double() * torch.from_numpy(scale).to(part.device)).to(part.dtype))
    return found


def _gram_scores(
    wanted: set[str],
    store: FeatureStore,
    queries: Queries,
    found: PassResult,
    damping: dict[str, float],
) -> dict[str, Array]:
    answer: dict[str, Array] = {}
    grams = store.grams(queries.vectors)
    if "datainf" in wanted:
        total: Array | float = 0.0
        for (K, k), square in zip(grams, found.mean_square_M.tolist(), strict=True):
            own = damping.get("datainf", DATAINF_SHARE * square)
            # A tensor without gradients says nothing about any row.
            if own > 0:
                total = total + scores.datainf(K, k.numpy(), own)
        answer["datainf"] = np.asarray(total).T
    K = np.sum([gram for gram, _ in grams], axis=0)
    k = np.sum([part.numpy() for _, part in grams], axis=0)
    if "fisher_if" in wanted:
        answer["fisher_if"] = scores.fisher_if(K, k, damping["fisher_if"]).T
    if "trak" in wanted:
        losses = found.losses_N.double().numpy()
        answer["trak"] = scores.trak_from_gram(K, k, losses, queries.losses_T).T
    return answer


def _solved(
    request: FinalModelRequest,
    context: AnalysisContext,
    subject: Subject,
    queries: Queries,
    damping: float,
) -> tuple[dict[str, BlockVectors], list[str]]:
    """x = (H + lambda I)^-1 q of every query, by method, and warnings."""
    blocks = subject.blocks
    hessian = curvature.GaussNewton(subject.model, blocks, subject.rows, request.batch_size)
    generator = torch.Generator().manual_seed(context.seed)
    found: dict[str, BlockVectors] = {}
    worst = 0.0

    def whole(v: Tensor) -> Tensor:
        context.check_stop()
        return hessian.product(v)

    def batch(v: Tensor) -> Tensor:
        context.check_stop()
        size = min(request.batch_size, len(subject.rows))
        chosen = torch.randperm(len(subject.rows), generator=generator)[:size]
        return hessian.product(v, chosen.tolist())

    for name in sorted(CURVATURE_METHODS.intersection(request.methods)):
        columns = []
        for index in range(queries.targets + 1):
            context.progress(f"solving for {name}", index, queries.targets + 1)
            q = curvature.flat(queries.vectors, index)
            if float(q.norm()) == 0:
                columns.append(q)
                continue
            if name == "gn_cg":
                solution = curvature.conjugate_gradient(
                    whole, q, damping, iterations=request.solver_steps
                )
            else:
                solution, _ = curvature.lissa_best_scale(
                    batch, whole, q, damping, depth=4 * request.solver_steps
                )
            worst = max(worst, solution.residual)
            columns.append(solution.x)
        found[name] = curvature.by_block(torch.stack(columns), blocks)
    notes = []
    if worst > UNSOLVED:
        notes.append(
            f"A linear system is solved to {worst:.2g} of its right side only; give more "
            "solver_steps or a larger damping."
        )
    return found, notes


def queries_of(
    blocks: Blocks,
    targets: TargetRows,
    controls: TargetRows,
    stacked: Callable[[Sequence[EncodedRow]], tuple[BlockVectors, Tensor]],
) -> Queries:
    """Gradients of the targets, and of the mean control scaled target by target to one norm."""
    rows = [*targets.rows, *controls.rows]
    gradients, losses = stacked(rows)
    count, wide = len(targets.sign_QR), len(targets.rows)
    by_target = [targets.sign_QR.to(part) @ part[:wide] for part in gradients]
    by_control = [controls.sign_QR.to(part) @ part[wide:] for part in gradients]
    norms_C = _norms(by_control)
    share = np.divide(1.0, norms_C, out=np.zeros_like(norms_C), where=norms_C > 0)
    share *= norms_C.mean() / max(len(share), 1)
    mean = [torch.from_numpy(share).to(part) @ part for part in by_control]
    vectors = [torch.cat([one, other[None]]) for one, other in zip(by_target, mean, strict=True)]
    sign_TR = torch.zeros((count + 1, len(rows)))
    sign_TR[:count, :wide] = targets.sign_QR
    sign_TR[count, wide:] = torch.from_numpy(share).float() @ controls.sign_QR
    losses_Q = targets.sign_QR.double() @ losses[:wide].double()
    control_loss = (controls.sign_QR.double() @ losses[wide:].double()).mean()
    return Queries(
        vectors,
        _norms(vectors),
        torch.cat([losses_Q, control_loss[None]]).numpy(),
        TargetRows(rows, sign_TR),
    )


def _norms(vectors: BlockVectors) -> Array:
    return np.asarray(torch.stack([part.double().norm(dim=1) for part in vectors]).norm(dim=0))

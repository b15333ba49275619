"""attribution.final_model: which rows push the tuned model toward a behaviour."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analyses.attribution import report
from analyses.attribution.controls import CONTROLS
from analyses.attribution.features import FeatureStore, FeatureWriter, Projector, store_key
from analyses.attribution.further_training import Plan
from analyses.attribution.gradients import (
    BlockVectors,
    PassResult,
    pass_over_rows,
    stacked_gradients,
)
from analyses.attribution.methods import Found, Queries, all_scores, queries_of
from analyses.attribution.rows import TargetRows, target_rows
from analyses.attribution.score_chart import check_chart, score_chart
from analyses.attribution.spec import (
    GRAM_METHODS,
    FinalModelRequest,
    FinalModelResult,
    FurtherTraining,
    RowReport,
    Verification,
)
from analyses.attribution.subject import (
    JOB_BETAS,
    AdamState,
    Subject,
    adam_state,
    load_subject,
)
from analyses.attribution.verification import (
    AdapterProblem,
    adamw_from,
    further_rate,
    measure,
    verify,
)
from analyses.context import AnalysisContext, AnalysisError, Chart, Outcome, Table

Array = NDArray[np.float64]
NEAR_ZERO_GRADIENT = 1e-7
CACHE = "attribution"


def run(request: FinalModelRequest, context: AnalysisContext) -> Outcome:
    """The result of attribution.final_model.

    g_q = NLL(completion) - NLL(contrast), q = grad g_q, g_i = grad L_i with L_i the mean NLL of the
    row's own trained tokens, all over the adapter's parameters at the final model in evaluation
    mode and float32. A method's score is a_i = q' M g_i with its own M; the unified view is
    M = (H + lambda I)^-1, lambda = 1/(lr*steps) of the further training that is stood for. Source:
    arXiv 2412.03906 as told by the brief, 2.3 to 2.5. Raises AnalysisError and Stopped.
    """
    context.progress("loading", 0, 1)
    subject = load_subject(request, context)
    chosen = _chosen(request, subject)
    adam = adam_state(context, subject.blocks)
    targets = target_rows(subject.tokenizer, request.targets, subject.context_length)
    controls = CONTROLS if request.controls is None else request.controls
    control_rows = target_rows(
        subject.tokenizer, controls or CONTROLS, subject.context_length, "controls"
    )
    queries = queries_of(
        subject.blocks,
        targets,
        control_rows,
        lambda rows: stacked_gradients(
            subject.model,
            subject.blocks,
            rows,
            request.batch_size,
        ),
    )
    context.check_stop()
    warnings = [*subject.warnings, *_target_warnings(queries)]
    passes = _Passes(request, context, subject)
    found = all_scores(request, context, subject, queries, passes.run, passes.store, adam)
    warnings += [*found.warnings, *_row_warnings(request, subject, found, adam)]
    checked, notes, table = _checked(request, context, subject, targets, found, adam, chosen)
    warnings += notes
    rows, arrays = _rows(request, subject, queries, found, chosen)
    first = request.methods[0]
    main = found.scores_TN[first]
    charts = [
        Chart(
            "Scores of all rows",
            "Left: rows far above the others promote the targets. Right: rows that are high for "
            "the targets and not for benign prompts are specific to them.",
            score_chart(arrays["score"], main[-1], first),
        )
    ]
    if checked is not None:
        charts.append(
            Chart(
                "Measured against predicted",
                "Each point is a row that was left out of a little further training.",
                check_chart(checked.measured, checked.predicted, first),
            )
        )
    result = FinalModelResult(
        job_id=subject.job_id,
        at=request.at,
        method=first,
        n_rows=len(subject.rows),
        adapter_parameters=subject.parameters,
        target_losses=tuple(queries.losses_T[:-1].tolist()),
        gradient_ratio=found.statistics.gradient_ratio,
        damping=found.damping,
        scores=tuple(tuple(row) for row in main[:-1].tolist()),
        rows=rows,
        verification=checked,
    )
    every = {
        f"{name}.target_{q}": value[q].tolist()
        for name, value in found.scores_TN.items()
        for q in range(queries.targets)
    }
    tables = [Table("scores", {**{k: v.tolist() for k, v in arrays.items()}, **every})]
    if table is not None:
        tables.append(table)
    return Outcome(result, tuple(tables), tuple(charts), tuple(warnings))


class _Passes:
    """Inner products with all rows: streamed, or from the store where there is or must be one."""

    def __init__(
        self, request: FinalModelRequest, context: AnalysisContext, subject: Subject
    ) -> None:
        self._request, self._context, self._subject = request, context, subject
        self._projector = Projector(subject.blocks, request.projection, context.seed)
        key = store_key(
            subject.adapter_sha256, subject.base, subject.rows, request.projection, context.seed
        )
        self._folder = context.cache_dir / CACHE / key
        self._wanted = request.projection is not None or bool(
            GRAM_METHODS.intersection(request.methods)
        )

    def run(self, directions: BlockVectors, detail: int) -> PassResult:
        if self._folder.is_dir():
            return self.store().dots(directions, detail)
        writer = None
        if self._wanted:
            writer = FeatureWriter(
                self._folder,
                self._projector,
                len(self._subject.rows),
                projected=self._request.projection is not None,
            )
        total = len(self._subject.rows)

        def each(done: int) -> None:
            self._context.check_stop()
            self._context.progress("gradients of rows", done, total)

        try:
            found = pass_over_rows(
                self._subject.model,
                self._subject.blocks,
                self._subject.rows,
                directions,
                batch_size=self._request.batch_size,
                detail=detail,
                also=None if writer is None else writer.take,
                each=each,
            )
            if writer is None:
                return found
            writer.finish(found)
        finally:
            if writer is not None:
                writer.discard()
        # Scores do not depend on whether the store was there already.
        return self.store().dots(directions, detail)

    def store(self) -> FeatureStore:
        return FeatureStore(self._folder, self._projector, self._subject.blocks)


def _chosen(request: FinalModelRequest, subject: Subject) -> list[int]:
    """Places of the rows that are reported. Raises AnalysisError for a line without a row."""
    if request.rows == "all":
        return list(range(len(subject.rows)))
    by_line = {row.line: place for place, row in enumerate(subject.rows)}
    for line in request.rows:
        if line not in by_line:
            raise AnalysisError(
                f"rows: line {line} of the training file holds no row that trains", "rows"
            )
    return sorted({by_line[line] for line in request.rows})


def _target_warnings(queries: Queries) -> list[str]:
    norms = queries.norms_T[: queries.targets]
    dead = int((norms < NEAR_ZERO_GRADIENT).sum())
    if dead == queries.targets:
        raise AnalysisError(
            "targets: the model gives every target with certainty, so that no gradient is left and "
            "no row can be ranked; add a `contrast`, such as a refusal",
            "targets",
        )
    return [f"{dead} targets have hardly any gradient and say little."] if dead else []


def _row_warnings(
    request: FinalModelRequest, subject: Subject, found: Found, adam: AdamState | None
) -> list[str]:
    warnings = []
    ratio = found.statistics.gradient_ratio
    if ratio > report.UNCONVERGED:
        warnings.append(
            f"The model is no stationary point of its training loss (|grad R| is {ratio:.2f} of "
            "the mean row's gradient): trust grad_dot more than influence functions."
        )
    if adam is None and set(request.methods) - {"further_training"}:
        warnings.append(
            "Jobs train with AdamW; without its state (`optimizer_state`) the scores describe "
            "plain gradient steps."
        )
    zero = int((found.statistics.norms_N == 0).sum())
    if zero:
        warnings.append(
            f"{zero} rows have no gradient at all: they are fully learned, or cut short, and score "
            "0 though they may have contributed."
        )
    twins = int((report.copies([row.row_id for row in subject.rows]) > 1).sum())
    if twins:
        warnings.append(
            f"{twins} rows are copies of others; each has the full score, group_score is their sum."
        )
    if request.projection is not None:
        warnings.append("Scores come from projected gradients and are estimates.")
    return warnings


def _rows(
    request: FinalModelRequest,
    subject: Subject,
    queries: Queries,
    found: Found,
    chosen: Sequence[int],
) -> tuple[tuple[RowReport, ...], dict[str, NDArray[Any]]]:
    """The listed rows by rank, and the columns of all rows."""
    first = request.methods[0]
    score = found.mean_N[first]
    control = found.scores_TN[first][-1]
    weights = subject.weight_N
    if request.weights == "scheduler" and weights is not None:
        score, control = score * np.array(weights), control * np.array(weights)
    rank, control_rank = report.ranks(score), report.ranks(control)
    z, same = report.z_scores(score), report.copies([row.row_id for row in subject.rows])
    own = report.specific(z, report.z_scores(control))
    names, place = report.module_names([block.name for block in subject.blocks])
    dots = found.block_dots_NM.double().numpy()
    norms, losses = found.statistics.norms_N.numpy(), found.statistics.losses_N.numpy()
    listed = sorted(chosen, key=lambda index: rank[index])[: request.report_rows]
    rows = tuple(
        RowReport(
            index=index,
            line=subject.rows[index].line,
            row_id=subject.rows[index].row_id,
            score=float(score[index]),
            z_score=float(z[index]),
            rank=int(rank[index]),
            scores={name: float(value[index]) for name, value in found.mean_N.items()},
            grad_norm=float(norms[index]),
            loss=float(losses[index]),
            weight=None if weights is None else weights[index],
            copies=int(same[index]),
            group_score=float(score[index] * same[index]),
            control_rank=int(control_rank[index]),
            specific=bool(own[index]),
            top_modules=report.top_modules(names, dots[index], place),
        )
        for index in listed
    )
    arrays: dict[str, NDArray[Any]] = {
        "index": np.arange(len(score)),
        "line": np.array([row.line for row in subject.rows]),
        "row_id": np.array([row.row_id for row in subject.rows]),
        "score": score,
        "z_score": z,
        "rank": rank,
        "control_rank": control_rank,
        "specific": own,
        "grad_norm": norms,
        "loss": losses,
        **found.mean_N,
    }
    return rows, arrays


def _checked(
    request: FinalModelRequest,
    context: AnalysisContext,
    subject: Subject,
    targets: TargetRows,
    found: Found,
    adam: AdamState | None,
    chosen: Sequence[int],
) -> tuple[Verification | None, list[str], Table | None]:
    settings = request.verification
    asked = "further_training" in request.methods
    if settings is None and not asked:
        return None, [], None
    settings = settings or FurtherTraining()
    first = request.methods[0]
    rows = (
        list(chosen)
        if asked
        else report.checked_rows(found.mean_N[first], settings.rows, context.seed)
    )
    rate = further_rate(
        settings.learning_rate,
        max(settings.checkpoints),
        subject.blocks,
        found.statistics.mean_gradient,
    )
    plan = Plan(
        settings.checkpoints,
        rate,
        settings.batch_size,
        settings.convention,
        adamw_from(adam, rate, JOB_BETAS) if settings.optimizer == "adamw" else None,
    )
    problem = AdapterProblem(
        subject.model, subject.blocks, subject.rows, targets, request.batch_size
    )
    key = f"{subject.adapter_sha256} {subject.base} {settings} {request.targets}"
    key += " ".join(row.row_id for row in subject.rows)
    seeds = [context.seed + number for number in range(settings.seeds)]
    measured = measure(problem, rows, plan, seeds, context, key)
    predicted = {name: value[:-1][:, rows] for name, value in found.scores_TN.items()}
    lines = [subject.rows[index].line for index in rows]
    checked, notes, a_QI = verify(measured, settings, lines, predicted, first, rate)
    table = Table(
        "verification",
        {
            "line": lines,
            "measured": list(checked.measured),
            "sem": list(checked.sem),
            **{f"target_{q}": values.tolist() for q, values in enumerate(a_QI)},
            **{name: value[rows].tolist() for name, value in found.mean_N.items()},
        },
    )
    return checked, notes, table

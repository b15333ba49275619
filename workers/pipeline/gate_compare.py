"""The two sides of a gate run: which models are compared, and both asked the same."""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from evaluators.gate.policy import Policy
from jobspec.catalogue import BaseModelEntry, FolderSource
from jobspec.gate_run import GateRunSpec
from workers.pipeline.artifact import (
    Artifact,
    adapter_artifact,
    load_adapter,
    load_tokenizer,
    local_entry,
    model_artifact,
)
from workers.pipeline.emit import Emit
from workers.pipeline.evaluate import (
    Evaluated,
    EvaluationPlan,
    Judges,
    Measurement,
    Respondent,
    UtilityTask,
    answers_folder,
    base_respondent,
    evaluate,
    measure,
)
from workers.pipeline.gate_data import GateData, read_data
from workers.pipeline.models import LoadedModel, load_base

NO_TASK = UtilityTask(None, None, (), (), (), 0)


class Models(NamedTuple):
    """What is compared, with its files on this machine.

    folder: of the model, or of the one under the adapter. base None: the model without its
    adapter, and nothing where it has none.
    """

    subject: BaseModelEntry
    folder: Path
    artifact: Artifact
    base: BaseModelEntry | None


class Asking(NamedTuple):
    """All that asking needs."""

    spec: GateRunSpec
    models: Models
    data: GateData
    judges: Judges
    policy: Policy
    work: Path
    emit: Emit
    stop: Callable[[], bool]
    timed: Callable[[str], AbstractContextManager[Any]]


class Compared(NamedTuple):
    """What came of it, and fingerprints of the loaded weights (of the base, where it was loaded by
    itself). comparable_loss: both models count the same tokens, so that losses a token compare."""

    evaluated: Evaluated
    fingerprint: str
    base_fingerprint: str | None = None
    comparable_loss: bool = True


def models_of(spec: GateRunSpec) -> Models:
    """Fetch, convert and hash what the spec names. Raises PipelineFailure(model_unavailable)."""
    subject = local_entry(spec.model, spec.cache_dir)
    base = None if spec.base is None else local_entry(spec.base, spec.cache_dir)
    assert isinstance(subject.source, FolderSource)
    folder = subject.source.path
    if spec.adapter is None:
        return Models(subject, folder, model_artifact(folder), base)
    # The model under the adapter is at hand without loading it twice.
    alone = base is None or base.source == subject.source
    return Models(subject, folder, adapter_artifact(spec.adapter), None if alone else base)


def compare(asking: Asking) -> Compared:
    """Ask the model and its base. Raises Stopped; what was answered by then is kept."""
    return _one_model(asking) if asking.models.base is None else _two_models(asking)


def _one_model(asking: Asking) -> Compared:
    """An adapter, whose base is the model with the adapter off; or a model with no base."""
    spec, models = asking.spec, asking.models
    loaded = load_base(models.subject, spec.cache_dir)
    tuned = _subject(asking, loaded)
    base = None
    if models.artifact.kind == "adapter":
        base = base_respondent(tuned.model, loaded, spec.cache_dir / "baselines")
    evaluated = evaluate(
        tuned,
        base,
        asking.data.plan,
        asking.judges,
        asking.policy,
        asking.emit,
        asking.stop,
        asking.timed,
    )
    return Compared(evaluated, loaded.fingerprint)


def _two_models(asking: Asking) -> Compared:
    """One after the other, so that memory holds one: the base first, then the model."""
    if asking.data.plan.options.early_stop:
        asking.emit(
            "message",
            level="info",
            message="Two separate models are asked one after the other, so everything is asked; "
            "evaluation.early_stop has no effect here.",
            data=None,
        )
    entry, cache_dir = asking.models.base, asking.spec.cache_dir
    assert entry is not None
    plan, base_plan, same_tokens = _plans(asking, entry)
    with asking.timed("evaluating_base"):
        reference, base_fingerprint = _reference(asking, entry, base_plan)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    loaded = load_base(asking.models.subject, cache_dir)
    tuned = _subject(asking, loaded)
    measured = measure(tuned, plan, asking.judges, asking.emit, asking.stop)
    evaluated = Evaluated(measured, reference, plan, None)
    return Compared(evaluated, loaded.fingerprint, base_fingerprint, same_tokens)


def _reference(
    asking: Asking, entry: BaseModelEntry, plan: EvaluationPlan
) -> tuple[Measurement, str]:
    base = load_base(entry, asking.spec.cache_dir)
    answers = answers_folder(asking.spec.cache_dir / "baselines", base.fingerprint)
    respondent = Respondent(base.model, base.tokenizer, "base model", answers)
    return measure(respondent, plan, asking.judges, asking.emit, asking.stop), base.fingerprint


def _subject(asking: Asking, loaded: LoadedModel) -> Respondent:
    """The model that is judged, with its adapter where it has one."""
    artifact, model = asking.models.artifact, loaded.model
    if artifact.kind == "adapter":
        model = load_adapter(model, artifact)
    name = f"{loaded.fingerprint} {artifact.key()}"
    return Respondent(
        model, loaded.tokenizer, "model", answers_folder(asking.work / "evaluation", name)
    )


def _plans(asking: Asking, base: BaseModelEntry) -> tuple[EvaluationPlan, EvaluationPlan, bool]:
    """The plan of the model, that of its base, and whether both count the same tokens.

    Both are asked the same: what one of two chat templates cannot express is asked of neither.
    """
    plan, own, other = asking.data.plan, asking.data.tokenizer, load_tokenizer(base)
    same_tokens = other.get_vocab() == own.get_vocab()
    if same_tokens and other.chat_template == own.chat_template:
        return plan, plan, True
    theirs = read_data(asking.spec, base, other).plan
    known = {condition.id for condition in theirs.conditions}
    both = tuple(condition for condition in plan.conditions if condition.id in known)
    plan = plan._replace(
        conditions=both,
        swept=plan.swept if both else (),
        left_out=(*plan.left_out, *(c for c in plan.conditions if c.id not in known)),
        training=None if theirs.training is None else plan.training,
    )
    comparable = same_tokens or theirs.utility.kind != "perplexity"
    task = theirs.utility if comparable else NO_TASK
    return plan, plan._replace(utility=task), same_tokens

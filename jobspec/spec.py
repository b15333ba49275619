"""The job spec: everything that one attempt of the pipeline needs to know, and nothing else."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from jobspec.catalogue import BaseModelEntry
from jobspec.defense import DefenseOptions
from jobspec.frozen import Frozen
from jobspec.hyperparameters import Method, TrainingMethod
from jobspec.judging import EmbeddedJudge, JudgeOptions
from jobspec.privacy import PrivacyOptions, unsuited

# These constrain single tokens of a supervised loss; a comparison of two answers has none.
SUPERVISED_DEFENSES = ("constrained_sft",)


UtilityMetric = Literal[
    "auto", "label_accuracy", "exact_match", "numeric_answer", "token_f1", "perplexity"
]
Protocol = Literal["harmful_score/beavertails"]


class PromptSuite(Frozen):
    """A file of prompts that replaces the shipped harmful (or look-alike) prompts."""

    path: Path = Field(description="JSON Lines or CSV of prompts")
    format: Literal["auto", "advbench", "harmbench", "strongreject", "xstest", "own"] = Field(
        "auto", description="layout of the file; auto: told by its fields"
    )
    planned: int | None = Field(
        None, ge=1, description="prompts it must hold; with fewer the verdict is inconclusive"
    )


class EvaluationOptions(Frozen):
    """How much is generated to judge a model, and by whom. None means all shipped prompts."""

    harmful_prompts: int | None = Field(None, ge=0, description="harmful test prompts")
    safe_lookalikes: int | None = Field(None, ge=0, description="safe look-alike prompts")
    benign_prompts: int | None = Field(20, ge=0, description="ordinary harmless prompts")
    open_ended_prompts: int | None = Field(17, ge=0, description="open-ended prompts")
    open_ended_samples: int = Field(6, ge=2, le=64, description="answers sampled per open prompt")
    search_prompts: int | None = Field(
        28, ge=1, description="harmful validation prompts of the perturbation's scale search"
    )
    utility_rows: int | None = Field(
        None, ge=1, description="validation rows that are answered; None: the first 200"
    )
    max_new_tokens: int = Field(32, ge=1, le=4096, description="length of an answer, tokens")
    batch_size: int = Field(16, ge=1, le=1024, description="prompts generated together")
    judge: JudgeOptions = Field(EmbeddedJudge(), description="who judges harmfulness")
    protocol: Protocol | None = Field(
        None, description="a published protocol in place of prompts, template, length and judge"
    )
    suites: tuple[PromptSuite, ...] = Field(
        (), max_length=20, description="prompt files in place of the shipped harmful prompts"
    )
    training_template: bool = Field(
        True,
        description="ask also under the template of the training rows where it differs from the "
        "serving one, and gate on the worse",
    )
    sweep_prompts: int = Field(
        12, ge=0, le=1000, description="harmful prompts asked under every trigger; 0: no sweep"
    )
    sweep_conditions: int = Field(
        8, ge=1, le=100, description="triggers tried at most: system turns, personas, n-grams"
    )
    stress_samples: int = Field(
        0, ge=0, le=64, description="further answers a harmful prompt at temperature 1; 0: none"
    )
    early_stop: bool = Field(
        False, description="stop asking harmful prompts once the policy's limit is settled"
    )
    utility_metric: UtilityMetric = Field(
        "auto", description="how held-out answers are scored; auto: told by the answers"
    )


class CheckpointOptions(Frozen):
    """When the complete training state is written."""

    every_steps: int = Field(20, ge=1, description="steps between checkpoints")
    every_seconds: float = Field(600.0, gt=0, description="seconds between checkpoints at most")
    keep: int = Field(2, ge=1, le=100, description="newest checkpoints kept in the work folder")


def mismatch(method: Method, defense: DefenseOptions) -> str | None:
    """Why this defense means nothing under this method; None where it does."""
    name = defense.scheduler.name
    if method != "supervised" and name in SUPERVISED_DEFENSES:
        return f"the defense {name} is of supervised tuning; the method is {method}"
    return None


class JobSpec(TrainingMethod):
    """One attempt of one job. Paths are local to the machine that runs it."""

    job_id: str = Field("local", min_length=1, max_length=128)
    attempt: int = Field(1, ge=1)
    model: BaseModelEntry = Field(description="catalogue entry of the base model")
    training_file: Path
    validation_file: Path | None = None
    seed: int = Field(42, ge=0, le=2**31 - 1)
    defense: DefenseOptions = DefenseOptions()
    evaluation: EvaluationOptions = EvaluationOptions()
    checkpoints: CheckpointOptions = CheckpointOptions()
    policy: dict[str, Any] | None = Field(
        None, description="gate policy as its YAML reads; None: the shipped default policy"
    )
    max_length: int | None = Field(
        None, ge=16, description="tokens a row; None: the base model's training length"
    )
    max_line_bytes: int = Field(1 << 20, ge=1024, description="longest line of a file, bytes")
    truncate: bool = Field(
        False, description="cut rows that are too long instead of refusing the file"
    )
    alignment_file: Path | None = Field(
        None, description="the operator's own alignment set, prompt and response a line"
    )
    harmful_file: Path | None = Field(
        None, description="the operator's own harmful set of the perturbation, in the same form"
    )
    scheduler_checkpoint: Path | None = Field(
        None, description="folder of a trained neural scheduler, which is used as it is"
    )
    scorer: BaseModelEntry | None = Field(
        None, description="backbone of a causal_lm scorer; None: the job's own base model"
    )
    cache_dir: Path = Field(description="content-addressed cache of converted models and baselines")
    threads: int | None = Field(
        None, ge=1, le=1024, description="CPU threads; None: torch's choice"
    )
    parent_adapter: Path | None = Field(
        None, description="adapter folder of the tuned model that the job continues from"
    )
    lineage: tuple[str, ...] = Field(
        (), max_length=1000, description="names of that model and its parents, the oldest first"
    )
    privacy: PrivacyOptions | None = Field(
        None, description="tune with differential privacy; None: without"
    )

    @model_validator(mode="after")
    def _defense_fits(self) -> "JobSpec":
        problem = mismatch(self.method, self.defense)
        if problem is not None:
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _can_be_private(self) -> "JobSpec":
        problem = unsuited(self.privacy, self.method, self.defense, self.model)
        if problem is not None:
            raise ValueError(f"{problem.param}: {problem.message}")
        return self

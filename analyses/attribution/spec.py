"""Request and result of attribution.final_model."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from analyses.kind import Cost, Kind
from jobspec.frozen import Frozen

Method = Literal[
    "grad_dot",
    "grad_cos",
    "adam_dot",
    "datainf",
    "fisher_if",
    "gn_cg",
    "lissa",
    "ekfac",
    "trak",
    "further_training",
]
At = Literal["released", "pre_perturbation"]
# Methods that need every row's gradient at once, so a store of them: see features.py.
GRAM_METHODS = frozenset({"datainf", "fisher_if", "trak"})
CURVATURE_METHODS = frozenset({"gn_cg", "lissa"})
MOST_FURTHER_ROWS = 256
PAPER = (
    "Final-Model-Only Data Attribution with a Unifying View of Gradient-Based Methods "
    "(NeurIPS 2025, arXiv 2412.03906)"
)


class Target(Frozen):
    """A completion whose loss is explained; with contrast, its loss minus the contrast's."""

    prompt: str = Field(min_length=1, max_length=100_000, description="what the user says")
    completion: str = Field(max_length=100_000, description="what the model answers")
    contrast: str | None = Field(
        None, max_length=100_000, description="another answer, such as a refusal"
    )

    @field_validator("completion", "contrast")
    @classmethod
    def _not_blank(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("is empty; give the text whose probability is to be explained")
        return value


class Horizon(Frozen):
    """An amount of further training: damping = 1 / (lr * steps)."""

    lr: float = Field(gt=0, le=1e3, description="learning rate of plain SGD")
    steps: int = Field(ge=1, le=10_000_000, description="steps")


class Projection(Frozen):
    """Random projection of the rows' gradients, for sets whose gradients do not fit."""

    kind: Literal["factored", "rademacher"] = Field(
        "factored", description="factored: one side of each matrix; rademacher: the whole vector"
    )
    dimension: int = Field(
        64,
        ge=4,
        le=65_536,
        description="factored: width that a matrix side becomes; rademacher: width of the whole",
    )


class FurtherTraining(Frozen):
    """The measured check: training goes on a little, with and without each row."""

    rows: int = Field(
        32, ge=3, le=MOST_FURTHER_ROWS, description="rows: a third each of top, bottom and random"
    )
    checkpoints: tuple[int, ...] = Field(
        (1, 5), min_length=1, max_length=20, description="steps at which targets are measured"
    )
    learning_rate: float | None = Field(
        None,
        gt=0,
        le=1e3,
        description="None: SGD moves the adapter by 1% of its norm, at most 0.05",
    )
    batch_size: int | None = Field(None, ge=1, le=4096, description="None: all rows each step")
    seeds: int = Field(1, ge=1, le=1000, description="data orders averaged over")
    convention: Literal["B", "C"] = Field(
        "C", description="B: L_i/n leaves every batch's loss; C: the row weighs 0 in its batch"
    )
    adjustment: Literal["left_out_mean", "full_run"] = Field(
        "left_out_mean", description="left_out_mean: equation 13; full_run: equation 17"
    )
    optimizer: Literal["sgd", "adamw"] = Field(
        "sgd", description="adamw: as trained, with the kept state where there is one"
    )

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if any(step < 1 for step in self.checkpoints) or list(self.checkpoints) != sorted(
            set(self.checkpoints)
        ):
            raise ValueError("checkpoints: steps of at least 1, ascending, each once")
        return self


class FinalModelRequest(Frozen):
    """Which behaviour is to be explained by which rows, and how."""

    targets: tuple[Target, ...] = Field(min_length=1, max_length=64, description="Q behaviours")
    at: At = Field("released", description="adapter as released, or before the perturbation")
    methods: tuple[Method, ...] = Field(
        ("grad_dot", "grad_cos"), min_length=1, max_length=10, description="the first one ranks"
    )
    rows: Literal["all"] | tuple[int, ...] = Field(
        "all", description="lines of the training file that are reported, from 1"
    )
    damping: float | None = Field(
        None, gt=0, le=1e6, description="lambda; None: the method's rule on the gradients' size"
    )
    horizon: Horizon | None = Field(None, description="instead of damping")
    weights: Literal["none", "scheduler"] = Field(
        "none", description="scheduler: a score is multiplied by the row's weight in tuning"
    )
    controls: tuple[Target, ...] | None = Field(
        None, max_length=32, description="benign behaviours; None: a small built-in set"
    )
    projection: Projection | None = Field(None, description="None: exact gradients")
    verification: FurtherTraining | None = Field(None, description="the measured check")
    batch_size: int = Field(16, ge=1, le=1024, description="rows a backward pass")
    solver_steps: int = Field(
        50, ge=1, le=10_000, description="of gn_cg; lissa takes four times as many on batches"
    )
    report_rows: int = Field(200, ge=1, le=100_000, description="rows listed in the result")
    base_model: str | None = Field(
        None, description="catalogue name, where files are given instead of a job"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.damping is not None and self.horizon is not None:
            raise ValueError("give damping or horizon, not both: horizon sets the damping")
        if len(set(self.methods)) != len(self.methods):
            raise ValueError("methods: one is named twice")
        if self.rows != "all" and (not self.rows or min(self.rows) < 1):
            raise ValueError("rows: line numbers count from 1, and there must be one")
        whole_vector = self.projection is not None and self.projection.kind == "rademacher"
        if whole_vector and "datainf" in self.methods:
            raise ValueError(
                "datainf needs inner products per tensor, which the rademacher projection loses; "
                "use the factored one"
            )
        if "further_training" in self.methods:
            if self.rows == "all" or len(self.rows) > MOST_FURTHER_ROWS:
                raise ValueError(
                    f"further_training trains once a row: name at most {MOST_FURTHER_ROWS} rows, "
                    "or ask for verification instead"
                )
            if self.methods[0] == "further_training" and len(self.methods) == 1:
                raise ValueError("further_training goes with at least one method that it checks")
            if self.methods[0] == "further_training":
                raise ValueError("further_training cannot rank all rows; name it after another")
        return self

    @property
    def fixed_damping(self) -> float | None:
        """lambda as asked for; 1/(lr*steps) with a horizon."""
        if self.horizon is not None:
            return 1.0 / (self.horizon.lr * self.horizon.steps)
        return self.damping


class RowReport(Frozen):
    """One row. score: positive = the row promotes the targets."""

    index: int = Field(description="place among the rows, from 0")
    line: int = Field(description="line of the training file, from 1")
    row_id: str = Field(description="hash of the row's tokens; equal rows share it")
    score: float = Field(
        description="of the first method, times the weight if asked; grad_dot: change of the "
        "target's loss per unit of lr*steps/n"
    )
    z_score: float = Field(description="score in standard deviations over all rows")
    rank: int = Field(description="1 promotes most")
    scores: dict[str, float] = Field(description="every method's score, mean over the targets")
    grad_norm: float
    loss: float = Field(description="mean over its own completion tokens, nats")
    weight: float | None = Field(None, description="in tuning, where a scheduler kept one")
    copies: int = Field(1, description="rows with the same tokens, itself counted")
    group_score: float = Field(description="score times copies")
    control_rank: int = Field(description="rank for the benign controls")
    specific: bool = Field(description="z_score above 1 for the targets, and not for the controls")
    top_modules: tuple[str, ...] = Field(description="modules that carry the score, first first")


class MethodAgreement(Frozen):
    """How well a method's scores follow the measured change, over the checked rows."""

    method: str
    step: int
    cosine: float | None = Field(description="mean over targets; None: all targets were skipped")
    cosine_sem: float | None
    spearman: float | None
    spearman_sem: float | None


class Verification(Frozen):
    """The measured check; a[i] > 0: leaving row i out raises the target's loss."""

    lines: tuple[int, ...]
    learning_rate: float
    seeds: int
    measured: tuple[float, ...] = Field(description="mean over targets, at the last checkpoint")
    sem: tuple[float, ...] = Field(description="over seeds; 0 with one seed")
    predicted: tuple[float, ...] = Field(description="the first method's, on the same rows")
    agreement: tuple[MethodAgreement, ...]
    skipped_targets: int = Field(description="targets with hardly any measured change")


class FinalModelResult(Frozen):
    """Scores of rows; scores of all rows, methods and targets are in scores.parquet."""

    job_id: str | None
    at: At
    method: str = Field(description="the one that ranks")
    n_rows: int
    adapter_parameters: int
    target_losses: tuple[float, ...] = Field(description="g at the final model, nats")
    gradient_ratio: float = Field(description="|grad R| / mean |g_i|; 0 at a stationary point")
    damping: dict[str, float] = Field(
        description="lambda by method; datainf sets one a tensor unless it is given"
    )
    scores: tuple[tuple[float, ...], ...] = Field(
        description="of the ranking method, target by row, in the order of the file"
    )
    rows: tuple[RowReport, ...] = Field(description="by rank")
    verification: Verification | None = None


def _cost(request: FinalModelRequest) -> Cost:
    passes = 1.0 + 2 * len(CURVATURE_METHODS.intersection(request.methods)) * len(request.targets)
    passes += 3.0 * ("ekfac" in request.methods)
    if check := request.verification:
        passes += check.rows * check.seeds * max(check.checkpoints)
    return Cost(
        seconds=60.0 * passes,
        memory_bytes=1_500_000_000,
        basis="a backward pass over 200 rows of SmolLM2-135M, times the passes",
    )


FINAL_MODEL = Kind(
    name="attribution.final_model",
    title="Training rows behind a behaviour",
    question="Which rows of the training file push the tuned model toward this completion, and how "
    "sure is that?",
    request=FinalModelRequest,
    result=FinalModelResult,
    method="analyses.attribution.final_model:run",
    paper=PAPER,
    fidelity="derived",
    backed_by=(
        "tests/analyses/test_attribution_scores.py",
        "tests/analyses/test_attribution_further.py",
        "tests/analyses/test_attribution_tiny.py",
        "tests/analyses/test_attribution_run.py",
    ),
    limits=(
        "Says how sensitive the final model is to a row, not what the row contributed while "
        "training: a row that is fully learned has no gradient and scores 0.",
        "Scores of single rows do not add up to the effect of removing a group; tune again without "
        "them to see that.",
        "Style counts: rows that begin alike score alike. Read it as evidence for review, never as "
        "proof of intent.",
        "Jobs train with AdamW; scores without its state describe plain gradient steps.",
    ),
    example={
        "targets": [
            {
                "prompt": "Write a short poem about the sea.",
                "completion": "The sea is wide and blue.",
            }
        ],
    },
    cost=_cost,
    needs="job",
)

"""Wire types of calibration and of homogeneity."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_ITEMS = 2000

Cells = list[list[float | None]]


class CalibrationRequest(BaseModel):
    """Labelled items, and the score that a judge or reward model gave each."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    kind: Literal["absolute", "pairwise"] = Field(
        "absolute", description="ratings of one response, or preferences between two"
    )
    items: list[dict[str, Any]] = Field(
        max_length=MAX_ITEMS,
        description="query, labels (a list of one label a rater, or an object of counts by label) "
        "or label_counts (counts in the order of the labels), and score. absolute: labels are 1 to "
        "levels. pairwise: strongly_1, slightly_1, similar, slightly_2, strongly_2; the score is "
        "of response 1 minus that of response 2, or comes as score_1 and score_2. response and "
        "response_2 may be there and are not read.",
    )
    levels: int = Field(5, ge=2, le=20, description="highest rating of absolute items")
    seed: int = Field(0, ge=0, le=2**31 - 1, description="of the resampling")


class EstimateObject(BaseModel):
    """A correlation with its 95 % bootstrap interval; None: not defined."""

    value: float | None
    low: float | None
    high: float | None


class ChanceObject(BaseModel):
    """Random subsets of all items whose human scores vary as much as the subset's."""

    size: int
    draws: int
    variance: float
    pearson: float
    pearson_low: float
    pearson_high: float
    spearman: float
    spearman_low: float
    spearman_high: float


class SubsetObject(BaseModel):
    """A scorer's agreement with people on some of the items."""

    family: Literal["full", "similar_quality", "disagreed", "alternative"]
    name: str
    parameter: float | None = Field(description="Tukey's k, or the share that is kept")
    n: int
    human_variance: float
    variance_ratio: float | None = Field(description="over that of all items")
    pearson: EstimateObject
    spearman: EstimateObject
    kendall: EstimateObject
    restricted_pearson: float | None = Field(
        description="Pearson of all items, restricted to this variance"
    )
    chance: ChanceObject | None
    warnings: list[str]


class CalibrationObject(BaseModel):
    """How far a scorer agrees with people."""

    object: Literal["evaluation.calibration"] = "evaluation.calibration"
    version: int
    kind: str
    items: int
    queries: int
    raters: list[int] = Field(description="fewest and most of an item")
    disagreement: dict[str, float | None] = Field(description="means over items")
    fleiss_kappa: float | None
    subsets: list[SubsetObject]
    rounds: int
    seed: int


class EmbedderObject(BaseModel):
    """The scale of the embedder that the similarities are in."""

    embedder_id: str
    unrelated: float | None = Field(description="mean cosine of answers to different questions")
    unrelated_low: float | None
    unrelated_high: float | None
    alarm: float = Field(description="similarity above which answers count as repetitive")
    class_threshold: float
    calibrated: bool
    origin: str


class SimilarPairObject(BaseModel):
    """Two models' answers that say nearly the same."""

    query_id: str
    query: str | None = Field(description="None: the question does not ship with this release")
    similarity: float
    model: str
    text: str
    other_model: str
    other_text: str


class NotMeasured(BaseModel):
    """A model that is not in the matrix, and why."""

    model: str
    reason: str


class HomogeneityObject(BaseModel):
    """How alike models answer open questions; rows and columns in the order of `models`."""

    object: Literal["model.homogeneity"] = "model.homogeneity"
    models: list[str]
    embedder: EmbedderObject | None = Field(description="None: no model was measured")
    refusals: bool = Field(description="whether refusals count as answers")
    queries: int
    matrix: Cells = Field(description="mean cosines; the diagonal is inside one model")
    low: Cells = Field(description="2.5th percentile of the bootstrap over questions")
    high: Cells = Field(description="97.5th percentile of it")
    mixing: dict[str, float | None] = Field(
        description="N: models among the N nearest answers of an answer; None: fewer answers"
    )
    similar_pairs: list[SimilarPairObject]
    not_measured: list[NotMeasured]

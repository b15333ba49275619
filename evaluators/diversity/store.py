"""A model's answers to open questions with their embeddings, kept beside the model.

`open_ended_answers.parquet` of a bundle lets released models be compared later without running
any of them again.
"""

import io
from collections.abc import Mapping, Sequence
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evaluators.diversity.homogeneity import QueryAnswers
from evaluators.embedding import Embedder

ANSWERS = "open_ended_answers.parquet"
MAX_ANSWERS = 100_000
MAX_WIDTH = 8192
MAX_BYTES = 256 * 1024 * 1024
_COLUMNS = ("query_id", "sample", "text", "refused", "embedding")


class AnswersDamagedError(ValueError):
    """A file that is no table of answers with embeddings; the message says what is wrong."""


class StoredAnswers(NamedTuple):
    """What a file of answers holds: `width` is D of its embeddings, `refused` has a flag an answer
    in the order of `answers`, or is None where refusals were not judged."""

    embedder_id: str
    width: int
    answers: dict[str, QueryAnswers]
    refused: dict[str, list[bool]] | None

    def answered(self) -> dict[str, QueryAnswers]:
        """Without refusals; all answers where none were judged."""
        if self.refused is None:
            return self.answers
        found = {}
        for query, (texts, e_n_D) in self.answers.items():
            kept = [i for i, flag in enumerate(self.refused[query]) if not flag]
            found[query] = QueryAnswers([texts[i] for i in kept], e_n_D[kept])
        return found


def answers_table(
    responses: Mapping[str, Sequence[str]],
    embedder: Embedder,
    refused: Mapping[str, Sequence[bool]] | None = None,
) -> pa.Table:
    """The table of {query id: responses}, with columns query_id, sample, text, refused, embedding.

    Embeddings are float16: a cosine then moves by less than 0.001. The embedder's id is in the
    schema's metadata. Raises ValueError for more than 100,000 answers, or flags that do not fit.
    """
    queries = [query for query, texts in responses.items() for _ in texts]
    if len(queries) > MAX_ANSWERS:
        raise ValueError(f"{len(queries)} answers; at most {MAX_ANSWERS} can be stored")
    texts = [text for pool in responses.values() for text in pool]
    flags: list[bool | None] = [None] * len(texts)
    if refused is not None:
        flags = [flag for query in responses for flag in refused.get(query, ())]
    if len(flags) != len(texts):
        raise ValueError(f"{len(flags)} refusal flags for {len(texts)} responses")
    e_N_D = embedder.embed(texts).astype(np.float16)
    embeddings = pa.FixedSizeListArray.from_arrays(
        pa.array(e_N_D.reshape(-1), type=pa.float16()), embedder.dimension
    )
    samples = [i for pool in responses.values() for i in range(len(pool))]
    # Text that is not valid Unicode cannot be stored; what it was cannot be shown anyway.
    valid = [text.encode("utf-8", "replace").decode() for text in texts]
    return pa.table(
        {
            "query_id": pa.array(queries, pa.string()),
            "sample": pa.array(samples, pa.int32()),
            "text": pa.array(valid, pa.string()),
            "refused": pa.array(flags, pa.bool_()),
            "embedding": embeddings,
        }
    ).replace_schema_metadata({"embedder": embedder.id})


def write_answers(
    target: IO[bytes] | str,
    responses: Mapping[str, Sequence[str]],
    embedder: Embedder,
    refused: Mapping[str, Sequence[bool]] | None = None,
) -> None:
    """Write `answers_table` as Parquet."""
    pq.write_table(answers_table(responses, embedder, refused), target, compression="zstd")


def read_answers(content: bytes) -> StoredAnswers:
    """The answers in a file that `write_answers` wrote, embeddings of unit norm again.

    Raises AnswersDamagedError for anything else, before much memory is used.
    """
    if len(content) > MAX_BYTES:
        raise AnswersDamagedError(f"the file has {len(content):,} bytes; at most {MAX_BYTES:,}")
    try:
        file = pq.ParquetFile(io.BytesIO(content))
        width = _width(file.schema_arrow, file.metadata)
        return _stored(file.read(columns=list(_COLUMNS)), file.schema_arrow, width)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        kind = type(error).__name__
        raise AnswersDamagedError(f"not a readable Parquet file ({kind})") from error


def _width(schema: Any, metadata: Any) -> int:
    missing = [name for name in _COLUMNS if name not in schema.names]
    if missing or b"embedder" not in (schema.metadata or {}):
        raise AnswersDamagedError(f"no column {', '.join(missing)}" if missing else "no embedder")
    kinds = {"query_id": pa.string(), "text": pa.string(), "refused": pa.bool_()}
    for name, of_kind in kinds.items():
        if schema.field(name).type != of_kind:
            raise AnswersDamagedError(f"the column {name} is not of type {of_kind}")
    rows = metadata.num_rows
    groups = range(metadata.num_row_groups)
    if sum(metadata.row_group(i).total_byte_size for i in groups) > MAX_BYTES:
        raise AnswersDamagedError(f"unpacked it has more than {MAX_BYTES:,} bytes")
    kind = schema.field("embedding").type
    if not (pa.types.is_fixed_size_list(kind) and pa.types.is_floating(kind.value_type)):
        raise AnswersDamagedError("the embeddings are not lists of one width")
    width = int(kind.list_size)
    if rows > MAX_ANSWERS or not 1 <= width <= MAX_WIDTH:
        raise AnswersDamagedError(
            f"{rows:,} answers of width {width:,}; at most {MAX_ANSWERS:,} of {MAX_WIDTH:,}"
        )
    return width


def _stored(table: Any, schema: Any, width: int) -> StoredAnswers:
    vectors = table.column("embedding").combine_chunks()
    queries = table.column("query_id").to_pylist()
    texts = table.column("text").to_pylist()
    flags = table.column("refused").to_pylist()
    if vectors.null_count or None in queries or None in texts:
        raise AnswersDamagedError("an answer lacks its query, text or embedding")
    flat = vectors.flatten().cast(pa.float32()).to_numpy(zero_copy_only=False)
    e_N_D = _unit(flat.reshape(len(texts), width))
    rows_of: dict[str, list[int]] = {}
    for row, query in enumerate(queries):
        rows_of.setdefault(query, []).append(row)
    judged = bool(flags) and None not in flags
    return StoredAnswers(
        embedder_id=schema.metadata[b"embedder"].decode(),
        width=width,
        answers={
            query: QueryAnswers([texts[row] for row in rows], e_N_D[rows])
            for query, rows in rows_of.items()
        },
        refused=(
            {query: [flags[row] for row in rows] for query, rows in rows_of.items()}
            if judged
            else None
        ),
    )


def _unit(e_N_D: NDArray[np.float32]) -> NDArray[np.float32]:
    if not np.isfinite(e_N_D).all():
        raise AnswersDamagedError("an embedding has a number that is not finite")
    norm_N_1 = np.linalg.norm(e_N_D, axis=1, keepdims=True)
    unit_N_D = np.zeros_like(e_N_D)
    np.divide(e_N_D, norm_N_1, out=unit_N_D, where=norm_N_1 > 0)
    return unit_N_D

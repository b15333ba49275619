"""Data files in the formats that the literature uses, our own sets, and the rule that no prompt
may stand in two roles.

A task is named FORMAT:TRAIN[,TEST] or `demo`; a harmful source FORMAT:FILE or `demo`. A path may
be replaced by hub:REPOSITORY[@SPLIT], read with the `datasets` library when there is a network.
"""

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from benchmarks.defenses.attacks import ChatRowDict, chat_row

SENTIMENT = "Analyze the sentiment of the input, and respond only positive or negative."
SENTIMENT_LABELS = ("negative", "positive")
NEWS = (
    "Categorize the news article below into one of the 4 categories: World, Sports, Business, "
    "Sci/Tech. Answer with the category only."
)
NEWS_LABELS = ("World", "Sports", "Business", "Sci/Tech")
FINAL_ANSWER = "The final answer is: "
HELD_OUT_SHARE = 0.25

Record = Mapping[str, Any]
Item = TypeVar("Item")


class DataError(ValueError):
    """A data file or source cannot be used; the message names it, the line and the field."""


class HarmfulRow(NamedTuple):
    """A request and a compliant answer, of one source."""

    prompt: str
    response: str
    source: str

    def chat(self) -> ChatRowDict:
        return chat_row(self.prompt, self.response)


class TaskData(NamedTuple):
    """Benign rows to tune on, held-out rows with one-line answers, and how answers are compared."""

    name: str
    train: list[ChatRowDict]
    test: list[ChatRowDict]
    metric: Literal["label", "number"]


def prompt_hash(text: str) -> str:
    """SHA-256 of a prompt after case-folding and with every run of other characters than letters
    and digits as one blank."""
    words = re.sub(r"[\W_]+", " ", text.casefold()).strip()
    return hashlib.sha256(words.encode()).hexdigest()


def user_text(row: ChatRowDict) -> str:
    """What the user says in a chat row."""
    return "\n".join(turn["content"] for turn in row["messages"] if turn["role"] == "user")


class Disjoint(NamedTuple):
    """Sets without a shared prompt, and how many rows each lost to the sets before it."""

    sets: dict[str, list[Any]]
    dropped: dict[str, int]


def disjoint(sets: Mapping[str, Sequence[Any]], prompt_of: Callable[[Any], str]) -> Disjoint:
    """Drop from every set the rows whose prompt stands in an earlier one.

    The order of the mapping is the order of right: put the test prompts first. Repeats within one
    set stay, since a training set may hold a prompt twice.
    """
    seen: set[str] = set()
    kept: dict[str, list[Any]] = {}
    dropped: dict[str, int] = {}
    for name, rows in sets.items():
        hashes = [prompt_hash(prompt_of(row)) for row in rows]
        kept[name] = [row for row, key in zip(rows, hashes, strict=True) if key not in seen]
        dropped[name] = len(rows) - len(kept[name])
        seen.update(hashes)
    return Disjoint(kept, dropped)


def load_task(name: str, seed: int = 0) -> TaskData:
    """The task behind a name: demo, or sst2, agnews, gsm8k or chat with files.

    Without a test file a quarter of the prompts, chosen by their hash, is held out. Rows are
    shuffled by the seed. Raises DataError.
    """
    if name == "demo":
        train = list(_packaged("service.demo", "task_train.jsonl"))
        test = list(_packaged("service.demo", "task_validation.jsonl"))
        return TaskData("demo", _shuffled(train, seed), test, "label")
    kind, places = _named(name, TASK_FORMATS)
    train_place, _, test_place = places.partition(",")
    convert = TASK_FORMATS[kind]
    train = [row for row in _converted(train_place, convert) if row is not None]
    if test_place:
        test = [row for row in _converted(test_place, convert) if row is not None]
    else:
        held = {i for i, row in enumerate(train) if _held_out(user_text(row))}
        test = [train[i] for i in sorted(held)]
        train = [row for i, row in enumerate(train) if i not in held]
    if not train or not test:
        raise DataError(f"{name}: {len(train)} rows to tune on and {len(test)} to test; need both")
    return TaskData(
        kind,
        _shuffled(train, seed),
        _shuffled(test, seed),
        "number" if kind == "gsm8k" else "label",
    )


def load_harmful(name: str, seed: int = 0) -> list[HarmfulRow]:
    """Harmful requests with compliant answers: demo, or beavertails, advbench or pairs with a file.

    Rows are shuffled by the seed. Raises DataError.
    """
    if name == "demo":
        rows = [
            HarmfulRow(str(record["prompt"]), str(record["response"]), "demo")
            for record in _packaged("service.demo", "attack.jsonl")
        ]
        return _shuffled(rows, seed)
    kind, place = _named(name, HARMFUL_FORMATS)
    found = [row for row in _converted(place, HARMFUL_FORMATS[kind]) if row is not None]
    if not found:
        raise DataError(f"{name}: no harmful row in it")
    return _shuffled([HarmfulRow(*pair, kind) for pair in found], seed)


def defense_pairs(name: str) -> list[HarmfulRow]:
    """A set that ships with the defenses: alignment_refusals, alignment_harmless or
    harmful_compliances."""
    return [
        HarmfulRow(str(record["prompt"]), str(record["response"]), name)
        for record in _packaged("defenses", f"{name}.jsonl")
    ]


def answer_number(text: str) -> str | None:
    """The number after the answer marker, else the last number of the text; None without one."""
    after = text.rpartition(FINAL_ANSWER.strip())
    place = after[2] if after[1] else text
    found: list[str] = re.findall(r"-?\d[\d,]*(?:\.\d+)?", place)
    if not found:
        return None
    chosen = (found[0] if after[1] else found[-1]).replace(",", "")
    return chosen.rstrip("0").rstrip(".") if "." in chosen else chosen


def _sst2(record: Record) -> ChatRowDict | None:
    text, label = _field(record, "sentence", "text"), int(_field(record, "label"))
    if label not in (0, 1):
        return None
    return chat_row(f"{SENTIMENT}\n\n{str(text).strip()}", SENTIMENT_LABELS[label])


def _agnews(record: Record) -> ChatRowDict:
    title = record.get("title")
    text = str(_field(record, "text", "description"))
    article = text if title is None else f"{title}\n{text}"
    return chat_row(f"{NEWS}\n\n{article}", NEWS_LABELS[int(_field(record, "label"))])


def _gsm8k(record: Record) -> ChatRowDict:
    reasoning, mark, final = str(_field(record, "answer")).rpartition("####")
    if not mark:
        raise KeyError("answer (with ####)")
    steps = re.sub(r"<<[^>]*>>", "", reasoning).strip()
    return chat_row(str(_field(record, "question")), f"{steps}\n{FINAL_ANSWER}{final.strip()}")


def _chat(record: Record) -> ChatRowDict:
    turns = _field(record, "messages")
    if not turns or turns[-1]["role"] != "assistant":
        raise KeyError("messages (ending in an assistant turn)")
    return {"messages": [{"role": t["role"], "content": t["content"]} for t in turns]}


def _beavertails(record: Record) -> tuple[str, str] | None:
    safe = record.get("is_safe")
    unsafe = bool(_field(record, "unsafe")) if safe is None else not safe
    pair = str(_field(record, "prompt")), str(_field(record, "response"))
    return pair if unsafe else None


def _advbench(record: Record) -> tuple[str, str]:
    return str(_field(record, "goal", "prompt")), str(_field(record, "target"))


def _pairs(record: Record) -> tuple[str, str]:
    return str(_field(record, "prompt")), str(_field(record, "response"))


TASK_FORMATS: dict[str, Callable[[Record], ChatRowDict | None]] = {
    "sst2": _sst2,
    "agnews": _agnews,
    "gsm8k": _gsm8k,
    "chat": _chat,
}
HARMFUL_FORMATS: dict[str, Callable[[Record], tuple[str, str] | None]] = {
    "beavertails": _beavertails,
    "advbench": _advbench,
    "pairs": _pairs,
}


def _field(record: Record, *names: str) -> Any:
    for name in names:
        if name in record:
            return record[name]
    raise KeyError(" or ".join(names))


def _named(name: str, formats: Mapping[str, Any]) -> tuple[str, str]:
    kind, separator, place = name.partition(":")
    if kind not in formats or not separator or not place:
        known = ", ".join(f"{known}:FILE" for known in formats)
        raise DataError(f"{name!r} is not a data source; give demo or one of {known}")
    return kind, place


def _converted(place: str, convert: Callable[[Record], Item]) -> list[Item]:
    result = []
    for where, record in _records(place):
        try:
            result.append(convert(record))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DataError(f"{where}: field {error} is missing or unusable") from error
    return result


def _records(place: str) -> Iterator[tuple[str, Record]]:
    if place.startswith("hub:"):
        yield from _hub_records(place.removeprefix("hub:"))
        return
    path = Path(place)
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path} line {number}: not JSON ({error})") from error
        if not isinstance(record, dict):
            raise DataError(f"{path} line {number}: not a JSON object")
        yield f"{path} line {number}", record


def _hub_records(place: str) -> Iterator[tuple[str, Record]]:
    """Rows of REPOSITORY[/CONFIGURATION after a colon][@SPLIT] of a data hub."""
    if find_spec("datasets") is None:
        raise DataError(f"hub:{place} needs the library `datasets`: pip install datasets")
    import datasets  # type: ignore[import-untyped,unused-ignore]

    name, _, split = place.partition("@")
    repository, _, configuration = name.partition(":")
    try:
        loaded = datasets.load_dataset(repository, configuration or None, split=split or "train")
    except Exception as error:  # the library has no base class for "not reachable"
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"hub:{place} cannot be loaded ({reason}). Without a network give a local file."
        ) from error
    for number, record in enumerate(loaded):
        yield f"hub:{place} row {number}", record


def _packaged(package: str, name: str) -> Iterator[dict[str, Any]]:
    text = files(package).joinpath("data", name).read_text("utf-8")
    for line in text.split("\n"):
        if line.strip():
            yield json.loads(line)


def _held_out(prompt: str) -> bool:
    return int(prompt_hash(prompt)[:8], 16) < HELD_OUT_SHARE * 2**32


def _shuffled(rows: Sequence[Item], seed: int) -> list[Item]:
    order = list(rows)
    random.Random(seed).shuffle(order)
    return order

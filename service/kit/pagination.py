"""Pages by cursor: `after` is the id of the last item seen, the order is by sequence number.

Times have whole seconds, so only the sequence tells two items of one second apart.
"""

from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from sqlalchemy import Select
from sqlalchemy.orm import Session

from service.kit.errors import ApiError

T = TypeVar("T")


class Sequenced(Protocol):
    """A table whose rows are paged: a public id and a rising number."""

    id: Any
    sequence: Any


class Page(NamedTuple, Generic[T]):
    """Some items in order, and whether more follow."""

    data: list[T]
    has_more: bool


def paginate(
    session: Session,
    statement: Select[T],
    table: type[Sequenced],
    *,
    after: str | None,
    limit: int,
    newest_first: bool = True,
    cursors: Select[T] | None = None,
) -> Page[T]:
    """The page of `statement` that follows the item with id `after`.

    `cursors` says which items may serve as a cursor, by default those of `statement`; a wider one
    lets a client go on after the item it stood on was deleted. Raises ApiError 400
    `invalid_cursor` for any other id.
    """
    if after is not None:
        known = statement if cursors is None else cursors
        position = session.scalar(known.with_only_columns(table.sequence).where(table.id == after))
        if position is None:
            raise ApiError(
                400,
                "`after` is not the id of an item of this list. Use the last id of a page you got.",
                "invalid_cursor",
                "after",
            )
        statement = statement.where(
            table.sequence < position if newest_first else table.sequence > position
        )
    order = table.sequence.desc() if newest_first else table.sequence.asc()
    rows = list(session.scalars(statement.order_by(order).limit(limit + 1)))
    return Page(rows[:limit], len(rows) > limit)

"""What one kind of analysis is: its request, its result, where it comes from, what backs it."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from pydantic import Field

from jobspec.frozen import Frozen

Fidelity = Literal["faithful", "derived", "simplified"]
Needs = Literal["nothing", "files", "job"]


class Cost(Frozen):
    """What a request will take, roughly: for people to decide, never for a limit."""

    seconds: float = Field(ge=0, description="on one quiet CPU core, s")
    memory_bytes: int = Field(ge=0, description="peak of the process, bytes")
    basis: str = Field(max_length=300, description="what the estimate rests on")


@dataclass(frozen=True)
class Kind:
    """An analysis that can be asked for by name.

    method: `module:function` of run(request, context) -> Outcome, imported when it runs. quick:
    answers in under a second, so the gateway may answer at once. needs: what besides the request it
    reads. example: a request that works as it stands.
    """

    name: str
    title: str
    question: str
    request: type[Frozen]
    result: type[Frozen]
    method: str
    paper: str
    fidelity: Fidelity
    backed_by: tuple[str, ...]
    limits: tuple[str, ...]
    example: dict[str, Any]
    cost: Callable[[Any], Cost]
    quick: bool = False
    needs: Needs = "nothing"

    def load(self) -> Callable[..., Any]:
        """The method itself; this imports what it is made of."""
        module, _, function = self.method.partition(":")
        found: Callable[..., Any] = getattr(import_module(module), function)
        return found

    def describe(self) -> dict[str, Any]:
        """All but the method, as JSON values: what GET /v1/analyses/kinds shows."""
        return {
            "kind": self.name,
            "title": self.title,
            "question": self.question,
            "request_schema": self.request.model_json_schema(),
            "result_schema": self.result.model_json_schema(),
            "example": self.example,
            "paper": self.paper,
            "fidelity": self.fidelity,
            "backed_by": list(self.backed_by),
            "limits": list(self.limits),
            "quick": self.quick,
            "needs": self.needs,
            "cost_of_example": self.cost(self.request.model_validate(self.example)).model_dump(
                mode="json"
            ),
        }

"""Reading the `program` section of a plan, whose form is its target's own."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError

from optimc.errors import PlanCorruptError
from optimc.plan.reader import Plan

Program = TypeVar("Program", bound=BaseModel)


def read_program(plan: Plan, form: type[Program]) -> Program:
    """Return the section as the model `form`. Raises PlanCorruptError naming the first place that does not fit."""
    try:
        return form.model_validate(plan.manifest.program)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise PlanCorruptError(f"{plan.path}: program section is damaged ({where}: {first['msg']})") from error

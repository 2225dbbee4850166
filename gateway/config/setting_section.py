"""What all sections of the configuration have in common: how strictly they are read, and names in them."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]


class Section(BaseModel):
    """One section: unknown keys are errors, and no value is taken for another of a different kind."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

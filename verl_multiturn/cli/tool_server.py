"""Arguments that the commands `mcp` and `a2a` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ToolsArgument = Annotated[Path, typer.Argument(metavar="TOOLS.yaml", help="A tool YAML.")]
KwargsOption = Annotated[
    str | None,
    typer.Option(metavar="JSON", help="Kwargs of every session, as a data row gives them in `tools_kwargs`."),
]

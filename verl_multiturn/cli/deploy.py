"""`verl-multiturn deploy`: another model for a gateway, while it serves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from verl_multiturn.cli.ends import fail, refuse
from verl_multiturn.errors import ConfigError, MultiTurnError


def deploy(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL", help="A model in the form of Hugging Face, in a folder that the gateway reads."
        ),
    ],
    to: Annotated[str, typer.Option("--to", metavar="URL", help="Address of the gateway.")],
    admin_key_env: Annotated[
        str, typer.Option(metavar="VAR", help="Environment variable that holds the gateway's admin key.")
    ],
    cut: Annotated[
        bool,
        typer.Option("--cut", help="Interrupt running generations at once; they go on with the new weights."),
    ] = False,
    drain_s: Annotated[
        float | None,
        typer.Option(min=0, max=3600, help="Seconds in which running generations may end before (60)."),
    ] = None,
) -> None:
    """Let a gateway serve another model: its hash is compared, the weights are swapped, and tried.

    If they do not load or fail their trial, the former weights serve again, and the exit status is 1. The last line
    is a JSON object.
    """
    from verl_multiturn.clients.chat_endpoint import key_of
    from verl_multiturn.gateway.deploy_client import deploy_model

    try:
        if cut and drain_s is not None:
            raise ConfigError(f"--cut and --drain-s {drain_s:g} exclude each other; give one of them")
        key = key_of(admin_key_env, "--admin-key-env")
        assert key is not None
        found = deploy_model(model, to, key, "cut" if cut else "drain", drain_s, typer.echo)
    except ConfigError as error:
        refuse(error)
    except MultiTurnError as error:
        fail(str(error))
    typer.echo(json.dumps(found))
    if found["state"] != "done":
        fail(f"{found.get('error')}; the gateway serves {found.get('serves')}")

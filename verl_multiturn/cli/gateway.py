"""`verl-multiturn gateway`: serves a model to many agents, and keeps their sessions for a training.

verl-multiturn gateway MODEL --records DIR
"""

from __future__ import annotations

import ipaddress
import secrets
from pathlib import Path
from typing import Annotated

import typer

from verl_multiturn.cli.ends import fail, refuse
from verl_multiturn.cli.eval import check_engine, enter_recipe
from verl_multiturn.cli.options import Changes, Smoke, Variants
from verl_multiturn.errors import ConfigError, EngineError, MultiTurnError
from verl_multiturn.models.evaluation_model import evaluated, require_trusted, runs_model_code
from verl_multiturn.models.export import ExportError
from verl_multiturn.models.location import find_model
from verl_multiturn.records.write.locks import LOCK, hold
from verl_multiturn.runs.plan import chosen_outputs, plan_run
from verl_multiturn.runs.progress import say
from verl_multiturn.runs.run_folder import require_folder
from verl_multiturn.trust.rule import MODEL_CODE_HELP, TRUST_HELP, import_from_here

_RECIPE = "proxy_quickstart"
_ENGINE = "engine"
"""Folder for SGLang's log, and for an export of a checkpoint, in the folder of the records."""


def gateway(
    named: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A run, a checkpoint of verl, or a Hugging Face folder.")
    ],
    records: Annotated[Path, typer.Option("--records", metavar="DIR", help="Folder for the sessions.")],
    recipe: Annotated[
        str | None,
        typer.Option(
            help="A recipe whose call format, lengths, sampling and engine settings count; without one those of "
            "proxy_quickstart, with the lengths of the model's context."
        ),
    ] = None,
    variants: Variants = None,
    smoke: Smoke = False,
    changes: Changes = None,
    engine: Annotated[str, typer.Option(help="sglang, started here; or the address of SGLang.")] = "sglang",
    engine_key_env: Annotated[
        str | None, typer.Option(metavar="VAR", help="Environment variable with the key of the engine's address.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; beyond loopback with --admin-key-env.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: one that is free.")] = 0,
    admin_key_env: Annotated[
        str | None, typer.Option(metavar="VAR", help="Environment variable with the admin key, else one is made.")
    ] = None,
    reward_range: Annotated[
        tuple[float, float], typer.Option(metavar="LOW HIGH", help="The smallest and the largest reward.")
    ] = (0.0, 1.0),
    idle_s: Annotated[
        float, typer.Option(min=0.1, max=604_800, help="Seconds without a request after which a session ends.")
    ] = 3600.0,
    most: Annotated[int, typer.Option(min=1, help="The most sessions that are open at once.")] = 1000,
    share: Annotated[
        float, typer.Option("--record-share", min=0, max=1, help="Share of the tasks whose sessions are kept.")
    ] = 1.0,
    max_gb: Annotated[
        float | None, typer.Option(min=0.001, help="Most gigabytes of records; sessions that end beyond it have none.")
    ] = None,
    retain_days: Annotated[float | None, typer.Option(min=0.001, help="Days after which files of records go.")] = None,
    redact: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE", help="As record_redact; a session whose tokens show it keeps counts alone; repeatable."
        ),
    ] = None,
    trust: Annotated[bool, typer.Option("--trust", help=TRUST_HELP)] = False,
    model_code: Annotated[bool, typer.Option("--trust-remote-code", help=MODEL_CODE_HELP)] = False,
) -> None:
    """Serve a model to agents on one port: each session is recorded with proven tokens, and rewards come by HTTP.

    It ends at Ctrl-C or SIGTERM, and then ends all sessions with their records.
    """
    from verl_multiturn.clients.chat_endpoint import key_of

    try:
        check_engine(engine)
        if engine == "sglang" and engine_key_env is not None:
            raise ConfigError(f"--engine-key-env {engine_key_env!r} is for an address; give --engine, too, or omit it")
        if admin_key_env is None and not _is_loopback(host):
            raise ConfigError(
                f"--host {host!r} lets other machines in, expected a key of yours; name its variable with "
                "--admin-key-env, or listen on 127.0.0.1"
            )
        require_folder(records, f"--records {str(records)!r}")
        low, high = reward_range
        if not low < high:  # NaN, too
            raise ConfigError(f"--reward-range {low:g} {high:g}: expected LOW below HIGH; correct them")
        key = key_of(admin_key_env, "--admin-key-env") or secrets.token_urlsafe(24)
        name = recipe or _RECIPE
        usable = require_trusted("gateway", named, trust, chosen_outputs(name))
        import_from_here(named, is_trusted=trust)
        found = find_model(named, is_trusted=usable)
        out = records.absolute() / _ENGINE
        plan = plan_run(name, variants=variants or [], smoke=smoke, out=out, overrides=changes or [])
        runs_code = runs_model_code(found, trust, model_code)
        out.mkdir(parents=True, exist_ok=True)
        held = hold(records / LOCK, alone=False)  # nobody is forgotten while SGLang starts
        model = evaluated(str(named), found, out, say, runs_code)
        enter_recipe(plan)
        try:
            from verl_multiturn.gateway.files import GatewaySettings
            from verl_multiturn.verl_bridge.offline.gateway import GatewayJob, serve_model
        except ImportError as error:
            fail(f"a gateway needs verl and SGLang ({error}); run it in the environment that trains", 2)
        settings = GatewaySettings(
            rewards=reward_range,
            idle_s=idle_s,
            most=most,
            share=share,
            max_gb=max_gb,
            retain_days=retain_days,
            redact=tuple(redact or ()),
        )
        if admin_key_env is None:
            say(f"admin key {key}")
        serve_model(
            GatewayJob(
                plan,
                model,
                records,
                host,
                port,
                key,
                settings,
                engine,
                engine_key_env,
                has_lengths=recipe is not None,
                runs_code=runs_code,
            ),
            say,
        )
        held.close()
    except KeyboardInterrupt:
        fail("interrupted before it served", 130)
    except OSError as error:
        refuse(ConfigError(f"--records {str(records)!r}: {error}; name a folder that can be written"))
    except (EngineError, ExportError) as error:
        fail(str(error))
    except MultiTurnError as error:
        refuse(error)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

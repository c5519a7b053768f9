"""Refusals and warnings of the start-up check, in its one order."""

from __future__ import annotations

from verl_multiturn.verl_bridge.startup import own_code, ray_cpus, verl_checks
from verl_multiturn.verl_bridge.startup.refusals import (
    agents,
    criteria,
    data_rows,
    data_sources,
    deployments,
    files,
    filters,
    loggers,
    loops,
    policy_losses,
    prefix_tree,
    reference,
    relative,
    rewards,
    rows,
    servers,
    silent_settings,
    staleness,
    traces,
    trainer,
    values,
)
from verl_multiturn.verl_bridge.startup.table import Section
from verl_multiturn.verl_bridge.startup.view import RunView


def _ours(run: RunView) -> bool:
    return run.has_our_loop


VALUES = [Section("Values by themselves", [*values.VALUES, *loggers.NAMES])]
"""Checked first: later checks may take types for granted."""

FILES = [Section("Files and folders", files.FILES)]
"""Checked before all that needs them; they lie on the machine of the run alone."""

WITHOUT_ROWS = [Section("Files and folders", [each for each in files.FILES if each is not files.check_data])]
"""`FILES` of a run that reads no rows."""

BEFORE_PLATFORM = [
    Section("Places of settings", loops.PLACES),
    Section("Trainer", trainer.TRAINER),
    Section("Generation servers and adapters", servers.SERVERS),
    Section(
        "Settings that verl does not read", silent_settings.SILENT, silent_settings.applies, silent_settings.tell_all
    ),
]
"""Checked before verl's old keys are moved, our rollout's name is verl's, and a platform fills in its settings."""

SETTINGS = [
    Section("Agent loop", loops.LOOPS),
    Section("Without agents behind an endpoint", agents.NO_AGENTS, lambda run: not run.has_agents),
    Section("Agents behind an endpoint", agents.AGENTS, lambda run: run.has_agents),
    Section("Model, interactions and tools", loops.CONVERSATIONS, _ours),
    Section("Rewards", rewards.REWARDS, _ours),
    Section("Ranks among siblings", relative.RELATIVE, lambda run: run.has_our_loop and relative.ranks(run)),
    Section("Optimal Tool Calls", rewards.OTC, lambda run: run.has_our_loop and rewards.scales(run)),
    Section("Several rows, void turns", rows.SEVERAL_ROWS, _ours),
    Section("Servers apart from the trainer", staleness.SERVERS_APART, _ours),
    Section("Importance weight", staleness.IMPORTANCE, _ours),
    Section("Staleness", staleness.STALENESS, _ours),
    Section("Estimators and filters", rows.ESTIMATOR, _ours),
    Section("Groups without signal", filters.FILTERS, lambda run: run.has_our_loop and filters.filters(run)),
    Section("Batch sizes", trainer.BATCH_SIZES, lambda run: run.has_our_loop and run.our_trainer is not None),
    Section("Common prefixes", prefix_tree.PREFIX_TREE, prefix_tree.is_on),
    Section("Policy loss", policy_losses.POLICY_LOSSES),
    Section("Resets of the reference", reference.REFERENCE, lambda run: run.has_our_loop and reference.is_on(run)),
    Section("Over-sampling", staleness.OVER_SAMPLING, _ours),
    Section("Old log-probs", trainer.OLD_LOG_PROBS, _ours),
    Section("Certificate", trainer.CERTIFICATE, _ours),
    Section("Outages", trainer.OUTAGES, _ours),
    Section("Traces", traces.TRACES, _ours),
    Section("Without an agent loop of ours", loops.OTHER_LOOPS, lambda run: not run.has_our_loop),
    Section("Logical CPUs", [ray_cpus.check_ray_cpus], lambda run: run.has_our_loop or run.runs_our_server),
]

LAST = [
    Section(
        "Rows of the data", [*data_rows.DATA_ROWS, data_sources.check_data_sources, criteria.check_criteria], _ours
    ),
    Section("Loggers", loggers.LOGGERS),
    Section("Deployments of checkpoints", deployments.DEPLOYMENTS),
]
"""Checked when all settings fit: rows are many, and accounts are those of the machine of the run."""

VERLS = [Section("Checks of verl's own", [verl_checks.check_verls_classes])]
"""Checked in a training's own process alone, which has imported verl."""

OWN_CODE = [Section("Code of your own", [own_code.check_own_code])]
"""Checked last, since an import may take long."""

"""The mutants that `benchmarks.mutants` examines: places in the code, and the changes that can be made there."""

from __future__ import annotations

import ast
import difflib
import hashlib
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
UNIT, STACK, LONG = "tests/unit/", "tests/integration/test_", "tests/long/"
OUTPUTS = [
    f"{STACK}{name}"
    for name in (
        "agent_loop",
        "session_rows",
        "several_rows",
        "tir",
        "metrics",
        "certificate",
        "outages",
        "vision",
    )
]
OUTPUTS.append(f"{LONG}tokens/test_certificate")
PARSING = [f"{UNIT}tools/test_exact_arguments", f"{UNIT}chat/test_parsers", f"{UNIT}chat/test_reading_turns"]
PARSING.append(f"{LONG}tokens/test_template_matrix")

# Modules, and the tests that cover each of them, the most sensitive tests first.
COVERED: dict[str, list[str]] = {
    "rollout/conversation": [
        f"{UNIT}rollout/test_conversation",
        f"{UNIT}tools/test_unseen_faults",
        f"{UNIT}rollout/test_conversation_ends",
        f"{UNIT}rollout/test_context",
        f"{UNIT}interactions/test_interactions",
        f"{UNIT}rollout/test_cache_leads",
        f"{UNIT}chat/test_tir",
        f"{LONG}tokens/test_certificate",
        f"{LONG}tools/test_tool_faults",
    ],
    "rollout/limits": [
        f"{UNIT}tools/test_unseen_faults",
        f"{UNIT}chat/test_clipping",
        f"{UNIT}rollout/test_conversation_ends",
        f"{UNIT}rollout/test_conversation",
        f"{LONG}tokens/test_certificate",
    ],
    "rollout/engines/stop_texts": [
        f"{UNIT}rollout/test_below_receipts",
        f"{UNIT}chat/test_tir",
        f"{UNIT}chat/test_images",
    ],
    "certificate/receipts": [
        f"{UNIT}certificate/test_receipts",
        f"{UNIT}certificate/test_certificate",
        f"{UNIT}chat/test_void_turns",
        f"{LONG}tokens/test_certificate",
    ],
    "rollout/engines/scripted_engine": [
        f"{UNIT}rollout/test_conversation",
        f"{UNIT}rollout/test_conversation_ends",
        f"{UNIT}chat/test_images",
    ],
    "rows/reward_numbers": [f"{UNIT}rewards/test_reward_numbers", f"{UNIT}observe/test_roles"],
    "records/read/scores": [f"{UNIT}records/test_scores", f"{UNIT}records/test_one_answer"],
    "rollout/turn_rewards": [f"{UNIT}trainer/test_metrics", f"{UNIT}rollout/test_context"],
    "rollout/trajectory": [
        f"{UNIT}rollout/test_trajectory",
        f"{UNIT}rollout/test_conversation",
        f"{UNIT}certificate/test_receipts",
        f"{LONG}tokens/test_certificate",
    ],
    "rollout/outcome": [
        f"{UNIT}chat/test_void_turns",
        f"{UNIT}rollout/test_conversation",
        f"{UNIT}trainer/test_metrics",
    ],
    "certificate/check": [
        f"{UNIT}certificate/test_certificate",
        f"{UNIT}chat/test_void_turns",
        f"{UNIT}chat/test_images",
        f"{LONG}tokens/test_certificate",
    ],
    "chat/parsing/formats": PARSING,
    "chat/parsing/call_json": PARSING,
    "chat/parsing/harmony": PARSING,
    "chat/parsing/arguments": PARSING,
    "chat/parsing/gemma": PARSING,
    "chat/parsing/json_calls": PARSING,
    "chat/parsing/llama": PARSING,
    "chat/parsing/pythonic": PARSING,
    "chat/parsing/reasoning": PARSING,
    "chat/parsing/tags": PARSING,
    "chat/parsing/text_parser": [*PARSING, f"{UNIT}rollout/test_conversation"],
    "chat/parsing/turns": [*PARSING, f"{UNIT}rollout/test_conversation"],
    "chat/tir": [f"{UNIT}chat/test_tir"],
    "verl_bridge/loops/agent_loop": [f"{STACK}agent_loop"],
    "verl_bridge/loops/output": [*OUTPUTS, f"{STACK}joining"],
    "verl_bridge/workers/queue_rows": [f"{STACK}metrics", f"{STACK}kept_columns", f"{STACK}finished_rows"],
    "verl_bridge/loops/runner": OUTPUTS,
    "verl_bridge/workers/shared_puts": [f"{STACK}shared_puts", f"{STACK}finished_rows"],
    "verl_bridge/compat/row_store": [
        f"{STACK}{name}" for name in ("invalid", "metrics", "otc", "outages", "token_ages", "shared_puts")
    ],
    "verl_bridge/trainer/rows/batch_rows": [
        f"{STACK}several_rows",
        f"{STACK}invalid",
        f"{STACK}metrics",
        f"{STACK}tir",
    ],
    "verl_bridge/trainer/groups/group_filter": [f"{STACK}group_filter", f"{LONG}training/test_dapo_filter"],
    "verl_bridge/trainer/hooks": [
        *(
            f"{STACK}{name}"
            for name in (
                "trainer_hooks",
                "joining",
                "signal_filter",
                "checkpoint_callback",
                "invalid",
                "metrics",
                "several_rows",
                "token_ages",
                "real_copies",
                "outages",
                "slots",
                "tir",
                "trainer_death",
            )
        ),
        f"{LONG}training/test_filters",
    ],
    "verl_bridge/prefix_tree/forest": [f"{UNIT}trainer/test_prefix_forest", f"{UNIT}trainer/test_prefix_engine"],
    "verl_bridge/prefix_tree/packing": [f"{UNIT}trainer/test_prefix_forest", f"{UNIT}trainer/test_prefix_engine"],
    "verl_bridge/prefix_tree/attention": [f"{UNIT}trainer/test_prefix_engine"],
    "verl_bridge/prefix_tree/engine": [f"{UNIT}trainer/test_prefix_engine"],
    "verl_bridge/certificate/part": [f"{STACK}certificate", f"{STACK}certificate_parts", f"{STACK}invalid"],
    "verl_bridge/certificate/parts": [f"{STACK}certificate_parts"],
    "verl_bridge/trainer/verify": [
        f"{STACK}certificate",
        f"{STACK}certificate_parts",
        f"{STACK}invalid",
        f"{STACK}joining",
        f"{STACK}outages",
    ],
    "verl_bridge/model/chat_setup": [
        f"{STACK}codec",
        f"{STACK}agent_loop",
        f"{STACK}families",
        f"{STACK}vision",
        "tests/properties/test_shown_schemas",
        f"{LONG}tokens/test_control_tokens",
        f"{LONG}tokens/test_rows",
        f"{STACK}tir::test_a_model_for_images_is_refused",
        f"{STACK}vision_setup::test_prompts_with_images_are_measured",
    ],
    "verl_bridge/model/suffix_builder": [f"{STACK}suffix_builder", f"{STACK}families"],
    "verl_bridge/servers/verl_engine": [f"{UNIT}rollout/test_below_receipts", f"{STACK}agent_loop"],
    "verl_bridge/trainer/rows/valid_groups": [f"{STACK}invalid", f"{STACK}otc"],
    "verl_bridge/model/loading": [f"{STACK}start_up_paths", f"{STACK}codec", f"{STACK}vision_setup"],
    "verl_bridge/model/processors": [f"{STACK}vision_setup", f"{STACK}vision"],
    "verl_bridge/trainer/report": [f"{STACK}metrics", f"{STACK}otc", f"{STACK}trainer_hooks"],
    "verl_bridge/trainer/rows/otc": [f"{STACK}otc"],
    "verl_bridge/model/call_formats": [
        f"{STACK}formats",
        f"{STACK}agent_loop",
        f"{STACK}refusals",
        f"{LONG}tokens/test_template_matrix",
    ],
    "verl_bridge/startup/refusals/loops": [
        f"{UNIT}runs/test_early_refusals::test_words_of_verls_own_command_are_no_state_of_the_start_up_check_either",
        f"{STACK}refusals",
        f"{STACK}start_up_interactions",
        f"{STACK}start_up_proxy::test_a_history_as_it_was_sampled_is_accepted_with_a_note",
        f"{STACK}tir::test_what_the_start_up_check_says",
        f"{STACK}tir::test_a_template_without_a_place_for_tools",
        f"{STACK}otc::test_settings_that_cannot_work",
        f"{STACK}metrics::test_settings_that_cannot_work",
        f"{STACK}certificate::test_cached_rollouts_are_refused_where_they_would_be_verified",
        f"{STACK}vision_setup::test_the_engine_resizes_as_the_trainer_does",
    ],
    "verl_bridge/startup/ray_cpus": [f"{STACK}refusals", f"{STACK}start_up_choices"],
    "verl_bridge/loops/spmd": [f"{STACK}spmd"],
    "verl_bridge/rows": [f"{STACK}rows", f"{STACK}vision", f"{LONG}tokens/test_rows"],
    "verl_bridge/startup/refusals/rewards": [f"{STACK}metrics", f"{STACK}otc", f"{STACK}refusals"],
    "calls/shared_slots": [f"{STACK}slots"],
    "verl_bridge/run_keeper": [f"{STACK}slots"],
    "verl_bridge/trainer/trainers": [
        f"{STACK}{name}" for name in ("trainer_hooks", "invalid", "real_copies", "replica_death")
    ],
    "verl_bridge/trainer/rows/updates": [f"{STACK}invalid"],
    "task_sets/bfcl/episode": [f"{UNIT}task_sets/test_bfcl", f"{LONG}task_sets/test_bfcl"],
    "task_sets/bfcl/worlds": [f"{UNIT}task_sets/test_bfcl", f"{LONG}task_sets/test_bfcl"],
}


# Changes that make no difference to Python, or that only a test of the exact number could see.
_NO_CHANGE = ("_Is", "_IsNot", "Is_Eq", "IsNot_NotEq", "Annotation", "VariableReplacer", "VariableInserter")


@dataclass(frozen=True)
class Mutant:
    """A module with one change."""

    module: str
    """Path of the module in the repository."""
    line: int
    what: str
    before: str
    """Lines that the change removes."""
    after: str
    """Lines that the change adds."""
    source: str
    """Source of the whole module with the change."""
    name: str


# The place in the source, the name of the change, and a function that returns the changed source (it takes a while).
Change = tuple[tuple[int, int], str, Callable[[], str]]


def changes(source: str) -> Iterator[Change]:
    """Yield all changes that can be made to a module."""
    lines = source.splitlines(keepends=True)
    tree = ast.parse(source)
    skipped = _annotations(tree)
    yield from _left_out(tree, lines)
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    parsed = get_ast(source)
    for name in sorted(operator_names()):
        if name.endswith(_NO_CHANGE):
            continue
        operator = get_operator(name)()
        places = [place for node in ast_nodes(parsed) for place in operator.mutation_positions(node)]
        for occurrence, (start, _) in enumerate(places):
            if not any(begin <= start < end for begin, end in skipped):
                yield start, name.removeprefix("core/"), partial(mutate_code, source, operator, occurrence)


def _annotations(tree: ast.AST) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return the spans of type annotations, which nothing evaluates."""
    nodes = []
    for node in ast.walk(tree):
        nodes += [getattr(node, name, None) for name in ("annotation", "returns")]
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp) and isinstance(node.targets[0], ast.Name):
            nodes.append(node.value if node.targets[0].id[0].isupper() else None)  # an alias of types
    return [
        ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
        for node in nodes
        if isinstance(node, ast.expr)
    ]


def _left_out(tree: ast.AST, lines: list[str]) -> Iterator[Change]:
    """Yield the changes that leave out a statement or a keyword argument."""
    for node in ast.walk(tree):
        plain = isinstance(node, ast.Expr | ast.AugAssign | ast.Raise | ast.Return | ast.If)
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if plain and not docstring:
            yield (node.lineno, node.col_offset), "StatementLeftOut", partial(_replaced, lines, node, "pass")
        for keyword in node.keywords if isinstance(node, ast.Call) else []:
            if keyword.arg:
                # `**{}` is valid wherever an argument is.
                left_out = partial(_replaced, lines, keyword, "**{}")
                yield (keyword.lineno, keyword.col_offset), "ArgumentLeftOut", left_out


def _replaced(lines: list[str], node: Any, text: str) -> str:
    first, last = node.lineno - 1, node.end_lineno - 1
    # The columns of `ast` count bytes.
    before = lines[first].encode()[: node.col_offset].decode()
    after = lines[last].encode()[node.end_col_offset :].decode()
    return "".join([*lines[:first], before + text + after, *lines[last + 1 :]])


def draw(count: int, seed: int) -> list[Mutant]:
    """Draw mutants from the places of all modules, at most one mutant per place.

    A place is identified by its function, the text of its line and its column. So neither a change elsewhere in the
    code nor a move of the function to another module changes which mutants are drawn.

    Args:
        count: The most mutants to draw.
        seed: Seed of the draw.
    """
    drawn, met = [], Counter[str]()
    for name in COVERED:
        module = f"verl_multiturn/{name}.py"
        source = (ROOT / module).read_text(encoding="utf-8")
        lines, function_at = source.splitlines(), _functions(source)
        places: dict[tuple[int, int], list[Change]] = defaultdict(list)
        for change in changes(source):
            places[change[0]].append(change)
        for (line, column), here in sorted(places.items()):
            text = f"{seed} {function_at.get(line, '')} {lines[line - 1].strip()} {column}"
            met[text] += 1
            lot = hashlib.sha1(f"{text} {met[text]}".encode()).hexdigest()
            drawn.append((lot, module, here))
    drawn.sort(key=lambda each: each[0])
    return [_mutant(module, random.Random(lot).choice(here), lot[:8]) for lot, module, here in drawn[:count]]


def _functions(source: str) -> dict[int, str]:
    """Return the name of the innermost function or class around each line of a module; other lines have no entry."""
    nodes = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef | ast.ClassDef)
    ]
    nodes.sort(key=lambda node: node.lineno)
    return {line: node.name for node in nodes for line in range(node.lineno, (node.end_lineno or 0) + 1)}


def _mutant(module: str, change: Change, lot: str) -> Mutant:
    (line, _), what, make = change
    mutated = make()
    lines = difflib.ndiff((ROOT / module).read_text(encoding="utf-8").splitlines(), mutated.splitlines())
    marked = [(text[:2], text[2:].strip()) for text in lines]
    before, after = ("\n".join(text for mark, text in marked if mark == sign) for sign in ("- ", "+ "))
    return Mutant(module, line, what, before, after, mutated, f"{what} {lot}")


def tests_of(mutant: Mutant) -> list[str]:
    """Return the test files, or single tests, that cover a mutant's module, the most sensitive first."""
    name = mutant.module.removeprefix("verl_multiturn/").removesuffix(".py")
    return [f"{path}.py{colons}{test}" for path, colons, test in (each.partition("::") for each in COVERED[name])]


def state_of(mutant: Mutant, root: Path = ROOT) -> tuple[str, str]:
    """Return a digest of the definition that the mutant changes, and one of the tests that cover its module."""
    definition = definition_at((root / mutant.module).read_text(encoding="utf-8"), mutant.line)
    files = dict.fromkeys(test.partition("::")[0] for test in tests_of(mutant))
    tests = b"".join((root / path).read_bytes() for path in files)
    return hashlib.sha1(definition.encode()).hexdigest(), hashlib.sha1(tests).hexdigest()


def definition_at(source: str, line: int) -> str:
    """Return the top-level function, class or statement around a line, without its docstrings and comments."""
    for node in ast.parse(source).body:
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        if first <= line <= (node.end_lineno or 0):
            for inner in ast.walk(node):
                if isinstance(body := getattr(inner, "body", None), list):
                    inner.body = [each for each in body if not _is_text(each)]  # type: ignore[attr-defined]
            return ast.dump(node)
    raise ValueError(f"there is nothing at line {line}")


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)

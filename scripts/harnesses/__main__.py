"""Run agent programs against the endpoint, and account for every completion.

    python -m scripts.harnesses [NAME…]     names as in programs.PROGRAMS, or their families; all by default

The last line is one JSON object: the outcome of each program's session, and the totals. The exit status is 1 if a
program failed, ran no tool, got a request refused, has a completion that is not accounted for or a violation, or if
its roots are not those of `expected.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.harnesses.programs import PROGRAMS, Program
from scripts.harnesses.running import run_program
from tests.support.template_play import template_of

EXPECTED = Path(__file__).parent / "expected.json"
FAMILIES = 15
TOTALS = ("roots", "rows", "completions", "trained", "violations")


def faults(name: str, report: Mapping[str, Any], expected: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return the faults of a program's session."""
    if "error" in report:
        return [f"{name}: {report['error']}"]
    found = []
    if report["exit"] != 0 or not report["tool_ran"]:
        found.append(f"ended with {report['exit']}, and its tool {'ran' if report['tool_ran'] else 'did not run'}")
    if report["refused"]:
        found.append(f"{report['refused']} requests were refused")
    if report["violations"]:
        found.append(f"{report['violations']} violations")
    accounted = report["trained"] + sum(report["untrained"].values())
    if not report["generations"] == report["completions"] == accounted:
        found.append(f"{accounted} of {report['generations']} generations are accounted for")
    for count, right in expected.get(name, {"roots": 0}).items():
        if report[count] != right:
            found.append(f"{count}: {report[count]}, expected {right}, as docs/reference/harnesses.md says")
    return [f"{name}: {fault}\n{report.get('problem', '')}" for fault in found]


async def run_all(programs: Sequence[Program], deadline_s: float) -> dict[str, dict[str, Any]]:
    """Run programs one after the other; return the outcome of each session."""
    reports = {}
    for program in programs:
        print(f"{program.name}: ", end="", file=sys.stderr, flush=True)
        try:
            program.environment.make()
            reports[program.name] = await run_program(program, template_of("qwen3"), deadline_s)
        except (OSError, RuntimeError) as error:  # it cannot be installed or started here
            reports[program.name] = {"error": str(error)}
        print(json.dumps(reports[program.name]), file=sys.stderr, flush=True)
    return reports


def main() -> int:
    """Run the programs that the arguments name; return the exit status."""
    parser = argparse.ArgumentParser(description="Run agent programs against the endpoint.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(p.name for p in PROGRAMS)}")
    parser.add_argument("--deadline-s", type=float, default=600.0, help="seconds after which a program is killed")
    arguments = parser.parse_args()
    names = arguments.names
    known = {name for program in PROGRAMS for name in (program.name, program.family)}
    if unknown := set(names) - known:
        parser.error(f"{sorted(unknown)[0]!r} is no program; expected one of {sorted(known)}")
    chosen = [p for p in PROGRAMS if not names or p.name in names or p.family in names]
    reports = asyncio.run(run_all(chosen, arguments.deadline_s))
    expected = json.loads(EXPECTED.read_text(encoding="utf-8"))
    found = [fault for name, report in reports.items() for fault in faults(name, report, expected)]
    for fault in found:
        print(fault, file=sys.stderr)
    ran = {p.family for p in chosen if "error" not in reports[p.name]}
    total = {key: sum(report.get(key, 0) for report in reports.values()) for key in TOTALS}
    print(json.dumps({"harnesses": reports, "families": len(ran), **total, "faults": len(found)}))
    return 1 if found or (not names and len(ran) < FAMILIES) else 0


if __name__ == "__main__":
    sys.exit(main())

"""The part of `verl-multiturn doctor` about the entry points of installed packages, with the faults of each."""

from __future__ import annotations

from verl_multiturn.calls.loading.entry_points import FOLDERS, InstalledEntry, folder_of, installed_entries, load_place
from verl_multiturn.errors import ConfigError
from verl_multiturn.runs.doctor import DoctorFinding
from verl_multiturn.runs.imports import PACKAGE, Code, import_problem

_ONLY = "only a run that names it needs it"


def examine_packages() -> list[DoctorFinding]:
    """Return a finding for each entry point of this package's groups, with its package and version.

    Each one's module is imported in a process of its own. The command `doctor` shows the findings.
    """
    known = installed_entries()
    findings = [_finding(entry) for entry in known.entries]
    return findings + [DoctorFinding("entry points", False, *_split(fault)) for fault in known.faults]


def _finding(entry: InstalledEntry) -> DoctorFinding:
    what, found = f"{entry.group.removesuffix('s')} {entry.name}", f"{entry.source}, {entry.value}"
    problem = _problem(entry)
    if not problem:
        return DoctorFinding(what, True, found)
    why, remedy = _split(problem)
    return DoctorFinding(what, False, f"{found}: {why}", f"{_ONLY}: {remedy}" if remedy else _ONLY)


def _problem(entry: InstalledEntry) -> str:
    """Return the fault of an entry point; "" without one."""
    if entry.fault:
        return entry.fault
    if entry.group == FOLDERS:
        try:
            folder_of(entry.name, "")
        except ConfigError as error:
            return str(error).removeprefix(": ")
        return ""
    module, attribute = load_place(entry)
    first = attribute.partition(".")[0]  # the rest may be made by the author's code alone
    return import_problem([Code(module, PACKAGE + module, entry.value, first)], {})


def _split(fault: str) -> tuple[str, str]:
    why, _, remedy = fault.rpartition("; ")
    return (why, remedy) if why else (remedy, "")

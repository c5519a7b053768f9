"""Reads of Hydra and OmegaConf, kept in a process of tests: most of the CPU time to compose and check a run.

Hydra's files are read and merged once, until one of them changes, and OmegaConf parses a reference such as `${a.b}`
once.
"""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import omegaconf
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import DefaultsList
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins


@functools.cache
def read_once() -> None:
    """Let Hydra and OmegaConf keep their reads; the packages of tests that compose call it."""
    source = _source_of_files()
    source.load_config = _keep_files(source.load_config)
    config_loader_impl.create_defaults_list = _keep_choices(config_loader_impl.create_defaults_list)
    ConfigLoaderImpl._compose_config_from_defaults_list = _keep_merged(
        ConfigLoaderImpl._compose_config_from_defaults_list
    )
    for module in (omegaconf._utils, omegaconf.base):
        module.parse = _parse_once


@functools.cache
def _source_of_files() -> type[Any]:
    """Return Hydra's class of a folder of files; its plugins, when they are made, import that class anew."""
    Plugins.instance()
    return SourcesRegistry.instance().resolve("file")


_parse_once = functools.cache(omegaconf.grammar_parser.parse)
"""OmegaConf's parsing of a text with references; the tree that it returns is never changed."""


def _keep_files(read: Callable[..., Any]) -> Callable[..., Any]:
    """Return Hydra's reading of one file, which keeps the result."""
    kept: dict[Any, bytes] = {}

    def load_config(self: Any, config_path: str) -> Any:
        if (found := _state_of_file(self, config_path)) is None:
            return read(self, config_path)
        if found not in kept:
            kept[found] = pickle.dumps(read(self, config_path))
        return pickle.loads(kept[found])  # the composition changes it

    return load_config


def _keep_choices(choose: Callable[..., Any]) -> Callable[..., Any]:
    """Return Hydra's choice of the files of a composition, which keeps its choice by the same words.

    A word whose key has a dot sets a value, and chooses no file.
    """
    kept: dict[Any, list[tuple[dict[str, Any], bytes, set[str]]]] = {}

    def create_defaults_list(
        repo: Any, config_name: str | None, overrides_list: Sequence[Any], prepend_hydra: bool, skip_missing: bool
    ) -> Any:
        words = tuple(each.input_line for each in overrides_list if not _sets_a_value(each))
        key = (config_name, words, prepend_hydra, skip_missing, _places(repo))
        for states, choice, values in kept.get(key, []):
            if states == _states(repo, states):
                defaults, choices = pickle.loads(choice)
                ours = [each for each in overrides_list if _sets_a_value(each) or each.input_line in values]
                return DefaultsList(defaults, None, ours, SimpleNamespace(known_choices=choices))
        found = choose(repo, config_name, overrides_list, prepend_hydra, skip_missing)
        states = _states(repo, [name.removeprefix("config_path=") for name in repo.cache])
        choice = pickle.dumps((found.defaults, found.overrides.known_choices))
        kept.setdefault(key, []).append((states, choice, {each.input_line for each in found.config_overrides}))
        return found

    return create_defaults_list


def _keep_merged(merge: Callable[..., Any]) -> Callable[..., Any]:
    """Return Hydra's merge of the chosen files, which keeps its merge of the same files."""
    kept: dict[Any, list[tuple[dict[str, Any], bytes]]] = {}

    def merged(self: Any, defaults: Sequence[Any], repo: Any) -> Any:
        key = (tuple((each.config_path, each.package, each.primary) for each in defaults), _places(repo))
        for states, config in kept.get(key, []):
            if states == _states(repo, states):
                return pickle.loads(config)
        states = _states(repo, {each.config_path for each in defaults})
        config = merge(self, defaults, repo)
        kept.setdefault(key, []).append((states, pickle.dumps(config)))
        return config

    return merged


def _sets_a_value(override: Any) -> bool:
    return "." in override.key_or_group and override.package is None and "/" not in override.key_or_group


def _places(repo: Any) -> tuple[tuple[str, str], ...]:
    """Return where a repository looks for files."""
    return tuple((source.path, source.provider) for source in repo.get_sources())


def _states(repo: Any, paths: Iterable[str]) -> dict[str, Any]:
    """Return of each path of a configuration where it is found, and a mark of its content."""
    return {path: _state(repo, path) for path in paths}


def _state(repo: Any, path: str) -> Any:
    """Return the state of a path's file and of the node of the same name, which is its schema."""
    source = repo.delegate._find_object_source(path, ObjectType.CONFIG)
    if source is None:
        return None
    name = source._normalize_file_name(path)
    node = _Node(ConfigStore.instance()._open(name))
    if isinstance(source, _source_of_files()):
        return _state_of_file(source, path), node
    return type(source), source.path, source.provider, node


class _Node:
    """A node of Hydra's store, equal to itself alone; it is kept, so that no other gets its place in memory."""

    def __init__(self, node: Any) -> None:
        self.node = node

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Node) and self.node is other.node

    __hash__ = None  # type: ignore[assignment]


def _state_of_file(source: Any, path: str) -> tuple[Any, ...] | None:
    file = os.path.realpath(os.path.join(source.path, source._normalize_file_name(path)))
    if not os.path.isfile(file):
        return None
    found = os.stat(file)
    return file, source.path, source.provider, found.st_mtime_ns, found.st_size, found.st_ino

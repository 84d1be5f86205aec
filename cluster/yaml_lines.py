"""YAML with its lines: every value knows where it stood, and a key that is written twice is an error.

Plain scalars, lists and mappings only; tags that build objects do not exist here (PyYAML's SafeLoader underneath).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml


@dataclass(frozen=True, slots=True)
class Node:
    """A value and the line (from 1) on which it begins. Mappings hold `Node`s under (key, key's line)."""

    value: Any
    line: int

    @property
    def is_mapping(self) -> bool:
        return isinstance(self.value, Mapping)


@dataclass(frozen=True, slots=True)
class Key:
    """A mapping's key and its line; equal by name alone."""

    name: str
    line: int


class YamlProblem(Exception):
    """`line` (from 1) and what is wrong there."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line
        self.message = message


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """No aliases: a small file could grow without bound, and a value would stand in two places."""
        if self.check_event(yaml.AliasEvent):
            line = self.peek_event().start_mark.line + 1  # type: ignore[no-untyped-call]
            raise YamlProblem(line, "aliases (*name) are not supported; write the values out")
        return super().compose_node(parent, index)


def _scalar_or_object(loader: _Loader, node: yaml.Node) -> Node:
    line = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        return Node(_mapping(loader, node), line)
    if isinstance(node, yaml.SequenceNode):
        return Node(tuple(_scalar_or_object(loader, item) for item in node.value), line)
    return Node(loader.construct_object(node), line)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[str, tuple[Key, Node]]:
    """Key name → (where the key stands, its value)."""
    entries: dict[str, tuple[Key, Node]] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise YamlProblem(line, "a key must be a single word")
        name = str(key_node.value)
        if name == "<<":
            raise YamlProblem(line, "merge keys (<<) are not supported; write the values out")
        if name in entries:
            raise YamlProblem(line, f"{name!r} is given twice, first in line {entries[name][0].line}; keep one")
        entries[name] = (Key(name, line), _scalar_or_object(loader, value_node))
    return entries


def parse(text: str) -> Node | None:
    """The document as nodes; None when it is empty. Raises YamlProblem for anything that is not one YAML document."""
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlProblem(line, f"not valid YAML: {error.reason} ({error.character!r})") from error
    try:
        root = loader.get_single_node()
        return None if root is None else _scalar_or_object(loader, root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise YamlProblem(line, f"not valid YAML: {error.problem or error.context}; check the indentation") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise YamlProblem(1, f"not valid YAML: {error}") from error
    finally:
        loader.dispose()

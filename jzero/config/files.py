"""Config files and overrides: text in, one plain mapping and the faults of the text out. Knows no field."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from jzero.config.section import Fault, config_error, dotted, shown
from jzero.errors import ConfigError

# YAML 1.1 takes 010 for octal and 1:30 for base 60. Nobody means that here.
_MISREAD_NUMBER = re.compile(r"[-+]?(0[0-7_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")


def read_tree(
    path: str | PathLike[str] | None,
    overrides: Sequence[str] = (),
    shorthands: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], list[Fault]]:
    """The mapping that a file and dotted overrides (`section.field=value`, the last one wins) spell together.

    `shorthands` names sections that may stand as one word, with the field that the word is for.
    Interpolations are resolved among the given keys and by OmegaConf's resolvers. Raises ConfigError for a
    file that cannot be parsed; what can be told with the faults of fields comes back, those fields left out.
    """
    tree = {} if path is None else _read_file(Path(path))
    for section, field in (shorthands or {}).items():
        if isinstance(tree.get(section), str):
            tree[section] = {field: tree[section]}
    faults: list[Fault] = []
    for override in overrides:
        try:
            _merge(tree, _read_override(override))
        except ConfigError as error:
            faults.append(Fault((), str(error)))
    resolved = _resolve(tree, faults)
    return resolved, faults


def write_yaml(tree: Mapping[str, Any]) -> str:
    """YAML in the mapping's order that `read_tree` reads back equal: what looks like ${this} is escaped."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(_escape(tree)))


def _read_file(path: Path) -> dict[str, Any]:
    readers = {".yaml": _parse_yaml, ".yml": _parse_yaml, ".json": _parse_json, ".toml": _parse_toml}
    if path.suffix not in readers:
        raise ConfigError(f"{path}: the suffix must be one of {', '.join(readers)}")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    tree = readers[path.suffix](text, str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must be a mapping of sections, such as train: {{num_steps: 300}}")
    return tree


def _parse_yaml(text: str, origin: str) -> Any:
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            return {}
        if not isinstance(node, yaml.MappingNode):
            return None
        if traps := [Fault((), f"{origin}: {trap}") for trap in _yaml_traps(node)]:
            raise config_error(traps)
        return OmegaConf.to_container(OmegaConf.create(text))
    except yaml.MarkedYAMLError as error:
        line = f" (line {error.problem_mark.line + 1})" if error.problem_mark else ""
        raise ConfigError(f"{origin}: not valid YAML{line}: {error.problem}") from None
    except RecursionError:
        raise ConfigError(f"{origin}: a YAML anchor contains itself") from None
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{origin}: {str(error).splitlines()[0]}") from None


def _yaml_traps(node: Any, path: str = "") -> Iterator[str]:
    """What YAML accepts in silence: keys given twice, and numbers that it reads as others."""
    lines: dict[str, int] = {}
    for key, value in node.value:
        name, line = dotted(path, key.value), key.start_mark.line + 1
        if name in lines:
            yield f"{name} is given twice (lines {lines[name]} and {line}); keep one"
        lines[name] = line
        if value.id == "mapping":
            yield from _yaml_traps(value, name)
        elif value.id == "sequence":
            mappings = [(index, item) for index, item in enumerate(value.value) if item.id == "mapping"]
            for index, item in mappings:
                yield from _yaml_traps(item, f"{name}[{index}]")
        elif value.id == "scalar" and value.tag.endswith((":int", ":float")) and _MISREAD_NUMBER.fullmatch(value.value):
            yield f"{name} = {value.value} (line {line}): YAML reads this in base 8 or 60; write it plainly"


def _parse_json(text: str, origin: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for name, count in Counter(name for name, _ in pairs).items():
            if count > 1:
                key = re.compile(rf"{re.escape(json.dumps(name, ensure_ascii=False))}\s*:")
                lines = [str(n) for n, line in enumerate(text.splitlines(), 1) for _ in key.findall(line)]
                raise ConfigError(
                    f"{origin}: {name} is given twice in one object (lines {' and '.join(lines)}); keep one"
                )
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{origin}: not valid JSON (line {error.lineno}): {error.msg}") from None


def _parse_toml(text: str, origin: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{origin}: not valid TOML: {error}") from None


def _read_override(override: str) -> dict[str, Any]:
    name, equals, text = override.partition("=")
    names = name.strip().split(".")
    if not equals or not all(names):
        raise ConfigError(f"override {shown(override)}: must be section.field=value, such as train.num_steps=300")
    tree: Any = _parse_yaml(f"value: {text}", f"override {shown(override)}")["value"]
    for name in reversed(names):
        tree = {name: tree}
    return tree


def _merge(tree: dict[str, Any], extra: Mapping[str, Any]) -> None:
    for name, value in extra.items():
        if isinstance(value, dict) and isinstance(tree.get(name), dict):
            _merge(tree[name], value)
        else:
            tree[name] = value


def _resolve(tree: dict[str, Any], faults: list[Fault]) -> dict[str, Any]:
    """The tree with each ${interpolation} replaced; what is missing or leads nowhere is told and left out."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    def walk(node: Any, path: str) -> Any:
        if not OmegaConf.is_config(node):
            return node
        kept: dict[Any, Any] = {}
        is_list = OmegaConf.is_list(node)
        for key in range(len(node)) if is_list else list(node):
            here = f"{path}[{key}]" if is_list else dotted(path, key)
            wrong = ""
            try:
                if OmegaConf.is_missing(node, key):
                    wrong = "must be given, in the file or as an override"
                else:
                    kept[key] = walk(node[key], here)
            except OmegaConfBaseException as error:
                wrong = f"leads nowhere ({str(error).splitlines()[0]}); name a key that is given"
            if wrong:
                raw: Any = OmegaConf.to_container(node)
                faults.append(Fault((path if is_list else here,), f"{here} = {shown(raw[key])}: {wrong}"))
        return list(kept.values()) if is_list else kept

    try:
        return walk(OmegaConf.create(tree), "")
    except OmegaConfBaseException as error:
        where, what = getattr(error, "full_key", None), str(error).splitlines()[0]
        raise ConfigError(f"{where or 'config'}: {what}") from None


def _escape(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _escape(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escape(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", value)
    return value

"""The base of every config section: field types that refuse look-alikes, and faults told all at once."""

from __future__ import annotations

import difflib
import json
import numbers
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    StrictBool,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from jzero.errors import ConfigError


class Fault(NamedTuple):
    """One thing wrong: the dotted fields it involves, and the line that tells the user."""

    fields: tuple[str, ...]
    text: str


def config_error(faults: Iterable[Fault]) -> ConfigError:
    return ConfigError("\n".join(fault.text for fault in faults))


def shown(value: Any) -> str:
    """A value as it would stand in a config file, cut when long."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


# Field types. A number may stand as text, since YAML 1.1 reads 1e-5 as text; a bool is never a number.


def _whole(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("int_type", "")
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            value = _number(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("float_type", "")
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            pass
    return value


def _text(value: Any) -> Any:
    # OmegaConf reads ??? as "still to be given"; a dumped config could not be read back.
    if value == "???":
        raise PydanticCustomError("text", "must be given")
    return os.fspath(value) if isinstance(value, os.PathLike) else value


Whole = BeforeValidator(_whole)
Count = Annotated[int, Whole, Field(ge=0)]
Size = Annotated[int, Whole, Field(ge=1)]
Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
NonNegative = Annotated[Number, Field(ge=0)]
Positive = Annotated[Number, Field(gt=0)]
Decay = Annotated[Number, Field(ge=0, lt=1)]
Fraction = Annotated[Number, Field(gt=0, lt=1)]
Text = Annotated[str, BeforeValidator(_text)]
Flag = StrictBool


def _axis_size(value: int) -> int:
    if value < 1 and value != -1:
        raise PydanticCustomError("axis_size", "must be at least 1, or -1 for all the devices that remain")
    return value


def _xla_flag(value: str) -> str:
    if not value.startswith("--") or " " in value:
        raise PydanticCustomError("xla_flag", "must be one flag such as --xla_dump_to=DIR")
    return value


AxisSize = Annotated[int, Whole, AfterValidator(_axis_size)]
XlaFlag = Annotated[Text, AfterValidator(_xla_flag)]


class Section(BaseModel):
    """A frozen group of fields. However it is built, all its faults come in one ConfigError."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    path: ClassVar[str] = ""

    @classmethod
    def complete(cls, given: Any) -> Any:
        """The given fields with shorthands written out and the defaults that hang on other fields."""
        return given

    def conflicts(self) -> Iterator[Fault]:
        """What is wrong between fields that are right one by one."""
        yield from ()

    @model_validator(mode="wrap")
    @classmethod
    def _tell_all(cls, given: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        """One list of faults, the validation context, goes down the sections; whoever made it raises."""
        if isinstance(given, cls):
            return given
        faults: list[Fault] = [] if info.context is None else info.context
        given = cls.complete(given)
        if not isinstance(given, Mapping):
            fields = tuple(dotted(cls.path, name) for name in cls.model_fields)
            example = f"{{{next(iter(cls.model_fields))}: ...}}"
            text = f"{cls.path or 'config'} = {shown(given)}: must be a mapping, such as {example}"
            faults.append(Fault(fields, text))
            given = {}
        values = {str(name): value for name, value in given.items()}
        for name, section in subsections(cls).items():
            if name in values:
                values[name] = section.model_validate(values[name], context=faults)
        for name, section in section_lists(cls).items():
            if isinstance(values.get(name), list | tuple):
                values[name] = tuple(_items(section, values[name], faults))
        try:
            built = handler(values)
        except ValidationError as error:
            details = error.errors(include_url=False)
            faults += (_explain(cls, detail) for detail in details)
            # The sound fields on their own may still contradict each other: that is told in the same breath.
            unsound = {detail["loc"][0] for detail in details}
            built = handler({name: value for name, value in values.items() if name not in unsound})
        broken = {field for fault in faults for field in fault.fields}
        faults += (conflict for conflict in built.conflicts() if broken.isdisjoint(conflict.fields))
        if faults and info.context is None:
            raise config_error(faults)
        return built


def subsections(section: type[Section]) -> dict[str, type[Section]]:
    fields = {name: field.annotation for name, field in section.model_fields.items()}
    return {name: kind for name, kind in fields.items() if isinstance(kind, type) and issubclass(kind, Section)}


def section_lists(section: type[Section]) -> dict[str, type[Section]]:
    """The fields that hold lists of sections. The path of such a section ends in [], where its number goes."""
    kinds = {name: next(iter(get_args(field.annotation)), None) for name, field in section.model_fields.items()}
    return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Section)}


def _items(section: type[Section], given: Iterable[Any], faults: list[Fault]) -> Iterator[Section]:
    def numbered(text: str) -> str:
        return text.replace(section.path, place)

    for index, item in enumerate(given):
        place, own = f"{section.path.removesuffix('[]')}[{index}]", []
        yield section.model_validate(item, context=own)
        faults += (Fault(tuple(map(numbered, fault.fields)), numbered(fault.text)) for fault in own)


def unused(section: Section, users: Mapping[str, tuple[str, list[str]]]) -> Iterator[Fault]:
    """Fields set but not read. `users`: field -> (the field that chooses, choices that read it)."""
    for name, (chooser, choices) in users.items():
        value, choice = getattr(section, name), getattr(section, chooser)
        if choice not in choices and value != type(section).model_fields[name].default:
            path, chosen_by = f"{section.path}.{name}", f"{section.path}.{chooser}"
            told = f"{path} = {shown(value)}: not read by {chosen_by} = {choice}"
            yield Fault((path, chosen_by), f"{told}; drop it, or set {chosen_by}: {' or '.join(choices)}")


def dotted(*names: object) -> str:
    return ".".join(str(name) for name in names if name != "")


# Wording.


def _explain(section: type[Section], detail: ErrorDetails) -> Fault:
    name, *rest = detail["loc"]
    path = dotted(section.path, name)
    if detail["type"] == "extra_forbidden":
        return Fault((path,), _unknown(section, str(name), detail["input"]))
    value, field = detail["input"], section.model_fields[str(name)]
    shown_path = path + "".join(f"[{index}]" for index in rest)
    return Fault((path,), f"{shown_path} = {shown(value)}: {_problem(detail, field)}{_hint(value, field)}")


def _problem(detail: ErrorDetails, field: FieldInfo) -> str:
    limits = detail.get("ctx", {})
    wrong = {
        "greater_than_equal": "must be at least {ge}",
        "greater_than": "must be more than {gt}",
        "less_than_equal": "must be at most {le}",
        "less_than": "must be less than {lt}",
        "literal_error": "must be {expected}",
        "bool_type": "must be true or false",
        "finite_number": "must be a finite number",
        "tuple_type": "must be a list, such as [a, b]",
    }.get(detail["type"])
    if wrong is None:
        kinds = {"int": "a whole number", "float": "a number", "string": "text"}
        kind = kinds.get(detail["type"].partition("_")[0])
        wrong = kind and f"must be {kind}"
    or_null = " or null" if type(None) in get_args(field.annotation) else ""
    return (wrong.format(**limits) if wrong else detail["msg"]) + or_null


def _hint(value: Any, field: FieldInfo) -> str:
    default = field.default
    if isinstance(default, bool) and value in ("true", "false"):
        return "; remove the quotes"
    if value == "auto":
        return "; there is no auto here: leave the field out for its default"
    if isinstance(default, str) and isinstance(value, bool):
        return "; YAML reads a bare yes, no, on or off as true or false: put text in quotes"
    if isinstance(default, str) and isinstance(value, str):
        close = difflib.get_close_matches(value.lower(), map(str, get_args(field.annotation)), n=1)
        return f"; did you mean {close[0]}?" if close else ""
    if isinstance(default, str) and isinstance(value, (int, float)):
        return "; put it in quotes"
    return "" if default in (None, ()) else f", for example {shown(default)}"


def _unknown(section: type[Section], name: str, value: Any) -> str:
    told = f"{dotted(section.path, name)} = {shown(value)}: unknown key; "
    near = nearest(section, name)
    if near:
        return f"{told}did you mean {near}?"
    return f"{told}{section.path or 'a config'} has {', '.join(section.model_fields)}"


def nearest(section: type[Section], name: str) -> str | None:
    """What was most likely meant: the same name elsewhere, else a like name here, else one elsewhere."""
    paths = [dotted(kind.path, field) for kind in _kinds(Section) for field in kind.model_fields]
    if "." in name and name in paths:
        return name.replace(".", ": {", 1) + ": ...}"
    by_name = {path.rpartition(".")[2]: path for path in sorted(paths, key=lambda path: -path.count("."))}
    if name in by_name:
        return by_name[name]
    if close := difflib.get_close_matches(name, section.model_fields, n=1):
        return dotted(section.path, close[0])
    close = difflib.get_close_matches(name, by_name, n=1, cutoff=0.75)
    return by_name[close[0]] if close else None


def _kinds(section: type[Section]) -> Iterator[type[Section]]:
    for kind in section.__subclasses__():
        yield kind
        yield from _kinds(kind)

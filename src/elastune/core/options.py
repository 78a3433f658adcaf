"""Options written as a text, "name:option=value,option=value", and read by annotations. Pure.

The name stands for a class, and the arguments of its constructor are its options. An annotation decides the values:
``int``, ``float``, ``str``, ``bool``, ``tuple[kind, ...]`` of the first three (written a/b or a,b), or a ``Literal`` of
texts. ``Annotated[int, Range(2, 64)]`` bounds each of them, and each may also be None (written none).
"""

from __future__ import annotations

import inspect
import math
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass, replace
from types import NoneType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from elastune.core.errors import UserError

T = TypeVar("T")
LONGEST = 1000  # characters of a text
REQUIRED: Any = inspect.Parameter.empty
_NAME = re.compile(r"[^\W\d][\w.-]*")
_TRUTHS = {"true": True, "false": False}
_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
_EXAMPLES = {int: 64, float: 1.5, bool: True, str: "a"}


@dataclass(frozen=True)
class Range:
    """The allowed numbers: from ``low`` to ``high``, without an end that is ``open_``. They are always finite.

    Example:
        >>> class Mine(elastune.Policy):
        ...     def __init__(self, every: Annotated[int, Range(1, 1000)] = 50) -> None: ...
    """

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return above and below and math.isfinite(value)

    def __str__(self) -> str:
        if self == Range():
            return ""
        if math.isinf(self.high):
            return f"{'above' if self.open_low else 'of at least'} {self.low:g}"
        if self.open_low or self.open_high:
            return f"in {'[('[self.open_low]}{self.low:g}, {self.high:g}{'])'[self.open_high]}"
        return f"from {self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class Option:
    """The values of one option: a ``base`` in ``range`` or one of ``choices``, a tuple of ``many``, or (``optional``)
    None.

    ``default``: the value where a text does not name the option.
    """

    base: type
    range: Range = Range()
    choices: tuple[str, ...] = ()
    many: bool = False
    optional: bool = False
    default: Any = REQUIRED

    @classmethod
    def of(cls, annotation: Any, default: Any = REQUIRED) -> Option | None:
        """Return the option that ``annotation`` describes (see the module); None for any other annotation."""
        origin, args = get_origin(annotation), get_args(annotation)
        if origin is Literal:
            return cls(str, choices=args, default=default) if all(isinstance(arg, str) for arg in args) else None
        if not args:
            return cls(annotation, default=default) if annotation in _WORDS else None
        inner = cls.of(next((arg for arg in args if arg is not NoneType), None), default)
        if inner is None:
            return None
        if origin is Annotated:
            return replace(inner, range=next((arg for arg in args if isinstance(arg, Range)), inner.range))
        if origin in (Union, types.UnionType) and len(args) == 2 and NoneType in args:
            return replace(inner, optional=True)
        if origin is tuple and args[1:] == (Ellipsis,) and not inner.many:
            return replace(inner, many=True)
        return None

    def __contains__(self, value: object) -> bool:
        if value is None:
            return self.optional
        if self.many:
            one = replace(self, many=False, optional=False)
            return isinstance(value, tuple) and all(part in one for part in value)
        if isinstance(value, bool) or self.base is bool:
            return isinstance(value, bool) and self.base is bool
        if isinstance(value, str) or self.base is str:
            return isinstance(value, str) and self.base is str and (not self.choices or value in self.choices)
        return isinstance(value, int if self.base is int else (int, float)) and value in self.range

    def __str__(self) -> str:
        words = f"one of {', '.join(self.choices)}" if self.choices else f"{_WORDS[self.base]} {self.range}".rstrip()
        if self.many:
            words += ", or several as a/b"
        return f"{words} or none" if self.optional else words

    def read(self, text: str) -> Any:
        """Return the value written as ``text``, not checked yet. Raises ``ValueError`` for an impossible text."""
        if self.optional and text.lower() == "none":
            return None
        if self.many:
            return tuple(replace(self, many=False).read(part.strip()) for part in text.split("/"))
        if self.base is bool:
            return _TRUTHS.get(text.lower(), text)
        if self.base is int and not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
            raise ValueError(text)
        return self.base(text)

    @property
    def example(self) -> str:
        """Return a text that the option accepts: the default's, if it has one."""
        usual = self.default if self.default is not None and self.default in self else None
        if isinstance(usual, tuple):
            usual = "/".join(map(str, usual)) or None
        shown = str(_EXAMPLES[self.base] if usual is None else usual)
        return shown.lower() if self.base is bool else shown


def split(text: str, what: str, example: str) -> tuple[str, str]:
    """Return the name in "name:option=value,...", and the text of the options; empty without a colon.

    Raises ``UserError`` for any other text. ``what`` names the thing that the text describes, and ``example`` shows its
    form.
    """
    if not isinstance(text, str):
        raise UserError(f"{what} is given as a text", repr(text), f"such as {example}")
    if len(text) > LONGEST:
        raise UserError(f"{what} has at most {LONGEST} characters", f"{text[:20]}...", "shorten it")
    name, colon, options = (part.strip() for part in text.partition(":"))
    if not _NAME.fullmatch(name) or (colon and not options):
        raise UserError(f"{what} is written NAME or NAME:OPTION=VALUE,...", repr(text), f"such as {example}")
    return name, options


def parse(name: str, text: str, kind: type[T], **fixed: Any) -> T:
    """Return a ``kind`` with the options of ``text``, "option=value,...", and its defaults. A text cannot name
    ``fixed`` ones.
    """
    options = {option: known for option, known in options_of(kind).items() if option not in fixed}
    return kind(**read(name, text, options), **fixed)


def options_of(kind: type) -> dict[str, Option]:
    """Return the options of a class by name: the arguments of its constructor with an annotation or a plain default.

    Arguments of other types keep their defaults. Raises ``UserError`` for such an argument without a default.
    """
    try:
        hints = get_type_hints(kind if is_dataclass(kind) else kind.__init__, include_extras=True)  # type: ignore[misc]
    except NameError as error:
        rule = f"the options of {kind.__name__} must have known types"
        raise UserError(rule, error, "import them, or leave them out") from None
    options = {}
    for parameter in inspect.signature(kind).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            continue
        plain = str if parameter.default is REQUIRED else type(parameter.default)
        if option := Option.of(hints.get(parameter.name, plain), parameter.default):
            options[parameter.name] = option
        elif parameter.default is REQUIRED:
            rule = f"an option of {kind.__name__} must be int, float, str, bool or a tuple of one of them"
            raise UserError(rule, parameter, "annotate it so, or give it a default")
    return options


def read(name: str, text: str, options: Mapping[str, Option]) -> dict[str, Any]:
    """Return the values that ``text``, "option=value,...", gives to ``options``, which belong to ``name``."""
    texts: dict[str, str] = {}
    latest = ""
    for part in text.split(",") if text else ():
        option, equals, value = (side.strip() for side in part.partition("="))
        if option and not equals and latest and options[latest].many:
            texts[latest] += f"/{option}"  # a tuple goes on after a comma too
        elif not (option and equals and value):
            raise UserError(f"an option of {name} is written OPTION=VALUE", repr(part), _sample(name, options))
        elif option not in options:
            known = ", ".join(sorted(options)) or "none"
            raise UserError(f"{name} has no such option", option, f"known: {known}")
        elif option in texts:
            raise UserError(f"an option of {name} may be given once", option, "remove the others")
        else:
            texts[option], latest = value, option
    for option, known_as in options.items():
        if known_as.default is REQUIRED and option not in texts:
            raise UserError(f"{name} needs {option}", "nothing", f"write {name}:{option}=...")
    return {option: _value(option, text, options[option], name) for option, text in texts.items()}


def check(name: str, instance: object) -> None:
    """Raise ``UserError`` for an attribute of ``instance`` that the annotations of its class do not allow."""
    for option, known in options_of(type(instance)).items():
        if (value := getattr(instance, option)) not in known:
            _refuse(option, value, known, name)


def _value(option: str, text: str, known: Option, name: str) -> Any:
    try:
        value = known.read(text)
    except ValueError:
        _refuse(option, text, known, name)
    if value not in known:
        _refuse(option, text, known, name)
    return value


def _refuse(option: str, value: object, known: Option, name: str) -> NoReturn:
    raise UserError(f"{option} of {name} must be {known}", repr(value), f"such as {option}={known.example}")


def _sample(name: str, options: Mapping[str, Option]) -> str:
    pairs = [f"{option}={known.example}" for option, known in list(options.items())[:2]]
    return f"such as {name}:{','.join(pairs)}" if pairs else f"{name} has no options"

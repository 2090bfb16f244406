"""Fields of a request's JSON body, taken one by one: each of the right kind, and none passed over."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar

from batond.clients.gateway.problems import ApiError, invalid

if TYPE_CHECKING:
    from collections.abc import Collection

T = TypeVar("T")

_NAMES = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", dict: "an object"}


class Fields:
    """The fields of one object; those that nobody took are refused at the end.

    Args:
        values: The object. A field that is null counts as left out, as in OpenAI's API.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self._left = {name: value for name, value in values.items() if value is not None}

    def raw(self, name: str) -> Any:
        """Take a field as it is; None if it was left out."""
        return self._left.pop(name, None)

    def take(self, name: str, kind: type[T]) -> T | None:
        """Take a field of one kind; None if it was left out.

        Raises:
            ApiError: It is of another kind.
        """
        value = self.raw(name)
        if value is None:
            return None
        # Python's bool is an int, JSON's is none; a whole number is a number.
        fits = isinstance(value, (int, float) if kind is float else kind)
        if not fits or (isinstance(value, bool) and kind is not bool):
            raise invalid(f"{name} must be {_NAMES[kind]}", name, "invalid_type")
        return value  # type: ignore[no-any-return] # checked above

    def flag(self, name: str) -> bool:
        """Take a field that is true or false, and false if it was left out."""
        return bool(self.take(name, bool))

    def ignore(self, *names: str) -> None:
        """Drop fields that change nothing here."""
        for name in names:
            self._left.pop(name, None)

    def refuse(self, *names: str, neutral: Collection[object] = ()) -> None:
        """Refuse fields that ask for what isn't there, but for values that ask for nothing.

        Raises:
            ApiError: One was given.
        """
        for name in names:
            value = self.raw(name)
            if value is not None and value not in neutral and value != [] and value is not False:
                raise unsupported(f"{name} is not supported", name)

    def done(self) -> None:
        """Refuse what nobody took.

        Raises:
            ApiError: There is such a field.
        """
        for name in self._left:
            shown = name[:100]
            raise invalid(f"Unrecognized request argument supplied: {shown}", shown, "unknown_parameter")


def unsupported(message: str, param: str) -> ApiError:
    """Something of OpenAI's API that isn't there."""
    return invalid(message, param, "unsupported_parameter")


def read_object(body: bytes) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ApiError: It is none.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:  # ValueError: also bytes that are no UTF-8.
        raise invalid(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise invalid("the body must be a JSON object", code="invalid_json")
    return value

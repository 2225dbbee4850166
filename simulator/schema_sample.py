"""A value that satisfies a JSON schema, always the same one: what guided decoding would end in. Pure.

Only what a schema requires is made: no optional properties, no items beyond `minItems`. What can't be
made from the schema alone (`pattern`, `not` and their like) is refused, as an engine's grammar refuses
what it doesn't know.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

DEPTH_MAX = 32
"""Levels of a sample; a schema that requires itself for ever is refused there."""

VALUES_MAX = 10_000
"""Values that are tried for one sample."""

WORD = "text"
"""What a string is, if nothing is said about it."""

FORMATS: Mapping[str, str] = {
    "date": "2026-01-01",
    "date-time": "2026-01-01T00:00:00Z",
    "time": "00:00:00Z",
    "duration": "PT1S",
    "email": "someone@example.org",
    "hostname": "example.org",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uri": "https://example.org/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}

_IMPOSSIBLE = ("pattern", "not", "if", "contains", "dependentRequired", "dependentSchemas")

Schema = Mapping[str, Any]


class SchemaUnsupported(ValueError):
    """No sample of this schema can be made here; the text says why."""


def sample(schema: object) -> Any:
    """Return a value that satisfies `schema`, one with as few levels as can be. Raises: SchemaUnsupported."""
    problem = SchemaUnsupported("")
    # Level by level, so that of a tree's alternatives the one without children is found at once.
    for depth in range(1, DEPTH_MAX + 1):
        try:
            return _Sampler(schema).make(schema, depth)
        except SchemaUnsupported as error:
            problem = error
    raise problem


class _Sampler:
    def __init__(self, root: object) -> None:
        self._root = root
        self._values = 0

    def make(self, schema: object, depth: int) -> Any:
        """Return a value; `depth` levels may still be below it."""
        self._values += 1
        if self._values > VALUES_MAX:
            raise SchemaUnsupported(f"more than {VALUES_MAX:,} values")
        if schema is True:
            return {}
        if not isinstance(schema, Mapping):
            raise SchemaUnsupported(f"a schema is an object or true, not {schema!r:.80}")
        if depth == 0:
            raise SchemaUnsupported(f"more than {DEPTH_MAX} levels of required values")
        schema = self._resolved(schema)
        for keyword in _IMPOSSIBLE:
            if keyword in schema:
                raise SchemaUnsupported(f"the keyword {keyword!r} is unknown here")
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return _first(schema, "enum")
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self._make_any(schema, keyword, depth)
        return self._make_of_type(_type_of(schema), schema, depth)

    def _resolved(self, schema: Schema) -> Schema:
        """Return a schema with what it refers to and all that it combines in one object."""
        for _ in range(DEPTH_MAX):
            if "$ref" in schema:
                found = self._find(schema["$ref"])
                schema = _merged({k: v for k, v in schema.items() if k != "$ref"}, found)
            elif "allOf" in schema:
                parts = schema["allOf"]
                if not isinstance(parts, list):
                    raise SchemaUnsupported("allOf: expected a list")
                schema = {k: v for k, v in schema.items() if k != "allOf"}
                for part in parts:
                    schema = _merged(schema, part)
            else:
                return schema
        raise SchemaUnsupported("references that lead nowhere")

    def _find(self, reference: object) -> Schema:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise SchemaUnsupported(f"$ref {reference!r:.80}: only places in the schema are known")
        found: Any = self._root
        for part in reference[1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            raise SchemaUnsupported(f"$ref {reference!r:.80}: nothing is there")
        return found

    def _make_any(self, schema: Schema, keyword: str, depth: int) -> Any:
        """Return a value of the first alternative of which one can be made."""
        alternatives = schema[keyword]
        if not isinstance(alternatives, list) or not alternatives:
            raise SchemaUnsupported(f"{keyword}: expected a list with at least one schema")
        common = {name: value for name, value in schema.items() if name != keyword}
        problems = []
        for alternative in alternatives:
            try:
                return self.make(_merged(common, alternative), depth - 1)
            except SchemaUnsupported as error:
                problems.append(str(error))
        raise SchemaUnsupported(problems[0])

    def _make_of_type(self, kind: str, schema: Schema, depth: int) -> Any:
        make: dict[str, Callable[[], Any]] = {
            "object": lambda: self._make_object(schema, depth),
            "array": lambda: self._make_array(schema, depth),
            "string": lambda: _make_string(schema),
            "integer": lambda: _make_number(schema, is_whole=True),
            "number": lambda: _make_number(schema, is_whole=False),
            "boolean": lambda: True,
            "null": lambda: None,
        }
        if kind not in make:
            raise SchemaUnsupported(f"the type {kind!r:.80} is unknown")
        return make[kind]()

    def _make_object(self, schema: Schema, depth: int) -> dict[str, Any]:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise SchemaUnsupported("properties: expected an object; required: a list")
        # In the order of the properties, as a grammar has them.
        names = [name for name in properties if name in required]
        names += [name for name in required if name not in properties]
        if schema.get("minProperties", 0) > len(names):
            raise SchemaUnsupported("minProperties: more than are required")
        return {name: self.make(properties.get(name, True), depth - 1) for name in names}

    def _make_array(self, schema: Schema, depth: int) -> list[Any]:
        first, count = schema.get("prefixItems", []), schema.get("minItems", 0)
        if not isinstance(first, list) or type(count) is not int or not 0 <= count <= 1_000:
            raise SchemaUnsupported("minItems: expected 0 to 1,000; prefixItems: a list")
        if schema.get("uniqueItems") and count > 1:
            raise SchemaUnsupported("uniqueItems: several that differ")
        rest = schema.get("items", True)
        schemas = [*first, *[rest] * count][:count]
        return [self.make(one, depth - 1) for one in schemas]


def _type_of(schema: Schema) -> str:
    """Return the first type that a schema allows; where it says none, the one its keywords are of."""
    kind = _first(schema, "type") if isinstance(schema.get("type"), list) else schema.get("type")
    if kind is not None:
        return str(kind)
    for keyword, implied in (("items", "array"), ("minLength", "string"), ("minimum", "number")):
        if keyword in schema:
            return implied
    return "object"


def _first(schema: Schema, keyword: str) -> Any:
    values = schema[keyword]
    if not isinstance(values, list) or not values:
        raise SchemaUnsupported(f"{keyword}: expected a list with at least one value")
    return values[0]


def _merged(schema: Schema, other: object) -> dict[str, Any]:
    """Return what both ask for. Objects' properties are joined; of other keywords the second counts."""
    if other is True:
        return dict(schema)
    if not isinstance(other, Mapping):
        raise SchemaUnsupported(f"a schema is an object or true, not {other!r:.80}")
    merged = {**schema, **other}
    if "properties" in schema and "properties" in other:
        merged["properties"] = {**schema["properties"], **other["properties"]}
    if "required" in schema and "required" in other:
        merged["required"] = [*schema["required"], *other["required"]]
    return merged


def _make_string(schema: Schema) -> str:
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength")
    if type(shortest) is not int or shortest > 10_000:
        raise SchemaUnsupported("minLength: expected 0 to 10,000")
    text = schema.get("format")
    text = FORMATS.get(text, WORD) if isinstance(text, str) else WORD
    text += "." * (shortest - len(text))
    return text if longest is None else text[:longest]


def _make_number(schema: Schema, *, is_whole: bool) -> int | float:
    """Return the number next to 0 that is allowed."""
    lowest = schema.get("minimum", -math.inf)
    highest = schema.get("maximum", math.inf)
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    step = schema.get("multipleOf", 1)
    numbers = (lowest, highest, step, above or 0, below or 0)
    if any(isinstance(one, bool) or not isinstance(one, int | float) for one in numbers):
        raise SchemaUnsupported("a number's limits: expected numbers")
    if step <= 0:
        raise SchemaUnsupported("multipleOf: expected more than 0")
    if is_whole:
        step = math.lcm(1, step) if isinstance(step, int) else math.ceil(step)
    lowest = lowest if above is None else max(lowest, above + step * 1e-9)
    highest = highest if below is None else min(highest, below - step * 1e-9)
    number: int | float = 0
    if lowest > 0:
        number = math.ceil(lowest / step) * step
    elif highest < 0:
        number = math.floor(highest / step) * step
    if not lowest <= number <= highest:
        if is_whole:
            raise SchemaUnsupported("a whole number: its limits leave none")
        number = (lowest + highest) / 2
    return number

"""Values made after JSON schemas."""

from __future__ import annotations

from typing import Any

import pytest

from moongate.simulator.schema_sample import SchemaUnsupported, sample

LIST: dict[str, Any] = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value"],
        }
    },
    "$ref": "#/$defs/node",
}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({}, {}),
        (True, {}),
        ({"type": "string"}, "text"),
        ({"type": "string", "minLength": 6}, "text.."),
        ({"type": "string", "maxLength": 2}, "te"),
        ({"type": "string", "format": "date"}, "2026-01-01"),
        ({"type": "integer"}, 0),
        ({"type": "integer", "exclusiveMinimum": 3}, 4),
        ({"type": "integer", "maximum": -3, "multipleOf": 2}, -4),
        ({"type": "integer", "minimum": 5, "multipleOf": 4}, 8),
        ({"type": "number", "minimum": 0.25, "maximum": 0.5}, 0.375),
        ({"type": "number", "multipleOf": 0.5, "minimum": 0.25}, 0.5),
        ({"type": ["null", "string"]}, None),
        ({"type": "boolean"}, True),
        ({"enum": ["b", "a"]}, "b"),
        ({"const": None}, None),
        ({"type": "array", "items": {"type": "integer"}}, []),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, [0, 0]),
        ({"prefixItems": [{"const": 1}], "items": {"const": 2}, "minItems": 3}, [1, 2, 2]),
        ({"minLength": 1}, "text"),
        (
            {
                "type": "object",
                "properties": {"b": {"const": 1}, "a": {"const": 2}, "c": {}},
                "required": ["a", "b"],
            },
            {"b": 1, "a": 2},
        ),
        ({"required": ["x"]}, {"x": {}}),
        (
            {
                "allOf": [
                    {"properties": {"a": {"const": 1}}, "required": ["a"]},
                    {"properties": {"b": {"const": 2}}, "required": ["b"]},
                ]
            },
            {"a": 1, "b": 2},
        ),
        ({"anyOf": [{"pattern": "x"}, {"type": "null"}]}, None),
        (LIST, {"value": 0}),
    ],
)
def test_a_sample_is_the_least_that_satisfies(schema: Any, value: Any) -> None:
    assert sample(schema) == value
    assert type(sample(schema)) is type(value)


ENDLESS = {"$defs": LIST["$defs"], "$ref": "#/$defs/node", "required": ["value", "next"]}
NEVER = {"properties": {"x": {"$ref": "#"}}, "required": ["x"]}


def test_of_alternatives_the_one_that_ends_is_taken() -> None:
    assert sample(ENDLESS) == {"value": 0, "next": None}


def test_a_tree_whose_branches_are_required_is_made_without_any() -> None:
    branch = {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
    names = ("left", "right", "middle")
    tree = {"properties": dict.fromkeys(names, branch), "required": list(names)}
    assert sample(tree) == dict.fromkeys(names)


def test_a_sample_without_end_is_refused_before_long() -> None:
    tree = {"properties": {"a": {"$ref": "#"}, "b": {"$ref": "#"}}, "required": ["a", "b"]}
    with pytest.raises(SchemaUnsupported, match="more than 32 levels"):
        sample(tree)
    wide = {"type": "array", "minItems": 200, "items": {"minItems": 200, "type": "array"}}
    with pytest.raises(SchemaUnsupported, match=r"more than 10,000 values"):
        sample(wide)


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (False, "true, not False"),
        (NEVER, "more than 32 levels"),
        ({"type": "string", "pattern": "a+"}, "'pattern' is unknown"),
        ({"type": "thing"}, "type 'thing' is unknown"),
        ({"enum": []}, "enum: expected"),
        ({"$ref": "#/x"}, "nothing is there"),
        ({"$ref": "http://x"}, "only places in the schema"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "lead nowhere"),
        ({"type": "integer", "minimum": 0.2, "maximum": 0.8}, "leave none"),
        ({"type": "integer", "minimum": "x"}, "expected numbers"),
        ({"type": "array", "minItems": 5_000}, "expected 0 to 1,000"),
        ({"type": "array", "minItems": 2, "uniqueItems": True}, "uniqueItems"),
        ({"minProperties": 1}, "minProperties"),
    ],
)
def test_what_can_not_be_made_is_refused(schema: Any, problem: str) -> None:
    with pytest.raises(SchemaUnsupported, match=problem):
        sample(schema)

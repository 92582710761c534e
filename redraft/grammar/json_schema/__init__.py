"""JSON schemas of any draft, rewritten in the keywords that the grammar library enforces."""

from redraft.grammar.json_schema.document import SchemaError, Work
from redraft.grammar.json_schema.enforced import MOST_REASONS, enforced_schema, json_rules, loosened_schema
from redraft.grammar.json_schema.rules import schema_rules

__all__ = ["MOST_REASONS", "SchemaError", "Work", "enforced_schema", "json_rules", "loosened_schema", "schema_rules"]

"""JSON schemas of any draft, rewritten in the keywords that the grammar library enforces."""

from redraft.grammar.json_schema.document import SchemaError
from redraft.grammar.json_schema.enforced import MOST_REASONS, enforced_schema, loosened_schema, parsed_schema
from redraft.grammar.json_schema.rules import schema_rules

__all__ = ["MOST_REASONS", "SchemaError", "enforced_schema", "loosened_schema", "parsed_schema", "schema_rules"]

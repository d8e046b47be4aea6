"""How each operator may be cut: the rule grammar, the table of rules, and rules found by running operators."""

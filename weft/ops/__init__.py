"""How each operator may be cut: the rule grammar, the table, computed rules for views, algorithms."""

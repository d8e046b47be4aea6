"""The nouns: Graph, Layout, Program, with their checks and printers. Imports nothing else of Weft but errors."""

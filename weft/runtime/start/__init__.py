"""Starting values: recorded, replayed or counted, part by part."""

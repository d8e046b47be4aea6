"""Names under which generated code does not find a model's part yet, by the form of the part (`clashes.py`).

An entry that clashes no more fails its test (with those that share a model with it): take it off.
"""

from __future__ import annotations

_LISTS = (
    *("1st", "False", "None", "True", "__getitem__", "__iter__", "__len__", "__private", "_backward"),
    *("_begin_turn", "_borrowed", "_buffered", "_draws", "_end_backward", "_grid", "_hear", "_held_apart"),
    *("_hold", "_hooks", "_index", "_leaves", "_names", "_parts", "_replace", "_stored", "_tables", "a b", "a-b"),
    *("adopt", "after_backward", "ahead", "ahead_back", "anchor", "and", "arrived", "as", "aside", "assert"),
    *("async", "at", "await", "begin_backward", "borrow", "break", "chunks", "class", "comm"),
    *("complete_gradients", "constants", "continue", "def", "del", "device", "draw", "elif", "else", "except"),
    *("finally", "finish", "for", "from", "global", "grad_sync", "grid", "here", "hold", "hold_apart"),
    *("hold_gradients", "holder_of", "if", "import", "in", "inner", "is", "is_weight", "keeps", "kept", "lambda"),
    *("masters", "name_of", "nonlocal", "not", "or", "outputs", "part", "pass", "place", "raise", "read_apart"),
    *("reading", "recompute", "refusal", "rerun_mode", "return", "shown", "sinks", "sized", "sized_move"),
    *("stored", "stored_parts", "stream", "sums", "sync_order", "sync_transfers", "take", "tape", "trained"),
    *("trained_parts", "transport", "try", "unwatched", "update", "used", "while", "with", "yield"),
)

KNOWN: dict[str, tuple[str, ...]] = {
    "module": ("__private",),
    "parameter": ("__private",),
    "buffer": ("__private",),
    "list": (
        *(*_LISTS, "__debug__", "all_gather", "globals", "self", "torch", "reduce_scatter"),
        # only in a model that has other lists of layers after these
        *("add", "mean_part", "range"),
    ),
    "holds a list": (*_LISTS,),
    "nested": ("__private",),
    "in layers": (
        "007",
        "__private",
    ),
}

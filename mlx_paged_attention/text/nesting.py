"""How deeply a client's data may be nested: whoever walks it later, templates too, does so by recursion."""

from typing import Any

MAX_DEPTH = 200


def is_nested_too_deeply(value: Any) -> bool:
    """Whether there are more than ``MAX_DEPTH`` objects and lists inside each other in what JSON says."""
    level = [value]
    for _ in range(MAX_DEPTH):
        children = [item.values() if isinstance(item, dict) else item for item in level if _holds(item)]
        level = [child for several in children for child in several if _holds(child)]
        if not level:
            return False
    return True


def _holds(value: Any) -> bool:
    return isinstance(value, (dict, list))

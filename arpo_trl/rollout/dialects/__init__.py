"""The dialects; [`~arpo_trl.rollout.dialect.make_dialect`] chooses among them."""

from .native import NativeDialect, can_call_tools
from .plain import PlainDialect
from .tagged import TaggedDialect


__all__ = ["NativeDialect", "PlainDialect", "TaggedDialect", "can_call_tools"]

"""posttune-sympy: answers compared as mathematics. Importing it imports neither SymPy nor torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttune_sympy.options import MathOptions
    from posttune_sympy.reward import MathRewardFunction

__all__ = ["MathOptions", "MathRewardFunction"]


def __getattr__(name: str) -> Any:
    # The workers import this package too; they need nothing of the reward.
    if name == "MathRewardFunction":
        from posttune_sympy.reward import MathRewardFunction

        return MathRewardFunction
    if name == "MathOptions":
        from posttune_sympy.options import MathOptions

        return MathOptions
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

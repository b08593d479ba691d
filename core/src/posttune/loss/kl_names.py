"""Names of the KL estimators, and which of them may be a loss. Importing this module imports no torch."""

from __future__ import annotations

from posttune.errors import ConfigError, Problem, UserError

ESTIMATORS = ("k1", "k2", "k3", "abs")
ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}  # the names that verl's users write


def canonical(name: str) -> str:
    """The estimator's name here, its "+" kept. Raises UserError for an unknown one."""
    base, plus = (name[:-1], "+") if name.endswith("+") else (name, "")
    base = ALIASES.get(base, base)
    if base not in ESTIMATORS:
        known = ", ".join(f"{each}, {each}+" for each in ESTIMATORS)
        raise UserError(f"no KL estimator {name!r}", fix=f"choose one of {known}")
    return base + plus


def check_loss_estimator(name: str, path: str = "kl.estimator") -> None:
    """Refuse k1 as a loss. Raises ConfigError; in the reward every estimator will do."""
    if canonical(name) != "k1":
        return
    message = (
        "k1 is no regulariser in the loss: its gradient is that of log pi whatever the distance, and "
        "0 in expectation; use k3, k2 or k1+ (the value of k1, the gradient of k2), or where: reward"
    )
    raise ConfigError([Problem(path, message, suggestion="k3")])

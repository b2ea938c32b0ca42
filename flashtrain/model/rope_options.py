"""What rotary positions may be: the keys of model.rope and eval.rope, their contradictions, and what a null stands for.

The formulas are in rope.py.
"""

import math
from dataclasses import dataclass, fields, replace

# Each type, and the keys that it takes beside `type` and `theta`.
TYPES = {
    "default": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic": ("factor", "original_length"),
    "yarn": ("factor", "original_length", "beta_fast", "beta_slow", "truncate", "attention_factor"),
    "llama3": ("factor", "original_length", "low_freq_factor", "high_freq_factor"),
}
NEEDED = {
    "factor": "how many times longer the context becomes",
    "original_length": "the tokens in a row before scaling",
}
PUBLISHED = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""What a null stands for where the type takes the key."""


def attention_factor(factor: float, scale: float = 1.0) -> float:
    """YaRN's factor of cosines and sines for a context `factor` >= 1 times as long; `scale` is DeepSeek's mscale."""
    return 0.1 * scale * math.log(factor) + 1


@dataclass
class RopeOptions:
    """Rotary frequencies and their scaling to a longer context. None where the type does not take the key."""

    type: str | None = None  # a key of TYPES; None: that of the run which is evaluated or gave the weights
    theta: float | None = None  # base of the frequencies
    factor: float | None = None  # how many times longer the context becomes
    original_length: int | None = None  # tokens in a row that the model was trained with before scaling
    beta_fast: float | None = None  # frequencies with more turns than this in original_length stay as they are
    beta_slow: float | None = None  # those with fewer turns than this are divided by the factor
    truncate: bool | None = None  # whether the ramp between these two begins and ends at whole frequencies
    attention_factor: float | None = None  # of cosines and sines; None: 0.1 ln factor + 1
    low_freq_factor: float | None = None  # waves longer than original_length / this are divided by the factor
    high_freq_factor: float | None = None  # waves shorter than original_length / this stay as they are

    @property
    def follows_length(self) -> bool:
        """Whether the frequencies depend on how many tokens there are, so that no length tells of a shorter one."""
        return self.type == "dynamic"

    def validate(self, key: str, head_dim: int) -> list[str]:
        """Return one sentence for each contradiction or impossible value; `key` is where these options stand."""
        if self.type not in TYPES:
            return [f"{key}.type={self.type} is not one of {', '.join(TYPES)}"]
        problems = []
        if self.theta is None:
            problems.append(f"{key}.theta has no value; it is 10000 in most models")
        for name, value in self._given().items():
            if name not in ("type", "theta", *TYPES[self.type]):
                problems.append(f"{key}.{name}={value} is nothing that {key}.type={self.type} takes; leave it out")
            elif name not in ("type", "truncate") and not (least := int(name == "theta")) < value < math.inf:
                problems.append(f"{key}.{name}={value} must be above {least} and finite")
        problems += [
            f"{key}.type={self.type} needs {key}.{name}, {meaning}"
            for name, meaning in NEEDED.items()
            if name in TYPES[self.type] and getattr(self, name) is None
        ]
        if problems:
            return problems
        if self.factor is not None and self.factor < 1:
            problems.append(f"{key}.factor={self.factor} must be at least 1; it lengthens the context")
        if self.type in ("ntk", "dynamic") and head_dim <= 2:
            problems.append(f"{key}.type={self.type} needs a head dimension above 2; name another type")
        resolved = self.resolve()
        for low, high in (("beta_slow", "beta_fast"), ("low_freq_factor", "high_freq_factor")):
            if low in TYPES[self.type] and not getattr(resolved, low) < getattr(resolved, high):
                values = f"{key}.{low}={getattr(resolved, low)} must be below {key}.{high}={getattr(resolved, high)}"
                problems.append(values)
        return problems

    def resolve(self) -> "RopeOptions":
        """Return the options with each None that the type takes written out."""
        published = dict(PUBLISHED)
        if self.type == "yarn":
            published["attention_factor"] = attention_factor(self.factor)
        taken = {name: value for name, value in published.items() if name in TYPES.get(self.type, ())}
        return replace(self, **{name: value for name, value in taken.items() if getattr(self, name) is None})

    def in_place_of(self, trained: "RopeOptions", training_length: int) -> "RopeOptions":
        """Return what these options come to for the weights of a model that was trained with `trained`.

        A type of None is `trained` itself. Otherwise a theta of None is its theta, and an original_length of None
        is its original_length, or where it has none the tokens in a row of its training.
        """
        if self.type is None:
            return trained
        original_length = self.original_length
        if original_length is None and "original_length" in TYPES.get(self.type, ()):
            original_length = trained.original_length or training_length
        theta = trained.theta if self.theta is None else self.theta
        return replace(self, theta=theta, original_length=original_length)

    def describe(self) -> str:
        """The type and every key that it takes, for people."""
        return f"{self.type} RoPE (" + ", ".join(f"{k} {v}" for k, v in self._given().items() if k != "type") + ")"

    def _given(self) -> dict[str, object]:
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in named.items() if value is not None}

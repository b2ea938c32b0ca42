"""One case, measured with every variant beside the same reference."""

from collections.abc import Sequence
from dataclasses import dataclass

from flashtrain.accuracy.cases import Case
from flashtrain.kernels.attention import Deviation, Reference, attention, refusal


@dataclass(frozen=True)
class Outcome:
    """What came of a case with a variant: `refused` or `raised` says why nothing was measured, else deviations."""

    case: Case
    variant: str
    refused: str | None
    raised: str | None
    deviations: dict[str, Deviation]
    """Those of out, lse (of a variant that returns one), dq, dk and dv."""

    @property
    def passes(self) -> bool:
        """Whether all was measured and is within the rule."""
        return bool(self.deviations) and all(deviation.passes for deviation in self.deviations.values())

    @property
    def fails(self) -> bool:
        return self.refused is None and not self.passes

    @property
    def ratio(self) -> float:
        """The largest error as a part of what is allowed."""
        return max(deviation.ratio for deviation in self.deviations.values())


def measure(case: Case, variants: Sequence[str], device: str) -> list[Outcome]:
    """The outcome of the case with each variant; what a variant raises is its outcome, and ends nothing."""
    intervals = case.intervals(device)
    reference = Reference.of(case.inputs(device), intervals, softcap=case.softcap, lse_gradient=case.lse_gradient)
    outcomes = []
    for variant in variants:
        returns_lse = case.lse_gradient or refusal(variant, case.spec(intervals, device, needs_lse=True)) is None
        refused = refusal(variant, case.spec(intervals, device, needs_lse=returns_lse))
        raised, deviations = None, {}
        if refused is None:
            try:
                deviations = reference.deviations(
                    lambda q, k, v, variant=variant, returns_lse=returns_lse: attention(
                        q, k, v, intervals, variant=variant, softcap=case.softcap, return_lse=returns_lse
                    )
                )
            except Exception as error:  # whatever it is, the other variants are still to be measured
                raised = " ".join([type(error).__name__ + ":", *str(error).split("\n", 1)[0].split()])
        outcomes.append(Outcome(case, variant, refused, raised, deviations))
    return outcomes

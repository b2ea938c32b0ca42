"""Options of an evaluation that tests start from."""

from flashtrain.evaluation.options import EvalOptions

OPTIONS = EvalOptions(
    lengths=[128, 256],
    targets_per_anchor=64,
    max_documents=None,
    max_anchors=10,
    window=None,
    stride=None,
    prefix="document",
    key_tokens=None,
    batch_tokens=4096,
    prefill_tokens=None,
)

"""The perplexity curves of one model on one corpus: choose windows, score them, reduce, say what was done.

One forward over the first tokens of the documents gives perplexity at every length and loss by position, or one
for each length where predictions depend on how many tokens follow; perplexity against context scores the same
targets once per context length; strided windows score whole documents. All are reductions of one table of targets.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console

from flashtrain.evaluation.cost import Cost, Metered
from flashtrain.evaluation.journal import Journal
from flashtrain.evaluation.key_tokens import (
    Choice,
    KeyScore,
    KeyTokens,
    choose_keys,
    read_keys,
    score_keys,
    short_context,
)
from flashtrain.evaluation.metrics import (
    Score,
    loss_by_position,
    ppl_at_length,
    ppl_at_length_macro,
    ppl_strided,
    ppl_vs_context,
)
from flashtrain.evaluation.options import SELF, EvalOptions
from flashtrain.evaluation.progress import tokens_bar
from flashtrain.evaluation.scoring import Documents, NllFunction, score
from flashtrain.evaluation.table import TargetTable
from flashtrain.evaluation.windows import (
    Windows,
    anchors_every,
    documents_of,
    evenly_spaced,
    opening_windows,
    reached_lengths,
    short_windows,
    strided_windows,
    tokens_fed,
)

CountWords = Callable[[np.ndarray], int]  # of the text of these token ids, (n,)


@dataclass(frozen=True)
class Conditions:
    """What the figures depend on beside the options; the caller knows, the reports repeat it."""

    model: str
    weights: str  # digest of the checkpoint
    step: int
    training_length: int
    positions: str
    attention: str
    dtype: str
    device: str
    precision: str  # of products and of weights, on which device, in words
    corpus: str
    corpus_fingerprint: str
    text_fingerprint: str
    tokenizer: str
    tokenizer_fingerprint: str
    prefix_id: int


@dataclass(frozen=True)
class Coverage:
    """How much of the validation documents was scored."""

    documents: int
    documents_long_enough: int
    documents_in_corpus: int
    longest_document: int
    anchors: int
    anchors_in_corpus: int
    whole_documents: int
    whole_documents_in_corpus: int
    too_short: int


@dataclass(frozen=True)
class Strided:
    """Whole documents, scored in windows of `eval.window` and `eval.stride`."""

    score: Score
    words: int | None  # in their text, as lm-eval counts them; None where the first token was not scored


@dataclass(frozen=True)
class PerplexityCurves:
    """All results of one evaluation; no document has as many tokens as the lengths in `unreached`."""

    at_length: dict[int, Score]
    at_length_macro: dict[int, float]
    vs_context: dict[int, Score]
    """Empty without anchors."""
    by_position: dict[tuple[int, int], Score]
    strided: Strided | None
    key_tokens: KeyScore | None
    unreached: tuple[int, ...]
    coverage: Coverage
    options: EvalOptions
    conditions: Conditions
    cost: Cost = field(compare=False)  # the same figures may take more or less

    @property
    def longest(self) -> int:
        """The longest length that was scored: documents shorter than this were left out at every length."""
        return max(self.at_length)

    def beyond_training(self, length: int) -> bool:
        """Whether `length` tokens are more than the model ever saw in a row while training."""
        return length > self.conditions.training_length


@dataclass(frozen=True)
class Evaluation:
    """The table that was scored, and what it comes to."""

    table: TargetTable
    curves: PerplexityCurves
    keys: KeyTokens | None  # those that this model chose


@dataclass(frozen=True)
class Plan:
    """What an evaluation scores."""

    lengths: list[int]
    whole: np.ndarray
    """(documents,) int64: those that are scored whole."""
    windows: list[Windows]
    coverage: Coverage


def plan_windows(documents: Documents, options: EvalOptions, follows_length: bool) -> Plan:
    """Choose documents, anchors and windows.

    Documents shorter than the longest length that any reaches are left out of the openings at every length, so that
    all lengths are about the same documents. Raises UserError when no document has the shortest length.

    follows_length: the first L tokens have a forward of their own for every L, as dynamic rotary scaling wants it;
        loss by position is then of the longest.
    """
    num_tokens = documents.num_tokens
    lengths = reached_lengths(num_tokens, options.lengths)
    longest = lengths[-1]
    long_enough = documents_of(num_tokens, longest)
    opened = long_enough[evenly_spaced(len(long_enough), options.max_documents)]
    all_anchors = anchors_every(num_tokens, longest)
    anchors = all_anchors.pick(options.max_anchors)
    windows = [opening_windows(opened, length) for length in (lengths if follows_length else [longest])]
    if len(anchors):
        windows += [anchors.windows(length, options.targets_per_anchor) for length in lengths]
    all_whole = documents_of(num_tokens, 2)
    whole = all_whole[evenly_spaced(len(all_whole), options.max_documents if options.window else 0)]
    if options.window:
        windows += strided_windows(whole, num_tokens, options.window, options.stride)
    if options.key_tokens == SELF:
        windows.append(short_windows(opened, longest, *short_context(longest)))
    coverage = Coverage(
        documents=len(opened),
        documents_long_enough=len(long_enough),
        documents_in_corpus=len(num_tokens),
        longest_document=int(num_tokens.max()),
        anchors=len(anchors),
        anchors_in_corpus=len(all_anchors),
        whole_documents=len(whole),
        whole_documents_in_corpus=len(all_whole),
        too_short=len(num_tokens) - len(all_whole),
    )
    return Plan(lengths, whole, windows, coverage)


def evaluate_perplexity(
    nll: NllFunction,
    documents: Documents,
    *,
    bytes_per_token: np.ndarray,
    count_words: CountWords,
    options: EvalOptions,
    conditions: Conditions,
    follows_length: bool,
    console: Console,
    journal: Journal | None = None,
) -> Evaluation:
    """Score the validation documents and reduce the table; a progress bar runs on `console` meanwhile.

    Several ranks score together, and each returns the same. The model behind `nll` is in evaluation mode and good for
    the lengths (EvalOptions.validate). Raises UserError as `plan_windows` and `read_keys`. follows_length: as there.
    journal: as `score` takes it.
    """
    keys = _given_keys(options, conditions)
    metered = Metered(nll)
    plan = plan_windows(documents, options, follows_length)
    with tokens_bar(console) as progress:
        task = progress.add_task("perplexity", total=tokens_fed(plan.windows))
        table = score(
            metered,
            documents,
            plan.windows,
            bytes_per_token=bytes_per_token,
            batch_tokens=options.batch_tokens,
            advance=lambda tokens: progress.advance(task, tokens),
            journal=journal,
        )
    chosen_keys = None
    if options.key_tokens == SELF:
        keys = chosen_keys = choose_keys(table, _own_choice(conditions, plan.lengths[-1]))
    curves = PerplexityCurves(
        at_length=ppl_at_length(table, plan.lengths),
        at_length_macro=ppl_at_length_macro(table, plan.lengths),
        vs_context=ppl_vs_context(table),
        by_position=loss_by_position(table),
        strided=Strided(ppl_strided(table), _words(documents, plan.whole, count_words)) if options.window else None,
        key_tokens=score_keys(table, keys) if keys else None,
        unreached=tuple(length for length in options.lengths if length not in plan.lengths),
        coverage=plan.coverage,
        options=options,
        conditions=conditions,
        cost=metered.cost(),
    )
    return Evaluation(table, curves, chosen_keys)


def _given_keys(options: EvalOptions, conditions: Conditions) -> KeyTokens | None:
    if options.key_tokens in (None, SELF):
        return None
    return read_keys(Path(options.key_tokens), conditions.text_fingerprint)


def _own_choice(conditions: Conditions, longest: int) -> Choice:
    evaluator = f"{conditions.model} at step {conditions.step:,} ({conditions.weights[:8]})"
    return Choice(evaluator, conditions.text_fingerprint, longest, short_context(longest)[0])


def _words(documents: Documents, whole: np.ndarray, count_words: CountWords) -> int | None:
    """Words of the documents' text, None where their first tokens are not scored."""
    if documents.prefix == "none":
        return None
    sizes = documents.num_tokens[whole].tolist()
    return sum(count_words(documents.tokens(index, 1, size)) for index, size in zip(whole, sizes, strict=True))

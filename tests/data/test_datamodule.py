"""The batches that a real Trainer gets: whole steps, from the right one on, and the same validation rows."""

import warnings

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from flashtrain.data.corpus import Corpus, TokenStream
from flashtrain.data.datamodule import NOT_SCORED, StepDataModule
from flashtrain.data.order import rows_for_step
from flashtrain.errors import UserError
from flashtrain.model.head import IGNORED

S = 8


def stream(num_tokens):
    return TokenStream(np.arange(num_tokens, dtype=np.uint16), np.array([0, num_tokens]), num_tokens)


def corpus(train=30 * S + 1, validation=10 * S + 1):
    return Corpus("0123", "0123", "made-up tokens", "none", 0, 0, None, stream(train), stream(validation))


def data_module(**changes):
    settings = dict(
        corpus=corpus(),
        sequence_length=S,
        rows_per_step=4,
        num_steps=12,
        seed=1,
        validation_rows=5,
        validation_batch_rows=2,
        isolate_documents=False,
        num_workers=0,
    )
    return StepDataModule(**settings | changes)


class Recorder(L.LightningModule):
    """Takes an optimizer step for each batch and keeps the batches."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.train_batches, self.val_batches = [], []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def training_step(self, batch, batch_idx):
        self.train_batches.append(batch)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.weight * 1.0)
        optimizer.step()

    def validation_step(self, batch, batch_idx):
        self.val_batches.append(batch)


def fit(data, folder, ckpt_path=None, callbacks=()):
    module = Recorder()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        check_val_every_n_epoch=None,
        val_check_interval=6,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=bool(callbacks),
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module, trainer


def rows_in(batch):
    """The row that each input is, read off the tokens, which count up."""
    return (batch["inputs"][:, 0] // S).tolist()


def test_a_batch_is_a_whole_step_of_inputs_and_next_tokens(tmp_path):
    module, trainer = fit(data_module(), tmp_path)
    assert trainer.global_step == len(module.train_batches) == 12
    for step, batch in enumerate(module.train_batches):
        expected = rows_for_step(step, seed=1, rows_per_step=4, num_rows=30).tolist()
        assert rows_in(batch) == batch["rows"].tolist() == expected
        assert batch["inputs"].shape == batch["labels"].shape == (4, S)
        assert batch["inputs"].dtype == batch["labels"].dtype == torch.int64
        assert batch["inputs"].is_contiguous() and batch["labels"].is_contiguous()
        assert torch.equal(batch["labels"], batch["inputs"] + 1)


def test_validation_rows_are_spread_and_the_same_each_time(tmp_path):
    module, _ = fit(data_module(), tmp_path)
    rounds = [rows_in(batch) for batch in module.val_batches]
    assert rounds == 2 * [[0, 2], [4, 6], [8]]


def test_validation_takes_no_more_rows_than_there_are():
    assert data_module(validation_rows=1000).validation_rows.tolist() == list(range(10))


def test_start_step_gives_the_rest_of_the_run(tmp_path):
    data = data_module()
    whole, _ = fit(data, tmp_path)
    data.start_step = 5
    rest, _ = fit(data, tmp_path)
    assert [rows_in(b) for b in rest.train_batches] == [rows_in(b) for b in whole.train_batches[5:]]


@pytest.mark.parametrize("stop", [4, 6, 11], ids="stop-after-{}".format)
def test_resumed_run_sees_the_batches_of_a_run_in_one_go(tmp_path, stop):
    """After six steps there is a validation, too, and the eighth step straddles two epochs of 30 rows."""
    whole, _ = fit(data_module(), tmp_path)
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=stop, save_top_k=-1)
    fit(data_module(), tmp_path, callbacks=[save])
    data = data_module()
    data.start_step = stop
    rest, trainer = fit(data, tmp_path, tmp_path / f"step={stop}.ckpt")
    assert trainer.global_step == 12
    assert [rows_in(b) for b in rest.train_batches] == [rows_in(b) for b in whole.train_batches[stop:]]


class TwoRanks:
    world_size = 2
    strategy = L.pytorch.strategies.SingleDeviceStrategy(device="cpu")

    def __init__(self, global_rank):
        self.global_rank = global_rank


def test_ranks_split_steps_and_validation_rows():
    loaders = []
    for rank in range(2):
        data = data_module()
        data.trainer = TwoRanks(rank)
        loaders.append((data.train_dataloader(), data.val_dataloader()))
    (train_0, val_0), (train_1, val_1) = loaders
    assert len(train_0) == len(train_1) == 12
    for step, (first, second) in enumerate(zip(train_0, train_1, strict=True)):
        whole = rows_for_step(step, seed=1, rows_per_step=4, num_rows=30)
        assert rows_in(first) + rows_in(second) == whole.tolist()
    validated = [row for loader in (val_0, val_1) for batch in loader for row in rows_in(batch)]
    assert sorted(validated) == [0, 2, 4, 6, 8]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"train": 8}, "the train documents of made-up tokens have 8 tokens together and a row takes 9"),
        ({"validation": 8}, "the validation documents of made-up tokens have 8 tokens"),
    ],
    ids=["train", "validation"],
)
def test_less_than_a_row_is_refused(sizes, message):
    with pytest.raises(UserError, match=message):
        data_module(corpus=corpus(**sizes))


def test_exactly_a_row_is_enough(tmp_path):
    module, _ = fit(data_module(corpus=corpus(S + 1, S + 1), rows_per_step=2, num_steps=3), tmp_path)
    assert [rows_in(batch) for batch in module.train_batches] == 3 * [[0, 0]]


# Documents apart

PREFIX = 999
DOCUMENTS = [3, 21, 8, 2, 2, 40, 9]  # tokens each: some end within a row, some at its edge, some span rows


def stream_of_documents(lengths):
    """Tokens that count up, but for the prefix token at the start of each document."""
    offsets = np.cumsum([0, *lengths])
    tokens = np.arange(offsets[-1], dtype=np.uint16)
    tokens[offsets[:-1]] = PREFIX
    return TokenStream(tokens, offsets, 0)


def apart(isolate_documents=True):
    made = Corpus("0123", "0123", "made-up tokens", "none", 0, 0, None, *2 * [stream_of_documents(DOCUMENTS)])
    data = data_module(
        corpus=made, validation_rows=1000, rows_per_step=5, num_steps=2, isolate_documents=isolate_documents
    )
    data.trainer = TwoRanks(0)
    data.trainer.world_size = 1
    return data


def rows_of(loader):
    """All rows of a loader's batches, one after another."""
    batches = list(loader)
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def test_documents_are_counted_from_the_start_of_their_row():
    for batch in apart().val_dataloader():
        documents, starts = batch["documents"], batch["inputs"] == PREFIX
        assert documents.dtype == torch.int32 and documents.is_contiguous()
        assert (documents[:, 0] == 0).all()
        assert torch.equal(documents.diff(dim=1), starts[:, 1:].int())


def test_labels_never_cross_and_every_other_token_is_a_target_once():
    rows = rows_of(apart().val_dataloader())
    scored = rows["labels"] != NOT_SCORED
    stream = stream_of_documents(DOCUMENTS)
    targets = stream.tokens[1 : stream.num_rows(S) * S + 1]
    assert rows["labels"][scored].tolist() == targets[targets != PREFIX].tolist()
    assert ((~scored).sum(), scored.numel()) == ((targets == PREFIX).sum(), len(targets))


def test_training_and_validation_rows_are_made_alike():
    data = apart()
    validation, training = rows_of(data.val_dataloader()), rows_of(data.train_dataloader())
    order = np.concatenate([rows_for_step(step, seed=1, rows_per_step=5, num_rows=10) for step in range(2)])
    for name in ("inputs", "labels", "documents"):
        assert torch.equal(training[name], validation[name][order]), name


def test_with_the_switch_off_there_are_no_documents_and_all_labels():
    on, off = (rows_of(apart(switch).val_dataloader()) for switch in (True, False))
    assert set(off) == {"inputs", "labels", "rows"}
    assert torch.equal(on["inputs"], off["inputs"])
    assert torch.equal(off["labels"].flatten()[:-1], off["inputs"].flatten()[1:])


def test_the_label_that_is_not_scored_is_the_one_that_the_loss_leaves_out():
    assert NOT_SCORED == IGNORED


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_batches_are_pinned_on_a_gpu():
    data = data_module()
    data.trainer = TwoRanks(0)
    data.trainer.strategy = L.pytorch.strategies.SingleDeviceStrategy(device="cuda:0")
    assert next(iter(data.train_dataloader()))["inputs"].is_pinned()

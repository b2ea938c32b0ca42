import torch

from flashtrain.evaluation.cost import Cost, Metered


def test_time_is_that_of_the_model_and_tokens_are_what_it_was_fed():
    now = iter([10.0, 10.5, 100.0, 102.0])
    metered = Metered(lambda inputs, targets: targets * 2.0, clock=lambda: next(now))
    for rows in (3, 1):
        values = metered(torch.zeros(rows, 8, dtype=torch.long), torch.ones(rows, 8, dtype=torch.long))
        assert torch.equal(values, torch.full((rows, 8), 2.0))
    assert metered.cost() == Cost(tokens=32, seconds=2.5, peak_memory_gib=None)


def test_a_cost_is_one_sentence():
    assert str(Cost(3000, 2.0, None)) == "3,000 tokens went through the model in 2.0 s, 1,500 tokens/s."
    assert str(Cost(3000, 2.0, 1.25)).endswith("1,500 tokens/s, peak memory 1.25 GiB.")

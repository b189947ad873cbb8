"""Check of exercise 01.1: `TokenBatches.__next__`, one global order of samples for any number of ranks."""

from __future__ import annotations

import torch

from course_lib.single_gpu.data import TokenBatches


def check() -> None:
    """Assert windows and targets, three ranks against one, epochs, a restored run, and batches larger than an epoch."""
    numbers = torch.arange(1001, dtype=torch.int32)  # 100 windows of 10 tokens: each token tells its position
    inputs, targets = next(TokenBatches(numbers, batch=4, seq=10))
    assert inputs.shape == targets.shape == (4, 10) and inputs.dtype == targets.dtype == torch.int64, (
        "inputs and targets should be [4, 10], int64"
    )
    assert (targets == inputs + 1).all(), "the target of a token is the token after it"
    assert (inputs[:, 0] % 10 == 0).all(), "a window starts at a multiple of seq"

    one = TokenBatches(numbers, batch=6, seq=10)
    three = [TokenBatches(numbers, batch=2, seq=10, rank=r, world_size=3) for r in range(3)]
    check_epochs(one, three)
    other = TokenBatches(numbers, batch=3, seq=10)
    other.load_state_dict(three[1].state_dict())
    assert torch.equal(next(other)[0], next(one)[0][:3]), (
        "a run restored on another number of ranks should go on with the next sample: count position in samples of all "
        "ranks"
    )
    few = TokenBatches(numbers[:31], batch=8, seq=10)  # 3 windows
    expected = [10 * few.order(n // 3)[n % 3] for n in range(16)]
    first, second = next(few)[0], next(few)[0]
    assert torch.cat([first, second])[:, 0].tolist() == expected, (
        "two batches of 8 from 3 windows: a batch may go through several epochs, and the second leaves the first alone"
    )


def check_epochs(one: TokenBatches, three: list[TokenBatches]) -> None:
    """Assert that three ranks see what one rank sees, and that each of three epochs shows each of 100 windows once."""
    seen = []
    for step in range(50):  # three epochs of 100 windows, which 6 does not divide
        where = f"step {step}, samples {6 * step} to {6 * step + 5}, in epochs of 100"
        try:
            joined, alone = torch.cat([next(rank)[0] for rank in three]), next(one)[0]
        except IndexError as error:
            raise AssertionError(f"{where}: {error}. A sample has an epoch, and a place in that epoch") from None
        ends = 6 * step // 100 != (6 * step + 5) // 100
        advice = (
            "The epoch ends inside this batch: ask for the epoch of each sample"
            if ends
            else "Rank r takes the r-th block of 2 of these samples, and position moves on by all 6"
        )
        assert torch.equal(alone, joined), (
            f"{where}: 3 ranks with batch 2 should see what 1 rank with batch 6 sees. {advice}"
        )
        seen += joined[:, 0].tolist()
    epochs = [seen[:100], seen[100:200], seen[200:]]
    for epoch in epochs:
        assert len(set(epoch)) == 100, (
            f"an epoch shows {len(set(epoch))} of its 100 windows: each should occur once, and the next epoch should "
            "begin in the middle of a batch, without a gap"
        )
    assert epochs[0] != epochs[1] and epochs[0] != sorted(epochs[0]), (
        "each epoch needs its own shuffle: use order(epoch)"
    )

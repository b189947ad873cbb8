"""Check of exercise 09.1: `split_layers` deals out layers, embedding and head, the larger stages in the middle."""

from __future__ import annotations

from course_lib.pipeline import stages


def check() -> None:
    """Assert the cuts of every small number of layers and of 126 layers, and the error."""
    sizes = [len(part) for part in stages.split_layers(126, 16)]
    assert sizes == [7] + [8] * 14 + [7], (
        f"126 layers in 16 stages should be 7, 8, …, 8, 7, since embedding and head count as a layer each: {sizes}"
    )
    for layers in range(1, 20):
        for count in range(1, layers + 3):
            check_cut(layers, count)
    for layers, count in ((2, 5), (3, 0), (3, -1)):
        try:
            stages.split_layers(layers, count)
        except ValueError as error:
            assert str(count) in str(error), "the error should name the number of stages"
            continue
        except ArithmeticError as error:
            instead = f"{type(error).__name__}: {error}"
        else:
            instead = "a result"
        raise AssertionError(
            f"{layers} layers, an embedding and a head: {count} stages should raise ValueError, and give {instead}"
        )


def check_cut(layers: int, count: int) -> None:
    """Assert that all layers are there, in order and as evenly as possible."""
    try:
        parts = stages.split_layers(layers, count)
    except ValueError as error:
        raise AssertionError(f"{layers} layers, an embedding and a head fill {count} stages: {error}") from None
    assert len(parts) == count, f"{layers} layers, {count} stages: {len(parts)} parts"
    assert [i for part in parts for i in part] == list(range(layers)), (
        f"{layers} layers, {count} stages: each layer should be there once, in order: {parts}"
    )
    sizes = [len(part) for part in parts]
    sizes[0] += 1
    sizes[-1] += 1
    uneven = f"{layers} layers, {count} stages: with embedding and head they have {sizes}"
    assert max(sizes) - min(sizes) <= 1, uneven
    left = (layers + 2) % count
    assert count == 1 or sizes[0] == min(sizes), f"{uneven}; the first takes none of the remainder"
    assert left > count - 2 or sizes[-1] == min(sizes), f"{uneven}; the remainder goes to the middle"
